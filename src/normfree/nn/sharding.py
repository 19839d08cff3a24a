"""Tensors that may be spread over several processes by FSDP2 (`fully_shard`), and tensors on several devices.

All processes must call `full_tensor` together.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

Key = TypeVar("Key", bound=Hashable)


def by_device_and_type(tensors: Mapping[Key, Tensor]) -> Iterator[tuple[list[Key], torch.dtype]]:
    """Group the keys of tensors that share device and type, so that one kernel can handle each group.

    Sharded tensors are groups of their own.
    """
    groups: defaultdict[tuple[torch.device, torch.dtype, bool], list[Key]] = defaultdict(list)
    for key, tensor in tensors.items():
        groups[tensor.device, tensor.dtype, is_sharded(tensor)].append(key)
    for (_, dtype, _), keys in groups.items():
        yield keys, dtype


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is spread over processes (a DTensor of FSDP2)."""
    # Importing torch's distributed tensors takes seconds, so look them up only if the caller has imported them.
    library: Any = sys.modules.get("torch.distributed.tensor")
    return library is not None and isinstance(tensor, library.DTensor)


def full_tensor(tensor: Tensor) -> Tensor:
    """Return a tensor with all its values, gathered from the processes if it is sharded."""
    full: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return full
