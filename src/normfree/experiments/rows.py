"""Rows of a figure or table that are trained: the runs of each, one a seed, and the numbers that follow from them.

A number is kept by its seed, so that differences are taken within one, and what has no run is left out. Accuracies and
errors are in per cent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from normfree.experiments.claims import Settings
from normfree.experiments.trainings import Trained
from normfree.report.panels import Curve, Level, Panel
from normfree.train import TrainConfig

Numbers = dict[int, float]  # by seed
Runs = dict[str, dict[int, Trained]]  # those that are there, by row and seed

CHANCE = 10.0  # ten classes, in MNIST, CIFAR-10 and the embedded images
DEAD = 20.0  # up to twice chance counts as not trained
EMBEDDED: dict[str, Any] = {"data": "fashion14", "crop": 0}  # what a quick run is trained on


def train_rows(settings: Settings, rows: Mapping[str, TrainConfig]) -> Runs:
    """The runs of every row, one for each of the settings' seeds."""
    names = {(row, seed): f"{row}, seed {seed}" for row in rows for seed in settings.seeds}
    found = settings.train({name: rows[row].with_changes(seed=seed) for (row, seed), name in names.items()})
    return {row: {seed: run for seed in settings.seeds if (run := found[names[row, seed]]) is not None} for row in rows}


# Numbers of one run


def accuracy(run: Trained, diverged: float = CHANCE) -> float:
    """Test accuracy; `diverged` is what a diverged run counts as."""
    return 100 * run.accuracy(diverged / 100)


def error(run: Trained) -> float:
    """Test error; a diverged run counts as chance."""
    return 100 - accuracy(run)


def fitted(run: Trained, diverged: float = CHANCE) -> float:
    """Accuracy on the training images, as they were drawn, over the last epoch."""
    return diverged if run.diverged else 100 * float(run.metrics[-1]["train_accuracy"])


# Numbers by seed


def each(runs: Mapping[int, Trained], number: Callable[[Trained], float]) -> Numbers:
    """A number of every run, by seed."""
    return {seed: number(run) for seed, run in runs.items()}


def mean(numbers: Collection[float]) -> float:
    """The mean of some numbers."""
    return sum(numbers) / len(numbers)


def minus(a: Numbers, b: Numbers) -> Numbers:
    """Differences for the seeds that both have."""
    return {seed: a[seed] - b[seed] for seed in a if seed in b}


def over(columns: Sequence[Numbers], number: Callable[[list[float]], float]) -> Numbers:
    """A number of all columns, for the seeds that all of them have.

    >>> over([{0: 1.0, 1: 2.0}, {0: 5.0}], max)
    {0: 5.0}
    """
    seeds = set.intersection(*(set(column) for column in columns)) if columns else set()
    return {seed: number([column[seed] for column in columns]) for seed in sorted(seeds)}


def values_of(columns: Mapping[str, Numbers]) -> dict[str, list[float]]:
    """The numbers of each name in order of the seeds; a name without one is left out."""
    return {name: [numbers[seed] for seed in sorted(numbers)] for name, numbers in columns.items() if numbers}


# Panels


def learning(title: str, runs: Runs, chance: float | None = CHANCE) -> tuple[Panel, ...]:
    """Training accuracy over the epochs, of the first seed that ended one; what diverged before has no curve."""
    curves = [
        Curve(row, tuple(100 * float(record["train_accuracy"]) for record in run.metrics))
        for row, seeds in runs.items()
        if (run := next((run for run in seeds.values() if run.metrics), None)) is not None
    ]
    if not curves:
        return ()
    gone = [row for row, seeds in runs.items() if any(run.diverged and not run.metrics for run in seeds.values())]
    note = f"diverged in the first epoch: {', '.join(gone)}" if gone else ""
    levels = () if chance is None else (Level("chance", chance),)
    return (Panel(title, tuple(curves), "%", "epoch", log_y=False, note=note, levels=levels),)


def beside_paper(title: str, found: Mapping[str, Numbers], paper: Mapping[str, float]) -> tuple[Panel, ...]:
    """A line a row, from what is printed to what was measured; no panel where one of them is wanting."""
    here = {row: mean(numbers.values()) for row, numbers in found.items() if numbers}
    if not here or not paper:
        return ()
    columns, places = {1.0: paper, 2.0: here}, {"paper": 1.0, "measured here": 2.0}
    curves = []
    for row in found:
        points = {place: values[row] for place, values in columns.items() if row in values}
        curves += [Curve(row, tuple(points.values()), tuple(points))] if points else []
    return (Panel(title, tuple(curves), "%", at_places(places), log_y=False),)


def at_places(places: Mapping[str, float]) -> str:
    """The label of an axis on which names have places.

    >>> at_places({"paper": 1.0, "measured here": 2.0})
    '1: paper; 2: measured here'
    """
    return "; ".join(f"{place:.0f}: {name}" for name, place in places.items())
