"""Many small tensors at once: norms, copies and numbers in few launches, which is what they cost on a GPU."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import TypeVar

import torch
from torch import Tensor

Key = TypeVar("Key", bound=Hashable)


def _alike(tensors: Mapping[Key, Tensor]) -> Iterator[tuple[list[Key], torch.dtype]]:
    """The keys of tensors that share device and type."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Key]] = {}
    for key, tensor in tensors.items():
        kinds.setdefault((tensor.device, tensor.dtype), []).append(key)
    for (_, dtype), keys in kinds.items():
        yield keys, dtype


def norms(tensors: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
    """The norm of each tensor; of half precision in float32."""
    found: dict[Key, Tensor] = {}
    for keys, dtype in _alike(tensors):
        wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
        found.update(zip(keys, torch._foreach_norm([tensors[key] for key in keys], 2, dtype=wide), strict=True))
    return found


def copies(tensors: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
    """A copy of each tensor."""
    found = {key: torch.empty_like(tensor) for key, tensor in tensors.items()}
    for keys, _ in _alike(tensors):
        torch._foreach_copy_([found[key] for key in keys], [tensors[key] for key in keys])
    return found


def numbers(tensors: Mapping[Key, Tensor]) -> dict[Key, float]:
    """Tensors of one number each as numbers, in one transfer for all that are alike."""
    found: dict[Key, float] = {}
    for keys, _ in _alike(tensors):
        found.update(zip(keys, torch.stack([tensors[key] for key in keys]).tolist(), strict=True))
    return found
