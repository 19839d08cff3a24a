"""Layers that the library draws for the theorems."""

import math
from itertools import islice

import pytest
import torch

from normfree_papers.wninit.theorems import layer_weights


@pytest.mark.parametrize(("lengths", "expected"), [("forward", math.sqrt(2 * 30 / 12)), ("backward", math.sqrt(2))])
@pytest.mark.parametrize("directions", ["orthogonal", "gaussian"])
def test_rows_have_the_lengths_of_the_method(lengths, expected, directions):
    g = torch.Generator().manual_seed(0)
    first, second = islice(layer_weights(f"wn:directions={directions},g={lengths}", 30, 12, g), 2)
    assert first.shape == (12, 30)
    assert not torch.equal(first, second)
    for weight in (first, second):
        torch.testing.assert_close(weight.norm(dim=1), torch.full((12,), expected))
        others = (weight @ weight.T / expected**2 - torch.eye(12)).abs().max()
        assert (others < 1e-5) == (directions == "orthogonal")
