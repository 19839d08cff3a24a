"""Sweeps over learning rates: every initialization at every depth and rate, and the best rate by held-out images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from normfree.report.panels import Curve, Level, Panel
from normfree.train import TrainConfig
from normfree_papers.claims.claim import Settings
from normfree_papers.claims.run_cache import Trained
from normfree_papers.claims.seed_metrics import CHANCE, Numbers, accuracy, fitted, mean, over


@dataclass(frozen=True)
class Setting:
    """One run of a sweep: the name of the initialization, the layers, the learning rate and the seed."""

    label: str
    depth: int
    rate: float
    seed: int

    def __str__(self) -> str:
        return f"{self.label}, {self.depth} layers, lr {self.rate:g}, seed {self.seed}"


def held_out(run: Trained) -> float:
    """Accuracy on the held-out images, by which a rate is chosen; a diverged run has none and comes last."""
    return -1.0 if run.diverged else float(run.result["validation"]["accuracy"])


@dataclass(frozen=True)
class Sweep:
    """The runs of a sweep that are there, and what follows from them; accuracies are in per cent.

    `diverged` is the accuracy that a diverged run counts as, and from `trains` on a run counts as trained.
    """

    wanted: tuple[Setting, ...]
    runs: Mapping[Setting, Trained]
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
        """Train the network of every depth with every method, given by the names it is shown by, at every rate."""
        configs = {
            Setting(label, depth, rate, seed): config.with_changes(method=method, lr=rate, seed=seed)
            for seed in settings.seeds
            for depth, config in networks.items()
            for label, method in methods.items()
            for rate in rates
        }
        found = settings.train({str(setting): config for setting, config in configs.items()})
        runs = {setting: trained for setting in configs if (trained := found[str(setting)]) is not None}
        return cls(tuple(configs), runs, diverged, trains)

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the initializations, in order."""
        return tuple(dict.fromkeys(setting.label for setting in self.wanted))

    @property
    def depths(self) -> tuple[int, ...]:
        """The depths, in order."""
        return tuple(dict.fromkeys(setting.depth for setting in self.wanted))

    def accuracy(self, run: Trained) -> float:
        """Test accuracy of a run."""
        return accuracy(run, self.diverged)

    def fitted(self, run: Trained) -> float:
        """Accuracy on the training images over the last epoch, as they were drawn."""
        return fitted(run, self.diverged)

    def rates(self, label: str, depth: int, *, whole: bool) -> dict[int, dict[float, Trained]]:
        """The runs of an initialization at a depth, by seed and rate.

        With `whole`, only seeds for which all rates were tried: that a network does not train can be said no earlier.
        """
        asked = self._asked(label, depth)
        there = {seed: {s.rate: self.runs[s] for s in all_of if s in self.runs} for seed, all_of in asked.items()}
        return {seed: runs for seed, runs in there.items() if runs and (len(runs) == len(asked[seed]) or not whole)}

    def _asked(self, label: str, depth: int | None = None) -> dict[int, list[Setting]]:
        """The settings of an initialization by seed, at one depth or at all."""
        asked: dict[int, list[Setting]] = {}
        for setting in self.wanted:
            if setting.label == label and depth in (None, setting.depth):
                asked.setdefault(setting.seed, []).append(setting)
        return asked

    def best(self, label: str, depth: int, *, whole: bool) -> dict[int, Trained]:
        """The run that is best on the held-out images, by seed."""
        return {seed: max(runs.values(), key=held_out) for seed, runs in self.rates(label, depth, whole=whole).items()}

    def accuracies(self, label: str, depth: int, *, whole: bool) -> Numbers:
        """Test accuracy at the best rate, by seed."""
        return {seed: self.accuracy(run) for seed, run in self.best(label, depth, whole=whole).items()}

    def largest(self, label: str, depth: int, *, whole: bool) -> Numbers:
        """The largest rate that trains, by seed; 0 where none does."""
        return {
            seed: max((rate for rate, run in runs.items() if self.accuracy(run) >= self.trains), default=0.0)
            for seed, runs in self.rates(label, depth, whole=whole).items()
        }

    def shares(self, label: str) -> Numbers:
        """The share of all depths and rates that train, by seed; a seed with a missing run is left out."""
        return {
            seed: sum(self.accuracy(self.runs[s]) >= self.trains for s in all_of) / len(all_of)
            for seed, all_of in self._asked(label).items()
            if all(s in self.runs for s in all_of)
        }

    def allows(self, label: str, other: str, factor: float) -> Numbers:
        """The share of depths at which one trains with a rate `factor` times the largest of the other, by seed.

        A depth at which the other trains at no rate counts.
        """
        columns = []
        for depth in self.depths:
            ours, theirs = self.largest(label, depth, whole=False), self.largest(other, depth, whole=True)
            both = ours.keys() & theirs.keys()
            columns.append(
                {seed: float(ours[seed] > 0 and ours[seed] >= 0.99 * factor * theirs[seed]) for seed in both}
            )
        return over(columns, mean)

    def panels(self, images: str) -> tuple[Panel, ...]:
        """Accuracy over depth on the test and on the training images, each at the rate that is best so far."""
        panels = []
        for title, number in (("test", self.accuracy), ("training", self.fitted)):
            curves = []
            for label in self.labels:
                bests = {depth: self.best(label, depth, whole=False) for depth in self.depths}
                points = {
                    float(depth): mean([number(run) for run in runs.values()]) for depth, runs in bests.items() if runs
                }
                if points:
                    curves.append(Curve(label, tuple(points.values()), tuple(points)))
            if curves:
                chance = (Level("chance", CHANCE),)
                panels.append(
                    Panel(f"{title} accuracy, {images}", tuple(curves), "%", "layers", False, log_x=True, levels=chance)
                )
        return tuple(panels)
