"""Networks over vectors, images and graphs that the fourth set breaks; each takes its fault as a flag."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fault_cases import CLASSES


class MultiTask(nn.Module):
    """One trunk and a head for each of three quantities."""

    def __init__(self, inputs: int = 16, width: int = 128) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.heads = nn.ModuleList(nn.Linear(width, 1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        shared = self.trunk(x)
        return torch.cat([head(shared) for head in self.heads], 1)


class PointCloud(nn.Module):
    """A maximum over what one MLP makes of each point, and log probabilities of the classes."""

    def __init__(self, axis: int) -> None:
        super().__init__()
        self.points = nn.Sequential(nn.Conv1d(3, 32, 1), nn.ReLU(), nn.Conv1d(32, 64, 1), nn.ReLU())
        self.head, self.scores = nn.Linear(64, CLASSES), nn.LogSoftmax(axis)

    def forward(self, x: Tensor) -> Tensor:
        return self.scores(self.head(self.points(x).amax(-1)))


class ImagesAndCaptions(nn.Module):
    """Two encoders whose scores are multiplied by exp(logit_scale), as in CLIP."""

    def __init__(self, logit_scale: float) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(24, 64), nn.GELU(), nn.Linear(64, 32))
        self.caption = nn.Sequential(nn.Linear(24, 64), nn.GELU(), nn.Linear(64, 32))
        self.logit_scale = nn.Parameter(torch.tensor(logit_scale))

    def forward(self, pairs: Tensor) -> Tensor:
        image = F.normalize(self.image(pairs[:, 0]), dim=-1)
        caption = F.normalize(self.caption(pairs[:, 1]), dim=-1)
        return self.logit_scale.exp() * image @ caption.T


class Bootstrapped(nn.Module):
    """A predictor of what a target network makes of another view, as in BYOL; returns the cosine of each pair."""

    def __init__(self, copied: bool) -> None:
        super().__init__()
        self.online = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 32))
        self.target = copy.deepcopy(self.online) if copied else self.online
        for weight in self.target.parameters():
            weight.requires_grad_(False)
        self.predictor = nn.Linear(32, 32)

    def forward(self, views: Tensor) -> Tensor:
        with torch.no_grad():
            aim = self.target(views[:, 1])
        return F.cosine_similarity(self.predictor(self.online(views[:, 0])), aim, dim=-1)


class Physics(nn.Module):
    """A function u of x; the network returns u and its second derivative, which the loss compares with an equation."""

    def __init__(self, activate: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32 if i else 1, 32) for i in range(3))
        self.last, self.activate = nn.Linear(32, 1), activate

    def u(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            if self.activate:
                x = torch.tanh(x)
            else:
                torch.tanh(x)
        return self.last(x)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_(True)
            u = self.u(x)
            slope = torch.autograd.grad(u.sum(), x, create_graph=True)[0]
            bend = torch.zeros_like(x)
            if slope.requires_grad:
                found = torch.autograd.grad(slope.sum(), x, create_graph=True, allow_unused=True)[0]
                bend = bend if found is None else found
            return torch.cat([u, bend], 1)


class SpectralFeatures(nn.Module):
    """Convolutions, the logarithm of their energy, and a classifier."""

    def __init__(self, through_numpy: bool) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv1d(1, 16, 9, 4), nn.ReLU(), nn.Conv1d(16, 12, 9, 4), nn.ReLU())
        self.head, self.through_numpy = nn.Linear(12, CLASSES), through_numpy

    def forward(self, x: Tensor) -> Tensor:
        energy = self.features(x).square().mean(-1)
        if self.through_numpy:
            return self.head(torch.from_numpy(np.log1p(100.0 * energy.detach().numpy())))
        return self.head(torch.log1p(100.0 * energy))


class Refinement(nn.Module):
    """Residual steps that are kept in a Python list, or in a `ModuleList`."""

    def __init__(self, width: int, listed: bool) -> None:
        super().__init__()
        steps = [nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, width)) for _ in range(4)]
        self.steps: Any = steps if listed else nn.ModuleList(steps)

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = x + step(x)
        return x


class Pixels(nn.Module):
    """A small network on bytes, which it divides by 255 first."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 16, 3, 2, 1), nn.ReLU())
        self.head, self.in_place = nn.Linear(256, CLASSES), in_place

    def forward(self, x: Tensor) -> Tensor:
        if self.in_place:
            x /= 255.0
        else:
            x = x / 255.0
        return self.head(self.body(4.0 * x - 2.0).flatten(1))


class Inception(nn.Module):
    """A main and an auxiliary classifier; the network returns the main one when it is used."""

    def __init__(self, returned: int) -> None:
        super().__init__()
        self.early = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU())
        self.late = nn.Sequential(nn.Conv2d(16, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU())
        self.aux, self.head = nn.Linear(16, CLASSES), nn.Linear(32, CLASSES)
        self.returned = returned

    def forward(self, x: Tensor) -> Tensor:
        early = self.early(x)
        outputs = (self.head(self.late(early).mean((2, 3))), self.aux(early.mean((2, 3))))
        return outputs[self.returned] if self.training else outputs[0]


class Modulated(nn.Module):
    """x + gate · f(norm(x) · (1 + scale) + shift), where the time gives shift, scale and gate, which begin at zero."""

    def __init__(self, width: int, zero_output: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))
        self.modulation = nn.Linear(width, 3 * width)
        for layer in (self.modulation, *([self.mlp[2]] if zero_output else [])):
            for weight in layer.parameters():
                nn.init.zeros_(weight)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        shift, scale, gate = self.modulation(time).chunk(3, -1)
        return x + gate * self.mlp(self.norm(x) * (1 + scale) + shift)


class TimedDenoiser(nn.Module):
    """Predicts the noise in a vector; the last entry of the input is the time."""

    def __init__(self, zero_output: bool, width: int = 48, depth: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(16, width)
        self.time = nn.Sequential(nn.Linear(1, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.blocks = nn.ModuleList(Modulated(width, zero_output) for _ in range(depth))
        self.head = nn.Linear(width, 16)

    def forward(self, x: Tensor) -> Tensor:
        time, x = self.time(x[:, 16:]), self.embed(x[:, :16])
        for block in self.blocks:
            x = block(x, time)
        return self.head(x)


class _OwnSwish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, chained: bool) -> Tensor:
        ctx.save_for_backward(x)
        ctx.chained = chained
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        s = ctx.saved_tensors[0].sigmoid()
        slope = s * (1 + ctx.saved_tensors[0] * (1 - s))
        return (grad * slope if ctx.chained else slope), None


class OwnSwish(nn.Module):
    """Swish with a backward pass of its own."""

    def __init__(self, chained: bool) -> None:
        super().__init__()
        self.chained = chained

    def forward(self, x: Tensor) -> Tensor:
        return _OwnSwish.apply(x, self.chained)


class _Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -grad


class Reverse(nn.Module):
    """The identity, whose gradient has the other sign."""

    def forward(self, x: Tensor) -> Tensor:
        return _Reverse.apply(x)


class DomainAdversarial(nn.Module):
    """Features for four classes that hide the domain; returns the scores of the classes and of the two domains."""

    def __init__(self, reversed_head: str) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8), nn.ReLU())
        self.reverse, self.class_head, self.domain_head = Reverse(), nn.Linear(8, 4), nn.Linear(8, 2)
        self.reversed_head = reversed_head

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x)
        y = self.reverse(x)
        first, second = (y, x) if self.reversed_head == "class" else (x, y)
        return torch.cat([self.class_head(first), self.domain_head(second)], 1)


class MessagePassing(nn.Module):
    """Each node of a complete graph reads the sum of all nodes, or their mean; the graph is classified."""

    def __init__(self, mean: bool, depth: int = 5, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Linear(6, width)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"own": nn.Linear(width, width), "messages": nn.Linear(width, width)}) for _ in range(depth)
        )
        self.head, self.mean = nn.Linear(width, CLASSES), mean

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.embed(x))
        for layer in self.layers:
            total = x.mean(1, keepdim=True) if self.mean else x.sum(1, keepdim=True)
            x = F.relu(layer["own"](x) + layer["messages"](total))
        return self.head(x.mean(1))


class TokenMixer(nn.Module):
    """An MLP over the tokens and one over the channels, each added to what a layer norm gave it."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(nn.Linear(tokens, 32), nn.GELU(), nn.Linear(32, tokens))
        self.channels = nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class MLPMixer(nn.Module):
    """Patches of 4×4 pixels, four mixing blocks, a last norm and a classifier."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.blocks = nn.ModuleList(TokenMixer(16, width) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


class Routed(nn.Module):
    """The best of four experts for each sample, multiplied by its probability or not."""

    def __init__(self, weighted: bool) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Linear(8, 1) for _ in range(4))
        self.weighted = weighted

    def forward(self, x: Tensor) -> Tensor:
        chances, chosen = self.router(x).softmax(-1).max(-1, keepdim=True)
        every = torch.cat([expert(x) for expert in self.experts], 1)
        out = every.gather(1, chosen)
        return out * chances if self.weighted else out


class Levels(nn.Module):
    """A U-Net of three levels that joins the level below with the skip, or the skip with itself."""

    def __init__(self, joins_below: bool, width: int = 12) -> None:
        super().__init__()
        self.down1 = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.ReLU())
        self.down2 = nn.Sequential(nn.Conv2d(width, width, 3, 2, 1), nn.ReLU())
        self.middle = nn.Sequential(nn.Conv2d(width, width, 3, 4, 1), nn.ReLU(), nn.Conv2d(width, width, 2), nn.ReLU())
        self.up2 = nn.Sequential(nn.Conv2d(2 * width, width, 3, padding=1), nn.ReLU())
        self.up1 = nn.Sequential(nn.Conv2d(2 * width, width, 3, padding=1), nn.ReLU())
        self.head, self.joins_below = nn.Conv2d(width, 1, 1), joins_below

    def forward(self, x: Tensor) -> Tensor:
        skip1 = self.down1(x)
        skip2 = self.down2(skip1)
        below = F.interpolate(self.middle(skip2), size=skip2.shape[-2:])
        below = self.up2(torch.cat([below if self.joins_below else skip2, skip2], 1))
        return self.head(self.up1(torch.cat([F.interpolate(below, scale_factor=2.0), skip1], 1)))


class _FakeQuantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, limit: float) -> Tensor:
        ctx.save_for_backward(x.abs() <= limit)
        step = limit / 127
        return (x / step).round().clamp(-127, 127) * step

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.saved_tensors[0], None


class FakeQuantize(nn.Module):
    """Rounds to 255 steps within ±limit; the gradient passes within the limit and stops outside."""

    def __init__(self, limit: float) -> None:
        super().__init__()
        self.limit = limit

    def forward(self, x: Tensor) -> Tensor:
        return _FakeQuantize.apply(x, self.limit)
