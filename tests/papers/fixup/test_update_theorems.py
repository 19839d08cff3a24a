"""The factors that the library's Fixup gives to its layers."""

import pytest

from normfree_papers.fixup.update_theorems import layer_factors


@pytest.mark.parametrize(("L", "m"), [(4, 2), (16, 2), (16, 3), (81, 5)])
def test_factors_are_the_power_of_depth_and_the_last_is_zero(L, m):
    *first, last = layer_factors(L, m, 32, seed=0)
    assert last == 0
    assert first == pytest.approx([L ** (-1 / (2 * m - 2))] * (m - 1), rel=5 / (2 * L * 32**2) ** 0.5)
