"""Many small tensors at once: norms and numbers in few launches, which is what they cost on a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from normfree.nn.model_state import Key, by_device_and_type

HALF = (torch.bfloat16, torch.float16)


@torch.no_grad()
def norms(tensors: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
    """The norm of each tensor, outside of any graph; of half precision in float32."""
    found: dict[Key, Tensor] = {}
    for keys, dtype in by_device_and_type(tensors):
        wide = torch.float32 if dtype in HALF else dtype
        found.update(zip(keys, torch._foreach_norm([tensors[key] for key in keys], 2, dtype=wide), strict=True))
    return found


def numbers(tensors: Mapping[Key, Tensor]) -> dict[Key, float]:
    """Tensors of one number each as numbers, in one transfer for all that are alike."""
    found: dict[Key, float] = {}
    for keys, _ in by_device_and_type(tensors):
        found.update(zip(keys, torch.stack([tensors[key] for key in keys]).tolist(), strict=True))
    return found


def flat(tensors: Sequence[Tensor]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """All values of vectors, one after the other, in one transfer for all that are alike."""
    pieces: dict[int, Any] = {}
    for keys, _ in by_device_and_type(dict(enumerate(tensors))):
        values = torch.cat([tensors[key] for key in keys]).to("cpu", torch.float64).numpy()
        if len(keys) == len(tensors):
            return values
        ends = np.cumsum([tensors[key].numel() for key in keys])
        pieces.update(zip(keys, np.split(values, ends[:-1]), strict=True))
    return np.concatenate([pieces[i] for i in range(len(tensors))])
