"""Models, and tensors kept by plain autograd, to compare a measured signal with."""

import math
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from normfree.diagnostics.propagation import propagate
from normfree.diagnostics.signals import Signal, Stats, SumSignal
from normfree.models import Network, build

EXACT = 1e-9  # of float64 sums against numpy's
Triple = tuple[Tensor, Tensor, Tensor]  # sum, branch, shortcut


def measured(tensor: Tensor) -> tuple[float, float, float]:
    """Squared mean and variance averaged over channels, and the norm of a sample."""
    values = tensor.detach().double().numpy()
    channels = np.moveaxis(values, -1 if values.ndim == 3 else 1, 0).reshape(
        values.shape[-1 if values.ndim == 3 else 1], -1
    )
    norm = math.sqrt(np.square(values).sum() / len(values))
    return float(np.square(channels.mean(1)).mean()), float(channels.var(1).mean()), norm


def kept(*tensors: Tensor) -> tuple[Tensor, ...]:
    for tensor in tensors:
        tensor.retain_grad()
    return tensors


def close(stats: Stats, expected: tuple[float, float, float], tolerance: float) -> None:
    assert (stats.mean_square, stats.variance, stats.norm) == pytest.approx(
        expected, rel=tolerance, abs=tolerance * expected[2] ** 2
    )


def agree(signal: Signal, oracle: Sequence[Triple], tolerance: float = EXACT) -> None:
    """Every number of every sum is the oracle's."""
    assert len(signal.sums) == len(oracle)
    for found, tensors in zip(signal.sums, oracle, strict=True):
        for part, tensor in zip(("sum", "branch", "shortcut"), tensors, strict=True):
            assert tensor.grad is not None
            close(getattr(found, part), measured(tensor), tolerance)
            close(getattr(found, f"{part}_gradient"), measured(tensor.grad), tolerance)


def noise(like: Tensor, seed: int = 0) -> Tensor:
    """The gradient that is injected where no loss is given."""
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(seed)).to(like)


def seeded(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def labels(count: int, classes: int = 10) -> Tensor:
    return torch.arange(count) % classes


def own(name: str, method: str, example: Tensor, **options: Any) -> Network:
    return build(name, method, example=example, generator=torch.Generator().manual_seed(0), **options).to(example.dtype)


class TwoSums(nn.Module):
    """Two residual sums and another addition in the model's own forward pass, one sum with the branch first."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)
        self.out = nn.Linear(width, 3)

    def forward(self, x: Tensor, seen: list[Triple] | None = None) -> Tensor:
        x = self.stem(x) + 0.5
        branch = self.first(x.relu())
        total = x + branch
        if seen is not None:
            seen.append((total, branch, x))
        x = total
        branch = self.second(x.relu())
        total = branch + x
        if seen is not None:
            seen.append((total, branch, x))
        return self.out(total)  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor, seen: list[Triple] | None = None) -> Tensor:
        branch = self.layer((x + 0.1).relu())
        total = x + branch
        if seen is not None:
            seen.append((total, branch, x))
        return total


class Shared(nn.Module):
    """A block that is called twice, with a sum of the model itself between the calls."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.block = Block(width)
        self.between = nn.Linear(width, width)
        self.out = nn.Linear(width, 3)

    def forward(self, x: Tensor, seen: list[Triple] | None = None) -> Tensor:
        x = self.block(self.stem(x), seen)
        branch = self.between(x.relu())
        total = x + branch
        if seen is not None:
            seen.append((total, branch, x))
        return self.out(self.block(total, seen))  # type: ignore[no-any-return]


def foreign(factory: Callable[[], nn.Module], dtype: torch.dtype = torch.float64) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return factory().to(dtype)


class Composed(nn.Module):
    """Weights that torch composes of other parameters, and a weight that two layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 6)
        self.layer = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.stem.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.tied(x + self.layer(x.relu()))  # type: ignore[no-any-return]


def refuse(match: str, *args: Any, **options: Any) -> None:
    with pytest.raises(ValueError, match=match) as caught:
        propagate(*args, **options)
    assert "\n" not in str(caught.value)


def leaves(value: Any) -> list[Any]:
    if is_dataclass(value):
        return [leaf for f in fields(value) for leaf in leaves(getattr(value, f.name))]
    return [leaf for item in value for leaf in leaves(item)] if isinstance(value, tuple | list) else [value]


def reduce_as_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the way of a GPU on the CPU."""
    monkeypatch.setattr("normfree.diagnostics.measurement.moments.launches_are_expensive", lambda _tensor: True)


def made_up_signal(
    forward: Sequence[float], backward: Sequence[float] | None = None, stages: Sequence[int] | None = None
) -> Signal:
    """A signal with these variances at its sums; `backward` is in the order of the blocks too."""
    backward = [1.0] * len(forward) if backward is None else backward
    stages = [1] * len(forward) if stages is None else stages

    def stats(variance: float) -> Stats:
        return Stats(0.0, variance, math.sqrt(variance) if variance >= 0 else math.nan)

    return Signal(
        tuple(
            SumSignal(f"block{i}", stage, False, stats(f), stats(0.5), stats(1.0), stats(b), stats(1.0), stats(1.0))
            for i, (f, b, stage) in enumerate(zip(forward, backward, stages, strict=True))
        ),
        (),
    )


def noisy(values: Sequence[float], seed: int, spread: float = 0.15) -> list[float]:
    return [float(v) for v in np.array(values) * np.exp(np.random.default_rng(seed).normal(0, spread, len(values)))]


def batch(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
