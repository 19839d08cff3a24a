"""Text output on a terminal: the console, and sparklines."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from normfree.report.formatting import printable

if TYPE_CHECKING:
    from rich.console import Console

_BARS = "▁▂▃▄▅▆▇█"
_UNBOUNDED = 100_000  # columns of a pipe


def open_console(*, stderr: bool = False) -> Console:
    """Return a console on stdout or stderr.

    It prints no colours and styles if NO_COLOR is set. In a pipe, lines are not wrapped unless COLUMNS is set.
    """
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    unbounded = not stream.isatty() and not os.environ.get("COLUMNS") and not os.environ.get("FORCE_COLOR")
    width = _UNBOUNDED if unbounded else None

    class PlainConsole(Console):
        """A console on which the texts it prints cannot move the cursor or change colours."""

        def print(self, *objects: Any, **settings: Any) -> None:
            super().print(*(printable(text) if type(text) is str else text for text in objects), **settings)

    if os.environ.get("NO_COLOR"):  # rich's own no_color keeps bold and dim
        return PlainConsole(file=stream, color_system=None, emoji=False, highlight=False, width=width)
    return PlainConsole(file=stream, emoji=False, highlight=False, width=width)


def sparkline(values: Sequence[float], width: int = 20, log: bool = True) -> str:
    """Draw a curve as one line of bars; each bar is the mean of its share of the values, of their logarithms if `log`.

    A bar is ✗ if one of its values is NaN or infinite, and 0 if all of them are zero and `log` is true. A logarithmic
    line spans at least a decade, so that noise does not look like growth.

    >>> sparkline([1, 10, 100, 1000])
    '▁▃▆█'

    Raises:
        ValueError: if there are no values, the width is below 1, or a value is negative and `log` is true.
    """
    numbers = [float(value) for value in values]
    if not numbers or width < 1:
        raise ValueError(
            f"expected values and width >= 1, got {len(numbers)} values and width {width}; pass at least one"
        )
    if log and (negative := next((v for v in numbers if v < 0), None)) is not None:
        raise ValueError(f"expected values >= 0 for a logarithmic line, got {negative:g}; pass log=False")
    count = min(width, len(numbers))
    edges = [len(numbers) * i // count for i in range(count + 1)]
    bars: list[float | str] = [_bar(numbers[a:b], log) for a, b in pairwise(edges)]
    drawn = [bar for bar in bars if isinstance(bar, float)]
    low, high = (min(drawn), max(drawn)) if drawn else (0.0, 1.0)
    least = 1.0 if log else 0.0
    if high - low < least or high == low:
        middle, half = (low + high) / 2, (least or 1.0) / 2
        low, high = middle - half, middle + half
    top = len(_BARS) - 1
    return "".join(bar if isinstance(bar, str) else _BARS[_clamp(_share(bar, low, high) * top, top)] for bar in bars)


def _bar(values: Sequence[float], log: bool) -> float | str:
    if not all(map(math.isfinite, values)):
        return "✗"
    drawn = [math.log10(v) for v in values if v > 0] if log else list(values)
    return math.fsum(v / len(drawn) for v in drawn) if drawn else "0"


def _share(value: float, low: float, high: float) -> float:
    return (value - low) / (high - low) if high > low else 0.5


def _clamp(value: float, top: int) -> int:
    return min(top, max(0, round(value)))
