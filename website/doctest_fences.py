"""An extension of griffe: the examples `>>> …` of a docstring become blocks of code."""

from __future__ import annotations

import re
from typing import Any

import griffe


class DoctestFences(griffe.Extension):
    """Puts fences around the doctests of every docstring."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of an object."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """Return a text with fences around its doctests, each of which ends at an empty line.

    >>> fenced("a" + chr(10) * 2 + ">" + ">> 1" + chr(10) + "1").splitlines()
    ['a', '', '```pycon', '>>> 1', '1', '```']
    """
    return re.sub(r"^>>> (?:.+\n?)+", lambda match: f"```pycon\n{match.group(0).rstrip()}\n```\n", text, flags=re.M)
