"""Closed forms behind the claims on exploding variance."""

import pytest
import torch

from normfree_papers.fixup.explosion import padded_factors


@pytest.mark.parametrize("size", [2, 4, 32])
def test_first_factor_is_the_share_of_taps_inside_the_image(size):
    assert padded_factors(size, 2) == pytest.approx([1 + ((3 * size - 2) / (3 * size)) ** 2])


def test_factors_are_those_of_a_3x3_mean_with_zero_padding():
    x = torch.ones(1, 1, 5, 5, dtype=torch.float64)
    kernel = torch.full((1, 1, 3, 3), 1 / 9, dtype=torch.float64)
    for factor in padded_factors(5, 6):
        after = x + torch.nn.functional.conv2d(x, kernel, padding=1)
        assert factor == pytest.approx(float(after.sum() / x.sum()))
        x = after


def test_large_images_double():
    assert padded_factors(2000, 3) == pytest.approx([2.0, 2.0], abs=2e-3)
