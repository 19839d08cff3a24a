"""Adaptive clipping of sharded gradients (DTensor, as FSDP2 makes them): unit norms over all processes.

Rows of a matrix that is sharded along axis 0 are whole on one process. All other norms are sums over processes, and
one reduction per dimension of a device mesh computes all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_TINY = 1e-30  # avoids a division by 0 for a zero gradient, whose factor is 1 anyway


def is_vector(shape: Sequence[int]) -> bool:
    """Whether a tensor of this shape is one unit: a scalar, or a vector with any number of dimensions of length 1."""
    return sum(length > 1 for length in shape) <= 1


@torch.no_grad()
def clip_sharded_(params: Sequence[DTensor], grads: Sequence[DTensor], clip: float, eps: float) -> None:
    """Scale sharded gradients unit by unit, in place; see `clip_adaptively_`. All processes must call it together.

    Raises:
        ValueError: If a gradient is a partial sum, which is not reduced over the processes yet.
    """
    for i, grad in enumerate(grads):
        if any(placement.is_partial() for placement in grad.placements):
            raise ValueError(f"expected gradients that are reduced over the processes, got a partial sum at {i}")
    squares = _unit_squares([*params, *grads])
    weights, steps = squares[: len(params)], squares[len(params) :]
    for grad, weight, step in zip(grads, weights, steps, strict=True):
        most = weight.sqrt().clamp_min(eps).mul(clip)
        local: Tensor = grad.to_local()
        local.mul_((most / step.sqrt().clamp_min(_TINY)).clamp_max(1.0))


def _unit_squares(tensors: Sequence[DTensor]) -> list[Tensor]:
    """Return the squared norms of the units in each local shard, shaped to broadcast over it."""
    squares: list[Tensor] = []
    sums: dict[tuple[int, int], tuple[DTensor, list[int]]] = {}  # by mesh and its dimension
    for i, tensor in enumerate(tensors):
        local: Tensor = tensor.to_local()
        axes = range(0 if is_vector(tensor.shape) else 1, local.dim())
        wide = torch.promote_types(local.dtype, torch.float32)
        squares.append(torch.linalg.vector_norm(local, dim=tuple(axes), keepdim=True, dtype=wide).square())
        for dimension, placement in enumerate(tensor.placements):
            if placement.is_shard() and placement.dim % local.dim() in axes:  # type: ignore[attr-defined]
                sums.setdefault((id(tensor.device_mesh), dimension), (tensor, []))[1].append(i)
    for (_, dimension), (tensor, members) in sums.items():
        flat = torch.cat([squares[i].flatten() for i in members])
        dist.all_reduce(flat, group=tensor.device_mesh.get_group(dimension))
        parts = flat.split([squares[i].numel() for i in members])
        for i, part in zip(members, parts, strict=True):
            squares[i] = part.view_as(squares[i])
    return squares
