"""Our question: is NF with biases and adaptive clipping as good as batch norm at equal budget, and at equal time?

Both get the same network, epochs and number of learning rates, and choose the rate on held-out images. Batches go from
4 to 256, because batch norm's statistics suffer from small ones. At equal time NF trains for as many epochs as fit into
the seconds of batch norm's run.
"""

from __future__ import annotations

from itertools import product
from typing import Any

from normfree.train import TrainConfig
from normfree.train.recipes import recipe
from normfree_papers.claims.claim import Check, Cost, Measurement, Settings, aside, expect, training_claim
from normfree_papers.claims.seed_metrics import (
    DEAD,
    EMBEDDED,
    Columns,
    Numbers,
    Trained,
    accuracy,
    best_rates,
    minus,
    points_panel,
)

_NORMED, _NF = "batch norm", "NF"
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


def _checks() -> tuple[Check, ...]:
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
    checks=_checks(),
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
    return Measurement(values=columns, panels=points_panel(title, drawn, batches, "batch size"))


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
