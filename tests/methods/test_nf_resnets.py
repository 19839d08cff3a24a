"""Normalizer-free networks: the measured variance is the expected one; under batch norm it grows linearly."""

import math
from dataclasses import replace
from functools import cache
from itertools import chain

import numpy as np
import pytest
import torch

import depth_rules
from normfree import theory
from normfree.methods import get
from normfree.models import build
from oracles import BlockSignal, block_signals, slope

BETAS = [0.2, 1.0]
STAGES = (3, 4, 6, 3)
GAMMA = 1.7128585504496627


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@cache
def measured(method: str, padding_mode: str, seed: int, name: str) -> tuple[BlockSignal, ...]:
    g = seeded(seed)
    record = replace(get("batchnorm"), shortcut_reads="raw") if method == "batchnorm, raw" else method
    model = build(name, record, generator=g, padding_mode=padding_mode)
    return tuple(block_signals(model, torch.randn(8, 3, 32, 32, generator=g), backward=False))


def signals(
    method: str, padding_mode: str = "zeros", seed: int = 0, name: str = "preact_resnet50"
) -> tuple[BlockSignal, ...]:
    """Signals of a network on N(0, 1) images of 32×32, measured once for all tests."""
    return measured(method, padding_mode, seed, name)


def misses(method: str, beta: float, padding_mode: str = "zeros", seed: int = 0) -> np.ndarray:
    """Relative distance of every block's variance from its expectation."""
    expected = list(chain(*theory.nf_output_variance(STAGES, beta)))
    return np.abs([s.variance / v - 1 for s, v in zip(signals(method, padding_mode, seed), expected, strict=True)])


def stage_variances(blocks: tuple[BlockSignal, ...]) -> list[list[float]]:
    return [[s.variance for s in blocks if s.stage == stage] for stage in sorted({s.stage for s in blocks})]


# The expected variance


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("beta", BETAS)
def test_nf_variance_is_the_expected_one_at_every_block(beta, seed):
    assert misses(f"nf:beta={beta}", beta, padding_mode="circular", seed=seed).max() < 0.1


@pytest.mark.parametrize(("beta", "low", "high"), [(0.2, 0.15, 0.23), (1.0, 0.28, 0.37)])
def test_nf_variance_falls_short_with_zero_padding(beta, low, high):
    # The control: borders see fewer inputs than the fan-in counts, most of all at 4×4.
    assert low < misses(f"nf:beta={beta}", beta).max() < high


@pytest.mark.parametrize("beta", BETAS)
def test_nf_variance_restarts_at_every_transition(beta):
    stages = stage_variances(signals(f"nf:beta={beta}", padding_mode="circular"))
    assert [len(stage) for stage in stages] == list(STAGES)
    for before, stage in zip([[], *stages], stages, strict=False):
        assert stage[0] == pytest.approx(1 + beta**2, rel=0.1)
        assert sorted(stage) == stage
        assert not before or stage[0] < before[-1]


@pytest.mark.parametrize("beta", BETAS)
def test_nf_branches_end_with_unit_variance_times_beta_squared(beta):
    for s in signals(f"nf:beta={beta}", padding_mode="circular"):
        assert s.end_variance == pytest.approx(beta**2, rel=0.1)


def test_nf_means_stay_small_where_plain_weights_let_them_drift():
    standardized, plain = (signals(f"{name}:beta=1", padding_mode="circular") for name in ("nf", "nf_he"))
    assert max(s.squared_mean / s.variance for s in standardized) < 0.1
    assert max(s.squared_mean / s.variance for s in plain) > 0.3
    assert misses("nf_he:beta=1", 1.0, padding_mode="circular").max() > 0.1


# Scalars and weights


@pytest.mark.parametrize("beta", BETAS)
def test_nf_scalars_are_those_of_the_recursion(beta):
    model = build("preact_resnet50", f"nf:beta={beta}", generator=seeded(0))
    for branch, variance in zip(
        model.plan.branches, chain(*depth_rules.nf_expected_variance(STAGES, beta)), strict=True
    ):
        block = model.get_submodule(branch.name)
        # A scalar that would be 1 is left out.
        alpha, scale = (getattr(part, "value", torch.tensor(1.0)).item() for part in (block.alpha, block.beta))
        assert alpha == pytest.approx(variance**-0.5, rel=1e-6)
        assert scale == pytest.approx(beta, rel=1e-6)


def test_nf_gains_and_rows_follow_the_formula():
    assert math.sqrt(2 / (1 - 1 / math.pi)) == pytest.approx(GAMMA)
    model = build("preact_resnet50", "nf", generator=seeded(0))
    for layer in model.plan.hidden():
        module = model.get_submodule(layer.name)
        gamma = 1.0 if layer.name == "stem.conv" else GAMMA
        torch.testing.assert_close(module.gain, torch.full_like(module.gain, gamma))
        rows = module.effective_weight().detach().double().flatten(1)
        assert rows.mean(1).abs().max() < 1e-6
        expected = torch.full((len(rows),), gamma**2 / rows.shape[1], dtype=torch.float64)
        torch.testing.assert_close(rows.var(1, unbiased=False), expected, rtol=1e-4, atol=0)


# Batch norm


@pytest.mark.parametrize("name", ["preact_resnet50", "preact_resnet101"])
def test_batchnorm_variance_grows_by_one_less_one_over_pi_a_block(name):
    for stage in stage_variances(signals("batchnorm", name=name)):
        rate, fit = slope(range(len(stage)), stage)
        assert rate == pytest.approx(0.68, abs=0.03)
        assert fit > 0.99
        assert stage[0] == pytest.approx(2 * (1 - 1 / math.pi), rel=0.05)  # it restarts at 1.36


def test_batchnorm_variance_never_restarts_with_raw_transitions():
    raw = stage_variances(signals("batchnorm, raw"))
    assert raw[1][0] > raw[0][-1] > 2
    assert raw[2][0] > raw[1][-1]


def test_variance_without_normalization_does_not_grow_linearly():
    assert slope(range(6), stage_variances(signals("he_in"))[2])[1] < 0.95
