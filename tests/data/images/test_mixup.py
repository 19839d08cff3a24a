"""The share of mixup follows its Beta distribution, and every image has one partner."""

from __future__ import annotations

from math import sqrt

import numpy as np
import pytest
import torch
from scipy import stats

from normfree.data.draws import Purpose, key, uniform
from normfree.data.images.mixup import mix, share_table, shares, shifts

COUNT = 20_000
# Kolmogorov's limit at one false alarm in a million, and what reading a table of 4,096 cells may add.
LIMIT = stats.kstwobign.isf(1e-6) / sqrt(COUNT) + 1 / 4096


def distance(alpha: float, of: float) -> float:
    found = shares(2, 1, torch.arange(COUNT), share_table(alpha))
    assert found.min() >= 0
    assert found.max() <= 1
    # Kolmogorov's distance, each draw taken for anything that float32 rounds to it: near 1 that is much of the mass.
    drawn, cdf = np.sort(found.double().numpy()), stats.beta(of, of).cdf
    above = np.arange(1, COUNT + 1) / COUNT - cdf(np.minimum(drawn + 2**-24, 1))
    under = cdf(np.maximum(drawn - 2**-24, 0)) - np.arange(COUNT) / COUNT
    return float(max(above.max(), under.max()))


@pytest.mark.parametrize("alpha", [0.1, 0.2, 0.7, 1.0, 2.0, 40.0])
def test_share_follows_its_distribution(alpha: float) -> None:
    assert distance(alpha, alpha) < LIMIT


@pytest.mark.parametrize(("alpha", "other"), [(0.2, 0.25), (1.0, 0.8), (2.0, 1.7)])
def test_share_of_another_alpha_is_told_apart(alpha: float, other: float) -> None:
    assert distance(alpha, other) > LIMIT


@pytest.mark.parametrize("alpha", [0.05, 0.2, 0.7, 1.0, 1.5, 8.0, 1000.0])
def test_share_table_holds_the_quantiles(alpha: float) -> None:
    table = share_table(alpha).double()
    want = stats.beta(alpha, alpha).ppf(torch.arange(4097, dtype=torch.float64) / 4096)
    assert (table - torch.from_numpy(want)).abs().max() < 1e-6
    assert (table.diff() >= 0).all()


def test_share_at_one_is_exactly_the_uniform_draw() -> None:
    steps = torch.arange(COUNT)
    assert torch.equal(shares(3, 5, steps, share_table(1.0)), uniform(key(3, Purpose.SHARE, 5, steps)))


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("inf"), float("nan")])
def test_share_table_refuses_no_alpha(alpha: float) -> None:
    with pytest.raises(ValueError, match="expected a positive mixup alpha"):
        share_table(alpha)


@pytest.mark.parametrize("batch_size", [1, 2, 3, 128])
def test_shift_reaches_every_other_image_and_never_the_same(batch_size: int) -> None:
    found = shifts(0, 1, torch.arange(3000), batch_size)
    counts = torch.bincount(found, minlength=max(batch_size, 2))[1:]
    assert found.min() >= 1
    assert len(counts) == max(batch_size - 1, 1)
    expected = len(found) / len(counts)
    assert ((counts - expected) ** 2 / expected).sum() <= stats.chi2.isf(1e-6, max(len(counts) - 1, 1))


def test_share_differs_from_step_to_step_and_epoch_to_epoch() -> None:
    drawn = {float(x) for epoch in range(5) for x in shares(0, epoch, torch.arange(5), share_table(1.0))}
    assert len(drawn) == 25


def test_mix_equals_the_formula() -> None:
    a, b = torch.rand(2, 3, generator=torch.Generator().manual_seed(0)).unbind()
    torch.testing.assert_close(mix(a, b, torch.tensor(0.25)).double(), 0.25 * a.double() + 0.75 * b.double())
