import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from normfree.report import open_console, sparkline

ANY_CURVE = st.lists(st.floats(min_value=0.0) | st.just(math.nan), min_size=1, max_size=60)


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
