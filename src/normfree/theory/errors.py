"""What the theory room shares: the type of its arrays, and how it says no."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
_FEW, _MANY = 12, 40  # names that a message lists beside close ones, and at most


def refusal(expected: str, got: object, remedy: str) -> ValueError:
    """The error for a number that has no meaning here."""
    return ValueError(f"expected {expected}, got {got!r}; {remedy}")


def require_positive(**values: int) -> None:
    """Refuse counts below 1, by name."""
    for name, value in values.items():
        if value < 1:
            raise refusal(f"{name} of at least 1", value, f"check the {name} of the layer")


def unknown_name(what: str, got: str, known: Iterable[str], where: str = "") -> ValueError:
    """The error for a name that nobody knows: the closest ones, and all known ones where they are few or none is close.

    >>> print(unknown_name("colour", "gren", ["red", "green", "blue"]))
    unknown colour 'gren'; did you mean 'green' or 'red'? expected one of: red, green, blue
    """
    known = list(known)
    close = difflib.get_close_matches(got, known, n=3, cutoff=0.5)
    parts = [f"did you mean {' or '.join(map(repr, close))}?"] if close else []
    if len(known) <= _FEW or not close:
        rest = f", … ({len(known)} in all)" if len(known) > _MANY else ""
        parts.append(f"expected one of: {', '.join(known[:_MANY]) or 'none'}{rest}")
    return ValueError(f"unknown {what} '{got}'{where}; {' '.join(parts)}")
