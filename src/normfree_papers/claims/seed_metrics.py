"""Numbers of training runs by seed: the rows of a table, one run per seed, and sweeps over learning rates.

Differences are taken seed by seed, and rows whose runs are missing are skipped. Accuracies and errors are in per cent.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from normfree.report.panels import Curve, Panel, ReferenceLine
from normfree.report.tables import Table
from normfree_papers.claims.depth_curves import mean, table

if TYPE_CHECKING:
    from normfree.train import TrainConfig
    from normfree_papers.claims.settings import Settings

Numbers = dict[int, float]
"""One number per seed, by seed."""

CHANCE = 10.0  # ten classes, in MNIST, CIFAR-10 and the embedded images
CHANCE_LINE = ReferenceLine("chance", CHANCE)
DIVERGED = "× diverged, drawn at chance"
DEAD = 20.0  # up to twice chance counts as not trained
QUICK_SETTINGS: dict[str, Any] = {"data": "fashion14", "crop": 0}  # the data of quick runs, without crops
SMALL: dict[str, Any] = {**QUICK_SETTINGS, "batch_size": 32}  # 188 steps per epoch


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The outcome of a run: numbers by name, alone or one per seed, and panels, tables and notes to show.

    Numbers that come by seed are kept in the order of the seeds; a name without numbers is left out.
    """

    values: Mapping[str, float | Sequence[float] | Numbers]
    panels: tuple[Panel, ...] = ()
    tables: tuple[Table, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        there = {name: value for name, value in self.values.items() if value != {}}
        ordered = {name: [v[s] for s in sorted(v)] if isinstance(v, dict) else v for name, v in there.items()}
        object.__setattr__(self, "values", ordered)


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


def error(run: EndedRun) -> float:
    """Test error; a diverged run counts as chance."""
    return 100 - accuracy(run)


def training_accuracy(run: EndedRun, diverged: float = CHANCE) -> float:
    """Accuracy on the augmented training images over the last epoch."""
    return diverged if run.diverged else _fitted(run, -1)


def _fitted(run: EndedRun, epoch: int) -> float:
    return 100 * float(run.metrics[epoch]["train_accuracy"])


def bleu(run: EndedRun) -> float:
    """BLEU of a run's test sentences; 0 for a diverged run."""
    return 0.0 if run.diverged else float(run.result["bleu"]["score"])


# Numbers by seed


def minus(a: Numbers, b: Numbers) -> Numbers:
    """Differences for the seeds that both have."""
    return {seed: a[seed] - b[seed] for seed in a if seed in b}


def over(a: Numbers, b: Numbers) -> Numbers:
    """Ratios for the seeds that both have."""
    return {seed: a[seed] / b[seed] for seed in a if seed in b}


def combined(columns: Sequence[Numbers], number: Callable[[list[float]], float]) -> Numbers:
    """Combine columns into one number per seed, for the seeds that all of them have.

    >>> combined([{0: 1.0, 1: 2.0}, {0: 5.0}], max)
    {0: 5.0}
    """
    seeds = set.intersection(*(set(column) for column in columns)) if columns else set()
    return {seed: number([column[seed] for column in columns]) for seed in sorted(seeds)}


def named(words: str, row: Any) -> str:
    """The words with the row, or the parts of a row that is a tuple, in the braces."""
    return words.format(*row) if isinstance(row, tuple) else words.format(row)


class NumbersByRow(dict[Any, Numbers]):
    """One number of each training run: the rows of a table, each with one number per seed."""

    def named(self, words: str) -> NumbersByRow:
        """The columns under `words` with the row in the braces.

        >>> NumbersByRow({"one": {0: 1.0}}).named("error, {}")
        {'error, one': {0: 1.0}}
        """
        return NumbersByRow({named(words, row): numbers for row, numbers in self.items()})

    def differences(self, *pairs: tuple[Any, Any]) -> NumbersByRow:
        """The differences of pairs of rows.

        >>> NumbersByRow({"a": {0: 3.0, 1: 1.0}, "b": {0: 1.0}}).differences(("a", "b"))
        {'a - b': {0: 2.0}}
        """
        return NumbersByRow({f"{first} - {second}": minus(self[first], self[second]) for first, second in pairs})

    def accuracy_table(self, rows_are: str = "row") -> tuple[Table, ...]:
        """The table of test accuracies, with the mean over the seeds; none without numbers."""
        rows = ((row, f"{mean(numbers.values()):.2f}") for row, numbers in self.items() if numbers)
        return table("Test accuracy, %", (rows_are, "mean over seeds"), rows)

    def paper_panel(self, title: str, paper: Mapping[str, float]) -> tuple[Panel, ...]:
        """The panel of printed beside measured values; none if either is missing."""
        if not any(self.values()) or not paper:
            return ()
        names = tuple(row for row in self if self[row] or row in paper)
        printed: list[Numbers] = [{0: paper[row]} if row in paper else {} for row in names]
        return points_panel(title, {"paper": printed, "measured here": [self[row] for row in names]}, names=names)


class Runs(dict[Any, dict[int, EndedRun]]):
    """Training runs by row and seed; missing ones are left out."""

    def numbers(self, number: Callable[[EndedRun], float]) -> NumbersByRow:
        """A number of every run."""
        return NumbersByRow({row: {seed: number(run) for seed, run in seeds.items()} for row, seeds in self.items()})

    def learning_panel(self, title: str, chance: float | None = CHANCE) -> tuple[Panel, ...]:
        """The panel of training accuracy after every epoch: the median of the seeds that reached it, and each seed."""
        curves, gone = [], []
        for row, seeds in self.items():
            longest = max((len(run.metrics) for run in seeds.values()), default=0)
            epochs: list[Numbers] = [
                {seed: _fitted(run, epoch) for seed, run in seeds.items() if epoch < len(run.metrics)}
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
    name: str, columns: Sequence[Numbers], crossed: Sequence[int] = (), at: Sequence[float] | None = None
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


def _seeds_curve(name: str, columns: Sequence[Numbers], **options: Any) -> Curve:
    """The curve of the median of each column, with one small curve for each of several seeds."""
    seeds = sorted({seed for numbers in columns for seed in numbers})
    singles = [tuple(numbers.get(seed, math.nan) for numbers in columns) for seed in seeds] if len(seeds) > 1 else []
    medians = tuple(statistics.median(numbers.values()) for numbers in columns)
    return Curve(name, medians, singles=tuple(singles), **options)


def seeds_note(curves: Sequence[Curve]) -> str:
    """A note that explains the marks of single seeds; '' if there are none."""
    return "pale: single seeds; strong: their median" if any(curve.singles for curve in curves) else ""


def points_panel(
    title: str,
    found: Mapping[str, Sequence[Numbers]],
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


# Sweeps over learning rates


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


def held_out(run: EndedRun) -> float:
    """Accuracy on the held-out images, by which a rate is chosen; -1 for a diverged run."""
    return -1.0 if run.diverged else float(run.result["validation"]["accuracy"])


@dataclass(frozen=True)
class Sweep:
    """The runs of a sweep by initialization, layers and learning rate, and the numbers that follow from them.

    `diverged` is the accuracy of a diverged run, and `trains` the least accuracy of a trained one, in per cent.
    """

    labels: tuple[str, ...]
    depths: tuple[int, ...]
    rates: tuple[float, ...]
    runs: Runs
    diverged: float
    trains: float

    @classmethod
    def run(
        cls,
        settings: Settings,
        methods: Mapping[str, str],
        networks: Mapping[int, TrainConfig],
        rates: Sequence[float],
        *,
        diverged: float,
        trains: float,
    ) -> Sweep:
        """Train the network of every depth with every method at every rate; `methods` is keyed by the names to show."""
        rows = {
            (label, depth, rate): networks[depth].with_changes(method=methods[label], lr=rate)
            for depth, label, rate in product(networks, methods, rates)
        }
        runs = settings.train_rows(rows, "{}, {} layers, lr {:g}")
        return cls(tuple(methods), tuple(networks), tuple(rates), runs, diverged, trains)

    def accuracy(self, run: EndedRun) -> float:
        """Test accuracy of a run."""
        return accuracy(run, self.diverged)

    def tried(self, label: str, depth: int) -> dict[float, dict[int, EndedRun]]:
        """The runs of an initialization at a depth, by rate and seed."""
        return {rate: self.runs[label, depth, rate] for rate in self.rates}

    def best(self, label: str, depth: int, *, whole: bool) -> dict[int, EndedRun]:
        """The run that is best on the held-out images, by seed."""
        return {seed: run for seed, (_, run) in best_rates(self.tried(label, depth), whole=whole).items()}

    def accuracies(self, label: str, depth: int, *, whole: bool) -> Numbers:
        """Test accuracy at the best rate, by seed."""
        return {seed: self.accuracy(run) for seed, run in self.best(label, depth, whole=whole).items()}

    def largest(self, label: str, depth: int, *, whole: bool) -> Numbers:
        """The largest rate that trains, by seed; 0 where none does."""
        return {
            seed: max((rate for rate, run in runs.items() if self.accuracy(run) >= self.trains), default=0.0)
            for seed, runs in by_seed(self.tried(label, depth), whole=whole).items()
        }

    def shares(self, label: str) -> Numbers:
        """The share of all depths and rates that train, by seed; a seed with a missing run is left out."""
        trained = self.runs.numbers(lambda run: float(self.accuracy(run) >= self.trains))
        return combined([trained[label, depth, rate] for depth, rate in product(self.depths, self.rates)], mean)

    def allows(self, label: str, other: str, factor: float) -> Numbers:
        """The fraction of depths at which `label` trains at `factor` times the largest rate that trains with `other`.

        By seed. Depths at which `other` trains at no rate are included.
        """
        columns = []
        for depth in self.depths:
            ours, theirs = self.largest(label, depth, whole=False), self.largest(other, depth, whole=True)
            both = ours.keys() & theirs.keys()
            columns.append(
                {seed: float(ours[seed] > 0 and ours[seed] >= 0.99 * factor * theirs[seed]) for seed in both}
            )
        return combined(columns, mean)

    def panels(self, images: str) -> tuple[Panel, ...]:
        """The panels of test and training accuracy over depth, at the best of the rates that were tried.

        A diverged run is a cross at chance, also where it counts as 0.
        """
        found: list[Panel] = []
        best = {label: [self.best(label, depth, whole=False) for depth in self.depths] for label in self.labels}
        crossed = {
            label: [i for i, seeds in enumerate(over_depth) if any(run.diverged for run in seeds.values())]
            for label, over_depth in best.items()
        }
        note = DIVERGED if any(crossed.values()) else ""
        over_depths: dict[str, Any] = {"at": self.depths, "x_label": "layers", "levels": (CHANCE_LINE,)}
        for title, number in (("test", accuracy), ("training", training_accuracy)):
            drawn = {
                label: [{seed: number(run) for seed, run in seeds.items()} for seeds in over_depth]
                for label, over_depth in best.items()
            }
            found += points_panel(f"{title} accuracy, {images}", drawn, crossed=crossed, note=note, **over_depths)
        return tuple(found)
