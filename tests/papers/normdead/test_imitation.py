"""How NF-ResNets imitate batch norm, sections 4.2 and 5.2 of `normdead`: pieces against numpy, and the verdicts."""

import math

import numpy as np
import pytest
import torch

from normfree.models import build
from normfree_papers.claims.claim import Settings, judge
from normfree_papers.claims.registry import get
from normfree_papers.claims.storage import collect
from normfree_papers.normdead import imitation, pieces


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def judged(claim_id: str):
    claim = get(claim_id)
    settings = Settings(scale="quick", seeds=(0,))
    result = collect(claim, settings, claim.measure(settings), 1.0)
    return claim, result, judge(claim, result)


def test_output_mean_is_that_of_draws():
    deviations = torch.tensor([0.5, 1.0, 2.0, 4.0] * 4, dtype=torch.float64)
    weight = imitation.centred(16, 64, 1.0, generator()).effective_weight().detach().numpy()
    x = np.maximum(0, np.random.default_rng(0).normal(size=(200_000, 16)) * deviations.numpy())
    y = x @ weight.T
    expected = math.sqrt(((y.mean(0) / y.std(0)) ** 2).mean())
    assert imitation.output_mean(deviations, generator()) == pytest.approx(expected, rel=0.02)
    assert imitation.output_mean(torch.ones(16, dtype=torch.float64), generator()) < 1e-12


def test_layer_factor_of_he_starts_with_twice_the_variance_of_relu(monkeypatch):
    monkeypatch.setattr(imitation, "_LAYERS", 1)
    found = imitation.layer_factor(lambda g: imitation.he(512, 512, 2.0, g), 0)
    assert found == pytest.approx(1 - 1 / math.pi, rel=0.05)


def test_border_mean_is_zero_inside_alone():
    border, inside = imitation.border_mean(generator())
    assert inside < 1e-12 < 0.1 < border


def test_entered_variance_is_scaled_by_alpha_and_leaves_no_hook():
    model = build("wrn-16-1", "nf:beta=1", generator=generator())
    before, after = pieces.entered_variance(model, torch.randn(4, 3, 16, 16, generator=generator()))
    alphas = [1, 2**-0.5, 3**-0.5, 2**-0.5, 3**-0.5, 2**-0.5]
    assert after == pytest.approx([v * a**2 for v, a in zip(before, alphas, strict=True)], rel=1e-4)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_share_is_one_for_a_constant_and_zero_for_a_centred_gradient():
    assert pieces.share(torch.full((4, 3), 2.0), 0) == pytest.approx(1)
    assert pieces.share(torch.tensor([[1.0, -1.0], [-1.0, 1.0]]), 0) == 0


def test_input_gradient_is_that_of_the_chain_rule():
    g = generator()
    layer = imitation.he(5, 4, 1.0, g)
    x, target = (torch.randn(3, n, generator=g, dtype=torch.float64) for n in (5, 4))
    y = (x @ layer.weight.T).detach()
    expected = ((y > 0) * (y.relu() - target)) @ layer.weight.detach()
    torch.testing.assert_close(pieces.input_gradient(layer, x, target), expected)


def test_claim_of_section_4_2_holds_but_for_outputs_of_mean_zero():
    _, _, judgement = judged("normdead/sec4_2")
    assert [row.check.name for row in judgement.rows if row.verdict != "holds"] == [
        "output mean over deviation, unequal inputs"
    ]


def test_claim_of_section_5_2_finds_two_errors_and_fails_where_alpha_does_not_divide():
    claim, result, judgement = judged("normdead/sec5_2")
    assert [row.check.name for row in judgement.rows if row.verdict != "holds"] == [
        "NF-ResNet at 3 times its input",
        "gradient's mean over inputs, centred weight norm",
    ]
    result["values"]["largest Var[αx] less 1"] = {"mean": 0.5, "values": [0.5]}
    assert judge(claim, result).status == "fails"
