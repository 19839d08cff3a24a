"""Error messages that several modules share, and the type of float arrays."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
_FEW, _MANY = 12, 40  # the most names that a message lists next to close matches, and without


def value_error(expected: str, got: object, remedy: str) -> ValueError:
    """Return the error for an invalid value."""
    return ValueError(f"expected {expected}, got {got!r}; {remedy}")


def require_positive(**values: int) -> None:
    """Raise `ValueError` if a count is below 1."""
    for name, value in values.items():
        if value < 1:
            raise value_error(f"{name} of at least 1", value, f"pass a {name} of at least 1")


def unknown_name(what: str, got: str, known: Iterable[str], where: str = "") -> ValueError:
    """Return the error for an unknown name, with the closest known names, or all if they are few or none is close.

    >>> print(unknown_name("colour", "gren", ["red", "green", "blue"]))
    unknown colour 'gren'; did you mean 'green' or 'red'? expected one of: red, green, blue

    Args:
        what: The kind of name.
        got: The unknown name.
        known: The known names.
        where: A text after the name, such as " in 'setup.toml'".
    """
    known = list(known)
    close = difflib.get_close_matches(got, known, n=3, cutoff=0.5)
    parts = [f"did you mean {' or '.join(map(repr, close))}?"] if close else []
    if len(known) <= _FEW or not close:
        rest = f", … ({len(known)} in all)" if len(known) > _MANY else ""
        parts.append(f"expected one of: {', '.join(known[:_MANY]) or 'none'}{rest}")
    return ValueError(f"unknown {what} '{got}'{where}; {' '.join(parts)}")
