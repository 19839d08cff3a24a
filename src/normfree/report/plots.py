"""Draw panels into a PNG or SVG file with matplotlib, without changing its global state."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from normfree.errors import missing_package
from normfree.report.panels import (
    COLOURS,
    DASHES,
    SHAPES,
    Curve,
    Panel,
    curve_names,
    describe_gaps,
    ends_early,
    is_drawn,
)
from normfree.report.plot_axes import (
    FAINT,
    INK,
    label_ends,
    label_levels,
    label_values,
    log_labels,
    log_range,
    log_ticks,
    separate_thousands,
    set_name_ticks,
    set_position_ticks,
)
from normfree.report.terminal import printable
from normfree.storage.writing import write_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

_WIDTH, _ROW = 12.0, 3.6  # inches; the file is 2400 pixels wide, and readable at half of that
_TITLE, _ENTRY = 0.42, 0.24  # heights of the title and of a row of the legend in inches
_LETTERS = 150  # letters in a line of this width
_DPI = 200
_DOTTED = 40  # curves with at most this many points show every point
_SHOWN = 8  # the points that a longer curve shows
_AT_NAME, _ON_LINE, _SINGLE = 6.0, 4.2, 3.2  # sizes of points at a name, on a curve and of single runs
_APART = {"linestyle": "none"}  # the style of points that no line joins
_MANY = 6  # more curves than this have their names at their ends
_NEAR = 0.005  # half the width of a line, as a fraction of the axis
_LINE = 1.6  # width of a line in points
_BAND, _WIDEST = 2.6, 11.0  # extra width of a band (points) per covering curve, and the limit
_PALE = 0.4  # the fraction of white in the colour of a band
_VALUED = 8  # at most this many points at names show their values
_LARGE = 1e250  # above this, the arithmetic of matplotlib overflows on a linear axis
_Points = Sequence[tuple[float, float]]
_GRID = "#e6e8ec"

# Changes to the default style. The caller's settings are ignored, so that the same data give the same file.
_STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.edgecolor": "#9aa0aa",
    "axes.linewidth": 0.8,
    "axes.titlesize": 11.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlecolor": INK,
    "axes.labelcolor": FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "svg.hashsalt": "normfree",
}


def write_plot(
    panels: Sequence[Panel], path: str | Path, *, title: str = "", columns: int = 2, widths: Sequence[float] = ()
) -> None:
    """Draw panels in a grid under one legend into a .png or .svg file; missing folders are created.

    A curve that cannot be drawn to its end closes with ×, and a text below its panel gives the reason. If drawing or
    writing fails, a previous file stays as it was.

    Args:
        panels: At least one panel.
        path: The file; its suffix gives the format.
        title: A heading above the legend.
        columns: The number of panels side by side.
        widths: The relative widths of the columns (default: equal).

    Raises:
        ValueError: if there is no panel, `columns` is below 1, or the suffix is another.
        ImportError: if matplotlib is not installed.
    """
    path = Path(path)
    kind = path.suffix.lower().removeprefix(".")
    if kind not in ("png", "svg"):
        raise ValueError(f"expected a file ending in .png or .svg, got {path.name!r}; rename it")
    if not panels or columns < 1:
        raise ValueError(f"expected panels and columns >= 1, got {len(panels)} and {columns}; pass at least one")
    try:
        from matplotlib import style
    except ImportError as error:
        raise ImportError(missing_package("matplotlib", "a plot")) from error
    drawing = io.BytesIO()
    with style.context(["default", _STYLE]):
        figure = _figure(panels, title, min(columns, len(panels)), widths)
        figure.savefig(drawing, format=kind, dpi=_DPI, metadata={"Date": None} if kind == "svg" else None)
    content = drawing.getvalue()
    if kind == "svg":  # a control character of a name would make it ill-formed
        content = b"\n".join(printable(line).encode() for line in content.decode().split("\n"))
    write_bytes(path, content)


def _figure(panels: Sequence[Panel], title: str, columns: int, widths: Sequence[float] = ()) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    names = curve_names(panels)
    rows = math.ceil(len(panels) / columns)
    shown = [textwrap.shorten(name, _LETTERS, placeholder="…") for name in names]
    per_row = _per_row(shown)
    above = _TITLE if title else 0.0  # inches above the legend, then above the panels
    top = above + _ENTRY * math.ceil(len(names) / per_row) + 0.15
    height = rows * (_ROW if columns > 1 else 4.6) + top
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    engine = cast("ConstrainedLayoutEngine", figure.get_layout_engine())
    engine.set(w_pad=0.12, h_pad=0.1, wspace=0.02, hspace=0.03, rect=(0, 0, 1, 1 - top / height))
    if title:
        y = 1 - 0.14 / height
        figure.text(0.012, y, title, va="top", fontsize=14, fontweight="bold", color=INK, parse_math=False)
    shares = [width / sum(widths) for width in widths] or [1 / columns] * columns
    places = list(figure.subplots(rows, columns, squeeze=False, width_ratios=shares).flat)
    plain = all(map(_is_short, panels))  # so that all panels write their numbers alike
    for axes, panel, share in zip(places, panels, shares * rows, strict=False):
        _draw(axes, panel, names, int(_LETTERS * share), plain=plain)
    for axes in places[len(panels) :]:
        axes.remove()
    joined = {curve.name for panel in panels if not panel.names for curve in panel.curves if curve.joined}
    order = [i for first in range(per_row) for i in range(first, len(names), per_row)]  # matplotlib fills by columns
    # The names are set afterwards: matplotlib drops an entry whose name begins with an underscore.
    legend = figure.legend(
        [Line2D([], [], **(_point(i, _AT_NAME) | (_look(i) if names[i] in joined else _APART))) for i in order],
        [str(i) for i in order],
        loc="upper left",
        bbox_to_anchor=(0.004, 1 - above / height),
        ncols=per_row,
        frameon=False,
    )
    legend.set_in_layout(False)  # its room is in `top`
    for text, i in zip(legend.get_texts(), order, strict=True):
        text.set_parse_math(False)
        text.set_text(shown[i])
        text.set_color(INK)
    return figure


def _per_row(names: Sequence[str]) -> int:
    """The number of names in a row of the legend: as few rows as possible, filled evenly.

    >>> _per_row(["a"] * 5), _per_row(["a" * 40] * 4)
    (5, 2)
    """
    counts = range(1, len(names) + 1)
    fit = [n for n in counts if sum(10 + max(map(len, names[i::n])) for i in range(n)) <= _LETTERS]
    return min(fit or [1], key=lambda n: (math.ceil(len(names) / n), n))


def _look(index: int) -> dict[str, Any]:
    """The line style of the curve with this index among the names."""
    dash = DASHES[index // len(COLOURS) % len(DASHES)]
    return {
        "color": COLOURS[index % len(COLOURS)][0],
        "linestyle": (0, dash) if dash else "-",
        "linewidth": _LINE,
        "solid_capstyle": "round",
    }


def _point(index: int, size: float) -> dict[str, Any]:
    """The marker style of a point of the curve with this index among the names."""
    shape = list(SHAPES)[index % len(SHAPES)]
    size *= {"^": 1.1, "v": 1.1, "D": 0.9, "P": 1.1, "*": 1.4}.get(shape, 1.0)  # so that they look equally large
    return {"color": _look(index)["color"], "marker": shape, "markersize": size, "markeredgewidth": 0}


def _drawn_values(panel: Panel) -> list[float]:
    """All values of curves, single runs, error bars and levels that have a place on the axis."""
    ends = [v for curve in panel.curves for i in range(len(curve.values)) for v in curve.reach(i)]
    ends += [v for curve in panel.curves for single in curve.singles for v in single]
    return [v for v in (*ends, *(level.value for level in panel.levels)) if is_drawn(v, panel.log_y)]


def _is_short(panel: Panel) -> bool:
    """Whether the ticks of its axis are readable without powers of ten."""
    return not panel.log_y or all(-3 <= tick <= 4 for tick in log_ticks(*log_range(_drawn_values(panel)))[0])


def _draw(axes: Axes, panel: Panel, names: Sequence[str], width: int, *, plain: bool) -> None:
    """Draw one panel; `width` is the number of letters in a line of its notes, `plain` avoids powers of ten."""
    values = _drawn_values(panel)
    scale = 1.0 if panel.log_y or max(map(abs, values), default=0.0) < _LARGE else _LARGE
    points = [_points(panel, place, scale) for place in range(len(panel.curves))]
    covers = False
    if not panel.names:
        heights = [math.log10(v) if panel.log_y else v / scale for v in values] or [0.0]
        near = _NEAR * max(max(heights) - min(heights), 1.0 if panel.log_y else 0.0)
        joined = [places if curve.joined else [] for curve, places in zip(panel.curves, points, strict=True)]
        covered = [list(_pieces(each, joined[place + 1 :], near)) for place, each in enumerate(joined)]
        most = max((over for pieces in covered for _, over in pieces), default=0)
        covers = most > 0
        for curve, places, pieces in zip(panel.curves, points, covered, strict=True):
            if not curve.joined:
                continue
            look = _look(names.index(curve.name))
            axes.plot([x for x, _ in places], [y for _, y in places], **look, zorder=2)
            _draw_bands(axes, pieces, min(_BAND, _WIDEST / max(most, 1)), look)
    for curve, places in zip(panel.curves, points, strict=True):
        _draw_singles(axes, panel, curve, places, names.index(curve.name), scale)
        _draw_points(axes, panel, curve, places, names.index(curve.name), scale)
    for stage in panel.stages:
        axes.axvline(stage, color="#b9bec7", linewidth=0.7, linestyle=(0, (4, 3)), zorder=0.5)

    axes.set_title(textwrap.fill(panel.title, 2 * width // 3), parse_math=False)
    axes.grid(True, axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=3, width=0.8)
    y_label = panel.y_label + (f" / {_LARGE:g}".replace("+", "") if scale != 1 else "")
    axes.set_ylabel(y_label, parse_math=False)
    if panel.names:
        set_name_ticks(axes, panel.names, width)
    else:
        set_position_ticks(
            axes,
            [*panel.x, *(x for curve in panel.curves for x in panel.positions(curve))],
            panel.log_x,
            dots=not any(curve.joined for curve in panel.curves),
        )
    if panel.log_y:
        low, high = log_range(values)
        ticks, minor = log_ticks(low, high)
        if not plain and len(whole := [tick for tick in ticks if tick == round(tick)]) > 1:
            ticks = whole  # 10⁰ and 10¹ do without 2·10⁰ and 5·10⁰
        axes.set_ylim(low, high)
        axes.set_yticks(ticks, log_labels(ticks, plain=plain))
        axes.set_yticks(minor, minor=True)
        axes.tick_params(which="minor", length=1.8, width=0.6, color="#9aa0aa")
    else:
        low, high = min(values, default=0.0) / scale, max(values, default=0.0) / scale
        from_zero = panel.from_zero and low > 0 and (low < high / 2 or panel.is_unspread)  # so that heights compare
        height = high if from_zero and panel.is_unspread else high - low
        margin = (0.12 if panel.names else 0.05) * height or 0.1 * abs(high) or 1.0
        axes.set_ylim(0 if from_zero else low - margin, high + margin)
        separate_thousands(axes.yaxis, values)
    label_levels(axes, panel, scale)
    if not panel.names and len(panel.curves) > _MANY:
        ends = []
        for curve, places in zip(panel.curves, points, strict=True):
            seen = [place for place in places if not math.isnan(place[1])]
            ends += [(curve.name, _look(names.index(curve.name))["color"], *seen[-1])] if seen else []
        label_ends(axes, ends)
    gaps = [(curve.name, describe_gaps(panel, curve, panel.log_y)) for curve in panel.curves]
    cut = {curve.name for curve in panel.curves if not panel.names and ends_early(curve, panel.log_y)}
    band = "A wide pale line is a curve that another one covers." if covers else ""
    notes = [panel.note, band, *(f"{'× ' if name in cut else ''}{name}: {text}" for name, text in gaps if text)]
    x_label = panel.x_label + (" · vertical lines: new stage" if panel.stages else "")
    # The layout makes room for a label of several lines, not for text below it.
    lines = [x_label, *(line for note in notes if note for line in textwrap.wrap(note, width - 4))]
    axes.set_xlabel("\n".join(filter(None, lines)), parse_math=False, fontsize=9, linespacing=1.45)


def _draw_singles(axes: Axes, panel: Panel, curve: Curve, points: _Points, index: int, scale: float) -> None:
    """Draw the single runs of a curve, small and pale: dots at names and in short curves, else thin lines."""
    dotted = bool(panel.names) or len(points) <= _DOTTED
    size = _point(index, _SINGLE) | _APART if dotted else {"linewidth": 0.7}
    colour = _pale(_look(index), 1.0)["color"]
    for single in curve.singles:
        heights = [_height(value, panel, scale) for value in single]
        axes.plot([x for x, _ in points], heights, **size | {"color": colour}, zorder=1.7)


def _height(value: float, panel: Panel, scale: float) -> float:
    """The height of a value on the axes; NaN for a value without a place on the axis."""
    if not is_drawn(value, panel.log_y):
        return math.nan
    return math.log10(value) if panel.log_y else value / scale


def _points(panel: Panel, place: int, scale: float) -> _Points:
    """The coordinates of a curve's values on the axes; the height is NaN for a value without a place on the axis.

    At a name, the points of several curves are side by side.
    """
    curve = panel.curves[place]
    heights = [_height(value, panel, scale) for value in curve.values]
    aside = (place - (len(panel.curves) - 1) / 2) * min(0.025 * len(panel.names), 0.6 / len(panel.curves))
    return [
        (math.log10(x) if panel.log_x else x + aside, y) for x, y in zip(panel.positions(curve), heights, strict=True)
    ]


def _draw_bands(axes: Axes, pieces: Sequence[tuple[_Points, int]], wider: float, look: dict[str, Any]) -> None:
    """Draw a wide pale band below each piece that other curves cover, so that the covered curve is visible there."""
    for piece, over in pieces:
        if over:
            band = _pale(look, _LINE + over * wider)
            axes.plot([x for x, _ in piece], [y for _, y in piece], **band, zorder=1.5)


def _pale(look: dict[str, Any], width: float) -> dict[str, Any]:
    """The style of a band: its line's, but paler and wider, with dashes of the same length."""
    from matplotlib.colors import to_rgb

    dash = look["linestyle"]
    return {
        "color": tuple(_PALE + (1 - _PALE) * part for part in to_rgb(look["color"])),
        "linestyle": dash if dash == "-" else (0, tuple(length * _LINE / width for length in dash[1])),
        "linewidth": width,
        "solid_capstyle": "butt",
    }


def _pieces(points: _Points, after: Sequence[_Points], near: float) -> Iterator[tuple[_Points, int]]:
    """Split a curve into pieces, each with the number of later curves that cover it.

    >>> [over for _, over in _pieces([(1, 0.0), (2, 0.0), (3, 0.0)], [[(1, 9.0), (2, 0.0), (3, 0.01)]], 0.1)]
    [0, 1]
    """
    over = [0] * max(len(points) - 1, 0)  # one count for each segment
    for other in after:
        at = dict(other)
        on = [abs(at.get(x, math.nan) - y) <= near for x, y in points]
        over = [count + (a and b) for count, (a, b) in zip(over, pairwise(on), strict=True)]
    start = 0
    for count, steps in groupby(over):
        end = start + len(list(steps))
        yield points[start : end + 1], count
        start = end


def _draw_points(axes: Axes, panel: Panel, curve: Curve, points: _Points, index: int, scale: float) -> None:
    """Draw the points of a curve with their error bars, and × at crossed points and at an early end."""
    log, colour = panel.log_y, _look(index)["color"]
    drawn = [i for i, (_, height) in enumerate(points) if not math.isnan(height)]
    alone = [i for i in drawn if not {i - 1, i + 1} & set(drawn)]  # no line is visible at a single point
    step = len(points) // _SHOWN or 1
    some = drawn[index % _SHOWN * step // _SHOWN :: step]  # each curve shows others, so that no point covers another
    shown = drawn if panel.names or not curve.joined or len(points) <= _DOTTED else [*alone, *some]
    dots = [i for i in shown if i not in curve.crossed]
    look = _point(index, _AT_NAME if panel.names else _ON_LINE) | _APART
    axes.plot([points[i][0] for i in dots], [points[i][1] for i in dots], **look, zorder=2)
    for i in (i for i in drawn if curve.spread and curve.spread[i] > 0):
        x, height = points[i]
        ends = [(math.log10(v) if log else v / scale) if is_drawn(v, log) else height for v in curve.reach(i)]
        axes.plot([x, x], ends, "_-", color=colour, linewidth=1.1, markersize=7, zorder=2)
    crossed = [i for i in drawn if i in curve.crossed]
    crossed += [drawn[-1]] if ends_early(curve, log) and curve.joined and not panel.names else []
    if crossed:
        places = [points[i][0] for i in crossed], [points[i][1] for i in crossed]
        axes.plot(*places, "x", color=colour, markersize=8, markeredgewidth=2)
    few = len(panel.curves) <= 2 and len(panel.names) * len(panel.curves) <= _VALUED
    if panel.names and not log and curve.joined and few:
        label_values(axes, curve, [(i, points[i]) for i in drawn], left=curve is not panel.curves[-1])
