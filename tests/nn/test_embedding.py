"""Token embeddings: the formula of the sinusoids, and unit variance."""

import math

import pytest
import torch

from normfree.nn.embedding import TokenEmbedding, sinusoids


@pytest.mark.parametrize("width", [6, 7])
def test_sinusoids_follow_the_formula(width: int) -> None:
    found = sinusoids(3, 4, width, torch.zeros(1, dtype=torch.float64))
    half = (width + 1) // 2
    for row, t in enumerate(range(3, 7)):
        for i in range(width):
            angle = t * 10000 ** (-(i % half) / (half - 1))
            wanted = math.sin(angle) if i < half else math.cos(angle)
            assert found[row, i].item() == pytest.approx(wanted, abs=1e-5)


def test_positions_continue_where_they_were() -> None:
    embedding = TokenEmbedding(10, 8)
    tokens = torch.tensor([[4, 5, 6, 7]])
    torch.testing.assert_close(embedding(tokens)[:, 2:], embedding(tokens[:, 2:], 2))
    assert not torch.allclose(embedding(tokens)[:, 2:], embedding(tokens[:, 2:]))  # the control
    torch.testing.assert_close(
        embedding(tokens) - sinusoids(0, 4, 8, torch.zeros(1)), embedding.weight[tokens] * 8**0.5
    )
