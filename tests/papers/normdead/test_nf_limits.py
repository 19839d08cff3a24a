"""The limits of NF's scaling, section 5.1 of `normdead`."""

import pytest
import torch

from made_up_runs import judge_means
from normfree_papers.claims.claim import Settings
from normfree_papers.claims.registry import get
from normfree_papers.claims.reproduction import collect
from normfree_papers.normdead import nf_limits


def judged(claim_id: str):
    claim = get(claim_id)
    settings = Settings(scale="quick", seeds=claim.seeds_at("quick"))
    state = torch.get_rng_state()
    result = collect(claim, settings, claim.measure(settings), 1.0)
    assert torch.equal(torch.get_rng_state(), state)  # dropout drew from a copy
    return claim, result, judge_means(claim, result)


def test_expected_concatenation_follows_from_its_first_steps():
    found = nf_limits.expected_concatenation()
    assert found[0] == 1
    assert found[1] == 1 / 2  # the first branch is as large as its inputs
    assert found[2] == pytest.approx((320 + 64 / 2) / 384 / 3)


def test_claim_of_section_5_1_holds_and_fails_where_nf_suits_concatenation():
    claim, result, judgement = judged("normdead/sec5_1")
    assert judgement.status == "holds"
    result["values"]["last branch variance, concatenation"] = {"mean": 1.0, "values": [1.0]}
    assert judge_means(claim, result).status == "fails"
