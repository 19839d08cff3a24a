"""The kernels of a stage by the properties of its images, compiled at the first use or ahead."""

from __future__ import annotations

from collections.abc import Collection
from typing import cast

import torch
from torch import Tensor

from normfree.kernels.compile import compile_ahead
from normfree.kernels.driver import Kernels, kernels_for, multiprocessors, shared_memory
from normfree.kernels.tiling import Form, Tiling, choose_tiling, neutral_mask


def prepare(
    channels: int,
    size: int,
    *,
    images: int,
    form: Form,
    neutral: Collection[str],
    stream: torch.dtype,
    recompute: bool,
    device: torch.device,
) -> None:
    """Start to compile the kernels of a stage in another thread; the first call of `stage` waits for them.

    The arguments are those of `stage` and the properties of its `x`.
    """
    index = device_index(device)
    tiling = _tiling((images, channels, size), stream, index, form, neutral_mask(neutral), recompute)
    compile_ahead(tiling, torch.cuda.get_device_capability(index))


def device_index(device: torch.device) -> int:
    """The number of a CUDA device; of the current one if it has none."""
    return torch.cuda.current_device() if device.index is None else device.index


def _tiling(
    shape: tuple[int, ...], stream: torch.dtype, device: int, form: str, neutral: int, recompute: bool
) -> Tiling:
    return choose_tiling(
        shape[1],
        shape[2],
        cast(Form, form),
        images=shape[0],
        multiprocessors=multiprocessors(device),
        neutral=neutral,
        wide_stream=stream == torch.float32,
        recompute=recompute,
        wgmma=torch.cuda.get_device_capability(device) == (9, 0),
        shared_memory=shared_memory(device),
    )


def chosen_kernels(x: Tensor, form: str, neutral: int, recompute: bool) -> Kernels:
    """The kernels for these images, compiled and loaded."""
    device = device_index(x.device)
    return kernels_for(_tiling(tuple(x.shape), x.dtype, device, form, neutral, recompute), device)
