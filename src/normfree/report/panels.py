"""Curves and charts as plain records; plots and pages draw them in the same colours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from numbers import Real

# The colour of each curve on a light and on a dark background: Okabe and Ito's colour-blind-safe set without yellow,
# which is invisible on white, then grey and wine. After the last one the colours start again with another dash.
COLOURS = (
    ("#0072b2", "#56b0ea"),
    ("#d55e00", "#f58a3c"),
    ("#009e73", "#2fc79b"),
    ("#b8578c", "#e39ac3"),
    ("#c98a00", "#f0b93a"),
    ("#3fa0dc", "#9ad6ff"),
    ("#4d4d4d", "#c4c8d0"),
    ("#882255", "#d9709f"),
)
# The lengths of dashes and gaps in line widths; the first is a solid line.
DASHES: tuple[tuple[float, ...], ...] = ((), (4.0, 1.6), (1.2, 1.6), (6.0, 1.6, 1.2, 1.6))
# The shape of a curve's points, so that curves differ in print and for colour-blind readers: matplotlib's letters, and
# lines around a point of an SVG path. Seven shapes and eight colours: a pair comes again after 56 curves.
SHAPES = {
    "o": "m-3 0c0-4 6-4 6 0c0 4-6 4-6 0z",
    "s": "m-2.7-2.7h5.4v5.4h-5.4z",
    "^": "m0-3.6l3.4 6h-6.8z",
    "D": "m0-3.7l3.7 3.7l-3.7 3.7l-3.7-3.7z",
    "v": "m0 3.6l3.4-6h-6.8z",
    "P": "m-1.2-3.5h2.4v2.3h2.3v2.4h-2.3v2.3h-2.4v-2.3h-2.3v-2.4h2.3z",
    "*": "m0-4.2l1.2 2.7l3 .3l-2.2 2l.6 2.9l-2.6-1.5l-2.6 1.5l.6-2.9l-2.2-2l3-.3z",
}

_LISTED_GAPS = 3  # more gaps of one kind than this are counted instead of listed


@dataclass(frozen=True)
class Curve:
    """A named curve.

    Args:
        name: The name in the legend.
        values: The values in order; NaN, infinity and zero are allowed.
        x: The positions, if the curve has other positions than its panel.
        spread: Half the height of the error bar of every value.
        crossed: The indices of points that are marked with ×.
        singles: The values of single runs that the curve summarizes, each with a value for every position, NaN where
            it has none. They are drawn small and pale, as dots at names and in short curves, else as thin lines.
        joined: Whether a line joins the values in a plot; without one they are dots.

    Raises:
        ValueError: if there is no value, a value is not a number, the positions are not ascending, or the numbers of
            positions, spreads, crossed points or values of a single run do not fit.
    """

    name: str
    values: tuple[float, ...]
    x: tuple[float, ...] = ()
    spread: tuple[float, ...] = ()
    crossed: tuple[int, ...] = ()
    singles: tuple[tuple[float, ...], ...] = ()
    joined: bool = True

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError(f"curve {self.name!r}: expected values, got none; leave the curve out")
        for index, value in enumerate(self.values):
            if not isinstance(value, Real):
                raise ValueError(
                    f"curve {self.name!r}: expected numbers, got {type(value).__name__} at index {index}; "
                    "convert the values with float()"
                )
        if self.x:
            _check_positions(f"curve {self.name!r}", self.x)
            _check_lengths(f"curve {self.name!r}", self, self.x)
        if self.spread and (len(self.spread) != len(self.values) or not all(s >= 0 for s in self.spread)):
            raise ValueError(
                f"curve {self.name!r}: expected a spread >= 0 for each of {len(self.values)} values, got "
                f"{self.spread}; pass 0 where there is none"
            )
        if any(len(single) != len(self.values) for single in self.singles):
            raise ValueError(
                f"curve {self.name!r}: expected {len(self.values)} values of every single run, got "
                f"{[len(single) for single in self.singles]}; pass NaN where a run has none"
            )
        if not all(0 <= index < len(self.values) for index in self.crossed):
            raise ValueError(
                f"curve {self.name!r}: expected crossed points below {len(self.values)}, got {self.crossed}; pass "
                "indices of values"
            )

    def reach(self, index: int) -> tuple[float, float]:
        """The ends of the error bar at an index; both are the value itself if it has no spread."""
        half = self.spread[index] if self.spread else 0.0
        return self.values[index] - half, self.values[index] + half


@dataclass(frozen=True)
class ReferenceLine:
    """A named horizontal line to compare curves with."""

    name: str
    value: float


@dataclass(frozen=True)
class Panel:
    """One chart: curves over common positions.

    Args:
        title: The heading.
        curves: At least one curve. Names are unique; a name has the same colour in all panels.
        y_label: The name of the values.
        x_label: The name of the positions.
        log_y: Use a logarithmic y axis. Zeros and values that are not finite leave gaps, which a text describes.
        stages: The positions at which a new stage begins, each drawn as a thin vertical line.
        point_names: A name for every position, shown with the point on a page.
        x: The ascending positions of all curves that have none of their own (default: 1, 2, 3, …). The axis always
            spans them.
        note: A sentence below the chart.
        log_x: Use a logarithmic x axis, for positions above 0.
        levels: Horizontal lines to compare the curves with.
        names: Labels, such as methods, for the positions 1, 2, 3, … No line joins the values at names.
        from_zero: Begin a linear y axis at 0 if the values are far apart, so that heights can be compared. Do so, too,
            if each name has a single value: otherwise a small difference would look large.

    Raises:
        ValueError: if there is no curve, a name is used twice, lengths differ, positions are not ascending, a value or
            position has no place on a logarithmic axis, a level has no place on the axis, or names are missing.
    """

    title: str
    curves: tuple[Curve, ...]
    y_label: str = ""
    x_label: str = "residual block"
    log_y: bool = True
    stages: tuple[int, ...] = ()
    point_names: tuple[str, ...] = ()
    x: tuple[float, ...] = ()
    note: str = ""
    log_x: bool = False
    levels: tuple[ReferenceLine, ...] = ()
    names: tuple[str, ...] = ()
    from_zero: bool = True

    def __post_init__(self) -> None:
        where = f"panel {self.title!r}"
        if not self.curves:
            raise ValueError(f"{where}: expected at least one curve, got none; leave the panel out")
        names = [curve.name for curve in self.curves]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"{where}: expected each name once, got {twice!r} twice; rename a curve")
        if self.x:
            _check_positions(where, self.x)
            for curve in self.curves:
                if not curve.x:
                    _check_lengths(where, curve, self.x)
        longest = max(len(curve.values) for curve in self.curves)
        if self.point_names and len(self.point_names) != longest:
            raise ValueError(
                f"{where}: expected {longest} point names, one for each position of the longest curve, got "
                f"{len(self.point_names)}; name every position or none"
            )
        if not all(map(math.isfinite, self.stages)):
            raise ValueError(f"{where}: expected finite stages, got {self.stages}; pass positions on the x axis")
        if self.log_y:
            for curve in self.curves:
                if (negative := next((v for v in curve.values if -math.inf < v < 0), None)) is not None:
                    raise ValueError(
                        f"{where}: expected values >= 0 on a logarithmic axis, got {negative:g} in curve "
                        f"{curve.name!r}; pass log_y=False"
                    )

        if self.log_x and (wrong := [x for curve in self.curves for x in (*self.x, *self.positions(curve)) if x <= 0]):
            raise ValueError(
                f"{where}: expected positions above 0 on a logarithmic axis, got {wrong[0]:g}; pass log_x=False"
            )
        for level in self.levels:
            if not is_drawn(level.value, self.log_y):
                raise ValueError(
                    f"{where}: expected a level that has a place on the axis, got {level.value:g} for {level.name!r}; "
                    "leave it out"
                )
        if self.names:
            _check_named(where, self)

    @property
    def is_unspread(self) -> bool:
        """Whether it has single values at names, with neither error bars nor single runs."""
        return bool(self.names) and not any(any(curve.spread) or curve.singles for curve in self.curves)

    def positions(self, curve: Curve) -> tuple[float, ...]:
        """The positions of a curve's values: its own, the panel's, or 1, 2, 3, …"""
        return curve.x or self.x or tuple(float(i) for i in range(1, len(curve.values) + 1))


def _check_positions(where: str, x: Sequence[float]) -> None:
    if not all(map(math.isfinite, x)) or not all(a <= b for a, b in pairwise(x)):
        raise ValueError(f"{where}: expected finite x in ascending order, got others; sort x and the values")


def _check_named(where: str, panel: Panel) -> None:
    places = range(1, len(panel.names) + 1)
    if panel.log_x or (wrong := [x for curve in panel.curves for x in panel.positions(curve) if x not in places]):
        got = "a logarithmic axis" if panel.log_x else f"{wrong[0]:g}"
        raise ValueError(
            f"{where}: expected positions from 1 to {len(places)}, as there are names, got {got}; name every position"
        )


def _check_lengths(where: str, curve: Curve, x: Sequence[float]) -> None:
    if len(curve.values) != len(x):
        raise ValueError(
            f"{where}: expected {len(x)} values as in x, got {len(curve.values)} in curve {curve.name!r}; fill the "
            "rest with NaN"
        )


def curve_names(panels: Sequence[Panel]) -> tuple[str, ...]:
    """The names of all curves in order of appearance; a name's index determines its colour and dash.

    >>> he, fixup = Curve("he_in", (1.0, 2.0)), Curve("fixup", (1.0, 1.0))
    >>> curve_names([Panel("forward", (he,)), Panel("backward", (fixup, he))])
    ('he_in', 'fixup')
    """
    return tuple(dict.fromkeys(curve.name for panel in panels for curve in panel.curves))


def is_drawn(value: float, log: bool) -> bool:
    """Whether a value has a place on the axis."""
    return math.isfinite(value) and (value > 0 or not log)


def ends_early(curve: Curve, log: bool) -> bool:
    """Whether a curve is drawn at first but not at its end."""
    return not is_drawn(curve.values[-1], log) and any(is_drawn(value, log) for value in curve.values)


def describe_gaps(panel: Panel, curve: Curve, log: bool) -> str:
    """Describe the values of a curve that are not drawn; '' if all are drawn.

    >>> curve = Curve("he_in", (0.0, 1.0, 0.0, 0.0, 2.0, float("inf"), float("inf")))
    >>> describe_gaps(Panel("variance", (curve,)), curve, log=True)
    'zero at 1, 3 to 4; infinite from 6 on'
    """
    gaps: dict[str, list[tuple[float, float, bool]]] = {}
    points = list(zip(panel.positions(curve), curve.values, strict=True))
    if panel.names:
        return _named_gaps(panel.names, points, log)
    seen = 0
    for kind, group in groupby(points, key=lambda point: _kind(point[1], log)):
        run = [position for position, _ in group]
        seen += len(run)
        if kind:
            gaps.setdefault(kind, []).append((run[0], run[-1], seen == len(points)))
    texts = []
    for kind, runs in gaps.items():
        if len(runs) > _LISTED_GAPS:
            count = sum(_kind(value, log) == kind for _, value in points)
            texts.append(f"{kind} at {count} points between {runs[0][0]:,.10g} and {runs[-1][1]:,.10g}")
        elif len(runs) == 1 and runs[0][2] and runs[0][0] < runs[0][1]:
            texts.append(f"{kind} from {runs[0][0]:,.10g} on")
        else:
            spans = (f"{a:,.10g}" if a == b else f"{a:,.10g} to {b:,.10g}" for a, b, _ in runs)
            texts.append(f"{kind} at {', '.join(spans)}")
    return "; ".join(texts)


def _named_gaps(names: Sequence[str], points: Sequence[tuple[float, float]], log: bool) -> str:
    gaps: dict[str, list[str]] = {}
    for position, value in points:
        if kind := _kind(value, log):
            gaps.setdefault(kind, []).append(names[int(position) - 1])
    return "; ".join(f"{kind} at {', '.join(at)}" for kind, at in gaps.items())


def _kind(value: float, log: bool) -> str:
    """The reason why a value has no place on the axis; '' if it has one."""
    if math.isnan(value):
        return "not a number"
    if math.isinf(value):
        return "infinite"
    if log and value <= 0:
        return "zero" if value == 0 else "negative"
    return ""
