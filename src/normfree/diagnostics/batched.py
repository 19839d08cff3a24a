"""Many small tensors at once: norms, copies and numbers in few launches, which is what they cost on a GPU."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

Key = TypeVar("Key", bound=Hashable)
HALF = (torch.bfloat16, torch.float16)


def _alike(tensors: Mapping[Key, Tensor]) -> Iterator[tuple[list[Key], torch.dtype]]:
    """The keys of tensors that share device and type."""
    kinds: defaultdict[tuple[torch.device, torch.dtype], list[Key]] = defaultdict(list)
    for key, tensor in tensors.items():
        kinds[tensor.device, tensor.dtype].append(key)
    for (_, dtype), keys in kinds.items():
        yield keys, dtype


@torch.no_grad()
def norms(tensors: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
    """The norm of each tensor, outside of any graph; of half precision in float32."""
    found: dict[Key, Tensor] = {}
    for keys, dtype in _alike(tensors):
        wide = torch.float32 if dtype in HALF else dtype
        found.update(zip(keys, torch._foreach_norm([tensors[key] for key in keys], 2, dtype=wide), strict=True))
    return found


@torch.no_grad()
def copies(tensors: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
    """A copy of each tensor, outside of any graph."""
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


def flat(tensors: Sequence[Tensor]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """All values of vectors, one after the other, in one transfer for all that are alike."""
    pieces: dict[int, Any] = {}
    for keys, _ in _alike(dict(enumerate(tensors))):
        values = torch.cat([tensors[key] for key in keys]).to("cpu", torch.float64).numpy()
        if len(keys) == len(tensors):
            return values
        ends = np.cumsum([tensors[key].numel() for key in keys])
        pieces.update(zip(keys, np.split(values, ends[:-1]), strict=True))
    return np.concatenate([pieces[i] for i in range(len(tensors))])
