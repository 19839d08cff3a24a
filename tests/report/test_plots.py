import math
import os
import re
import subprocess
import sys
import warnings
from itertools import combinations, pairwise
from pathlib import Path
from xml.etree import ElementTree

import matplotlib as mpl
import pytest
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

import normfree
from normfree.report.panels import COLOURS, Curve, Panel, ReferenceLine
from normfree.report.plot_axes import log_labels, log_ticks
from normfree.report.plots import _figure, _pieces, write_plot

NAN, INF = math.nan, math.inf
PANELS = (
    Panel(
        "forward",
        (Curve("he_in", tuple(4.0**i for i in range(50))), Curve("fixup", (1.0,) * 50)),
        y_label="variance",
        stages=(13, 26, 38),
        note="One batch.",
    ),
    Panel("backward", (Curve("fixup", (1.0, 0.0, 1.0, INF)), Curve("he_in", (0.5, NAN, 1e300, 0.0)))),
    Panel("ratio", (Curve("he_in", (-0.5, 0.5, 0.1)),), log_y=False, x_label="η", x=(0.001, 0.01, 0.1)),
)


def run(code: str) -> int:
    """The exit status of a fresh interpreter."""
    environment = {**os.environ, "PYTHONPATH": str(Path(normfree.__file__).parents[1])}
    return subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode


@pytest.mark.parametrize(("name", "magic"), [("plot.png", b"\x89PNG\r\n\x1a\n"), ("plot.SVG", b"<?xml")])
def test_write_plot_writes_the_kind_its_suffix_names(tmp_path: Path, name: str, magic: bytes) -> None:
    path = tmp_path / "new" / name
    write_plot(PANELS, path, title="Two methods")
    content = path.read_bytes()
    assert content.startswith(magic)
    assert len(content) > 10_000


def test_write_plot_is_2400_pixels_wide(tmp_path: Path) -> None:
    write_plot(PANELS, tmp_path / "plot.png")
    assert int.from_bytes((tmp_path / "plot.png").read_bytes()[16:20], "big") == 2400


def test_write_plot_gives_the_same_svg_for_the_same_data(tmp_path: Path) -> None:
    write_plot(PANELS, tmp_path / "a.svg", title="Two methods")
    with mpl.rc_context({"font.size": 30, "axes.facecolor": "black", "svg.hashsalt": "other"}):
        write_plot(PANELS, tmp_path / "b.svg", title="Two methods")
    write_plot(PANELS[:2], tmp_path / "c.svg", title="Two methods")
    a, b, c = ((tmp_path / f"{name}.svg").read_bytes() for name in "abc")
    assert a == b
    assert a != c
    ElementTree.fromstring(a)


def test_write_plot_draws_each_name_in_its_colour(tmp_path: Path) -> None:
    write_plot(PANELS, tmp_path / "plot.svg")
    text = (tmp_path / "plot.svg").read_text()
    assert all(text.count(COLOURS[i][0]) >= 3 for i in range(2))
    assert COLOURS[2][0] not in text


@pytest.mark.parametrize("log", [True, False])
@pytest.mark.parametrize(
    "values",
    [
        (0.0, 0.0, 0.0),
        (NAN, INF, -INF),
        (1.0, NAN, 1.0, 0.0, 1.0),
        (5e-324, 1.0, 1.7e308),
        (5e-324, 1e-323),
        (3.0,),
        (1.0, 1.0, 1.0),
        (2e-7, 3e-7),
    ],
)
def test_write_plot_draws_any_values_without_a_warning(tmp_path: Path, values: tuple[float, ...], log: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write_plot([Panel("p", (Curve("a", values),), log_y=log)], tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_write_plot_draws_the_whole_float_range_on_a_linear_axis(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write_plot([Panel("p", (Curve("a", (-1.7e308, 1.7e308)),), log_y=False)], tmp_path / "plot.png")


def test_figure_keeps_the_legend_clear_of_the_panels_and_names_as_they_are() -> None:
    names = ["_hidden", "$x^2$", r"$\bad", "<script>", *(f"method number {i}" for i in range(20))]
    figure = _figure([Panel("p", tuple(Curve(name, (1.0, 2.0)) for name in names))] * 2, "title $", 2)
    figure.draw_without_rendering()
    (legend,) = figure.legends
    assert sorted(text.get_text() for text in legend.get_texts()) == sorted(names)
    box = legend.get_window_extent()
    assert box.x1 <= figure.bbox.x1
    assert box.y1 <= figure.texts[0].get_window_extent().y0
    assert all(axes.get_tightbbox().y1 <= box.y0 for axes in figure.axes)


@pytest.mark.parametrize(("length", "rows"), [(10, [5]), (30, [3, 2]), (60, [2, 2, 1])])
def test_legend_is_read_by_rows(length: int, rows: list[int]) -> None:
    names = [f"{i}{'x' * length}" for i in range(5)]
    figure = _figure([Panel("p", tuple(Curve(name, (1.0, 2.0)) for name in names))], "", 1)
    figure.draw_without_rendering()
    (legend,) = figure.legends
    places = {text.get_text(): text.get_window_extent() for text in legend.get_texts()}
    read = sorted(places, key=lambda name: (-round(places[name].y0), places[name].x0))
    assert read == names
    heights = [round(places[name].y0) for name in names]
    assert [heights.count(height) for height in dict.fromkeys(heights)] == rows
    colours = {t.get_text(): line.get_color() for t, line in zip(legend.get_texts(), legend.get_lines(), strict=True)}
    assert [colours[name] for name in names] == [light for light, _ in COLOURS[:5]]


def test_figure_says_what_is_not_drawn() -> None:
    figure = _figure(PANELS, "", 2)
    label = figure.axes[1].get_xlabel()
    assert "fixup: zero at 2; infinite at 4" in label
    assert "he_in: not a number at 2; zero at 4" in label
    assert figure.axes[0].get_xlabel().endswith("One batch.")
    crosses = [line for line in figure.axes[1].lines if line.get_marker() == "x"]
    assert len(crosses) == 2
    assert not [line for line in figure.axes[0].lines if line.get_marker() == "x"]


@pytest.mark.parametrize(("low", "high"), [(-5.2, 30.4), (-0.55, 0.55), (-323.0, 308.0), (-3.1, 1.0), (12.3, 14.4)])
def test_log_ticks_are_few_and_inside(low: float, high: float) -> None:
    ticks, minor = log_ticks(low, high)
    assert 3 <= len(ticks) <= 9
    assert all(low <= tick <= high for tick in [*ticks, *minor])
    assert len(set(log_labels(ticks, plain=False))) == len(ticks)


def test_log_labels_are_plain_numbers_or_powers() -> None:
    ticks = [-3.0, 0.0, math.log10(5), 3.0, 4.0]
    assert log_labels(ticks, plain=True) == ["0.001", "1", "5", "1,000", "10,000"]
    assert log_labels([-5.0, 0.0], plain=False) == ["$10^{-5}$", "$10^{0}$"]
    assert log_labels([math.log10(2e-7), -6.0], plain=False) == ["$2\\cdot 10^{-7}$", "$10^{-6}$"]


def test_all_panels_of_a_figure_write_their_numbers_alike() -> None:
    short, long = (Panel("p", (Curve("a", (1.0, top)),)) for top in (70.0, 1e12))
    labels = [[label.get_text() for label in axes.get_yticklabels()] for axes in _figure((short, long), "", 2).axes]
    assert labels[0] == ["$10^{0}$", "$10^{1}$"]
    assert all(text.startswith("$10^") for text in labels[1])
    (axes,) = _figure((short,), "", 1).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["1", "2", "5", "10", "20", "50"]


def test_write_plot_leaves_matplotlib_as_it_was(tmp_path: Path) -> None:
    code = f"""
import sys, matplotlib
from normfree.report.panels import Curve, Panel
from normfree.report.plots import write_plot
matplotlib.rcParams["font.size"] = 17
before = matplotlib.rcParams.copy()  # a dict of it would look up the backend, and so load pyplot
write_plot([Panel("p", (Curve("a", (1.0, 2.0)),))], {str(tmp_path / "plot.svg")!r})
assert matplotlib.rcParams.copy() == before
assert "matplotlib.pyplot" not in sys.modules and "torch" not in sys.modules
"""
    assert run(code) == 0


def test_report_loads_no_matplotlib_before_it_is_needed() -> None:
    code = "import sys, normfree.report.plots, normfree.report.page; sys.exit('matplotlib' in sys.modules)"
    assert run(code) == 0


def test_write_plot_without_matplotlib_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"needs matplotlib, which is not installed; .*: pip install '\.\[plots\]'"):
        write_plot(PANELS, tmp_path / "plot.png")


@pytest.mark.parametrize(
    ("panels", "name", "columns", "message"),
    [
        (PANELS, "plot.pdf", 2, r"expected a file ending in .png or .svg, got 'plot.pdf'; rename it"),
        ((), "plot.png", 2, r"expected panels and columns >= 1, got 0 and 2"),
        (PANELS, "plot.png", 0, r"got 3 and 0"),
    ],
)
def test_write_plot_refuses(tmp_path: Path, panels: tuple, name: str, columns: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        write_plot(panels, tmp_path / name, columns=columns)
    assert not list(tmp_path.iterdir())


def test_figure_draws_levels_bars_and_crosses_over_even_decades() -> None:
    curve = Curve("fixup", (50.0, 60.0, 10.0), (10.0, 100.0, 1000.0), spread=(1.0, 2.0, 0.0), crossed=(2,))
    panel = Panel("p", (curve,), log_y=False, log_x=True, levels=(ReferenceLine("$chance", 10.0),))
    figure = _figure((panel,), "", 1)
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["10", "100", "1,000"]
    assert [text.get_text() for text in axes.texts] == ["$chance"]
    bars = [list(line.get_ydata()) for line in axes.lines if line.get_marker() == "_"]
    assert bars == [[49.0, 51.0], [58.0, 62.0]]
    (cross,) = (line for line in axes.lines if line.get_marker() == "x")
    assert (list(cross.get_xdata()), list(cross.get_ydata())) == ([3.0], [10.0])
    assert axes.get_ylim()[0] == 0


def test_single_runs_are_dots_in_short_curves_and_lines_in_long_ones_within_the_axes() -> None:
    short = Curve("fixup", (7.0, 8.0), singles=((6.0, 7.0), (90.0, NAN)))
    long = Curve("fixup", (7.0,) * 60, singles=((6.0,) * 60, (90.0,) * 30 + (NAN,) * 30))
    for curve, style in ((short, "None"), (long, "-")):
        (axes,) = _figure((Panel("p", (curve,), log_y=False),), "", 1).axes
        drawn = [[v for v in line.get_ydata() if not math.isnan(v)] for line in axes.get_lines()]
        for single in curve.singles:
            values = [v for v in single if not math.isnan(v)]
            assert axes.get_lines()[drawn.index(values)].get_linestyle() == style
        assert axes.get_ylim()[1] > 90


@pytest.mark.parametrize(
    ("values", "bottom"), [((10.0, 80.0), 0.0), ((70.0, 80.0), 69.5), ((-10.0, 90.0), -15.0), ((0.0, 80.0), -4.0)]
)
def test_linear_axis_begins_at_zero_where_heights_compare(values: tuple[float, ...], bottom: float) -> None:
    """A curve that comes down to 0 keeps a little room, or the axis would cover it."""
    (axes,) = _figure((Panel("p", (Curve("a", values),), log_y=False),), "", 1).axes
    assert axes.get_ylim()[0] == pytest.approx(bottom)


@pytest.mark.parametrize(("spread", "bottom"), [((), 0.0), ((0.0, 0.0), 0.0), ((0.3, 0.3), 29.2)])
def test_single_values_at_names_begin_at_zero_unless_they_have_error_bars(
    spread: tuple[float, ...], bottom: float
) -> None:
    panel = Panel("BLEU", (Curve("here", (29.6, 30.2), spread=spread),), log_y=False, names=("layer norm", "Fixup"))
    (axes,) = _figure((panel,), "", 1).axes
    low, high = axes.get_ylim()
    assert low == pytest.approx(bottom, abs=0.15)
    assert high - 30.2 > 0.04 * (high - low)  # no point is cut


def test_curves_differ_by_the_shape_of_their_points_in_the_panel_and_in_the_legend() -> None:
    curves = tuple(Curve(f"c{i}", tuple(float(i + k) for k in range(1, n + 1))) for i, n in enumerate((5, 5, 200, 200)))
    figure = _figure((Panel("p", curves, log_y=False),), "", 1)
    (axes,) = figure.axes
    shapes = [line.get_marker() for line in axes.lines if line.get_linestyle() == "None" and len(line.get_xdata())]
    assert len(set(shapes)) == 4
    assert [handle.get_marker() for handle in figure.legends[0].legend_handles] == shapes  # type: ignore[union-attr]
    long = [line for line in axes.lines if line.get_marker() == shapes[3]]
    assert 6 <= len(long[0].get_xdata()) <= 10  # some points of a long curve


def test_names_stand_at_the_ends_of_many_curves_within_the_panel_and_apart() -> None:
    few = tuple(Curve(f"c{i}", (1.0, 2.0 + i / 100)) for i in range(6))
    (axes,) = _figure((Panel("p", few, log_y=False),), "", 1).axes
    assert not axes.texts
    (axes,) = _figure((Panel("p", (*few, Curve("gone", (1.0, NAN))), log_y=False),), "", 1).axes
    assert sorted(text.get_text() for text in axes.texts) == [*(f"c{i}" for i in range(6)), "gone"]
    heights = sorted(text.get_position()[1] for text in axes.texts)
    assert 0 <= heights[0] < heights[-1] <= 1
    assert all(b - a > 0.05 for a, b in pairwise(heights))


def test_names_of_levels_stand_beside_the_panel_and_apart() -> None:
    levels = (
        ReferenceLine("linear classifier, 83.5 %", 83.5),
        ReferenceLine("batch norm", 82.0),
        ReferenceLine("chance", 10.0),
    )
    panel = Panel("p", (Curve("a", (75.0, 80.0)),), log_y=False, levels=levels)
    figure = _figure((panel, panel, panel), "", 3)
    figure.draw_without_rendering()
    for axes in figure.axes:
        frame, boxes = axes.get_window_extent(), [text.get_window_extent() for text in axes.texts]
        assert all(box.x0 > frame.x1 for box in boxes)
        assert all(box.x1 <= figure.bbox.x1 for box in boxes)
        assert all(a.y0 >= b.y1 for a, b in pairwise(boxes))


def test_level_on_the_lower_axis_is_not_drawn_among_the_ticks() -> None:
    levels = (ReferenceLine("chance", 0.0125), ReferenceLine("linear", 40.0))
    (axes,) = _figure((Panel("p", (Curve("a", (25.0, 60.0)),), log_y=False, levels=levels),), "", 1).axes
    assert [text.get_text() for text in axes.texts] == ["linear"]
    assert axes.get_ylim()[0] == 0


def test_thousands_are_separated_on_every_axis() -> None:
    values, steps = (2000.0, 3000.0, 12000.0), (1000.0, 4000.0, 100_000.0)
    linear = Panel("p", (Curve("a", values, steps),), log_y=False)
    both = Panel("p", (Curve("a", values, steps),), log_x=True)
    figure = _figure((linear, both), "", 2)
    figure.draw_without_rendering()
    labels = [[text.get_text() for text in (*a.get_xticklabels(), *a.get_yticklabels())] for a in figure.axes]
    assert {"20,000", "100,000", "2,000", "12,000"} <= set(labels[0])
    assert {"1,000", "4,000", "100,000", "2,000", "10,000"} <= set(labels[1])
    assert not [text for text in (*labels[0], *labels[1]) if text.isdigit() and len(text) > 3]


# Names on the lower axis

SHORT = ("layer norm", "Fixup", "Fixup, bounded", "T-Fixup", "ReZero", "dynamic tanh")
LONG = tuple(f"body.{i}.0: shortcut.conv + branch.conv{i}" for i in range(6))
LONGER = tuple(f"a_rather_long_name_of_method_{i}:with=options,and=more_of_them" for i in range(6))


def named(names: tuple[str, ...], curves: int = 1) -> Panel:
    values = tuple(float(i + 1) for i in range(len(names)))
    return Panel("p", tuple(Curve(f"c{i}", values) for i in range(curves)), log_y=False, names=names)


def lines_of(axes: Axes, style: str) -> list[list[float]]:
    """The positions of what is drawn in a line style."""
    return [list(line.get_xdata()) for line in axes.lines if line.get_linestyle() == style]


def test_names_stand_at_their_points_which_no_line_joins() -> None:
    curve = Curve("$a", (5.0, 7.0), (1.0, 3.0), spread=(1.0, 0.0))
    panel = Panel("p", (curve,), x_label="", log_y=False, names=("$one", "two", "three"))
    (axes,) = _figure((panel,), "", 1).axes
    assert [(t.get_text(), t.get_position()[0]) for t in axes.get_xticklabels()] == [
        ("$one", 1),
        ("two", 2),
        ("three", 3),
    ]
    assert lines_of(axes, "None") == [[1.0, 3.0]]
    assert lines_of(axes, "-") == [[1.0, 1.0]]  # the error bar
    assert [text.get_text() for text in axes.texts] == ["5.00", "7.00"]


def test_values_of_two_curves_at_names_do_not_overlap() -> None:
    curves = Curve("paper", (7.24, 6.61, 7.78)), Curve("here", (7.18, 6.37, 100.0))
    figure = _figure((Panel("p", curves, log_y=False, names=("Fixup", "batch norm", "Xavier")),) * 2, "", 2)
    figure.draw_without_rendering()
    for axes in figure.axes:
        assert [text.get_text() for text in axes.texts] == ["7.24", "6.61", "7.78", "7.18", "6.37", "100"]
        boxes = [text.get_window_extent() for text in axes.texts]
        assert not any(a.overlaps(b) for a, b in combinations(boxes, 2))


def test_curves_stand_beside_each_other_at_a_name() -> None:
    (axes,) = _figure((named(("one", "two"), curves=3),), "", 1).axes
    first, second, third = (places[0] for places in lines_of(axes, "None"))
    assert second == pytest.approx(1.0)
    assert second - first == pytest.approx(third - second)
    assert first < second < third < 1.5


def test_point_at_the_last_name_may_be_missing_without_a_cross() -> None:
    panel = Panel("p", (Curve("a", (1.0, INF)),), names=("one", "two"))
    (axes,) = _figure((panel,), "", 1).axes
    assert not [line for line in axes.lines if line.get_marker() == "x"]
    assert axes.get_xlabel().endswith("a: infinite at two")


@pytest.mark.parametrize(("names", "slanted"), [(SHORT, False), (LONG, True), (LONGER, True)])
def test_six_names_of_a_half_wide_panel_neither_overlap_nor_are_cut(names: tuple[str, ...], slanted: bool) -> None:
    figure = _figure((named(names), named(names)), "", 2)
    figure.draw_without_rendering()
    for axes, (left, right) in zip(figure.axes, [(0.0, 0.5), (0.5, 1.0)], strict=True):
        labels = axes.get_xticklabels()
        assert ["".join(t.get_text().split()) for t in labels] == ["".join(name.split()) for name in names]
        boxes = [label.get_window_extent() for label in labels]
        assert min(box.x0 for box in boxes) >= left * figure.bbox.x1
        assert max(box.x1 for box in boxes) <= right * figure.bbox.x1
        assert min(box.y0 for box in boxes) >= figure.bbox.y0
        assert axes.get_window_extent().height > 1.2 * figure.dpi  # inches left for the points
        angle = math.radians(labels[0].get_rotation())
        assert (angle > 0) == slanted
        step = axes.get_window_extent().width / len(names)
        for label in labels:
            label.set_rotation(0)
            box = label.get_window_extent()
            assert (box.height < step * math.sin(angle)) if slanted else (box.width < step)


# Curves on each other


def test_curve_is_in_pieces_by_how_many_lie_on_it() -> None:
    flat, far = [(float(x), 0.0) for x in range(5)], [(float(x), 1.0) for x in range(5)]
    crossing = [(0.0, 0.0), (1.0, 0.0), (2.0, 0.05), (3.0, 0.5), (4.0, 0.0)]
    assert [(len(piece), n) for piece, n in _pieces(flat, [], 0.1)] == [(5, 0)]
    assert [(len(piece), n) for piece, n in _pieces(flat, [far], 0.1)] == [(5, 0)]
    assert [(len(piece), n) for piece, n in _pieces(flat, [flat, crossing], 0.1)] == [(3, 2), (3, 1)]
    assert [(len(piece), n) for piece, n in _pieces(flat, [crossing], 0.1)] == [(3, 1), (3, 0)]
    assert [(len(piece), n) for piece, n in _pieces(flat, [[(0.0, NAN), (7.0, 0.0)]], 0.1)] == [(5, 0)]


def drawn_lines(axes: Axes, *, bands: bool) -> list[Line2D]:
    """The lines of the curves in a panel, or the bands below them."""
    return [line for line in axes.lines if line.get_linestyle() != "None" and (line.get_zorder() < 2) == bands]


def test_curves_keep_the_dash_of_their_legend_entry_where_they_lie_on_each_other() -> None:
    names = [str(i) for i in range(2 * len(COLOURS))]
    figure = _figure([Panel("p", tuple(Curve(name, (1.0, 2.0, 3.0)) for name in names))], "", 1)
    (legend,) = figure.legends
    entries = {text.get_text(): line for text, line in zip(legend.get_texts(), legend.get_lines(), strict=True)}
    drawn = drawn_lines(figure.axes[0], bands=False)
    look = [(line.get_color(), line.get_linestyle(), line.get_linewidth()) for line in drawn]
    known = [entries[name] for name in names]
    assert look == [(line.get_color(), line.get_linestyle(), line.get_linewidth()) for line in known]
    styles = [line.get_linestyle() for line in drawn]
    assert [line.get_linestyle() for line in drawn_lines(figure.axes[0], bands=True)] == styles[:-1]


def test_earlier_of_equal_curves_have_wider_bands_below_all_lines() -> None:
    (axes,) = _figure([Panel("p", tuple(Curve(name, (1.0, 2.0)) for name in "abc"))], "", 1).axes
    lines, bands = drawn_lines(axes, bands=False), drawn_lines(axes, bands=True)
    widths = [band.get_linewidth() for band in bands]
    assert len(bands) == 2
    assert widths[0] > widths[1] > lines[0].get_linewidth()
    assert max(band.get_zorder() for band in bands) < min(line.get_zorder() for line in lines)


def test_band_stands_only_where_curves_are_equal(tmp_path: Path) -> None:
    lone, one, two = (40.0, 41.0, 42.0), (41.3, 10.0, 10.0), (40.9, 10.0, 10.0)
    panel = Panel("p", tuple(Curve(n, v) for n, v in zip("abc", (lone, one, two), strict=True)), log_y=False)
    (axes,) = _figure((panel,), "", 1).axes
    (band,) = drawn_lines(axes, bands=True)
    assert list(band.get_xdata()) == [2.0, 3.0]
    assert band.get_color() != COLOURS[1][0]  # paler


def test_band_of_a_dashed_curve_has_dashes_as_long_as_its_line(tmp_path: Path) -> None:
    names = [str(i) for i in range(len(COLOURS) + 2)]
    curves = tuple(Curve(name, (1.0, 2.0) if i >= len(COLOURS) else (3.0 + i, 4.0 + i)) for i, name in enumerate(names))
    write_plot([Panel("p", curves, log_y=False)], tmp_path / "plot.svg")
    dashes = re.findall(r"stroke-dasharray: ([\d.]+),([\d.]+)[^\"]*\"", (tmp_path / "plot.svg").read_text())
    assert len(set(dashes)) == 1
    assert len(dashes) == 5  # two lines, a band and two entries of the legend


@pytest.mark.parametrize("joined", [True, False])
def test_dots_on_a_line_cover_nothing(joined: bool) -> None:
    line, same = Curve("best", (1.0, 2.0, 2.0)), Curve("trials", (1.0, 2.0, 1.5), joined=joined)
    axes = _figure((Panel("p", (line, same), y_label="y", log_y=False),), "t", 1).axes[0]
    assert bool(drawn_lines(axes, bands=True)) is joined  # the control: a line covers a line


def test_curve_that_is_not_joined_is_dots() -> None:
    def lines(joined: bool) -> int:
        curve = Curve("scores", tuple(float(i % 7 + 1) for i in range(300)), joined=joined)
        (axes,) = _figure([Panel("p", (curve,), log_y=False)], "", 1).axes
        return sum(line.get_linestyle() != "None" for line in axes.lines)

    def dots(joined: bool) -> int:
        curve = Curve("scores", tuple(float(i % 7 + 1) for i in range(300)), joined=joined)
        (axes,) = _figure([Panel("p", (curve,), log_y=False)], "", 1).axes
        return sum(len(line.get_xdata()) for line in axes.lines if line.get_linestyle() == "None")

    assert (lines(joined=True), lines(joined=False)) == (1, 0)
    assert dots(joined=True) < dots(joined=False) == 300


def test_dots_have_round_ticks_on_a_logarithmic_axis() -> None:
    x = (0.0123, 0.0456, 0.0789)
    curve = Curve("scores", (1.0, 2.0, 3.0), x=x, joined=False)
    panel = Panel("p", (curve,), log_y=False, log_x=True, x=(0.001, 1.0))
    (axes,) = _figure([panel], "", 1).axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0.001", "0.01", "0.1", "1"]
