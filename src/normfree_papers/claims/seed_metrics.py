"""Numbers of training runs by seed: the rows of a table, one run per seed, and the choice of a learning rate.

Differences are taken seed by seed, and rows whose runs are missing are skipped. Accuracies and errors are in per cent.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from normfree.report.panels import Curve, Panel, ReferenceLine
from normfree.report.tables import Table
from normfree_papers.claims.depth_curves import mean, table

CHANCE = 10.0  # ten classes, in MNIST, CIFAR-10 and the embedded images
CHANCE_LINE = ReferenceLine("chance", CHANCE)
DIVERGED = "× diverged, drawn at chance"
DEAD = 20.0  # up to twice chance counts as not trained
QUICK_SETTINGS: dict[str, Any] = {"data": "fashion14", "crop": 0}  # the data of quick runs, without crops
SMALL: dict[str, Any] = {**QUICK_SETTINGS, "batch_size": 32}  # 188 steps per epoch

# One run


@dataclass(frozen=True)
class EndedRun:
    """A training run that ended, also by divergence: its result, and one record per epoch."""

    result: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]

    @property
    def diverged(self) -> bool:
        """Whether its loss diverged; then it was not tested."""
        return bool(self.result["status"] == "diverged")

    def accuracy(self, chance: float) -> float:
        """The share of test images that it classifies correctly; `chance` for a diverged run."""
        return chance if self.diverged else float(self.result["test"]["accuracy"])


def accuracy(run: EndedRun, diverged: float = CHANCE) -> float:
    """Test accuracy; `diverged` is the value for a diverged run."""
    return 100 * run.accuracy(diverged / 100)


def error(run: EndedRun, diverged: float = CHANCE) -> float:
    """Test error; `diverged` is the accuracy of a diverged run."""
    return 100 - accuracy(run, diverged)


def training_accuracy(run: EndedRun, diverged: float = CHANCE) -> float:
    """Accuracy on the augmented training images over the last epoch."""
    return diverged if run.diverged else _fitted(run, -1)


def _fitted(run: EndedRun, epoch: int) -> float:
    return 100 * float(run.metrics[epoch]["train_accuracy"])


def held_out(run: EndedRun) -> float:
    """Accuracy on the held-out images, by which a rate is chosen; -1 for a diverged run."""
    return -1.0 if run.diverged else float(run.result["validation"]["accuracy"])


# Numbers by seed


class Numbers(dict[int, float]):
    """One number per seed, by seed; differences and ratios are those of the seeds that both have.

    >>> Numbers({0: 6.0, 1: 4.0}) - Numbers({0: 1.0}), Numbers({0: 6.0}) / Numbers({0: 2.0, 1: 1.0})
    ({0: 5.0}, {0: 3.0})
    """

    def __sub__(self, other: Numbers) -> Numbers:
        return Numbers({seed: self[seed] - other[seed] for seed in self if seed in other})

    def __truediv__(self, other: Numbers) -> Numbers:
        return Numbers({seed: self[seed] / other[seed] for seed in self if seed in other})


def numbers_of(runs: Mapping[int, EndedRun], number: Callable[[EndedRun], float]) -> Numbers:
    """A number of every run, by seed."""
    return Numbers({seed: number(run) for seed, run in runs.items()})


def combined(columns: Iterable[Numbers], number: Callable[[list[float]], float]) -> Numbers:
    """Combine columns into one number per seed, for the seeds that all of them have.

    >>> combined([Numbers({0: 1.0, 1: 2.0}), Numbers({0: 5.0})], max)
    {0: 5.0}
    """
    every = list(columns)
    seeds = set.intersection(*map(set, every)) if every else set()
    return Numbers({seed: number([column[seed] for column in every]) for seed in sorted(seeds)})


def named(words: str, row: Any) -> str:
    """The words with the row, or the parts of a row that is a tuple, in the braces."""
    return words.format(*row) if isinstance(row, tuple) else words.format(row)


class NumbersByRow(dict[Any, Numbers]):
    """One number of each training run: the rows of a table, each with one number per seed; a row may be missing."""

    def __missing__(self, row: Any) -> Numbers:
        return Numbers()

    def named(self, words: str) -> NumbersByRow:
        """The columns under `words` with the row in the braces.

        >>> NumbersByRow({"one": Numbers({0: 1.0})}).named("error, {}")
        {'error, one': {0: 1.0}}
        """
        return NumbersByRow({named(words, row): numbers for row, numbers in self.items()})

    def differences(self, *pairs: tuple[Any, Any]) -> NumbersByRow:
        """The differences of pairs of rows.

        >>> NumbersByRow({"a": Numbers({0: 3.0, 1: 1.0}), "b": Numbers({0: 1.0})}).differences(("a", "b"))
        {'a - b': {0: 2.0}}
        """
        return NumbersByRow({f"{first} - {second}": self[first] - self[second] for first, second in pairs})

    def accuracy_table(self, rows_are: str = "row") -> tuple[Table, ...]:
        """The table of test accuracies, with the mean over the seeds; none without numbers."""
        rows = ((row, f"{mean(numbers.values()):.2f}") for row, numbers in self.items() if numbers)
        return table("Test accuracy, %", (rows_are, "mean over seeds"), rows)

    def paper_panel(self, title: str, paper: Mapping[str, float]) -> tuple[Panel, ...]:
        """The panel of printed beside measured values; none if either is missing."""
        if not any(self.values()) or not paper:
            return ()
        names = tuple(row for row in self if self[row] or row in paper)
        printed = [Numbers({0: paper[row]}) if row in paper else Numbers() for row in names]
        return points_panel(title, {"paper": printed, "measured here": [self[row] for row in names]}, names=names)


class Runs(dict[Any, dict[int, EndedRun]]):
    """Training runs by row and seed; missing ones are left out."""

    def numbers(self, number: Callable[[EndedRun], float]) -> NumbersByRow:
        """A number of every run."""
        return NumbersByRow({row: numbers_of(seeds, number) for row, seeds in self.items()})

    def accuracies(self) -> NumbersByRow:
        """Test accuracies; a diverged run counts as chance."""
        return self.numbers(accuracy)

    def errors(self, chance: float = CHANCE) -> NumbersByRow:
        """Test errors; a diverged run counts as chance."""
        return self.numbers(lambda run: error(run, chance))

    def training_accuracies(self) -> NumbersByRow:
        """Accuracies on the augmented training images over the last epoch; a diverged run counts as chance."""
        return self.numbers(training_accuracy)

    def bleu_scores(self) -> NumbersByRow:
        """BLEU of the test sentences; 0 for a diverged run."""
        return self.numbers(lambda run: 0.0 if run.diverged else float(run.result["bleu"]["score"]))

    def learning_panel(self, title: str, chance: float | None = CHANCE) -> tuple[Panel, ...]:
        """The panel of training accuracy after every epoch: the median of the seeds that reached it, and each seed."""
        curves, gone = [], []
        for row, seeds in self.items():
            longest = max((len(run.metrics) for run in seeds.values()), default=0)
            epochs = [
                Numbers({seed: _fitted(run, epoch) for seed, run in seeds.items() if epoch < len(run.metrics)})
                for epoch in range(longest)
            ]
            curves += [_seeds_curve(row, epochs)] if epochs else []
            if early := sum(run.diverged and not run.metrics for run in seeds.values()):
                gone.append(row if early == len(seeds) else f"{row} ({early} of {len(seeds)} seeds)")
        if not curves:
            return ()
        early_ends = f"diverged in the first epoch: {', '.join(gone)}" if gone else ""
        note = "; ".join(filter(None, (seeds_note(curves), early_ends)))
        levels = () if chance is None else (ReferenceLine("chance", chance),)
        return (Panel(title, tuple(curves), "%", "epoch", log_y=False, note=note, levels=levels),)


# Points


def point_curve(
    name: str, columns: Sequence[Mapping[int, float]], crossed: Sequence[int] = (), at: Sequence[float] | None = None
) -> list[Curve]:
    """A point for every column that has numbers: the median, with a small one for each of several seeds.

    It is the median because a seed that collapsed would move the mean to where no seed is.

    Args:
        name: Name of the curve.
        columns: The numbers of each point; an empty column has no point, and no points give no curve.
        crossed: The columns to mark with a cross.
        at: The positions of the columns; 1, 2, 3, … by default.

    >>> point_curve("here", [{0: 1.0}, {}, {0: 4.0, 1: 4.5, 2: 9.0}], crossed=[2])[0].values
    (1.0, 4.5)
    """
    here = [place for place, numbers in enumerate(columns) if numbers]
    there = [columns[place] for place in here]
    marked = tuple(i for i, place in enumerate(here) if place in crossed)
    x = tuple(place + 1.0 if at is None else float(at[place]) for place in here)
    return [_seeds_curve(name, there, x=x, crossed=marked)] if here else []


def _seeds_curve(name: str, columns: Sequence[Mapping[int, float]], **options: Any) -> Curve:
    """The curve of the median of each column, with one small curve for each of several seeds."""
    seeds = sorted({seed for numbers in columns for seed in numbers})
    singles = [tuple(numbers.get(seed, math.nan) for numbers in columns) for seed in seeds] if len(seeds) > 1 else []
    medians = tuple(statistics.median(numbers.values()) for numbers in columns)
    return Curve(name, medians, singles=tuple(singles), **options)


def diverged_points(columns: Iterable[Mapping[int, EndedRun]]) -> list[int]:
    """The places of the columns in which a run diverged."""
    return [place for place, runs in enumerate(columns) if any(run.diverged for run in runs.values())]


def seeds_note(curves: Sequence[Curve]) -> str:
    """A note that explains the marks of single seeds; '' if there are none."""
    return "pale: single seeds; strong: their median" if any(curve.singles for curve in curves) else ""


def points_panel(
    title: str,
    found: Mapping[str, Sequence[Mapping[int, float]]],
    y_label: str = "%",
    *,
    at: Sequence[float] | None = None,
    crossed: Mapping[str, Sequence[int]] | None = None,
    note: str = "",
    x_label: str = "",
    **options: Any,
) -> tuple[Panel, ...]:
    """The panel of one point per column, one curve per row; none without numbers.

    The points stand at the `names` among the options of the panel, or over the depths, rates or batch sizes of `at`.
    `crossed` are the points of each row whose runs diverged; they are drawn as a cross.
    """
    marks = crossed or {}
    curves = tuple(c for row, columns in found.items() for c in point_curve(row, columns, marks.get(row, ()), at))
    notes = "; ".join(filter(None, (note, seeds_note(curves))))
    panel: dict[str, Any] = {"log_y": False, "log_x": at is not None, "note": notes, **options}
    return (Panel(title, curves, y_label, x_label, **panel),) if curves else ()


# The choice of a learning rate


def by_seed(tried: Mapping[float, Mapping[int, EndedRun]], *, whole: bool) -> dict[int, dict[float, EndedRun]]:
    """The runs of every seed by rate.

    With `whole`, only seeds for which all rates were tried, because only these can show that a network does not train.
    """
    runs = {seed: {rate: by[seed] for rate, by in tried.items() if seed in by} for by in tried.values() for seed in by}
    return {seed: of for seed, of in sorted(runs.items()) if len(of) == len(tried) or not whole}


def best_rates(tried: Mapping[float, Mapping[int, EndedRun]], *, whole: bool) -> dict[int, tuple[float, EndedRun]]:
    """The rate and the run that are best on the held-out images, by seed.

    With `whole`, only seeds for which all rates were tried.
    """
    found = by_seed(tried, whole=whole)
    return {seed: max(of.items(), key=lambda pair: held_out(pair[1])) for seed, of in found.items()}
