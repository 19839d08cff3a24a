"""The plain values in the state of a checkpoint, which may be forged: each has its kind, or the state is damaged."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_MOST_NUMBERS = 1 << 26  # of an image, so that an example fits into the memory
_NUMBER = int | float
_KINDS: dict[str, Any] = {
    "step": int,
    "seconds": _NUMBER,
    "validation": list | None,
    "config": str,
    "classes": list,
    "input_shape": list,
    "vocabulary": int,
}


def has_known_kinds(state: Mapping[str, Any]) -> bool:
    """Whether the values that a run stores have the kinds that it reads; others may be anything."""
    if not all(isinstance(state[name], kind) for name, kind in _KINDS.items() if name in state):
        return False
    score = state.get("validation") or [0.0, 0.0]  # loss and accuracy
    return len(score) == 2 and all(isinstance(value, _NUMBER) for value in score) and state.get("step", 0) >= 0


def image_shape(state: Mapping[str, Any], folder: str | Path) -> list[int]:
    """Return the shape of the images that a run was trained on.

    Raises:
        ValueError: If the state has no classes or no shape, or images of that shape would fill the memory.
    """
    shape: list[int] = state.get("input_shape", [])
    plain = bool(shape) and all(isinstance(side, int) and side > 0 for side in shape)
    if "classes" not in state or not plain or math.prod(shape) > _MOST_NUMBERS:
        raise ValueError(
            f"expected classes and a shape of images in the checkpoint in '{folder}', got "
            f"{'no classes' if 'classes' not in state else shape}; start the run again"
        )
    return shape
