"""The result of `compare`: its runs, and the mean of each method at each depth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal

from normfree.report.tables import Column, Table, notebook_html
from normfree.report.terminal import percent


@dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """One run that ended.

    Attributes:
        method: Name of the method.
        model: Name of the model.
        depth: Number of weight layers of the model.
        lr: The learning rate.
        seed: The seed.
        status: 'finished' or 'diverged'.
        validation: Validation accuracy, if any.
        test: Test accuracy; None for a diverged run and for data without a test split.
        seconds: Training time.
        folder: Name of the run's folder.
        bleu: BLEU on the test sentences, for a model that translates.
        origin: Commit, versions, hardware and date.
    """

    method: str
    model: str
    depth: int
    lr: float
    seed: int
    status: Literal["finished", "diverged"]
    validation: float | None
    test: float | None
    seconds: float
    folder: str
    bleu: float | None = None
    origin: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        """Describe the run and how it ended in one line."""
        end = "diverged" if self.status == "diverged" else percent(self.test)
        return f"{self.method}, {self.model}, lr {self.lr:g}: {end or 'not tested'}"


@dataclass(frozen=True, kw_only=True)
class Point:
    """A method in a model at one learning rate: the means over the seeds.

    A diverged run counts as chance in `validation` and `test`. Either is None if a finished run lacks it.

    Attributes:
        method: Name of the method.
        model: Name of the model.
        depth: Number of weight layers of the model.
        lr: The learning rate.
        runs: Number of runs, one per seed.
        diverged: How many of them diverged.
        validation: Mean validation accuracy.
        test: Mean test accuracy.
        spread: Sample standard deviation of `test` over the seeds; None for a single seed.
        seconds: Training time of all seeds.
        bleu: Mean BLEU over the seeds, for a model that translates; a diverged run counts as 0.
        tests: Test accuracy of each run; a diverged run counts as chance.
    """

    method: str
    model: str
    depth: int
    lr: float
    runs: int
    diverged: int
    validation: float | None
    test: float | None
    spread: float | None
    seconds: float
    bleu: float | None = None
    tests: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True, repr=False)
class Comparison:
    """The result of `compare`.

    Attributes:
        runs: All runs that ended, by depth.
        settings: The settings that all runs share.
        methods: Names of the methods.
        lrs: The learning rates.
        seeds: The seeds.
        chance: The accuracy of random guessing.
        linear_accuracy: Accuracy of a linear classifier on the same data, if known.
        signal: The number of the Unix signal that stopped the comparison early, so that runs are missing; else None.
    """

    runs: tuple[ComparedRun, ...]
    settings: dict[str, Any]
    methods: tuple[str, ...]
    lrs: tuple[float, ...]
    seeds: tuple[int, ...]
    chance: float
    linear_accuracy: float | None
    signal: int | None = None

    def __repr__(self) -> str:
        ended = f"{len(self.runs)} runs, {sum(run.status == 'diverged' for run in self.runs)} diverged"
        return f"Comparison({', '.join(self.methods)}: {ended})"

    def _repr_html_(self) -> str:
        columns = (Column("method"), Column("model"), Column("lr", "right"), Column("test accuracy", "right"))
        rows = ((p.method, p.model, f"{p.lr:g}", percent(p.test, p.spread) or "not tested") for p in self.points)
        return notebook_html(repr(self), (), Table("comparison", columns, tuple(rows)))

    @property
    def points(self) -> tuple[Point, ...]:
        """Each method in each model, at the learning rate with the highest mean validation accuracy.

        The test accuracy plays no part in this choice. A rate at which every seed diverged is taken only if there is
        no other. Among rates with equal accuracy the lowest is taken.
        """
        found = []
        for method in self.methods:
            for model in dict.fromkeys(run.model for run in self.runs):
                rates = [self.point(method, model, lr) for lr in self.lrs]
                if candidates := [point for point in rates if point is not None]:
                    found.append(max(candidates, key=lambda p: (p.diverged < p.runs, p.validation or 0.0, -p.lr)))
        return tuple(found)

    def point(self, method: str, model: str, lr: float) -> Point | None:
        """Average the runs of a method in a model at one learning rate.

        Args:
            method: The name of the method.
            model: The name of the model.
            lr: The learning rate.

        Returns:
            The point, or None if no such run ended.
        """
        runs = [run for run in self.runs if (run.method, run.model, run.lr) == (method, model, lr)]
        if not runs:
            return None
        test = self._accuracies(runs, [run.test for run in runs])
        validation = self._accuracies(runs, [run.validation for run in runs])
        return Point(
            method=runs[0].method,
            model=runs[0].model,
            depth=runs[0].depth,
            lr=runs[0].lr,
            runs=len(runs),
            diverged=sum(run.status == "diverged" for run in runs),
            validation=fmean(validation) if validation else None,
            test=fmean(test) if test else None,
            spread=stdev(test) if len(test) > 1 else None,
            seconds=sum(run.seconds for run in runs),
            bleu=_mean_bleu(runs),
            tests=tuple(test),
        )

    def _accuracies(self, runs: Sequence[ComparedRun], shares: Sequence[float | None]) -> list[float]:
        """Return the accuracies, with chance for diverged runs; an empty list if a finished run has none."""
        each = [self.chance if run.status == "diverged" else share for run, share in zip(runs, shares, strict=True)]
        known = [share for share in each if share is not None]
        return known if len(known) == len(runs) else []

    def save(self, path: str | Path) -> None:
        """Draw accuracy against depth, or write a page with it and the table of all points.

        Args:
            path: A file that ends in .png or .svg, or in .html for the page.

        Raises:
            ValueError: if the file has another ending.
            ImportError: if matplotlib or jinja2 is not installed.
            OSError: if the file cannot be written.
        """
        from normfree.comparison.comparison_report import draw  # which draws this class

        draw(self, (Path(path),))

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as plain data, with its points.

        Returns:
            The attributes by name, and the points under 'points'; the `json` module can write them.
        """
        return {**asdict(self), "points": [asdict(point) for point in self.points]}


def _mean_bleu(runs: Sequence[ComparedRun]) -> float | None:
    """Average BLEU over the runs; None if no run translates."""
    if all(run.bleu is None for run in runs):
        return None
    return fmean(run.bleu or 0.0 for run in runs)
