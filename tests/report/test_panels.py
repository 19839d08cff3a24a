import math
from collections.abc import Callable

import numpy as np
import pytest

from normfree.report.panels import COLOURS, Curve, Panel, ReferenceLine, curve_names, describe_gaps, ends_early

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((), r"curve 'a': expected values, got none; leave the curve out"),
        ((1.0, "2"), r"curve 'a': expected numbers, got str at index 1; convert the values with float\(\)"),
        ((None,), r"got NoneType at index 0"),
    ],
)
def test_curve_refuses(values: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Curve("a", values)


def test_curve_takes_every_kind_of_number() -> None:
    assert len(Curve("a", (1, 2.0, NAN, INF, -INF, np.float32(3), np.float64(4), np.int64(5))).values) == 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"curves": ()}, "expected at least one curve, got none; leave the panel out"),
        (
            {"curves": (Curve("a", (1.0,)), Curve("a", (2.0,)))},
            "expected each name once, got 'a' twice; rename a curve",
        ),
        ({"x": (1.0, 2.0)}, "expected 2 values as in x, got 3 in curve 'a'; fill the rest with NaN"),
        ({"x": (1.0, 3.0, 2.0)}, "expected finite x in ascending order, got others; sort"),
        ({"x": (1.0, 2.0, INF)}, "expected finite x in ascending order"),
        ({"point_names": ("one",)}, "expected 3 point names, .* got 1; name every position or none"),
        ({"stages": (NAN,)}, "expected finite stages"),
        (
            {"curves": (Curve("a", (1.0, -2.0)),)},
            "expected values >= 0 on a logarithmic axis, got -2 in curve 'a'; pass",
        ),
        ({"names": ("one", "two")}, "expected positions from 1 to 2, as there are names, got 3; name every position"),
        ({"names": ("one", "two", "three"), "x": (1.0, 1.5, 2.0)}, "expected positions from 1 to 3, .* got 1.5; name"),
        (
            {"names": ("one", "two", "three"), "log_x": True},
            "expected positions from 1 to 3, .* got a logarithmic axis",
        ),
    ],
)
def test_panel_refuses(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"panel 'p': {message}"):
        Panel(**{"title": "p", "curves": (Curve("a", (1.0, 2.0, 3.0)),), **options})


def test_panel_takes_negative_values_on_a_linear_axis() -> None:
    assert not Panel("p", (Curve("a", (-1.0, 1.0)),), log_y=False).log_y


def test_panel_positions_are_x_or_count_from_one() -> None:
    curve = Curve("a", (5.0, 6.0))
    assert Panel("p", (curve,)).positions(curve) == (1.0, 2.0)
    assert Panel("p", (curve,), x=(0.1, 0.2)).positions(curve) == (0.1, 0.2)


def test_curve_may_have_positions_of_its_own() -> None:
    own, other = Curve("own", (1.0, INF, INF), x=(0.5, 2.0, 2.5)), Curve("other", (5.0, 6.0))
    panel = Panel("p", (own, other), x=(1.0, 3.0))
    assert panel.positions(own) == (0.5, 2.0, 2.5)
    assert panel.positions(other) == (1.0, 3.0)
    assert describe_gaps(panel, own, log=False) == "infinite from 2 on"
    for x in ((1.0,), (2.0, 1.0), (1.0, NAN)):
        with pytest.raises(ValueError, match="curve 'a': expected"):
            Curve("a", (1.0, 2.0), x)


def test_curve_names_are_in_order_of_first_appearance() -> None:
    a, b, c = (Curve(name, (1.0,)) for name in "abc")
    assert curve_names([Panel("p", (b, a)), Panel("q", (c, a, b))]) == ("b", "a", "c")


@pytest.mark.parametrize(
    ("values", "log", "text"),
    [
        ((1.0, 2.0), True, ""),
        ((1.0, 0.0), True, "zero at 2"),
        ((1.0, 0.0), False, ""),
        ((0.0, 0.0, 1.0), True, "zero at 1 to 2"),
        ((1.0, INF, INF), False, "infinite from 2 on"),
        ((1.0, NAN, 1.0, -INF), False, "not a number at 2; infinite at 4"),
        ((-1.0, 1.0), True, "negative at 1"),
        ((0.0, 1.0) * 50, True, "zero at 50 points between 1 and 99"),
        ((NAN,), True, "not a number at 1"),
    ],
)
def test_describe_gaps_names_what_is_not_drawn(values: tuple[float, ...], log: bool, text: str) -> None:
    curve = Curve("a", values)
    assert describe_gaps(Panel("p", (curve,), log_y=False), curve, log) == text


def test_describe_gaps_speaks_of_positions() -> None:
    curve = Curve("a", (1.0, 0.0, 1.0))
    assert describe_gaps(Panel("p", (curve,), x=(0.001, 0.01, 0.1)), curve, True) == "zero at 0.01"


def test_describe_gaps_speaks_of_names() -> None:
    curve = Curve("a", (0.0, 0.0, INF), (1.0, 2.0, 4.0))
    panel = Panel("p", (curve,), names=("layer norm", "Fixup", "ReZero", "T-Fixup"))
    assert describe_gaps(panel, curve, True) == "zero at layer norm, Fixup; infinite at T-Fixup"
    assert describe_gaps(panel, curve, False) == "infinite at T-Fixup"


def test_ends_early_is_of_curves_that_began() -> None:
    assert ends_early(Curve("a", (1.0, 0.0)), log=True)
    assert not ends_early(Curve("a", (1.0, 0.0)), log=False)
    assert not ends_early(Curve("a", (0.0, 0.0)), log=True)
    assert not ends_early(Curve("a", (NAN, 1.0)), log=True)


@pytest.mark.parametrize(("ground", "side"), [("#ffffff", 0), ("#1b1e24", 1)])
def test_colours_stand_out_from_their_ground(ground: str, side: int) -> None:
    # 3 to 1 is what WCAG 2.1 asks of graphics; sky blue and amber on white come near it and are thick lines.
    limit = 2.7 if side == 0 else 3.0
    assert all(contrast(pair[side], ground) > limit for pair in COLOURS)
    assert len({pair[side] for pair in COLOURS}) == len(COLOURS)


def contrast(one: str, other: str) -> float:
    """The contrast ratio of two colours (WCAG 2.1)."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * value for weight, value in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Curve("a", (1.0, 2.0), spread=(0.1,)), "expected a spread >= 0 for each of 2 values"),
        (lambda: Curve("a", (1.0,), spread=(-0.1,)), "expected a spread >= 0"),
        (lambda: Curve("a", (1.0, 2.0), singles=((1.0, 2.0), (1.0,))), "expected 2 values of every single run"),
        (lambda: Curve("a", (1.0,), crossed=(1,)), "expected crossed points below 1"),
        (lambda: Panel("p", (Curve("a", (1.0,), (0.0,)),), log_x=True), "expected positions above 0"),
        (
            lambda: Panel("p", (Curve("a", (1.0,)),), levels=(ReferenceLine("none", 0.0),)),
            "expected a level that has a place",
        ),
    ],
)
def test_wrong_spread_cross_axis_and_level_are_refused(make: Callable[[], object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()
