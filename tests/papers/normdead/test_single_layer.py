"""Batch norm and centred weight norm on one layer: gradients and shares by hand."""

import pytest
import torch

from normfree_papers.normdead import float64_draws, single_layer


def test_share_is_one_for_a_constant_and_zero_for_a_centred_gradient():
    assert single_layer.share(torch.full((4, 3), 2.0), 0) == pytest.approx(1)
    assert single_layer.share(torch.tensor([[1.0, -1.0], [-1.0, 1.0]]), 0) == 0


def test_input_gradient_is_that_of_the_chain_rule():
    g = torch.Generator().manual_seed(0)
    layer = float64_draws.he(5, 4, 1.0, g)
    x, target = (torch.randn(3, n, generator=g, dtype=torch.float64) for n in (5, 4))
    y = (x @ layer.weight.T).detach()
    expected = ((y > 0) * (y.relu() - target)) @ layer.weight.detach()
    torch.testing.assert_close(single_layer.input_gradient(layer, x, target), expected)


def test_input_scale_passes_centred_weight_norm_and_not_batch_norm():
    values = single_layer.layer_values(0)
    assert values["input scale, batch norm"] < 1e-12
    assert values["input scale, centred weight norm"] == pytest.approx(2)
