"""Thirty more networks that look unusual and train, for counting false alarms; none of them is in the earlier sets.

A slow test shows that the loss of each falls in 60 steps of Adam. `INTENDED` names what is frozen on purpose: a report
may note it, and a report that calls it a fault is a false alarm.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fault_cases import CLASSES, Plain, Subject, he_, images
from fourth_healthy_parts import (
    Adapted,
    Averaged,
    Equilibrium,
    Flow,
    Gated,
    GeneratorStep,
    Hypernetwork,
    Isomorphism,
    Local,
    MixtureDensity,
    RandomDepth,
    Reader,
    Recomputed,
    Reservoir,
    RungeKutta,
    TiedAutoencoder,
    TopTwo,
    Variational,
    ZeroGamma,
    dense,
)
from fourth_networks import FakeQuantize, Physics
from fourth_sequences import Autocast
from healthy_networks import Build, _made

INTENDED: dict[str, str] = {
    "generator step": "the critic is frozen in the step of the generator",
    "updates of low rank": "the layers under the updates and their norms are frozen",
    "teacher that is a copy": "the teacher is frozen and gets no gradient",
    "trained head on a frozen backbone": "the backbone is frozen, the gains and biases of its batch norms, too",
}


class _Spike(torch.autograd.Function):
    """A step at zero, with the slope of a smooth function as its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x > 0).float()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / (1 + 5 * ctx.saved_tensors[0].abs()).square()


class Spiking(nn.Module):
    """Neurons that leak, fire and fall back; the classifier reads the mean of what fires."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(8, width), nn.Linear(width, width), nn.Linear(width, CLASSES)
        nn.init.normal_(self.first.weight, std=0.8)
        nn.init.normal_(self.second.weight, std=0.3)

    def forward(self, x: Tensor) -> Tensor:
        one = two = total = x.new_zeros(len(x), self.second.out_features)
        for step in x.unbind(1):
            one = 0.9 * one + self.first(step)
            fired = _Spike.apply(one - 1)
            one = one - fired.detach()
            two = 0.9 * two + self.second(fired)
            out = _Spike.apply(two - 1)
            two = two - out.detach()
            total = total + out
        return self.head(total / x.shape[1])


class ComplexRecurrence(nn.Module):
    """A linear recurrence with complex rates inside the unit circle."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.log_decay = nn.Parameter(torch.linspace(0.02, 0.5, width).log())
        self.angle = nn.Parameter(torch.linspace(0.0, 2.0, width))
        self.embed, self.mix, self.head = nn.Linear(3, width), nn.Linear(2 * width, width), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        rate = torch.exp(torch.complex(-self.log_decay.exp(), self.angle))
        gain = (1 - rate.abs().square()).sqrt()
        x = self.embed(x)
        state = torch.zeros_like(x[:, 0], dtype=torch.complex64)
        for step in x.unbind(1):
            state = rate * state + gain * step
        return self.head(F.gelu(self.mix(torch.view_as_real(state).flatten(1))))


class Triplet(nn.Module):
    """One encoder for an anchor, a match and another sample; returns the two distances."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = dense(16, 64, 64, 24)

    def forward(self, x: Tensor) -> Tensor:
        anchor, match, other = (F.normalize(self.encoder(part), dim=-1) for part in x.unbind(1))
        return torch.stack([(anchor - match).square().sum(-1), (anchor - other).square().sum(-1)], 1)


class Pyramid(nn.Module):
    """Three levels with sums from above, and one head for all of them: scores and boxes at each place."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.levels = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width if i else 3, width, 3, 2, 1), nn.BatchNorm2d(width), nn.ReLU())
            for i in range(3)
        )
        self.lateral = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in range(3))
        self.tower = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(4, width), nn.ReLU())
        self.scores, self.boxes = nn.Conv2d(width, 2, 3, padding=1), nn.Conv2d(width, 4, 3, padding=1)
        nn.init.constant_(self.scores.get_parameter("bias"), -2.0)

    def forward(self, x: Tensor) -> Tensor:
        maps = []
        for level in self.levels:
            x = level(x)
            maps.append(x)
        above, outputs = None, []
        for lateral, found in zip(reversed(self.lateral), reversed(maps), strict=True):
            y = lateral(found)
            above = y if above is None else y + F.interpolate(above, scale_factor=2.0)
            shared = self.tower(above)
            outputs.append(torch.cat([self.scores(shared), F.softplus(self.boxes(shared))], 1).flatten(2))
        return torch.cat(outputs, 2)


class FourierFeatures(nn.Module):
    """Sines and cosines of fixed random frequencies, and an MLP on them."""

    def __init__(self) -> None:
        super().__init__()
        self.frequencies, self.body = nn.Buffer(4 * torch.randn(2, 32)), dense(64, 64, 64, 3)

    def forward(self, x: Tensor) -> Tensor:
        waves = x @ self.frequencies
        return self.body(torch.cat([waves.sin(), waves.cos()], -1)).sigmoid()


class Recommender(nn.Module):
    """A bag of seen items and one item: the dot product is the score."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.item = nn.EmbeddingBag(50, 16, mode="mean"), nn.Embedding(50, 16)
        self.bias = nn.Embedding(50, 1)
        nn.init.zeros_(self.bias.weight)

    def forward(self, ids: Tensor) -> Tensor:
        return (self.seen(ids[:, 1:]) * self.item(ids[:, 0])).sum(-1) + self.bias(ids[:, 0])[:, 0]


def _zero_gamma() -> nn.Module:
    layers = [nn.Conv2d(3, 16, 3, padding=1), *(ZeroGamma(16) for _ in range(5))]
    return Plain(layers, nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, CLASSES)))


def _random_depth() -> nn.Module:
    return Plain([nn.Linear(32, 48), *(RandomDepth(48, 0.5 * i / 7) for i in range(8))], nn.Linear(48, CLASSES))


def _generator_step() -> Subject:
    def loss(out: Tensor, targets: Tensor) -> Tensor:
        return (targets - out).square().mean()

    return Subject(GeneratorStep(), torch.randn(32, 8), torch.ones(32, 1), loss)


def _flow() -> Subject:
    def loss(out: Tensor, targets: Tensor) -> Tensor:
        return -out.mean()

    return Subject(Flow(), 0.3 * torch.randn(64, 8) + 1.0, torch.zeros(64), loss)


def _hypernetwork() -> Subject:
    example = torch.randn(64, 18)
    return Subject(Hypernetwork(), example, (example[:, :1] * example[:, 6:7]), F.mse_loss)


def _local_attention() -> Subject:
    ids = torch.randint(30, (8, 16))
    return Subject(Local(), ids, ids.roll(1, 1)[:, :-3], F.cross_entropy)


def _reader() -> Subject:
    ids = torch.randint(20, (16, 2, 7))
    ids[:, 1, 1:] = ids[:, 0, :-1]
    return Subject(Reader(), ids, ids[:, 0], F.cross_entropy)


def _tied_autoencoder() -> Subject:
    example = torch.randn(32, 6) @ torch.randn(6, 24) * 6**-0.5
    return Subject(TiedAutoencoder(), example, example, F.mse_loss)


def _variational() -> Subject:
    def loss(out: Tensor, targets: Tensor) -> Tensor:
        mean, log_variance = out[:, 16:24], out[:, 24:]
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(1).mean()
        return (out[:, :16] - targets).square().sum(1).mean() + 0.1 * divergence

    example = torch.randn(64, 4) @ torch.randn(4, 16)
    return Subject(Variational(), example, example, loss)


def _mixture_density() -> Subject:
    def loss(out: Tensor, targets: Tensor) -> Tensor:
        weights, means, scales = out.chunk(3, 1)
        log_density = -0.5 * ((targets - means) / scales.exp()).square() - scales - 0.919
        return -(weights.log_softmax(1) + log_density).logsumexp(1).mean()

    example = torch.randn(64, 6)
    sides = torch.randint(2, (64, 1)) * 2.0 - 1.0
    return Subject(MixtureDensity(), example, sides * 2 + example[:, :1], loss)


def _teacher() -> Subject:
    def loss(out: Tensor, targets: Tensor) -> Tensor:
        return (targets - out).mean()

    example = torch.randn(32, 1, 16) + 0.3 * torch.randn(32, 2, 16)
    return Subject(Averaged(), example, torch.ones(32), loss)


def _frozen_backbone() -> Subject:
    """A backbone that has seen its data: its running statistics are those of the batches, as after a training."""
    parts: list[nn.Module] = []
    for i in range(3):
        parts += [nn.Conv2d(24 if i else 3, 24, 3, 2, 1), nn.BatchNorm2d(24), nn.ReLU()]
    backbone = nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with torch.no_grad():
        for _ in range(60):
            backbone(images()[0])
    backbone.requires_grad_(False)
    model = nn.Sequential()
    model.add_module("backbone", backbone)
    model.add_module("head", dense(24, 64, CLASSES))
    return Subject(model, *images())


def _quantization_aware() -> nn.Module:
    layers: list[nn.Module] = []
    for i in range(3):
        layers += [nn.Conv2d(16 if i else 3, 16, 3, 1 + i % 2, 1), nn.BatchNorm2d(16), nn.ReLU(), FakeQuantize(6.0)]
    return he_(Plain(layers, nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, CLASSES))))


def _physics() -> Subject:
    """u'' = −u and the values of u at some points."""
    points = torch.linspace(0, 2, 40)[:, None]

    def equation(out: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(out[::4, :1], targets[::4]) + (out[:, 1:] + out[:, :1]).square().mean()

    return Subject(Physics(True), points, points.cos(), equation)


def _triplet() -> Subject:
    def loss(out: Tensor, targets: Tensor) -> Tensor:
        return (out[:, 0] - out[:, 1] + targets).clamp(min=0).mean()

    anchor = torch.randn(48, 16)
    example = torch.stack([anchor, anchor + 0.8 * torch.randn(48, 16), torch.randn(48, 16)], 1)
    return Subject(Triplet(), example, torch.ones(48), loss)


def _several_labels() -> Subject:
    """Six labels that may hold together; the network ends with sigmoids, and the loss takes probabilities."""
    example = torch.randn(64, 20)
    model = nn.Sequential(dense(20, 64, 64, 6), nn.Sigmoid())
    return Subject(model, example, (example[:, :6] + example[:, 6:12] > 0).float(), F.binary_cross_entropy)


def _lower_precision() -> Subject:
    example = torch.randn(32, 16)
    return Subject(Autocast(torch.bfloat16), example, example.roll(1, 1), F.mse_loss)


def _pyramid() -> Subject:
    def loss(out: Tensor, targets: Tensor) -> Tensor:
        there = targets[:, :1]
        boxes = ((out[:, 2:] - targets[:, 2:]).abs() * there).sum() / there.sum()
        return F.binary_cross_entropy_with_logits(out[:, :2], targets[:, :2]) + boxes

    targets = torch.cat([(torch.rand(8, 2, 84) < 0.2).float(), 1 + torch.rand(8, 4, 84)], 1)
    return Subject(Pyramid(), images(batch=8)[0], targets, loss)


def _fourier() -> Subject:
    points = torch.rand(128, 2)
    colours = torch.stack([(9 * points).sin().prod(1), (7 * points[:, 0]).cos(), (5 * points[:, 1]).sin()], 1)
    return Subject(FourierFeatures(), points, 0.5 + 0.5 * colours, F.mse_loss)


def _recommender() -> Subject:
    ids = torch.randint(50, (64, 6))
    return Subject(Recommender(), ids, (ids[:, 0] % 2).float(), F.binary_cross_entropy_with_logits)


BUILDERS: dict[str, Build] = {
    "gain of zero in group norms": _made(_zero_gamma, 3, 16, 16),
    "branches left out at random": _made(_random_depth, 32),
    "generator step": _generator_step,
    "normalizing flow": _flow,
    "hypernetwork": _hypernetwork,
    "updates of low rank": _made(Adapted, 48),
    "attention that sees four words": _local_attention,
    "autoencoder with transposed weights": _tied_autoencoder,
    "GRU with attention": _reader,
    "variational autoencoder": _variational,
    "Runge-Kutta steps": _made(RungeKutta, 24),
    "equilibrium": _made(Equilibrium, 24),
    "two of four experts": _made(TopTwo, 24),
    "sums over neighbours with batch norm": _made(Isomorphism, 12, 5),
    "reservoir": _made(Reservoir, 12, 3),
    "gates of WaveNet": _made(Gated, 2, 24),
    "recomputed activations": _made(Recomputed, 32),
    "mixture of densities": _mixture_density,
    "teacher that is a copy": _teacher,
    "trained head on a frozen backbone": _frozen_backbone,
    "quantization-aware": _made(_quantization_aware, 3, 16, 16),
    "second derivative in the loss": _physics,
    "spikes": _made(Spiking, 12, 8),
    "complex recurrence": _made(ComplexRecurrence, 20, 3),
    "triplets": _triplet,
    "several labels": _several_labels,
    "autocast to bfloat16": _lower_precision,
    "feature pyramid": _pyramid,
    "Fourier features": _fourier,
    "bag of items": _recommender,
}
HEALTHY_FOURTH: tuple[str, ...] = tuple(BUILDERS)


def build_healthy_fourth(name: str) -> Subject:
    """Build a network and its batch; two calls give the same weights and the same batch."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return BUILDERS[name]()
