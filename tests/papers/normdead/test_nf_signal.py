"""How NF-ResNets imitate batch norm, section 4.2 of `normdead`: functions against numpy, and the verdict."""

import math

import numpy as np
import pytest
import torch

from made_up_runs import judge_means
from normfree_papers.claims.claim import Settings
from normfree_papers.claims.registry import get
from normfree_papers.claims.reproduction import collect
from normfree_papers.normdead import float64_draws, nf_signal


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def judged(claim_id: str):
    claim = get(claim_id)
    settings = Settings(scale="quick", seeds=claim.seeds_at("quick"))
    result = collect(claim, settings, claim.measure(settings), 1.0)
    return claim, result, judge_means(claim, result)


def test_output_mean_is_that_of_draws():
    deviations = torch.tensor([0.5, 1.0, 2.0, 4.0] * 4, dtype=torch.float64)
    weight = nf_signal.centred(16, 64, 1.0, generator()).effective_weight().detach().numpy()
    x = np.maximum(0, np.random.default_rng(0).normal(size=(200_000, 16)) * deviations.numpy())
    y = x @ weight.T
    expected = math.sqrt(((y.mean(0) / y.std(0)) ** 2).mean())
    assert nf_signal.output_mean(deviations, generator()) == pytest.approx(expected, rel=0.02)
    assert nf_signal.output_mean(torch.ones(16, dtype=torch.float64), generator()) < 1e-12


def test_layer_factor_of_he_starts_with_twice_the_variance_of_relu(monkeypatch):
    monkeypatch.setattr(nf_signal, "_LAYERS", 1)
    found = nf_signal.layer_factor(lambda g: float64_draws.he(512, 512, 2.0, g), 0)
    assert found == pytest.approx(1 - 1 / math.pi, rel=0.05)


def test_border_mean_is_zero_inside_alone():
    border, inside = nf_signal.border_mean(generator())
    assert inside < 1e-12 < 0.1 < border


def test_claim_of_section_4_2_holds_but_for_outputs_of_mean_zero():
    _, _, judgement = judged("normdead/sec4_2")
    assert [row.check.name for row in judgement.rows if row.verdict != "holds"] == [
        "output mean over deviation, unequal inputs"
    ]
