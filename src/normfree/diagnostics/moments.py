"""A few numbers for a tensor: channel-averaged squared mean and variance, and the norm of a sample.

With the mean and variance of each channel taken over the batch and all positions, `mean_square` is the channel average
of the squared means and `variance` that of the variances; `norm` is the root of the summed squares a sample, averaged
over the batch in the square.

Reference: normdead, section 4.2 and Listing 1 (signal propagation plots).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from normfree.diagnostics.batched import HALF, flat

NEIGHBOURS = 512  # a sample and channel from which a GPU reads twice as fast when it reduces over them alone


@dataclass(frozen=True)
class Stats:
    """Squared mean, variance and norm of one tensor."""

    mean_square: float
    variance: float
    norm: float


def channel_dim(tensor: Tensor) -> int:
    """The dimension of the channels where nothing is known of the layer that made them."""
    return 2 if tensor.dim() == 3 else 1


@dataclass(eq=False, slots=True)
class Reduced:
    """A tensor reduced to mean and variance a channel, or a sample and channel (N, C) until it is settled.

    `count` is the number of values a channel and sample.
    """

    mean: Tensor
    variance: Tensor
    count: int


def moments(tensor: Tensor, channels: int | None = None) -> Stats:
    """Channel-averaged squared mean and variance, and the root mean square norm of a sample.

    `channels` is their dimension, not the first; unless given, 1 of images and vectors (N, C, …) and 2 of sequences
    (N, T, C), so that sequences with channels before positions (N, C, T) need it. On a GPU a variance beyond the range
    of float32 is infinite.

    >>> moments(torch.ones(4, 2, 3, 3))
    Stats(mean_square=1.0, variance=0.0, norm=4.242640687119285)
    """
    return finish([reduce(tensor, channels)])[0]


def finish(every: Sequence[Reduced]) -> list[Stats]:
    """The numbers of reduced tensors, brought off their device in one transfer: one each would stall a GPU."""
    settle(every)
    sizes = [r.mean.numel() for r in every]
    values = flat([*(r.mean for r in every), *(r.variance for r in every)])
    starts = np.cumsum([0, *sizes[:-1]])
    squares = np.add.reduceat(values[: sum(sizes)] ** 2, starts)
    variances = np.add.reduceat(values[sum(sizes) :], starts)
    rows = zip(every, sizes, squares.tolist(), variances.tolist(), strict=True)
    return [Stats(s / size, v / size, math.sqrt((s + v) * r.count)) for r, size, s, v in rows]


def settle(every: Iterable[Reduced]) -> None:
    """Reduce what is left of the batch, all tensors of one shape at once: the variance within and between samples."""
    alike: dict[tuple[torch.device, torch.dtype, torch.Size], list[Reduced]] = {}
    for r in every:
        if r.mean.dim() == 2:
            alike.setdefault((r.mean.device, r.mean.dtype, r.mean.shape), []).append(r)
    for group in alike.values():
        between, mean = torch.var_mean(torch.stack([r.mean for r in group]), 1, correction=0)
        variance = torch.stack([r.variance for r in group]).mean(1) + between
        for r, settled_mean, settled_variance in zip(group, mean.unbind(), variance.unbind(), strict=True):
            r.mean, r.variance = settled_mean, settled_variance


def reduce(tensor: Tensor, channels: int | None = None) -> Reduced:
    """Mean and variance of every channel; see `moments` for their dimension."""
    values = tensor.float() if tensor.dtype in HALF else tensor
    values = values.reshape(-1, 1) if values.dim() < 2 else values
    shape = values.shape
    at = channel_dim(values) if channels is None else channels
    dims = tuple(i for i in range(len(shape)) if i != at)
    count = math.prod(shape[i] for i in dims[1:])
    if not launches_are_dear(values):
        return Reduced(*_plain_reductions(values, dims, count * shape[0]), count)
    neighbours = at == 1 and len(shape) > 2  # a channel's values of one sample lie side by side
    by_sample = neighbours and ((count >= NEIGHBOURS and values.is_contiguous()) or _channels_last(values))
    variance, mean = torch.var_mean(values, dims[1:] if by_sample else dims, correction=0)
    return Reduced(mean, variance, count)


def _channels_last(values: Tensor) -> bool:
    """Whether channels lie side by side, where a GPU reduces a sample up to five times as fast as the batch."""
    return values.dim() == 4 and values.is_contiguous(memory_format=torch.channels_last)


def launches_are_dear(tensor: Tensor) -> bool:
    """Whether one `torch.var_mean` is better than several plain reductions, as on a GPU, which waits for Python."""
    return tensor.is_cuda


def _plain_reductions(values: Tensor, dims: tuple[int, ...], count: int) -> tuple[Tensor, Tensor]:
    """Mean and variance of every channel by reductions over neighbours.

    They are as exact as `torch.var_mean`, and many times faster on the CPU. The largest deviation is divided out, since
    squares of float32 leave its range long before the numbers do.
    """
    wide = wide_dtype(values)
    mean = values.mean(dims, keepdim=True)
    centred = values - mean
    low, high = torch.aminmax(centred)
    scale = torch.maximum(high, -low).clamp_min(torch.finfo(values.dtype).tiny)
    centred /= scale
    if values.dim() > 2 and 1 not in dims:
        spread = torch.linalg.vector_norm(centred.flatten(2), dim=2).to(wide).square().sum(0)
    else:
        spread = torch.linalg.vector_norm(centred, dim=dims).to(wide).square()
    return mean.flatten().to(wide), spread * scale.to(wide).square() / count


def wide_dtype(tensor: Tensor) -> torch.dtype:
    """The type for the few numbers that a tensor is reduced to."""
    return torch.float32 if tensor.device.type == "mps" else torch.float64
