"""For every claim, errors planted in the library that make it fail.

A claim on training runs is tried with small ones on a CPU (`small_runs`): its own measurement and checks, the library's
methods, and the smallest network and number of steps that decide one of its main checks. It also has made-up readings
that refute it (`planted_readings`), and the mutants to be run when its full runs are.

`make mutants` runs the trials of all claims, and `make mutants CLAIMS="fixup/eq5 …"` those of some; both write
results/mutants.json. The slow tests run them claim by claim, but of the trained claims only a few; the fastest are
among the usual tests.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

import small_runs
from mutants import MUTANTS
from normfree.data import load
from normfree.data.images.image_set import Split
from normfree.models import build
from normfree.storage.provenance import commit, versions
from normfree.train import TrainConfig
from normfree_papers.claims.claim import Claim, Scale, Settings
from normfree_papers.claims.judgement import Judgement, judge
from normfree_papers.claims.registry import all_claims, get
from normfree_papers.claims.reproduction import contents_of
from normfree_papers.claims.seed_metrics import EndedRun
from normfree_papers.wninit import curvature
from planted_readings import PLANTED, gpu_minutes, refuted
from small_runs import Changes, SmallRuns

STORED = Path(__file__).parents[2] / "results" / "mutants.json"


@dataclass(frozen=True)
class Trial:
    """The mutants that a claim is tried with, and the smallest scale and number of seeds that decide it.

    Attributes:
        mutants: The mutants, of which a main check notices each.
        asides: Mutants that only a side remark of the claim notices.
        runs: The training runs that are made, by a part of their names, and the changes to their settings.
        stand_in: The context that puts small networks or other data in place of the claim's, if `runs` cannot.
    """

    mutants: str
    seeds: int = 3
    scale: Scale = "quick"
    asides: str = ""
    runs: Changes = field(default_factory=dict)
    stand_in: Callable[[], AbstractContextManager[Any]] = nullcontext


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

# Claims on training runs. A residual MLP of 24 branches trains in a second or two, and is deep enough to die of a wrong
# scale; the embedded images replace CIFAR-10, and `validation` leaves a part of them out.
_MLP = {"model": "resmlp-24-64-2", "epochs": 1}
_SLOW_MLP = {**_MLP, "lr": 0.02, "validation": 0.5}
_IMAGES = {"data": "fashion14", "crop": 0, "flip": False, "batch_size": 32}
_SENTENCES = {"^layer norm": {"epochs": 15, "beam": 1}}
_PLAIN_MLP = {"epochs": 2, "model": "mlp-21-128"}
_ROUNDED = {**_IMAGES, "model": "resmlp-8-64-2", "epochs": 2, "lr": 0.003}


@contextmanager
def _embedded_images_in_colour() -> Iterator[None]:
    """The embedded images, three times as channels, in place of CIFAR-10."""
    grey = load("fashion14")
    images = Split(grey.train.images.expand(-1, 3, -1, -1), grey.train.labels)
    data = SimpleNamespace(mean=grey.mean * 3, std=grey.std * 3, train=images)
    with patch.object(curvature, "load", lambda *_: data):
        yield


TRIALS |= {
    "fixup/sec3": Trial("fixup_exponent_sign", runs={"^rule 2 alone, deep": {"model": "wrn-28-1", "validation": 0.5}}),
    "fixup/fig3": Trial("fixup_exponent_sign", runs={"^Fixup, 202": {"model": "wrn-28-1", "validation": 0.25}}),
    "fixup/fig4": Trial("fixup_exponent_sign", runs={"^Fixup,": {"epochs": 1, "validation": 0.25}}),
    "fixup/table1": Trial("fixup_exponent_sign", runs={"^Fixup,": _SLOW_MLP}),
    "fixup/table4": Trial("fixup_exponent_sign", runs={"^Fixup,": _SLOW_MLP}),
    "fixup/table2": Trial("fixup_exponent_sign", runs={"^ResNet-20, Fixup [+] mixup": _SLOW_MLP}),
    "fixup/table3": Trial("mask_forgotten", runs=_SENTENCES),
    "fixup/table3_multi30k": Trial("mask_forgotten", runs=_SENTENCES),
    "fixup/table3_europarl": Trial("mask_forgotten", runs=_SENTENCES),
    "wninit/sec3": Trial("wn_no_share", runs={"^proposed,": _MLP}),
    "wninit/table2": Trial("wn_no_share", stand_in=_embedded_images_in_colour),
    "wninit/fig2_left": Trial("wn_no_relu_gain", runs={"^proposed, 20": _PLAIN_MLP}),
    "wninit/fig2_right": Trial("wn_no_relu_gain", runs={"^proposed,": _PLAIN_MLP}),
    "wninit/fig3_left": Trial("wn_no_relu_gain", runs={"^proposed, 20 layers, lr 0.01": {"model": "cnn-14-32"}}),
    "wninit/fig3_right": Trial("wn_no_share", runs={"^proposed, 40": _MLP}),
    "wninit/fig4": Trial("wn_no_share", runs={"^proposed,": {**_MLP, "momentum": 0.0}}),
    "wninit/table1": Trial("wn_no_share", runs={"^ResNet-14, proposed [+] warm-up": {**_MLP, "epochs": 2}}),
    "robust/fig3": Trial("sqrt_half_left_out", runs={r"^IdShort \(proposed": {"epochs": 3, "validation": 0.25}}),
    "robust/fig6": Trial("sqrt_half_left_out", runs={r"^IdShort \(proposed": {**_MLP, "epochs": 3}}),
    "robust/fig7": Trial("sqrt_half_left_out", runs={r"^IdShort \(proposed": {"model": "resmlp-20-64-3", "epochs": 4}}),
    "normdead/sec4_3": Trial("beta_on_the_sum", runs={"^NF, seed": _MLP}),
    "normdead/sec5_2_clipping": Trial("beta_on_the_sum", runs={"^NF, clipped|^batch norm": _MLP}),
    "normdead/sec4_3_regnet": Trial("clip_inverted", runs={"": {"validation": 0.9, "batch_size": 16}}),
    "beyond/scalar_rate": Trial("fixup_exponent_sign", runs={"^rate 10/L": _SLOW_MLP}),
    "beyond/scalar_rate_law": Trial(
        "fixup_scalars_fast", 1, "full", runs={"^[0-9]+/L, ": {**_IMAGES, "model": _MLP["model"], "lr": 0.02}}
    ),
    "beyond/precision": Trial(
        "masters_not_copied",
        3,
        "full",
        runs={
            "^Fixup, 100 layers, float32": {**_ROUNDED, "precision": "float32"},
            "^Fixup, 100 layers, fast": {**_ROUNDED, "precision": "bf16"},
        },
    ),
    "beyond/isograd": Trial("sqrt_half_left_out", runs={"^isograd": {**_MLP, "epochs": 4}}),
    "beyond/equal_time": Trial("beta_on_the_sum", runs={"^tuning, NF|^NF, ": {**_MLP, "validation": 0.5}}),
    "beyond/batch_sizes": Trial("beta_on_the_sum", runs={"^tuning, NF|^NF, batch 64": {**_MLP, "validation": 0.5}}),
    "beyond/converted": Trial("beta_on_the_sum", runs={"^tuning, NF|^NF, ": {**_MLP, "validation": 0.5}}),
    "beyond/transformer_rates": Trial(
        "mask_forgotten",
        runs={"^Fixup, bounded": {"model": "transformer-1-1-32-64-4", "epochs": 40, "beam": 1}},
    ),
}
FEW = ("fixup/fig3", "fixup/table1", "wninit/sec3", "robust/fig3", "normdead/sec4_3", "beyond/equal_time")
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
DATA = TemporaryDirectory()  # of made-up sentences, by process; deleted when the first one ends


def judged(claim: Claim, trial: Trial, mutant: str) -> Judgement:
    """Measure a claim with a mutant, and judge it."""
    runs: Any = SmallRuns(trial.runs, mutant) if trial.runs else None
    settings = Settings(
        scale=trial.scale, seeds=tuple(range(trial.seeds)), data=Path(DATA.name) / str(os.getpid()), runs=runs
    )
    with trial.stand_in(), MUTANTS[mutant].plant():
        measurement = claim.measure(settings)
    return judge(claim, {**contents_of(measurement, settings), "scale": trial.scale})


def turned(before: Judgement, after: Judgement, *, main: bool = True) -> list[str]:
    """The main checks, or the asides, that hold before and fail after."""
    pairs = zip(before.rows, after.rows, strict=True)
    held = [(a.check, b.verdict) for a, b in pairs if a.verdict in ("holds", "paper errs")]
    return [check.name for check, verdict in held if check.main == main and verdict == "fails"]


def try_claim(claim_id: str) -> dict[str, Any]:
    """Try a claim with each of its mutants; returns its entry in results/mutants.json, with the seconds on the CPU."""
    start, trial, claim = time.process_time(), TRIALS[claim_id], get(claim_id)
    before = judged(claim, trial, "nothing")
    noticed = {}
    for key, names, main in (("broken_by", trial.mutants, True), ("asides_broken_by", trial.asides, False)):
        found = {mutant: turned(before, judged(claim, trial, mutant), main=main) for mutant in names.split()}
        noticed[key] = {mutant: checks for mutant, checks in found.items() if checks}
    seconds = round(time.process_time() - start, 1)
    small = {"small_runs": trial.runs} if trial.runs else {}
    return {"scale": trial.scale, "seeds": trial.seeds, "status": before.status, "seconds": seconds, **noticed, **small}


def told(claim: Claim) -> dict[str, Any]:
    """The part of a claim's entry that needs no trial: the readings with which it fails."""
    if claim.id not in PLANTED:
        return {}
    planted = PLANTED[claim.id]
    minutes = {mutant: gpu_minutes(claim, planted, mutant) for mutant in planted.mutants}
    entry = {"fails_with_readings": refuted(claim, planted), "gpu_minutes_of_mutants": minutes}
    return {**entry, **({"remark": planted.remark} if planted.remark else {})}


# Tests


def test_every_claim_is_tried() -> None:
    for claim_id in CLAIMS:
        assert claim_id in TRIALS, f"{claim_id}: expected a row in TRIALS with mutants that make it fail"
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
@pytest.mark.parametrize(
    "claim_id", [name for name in TRIALS if name not in FAST and (name in FEW or name not in PLANTED)]
)
def test_claims_fail_with_a_planted_error(claim_id: str) -> None:
    check_trial(claim_id)


def test_stored_trials_are_those_of_the_table() -> None:
    stored = json.loads(STORED.read_text(encoding="utf-8"))
    assert stored["mutants"] == ERRORS
    assert set(stored["claims"]) == set(CLAIMS)
    for claim_id, claim in CLAIMS.items():
        entry = stored["claims"][claim_id]
        planted = PLANTED.get(claim_id)
        if planted is not None:
            assert entry["fails_with_readings"] == refuted(claim, planted), f"{claim_id}: run make mutants"
            assert set(entry["gpu_minutes_of_mutants"]) == set(planted.mutants), claim_id
            assert entry.get("remark", "") == planted.remark, claim_id
        trial = TRIALS[claim_id]
        assert (entry["scale"], entry["seeds"]) == (trial.scale, trial.seeds), f"{claim_id}: run make mutants"
        assert entry.get("small_runs", {}) == trial.runs, f"{claim_id}: run make mutants"
        assert_every_mutant_is_noticed(claim_id, entry)
        names = {
            name for part in ("broken_by", "asides_broken_by") for checks in entry[part].values() for name in checks
        }
        assert {check.name for check in claim.checks} >= names, f"{claim_id}: run make mutants"


def test_every_mutant_is_tried() -> None:
    used = {mutant for trial in TRIALS.values() for mutant in f"{trial.mutants} {trial.asides}".split()}
    assert used.isdisjoint(UNNOTICED)
    assert used | set(UNNOTICED) == set(ERRORS)


def test_mutants_that_name_methods_change_only_these() -> None:
    def weights(method: str) -> torch.Tensor:
        model = build("resmlp-3-16", method, generator=torch.Generator().manual_seed(0))
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    for mutant in (mutant for mutant in MUTANTS.values() if mutant.methods):
        others = ("he_in", "wn", "nf", "batchnorm", "idshort")
        before = {method: weights(method) for method in ("fixup", *others)}
        with mutant.plant():
            assert mutant.changes("fixup:bias=false")
            assert not torch.equal(weights("fixup"), before["fixup"]), mutant.error
            for method in others:
                assert not mutant.changes(method)
                assert torch.equal(weights(method), before[method]), mutant.error


def test_small_runs_train_what_matches_once_per_error(monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[TrainConfig] = []
    monkeypatch.setattr(small_runs, "train", lambda config: trained.append(config) or EndedRun({}, ()))
    monkeypatch.setattr(SmallRuns, "_trained", {})
    wanted = {name: TrainConfig(method=name.split()[0]) for name in ("fixup one", "fixup two", "he_in one", "he_in")}
    for error in ("nothing", "fixup_exponent_sign"):
        runs = SmallRuns({"^fixup": {"epochs": 1}, "one": {"epochs": 2}}, error)
        found = runs(wanted)
        assert list(runs.missing) == [name for name, run in found.items() if run is None] == ["he_in"]
    # "fixup one" and "fixup two" are the same run, and the error does not change He's weights.
    assert [(config.method, config.epochs) for config in trained] == [("fixup", 1), ("he_in", 2), ("fixup", 1)]


# results/mutants.json


def write(claim_ids: list[str]) -> None:
    """Try these claims, or all, and write their entries to results/mutants.json; other entries stay."""
    untried_ids = [claim_id for claim_id in claim_ids if get(claim_id).id not in TRIALS]  # get refuses unknown ids
    if untried_ids:
        raise ValueError(f"expected claims that a planted error is tried on, got {', '.join(untried_ids)}; see TRIALS")
    chosen = {claim_id: TRIALS[claim_id] for claim_id in claim_ids or TRIALS}
    origin = {"commit": commit(), "date": datetime.now(UTC).isoformat(timespec="seconds"), "versions": versions()}
    stored = json.loads(STORED.read_text(encoding="utf-8"))["claims"] if STORED.exists() else {}
    without_trials = {name: told(claim) for name, claim in CLAIMS.items()}
    with ProcessPoolExecutor(initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for claim_id, entry in zip(chosen, pool.map(try_claim, chosen), strict=True):
            print(claim_id, entry["broken_by"], entry["asides_broken_by"], f"{entry['seconds']} s", flush=True)
            stored[claim_id] = entry | origin
            claims = {name: (stored.get(name, {}) if name in TRIALS else {}) | without_trials[name] for name in CLAIMS}
            record = {"command": "make mutants", "mutants": ERRORS, "unnoticed": UNNOTICED, "claims": claims}
            STORED.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    try:
        write(sys.argv[1:])
    except ValueError as error:
        sys.exit(f"error: {error}")
