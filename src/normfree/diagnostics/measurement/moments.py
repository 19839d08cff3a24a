"""Statistics of tensors: squared mean and variance averaged over channels, and the norm of a sample.

The mean and variance of each channel are taken over the batch and all positions. `mean_square` is the average over
channels of the squared means, and `variance` that of the variances. `norm` is the root mean square, over the batch, of
the norm of a sample.

A GPU spends more time on launching kernels for small tensors than on computing. The functions for many tensors
therefore need few launches and one transfer for all tensors of a device and type.

Reference: normdead, section 4.2 and Listing 1 (signal propagation plots).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from normfree.diagnostics.signals import Stats
from normfree.nn.model_state import Key, by_device_and_type

HALF = (torch.bfloat16, torch.float16)
# From this many values per sample and channel on, a GPU is twice as fast if each sample is reduced separately.
SIDE_BY_SIDE = 512
MOST_SAMPLES = 4096  # numbers of a tensor that the graph reader looks at
BYTES_PER_REDUCTION = 2**24  # of means per sample that are reduced over the batch together


@dataclass(eq=False, slots=True)
class ChannelMoments:
    """Mean and variance per channel (C), or per sample and channel (N, C) until `reduce_batch` has reduced the batch.

    `count` is the number of values per channel and sample.
    """

    mean: Tensor
    variance: Tensor
    count: int


def channel_dim(tensor: Tensor) -> int:
    """The default dimension of the channels: 2 for sequences (N, T, C), otherwise 1."""
    return 2 if tensor.dim() == 3 else 1


def channels_after(layer: nn.Module | None, tensor: Tensor) -> int:
    """The dimension of the channels at a sum: 1 after a convolution, the last after a linear layer.

    It is the default one if the channels were moved between the layer and the sum.
    """
    dim, width = -1, 0
    if isinstance(layer, nn.modules.conv._ConvNd):
        dim, width = 1, layer.out_channels
    elif isinstance(layer, nn.Linear):
        width = layer.out_features
    stayed = tensor.dim() > 2 and tensor.shape[dim] == width
    return dim % tensor.dim() if stayed else channel_dim(tensor)


def moments(tensor: Tensor, channels: int | None = None) -> Stats:
    """Compute squared mean, variance and norm of a tensor.

    On a GPU, a variance beyond the range of float32 is infinite.

    Args:
        tensor: Values with the batch as their first dimension.
        channels: The dimension of the channels. The default is 1 for images and vectors (N, C, …) and 2 for sequences
            (N, T, C); sequences with channels before positions (N, C, T) need it.

    >>> moments(torch.ones(4, 2, 3, 3))
    Stats(mean_square=1.0, variance=0.0, norm=4.242640687119285)
    """
    return to_stats([channel_moments(tensor, channels)])[0]


def channel_moments(tensor: Tensor, channels: int | None = None) -> ChannelMoments:
    """Compute mean and variance of every channel; `channels` is their dimension, as for `moments`."""
    values = tensor.float() if tensor.dtype in HALF else tensor
    values = values.reshape(-1, 1) if values.dim() < 2 else values
    shape = values.shape
    at = channel_dim(values) if channels is None else channels
    dims = tuple(i for i in range(len(shape)) if i != at)
    count = math.prod(shape[i] for i in dims[1:])
    if not launches_are_expensive(values):
        return ChannelMoments(*_plain_reductions(values, dims, count * shape[0]), count)
    side_by_side = at == 1 and len(shape) > 2  # the values of one channel and sample
    by_sample = side_by_side and ((count >= SIDE_BY_SIDE and values.is_contiguous()) or _is_channels_last(values))
    variance, mean = torch.var_mean(values, dims[1:] if by_sample else dims, correction=0)
    return ChannelMoments(mean, variance, count)


def reduce_batch(every: Iterable[ChannelMoments]) -> None:
    """Reduce moments per sample over the batch, all tensors of one shape at once.

    The variance of a channel is the mean variance within samples plus the variance between their means.
    """
    alike: dict[tuple[torch.device, torch.dtype, torch.Size], list[ChannelMoments]] = {}
    for m in every:
        if m.mean.dim() == 2:
            alike.setdefault((m.mean.device, m.mean.dtype, m.mean.shape), []).append(m)
    for group in alike.values():
        between, means = torch.var_mean(torch.stack([m.mean for m in group]), 1, correction=0)
        variances = torch.stack([m.variance for m in group]).mean(1) + between
        for m, mean, variance in zip(group, means.unbind(), variances.unbind(), strict=True):
            m.mean, m.variance = mean, variance


def to_stats(every: Sequence[ChannelMoments]) -> list[Stats]:
    """Average moments over channels, after one transfer from the device: one transfer each would stall a GPU."""
    reduce_batch(every)
    sizes = [m.mean.numel() for m in every]
    values = concatenate([*(m.mean for m in every), *(m.variance for m in every)])
    starts = np.cumsum([0, *sizes[:-1]])
    squares = np.add.reduceat(values[: sum(sizes)] ** 2, starts)
    variances = np.add.reduceat(values[sum(sizes) :], starts)
    rows = zip(every, sizes, squares.tolist(), variances.tolist(), strict=True)
    return [Stats(s / size, v / size, math.sqrt((s + v) * m.count)) for m, size, s, v in rows]


class MeasuredTensor(NamedTuple):
    """A tensor, its moments, and the parts whose gradient is its gradient.

    Keeping a reference prevents reuse of the tensor's address.
    """

    key: object
    tensor: Tensor
    moments: ChannelMoments
    gradients: list[Any]


class MomentStore(dict[Key, ChannelMoments]):
    """Moments by key. A tensor that is measured several times in a row is reduced once."""

    def __init__(self) -> None:
        self.recent: deque[MeasuredTensor] = deque(maxlen=3)
        self.waiting_bytes = 0

    def measure(self, tensor: Tensor, channels: int) -> MeasuredTensor:
        """Measure a tensor; a block's output is the next one's shortcut, and a sum hands its gradient on."""
        key = (tensor.data_ptr(), tensor._version, tensor.shape, tensor.stride(), channels)
        for measured in self.recent:
            if measured.key == key:
                return measured
        found = channel_moments(tensor.detach(), channels)
        if found.mean.dim() == 2:
            self.waiting_bytes += found.mean.nbytes
        self.recent.append(MeasuredTensor(key, tensor, found, []))
        return self.recent[-1]

    def store(self, key: Key, found: ChannelMoments) -> None:
        """Store the moments, and reduce all over the batch if those that wait take much memory."""
        self[key] = found
        if self.waiting_bytes > BYTES_PER_REDUCTION:
            self.reduce()

    def reduce(self) -> None:
        """Start the reductions over the batch that remain, without waiting for them."""
        reduce_batch(self.values())
        self.waiting_bytes = 0

    def stats(self) -> dict[Key, Stats]:
        """The statistics of all."""
        every = list(dict.fromkeys(self.values()))
        found = dict(zip(every, to_stats(every), strict=True))
        return {key: found[moments] for key, moments in self.items()}


@torch.no_grad()
def norms(tensors: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
    """Compute the norm of each tensor, outside of any graph; norms of half precision are in float32."""
    found: dict[Key, Tensor] = {}
    for keys, dtype in by_device_and_type(tensors):
        wide = torch.float32 if dtype in HALF else dtype
        found.update(zip(keys, torch._foreach_norm([tensors[key] for key in keys], 2, dtype=wide), strict=True))
    return found


def concatenate(tensors: Sequence[Tensor]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Concatenate the values of vectors in order, with one transfer for each device and type."""
    pieces: dict[int, Any] = {}
    for keys, _ in by_device_and_type(dict(enumerate(tensors))):
        values = torch.cat([tensors[key] for key in keys]).to("cpu", torch.float64).numpy()
        if len(keys) == len(tensors):
            return values
        ends = np.cumsum([tensors[key].numel() for key in keys])
        pieces.update(zip(keys, np.split(values, ends[:-1]), strict=True))
    return np.concatenate([pieces[i] for i in range(len(tensors))])


FEW_SAMPLES = 8  # that are compared with each other
FEW_VALUES = 2048  # of each sample, evenly spaced: all of them would cost as much as the other statistics


@torch.no_grad()
def variations(tensor: Tensor) -> Tensor:
    """The variance over a few samples, and over the second of three dimensions, relative to the second moment.

    Both are 1 where there is nothing to compare.

    >>> variations(torch.tensor([[1.0, 1.0], [3.0, 1.0]]))
    tensor([0.1667, 1.0000])
    """
    some = tensor[:FEW_SAMPLES].detach()
    if some.dim() < 2 or len(some) < 2 or not some.numel():
        return some.new_ones(2, dtype=torch.float32)
    flat = some.reshape(len(some), -1)
    samples = _relative_variance(flat[:, :: max(1, flat.shape[1] // FEW_VALUES)].float(), 0)
    if some.dim() != 3 or some.shape[1] <= 3:
        return torch.stack([samples, torch.ones_like(samples)])
    tokens = _relative_variance(some[:, :, :: max(1, flat.shape[1] // FEW_VALUES)].float(), 1)
    return torch.stack([samples, tokens])


def _relative_variance(x: Tensor, dim: int) -> Tensor:
    """The mean variance over a dimension, relative to the second moment; `torch.var` takes many times as long."""
    shifted = x - x.narrow(dim, 0, 1)  # exactly zero where all are alike
    deviations = shifted - shifted.mean(dim, keepdim=True)
    return (deviations.square().mean() / x.square().mean()).nan_to_num(1.0)


def adds_constant(x: Tensor, out: Tensor) -> bool:
    """Whether a module adds the same to every sample of its input, and not zero."""
    with torch._C.DisableTorchFunction():  # an observer counts the model's additions, not these
        added = (out - x).float()
        spread = (added - added[:1]).abs().max()
        return bool((spread <= 1e-5 * x.abs().max()) & (added.abs().max() > spread))


def launches_are_expensive(tensor: Tensor) -> bool:
    """Whether one `torch.var_mean` is faster than several plain reductions, as on a GPU, which waits for Python."""
    return tensor.is_cuda


def _is_channels_last(values: Tensor) -> bool:
    """Whether channels lie side by side; a GPU then reduces by samples up to five times as fast as over the batch."""
    return values.dim() == 4 and values.is_contiguous(memory_format=torch.channels_last)


OFFSET = 0.1  # variance over second moment, below which their difference from the squared mean loses digits
LEAST_NORM = 1e-15  # of a float32 tensor; squares of smaller numbers leave its range


def _plain_reductions(values: Tensor, dims: tuple[int, ...], count: int) -> tuple[Tensor, Tensor]:
    """Compute mean and variance of every channel by reductions over neighbouring values.

    The variance is the second moment minus the squared mean, which reads the tensor twice and writes nothing. Where
    that would lose digits, the values are centred first. Both are as exact as `torch.var_mean`, and many times faster
    on a CPU.
    """
    wide = torch.float32 if values.device.type == "mps" else torch.float64
    if values.dim() > 2 and 1 not in dims:
        rows = values.flatten(2)
        mean = rows.mean(2).to(wide).mean(0)
        squares = torch.linalg.vector_norm(rows, dim=2).to(wide).square().sum(0) / count
    else:
        mean = values.mean(dims).to(wide)
        squares = values.square().sum(dims).to(wide) / count
    variance = squares - mean.square()
    total = float(squares.sum())
    if LEAST_NORM**2 < total < math.inf and float(variance.sum()) > OFFSET * total:
        return mean, variance.clamp_min(0)
    if total == 0 and not bool(values.any()):  # a branch that starts at zero
        return mean, variance
    return _centred_reductions(values, dims, count, wide)


def _centred_reductions(values: Tensor, dims: tuple[int, ...], count: int, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    """Compute mean and variance of every channel from the deviations.

    The largest deviation is divided out, since squares leave the range of float32 long before the numbers do.
    """
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


def sample_values(tensor: Tensor) -> Tensor:
    """Some evenly spaced numbers of a tensor, as float32, without a copy of all of it."""
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda i: -strides[i])
    values = tensor.permute(order)
    if not values.is_contiguous():
        values = values[: max(1, MOST_SAMPLES // max(1, values[0].numel()))] if values.dim() else values
    return values.reshape(-1)[:: max(1, values.numel() // MOST_SAMPLES)].float()
