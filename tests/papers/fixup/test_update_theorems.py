"""The factors that the library's Fixup gives to its layers."""

import pytest

from normfree_papers.fixup import update_theorems
from normfree_papers.fixup.update_theorems import bottleneck_factor, layer_factors, library_deviation


@pytest.mark.parametrize(("L", "m"), [(4, 2), (16, 2), (16, 3), (81, 5)])
def test_factors_are_the_power_of_depth_and_the_last_is_zero(L, m):
    *first, last = layer_factors(L, m, 32, seed=0)
    assert last == 0
    assert first == pytest.approx([L ** (-1 / (2 * m - 2))] * (m - 1), rel=5 / (2 * L * 32**2) ** 0.5)


def test_bottleneck_factor_tells_fan_in_from_fan_out(monkeypatch):
    assert bottleneck_factor(seed=0) == pytest.approx(1.0, abs=0.01)
    built = update_theorems.build("resnet50", "he_in", generator=None)
    monkeypatch.setattr(update_theorems, "build", lambda *args, **kwargs: built)
    # He fan-in without the factor L^(-1/4): √16 times the share of fan-in
    assert 4 * 0.4 < bottleneck_factor(seed=0) < 4 * 0.8


@pytest.mark.parametrize(("L", "m"), [(1, 2), (5, 3)])
def test_formula_of_theorem_3_is_the_step_that_the_library_measures(L, m, monkeypatch):
    assert library_deviation(L, m, seed=1) < 1e-5
    true = update_theorems.measure_updates
    monkeypatch.setattr(update_theorems, "measure_updates", lambda *a, **k: true(*a, **{**k, "which": "branches"}))
    assert library_deviation(L, m, seed=1) > 1e-3  # without stem and classifier
