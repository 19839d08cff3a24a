"""Our questions on trained networks: precision, `isograd`, and NF beside batch norm at equal budget.

All accuracies and errors are in per cent.
"""

from __future__ import annotations

from itertools import product
from typing import Any

from normfree.train import TrainConfig
from normfree.train.recipes import recipe
from normfree_papers.claims.claim import (
    Check,
    Cost,
    Measurement,
    Scale,
    Settings,
    aside,
    expect,
    rows_claim,
    training_claim,
)
from normfree_papers.claims.readings import GAP, reading, trains
from normfree_papers.claims.seed_metrics import (
    CHANCE_LINE,
    DEAD,
    EMBEDDED,
    SMALL,
    Columns,
    Numbers,
    Runs,
    Trained,
    accuracy,
    best_rates,
    error,
    minus,
    over,
    points_panel,
)

# Precision: does float32 give the accuracies of the faster precisions?

_WORD = reading("match", "a ratio of errors within 9.5 %, which section 4.2 of fixup calls a gap", "outside of it")


def _networks(scale: Scale) -> dict[str, TrainConfig]:
    if scale == "quick":
        return {"Fixup, 10 layers": recipe("depth_test", model="wrn-10-1", **SMALL)}
    return {
        "Fixup, 100 layers": recipe("depth_test"),
        "batch norm, 100 layers": recipe("depth_test", method="batchnorm"),
        "weight norm, 100 layers": recipe("wninit_depth"),
        "Fixup, ResNet-110": recipe("fixup_ablation"),
        "batch norm, ResNet-110": recipe("fixup_ablation", method="batchnorm"),
    }


def _precision_rows(scale: Scale) -> dict[str, TrainConfig]:
    precisions = {"float32": "float32", "fast": "bf16" if scale == "quick" else "auto"}
    return {
        f"{name}, {kind}": config.with_changes(precision=precision)
        for name, config in _networks(scale).items()
        for kind, precision in precisions.items()
    }


@rows_claim(
    _precision_rows,
    id="beyond/precision",
    where="Our control of precision",
    statement="Training in float32 gives the test errors of bf16 and mixed precision, in which runs on a GPU are made.",
    paper_value="none; the papers do not name a precision other than the framework's float32",
    how="WRN-100-1 after one epoch and ResNet-110 after three, by Fixup, batch norm and weight norm, in float32 and in "
    "the precision that a GPU takes by itself (full); 10 layers in float32 and bf16 on the embedded images (quick).",
    cost=Cost(quick_seconds=40, full_seconds=1350, device="gpu"),
    checks=(
        *(
            expect(f"errors in float32 over fast, {name}", low=1 / GAP, high=GAP, scale="full").reading(
                f"test error in float32 over that in the fast precision, {name}", why=_WORD
            )
            for name in _networks("full")
        ),
        expect("test error, Fixup, 10 layers, float32", high=100 - DEAD, scale="quick").reading(
            "test error of the stand-in in float32, in %: it trains", why=trains()
        ),
    ),
    needs_data="CIFAR-10",
)
def precision(runs: Runs, scale: Scale) -> Measurement:
    """Test errors in float32 and in the fast precision. Reference: none; a control of our own runs."""
    errors = runs.numbers(error)
    columns = errors.named("test error, {}")
    for name in _networks(scale):
        columns[f"errors in float32 over fast, {name}"] = over(errors[f"{name}, float32"], errors[f"{name}, fast"])
    return Measurement(values=columns, panels=runs.learning_panel("training accuracy"))


# Isograd, whose gradient is flat over the whole network: does it train better than fan-out and fan-in?
#
# `robust` proposes fan-out to preserve the gradient. Over a whole ResNet-50 it loses more than fan-in does, and
# `isograd` loses nothing (robust/fig2). The runs are those of robust/fig3, so that both claims share them.

_FAN_OUT, _FAN_IN, _FLAT, _NORMED = "fan-out", "fan-in", "isograd", "batch norm"
_METHODS = {
    _FAN_OUT: "convshort",
    _FAN_IN: "convshort:fan=in",
    _FLAT: "isograd:shortcut=conv",
    _NORMED: "batchnorm_convshort",
}
_SHARED_EPOCHS = 30  # those of robust/fig3
_SMALL: dict[str, Any] = {**EMBEDDED, "model": "resnet8", "form": "pre", "flip": False, "randaugment": (0, 0)}


def _isograd_configs(scale: Scale) -> dict[str, TrainConfig]:
    rows = {row: recipe("robust_cifar", method=method, epochs=_SHARED_EPOCHS) for row, method in _METHODS.items()}
    if scale == "full":
        return rows
    return {row: config.with_changes(**_SMALL, epochs=2) for row, config in rows.items()}


def _isograd_checks() -> tuple[Check, ...]:
    ahead = "our reading of the word 'better': a lead above 0 points; a negative one refutes it"
    return (
        *(
            expect(f"{_FLAT} - {other}", low=0.0, scale="full").reading(
                f"isograd trains better than {other}: points of test accuracy by which it leads", why=ahead
            )
            for other in (_FAN_OUT, _FAN_IN)
        ),
        expect(f"{_FLAT} - {_NORMED}", low=-1.0, scale="full").reading(
            "isograd reaches batch norm: points of test accuracy by which it leads",
            why="our reading of the word 'reach': at most one point behind; more refutes it",
        ),
        aside(f"{_FAN_OUT} - {_FAN_IN}", low=0.0, scale="full").reading(
            "fan-out trains better than fan-in, as robust proposes: points of test accuracy by which it leads",
            why=ahead,
        ),
        expect(f"test accuracy, {_FLAT}", low=DEAD, scale="quick").reading(
            "test accuracy of isograd, in %: it trains",
            why="our reading of the word 'train': more than twice chance after two epochs; less refutes it",
        ),
    )


@rows_claim(
    _isograd_configs,
    id="beyond/isograd",
    where="Our question B",
    statement="A ResNet-50 whose gradient is flat over the whole network trains better than with fan-out or fan-in "
    "weights, and reaches batch norm.",
    paper_value="none: not in a paper",
    how="Pre-activation ResNet-50 with 1×1 convolutions in every shortcut by the recipe robust_cifar, "
    f"{_SHARED_EPOCHS} epochs, "
    "three seeds, with fan-out, fan-in, isograd and batch norm; ResNet-8, two epochs of the embedded images (quick).",
    cost=Cost(quick_seconds=75, full_seconds=970, device="gpu"),
    checks=_isograd_checks(),
    quick_seeds=3,
    needs_data="CIFAR-10",
)
def isograd(runs: Runs, scale: Scale) -> Measurement:
    """Test accuracy of isograd beside fan-out, fan-in and batch norm, at the rate of robust's recipe."""
    found = runs.numbers(accuracy)
    pairs = (_FLAT, _FAN_OUT), (_FLAT, _FAN_IN), (_FLAT, _NORMED), (_FAN_OUT, _FAN_IN)
    return Measurement(
        values=found.named("test accuracy, {}") | found.leads(*pairs),
        panels=runs.learning_panel("training accuracy"),
        tables=found.accuracy_table("weights"),
    )


# NF with biases and adaptive clipping: is it as good as batch norm at equal budget, and at equal time?
#
# Both get the same network, epochs and number of learning rates, and choose the rate on held-out images. Batches go
# from 4 to 256, because batch norm's statistics suffer from small ones. At equal time NF trains for as many epochs as
# fit into the seconds of batch norm's run.

_NF = "NF"
_ARMS: dict[str, dict[str, Any]] = {
    _NORMED: {"method": "batchnorm", "clip": "none"},
    _NF: {"method": "nf", "clip": "agc"},
}
BATCHES, QUICK_BATCHES = (4, 16, 64, 256), (16, 64)
RATES, QUICK_RATES = (0.025, 0.1, 0.4), (0.1, 0.4)  # at a batch of 256, in proportion to it
EPOCHS = 10
_SMALLEST = BATCHES[0]


def config_of(arm: str, batch: int, rate: float, *, quick: bool) -> TrainConfig:
    """The run of an arm at a batch size; `rate` is that of a batch of 256."""
    base = recipe("nfnet_cifar", model="preact_resnet18", epochs=EPOCHS, warmup=1.0, validation=0.1)
    if quick:
        base = base.with_changes(**EMBEDDED, model="resnet8", form="pre", flip=False, epochs=1, warmup=0.0)
    return base.with_changes(batch_size=batch, lr=rate * batch / 256, **_ARMS[arm])


def affordable_epochs(epochs: int, ours: Trained, theirs: Trained) -> int:
    """As many epochs as our run makes in the seconds of theirs, and at least one; `epochs` if either run diverged."""
    if ours.diverged or theirs.diverged or not ours.metrics or not theirs.metrics:
        return epochs
    return max(1, round(epochs * float(theirs.metrics[-1]["seconds"]) / float(ours.metrics[-1]["seconds"])))


def _lead(batch: int) -> str:
    return f"NF - batch norm, batch {batch}"


def _timed(batch: int) -> str:
    return f"{_lead(batch)}, equal time"


def _budget_checks() -> tuple[Check, ...]:
    level = "our reading of the word 'as good': at most one point of test accuracy behind; more refutes it"
    return (
        *(
            expect(_lead(batch), low=-1.0, scale="full").reading(
                f"at equal budget and batch {batch} NF is as good as batch norm: points by which it leads", why=level
            )
            for batch in BATCHES
            if batch != _SMALLEST
        ),
        expect(_lead(_SMALLEST), low=1.0, scale="full").reading(
            f"at batch {_SMALLEST} NF is better than batch norm: points by which it leads",
            why="our reading of the word 'better': by one point or more, since batch norm's statistics are those of 4 "
            "images; less refutes it",
        ),
        *(
            aside(_timed(batch), low=-1.0, scale="full").reading(
                f"at equal time and batch {batch} NF is as good as batch norm: points by which it leads", why=level
            )
            for batch in BATCHES
        ),
        *(
            expect(f"test accuracy, {arm}, batch {batch}", low=DEAD, scale="quick").reading(
                f"test accuracy of {arm} at batch {batch}, in %: it trains",
                why="our reading of the word 'train': more than twice chance after an epoch; less refutes it",
            )
            for arm in _ARMS
            for batch in QUICK_BATCHES
        ),
    )


@training_claim(
    id="beyond/equal_budget",
    where="Our question D",
    statement="At equal budget and with tuned rates NF with biases and adaptive clipping is as good as batch norm at "
    "batches of 16 to 256, and better at a batch of 4.",
    paper_value="none: not in a paper",
    how="Pre-activation ResNet-18 on CIFAR-10, 10 epochs at batches of 4, 16, 64 and 256, the best of three rates on "
    "held-out images, three seeds; NF also for the seconds of batch norm; ResNet-8 on the embedded images (quick).",
    # 72 runs by `gpu_seconds`, and 12 for equal time; batches of 4 and 16 take longer, by a millisecond or two per step
    cost=Cost(quick_seconds=100, full_seconds=3_800, device="gpu"),
    checks=_budget_checks(),
    quick_seeds=3,
    needs_data="CIFAR-10",
    departures=("rates are in proportion to the batch",),
)
def equal_budget(settings: Settings) -> Measurement:
    """NF with clipping beside batch norm over batch sizes, each at its best rate, at equal epochs and at equal time."""
    batches, rates = (QUICK_BATCHES, QUICK_RATES) if settings.quick else (BATCHES, RATES)
    rows = {key: config_of(*key, quick=settings.quick) for key in product(_ARMS, batches, rates)}
    runs = settings.train_rows(rows, "{}, batch {}, lr {:g}")
    best = {
        (arm, batch): best_rates({rate: runs[arm, batch, rate] for rate in rates}, whole=True)
        for arm, batch in product(_ARMS, batches)
    }
    found = Columns({key: {seed: accuracy(run) for seed, (_, run) in ones.items()} for key, ones in best.items()})
    columns = found.named("test accuracy, {}, batch {}")
    for batch in batches:
        columns[_lead(batch)] = minus(found[_NF, batch], found[_NORMED, batch])
    if not settings.quick:
        for batch in batches:
            timed = _at_equal_time(settings, best[_NF, batch], best[_NORMED, batch], batch)
            columns[_timed(batch)] = minus(timed, found[_NORMED, batch])
    drawn = {arm: [found[arm, batch] for batch in batches] for arm in _ARMS}
    title = "test accuracy over the batch size, at the best rate"
    panels = points_panel(title, drawn, at=batches, x_label="batch size", levels=(CHANCE_LINE,))
    return Measurement(values=columns, panels=panels)


def _at_equal_time(
    settings: Settings,
    ours: dict[int, tuple[float, Trained]],
    theirs: dict[int, tuple[float, Trained]],
    batch: int,
) -> Numbers:
    """Test accuracy of NF at its best rate after the seconds of batch norm's best run, by seed."""
    wanted = {}
    for seed in ours.keys() & theirs.keys():
        rate, run = ours[seed]
        config = config_of(_NF, batch, rate, quick=False)
        wanted[seed] = config.with_changes(epochs=affordable_epochs(EPOCHS, run, theirs[seed][1]), seed=seed)
    names = {seed: f"{_NF}, batch {batch}, equal time, seed {seed}" for seed in wanted}
    trained = settings.train({names[seed]: config for seed, config in wanted.items()})
    made = {seed: trained[names[seed]] for seed in sorted(wanted)}
    return {seed: accuracy(run) for seed, run in made.items() if run is not None}
