import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from normfree.report import line_plot, open_console, sparkline

ANY_CURVE = st.lists(st.floats(min_value=0.0) | st.just(math.nan), min_size=1, max_size=60)


def drawing(text: str) -> list[str]:
    """The rows of the canvas, without axis and legend."""
    return [line.split("┤" if "┤" in line else "│", 1)[1] for line in text.splitlines() if "┤" in line or "│" in line]


def test_line_plot_fits_its_width_and_height() -> None:
    curves = {name: [base**i for i in range(500)] for name, base in {"up": 1.15, "flat": 1.0, "down": 0.98}.items()}
    text = line_plot(curves, width=80, height=12, title="t", x_label="layer", y_label="variance").plain
    assert len(drawing(text)) == 12
    assert max(map(len, text.splitlines())) <= 80


def test_line_plot_rises_with_the_curve() -> None:
    rows = drawing(line_plot({"up": [10.0**i for i in range(30)]}, height=10).plain)
    starts = [len(row) - len(row.lstrip()) for row in rows]
    assert starts == sorted(starts, reverse=True)
    # The control: a falling curve must not pass for a rising one.
    rows = drawing(line_plot({"down": [10.0**-i for i in range(30)]}, height=10).plain)
    starts = [len(row) - len(row.lstrip()) for row in rows]
    assert starts == sorted(starts)


def test_line_plot_ticks_are_powers_of_ten() -> None:
    text = line_plot({"a": [1e-5, 1e30]}).plain
    assert "10³⁰ ┤" in text
    assert "10⁰ ┤" in text


def test_line_plot_names_each_curve_without_colour() -> None:
    plot = line_plot({"fixup": [1.0] * 50, "he_in": [2.0**i for i in range(50)]})
    assert "A fixup   B he_in" in plot.plain
    assert all(any(letter in row for row in drawing(plot.plain)) for letter in "AB")
    assert {"cyan", "yellow"} <= {str(span.style) for span in plot.spans}


@pytest.mark.parametrize(
    ("tail", "says"),
    [
        ([math.inf, math.nan], "leaves float range at 214"),
        ([math.nan] * 3, "leaves float range at 214"),
        ([0.0] * 10, "reaches 0 at 214"),
    ],
)
def test_line_plot_marks_the_end_of_a_curve(tail: list[float], says: str) -> None:
    text = line_plot({"boom": [1.1**i for i in range(213)] + tail, "calm": [1.0] * 300}).plain
    assert f"A boom ✗ {says}" in text
    assert sum(row.count("✗") for row in drawing(text)) == 1


def test_line_plot_leaves_a_gap_for_a_curve_that_comes_back() -> None:
    text = line_plot({"gap": [1.0] * 100 + [math.nan] * 100 + [1.0] * 100}).plain
    assert "✗" not in text
    assert any(" " * 15 in row.strip() for row in drawing(text))


def test_line_plot_states_a_curve_without_a_value() -> None:
    text = line_plot({"lost": [math.nan] * 5, "calm": [1.0] * 5}).plain
    assert "A lost ✗ leaves float range at 1" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"series": {}}, "expected 1 to 26 curves, got 0; draw several"),
        ({"series": {str(i): [1.0] for i in range(27)}}, "expected 1 to 26 curves, got 27"),
        ({"series": {"a": []}}, "'a': expected values, got none; leave"),
        ({"series": {"a": [1.0, -2.0]}}, "expected values >= 0 on a logarithmic axis, got -2"),
        ({"series": {"a": [1.0]}, "width": 5}, "expected width >= 30 and height >= 4, got 5 and 14; enlarge"),
    ],
)
def test_line_plot_refuses_bad_input(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        line_plot(**options)


@given(ANY_CURVE)
def test_line_plot_draws_any_curve(values: list[float]) -> None:
    plot = line_plot({"a": values}, width=60, height=6)
    assert len(drawing(plot.plain)) == 6


@given(ANY_CURVE, st.integers(1, 30), st.booleans())
def test_sparkline_draws_any_curve(values: list[float], width: int, log: bool) -> None:
    assert len(sparkline(values, width, log)) == min(width, len(values))


def test_sparkline_is_monotone_in_a_growing_curve() -> None:
    assert sparkline([10.0**i for i in range(8)]) == "▁▂▃▄▅▆▇█"
    assert sparkline([float(i) for i in range(8)], log=False) == "▁▂▃▄▅▆▇█"


def test_sparkline_keeps_noise_flat() -> None:
    assert len(set(sparkline([1.0, 1.05, 0.95, 1.02]))) <= 2
    # The control: on a linear line the same noise fills the range.
    assert len(set(sparkline([1.0, 1.05, 0.95, 1.02], log=False))) > 2


def test_sparkline_shows_what_cannot_be_drawn() -> None:
    assert sparkline([1.0, math.inf, 0.0, math.nan])[1:] == "✗0✗"


@pytest.mark.parametrize(
    ("values", "width", "message"),
    [([], 20, "expected values and width >= 1, got 0 values"), ([1.0], 0, "width 0"), ([-1.0], 5, "pass log=False")],
)
def test_sparkline_refuses_bad_input(values: list[float], width: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sparkline(values, width)


@pytest.mark.parametrize("plain", ["", "1"])
def test_a_name_between_colons_is_no_picture(
    plain: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NO_COLOR", plain)
    open_console().print("my_package.models:ok: linear", markup=False)
    assert capsys.readouterr().out == "my_package.models:ok: linear\n"
