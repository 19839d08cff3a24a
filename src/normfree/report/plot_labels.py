"""Texts beside the curves of a matplotlib plot: the names of levels and of curves, and the values of points."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from normfree.report.panels import Curve, Panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, FAINT = "#22262d", "#5f6672"

_FLOOR = 0.01  # a level below this fraction of the highest value lies on the x axis
_ROOM = 11  # letters in a line of a level's name beside the panel
_APART = 0.09  # fraction of the axis; the names of levels that are closer would overlap
_LINE = 0.052  # fraction of the axis; the height of a curve's name
_LETTERS = 32  # letters of a curve's name beside the panel


def label_ends(axes: Axes, ends: Sequence[tuple[str, str, float, float]]) -> None:
    """Write the names of curves at the right of the panel, each with a thin line to the end of its curve.

    Args:
        axes: The panel; its limits are set.
        ends: For each curve its name, its colour, and the place of its last point.
    """
    bottom, top = axes.get_ylim()
    ends = sorted(ends, key=lambda end: end[3])
    heights = spread([(y - bottom) / (top - bottom) for *_, y in ends], _LINE)
    line = {"arrowstyle": "-", "linewidth": 0.5, "alpha": 0.6, "shrinkA": 0, "shrinkB": 2, "relpos": (0, 0.5)}
    for (name, colour, x, y), height in zip(ends, heights, strict=True):
        axes.annotate(
            textwrap.shorten(name, _LETTERS, placeholder="…"),
            xy=(x, y),
            xytext=(1.04, height),
            textcoords="axes fraction",
            ha="left",
            va="center",
            fontsize=8,
            color=colour,
            arrowprops=line | {"color": colour},
            annotation_clip=False,
            parse_math=False,
        )


def spread(heights: Sequence[float], gap: float) -> list[float]:
    """Move ascending heights apart until neighbours differ by a gap, within 0 and 1 if they fit there.

    >>> [round(height, 2) for height in spread([0.1, 0.5, 0.5, 0.9, 1.0], 0.2)]
    [0.1, 0.4, 0.6, 0.8, 1.0]
    """
    groups: list[tuple[float, int]] = []  # the middle and the number of names that touch each other
    for height in heights:
        middle, count = height, 1
        while groups and middle - groups[-1][0] < gap * (count + groups[-1][1]) / 2:
            other, number = groups.pop()
            middle, count = (middle * count + other * number) / (count + number), count + number
        groups.append((middle, count))
    apart = [middle + gap * (i - (count - 1) / 2) for middle, count in groups for i in range(count)]
    for i, height in enumerate(apart):
        apart[i] = max(height, i * gap)
    for i, height in enumerate(reversed(apart), 1):
        apart[-i] = min(height, 1 - (i - 1) * gap)
    return apart


def label_levels(axes: Axes, panel: Panel, scale: float) -> None:
    """Draw horizontal lines with their names at the right of the panel, where no curve crosses the names."""
    top = max((v for curve in panel.curves for v in curve.values if math.isfinite(v)), default=0.0)
    # A level near 0 would lie on the x axis.
    levels = [level for level in panel.levels if panel.log_y or not 0 <= level.value < _FLOOR * top]
    heights = [math.log10(level.value) if panel.log_y else level.value / scale for level in levels]
    bottom, end = axes.get_ylim()
    for level, height in zip(levels, heights, strict=True):
        apart = [(height - other) / (end - bottom) for other in heights if other != height]
        near = min(apart, key=abs, default=1.0)
        axes.axhline(height, color=FAINT, linewidth=1.0, linestyle=(0, (2, 2)), zorder=1)
        axes.annotate(
            textwrap.fill(level.name, _ROOM),
            xy=(1, height),
            xycoords=axes.get_yaxis_transform(),
            xytext=(4, 0),
            textcoords="offset points",
            ha="left",
            va="center" if abs(near) > _APART else "bottom" if near > 0 else "top",
            fontsize=8.5,
            color=FAINT,
            parse_math=False,
        )


def label_values(axes: Axes, curve: Curve, points: Sequence[tuple[int, tuple[float, float]]], *, left: bool) -> None:
    """Write the values beside their points, on the side away from the other curve."""
    from matplotlib.patheffects import withStroke

    for i, point in points:
        axes.annotate(
            f"{curve.values[i]:#.3g}".rstrip("."),
            xy=point,
            xytext=(-8 if left else 8, 0),
            textcoords="offset points",
            ha="right" if left else "left",
            va="center",
            fontsize=8.5,
            color=INK,
            path_effects=[withStroke(linewidth=2.5, foreground="white")],  # on a line
            zorder=3,
        )
