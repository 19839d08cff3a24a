"""Sweeps over initializations, depths and learning rates, and the numbers that follow from their runs.

All accuracies are in per cent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from normfree.report.panels import Panel
from normfree.train import TrainConfig
from normfree_papers.claims.claim import Settings
from normfree_papers.claims.depth_curves import mean
from normfree_papers.claims.seed_metrics import (
    CHANCE_LINE,
    DIVERGED,
    EndedRun,
    Numbers,
    Runs,
    accuracy,
    best_rates,
    by_seed,
    combined,
    diverged_points,
    held_out,
    numbers_of,
    points_panel,
    training_accuracy,
)


@dataclass(frozen=True)
class Sweep:
    """The runs of a sweep by initialization, number of layers and learning rate.

    `diverged` is the accuracy that a diverged run counts as, and `trains` the least accuracy of a network that trains.
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

    def accuracies(self, label: str, depth: int) -> Numbers:
        """Test accuracy at the best rate, by seed; a baseline counts only if all its rates were tried."""
        return numbers_of(self.best(label, depth, whole=label != "proposed"), self.accuracy)

    def largest(self, label: str, depth: int, *, whole: bool) -> Numbers:
        """The largest rate that trains, by seed; 0 where none does."""
        return Numbers(
            {
                seed: max((rate for rate, run in runs.items() if self.accuracy(run) >= self.trains), default=0.0)
                for seed, runs in by_seed(self.tried(label, depth), whole=whole).items()
            }
        )

    def shares(self, label: str) -> Numbers:
        """The share of all depths and rates that train, by seed; a seed with a missing run is left out."""
        trained = self.runs.numbers(lambda run: float(self.accuracy(run) >= self.trains))
        return combined((trained[label, depth, rate] for depth, rate in product(self.depths, self.rates)), mean)

    def allows(self, label: str, other: str, factor: float) -> Numbers:
        """The share of depths at which `label` trains at `factor` times the largest rate that trains with `other`.

        By seed. Depths at which `other` trains at no rate are included.
        """

        def trains_at(ours_and_theirs: list[float]) -> float:
            ours, theirs = ours_and_theirs
            return float(ours > 0 and ours >= 0.99 * factor * theirs)

        pairs = ((self.largest(label, d, whole=False), self.largest(other, d, whole=True)) for d in self.depths)
        return combined((combined(pair, trains_at) for pair in pairs), mean)

    def notes(self) -> tuple[str, ...]:
        """A note on the best of the rates that were tried."""
        best = []
        for label in self.labels:
            found = []
            for depth in self.depths:
                runs = next(iter(by_seed(self.tried(label, depth), whole=False).values()), {})
                alive = {rate: held_out(run) for rate, run in runs.items() if not run.diverged}
                found += [f"{max(alive, key=lambda rate: alive[rate]):g} at {depth} layers"] if alive else []
            best += [f"{label} {', '.join(found)}"] if found else []
        return ("best rates of the first seed: " + "; ".join(best),) if best else ()

    def panels(self, images: str) -> tuple[Panel, ...]:
        """The panels of test and training accuracy over depth, at the best of the rates that were tried.

        A diverged run is a cross at chance, also where it counts as 0.
        """
        best = {label: [self.best(label, depth, whole=False) for depth in self.depths] for label in self.labels}
        crossed = {label: diverged_points(over_depth) for label, over_depth in best.items()}
        options: dict[str, Any] = {"at": self.depths, "x_label": "layers", "levels": (CHANCE_LINE,), "crossed": crossed}
        return tuple(
            panel
            for title, number in (("test", accuracy), ("training", training_accuracy))
            for panel in points_panel(
                f"{title} accuracy, {images}",
                {label: [numbers_of(runs, number) for runs in over_depth] for label, over_depth in best.items()},
                note=DIVERGED if any(crossed.values()) else "",
                **options,
            )
        )
