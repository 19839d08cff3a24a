"""Curves over depth: the numbers that describe them (factor per block, straight line, exponent), charts and tables."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from normfree import theory
from normfree.report.panels import Curve, Panel
from normfree.report.tables import Column, Table


def factor_per_block(values: Sequence[float], stages: Sequence[int], *, backward: bool = False) -> float:
    """Geometric mean of the factor from block to block inside stages; `backward` counts from the last block.

    >>> round(factor_per_block([1, 2, 4, 1, 2], [1, 1, 1, 2, 2]), 6)
    2.0
    """
    if len(values) != len(stages):
        raise ValueError(f"expected one stage per value, got {len(values)} values and {len(stages)} stages")
    logs = [
        _log(b) - _log(a)
        for (a, b), (here, there) in zip(pairwise(values), pairwise(stages), strict=True)
        if here == there
    ]
    if not logs:
        return math.nan
    return math.exp(-mean(logs) if backward else mean(logs))


def decades(values: Sequence[float], *, backward: bool = False) -> float:
    """log10 of last over first, or, `backward`, of first over last, so that positive means growth in both."""
    change = (_log(values[-1]) - _log(values[0])) / math.log(10)
    return -change if backward else change


def straight_line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Slope of the least-squares line and the share R² of the variance that it explains.

    >>> slope, share = straight_line([1, 2, 3], [2, 4, 6])
    >>> round(slope, 6), round(share, 6)
    (2.0, 1.0)
    """
    ends, heights = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    line = np.polyfit(ends, heights, 1)
    return float(line[0]), float(1 - np.var(heights - np.polyval(line, ends)) / np.var(heights))


def exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """Exponent of the power law through the points."""
    return straight_line([_log(v) for v in x], [_log(v) for v in y])[0]


def padded_growth(size: int, blocks: int) -> list[float]:
    """The mean square of a size × size map of ones, before and after each of some blocks x + f(x) with He's weights.

    f has one 3×3 convolution: an output is the mean over nine taps of the squares of the inputs, and a tap in the zero
    padding gives 0.

    >>> [round(square, 3) for square in padded_growth(1, 2)]
    [1.0, 1.111, 1.235]
    """
    taps, square = theory.tap_matrix(size, kernel=3, padding=1), np.ones((size, size))
    found = [1.0]
    for _ in range(blocks):
        square = square + taps @ square @ taps.T / 9
        found.append(float(square.mean()))
    return found


def mean(values: Collection[float]) -> float:
    """The mean; infinite or NaN if a value is."""
    return (math.fsum(values) if all(map(math.isfinite, values)) else sum(values)) / len(values)


def geometric_means(curves: Iterable[Sequence[float]]) -> tuple[float, ...]:
    """The geometric mean of the curves of all seeds, position by position; 0 where a value is 0."""
    return tuple(math.exp(mean([_log(value) for value in column])) for column in zip(*curves, strict=True))


def means(curves: Iterable[Sequence[float]]) -> tuple[float, ...]:
    """The mean of the curves of all seeds, position by position."""
    return tuple(mean(column) for column in zip(*curves, strict=True))


def stage_starts(stages: Sequence[int]) -> tuple[int, ...]:
    """The positions, counted from 1, at which a stage other than the first begins."""
    return tuple(i + 1 for i, (a, b) in enumerate(pairwise(stages), start=1) if a != b)


def chart(
    title: str,
    curves: Mapping[str, Iterable[float]],
    y_label: str = "",
    x_label: str = "residual block",
    *,
    x: Iterable[float] = (),
    **options: Any,
) -> Panel:
    """The panel of curves by name; `options` are further ones of `Panel`."""
    drawn = tuple(Curve(name, tuple(values)) for name, values in curves.items())
    return Panel(title, drawn, y_label, x_label, x=tuple(map(float, x)), **options)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> tuple[Table, ...]:
    """The table of these rows; none without rows.

    >>> table("Widths", ("layer", "width"), [("first", "8")])[0].rows, table("Widths", ("layer", "width"), [])
    ((('first', '8'),), ())
    """
    lines = tuple(map(tuple, rows))
    return (Table(title, tuple(map(Column, columns)), lines),) if lines else ()


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf if value == 0 else math.nan
