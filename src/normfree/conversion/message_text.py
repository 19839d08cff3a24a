"""Text for errors and notes: the names of modules in quotes, lists of names, and reasons of the same kind as one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

MOST_REASONS = 6  # reasons in an error or names in a note; a deep network has one per block


def quoted(name: str) -> str:
    """The name of a module or sum in quotes; the model itself is '(model)'."""
    return f"'{name}'" if name.partition("#")[0] else f"'(model){name}'"


def listed(names: Iterable[str], classes: Mapping[str, str] | None = None) -> str:
    """The first names, with their classes if given, and the number of the others."""
    every = list(names)
    shown = [quoted(name) + (f" ({classes[name]})" if classes else "") for name in every[:MOST_REASONS]]
    more = f" and {len(every) - MOST_REASONS} more" if len(every) > MOST_REASONS else ""
    return ", ".join(shown) + more


def grouped(reasons: Iterable[str]) -> list[str]:
    """One of each kind of reason, with the number of the others that differ from it in quoted names only.

    >>> grouped(["'a': no place", "'b': no place", "'c': no bias"])
    ["'a' (and 1 more): no place", "'c': no bias"]
    """
    kinds: dict[str, list[str]] = {}
    for reason in reasons:
        kinds.setdefault(re.sub("'[^' ]*'", "''", reason), []).append(reason)
    return [
        re.sub("^('[^' ]*')", rf"\1 (and {len(alike) - 1} more)", alike[0]) if len(alike) > 1 else alike[0]
        for alike in kinds.values()
    ]
