"""Equation 3 of `normdead` against finite differences, and what its listing does."""

import pytest
import torch

from made_up_runs import judge_means
from normfree_papers.claims.claim import Settings
from normfree_papers.claims.registry import get
from normfree_papers.claims.reproduction import collect
from normfree_papers.normdead import batchnorm as bn

CLAIM = get("normdead/eq3")


def differences(function, x, h=1e-6):
    """Central differences of a scalar function."""
    found = torch.empty_like(x)
    for i in range(x.numel()):
        step = torch.zeros_like(x).flatten()
        step[i] = h
        step = step.view_as(x)
        found.view(-1)[i] = (function(x + step) - function(x - step)) / (2 * h)
    return found


def test_equation3_is_the_gradient_of_batch_norm():
    g = torch.Generator().manual_seed(1)
    x, arriving = (torch.randn(3, 2, 2, 2, generator=g, dtype=torch.float64) for _ in range(2))

    def loss(t):
        centred = t - t.mean((0, 2, 3), keepdim=True)
        return float((arriving * centred / centred.square().mean((0, 2, 3), keepdim=True).sqrt()).sum())

    exact = differences(loss, x)
    sigma = x.std((0, 2, 3), correction=0, keepdim=True)
    x_hat = bn.batch_normalize(x)
    torch.testing.assert_close(bn.equation3(arriving, x_hat, sigma), exact, rtol=1e-6, atol=1e-8)
    assert bn.remaining_mean(exact).max() < 1e-8
    assert not torch.allclose(bn.equation3(arriving, x_hat, sigma, summed=True), exact, rtol=0.1)


def test_held_statistics_leave_the_mean_of_the_gradient():
    x = torch.randn(8, 2, 3, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(bn.batch_normalize(x, hold=True).relu().sum(), x)
    assert bn.remaining_mean(gradient).min() > 0.1


def test_listing_raises_on_images_and_centres_the_wrong_dimension():
    x = torch.randn(4, 3, 5, 3) + torch.tensor([0.0, 10.0, 20.0]).view(1, 3, 1, 1)
    with pytest.raises(RuntimeError):
        bn.listing(x[..., :2])
    assert bn.listing(x).mean((0, 2, 3)).abs().max() > 1


def test_claim_finds_three_errors_and_otherwise_holds():
    settings = Settings(scale="quick", seeds=CLAIM.seeds_at("quick"))
    result = collect(CLAIM, settings, CLAIM.measure(settings), 1.0)
    judgement = judge_means(CLAIM, result)
    assert judgement.status == "holds"
    assert sum(row.verdict == "paper errs" for row in judgement.rows) == 3
    assert not [row.check.name for row in judgement.rows if row.verdict not in ("holds", "paper errs")]


def test_claim_fails_where_the_gradient_is_not_centred():
    settings = Settings(scale="quick", seeds=(0,))
    result = collect(CLAIM, settings, CLAIM.measure(settings), 1.0)
    result["values"]["mean of the gradient, batch norm"] = {"mean": 0.3, "values": [0.3]}
    assert judge_means(CLAIM, result).status == "fails"
