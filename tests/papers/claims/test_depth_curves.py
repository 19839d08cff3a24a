import math

import pytest

from normfree_papers.claims.depth_curves import (
    chart,
    decades,
    exponent,
    factor_per_block,
    geometric_means,
    means,
    stage_starts,
    straight_line,
)


def test_factor_leaves_out_the_steps_between_stages():
    values, stages = [1, 3, 9, 1000, 3000, 1], [1, 1, 1, 2, 2, 3]
    assert factor_per_block(values, stages) == pytest.approx(3)
    assert factor_per_block(values, stages, backward=True) == pytest.approx(1 / 3)
    assert math.isnan(factor_per_block([1, 2], [1, 2]))
    with pytest.raises(ValueError, match="one stage per value"):
        factor_per_block([1, 2], [1])


def test_decades_count_growth_in_both_directions():
    assert decades([1, 5, 100]) == pytest.approx(2)
    assert decades([100, 5, 1], backward=True) == pytest.approx(2)


def test_straight_line_and_power_law():
    assert straight_line([0, 1, 2], [1, 3, 5]) == pytest.approx((2, 1))
    assert straight_line([0, 1, 2, 3], [0, 1, 0, 1])[1] < 0.5
    assert exponent([1, 10, 100], [5, 50 * 10, 5 * 10**4]) == pytest.approx(2)


def test_curves_are_averaged_position_by_position():
    assert geometric_means([(1, 4), (100, 1)]) == pytest.approx((10, 2))
    assert geometric_means([(1, 0.0), (1, 5)])[1] == 0
    assert means([(1, 4), (3, 0)]) == (2, 2)


def test_stages_start_after_the_first():
    assert stage_starts([1, 1, 2, 2, 2, 3]) == (3, 6)


def test_chart_names_its_curves_and_passes_options_on():
    panel = chart("signal", {"a": range(1, 4), "b": (4.0, 5.0, 6.0)}, "variance", "layer", x=(1, 10, 100), log_x=True)
    assert [(curve.name, curve.values) for curve in panel.curves] == [("a", (1, 2, 3)), ("b", (4, 5, 6))]
    assert (panel.title, panel.y_label, panel.x_label, panel.x) == ("signal", "variance", "layer", (1.0, 10.0, 100.0))
    assert panel.log_x
    assert panel.log_y
    with pytest.raises(ValueError, match="expected 2 values as in x, got 3"):
        chart("signal", {"a": range(1, 4)}, x=(1, 2))
