"""What the theory room shares: the type of its arrays, and how it says no."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


def refusal(expected: str, got: object, remedy: str) -> ValueError:
    """The error for a number that has no meaning here."""
    return ValueError(f"expected {expected}, got {got!r}; {remedy}")


def require_positive(**values: int) -> None:
    """Refuse counts below 1, by name."""
    for name, value in values.items():
        if value < 1:
            raise refusal(f"{name} of at least 1", value, f"check the {name} of the layer")
