"""How a claim is run: scale, seeds, device and data; and the runs that it asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

from normfree.errors import unknown_name
from normfree.train.config import TrainConfig
from normfree_papers.claims.run_cache import Progress, RunCache
from normfree_papers.claims.seed_metrics import EndedRun, Measurement, Runs, named

Scale = Literal["quick", "full"]
SCALES: tuple[Scale, ...] = ("quick", "full")


def _silent(done: int, total: int, what: str) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a claim is run: scale, seeds, device and folder of the data sets.

    `runs` trains or finds the runs of a claim that needs training.
    """

    scale: Scale = "full"
    seeds: tuple[int, ...] = (0,)
    device: str = "cpu"
    data: Path | None = None
    progress: Progress = _silent
    runs: RunCache | None = None

    def __post_init__(self) -> None:
        if self.scale not in SCALES:
            raise unknown_name("scale", self.scale, SCALES)
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(
                f"expected one or more different seeds, got {list(self.seeds)}; pass for example (0, 1, 2)"
            )

    @property
    def quick(self) -> bool:
        """Whether small stand-ins are wanted."""
        return self.scale == "quick"

    def each(self, words: str, *axes: Iterable[Any]) -> Iterator[tuple[Any, ...]]:
        """Yield every combination of the axes, and report each as a step: `words` with its values in the braces."""
        combinations = list(product(*axes))
        for step, values in enumerate(combinations):
            self.progress(step, len(combinations), words.format(*values))
            yield values

    def each_seed(self) -> Iterator[int]:
        """Yield the seeds, and report each as a step."""
        return (seed for (seed,) in self.each("seed {}", self.seeds))

    def each_seed_of(self, names: Iterable[str]) -> Iterator[tuple[str, int]]:
        """Yield every name with every seed, and report each pair as a step."""
        return ((name, seed) for name, seed in self.each("{}, seed {}", names, self.seeds))

    def train(self, wanted: Mapping[str, TrainConfig]) -> dict[str, EndedRun | None]:
        """Return the runs by name; None for a run that is missing and may not be trained."""
        if self.runs is None:
            raise ValueError("expected settings with runs= for a claim that trains, got none; pass a RunCache")
        return self.runs(wanted)

    def train_rows(self, rows: Mapping[Any, TrainConfig], words: str = "{}") -> Runs:
        """Return the runs of every row, one per seed, which are named by `words` with the row in the braces."""
        names = {(row, seed): f"{named(words, row)}, seed {seed}" for row in rows for seed in self.seeds}
        found = self.train({name: rows[row].with_changes(seed=seed) for (row, seed), name in names.items()})
        there = {place: run for place, name in names.items() if (run := found[name]) is not None}
        return Runs({row: {seed: there[row, seed] for seed in self.seeds if (row, seed) in there} for row in rows})


@dataclass(frozen=True)
class MeasuredRows:
    """The measurement of a claim whose runs are the rows of a table."""

    rows: Callable[[Scale], Mapping[Any, TrainConfig]]
    words: str
    measure: Callable[[Runs, Scale], Measurement]

    def __call__(self, settings: Settings) -> Measurement:
        """Train every row with every seed, and measure the runs."""
        return self.measure(settings.train_rows(self.rows(settings.scale), self.words), settings.scale)
