"""Claims that need training hold with made-up runs at the paper's figures, and fail with those that refute them."""

import pytest

from mutants import MUTANTS
from normfree_papers.claims.judgement import checks_at, judge
from normfree_papers.claims.registry import all_claims
from normfree_papers.claims.reproduction import summarize
from planted_readings import PLANTED, changed_runs, main_checks, outside, refuted, result_of

CLAIMS = {claim.id: claim for claim in all_claims() if claim.cost.device == "gpu"}
NEVER_FAIL = {("beyond/scalar_rate", "trains, rate 0.1")}  # ten yes or no outcomes: see its remark


def test_every_claim_on_a_gpu_has_planted_readings() -> None:
    assert set(PLANTED) == set(CLAIMS)


@pytest.mark.parametrize("claim_id", PLANTED)
def test_claim_holds_with_the_readings_of_the_paper(claim_id: str) -> None:
    claim, planted = CLAIMS[claim_id], PLANTED[claim_id]
    judgement = judge(claim, result_of(claim, planted, planted.holds))
    measurable = [check.name for check in checks_at(claim, planted.scale) if check.main]
    assert main_checks(judgement, "holds") == measurable
    unmeasured = [check for check in claim.checks if check.main and check.lacks]
    assert judgement.status == ("undecided" if unmeasured else "holds")


@pytest.mark.parametrize("claim_id", PLANTED)
def test_claim_fails_with_readings_that_refute_it(claim_id: str) -> None:
    assert all(refuted(CLAIMS[claim_id], PLANTED[claim_id]).values()), refuted(CLAIMS[claim_id], PLANTED[claim_id])


@pytest.mark.parametrize("claim_id", PLANTED)
def test_every_main_check_alone_makes_the_claim_fail(claim_id: str) -> None:
    claim, planted = CLAIMS[claim_id], PLANTED[claim_id]
    result = result_of(claim, planted, planted.holds)
    for check in checks_at(claim, planted.scale):
        if check.main:
            count = len(result["values"][check.name]["values"])
            number = 0.0 if check.binary else outside(check)
            judgement = judge(
                claim, {**result, "values": {**result["values"], check.name: summarize([number] * count)}}
            )
            failed = main_checks(judgement, "fails")
            assert failed == ([] if (claim_id, check.name) in NEVER_FAIL else [check.name])


@pytest.mark.parametrize("claim_id", [claim_id for claim_id, planted in PLANTED.items() if planted.mutants])
def test_mutants_to_be_run_change_runs_of_the_claim(claim_id: str) -> None:
    for mutant in PLANTED[claim_id].mutants:
        assert mutant in MUTANTS
        assert PLANTED[claim_id].values or changed_runs(CLAIMS[claim_id], PLANTED[claim_id], mutant), mutant
