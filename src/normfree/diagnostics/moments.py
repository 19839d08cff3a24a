"""A few numbers for a tensor: channel-averaged squared mean and variance, and the norm of a sample.

With the mean and variance of each channel taken over the batch and all positions, `mean_square` is the channel average
of the squared means and `variance` that of the variances; `norm` is the root of the summed squares a sample, averaged
over the batch in the square.

Reference: normdead, section 4.2 and Listing 1 (signal propagation plots).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Stats:
    """Squared mean, variance and norm of one tensor."""

    mean_square: float
    variance: float
    norm: float


def channel_dim(tensor: Tensor) -> int:
    """The dimension of the channels."""
    return 2 if tensor.dim() == 3 else 1


@dataclass(frozen=True, eq=False)
class Reduced:
    """A tensor reduced to mean and variance a channel, and the number of values a channel and sample."""

    channels: Tensor
    count: float


def moments(tensor: Tensor) -> Stats:
    """Channel-averaged squared mean and variance, and the root mean square norm of a sample.

    Channels are dimension 1 of images and vectors (N, C, …) and the last of sequences (N, T, C). On a GPU a variance
    beyond the range of float32 is infinite.

    >>> moments(torch.ones(4, 2, 3, 3))
    Stats(mean_square=1.0, variance=0.0, norm=4.242640687119285)
    """
    return finish([reduce(tensor)])[0]


def finish(every: Sequence[Reduced]) -> list[Stats]:
    """The numbers of reduced tensors, brought off their device in one transfer: one each would stall a GPU."""
    flat = torch.cat([r.channels.flatten() for r in every]).to("cpu", torch.float64).numpy()
    ends = np.cumsum([r.channels.numel() for r in every])
    found = []
    for r, part in zip(every, np.split(flat, ends[:-1]), strict=True):
        mean, variance = part.reshape(2, -1)
        squares = mean**2
        norm = math.sqrt((squares + variance).sum() * r.count)
        found.append(Stats(float(squares.mean()), float(variance.mean()), norm))
    return found


def reduce(tensor: Tensor) -> Reduced:
    """Mean and variance of every channel, as two rows."""
    values = tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
    values = values.reshape(-1, 1) if values.dim() < 2 else values
    dims = [d for d in range(values.dim()) if d != channel_dim(values)]
    count = math.prod(values.shape[d] for d in dims)
    if values.is_cuda:
        if values.dim() > 3 and values.is_contiguous() and values.shape[2:].numel() >= 512:
            # First over neighbours, which reads at twice the speed where there are many, then over the batch: the
            # variance within and between.
            within, means = torch.var_mean(values.flatten(2), 2, correction=0)
            between, mean = torch.var_mean(means, 0, correction=0)
            return Reduced(torch.stack([mean, within.mean(0) + between]), count / values.shape[0])
        variance, mean = torch.var_mean(values, dims, correction=0)
        return Reduced(torch.stack([mean, variance]), count / values.shape[0])
    wide = wide_dtype(values)
    # Plain reductions, each over neighbours: as exact as torch.var_mean, and many times faster on the CPU. The largest
    # deviation is divided out, since squares of float32 leave its range long before the numbers do.
    mean = values.mean(dims, keepdim=True)
    centred = values - mean
    low, high = torch.aminmax(centred)
    scale = torch.maximum(high, -low).clamp_min(torch.finfo(values.dtype).tiny)
    centred /= scale
    if values.dim() > 3:
        spread = torch.linalg.vector_norm(centred.flatten(2), dim=2).to(wide).square().sum(0)
    else:
        spread = torch.linalg.vector_norm(centred, dim=dims).to(wide).square()
    variance = spread * scale.to(wide).square() / count
    return Reduced(torch.stack([mean.flatten().to(wide), variance]), count / values.shape[0])


def wide_dtype(tensor: Tensor) -> torch.dtype:
    """The type for the few numbers that a tensor is reduced to."""
    return torch.float32 if tensor.device.type == "mps" else torch.float64
