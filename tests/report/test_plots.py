import math
import os
import subprocess
import sys
import warnings
from pathlib import Path
from xml.etree import ElementTree

import matplotlib as mpl
import pytest

import normfree
from normfree.report.panels import COLOURS, Curve, Level, Panel
from normfree.report.plots import _figure, _log_labels, _log_ticks, write_plot

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
    assert [text.get_text() for text in legend.get_texts()] == names
    box = legend.get_window_extent()
    assert box.x1 <= figure.bbox.x1
    assert box.y1 <= figure.texts[0].get_window_extent().y0
    assert all(axes.get_tightbbox().y1 <= box.y0 for axes in figure.axes)


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
    ticks, minor = _log_ticks(low, high)
    assert 3 <= len(ticks) <= 9
    assert all(low <= tick <= high for tick in [*ticks, *minor])
    assert len(set(_log_labels(ticks))) == len(ticks)


def test_log_labels_are_plain_where_they_are_short() -> None:
    assert _log_labels([-3.0, 0.0, math.log10(5), 4.0]) == ["0.001", "1", "5", "10000"]
    assert _log_labels([-5.0, 0.0]) == ["$10^{-5}$", "$10^{0}$"]
    assert _log_labels([math.log10(2e-7), -6.0]) == ["$2\\cdot 10^{-7}$", "$10^{-6}$"]


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
    with pytest.raises(ImportError, match=r"needs matplotlib, which is not installed; run: .*normfree\[plots\]"):
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
    panel = Panel("p", (curve,), log_y=False, log_x=True, levels=(Level("$chance", 10.0),))
    figure = _figure((panel,), "", 1)
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["10", "100", "1000"]
    assert [text.get_text() for text in axes.texts] == ["$chance"]
    bars = [list(line.get_ydata()) for line in axes.lines if line.get_marker() == "_"]
    assert bars == [[49.0, 51.0], [58.0, 62.0]]
    (cross,) = (line for line in axes.lines if line.get_marker() == "x")
    assert (list(cross.get_xdata()), list(cross.get_ydata())) == ([3.0], [10.0])
    assert axes.get_ylim()[0] == 0
