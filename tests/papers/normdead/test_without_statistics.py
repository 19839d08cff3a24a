"""Normalizing without statistics, section 2.3 of `normdead`."""

import math

import pytest
import torch

from made_up_runs import judge_means
from normfree_papers.claims.claim import Settings
from normfree_papers.claims.registry import get
from normfree_papers.claims.reproduction import collect
from normfree_papers.normdead import without_statistics


def judged(claim_id: str):
    claim = get(claim_id)
    settings = Settings(scale="quick", seeds=claim.seeds_at("quick"))
    state = torch.get_rng_state()
    result = collect(claim, settings, claim.measure(settings), 1.0)
    assert torch.equal(torch.get_rng_state(), state)  # dropout drew from a copy
    return claim, result, judge_means(claim, result)


def test_power_estimates_rise_to_the_largest_singular_value():
    found = without_statistics.power_estimates(4)
    assert found == sorted(found)
    assert found[-1] == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("start", [0.1, 4.0])
def test_fixed_point_is_one_and_attracts(start):
    steps = [abs(without_statistics.fixed_point(start, layers) - 1) for layers in (1, 5, 20, 100)]
    assert steps == sorted(steps, reverse=True)
    assert steps[-1] < 1e-9


def test_layer_moments_start_with_the_inputs():
    mean, variance = without_statistics.layer_moments("selu", (1.0, 4.0), 0)
    assert len(mean) == len(variance) == without_statistics._DEPTH + 1
    assert mean[0] == pytest.approx(1.0, abs=4 * 2 / math.sqrt(256 * 512))
    assert variance[0] == pytest.approx(4.0, rel=0.02)


@pytest.mark.slow
def test_claim_of_section_2_3_on_moments_holds():
    assert judged("normdead/sec2_3_moments")[2].status == "holds"
