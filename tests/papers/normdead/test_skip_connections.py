"""Skip connections of `normdead`: closed forms against Monte Carlo in numpy, and the claims' verdicts."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from made_up_runs import judge_means
from normfree_papers.claims.claim import Settings
from normfree_papers.claims.registry import get
from normfree_papers.claims.reproduction import collect
from normfree_papers.normdead import skip_connections

KINDS = get("normdead/sec3_2")
GRADIENTS = get("normdead/sec3_2_gradients")


def one_block(kind: str, seed: int = 0, width: int = 400, rows: int = 20_000) -> tuple[float, float]:
    """Mean and mean square of `rows` outputs of one block by plain numpy, for ReLU of N(0, 2) inputs."""
    g = np.random.default_rng(seed)
    x = np.maximum(0, math.sqrt(2) * g.normal(size=width))
    x *= math.sqrt(width) / np.linalg.norm(x)
    f = np.maximum(0, g.normal(size=rows) * math.sqrt(2))  # rows of W times x, which has mean square 1
    own = np.maximum(0, math.sqrt(2) * g.normal(size=rows))
    if kind == "sum":
        y = own + f
    else:
        gate = 1 / (1 + np.exp(1 - g.normal(size=rows)))
        y = gate * f + (1 - gate) * own
    return y.mean(), (y**2).mean()


@pytest.mark.parametrize("kind", ["sum", "gate"])
def test_expected_moments_of_a_block_are_those_of_independent_draws(kind):
    m, q = skip_connections.expected(kind, math.sqrt(1 / math.pi), 1.0)
    mean, square = one_block(kind)
    assert m[1] == pytest.approx(mean, rel=0.04)  # 20,000 draws of deviation about 1: five standard errors
    assert q[1] == pytest.approx(square, rel=0.08)


def test_expected_moments_of_a_concatenation_stay():
    m, q = skip_connections.expected("concatenation", 0.3, 2.0)
    assert set(m) == {0.3}
    assert set(q) == {2.0}


def test_gradient_correlation_at_its_ends():
    assert skip_connections.gradient_correlation(0.0, 1.0) == pytest.approx(1)
    assert skip_connections.gradient_correlation(0.7, 0.0) == pytest.approx(1)
    assert skip_connections.gradient_correlation(0.7, None, depth=1) == pytest.approx(1 - 0.7 / math.pi)
    falling = [skip_connections.gradient_correlation(0.3, beta) for beta in (0.1, 0.3, 1.0, None)]
    assert falling == sorted(falling, reverse=True)


def test_measured_correlation_of_a_linear_network_is_one():
    linear = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)).double()
    assert skip_connections.measured_correlation(linear, 16, 0) == pytest.approx([1.0] * len(skip_connections._ANGLES))


def test_measured_correlation_of_wide_layers_is_the_closed_form():
    g = torch.Generator().manual_seed(0)
    layers = [nn.Linear(1024, 1024, bias=False).double() for _ in range(2)]
    for layer in layers:
        nn.init.normal_(layer.weight, std=math.sqrt(2 / 1024), generator=g)
    net = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU())
    exact = [skip_connections.gradient_correlation(angle, None, depth=2) for angle in skip_connections._ANGLES]
    assert skip_connections.measured_correlation(net, 1024, 0) == pytest.approx(exact, abs=0.03)


def result(claim):
    settings = Settings(scale="quick", seeds=claim.seeds_at("quick"))
    return collect(claim, settings, claim.measure(settings), 1.0)


def test_claim_on_kinds_holds_but_for_the_sentence_on_variance_and_fails_without_drift():
    found = result(KINDS)
    rows = judge_means(KINDS, found).rows
    assert [row.check.name for row in rows if row.verdict != "holds"] == ["variance of x - ReLU(x)"]
    found["values"]["growth of the mean, sum"] = {"mean": 1.0, "values": [1.0]}
    assert judge_means(KINDS, found).status == "fails"


@pytest.mark.slow
def test_claim_on_gradients_holds():
    assert judge_means(GRADIENTS, result(GRADIENTS)).status == "holds"
