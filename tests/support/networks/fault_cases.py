"""What the tables of broken networks are written in: a case, and the parts that the networks are made of."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES = 10
M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class Subject:
    """A model, a batch, the targets that its user would have, and the loss if it is not cross entropy."""

    model: nn.Module
    example: Any
    targets: Any = None
    loss: Callable[[Tensor, Tensor], Tensor] | None = None


@dataclass(frozen=True)
class Broken:
    """A network with one fault.

    Attributes:
        name: what is broken, as a slug
        make: builds the network, with the fault or mended
        places: modules of which one has to be named, or one inside it; 'input' and 'output' stand for the network's
            own; empty if the network as a whole is at fault
        cause: what a good report would say
        words: the cause is named if one of these is in the report, in any case of letters
    """

    name: str
    make: Callable[[bool], Subject]
    places: tuple[str, ...]
    cause: str
    words: tuple[str, ...]

    def build(self, *, mended: bool = False) -> Subject:
        """Build the network; two calls give the same weights and the same batch."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.make(not mended)

    def names_place(self, text: str) -> bool:
        """Whether a text names one of the places as a whole name, or a module inside it."""
        return not self.places or any(
            re.search(rf"(?<![\w.]){re.escape(place)}(?![A-Za-z0-9_])", text) for place in self.places
        )

    def names_cause(self, text: str) -> bool:
        """Whether a text has one of the words for the cause."""
        return any(word in text.lower() for word in self.words)


def case(
    table: list[Broken], name: str, places: tuple[str, ...], cause: str, *words: str
) -> Callable[[Callable[[bool], Subject]], Callable[[bool], Subject]]:
    """Decorate the function that builds a case, and add the case to a table."""

    def add(make: Callable[[bool], Subject]) -> Callable[[bool], Subject]:
        table.append(Broken(name, make, places, cause, words))
        return make

    return add


def images(size: int = 16, batch: int = 16) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 3, size, size), torch.arange(batch) % CLASSES


def features(width: int = 32, batch: int = 16) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, width), torch.arange(batch) % CLASSES


def he_(model: M, gain: float = 1.0) -> M:
    """Give every weight layer He's standard deviation times `gain`, and zero biases."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            with torch.no_grad():
                module.weight.mul_(gain)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return model


@torch.no_grad()
def times_(module: nn.Module, factor: float) -> None:
    """Multiply the module's own weight."""
    module.get_parameter("weight").mul_(factor)


class Plain(nn.Module):
    """Layers one after the other, and a classifier."""

    def __init__(self, layers: list[nn.Module], head: nn.Module) -> None:
        super().__init__()
        self.layers, self.head = nn.Sequential(*layers), head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x))


def mlp(depth: int, width: int = 64, inputs: int = 32, activation: type[nn.Module] = nn.ReLU) -> Plain:
    """Layers 0, 2, 4, … are linear, layers 1, 3, 5, … activations; the classifier is the last of `depth`."""
    layers: list[nn.Module] = []
    for i in range(depth - 1):
        layers += [nn.Linear(width if i else inputs, width), activation()]
    return Plain(layers, nn.Linear(width, CLASSES))


def cnn(norm: bool = False) -> Plain:
    """Ten 3×3 convolutions with ReLU in the manner of VGG; convolution i is `layers.i.0`."""
    layers: list[nn.Module] = []
    for i in range(10):
        conv = nn.Conv2d(24 if i else 3, 24, 3, padding=1)
        layers.append(nn.Sequential(conv, *([nn.BatchNorm2d(24)] if norm else []), nn.ReLU()))
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, CLASSES))
    return he_(Plain(layers, head))


class ResidualBlock(nn.Module):
    """x + conv2(relu(norm2(conv1(relu(norm1(x)))))), with its skip or without."""

    def __init__(self, width: int, norm: type[nn.Module] = nn.BatchNorm2d) -> None:
        super().__init__()
        self.norm1, self.norm2 = norm(width), norm(width)
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.skip = True

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv1(F.relu(self.norm1(x)))
        out = self.conv2(F.relu(self.norm2(out)))
        return x + out if self.skip else out


class ResNet(nn.Module):
    """A stem, pre-activation blocks of one width, pooling and a classifier."""

    def __init__(self, depth: int = 12, width: int = 16, norm: type[nn.Module] = nn.BatchNorm2d) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(ResidualBlock(width, norm) for _ in range(depth))
        self.norm, self.head = norm(width), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(F.relu(self.norm(x)).mean((2, 3)))


class NoNorm(nn.Identity):
    """What stands where a normalizer was taken out."""


def scaled_resnet(depth: int = 12) -> ResNet:
    """Without normalizers, every branch divided by the root of the depth, so that the signal is kept."""
    model = ResNet(depth, norm=NoNorm)
    he_(model)
    for block in model.blocks:
        times_(block.conv2, depth**-0.5)
    nn.init.xavier_normal_(model.head.weight)
    return model


class Dense(nn.Module):
    """cat(x, relu(conv(x)))"""

    def __init__(self, width: int, growth: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, growth, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, F.relu(self.conv(x))], 1)


def densenet() -> Plain:
    """A stem, `layers.0`, eight dense layers and a classifier."""
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(80, CLASSES))
    return he_(Plain([nn.Conv2d(3, 16, 3, padding=1), *(Dense(16 + 8 * i, 8) for i in range(8))], head))


class Encoder(nn.Module):
    """A Transformer encoder of torch's own layers over 8 tokens of width 32, and a classifier on their mean."""

    def __init__(self, depth: int, norm_first: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=norm_first)
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(32) if norm_first else nn.Identity()
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).mean(1))
