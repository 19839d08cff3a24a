"""The scaling rules of `normdead`: formulas written out again, tolerances, and the claim's verdict."""

import math

import pytest
import torch
from torch import nn

import depth_rules
from made_up_runs import judge_means
from normfree.models import build
from normfree_papers.claims.claim import Settings
from normfree_papers.claims.registry import get
from normfree_papers.claims.reproduction import collect
from normfree_papers.normdead import scaling_rules

CLAIM = get("normdead/sec4_1")
THEORY = {
    "plain sum": depth_rules.plain_rule,
    "√½": depth_rules.sqrt_half_rule,
    "β = 0.3": depth_rules.small_branch_rule(0.3),
    "β = 0.9^l": depth_rules.hanin_rule(0.9),
    "weight norm": depth_rules.weightnorm_rule,
    "Shao": depth_rules.shao_rule,
    "SkipInit": depth_rules.skipinit_rule,
}


@pytest.mark.parametrize("name", THEORY)
def test_growth_agrees_with_the_theory_room(name):
    assert scaling_rules.RULES[name].growth(7) == pytest.approx(depth_rules.variance_by_depth(THEORY[name], 7).tolist())


@pytest.mark.parametrize("name", scaling_rules.RULES)
def test_error_falls_with_width_and_seeds_and_is_zero_without_branches(name):
    rule = scaling_rules.RULES[name]
    error = rule.error(16, 256, 10)
    assert rule.error(16, 1024, 10) == pytest.approx(error / 2)
    assert rule.error(16, 256, 40) == pytest.approx(error / 2)
    assert (error == 0) == (name in ("SkipInit", "Fixup"))


def test_output_weights_of_shao_are_equal():
    factors = [scaling_rules.RULES["Shao"].factors(l, 9) for l in range(1, 10)]
    assert scaling_rules.output_weights(factors) == pytest.approx([1 / math.sqrt(18)] * 9)


def test_stream_takes_moments_before_and_after_every_block():
    model = build("resmlp-3-32", "skipinit", size=1, in_channels=32, generator=torch.Generator().manual_seed(0))
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(1))
    mean, square, share = scaling_rules.stream(model, x)
    first = model.stem(x).detach()
    assert mean == pytest.approx([float(first.mean())] * 4)
    assert square == pytest.approx([float(first.square().mean())] * 4)
    assert share[0] == pytest.approx(float(first.mean(0).square().mean() / first.square().mean()))


def test_one_block_of_shao_is_that_of_sqrt_half_for_relu_only():
    assert scaling_rules.one_block(3) < 1e-6
    assert scaling_rules.one_block(3, nn.Tanh()) > 0.01


def test_scalars_are_read_from_the_blocks():
    model = build("resmlp-2-8", "shao", size=1, in_channels=8)
    found = [number for pair in scaling_rules.scalars(model, ("a", "beta")) for number in pair]
    exact = [number for l in (1, 2) for number in (math.sqrt(1 - 1 / (l + 2)), math.sqrt(1 / (l + 2)))]
    assert found == pytest.approx(exact)


@pytest.mark.slow
def test_claim_holds_but_for_arpits_scale_and_fails_where_a_rule_explodes():
    settings = Settings(scale="quick", seeds=CLAIM.seeds_at("quick"))
    result = collect(CLAIM, settings, CLAIM.measure(settings), 1.0)
    rows = judge_means(CLAIM, result).rows
    assert [row.check.name for row in rows if row.verdict != "holds"] == [
        "branch over shortcut mean square times L, weight norm"
    ]
    result["values"]["mean square over 1, Shao"] = {"mean": 2.0, "values": [2.0]}
    assert judge_means(CLAIM, result).status == "fails"
