"""More models with unusual forward passes, in the style of newer architectures."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from unusual_models import BATCH, CLASSES, DEPTH, WIDTH, Stack, Unusual, case_of, classified, features, mlp

REPARAMETRIZING = ("nf", "wn")


def tokens() -> Tensor:
    return torch.randn(BATCH, 5, WIDTH)


def images() -> Tensor:
    return torch.randn(BATCH, 3, 8, 8)


class GatedUnit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.wide(self.norm(x)).chunk(2, -1)
        return self.out(F.gelu(gate) * value)


class ParallelBlock(nn.Module):
    """Attention and MLP side by side, behind one normalizer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention, self.mlp = nn.MultiheadAttention(WIDTH, 4, batch_first=True), mlp()[1:]

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return self.attention(y, y, y, need_weights=False)[0] + self.mlp(y)


class StateSpace(nn.Module):
    """A recurrence with a step size that depends on the input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.step = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.decay, self.out = nn.Parameter(torch.zeros(WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        signal, gate = self.wide(self.norm(x)).chunk(2, -1)
        step = F.softplus(self.step(signal))
        state, states = torch.zeros_like(signal[:, 0]), []
        for t in range(signal.shape[1]):
            state = state * torch.exp(-step[:, t] * self.decay.exp()) + step[:, t] * signal[:, t]
            states.append(state)
        return self.out(torch.stack(states, 1) * F.silu(gate))


class Hypernetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.maker, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        scale, shift = self.maker(x.mean(0)).chunk(2)
        return self.out(torch.tanh(self.norm(x) * scale + shift))


class Adapted(nn.Module):
    """An MLP with an adapter that starts at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.down, self.up = mlp(), nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        y = self.mlp(x)
        return y + self.up(F.relu(self.down(y)))


class LowRank(nn.Linear):
    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.a, self.b = nn.Parameter(0.1 * torch.randn(4, width)), nn.Parameter(torch.zeros(width, 4))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x @ self.a.T @ self.b.T


def low_rank() -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(WIDTH), LowRank(WIDTH), nn.GELU(), LowRank(WIDTH))


class BufferScale(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(0.1))

    def step(self, block: nn.Module, x: Tensor) -> Tensor:
        return x + self.scale * block(x)


class Checkpointed(Stack):
    def step(self, block: nn.Module, x: Tensor) -> Tensor:
        return x + checkpoint(block, x, use_reentrant=False)


class Spectral(nn.Module):
    """Weights in the Fourier domain, then an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), mlp()
        self.filter = nn.Parameter(0.02 * torch.randn(3, WIDTH, 2))

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(self.norm(x), dim=1) * torch.view_as_complex(self.filter)
        y = torch.fft.irfft(spectrum, n=x.shape[1], dim=1)
        return y + self.mlp(x + y)


class Sandwich(nn.Module):
    """Normalizers on both sides, and a multiplier that starts at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.norm, self.gain = mlp(), nn.LayerNorm(WIDTH), nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * self.norm(self.mlp(x))


class NormalizedKeys(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.RMSNorm(WIDTH), nn.RMSNorm(4), nn.RMSNorm(4)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (layer(y).unflatten(-1, (4, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(self.first(q), self.second(k), v)
        return self.out(y.transpose(1, 2).flatten(2))


class Experts(nn.Module):
    """Two of eight experts for each sample; `skips`: those without samples are not called."""

    skips = True

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8)
        self.experts = nn.ModuleList(mlp()[1:] for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        shares, chosen = self.router(y).softmax(-1).topk(2, -1)
        out = torch.zeros_like(y)
        for number, expert in enumerate(self.experts):
            rows, ranks = (chosen == number).nonzero(as_tuple=True)
            if len(rows) or not self.skips:
                out = out.index_add(0, rows, expert(y[rows]) * shares[rows, ranks, None])
        return out


class CalledExperts(Experts):
    skips = False


class DenseExperts(Experts):
    """All experts run on all samples; a mask chooses."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        shares = self.router(y).softmax(-1)
        kept = shares * (shares >= shares.topk(2, -1).values[:, 1:])
        return sum(kept[:, i : i + 1] * expert(y) for i, expert in enumerate(self.experts))  # type: ignore[return-value]


def few() -> Tensor:
    return torch.randn(BATCH, WIDTH)[:3].repeat(4, 1)


class Latents(nn.Module):
    """A Perceiver: learned latents attend to the input."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(0.02 * torch.randn(4, WIDTH))
        self.q_norm, self.k_norm, self.norm = (nn.LayerNorm(WIDTH) for _ in range(3))
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.blocks, self.head = nn.ModuleList(mlp() for _ in range(DEPTH)), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y, keys = self.latents.expand(len(x), -1, -1), self.k_norm(x)
        y = y + self.attention(self.q_norm(y), keys, keys, need_weights=False)[0]
        for block in self.blocks:
            y = y + block(y)
        return self.head(self.norm(y).mean(1))


class LayerScaled(nn.Module):
    """A block like ConvNeXt's, with a layer scale of 1e-6."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.norm = nn.Conv2d(WIDTH, WIDTH, 5, padding=2, groups=WIDTH), nn.GroupNorm(1, WIDTH)
        self.wide, self.out = nn.Conv2d(WIDTH, 3 * WIDTH, 1), nn.Conv2d(3 * WIDTH, WIDTH, 1)
        self.ls = nn.Parameter(1e-6 * torch.ones(WIDTH, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.ls * self.out(F.gelu(self.wide(self.norm(self.mix(x)))))


class SeveralKernels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(WIDTH)
        self.paths = nn.ModuleList(
            nn.Sequential(nn.Conv2d(WIDTH, WIDTH, k, padding=k // 2), nn.ReLU(), nn.Conv2d(WIDTH, WIDTH, 1))
            for k in (1, 3, 5)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return sum(path(y) for path in self.paths)  # type: ignore[return-value]


class Pictures(nn.Module):
    """Blocks on images, which are averaged for the head."""

    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Conv2d(3, WIDTH, 3, padding=1), nn.ModuleList(block() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean((2, 3)))


class Modulated(nn.Module):
    """The embedding of a time modulates every block through a layer, and the last normalizer itself."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.time = nn.Linear(WIDTH, WIDTH), nn.Linear(8, WIDTH)
        self.maps = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        self.blocks = nn.ModuleList(mlp()[1:] for _ in range(DEPTH))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH, elementwise_affine=False) for _ in range(DEPTH + 1))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        x, time = self.stem(x), self.time(time)[:, None]
        for norm, scale, block in zip(self.norms, self.maps, self.blocks, strict=False):
            x = x + block(norm(x) * (1 + scale(F.silu(time))))
        return self.head((self.norms[-1](x) * (1 + time) + time).mean(1))


class Mapped(Stack):
    """Takes keyword arguments only, and returns a dictionary with a list in it."""

    def forward(self, *, values: Tensor, factor: float = 1.0) -> Any:  # type: ignore[override]
        return {"logits": self.head(self.body(values)), "rest": [values * factor]}


class Pooled(Stack):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean(1))


def pooled(block: type[nn.Module]) -> type[nn.Module]:
    return type(block.__name__, (Pooled,), {"__init__": lambda self: Pooled.__init__(self, block)})


def stacked(name: str, block: Any) -> type[nn.Module]:
    return type(name, (Stack,), {"__init__": lambda self: Stack.__init__(self, block)})


def pictured(block: type[nn.Module]) -> type[nn.Module]:
    return type(block.__name__, (Pictures,), {"__init__": lambda self: Pictures.__init__(self, block)})


UNUSUAL_SECOND: tuple[Unusual, ...] = (
    *(case_of(stacked(block.__name__, block)) for block in (GatedUnit, Hypernetwork, Adapted, Sandwich)),
    *(case_of(stacked(block.__name__, block), few) for block in (Experts, CalledExperts, DenseExperts)),
    case_of(stacked("LowRankLayers", low_rank), may_refuse=REPARAMETRIZING),
    *map(case_of, (BufferScale, Checkpointed)),
    *(case_of(pooled(block), tokens) for block in (StateSpace, NormalizedKeys, Spectral)),
    case_of(pooled(ParallelBlock), tokens, may_refuse=REPARAMETRIZING),
    case_of(Latents, tokens, may_refuse=REPARAMETRIZING),
    *(case_of(pictured(block), images) for block in (LayerScaled, SeveralKernels)),
    case_of(Modulated, lambda: (tokens(), torch.randn(BATCH, 8))),
    case_of(Mapped, lambda: {"values": features()}, loss_of=lambda out: classified(out["logits"])),
)
