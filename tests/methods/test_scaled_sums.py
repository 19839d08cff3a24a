"""Scaled sums: the second moment of random residual networks against the recursions of `normfree.theory`."""

import math
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import torch

import depth_rules
from normfree.methods import initialize_
from normfree.models import build
from normfree.nn.scalars import ScalarMultiplier
from oracles import block_signals

Rule = Callable[[int, int], tuple[float, float, float]]
FORMS = ["pre", "linear"]
SEEDS = 20
WIDTH = 256
DEPTH = 30
RULES: dict[str, tuple[Rule, int]] = {  # the rule that each method should follow, and a number of branches
    "he_in": (depth_rules.plain_rule, 8),
    "sqrt_half": (
        depth_rules.sqrt_half_rule,
        8,
    ),  # no deeper, because its branches stay strong and so do its fluctuations
    "small_branch": (depth_rules.small_branch_rule(0.2), DEPTH),
    "small_branch:beta=0.3": (depth_rules.small_branch_rule(0.3), 10),
    "hanin": (depth_rules.hanin_rule(0.9), DEPTH),
    "hanin:r=0.5": (depth_rules.hanin_rule(0.5), 10),
    "shao": (depth_rules.shao_rule, DEPTH),
}


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@cache
def second_moments(method: str, L: int, form: str) -> np.ndarray:
    """Second moment after every branch relative to the input of the first, of shape (seeds, L + 1)."""
    name = f"resmlp-{L}-{WIDTH}"
    model = build(name, method, form=form, size=1, in_channels=WIDTH, generator=seeded(0))
    plan, seen = model.plan, []
    for seed in range(SEEDS):
        g = seeded(seed)
        initialize_(model, method, plan, generator=g)
        blocks = block_signals(model, torch.randn(32, WIDTH, generator=g), backward=False)
        seen.append([1.0, *(s.second / blocks[0].before for s in blocks)])
    return np.array(seen)


def follows(samples: np.ndarray, expected: np.ndarray) -> bool:
    """At every depth the mean over seeds lies within 4.5 of its standard errors of what is expected."""
    error = samples.std(axis=0, ddof=1) / math.sqrt(len(samples))
    assert np.all(error[1:] < 0.1 * samples.mean(axis=0)[1:]), "too few seeds to tell"
    return bool(np.all(np.abs(samples.mean(axis=0) - expected)[1:] < 4.5 * error[1:]))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("method", RULES)
def test_second_moment_follows_the_recursion_of_its_method(method, form):
    rule, L = RULES[method]
    samples = second_moments(method, L, form)
    assert follows(samples, depth_rules.variance_by_depth(rule, L))
    others = [
        other
        for other in (depth_rules.plain_rule, depth_rules.sqrt_half_rule)
        if other is not rule and method != "shao"
    ]
    for other in others:  # the control
        assert not follows(samples, depth_rules.variance_by_depth(other, L))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("method", ["shao", "sqrt_half"])
def test_halved_and_weighted_sums_keep_the_second_moment(method, form):
    _, L = RULES[method]
    assert np.abs(second_moments(method, L, form).mean(axis=0) - 1).max() < 0.2
    assert second_moments("small_branch", DEPTH, form).mean(axis=0)[L] > 1.25  # the control: 1.04 to the 8th is 1.37


@pytest.mark.parametrize("form", FORMS)
def test_hanin_stays_below_its_bound_and_is_not_preserved(form):
    means = second_moments("hanin", DEPTH, form).mean(axis=0)
    assert means.max() < depth_rules.hanin_bound(0.9)
    assert means[-1] > 5
    assert means[-1] / means[20] < 1.1  # it has converged
    doubled = second_moments("he_in", 8, form).mean(axis=0)
    assert doubled[-1] > depth_rules.hanin_bound(0.9)  # the control: eight plain sums pass the bound


@pytest.mark.parametrize("form", FORMS)
def test_small_branch_without_normalization_grows_exponentially(form):
    means = second_moments("small_branch", DEPTH, form).mean(axis=0)
    for l in (10, 20):  # every ten branches multiply by the same number
        assert means[l + 10] / means[l] == pytest.approx(1.04**10, rel=0.1)
    fading = second_moments("hanin", DEPTH, form).mean(axis=0)
    assert fading[30] / fading[20] < 0.9 * 1.04**10  # the control


@pytest.mark.parametrize("form", FORMS)
def test_plain_sums_double_the_second_moment_a_block(form):
    means = second_moments("he_in", 8, form).mean(axis=0)
    assert (means[-1] / means[0]) ** (1 / 8) == pytest.approx(2.0, rel=0.05)


@pytest.mark.parametrize("method", ["skipinit", "rezero"])
@pytest.mark.parametrize("name", ["resnet14", "preact_resnet18", "wrn-16-1"])
def test_networks_with_a_zero_multiplier_start_as_their_shortcuts(name, method):
    model = build(name, method, generator=seeded(0))
    seen = []
    for branch in model.plan.branches:
        block = model.get_submodule(branch.name)
        assert isinstance(block.beta, ScalarMultiplier)
        assert block.beta.learnable
        assert block.beta.value.item() == 0.0
        assert all(model.get_submodule(layer.name).weight.all() for layer in branch.layers)
        if not branch.position.transition:
            block.register_forward_hook(lambda _m, args, out: seen.append(torch.equal(args[0], out)))
    with torch.no_grad():
        model(torch.randn(2, 3, 16, 16, generator=seeded(1)))
    assert seen
    assert all(seen)


def test_sqrt_half_does_not_start_as_its_shortcuts():
    block = build("resnet14", "sqrt_half", generator=seeded(0)).body[0][1]
    x = torch.rand(2, 16, 8, 8, generator=seeded(1))
    assert not torch.allclose(block(x), x)  # the control of the test above


def test_skipinit_draws_he_and_rezero_the_default():
    for method, expected in {"skipinit": 2 / 256, "rezero": 1 / (3 * 256)}.items():
        model = build("resmlp-3-256", method, form="pre", generator=seeded(0))
        for branch in model.plan.branches:
            for layer in branch.layers:
                # 5 standard errors of the variance of 65,536 normal draws
                variance = model.get_submodule(layer.name).weight.var().item()
                assert variance == pytest.approx(expected, rel=5 * math.sqrt(2 / 65536))
