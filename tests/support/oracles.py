"""Measurements of a network's signal by plain hooks, independent of what the library itself measures."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor, nn

from normfree.models import Network, build
from normfree.nn.residual import Residual


@dataclass(frozen=True)
class BlockSignal:
    """Statistics at one residual block, forward and backward.

    `second`, `variance` and `squared_mean` are those of each channel of the block's output, averaged over channels;
    `before` is the second moment of its input; `end_second` and `end_variance` belong to the branch as it enters the
    sum; `gradient` and `gradient_before` are mean squares of the gradient at the block's output and input.
    """

    name: str
    stage: int
    transition: bool
    before: float
    second: float
    variance: float
    squared_mean: float
    end_second: float
    end_variance: float
    gradient: float
    gradient_before: float


def channel_moments(x: Tensor) -> tuple[float, float, float]:
    """Second moment, variance and squared mean of every channel (dimension 1) of a batch, averaged over channels."""
    dims = [d for d in range(x.dim()) if d != 1]
    x = x.detach().double()
    second, squared_mean = x.square().mean().item(), x.mean(dims).square().mean().item()
    return second, second - squared_mean, squared_mean


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """No gradients of parameters inside, so that a backward pass costs half."""
    learning = [p for p in model.parameters() if p.requires_grad]
    for p in learning:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in learning:
            p.requires_grad_(True)


def block_signals(
    model: Network, x: Tensor, *, generator: torch.Generator | None = None, backward: bool = True
) -> list[BlockSignal]:
    """Statistics at every residual block for the batch `x`, in order of depth.

    The gradient is N(0, 1) noise injected at the output of the last block, because a classifier that starts at 0
    would send none.
    """
    modules = dict(model.named_modules())
    branches = model.plan.branches
    ins: list[Tensor] = []
    outs: list[Tensor] = []
    ends: list[Tensor] = []

    def record(block: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        ins.append(args[0])
        outs.append(out)

    handles = []
    for branch in branches:
        block = modules[branch.name]
        assert isinstance(block, Residual)
        handles.append(block.register_forward_hook(record))
        handles.append(block.beta.register_forward_hook(lambda _m, _args, out: ends.append(out.detach())))
    try:
        with frozen(model), torch.set_grad_enabled(backward):
            last = model.body(model.stem(x.requires_grad_(backward)))
            gradients = [torch.full((), torch.nan)] * (len(ins) + 1)
            if backward:
                noise = torch.randn(last.shape, generator=generator).to(last.dtype)
                gradients = list(torch.autograd.grad(last, [*ins, last], noise))
    finally:
        x.requires_grad_(False)
        for handle in handles:
            handle.remove()
    squares = [g.double().square().mean().item() for g in gradients]
    signals = []
    for i, branch in enumerate(branches):
        second, variance, squared_mean = channel_moments(outs[i])
        end_second, end_variance, _ = channel_moments(ends[i])
        signals.append(
            BlockSignal(
                branch.name,
                branch.position.stage,
                branch.position.transition,
                channel_moments(ins[i])[0],
                second,
                variance,
                squared_mean,
                end_second,
                end_variance,
                squares[i + 1],
                squares[i],
            )
        )
    return signals


@cache
def network_signals(
    name: str, method: str, *, seed: int = 0, batch: int = 2, padding_mode: str = "zeros"
) -> tuple[BlockSignal, ...]:
    """Signals of a network on N(0, 1) images of 32×32, measured once for all tests of a process."""
    g = torch.Generator().manual_seed(seed)
    model = build(name, method, generator=g, padding_mode=padding_mode)
    return tuple(block_signals(model, torch.randn(batch, 3, 32, 32, generator=g), generator=g))


def first_to_last(signals: Sequence[BlockSignal]) -> float:
    """Mean squared gradient where the first block begins over that where the last ends.

    1 is flat, more explodes, less vanishes.
    """
    return signals[0].gradient_before / signals[-1].gradient


def stage_runs(signals: Sequence[BlockSignal]) -> list[list[BlockSignal]]:
    """The blocks of every stage that neither change shape nor stand at its beginning."""
    return [[s for s in signals if s.stage == stage][1:] for stage in sorted({s.stage for s in signals})]


def factor_a_block(signals: Sequence[BlockSignal], *, backward: bool) -> float:
    """Geometric mean of the factor that one block inside a stage puts on the signal.

    Forward it multiplies the second moment of its input, backward that of its output's gradient; blocks that begin a
    stage are left out.
    """
    inside = [signal for run in stage_runs(signals) for signal in run]
    logs = [np.log(s.gradient_before / s.gradient if backward else s.second / s.before) for s in inside]
    return float(np.exp(np.mean(logs)))


def slope(x: Sequence[float] | np.ndarray, y: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """Slope of the least-squares line through the points, and R²."""
    x, y = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    line = np.polyfit(x, y, 1)
    return float(line[0]), float(1 - np.var(y - np.polyval(line, x)) / np.var(y))


def log_slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Exponent of a power law through the points."""
    return slope(np.log(x), np.log(y))[0]


def root_mean_square(values: Sequence[float] | np.ndarray) -> float:
    """√ of the mean of squares."""
    return float(np.sqrt(np.mean(np.square(values))))
