"""Norms in networks of changing width: closed forms, and errors that the numbers must show."""

import math
from itertools import pairwise

import pytest
import torch

from normfree_papers.wninit.networks import (
    Norms,
    feed_forward,
    initialized,
    measure_norms,
    residual,
    width_slopes,
    with_unit_lengths,
)

WIDTHS = (20, 31, 17, 24)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_library_sets_the_lengths_of_a_feed_forward_network():
    model = initialized(feed_forward(WIDTHS), "wn", WIDTHS[0], seeded())
    lengths = [float(layer.gain[0]) for layer in list(model)[:-1:2]]
    assert lengths == pytest.approx([math.sqrt(2 * n / m) for n, m in pairwise(WIDTHS)])


def test_library_sets_the_lengths_of_a_residual_network():
    model = initialized(residual(WIDTHS), "wn", WIDTHS[0], seeded())
    for block, inner in zip(list(model)[:-1], WIDTHS[1:], strict=True):
        assert float(block.first.gain[0]) == pytest.approx(math.sqrt(2 * 20 / inner))
        assert float(block.last.gain[0]) == pytest.approx(math.sqrt(inner / 20 / 3))
    with_unit_lengths(model)
    assert {float(b.last.gain[0]) for b in list(model)[:-1]} == {1.0}


def test_norms_are_those_of_a_pass_by_hand():
    model = initialized(feed_forward(WIDTHS), "wn", WIDTHS[0], seeded())
    x = torch.randn(8, 20, generator=seeded(1))
    found = measure_norms(model, x, seeded(2))
    h, weights = x, [layer.effective_weight() for layer in list(model)[:-1:2]]
    pre = []
    for weight, norm in zip(weights, found.activations, strict=True):
        pre.append(h @ weight.T)
        h = torch.relu(pre[-1])
        assert norm == pytest.approx(float(h.norm() / x.norm()), rel=1e-5)
    gradient = torch.randn(8, 24, generator=seeded(2))
    last = gradient.norm()
    for i in (1, 0):
        gradient = (gradient @ weights[i + 1]) * (pre[i] > 0)
        assert found.gradients[i] == pytest.approx(float(gradient.norm() / last), rel=1e-5)
    assert found.widths == WIDTHS


@pytest.mark.parametrize(("forward", "backward"), [(0.1, 0.5), (1.0, -0.5), (0.5, 0.1)])
def test_slopes_are_the_exponents_in_the_ratio_of_widths(forward, backward):
    widths = (10, 14, 9, 30, 12)
    activations = [(n / widths[0]) ** forward for n in widths[1:]]
    gradients = [(n / widths[-1]) ** backward for n in widths[1:]]
    assert width_slopes(Norms(activations, gradients, widths)) == pytest.approx((forward, backward))
