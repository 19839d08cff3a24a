"""What was typed, for the results that keep it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping


def typed(verb: str, *words: str, options: Mapping[str, object]) -> str:
    """A command line in one order; an option without a value is left out, one with several comes again.

    >>> typed("train", "fashion", options={"--set": ["lr=0.1", "epochs=2"], "--out": None, "--device": "cpu"})
    'normfree train fashion --set lr=0.1 --set epochs=2 --device cpu'
    """
    given = [
        word
        for name, value in options.items()
        for one in (value if isinstance(value, list) else [] if value is None else [value])
        for word in (name, str(one))
    ]
    return shlex.join(["normfree", verb, *words, *given])
