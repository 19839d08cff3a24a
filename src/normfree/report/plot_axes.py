"""The axes of a matplotlib plot: their ranges and ticks, and the texts beside curves, levels and points."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from normfree.report.panels import Curve, Panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

INK, FAINT = "#22262d", "#5f6672"

_SLANTED = 24  # letters in a line of a slanted name
_MANY = 24  # more positions than this are a curve rather than points that deserve a label each
_FLOOR = 0.01  # a level below this fraction of the highest value lies on the x axis
_ROOM = 11  # letters in a line of a level's name beside the panel
_APART = 0.09  # fraction of the axis; the names of levels that are closer would overlap
_LINE = 0.052  # fraction of the axis; the height of a curve's name
_LETTERS = 32  # letters of a curve's name beside the panel
_STEPS = (1, 2, 3, 5, 10, 20, 30, 50, 100, 200)  # decades between two ticks


def set_position_ticks(axes: Axes, positions: Sequence[float], log: bool, *, dots: bool = False) -> None:
    """Set the x axis for positions; its ticks are whole numbers if all positions are.

    The ticks of a logarithmic axis are positions if they are few, but not those of dots, which may lie anywhere.
    """
    from matplotlib.ticker import MaxNLocator

    if log:
        places = [math.log10(position) for position in positions]
        low, high = min(places), max(places)
        labelled = _spaced(sorted(set(places)), 0.06 * (high - low))
        if len(set(places)) > _MANY and high - low >= 2:  # a dense curve: powers of ten
            labelled = [float(power) for power in range(math.ceil(low - 1e-9), math.floor(high + 1e-9) + 1)]
        elif dots:
            labelled = log_ticks(low, high)[0]
        if labelled[0] < -3 and all(tick == round(tick) for tick in labelled):
            labels = log_labels(labelled, plain=False)
        else:
            labels = [f"{10**tick:.4g}" if tick < 3 else f"{10**tick:,.0f}" for tick in labelled]
        axes.set_xticks(labelled, labels)
        margin = 0.04 * (high - low) or 0.5
        axes.set_xlim(low - margin, high + margin)
        return
    low, high = min(positions), max(positions)
    whole = all(position == int(position) for position in positions)
    ticks = MaxNLocator(nbins=9, integer=whole, steps=[1, 2, 5, 10]).tick_values(low, high)
    axes.set_xticks([tick for tick in ticks if low <= tick <= high] or [low])
    separate_thousands(axes.xaxis, positions)
    margin = 0.02 * (high - low) or 0.5
    axes.set_xlim(low - margin, high + margin)


def separate_thousands(axis: Axis, values: Sequence[float]) -> None:
    """Write 1,000 instead of 1000, unless the values are so large that matplotlib writes powers of ten."""
    if 1e3 <= max(map(abs, values), default=0.0) < 1e7:
        axis.set_major_formatter("{x:,.10g}")


def set_name_ticks(axes: Axes, names: Sequence[str], width: int) -> None:
    """Set the x axis for names: horizontal if their words have room, else slanted; `width` is that of the axis."""
    room = int(0.9 * width / len(names)) - 1
    horizontal = all(len(word) <= room for name in names for word in name.split())
    lines = max(1, room // 4)  # the lines of a slanted name that have room beside the next name
    longest = room if horizontal else max(_SLANTED, math.ceil(max(map(len, names)) / lines))
    axes.set_xticks(range(1, len(names) + 1), ["\n".join(textwrap.wrap(name, longest)) for name in names])
    axes.set_xlim(0.5, len(names) + 0.5)
    for label in axes.get_xticklabels():
        label.set(parse_math=False, fontsize=9)
        if not horizontal:
            label.set(rotation=35, ha="right", va="top", rotation_mode="anchor")


def _spaced(places: Sequence[float], gap: float) -> list[float]:
    """Drop places that are less than a gap from the one before.

    >>> _spaced([1.0, 1.1, 1.5, 2.0], 0.2)
    [1.0, 1.5, 2.0]
    """
    kept = list(places[:1])
    for place in places[1:]:
        if place - kept[-1] >= gap:
            kept.append(place)
    return kept


def log_range(values: Sequence[float]) -> tuple[float, float]:
    """The ends of a logarithmic axis in decades, at least one apart, so that noise does not look like growth."""
    heights = [math.log10(value) for value in values] or [0.0]
    low, high = min(heights), max(heights)
    if high - low < 1:
        middle = (low + high) / 2
        return middle - 0.55, middle + 0.55
    margin = 0.05 * (high - low)
    return low - margin, high + margin


def log_ticks(low: float, high: float, count: int = 7) -> tuple[list[float], list[float]]:
    """The labelled and the unlabelled ticks between two powers of ten, in decades.

    >>> log_ticks(-4.9, 28.2)[0]
    [0.0, 5.0, 10.0, 15.0, 20.0, 25.0]
    """
    decades = range(math.floor(low), math.ceil(high) + 1)
    fine = [k + math.log10(m) for k in decades for m in range(1, 10)] if high - low <= 8 else []
    if high - low < 2.2:
        ticks = [k + math.log10(m) for k in decades for m in (1, 2, 5)]
    else:
        step = next((s for s in _STEPS if (high - low) / s <= count), _STEPS[-1])
        ticks = [float(k) for k in decades if k % step == 0]
    inside = [tick for tick in ticks if low <= tick <= high]
    return inside, [tick for tick in fine if low <= tick <= high and tick not in inside]


def log_labels(ticks: Sequence[float], *, plain: bool) -> list[str]:
    """Label ticks, given in decades, by plain numbers or by powers of ten."""
    if plain:
        return [f"{10**tick:,.5g}" for tick in ticks]
    labels = []
    for tick in ticks:
        power = math.floor(tick + 1e-9)
        lead = round(10 ** (tick - power))
        labels.append(f"$10^{{{power}}}$" if lead == 1 else f"${lead}\\cdot 10^{{{power}}}$")
    return labels


# Texts


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
