"""What stands for each part of batch norm, section 5.2 of `normdead`: functions by hand, and the verdict."""

import pytest
import torch

from made_up_runs import judge_means
from normfree.models import build
from normfree_papers.claims.claim import Settings
from normfree_papers.claims.registry import get
from normfree_papers.claims.reproduction import collect
from normfree_papers.normdead import batchnorm_parts


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def judged(claim_id: str):
    claim = get(claim_id)
    settings = Settings(scale="quick", seeds=claim.seeds_at("quick"))
    result = collect(claim, settings, claim.measure(settings), 1.0)
    return claim, result, judge_means(claim, result)


def test_entered_variance_is_scaled_by_alpha_and_leaves_no_hook():
    model = build("wrn-16-1", "nf:beta=1", generator=generator())
    before, after = batchnorm_parts.entered_variance(model, torch.randn(4, 3, 16, 16, generator=generator()))
    alphas = [1, 2**-0.5, 3**-0.5, 2**-0.5, 3**-0.5, 2**-0.5]
    assert after == pytest.approx([v * a**2 for v, a in zip(before, alphas, strict=True)], rel=1e-4)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_shifted_branches_change_nf_and_not_batch_norm():
    assert batchnorm_parts.shifted_branches("nf:beta=1", 0) > 0.1
    assert batchnorm_parts.shifted_branches("batchnorm", 0) < 1e-12


def test_claim_of_section_5_2_finds_two_errors_and_fails_where_alpha_does_not_divide():
    claim, result, judgement = judged("normdead/sec5_2")
    assert [row.check.name for row in judgement.rows if row.verdict == "paper errs"] == [
        "NF-ResNet at 3 times its input",
        "gradient's mean over inputs, centred weight norm",
    ]
    result["values"]["largest Var[αx] less 1"] = {"mean": 0.5, "values": [0.5]}
    assert judge_means(claim, result).status == "fails"
