"""Text output on a terminal: the console, sparklines, and curves drawn with characters."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from normfree.report.formatting import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_COLOURS = ("cyan", "yellow", "magenta", "green", "red", "blue", "bright_white", "bright_black")
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_BARS = "▁▂▃▄▅▆▇█"
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_BRAILLE = 0x2800
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # [row][column] of the 2×4 dots of a cell
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


def line_plot(
    series: Mapping[str, Sequence[float]],
    *,
    width: int = 72,
    height: int = 14,
    title: str = "",
    x_label: str = "",
    y_label: str = "",
) -> Text:
    """Draw curves on a logarithmic axis with braille dots; print the result with rich, or take its `.plain` text.

    Each curve has a letter and a colour. A curve ends in ✗ if its values turn NaN, infinite or zero for good, and the
    legend says at which position. In between, such values leave a gap.

    Args:
        series: The values of each curve by its name; they are drawn at the positions 1, 2, 3, …
        width: The number of columns, axis included; at least 30.
        height: The number of rows without axis and legend; at least 4.
        title: A heading above the drawing.
        x_label: The name of the positions.
        y_label: The name of the values.

    Raises:
        ValueError: if there is no curve or more than 26, a curve is empty, a value is negative, or the drawing is too
            small.
    """
    from rich.text import Text

    curves = _read_curves(series)
    if width < 30 or height < 4:
        raise ValueError(f"expected width >= 30 and height >= 4, got {width} and {height}; enlarge the drawing")
    x_range = (1.0, float(max(len(curve.heights) for curve in curves)))
    y_range = _decades([y for curve in curves for y in curve.heights if y is not None])
    y_ticks = _ticks(*y_range, max(2, height // 2))
    gutter = max(len(_power_of_ten(tick)) for tick in y_ticks)
    columns = width - gutter - 2

    dots = _rasterize(curves, columns, height, x_range, y_range)
    drawing = _paint(curves, dots, columns, height, x_range, y_range)
    labels = {round((height - 1) * (1 - _share(tick, *y_range))): _power_of_ten(tick) for tick in y_ticks}

    out = Text()
    if title:
        out.append(title[:width].center(width).rstrip() + "\n", "bold")
    if y_label:
        out.append(y_label + "\n", "dim")
    for row, cells in enumerate(drawing):
        out.append(f"{labels.get(row, ''):>{gutter}} {'┤' if row in labels else '│'}", "dim")
        for character, style in cells:
            out.append(character, style)
        out.rstrip()
        out.append("\n")
    out.append(_x_axis(*x_range, columns, gutter), "dim")
    if x_label:
        out.append(" " * (gutter + 2) + x_label.center(columns).rstrip() + "\n", "dim")
    out.append_text(_legend(curves, width))
    return out


@dataclass(frozen=True)
class _TextCurve:
    """A curve by the decades of its values; `None` for a value that cannot be drawn."""

    name: str
    letter: str
    colour: str
    heights: tuple[float | None, ...]
    ending: str  # the words of the legend on a curve that ends early


def _read_curves(series: Mapping[str, Sequence[float]]) -> list[_TextCurve]:
    if not 1 <= len(series) <= len(_LETTERS):
        raise ValueError(f"expected 1 to {len(_LETTERS)} curves, got {len(series)}; draw several plots instead")
    curves = []
    for index, (name, raw) in enumerate(series.items()):
        values = [float(value) for value in raw]
        if not values:
            raise ValueError(f"curve {name!r}: expected values, got none; leave the curve out")
        if (negative := next((v for v in values if v < 0 and math.isfinite(v)), None)) is not None:
            raise ValueError(f"curve {name!r}: expected values >= 0 on a logarithmic axis, got {negative:g}")
        heights = tuple(math.log10(v) if math.isfinite(v) and v > 0 else None for v in values)
        end = max((i + 1 for i, height in enumerate(heights) if height is not None), default=0)
        ending = ""
        if end < len(values):
            verb = "reaches 0" if values[end] == 0 else "leaves float range"
            ending = f"{verb} at {end + 1:,}"
        curves.append(_TextCurve(name, _LETTERS[index], _COLOURS[index % len(_COLOURS)], heights, ending))
    return curves


def _decades(heights: Sequence[float]) -> tuple[float, float]:
    """The ends of the y axis: whole decades, at least two apart if all values are the same."""
    if not heights:
        return (0.0, 1.0)
    low, high = math.floor(min(heights)), math.ceil(max(heights))
    return (low - 1, high + 1) if low == high else (low, high)


def _ticks(low: float, high: float, most: int) -> list[float]:
    """Whole numbers from `low` to `high`, about `most` of them, at a step of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / most
    scale = 10.0 ** math.floor(math.log10(rough))
    step = max(1.0, next(scale * m for m in (1, 2, 5, 10) if scale * m >= rough * 0.85))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def _power_of_ten(exponent: float) -> str:
    return "10" + str(round(exponent)).translate(_SUPERSCRIPT)


def _share(value: float, low: float, high: float) -> float:
    return (value - low) / (high - low) if high > low else 0.5


def _clamp(value: float, top: int) -> int:
    return min(top, max(0, round(value)))


def _rasterize(
    curves: Sequence[_TextCurve], columns: int, height: int, x_range: tuple[float, float], y_range: tuple[float, float]
) -> list[dict[tuple[int, int], int]]:
    """For each curve, the cells (row, column) that it crosses and the braille dots to set in them."""
    right, bottom = 2 * columns - 1, 4 * height - 1
    result = []
    for curve in curves:
        cells: dict[tuple[int, int], int] = {}
        previous: tuple[int, int] | None = None
        for x, y in enumerate(curve.heights, 1):
            if y is None:
                previous = None
                continue
            here = (
                _clamp(_share(x, *x_range) * right, right),
                _clamp((1 - _share(y, *y_range)) * bottom, bottom),
            )
            if here == previous:
                continue
            for i, j in _segment(previous or here, here):
                key = (j // 4, i // 2)
                cells[key] = cells.get(key, 0) | _DOTS[j % 4][i % 2]
            previous = here
        result.append(cells)
    return result


def _segment(start: tuple[int, int], end: tuple[int, int]) -> list[tuple[int, int]]:
    steps = max(abs(end[0] - start[0]), abs(end[1] - start[1]), 1)
    return [
        (round(start[0] + (end[0] - start[0]) * k / steps), round(start[1] + (end[1] - start[1]) * k / steps))
        for k in range(steps + 1)
    ]


def _paint(
    curves: Sequence[_TextCurve],
    dots: Sequence[dict[tuple[int, int], int]],
    columns: int,
    height: int,
    x_range: tuple[float, float],
    y_range: tuple[float, float],
) -> list[list[tuple[str, str]]]:
    """Merge the curves into one grid of characters and styles, then set the letters and ✗ on top."""
    grid = [[(" ", "")] * columns for _ in range(height)]
    owners: dict[tuple[int, int], set[int]] = {}
    mask: dict[tuple[int, int], int] = {}
    for index, cells in enumerate(dots):
        for key, bits in cells.items():
            owners.setdefault(key, set()).add(index)
            mask[key] = mask.get(key, 0) | bits
    for key, bits in mask.items():
        owner = max(owners[key], key=lambda i: (dots[i][key].bit_count(), i))
        grid[key[0]][key[1]] = (chr(_BRAILLE + bits), curves[owner].colour)
    for index, curve in enumerate(curves):
        # Letters start at a different column for each curve, so that the letters of parallel curves do not clump.
        period = max(12, columns // 3)
        alone = [key for key in dots[index] if owners[key] == {index}] or list(dots[index])
        for start in range(period * (2 * index + 1) // (2 * len(curves)), columns, period):
            near = [key for key in alone if abs(key[1] - start) <= period // 3]
            if near:
                row, column = min(near, key=lambda key: abs(key[1] - start))
                grid[row][column] = (curve.letter, f"bold {curve.colour}")
        drawn = [(x, y) for x, y in enumerate(curve.heights, 1) if y is not None]
        if curve.ending and drawn:
            x, y = drawn[-1]
            row = _clamp((1 - _share(y, *y_range)) * (4 * height - 1), 4 * height - 1) // 4
            column = _clamp(_share(x, *x_range) * (2 * columns - 1), 2 * columns - 1) // 2
            grid[row][column] = ("✗", f"bold {curve.colour}")
    return grid


def _x_axis(low: float, high: float, columns: int, gutter: int) -> str:
    """The lower axis: a rule with ticks, and the numbers below it that have room."""
    rule, numbers = ["─"] * columns, [" "] * (columns + 8)
    free = 0
    ticks = _ticks(low, high, max(2, columns // 12)) if high > low else [low]
    for tick in sorted({low, *ticks}):
        column = _clamp(_share(tick, low, high) * (columns - 1), columns - 1)
        text = f"{tick:,.6g}"
        start = min(max(0, column - len(text) // 2), max(0, columns - len(text)))
        if start >= free:
            rule[column] = "┬"
            numbers[start : start + len(text)] = text
            free = start + len(text) + 1
    return f"{' ' * (gutter + 1)}└{''.join(rule)}\n{' ' * (gutter + 2)}{''.join(numbers).rstrip()}\n"


def _legend(curves: Sequence[_TextCurve], width: int) -> Text:
    """One entry for each curve, as many in a line as fit."""
    from rich.text import Text

    out = Text()
    used = 0
    for curve in curves:
        ending = f" ✗ {curve.ending}" if curve.ending else ""
        length = len(curve.letter) + 1 + len(curve.name) + len(ending)
        if used and used + 3 + length > width:
            out.append("\n")
            used = 0
        elif used:
            out.append("   ")
            used += 3
        out.append(curve.letter, f"bold {curve.colour}")
        out.append(" " + curve.name, curve.colour)
        out.append(ending)
        used += length
    return out
