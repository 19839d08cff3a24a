"""The growth of the mean square at zero-padded borders, in closed form."""

from itertools import pairwise

import pytest

from normfree_papers.normdead.signal_plots import bordered_growth


def test_first_block_of_a_stage_keeps_the_share_of_taps_that_are_there():
    # A row of n positions has 3n - 2 of 3n taps, and so has a column.
    found = bordered_growth(16)
    assert found[0] == pytest.approx(1 + (46 / 48) ** 2)
    assert found[3] == pytest.approx(1 + (22 / 24) ** 2)


def test_growth_of_large_maps_is_two_per_block():
    found = bordered_growth(512)
    assert found[2] == pytest.approx(8, rel=0.01)
    assert all(b / a < 2 for a, b in pairwise(found) if b > a)
