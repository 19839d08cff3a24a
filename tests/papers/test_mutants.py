"""For every claim before training, errors planted in the library that make it fail.

Claims that need training have made-up readings that refute them (`planted_readings`), and the mutants to be run when
they are.

`make mutants` runs the trials of all claims, and `make mutants CLAIMS="fixup/eq5 …"` those of some; both write
results/mutants.json. The slow tests run them claim by claim; the fastest are among the usual tests.
"""

import json
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch

from mutants import MUTANTS
from normfree.provenance import commit, versions
from normfree_papers.claims.claim import Claim, Scale, Settings, all_claims, get
from normfree_papers.claims.judgement import Judgement, judge
from normfree_papers.claims.reproduction import contents_of
from planted_readings import PLANTED, gpu_minutes, refuted

STORED = Path(__file__).parents[2] / "results" / "mutants.json"


@dataclass(frozen=True)
class Trial:
    """The mutants that a claim is tried with, and the smallest scale and number of seeds that decide it.

    `asides` are mutants that only a side remark of the claim notices.
    """

    mutants: str
    seeds: int = 3
    scale: Scale = "quick"
    asides: str = ""


TRIALS = {
    "fixup/sec2": Trial("relu_gain_one batch_norm_running", seeds=4),
    "fixup/thm1": Trial("biases_drawn block_bound_by_root"),
    "fixup/thm2": Trial("biases_drawn"),
    "fixup/eq5": Trial("fixup_exponent fixup_scalar_rate"),
    "fixup/eq5_options": Trial("fixup_exponent"),
    "fixup/thm3": Trial("update_squared"),
    "fixup/thm4": Trial("fixup_exponent fixup_fan_in scalar_update_root"),
    "fixup/sec4_3": Trial("zeros_left_out"),
    "wninit/thm1": Trial("k_n_other_area wn_fans_swapped"),
    "wninit/thm2": Trial("wn_no_relu_gain wn_no_division"),
    "wninit/thm3": Trial("wn_no_share"),
    "wninit/thm4": Trial("wn_share_squared"),
    "wninit/fig1": Trial("wn_no_share wn_fans_swapped", seeds=4),
    "wninit/sec3_lengths": Trial("wn_unit_lengths", seeds=4),
    "robust/table1": Trial("bottleneck_expansion no_stride", seeds=1),
    "robust/fig2": Trial("sqrt_half_left_out"),
    "robust/fig4": Trial("half_for_sqrt_half brock_fan_out", asides="proposed_fan_in"),
    "robust/fig5": Trial("sqrt_half_left_out"),
    "normdead/eq1": Trial("hessian_product"),
    "normdead/eq3": Trial("batch_norm_running batch_norm_uncentred"),
    "normdead/sec2_3": Trial("no_centring wn_no_division layer_norm_per_channel"),
    "normdead/sec2_3_moments": Trial("selu_alpha_one spectral_frobenius normprop_uncentred"),
    "normdead/sec2_3_costs": Trial("batch_norm_running"),
    "normdead/sec3_2": Trial("highway_open_shortcut"),
    "normdead/sec3_2_gradients": Trial("beta_forgotten beta_on_the_sum"),
    "normdead/sec4_1": Trial("sqrt_half_left_out hanin_constant shao_plain_shortcut"),
    "normdead/fig4": Trial("batch_norm_running"),
    "normdead/fig5": Trial("nf_no_restart"),
    "normdead/sec4_2": Trial("no_centring no_scaling shortcut_reads_raw"),
    "normdead/sec5_1": Trial("variance_gain_two"),
    "normdead/sec5_2": Trial("nf_alpha_one no_centring batch_norm_running nf_no_biases"),
}
UNNOTICED = {  # errors that no claim before training notices; the tests of methods and layers do
    "fixup_no_multipliers": "the multipliers start at 1; after training, the errors of fixup/table1 should show it",
    "nf_beta_not_squared": "the claims before training have β = 1, where β and β² are the same; after training, the "
    "accuracy of normdead/sec4_3 should show it",
    "wn_norm_detached": "the weights at the start do not depend on this gradient, and the curvature of wninit/table2 "
    "hardly; after training, the errors of wninit/table1 should show it",
}
FAST = ("fixup/thm1", "normdead/eq1", "normdead/eq3", "normdead/sec2_3")  # together a few seconds
ERRORS = {name: mutant.error for name, mutant in MUTANTS.items() if name != "nothing"}
CLAIMS = {claim.id: claim for claim in all_claims()}


def judged(claim: Claim, trial: Trial, mutant: str) -> Judgement:
    """Measure a claim with a mutant, and judge it."""
    settings = Settings(scale=trial.scale, seeds=tuple(range(trial.seeds)))
    with MUTANTS[mutant].plant():
        measurement = claim.measure(settings)
    return judge(claim, {**contents_of(measurement, settings), "scale": trial.scale})


def turned(before: Judgement, after: Judgement, *, main: bool = True) -> list[str]:
    """The main checks, or the asides, that hold before and fail after."""
    pairs = zip(before.rows, after.rows, strict=True)
    held = [(a.check, b.verdict) for a, b in pairs if a.verdict in ("holds", "paper errs")]
    return [check.name for check, verdict in held if check.main == main and verdict == "fails"]


def try_claim(claim_id: str) -> dict[str, Any]:
    """Try a claim with each of its mutants; returns its entry in results/mutants.json."""
    start, trial, claim = time.perf_counter(), TRIALS[claim_id], get(claim_id)
    before = judged(claim, trial, "nothing")
    noticed = {}
    for key, names, main in (("broken_by", trial.mutants, True), ("asides_broken_by", trial.asides, False)):
        found = {mutant: turned(before, judged(claim, trial, mutant), main=main) for mutant in names.split()}
        noticed[key] = {mutant: checks for mutant, checks in found.items() if checks}
    seconds = round(time.perf_counter() - start, 1)
    return {"scale": trial.scale, "seeds": trial.seeds, "status": before.status, "seconds": seconds, **noticed}


def untried(claim: Claim) -> dict[str, Any]:
    """The entry of a claim without a trial."""
    if claim.unbreakable:
        return {"unbreakable": claim.unbreakable}
    planted = PLANTED[claim.id]
    minutes = {mutant: gpu_minutes(claim, planted, mutant) for mutant in planted.mutants}
    entry = {"fails_with_readings": refuted(claim, planted), "gpu_minutes_of_mutants": minutes}
    return {**entry, **({"remark": planted.remark} if planted.remark else {})}


# Tests


def test_every_claim_is_tried_or_says_why_not() -> None:
    for claim in CLAIMS.values():
        reasons = (claim.id in TRIALS, bool(claim.unbreakable), claim.id in PLANTED)
        assert any(reasons), f"{claim.id}: expected mutants that break it, unbreakable=, or readings that refute it"
        assert not (claim.id in TRIALS and claim.unbreakable), claim.id
    assert set(TRIALS) <= set(CLAIMS)


@pytest.mark.parametrize("claim_id", FAST)
def test_claims_do_not_change_without_an_error(claim_id: str) -> None:
    """A second measurement is the same, also after every mutant was planted and removed."""
    before = judged(CLAIMS[claim_id], TRIALS[claim_id], "nothing")
    for mutant in MUTANTS.values():
        with mutant.plant():
            pass
    after = judged(CLAIMS[claim_id], TRIALS[claim_id], "nothing")
    assert not turned(before, after)
    assert [row.measured for row in after.rows] == [row.measured for row in before.rows]


def assert_every_mutant_is_noticed(claim_id: str, entry: dict[str, Any]) -> None:
    trial = TRIALS[claim_id]
    assert list(entry["broken_by"]) == trial.mutants.split(), f"{claim_id}: {entry['broken_by']}"
    assert list(entry["asides_broken_by"]) == trial.asides.split(), f"{claim_id}: {entry['asides_broken_by']}"


def check_trial(claim_id: str) -> None:
    assert_every_mutant_is_noticed(claim_id, try_claim(claim_id))


@pytest.mark.parametrize("claim_id", FAST)
def test_fast_claims_fail_with_a_planted_error(claim_id: str) -> None:
    check_trial(claim_id)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("claim_id", [name for name in TRIALS if name not in FAST])
def test_claims_fail_with_a_planted_error(claim_id: str) -> None:
    check_trial(claim_id)


def test_stored_trials_are_those_of_the_table() -> None:
    stored = json.loads(STORED.read_text(encoding="utf-8"))
    assert stored["mutants"] == ERRORS
    assert set(stored["claims"]) == set(CLAIMS)
    for claim_id, claim in CLAIMS.items():
        entry = stored["claims"][claim_id]
        if claim_id not in TRIALS:
            planted = None if claim.unbreakable else PLANTED[claim_id]
            assert entry.get("unbreakable", "") == claim.unbreakable
            if planted is not None:
                assert entry["fails_with_readings"] == refuted(claim, planted), f"{claim_id}: run make mutants"
                assert set(entry["gpu_minutes_of_mutants"]) == set(planted.mutants), claim_id
                assert entry.get("remark", "") == planted.remark, claim_id
            continue
        assert_every_mutant_is_noticed(claim_id, entry)
        names = {
            name for part in ("broken_by", "asides_broken_by") for checks in entry[part].values() for name in checks
        }
        assert {check.name for check in claim.checks} >= names, f"{claim_id}: run make mutants"


def test_every_mutant_is_tried() -> None:
    used = {mutant for trial in TRIALS.values() for mutant in f"{trial.mutants} {trial.asides}".split()}
    assert used.isdisjoint(UNNOTICED)
    assert used | set(UNNOTICED) == set(ERRORS)


# results/mutants.json


def write(claim_ids: list[str]) -> None:
    """Try these claims, or all, and write their entries to results/mutants.json; other entries stay."""
    untried_ids = [claim_id for claim_id in claim_ids if get(claim_id).id not in TRIALS]  # get refuses unknown ids
    if untried_ids:
        raise ValueError(f"expected claims that a planted error is tried on, got {', '.join(untried_ids)}; see TRIALS")
    chosen = {claim_id: TRIALS[claim_id] for claim_id in claim_ids or TRIALS}
    origin = {"commit": commit(), "date": datetime.now(UTC).isoformat(timespec="seconds"), "versions": versions()}
    stored = json.loads(STORED.read_text(encoding="utf-8"))["claims"] if STORED.exists() else {}
    others = {name: untried(claim) for name, claim in CLAIMS.items() if name not in TRIALS}
    with ProcessPoolExecutor(initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for claim_id, entry in zip(chosen, pool.map(try_claim, chosen), strict=True):
            print(claim_id, entry["broken_by"], entry["asides_broken_by"], f"{entry['seconds']} s", flush=True)
            stored[claim_id] = entry | origin
            claims = {name: stored.get(name, {}) if name in TRIALS else others[name] for name in CLAIMS}
            record = {"command": "make mutants", "mutants": ERRORS, "unnoticed": UNNOTICED, "claims": claims}
            STORED.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    try:
        write(sys.argv[1:])
    except ValueError as error:
        sys.exit(f"error: {error}")
