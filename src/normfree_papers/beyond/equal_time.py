"""Our question on equal time: ResNet-110 without norms beside batch norm at equal epochs, time and batches.

Every arm (a method with its clipping) gets the same number of short trials. They are compared on held-out images, and
have a seed that no final run has. All runs hold out the same tenth of the training images, so trials and final runs are
comparable. All accuracies are in per cent.

Seconds are those of training with its validation after every epoch, without set-up (building, compiling, capturing).
They count only if a run was alone on its GPU. Equal time is the number of epochs that fits into batch norm's seconds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from normfree.report.panels import Curve, Panel
from normfree.report.tables import Table
from normfree.train import TrainConfig
from normfree.train.recipes import recipe
from normfree_papers.claims.claim import Check, Cost, Measurement, Settings, aside, expect, training_claim
from normfree_papers.claims.depth_curves import table
from normfree_papers.claims.seed_metrics import CHANCE_LINE, SMALL, EndedRun, Runs, held_out, points_panel
from normfree_papers.claims.shared_ranges import it_trains, reading

FIXUP, NF, NORMED = "Fixup", "NF", "batch norm"
_FREE = (FIXUP, NF)
ARMS: dict[str, dict[str, Any]] = {
    FIXUP: {"method": "fixup", "clip": "none"},
    NF: {"method": "nf", "clip": "agc"},
    NORMED: {"method": "batchnorm", "clip": "none"},
}
RATES, QUICK_RATES = (0.03, 0.1, 0.3), (0.03, 0.1)
REGULARIZED: dict[str, dict[str, Any]] = {
    "decay 1e-4": {"weight_decay": 1e-4},
    "decay 5e-4": {"weight_decay": 5e-4},
    "decay 5e-4, mixup": {"weight_decay": 5e-4, "mixup": 0.2},
    "decay 5e-4, Cutout": {"weight_decay": 5e-4, "cutout": 8},
}
_QUICK_REGULARIZED = ("decay 5e-4",)
EPOCHS = 30
TUNING_SEED = 100
_FROM = 60.0  # the picture over time begins where the mean stays above this accuracy
_MOMENTS = 100  # the points of a curve over time


# Tuning


def trial_config(arm: str, rate: float, regularized: str, *, quick: bool) -> TrainConfig:
    """The configuration of a trial, without its seed."""
    changes = {"lr": rate, **REGULARIZED[regularized], **ARMS[arm]}
    base = recipe("nfnet_cifar", model="resnet110", epochs=EPOCHS, warmup=2.0, validation=0.1, **changes)
    return base.with_changes(**SMALL, model="resnet8", flip=False, epochs=1, warmup=0.0) if quick else base


def tune(settings: Settings) -> tuple[dict[str, TrainConfig], tuple[Table, ...], tuple[str, ...]]:
    """Train the trials of every arm; return the best of each arm whose trials are all there, a table, and notes."""
    rates = QUICK_RATES if settings.quick else RATES
    ways = list(product(rates, _QUICK_REGULARIZED if settings.quick else REGULARIZED))
    rows = {(arm, *way): trial_config(arm, *way, quick=settings.quick) for arm, way in product(ARMS, ways)}
    trials = replace(settings, seeds=(TUNING_SEED,)).train_rows(rows, "tuning, {}, rate {:g}, {}")
    scores = {row: held_out(run) for row, seeds in trials.items() for run in seeds.values()}
    best, notes = {}, []
    for arm in ARMS:
        if all((arm, *way) in scores for way in ways):
            rate, how = max(ways, key=lambda way: scores[arm, *way])
            best[arm] = rows[arm, rate, how]
            at_edge = len(rates) > 2 and rate in (rates[0], rates[-1])
            edge = " (at an edge of the grid, so a better one may lie beyond)" if at_edge else ""
            notes.append(f"{arm}: rate {rate:g}{edge}, {how}")
    lines = [
        (f"{rate:g}", how, *(_percent(scores.get((arm, rate, how))) for arm in ARMS))
        for rate, how in (ways if scores else ())
    ]
    shown = table("Held-out accuracy of the trials, %", ("rate", "regularization", *ARMS), lines)
    return best, shown, tuple(notes)


def _percent(score: float | None) -> str:
    return "not run" if score is None else "diverged" if score < 0 else f"{100 * score:.2f}"


def _train_checks(words: str, of: str) -> tuple[Check, ...]:
    """The checks of the quick scale: every arm trains."""
    return tuple(it_trains(words.format(arm), f"test accuracy of {arm} {of}", scale="quick") for arm in ARMS)


# Equal epochs and equal time


def training_seconds(run: EndedRun, epoch: int = -1) -> float:
    """Seconds of training to the end of an epoch, with the validations before it, and without set-up."""
    return float(run.metrics[epoch]["seconds"]) - float(run.result["setup_seconds"])


def affordable_epochs(ours: Mapping[int, EndedRun], theirs: Mapping[int, EndedRun]) -> int:
    """The number of our epochs that take as long as their whole runs, by the medians over the seeds; at least one.

    Diverged runs are left out. If all of ours or all of theirs diverged, the answer is `EPOCHS`.
    """
    ended = [[run for run in runs.values() if not run.diverged and run.metrics] for runs in (ours, theirs)]
    if not all(ended):
        return EPOCHS
    mine, other = (statistics.median(map(training_seconds, runs)) for runs in ended)
    return max(1, math.floor(EPOCHS * other / mine))


def _lead(arm: str, equal: str) -> str:
    return f"{arm} - {NORMED}, equal {equal}"


def _ratio(arm: str, what: str) -> str:
    return f"{what}, {arm} over {NORMED}, equal time"


def _time_checks() -> tuple[Check, ...]:
    better = (
        "our reading of the word 'better': a lead above 0, paired by seed; with five seeds the 95 % interval is 2.8 "
        "standard errors to each side; one below 0 refutes it"
    )
    equal = reading("equal", "at most 5 % more seconds than batch norm", "above 1.05")
    return (
        *(
            expect(_lead(arm, "time"), low=0.0, scale="full").reading(
                f"at equal time {arm} is better than batch norm: points of test accuracy by which it leads", why=better
            )
            for arm in _FREE
        ),
        *(
            expect(_ratio(arm, "seconds"), high=1.05, scale="full").reading(
                f"the time is equal: seconds of training with {arm} over those with batch norm, without set-up",
                why=equal,
            )
            for arm in _FREE
        ),
        *(
            aside(_ratio(arm, "seconds with set-up"), high=1.05, scale="full").reading(
                f"the same with set-up and the test, as stored for the whole run of {arm}", why=equal
            )
            for arm in _FREE
        ),
        *(
            aside(_lead(arm, "epochs"), low=-1.0, scale="full").reading(
                f"at equal epochs {arm} is as good as batch norm: points of test accuracy by which it leads",
                why=reading("as good", "at most one point of test accuracy behind", "below -1"),
            )
            for arm in _FREE
        ),
        *_train_checks("test accuracy, {}, equal epochs", "after an epoch"),
    )


@training_claim(
    id="beyond/equal_time",
    where="Our question on equal time",
    statement="After as many seconds of training on one GPU, ResNet-110 with Fixup and with NF is better than with "
    "batch norm, each tuned by as many trials.",
    paper_value="none: not in a paper",
    how="ResNet-110 on CIFAR-10 with Fixup, NF (biases, adaptive clipping) and batch norm, batches of 128: 12 trials "
    f"of {EPOCHS} epochs for each (3 rates; weight decay of 1e-4, 5e-4, with mixup of 0.2, with Cutout of 8) choose by "
    f"held-out accuracy with a seed of their own; then five seeds of the best for {EPOCHS} epochs, and Fixup and NF "
    "for as many epochs as fit into batch norm's seconds, by the medians of runs that were alone on the GPU (full); "
    "ResNet-8, two trials of an epoch of the embedded images (quick).",
    # By `gpu_seconds`, and ten runs of batch norm's seconds
    cost=Cost(quick_seconds=90, full_seconds=4_100, device="gpu"),
    checks=_time_checks(),
    seeds=5,
    needs_data="CIFAR-10",
    departures=("what is best after 30 epochs is trained for longer at equal time, without trials of that length",),
)
def equal_time(settings: Settings) -> Measurement:
    """Fixup and NF beside batch norm, tuned by as many trials, at equal epochs and at equal time."""
    best, tables, notes = tune(settings)
    even = settings.train_rows(best, "{}, equal epochs")
    found = even.accuracies()
    columns = found.named("test accuracy, {}, equal epochs")
    for arm in _FREE:
        columns[_lead(arm, "epochs")] = found[arm] - found[NORMED]
    if settings.quick:
        return Measurement(values=columns, tables=tables, notes=notes)
    whole = [arm for arm in even if len(even[arm]) == len(settings.seeds)]
    free = [arm for arm in _FREE if {arm, NORMED} <= set(whole)]
    epochs = {arm: affordable_epochs(even[arm], even[NORMED]) for arm in free}
    rows = {arm: best[arm].with_changes(epochs=epochs[arm]) for arm in free}
    timed = settings.train_rows(rows, "{}, equal time")
    scores = timed.accuracies()
    columns |= scores.named("test accuracy, {}, equal time")
    ended = Runs({arm: _ended(runs) for arm, runs in {**timed, NORMED: even.get(NORMED, {})}.items()})
    seconds = ended.numbers(training_seconds)
    in_all = ended.numbers(lambda run: float(run.result["seconds"]))
    for arm in free:
        columns[_lead(arm, "time")] = scores[arm] - found[NORMED]
        columns[_ratio(arm, "seconds")] = seconds[arm] / seconds[NORMED]
        columns[_ratio(arm, "seconds with set-up")] = in_all[arm] / in_all[NORMED]
    notes += tuple(
        f"{arm} trains {count} epochs in the seconds of {EPOCHS} with batch norm" for arm, count in epochs.items()
    )
    points = {arm: [scores.get(arm, found[arm]), found[arm]] for arm in (*_FREE, NORMED)}
    places = ("equal time", f"{EPOCHS} epochs")
    return Measurement(
        values=columns,
        panels=(*time_panel(ended), *points_panel("test accuracy", points, names=places)),
        tables=tables,
        notes=notes,
    )


def _ended(runs: Mapping[int, EndedRun]) -> dict[int, EndedRun]:
    return {seed: run for seed, run in runs.items() if not run.diverged and run.metrics}


def time_panel(ended: Runs) -> tuple[Panel, ...]:
    """The panel of held-out accuracy over the seconds of training: the mean over the seeds, and each seed."""
    curves = [_curve(arm, list(seeds.values())) for arm, seeds in ended.items() if seeds]
    note = f"pale: single seeds; strong: their mean; seconds without set-up; drawn from {_FROM:g} % on"
    title = "held-out accuracy over time on one GPU"
    return (Panel(title, tuple(curves), "%", "seconds of training", log_y=False, note=note),) if curves else ()


def _curve(name: str, runs: list[EndedRun]) -> Curve:
    """The mean over runs at `_MOMENTS` moments that all of them reached; between two epochs a run is interpolated."""
    times = [[training_seconds(run, epoch) for epoch in range(len(run.metrics))] for run in runs]
    found = [[100 * float(record["validation_accuracy"]) for record in run.metrics] for run in runs]
    moments = np.linspace(max(t[0] for t in times), min(t[-1] for t in times), _MOMENTS)
    singles = np.array([np.interp(moments, t, values) for t, values in zip(times, found, strict=True)])
    means = singles.mean(axis=0)
    low = np.flatnonzero(means < _FROM)
    first = int(low[-1]) + 1 if low.size and low[-1] + 1 < _MOMENTS else 0
    each = tuple(tuple(map(float, single[first:])) for single in singles) if len(runs) > 1 else ()
    return Curve(name, tuple(map(float, means[first:])), tuple(map(float, moments[first:])), singles=each)


# Batch sizes

BATCHES, QUICK_BATCHES = (16, 32, 64, 128, 256, 512), (16, 64)
BATCH_EPOCHS = 10
_SMALLEST, _TUNED_BATCH = 16, 128


def _at_batch(arm: str, batch: int) -> str:
    return f"{arm} - {NORMED}, batch {batch}"


def _loss(arm: str) -> str:
    return f"lost from batch {_TUNED_BATCH} to {_SMALLEST}, {NORMED} - {arm}"


def _batch_checks() -> tuple[Check, ...]:
    level = reading("as good", "at most one point of test accuracy behind", "below -1")
    return (
        *(
            expect(_at_batch(arm, batch), low=-1.0, scale="full").reading(
                f"at batch {batch} {arm} is as good as batch norm: points of test accuracy by which it leads", why=level
            )
            for arm, batch in product(_FREE, BATCHES)
        ),
        *(
            aside(_loss(arm), low=0.0, scale="full").reading(
                f"batch norm loses more than {arm} from batch {_TUNED_BATCH} to {_SMALLEST}, in points",
                why="our reading of the word 'more': its statistics are those of 16 images; below 0 refutes it",
            )
            for arm in _FREE
        ),
        *(
            check
            for batch in QUICK_BATCHES
            for check in _train_checks(f"test accuracy, {{}}, batch {batch}", f"at batch {batch}")
        ),
    )


def batch_config(tuned: TrainConfig, batch: int) -> TrainConfig:
    """The run at a batch size, with the rate in proportion to it."""
    epochs, warmup = (BATCH_EPOCHS, 1.0) if tuned.epochs == EPOCHS else (tuned.epochs, tuned.warmup)
    rate = tuned.lr * batch / tuned.batch_size
    return tuned.with_changes(batch_size=batch, lr=rate, epochs=epochs, warmup=warmup)


@training_claim(
    id="beyond/batch_sizes",
    where="Our question on batch sizes",
    statement="ResNet-110 with Fixup and with NF is as good as with batch norm at batches of 16 to 512.",
    paper_value="none: not in a paper",
    how="The best trial of beyond/equal_time for each of Fixup, NF (biases, adaptive clipping) and batch norm, its "
    f"rate times batch/128, {BATCH_EPOCHS} epochs of CIFAR-10 at batches of 16 to 512, three seeds (full); ResNet-8 on "
    "the embedded images at two batches (quick).",
    # 54 runs by `gpu_seconds`; the trials are those of beyond/equal_time
    cost=Cost(quick_seconds=100, full_seconds=2_420, device="gpu"),
    checks=_batch_checks(),
    needs_data="CIFAR-10",
    departures=("the rate is tuned at a batch of 128 only, and in proportion to the batch elsewhere",),
)
def batch_sizes(settings: Settings) -> Measurement:
    """Fixup and NF beside batch norm over batch sizes, each at its best rate in proportion to the batch."""
    best, _, notes = tune(settings)
    batches = QUICK_BATCHES if settings.quick else BATCHES
    rows = {(arm, batch): batch_config(best[arm], batch) for arm, batch in product(best, batches)}
    found = settings.train_rows(rows, "{}, batch {}").accuracies()
    columns = found.named("test accuracy, {}, batch {}")
    for arm, batch in product(_FREE, batches):
        columns[_at_batch(arm, batch)] = found[arm, batch] - found[NORMED, batch]
    if not settings.quick:
        lost = {arm: found[arm, _TUNED_BATCH] - found[arm, _SMALLEST] for arm in ARMS}
        columns |= {_loss(arm): lost[NORMED] - lost[arm] for arm in _FREE}
    drawn = {arm: [found[arm, batch] for batch in batches] for arm in ARMS}
    title = f"test accuracy over the batch size, {BATCH_EPOCHS} epochs"
    panels = points_panel(
        title, drawn, at=batches, x_label="batch size", levels=() if not settings.quick else (CHANCE_LINE,)
    )
    return Measurement(values=columns, panels=panels, notes=notes)
