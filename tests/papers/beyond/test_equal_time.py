"""Fixup and NF beside batch norm: trials, equal time, batch sizes, and verdicts from made-up runs."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from made_up_runs import checks_that, measure
from normfree_papers.beyond.equal_time import (
    ARMS,
    BATCHES,
    EPOCHS,
    RATES,
    REGULARIZED,
    TUNING_SEED,
    affordable_epochs,
    batch_config,
    time_panel,
    trial_config,
)
from normfree_papers.claims.registry import get
from normfree_papers.claims.run_training import gpu_seconds
from normfree_papers.claims.seed_metrics import EndedRun, Runs

TIME, SIZES = get("beyond/equal_time"), get("beyond/batch_sizes")
SEEDS = (0, 1, 2, 3, 4)
SET_UP = 20.0


def run(accuracy, *, held_out=0.5, per_epoch=1.0, epochs=2):
    """A run that ended, or diverged if it has no accuracy; its set-up took 20 seconds."""
    if accuracy is None:
        return EndedRun({"status": "diverged", "test": None, "steps": 7, "seconds": 9.0, "setup_seconds": SET_UP}, ())
    each = range(1, epochs + 1)
    metrics = [
        {"epoch": e, "train_accuracy": 0.5, "validation_accuracy": accuracy, "seconds": SET_UP + per_epoch * e}
        for e in each
    ]
    result = {"status": "finished", "test": {"accuracy": accuracy}, "validation": {"accuracy": held_out}, "steps": 1}
    return EndedRun({**result, "seconds": SET_UP + per_epoch * epochs + 1, "setup_seconds": SET_UP}, metrics)


def made(gain, late=0.6):
    """Without norms an epoch takes a fifth of the time, or `late` in a long run, which has `gain` more accuracy."""

    def make(_, config):
        long = config.epochs > 100
        per_epoch = 3.0 if config.method == "batchnorm" else late if long else 0.6
        return run(0.9 + gain * long, per_epoch=per_epoch, epochs=config.epochs)

    return make


good = made(0.02)


def test_every_arm_gets_the_same_trials_with_a_seed_of_their_own():
    asked = measure(TIME, good, seeds=SEEDS)[2].asked
    trials = {name: config for name, config in asked.items() if name.startswith("tuning")}
    assert {config.seed for config in trials.values()} == {TUNING_SEED}
    assert TUNING_SEED not in {config.seed for name, config in asked.items() if name not in trials}
    assert len(trials) == 3 * len(RATES) * len(REGULARIZED) == 36
    same = {"method": "fixup", "clip": "none"}
    arms = [
        {c.with_changes(**same).fingerprint() for c in trials.values() if c.method == arm["method"]}
        for arm in ARMS.values()
    ]
    assert arms[0] == arms[1] == arms[2]
    assert len(arms[0]) == 12
    assert {c.clip for c in trials.values() if c.method == "nf"} == {"agc"}
    assert {c.clip for c in trials.values() if c.method != "nf"} == {"none"}


def test_runs_and_cost_of_equal_time():
    asked = measure(TIME, good, seeds=SEEDS)[2].asked
    even = {name: c for name, c in asked.items() if c.epochs == EPOCHS}
    timed = {name: c for name, c in asked.items() if name not in even}
    assert (len(even), len(timed)) == (36 + 3 * 5, 2 * 5)
    assert {c.epochs for c in timed.values()} == {5 * EPOCHS}
    assert {c.validation for c in asked.values()} == {0.1}
    normed = trial_config("batch norm", 0.1, "decay 1e-4", quick=False)
    training = gpu_seconds(normed) - gpu_seconds(normed.with_changes(epochs=0))
    planned = sum(map(gpu_seconds, even.values())) + sum(training + 20 for _ in timed)
    assert TIME.cost.full_seconds == pytest.approx(planned, rel=0.02)


def test_best_trial_on_held_out_images_is_trained():
    def make(name, config):
        best = (config.lr, config.cutout) == (0.3, 8)
        return replace(run(0.8 if best else 0.9, held_out=0.7 if best else 0.5, epochs=config.epochs))

    measurement, _, runs = measure(TIME, make, seeds=SEEDS)
    assert measurement.values["test accuracy, NF, equal epochs"] == pytest.approx([80.0] * 5)
    final = {(c.lr, c.cutout) for c in runs.asked.values() if c.seed != TUNING_SEED}
    assert final == {(0.3, 8)}
    assert sum("an edge of the grid" in note for note in measurement.notes) == 3
    assert len(measurement.tables[0].rows) == 12


def test_arm_without_all_trials_has_no_final_run():
    def make(name, config):
        return None if name == f"tuning, NF, rate 0.1, decay 1e-4, seed {TUNING_SEED}" else good(name, config)

    measurement, judgement, runs = measure(TIME, make, seeds=SEEDS)
    assert not any(name.startswith("NF, ") for name in runs.asked)
    assert "test accuracy, NF, equal epochs" not in measurement.values
    assert "Fixup - batch norm, equal time" in checks_that(judgement, "holds")


@pytest.mark.parametrize("lost", ["Fixup, equal epochs, seed 3", "batch norm, equal epochs, seed 1"])
def test_equal_time_waits_for_all_seeds_of_both(lost):
    _, judgement, runs = measure(TIME, lambda name, c: None if name == lost else good(name, c), seeds=SEEDS)
    assert not any(name.startswith("Fixup, equal time") for name in runs.asked)
    assert "Fixup - batch norm, equal epochs" in checks_that(judgement, "holds")


@pytest.mark.parametrize(("ours", "theirs", "epochs"), [(0.6, 3.0, 150), (0.61, 3.0, 147), (3.0, 0.6, 6), (99, 0.1, 1)])
def test_affordable_epochs_fill_the_seconds_of_training_without_set_up(ours, theirs, epochs):
    of = [{0: run(0.9, per_epoch=s, epochs=EPOCHS), 1: run(None)} for s in (ours, theirs)]
    assert affordable_epochs(*of) == epochs


def test_affordable_epochs_are_those_of_the_other_without_a_run_that_ended():
    assert affordable_epochs({0: run(None)}, {0: run(0.9)}) == EPOCHS


def test_claim_holds_where_norm_free_is_ahead_at_equal_time():
    measurement, judgement, _ = measure(TIME, good, seeds=SEEDS)
    assert judgement.status == "holds"
    assert measurement.values["Fixup - batch norm, equal time"] == pytest.approx([2.0] * 5)
    assert measurement.values["Fixup - batch norm, equal epochs"] == pytest.approx([0.0] * 5)
    assert measurement.values["seconds, NF over batch norm, equal time"] == pytest.approx([1.0] * 5)
    assert measurement.values["seconds with set-up, NF over batch norm, equal time"] == pytest.approx([1.0] * 5)
    over_time, points = measurement.panels
    assert [curve.name for curve in over_time.curves] == [curve.name for curve in points.curves] == [*ARMS]
    assert all(len(curve.singles) == 5 for curve in over_time.curves)
    assert points.curves[0].values == pytest.approx((92.0, 90.0))


def test_claim_fails_where_equal_time_brings_nothing_or_is_not_equal():
    _, judgement, _ = measure(TIME, made(-0.01), seeds=SEEDS)
    assert checks_that(judgement, "fails") == {f"{arm} - batch norm, equal time" for arm in ("Fixup", "NF")}
    _, judgement, _ = measure(TIME, made(0.02, late=3.0), seeds=SEEDS)
    assert checks_that(judgement, "fails") == {
        f"{what}, {arm} over batch norm, equal time"
        for what, arm in product(("seconds", "seconds with set-up"), ("Fixup", "NF"))
    }


def test_picture_over_time_is_the_mean_of_the_seeds_from_60_percent_on():
    def rising(shift):
        each = [{"validation_accuracy": (10 * e + shift) / 100, "seconds": SET_UP + e} for e in range(1, 10)]
        return EndedRun({"status": "finished", "setup_seconds": SET_UP}, each)

    (panel,) = time_panel(Runs({"one": {0: rising(0), 1: rising(4)}, "none": {}}))
    (curve,) = panel.curves
    x, mean = np.array(curve.x), np.array(curve.values)
    assert mean == pytest.approx(10 * x + 2)
    assert mean[0] == pytest.approx(60, abs=1)
    assert np.array(curve.singles) == pytest.approx(np.stack([10 * x, 10 * x + 4]))
    assert x[-1] == pytest.approx(9)


# Batch sizes


def at_batches(lost):
    """Batch norm loses this many points at a batch of 16, the others none."""
    return lambda name, c: run(0.9 - 0.01 * lost * (c.method == "batchnorm" and c.batch_size == 16), epochs=c.epochs)


def test_rate_is_in_proportion_to_the_batch():
    tuned = trial_config("NF", 0.1, "decay 5e-4, Cutout", quick=False)
    for batch in BATCHES:
        config = batch_config(tuned, batch)
        assert config.lr == pytest.approx(0.1 * batch / 128)
        assert config == tuned.with_changes(batch_size=batch, lr=config.lr, epochs=10, warmup=1.0)


def test_trials_of_batch_sizes_are_those_of_equal_time_and_cost_is_that_of_the_others():
    asked = measure(SIZES, at_batches(0), seeds=(0, 1, 2))[2].asked
    trials = {name: config for name, config in asked.items() if name.startswith("tuning")}
    assert trials.items() <= measure(TIME, good, seeds=SEEDS)[2].asked.items()
    rest = [config for name, config in asked.items() if name not in trials]
    assert len(rest) == 3 * len(BATCHES) * 3
    assert SIZES.cost.full_seconds == pytest.approx(sum(map(gpu_seconds, rest)), rel=0.02)


def test_batch_sizes_hold_where_batch_norm_loses_at_small_batches():
    measurement, judgement, _ = measure(SIZES, at_batches(3), seeds=(0, 1, 2))
    assert judgement.status == "holds"
    assert measurement.values["NF - batch norm, batch 16"] == pytest.approx([3.0] * 3)
    assert measurement.values["lost from batch 128 to 16, batch norm - NF"] == pytest.approx([3.0] * 3)


def test_batch_sizes_fail_where_a_method_is_behind_at_one_batch():
    def make(name, config):
        return run(0.88 if (config.method, config.batch_size) == ("fixup", 512) else 0.9, epochs=config.epochs)

    _, judgement, _ = measure(SIZES, make, seeds=(0, 1, 2))
    assert checks_that(judgement, "fails") == {"Fixup - batch norm, batch 512"}
