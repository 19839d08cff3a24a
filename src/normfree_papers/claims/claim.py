"""The record of a claim with its checks, the decorators that register one, and what a measurement takes and returns.

A measurement takes `Settings`, and returns a `Measurement`: numbers by name. Each check of a claim names one of them,
the range in which it must lie, and the reason for that range. To add a claim, decorate its measurement with
`@claim(...)` in a module of its paper, and add its name to `MODULES` of `registry.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial, partialmethod
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from normfree.errors import unknown_name
from normfree.report.panels import Panel
from normfree.report.tables import Table
from normfree_papers.claims.registry import register
from normfree_papers.claims.run_cache import Progress, RunCache
from normfree_papers.claims.seed_metrics import EndedRun, Numbers, Runs, named

if TYPE_CHECKING:
    from normfree.train import TrainConfig

Scale = Literal["quick", "full"]
SCALES: tuple[Scale, ...] = ("quick", "full")
Source = Literal["paper", "derived", "reading"]
Name = TypeVar("Name")
Found = TypeVar("Found")

# What a measurement takes and returns


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
        """Whether this is the quick scale, with small networks and data."""
        return self.scale == "quick"

    def each(self, words: str, *axes: Iterable[Any]) -> Iterator[tuple[Any, ...]]:
        """Yield every combination of the axes, and report each as a step: `words` with its values in the braces."""
        combinations = list(product(*axes))
        for step, values in enumerate(combinations):
            self.progress(step, len(combinations), words.format(*values))
            yield values

    def over_seeds(
        self, measure: Callable[[int], tuple[Mapping[str, float], Mapping[Name, Found]]]
    ) -> tuple[dict[str, list[float]], dict[Name, list[Found]]]:
        """Measure every seed. `measure` returns numbers and curves by name; return both as lists over the seeds."""
        numbers, curves = zip(*(measure(seed) for (seed,) in self.each("seed {}", self.seeds)), strict=True)
        return _over_seeds(numbers), _over_seeds(curves)

    def over_seeds_of(
        self, rows: Iterable[Name], measure: Callable[[Name, int], Found], words: str = "{}"
    ) -> dict[Name, list[Found]]:
        """Measure every row with every seed; return the results by row as lists over the seeds.

        A step is reported by `words` with the row in the braces.
        """
        found: dict[Name, list[Found]] = {}
        places = [(row, seed) for row in rows for seed in self.seeds]
        for step, (row, seed) in enumerate(places):
            self.progress(step, len(places), f"{named(words, row)}, seed {seed}")
            found.setdefault(row, []).append(measure(row, seed))
        return found

    def train(self, wanted: Mapping[str, TrainConfig]) -> dict[str, EndedRun | None]:
        """Return the runs by name; None for a run that is missing and may not be trained."""
        if self.runs is None:
            raise ValueError("expected settings with runs= for a claim that trains, got none; pass a RunCache")
        return self.runs(wanted)

    def train_rows(self, rows: Mapping[Any, TrainConfig], words: str = "{}") -> Runs:
        """Return the runs of every row, one per seed, which are named by `words` with the row in the braces."""
        names = {(row, seed): f"{named(words, row)}, seed {seed}" for row in rows for seed in self.seeds}
        found = self.train({name: rows[row].with_changes(seed=seed) for (row, seed), name in names.items()})
        runs = {row: {seed: found[names[row, seed]] for seed in self.seeds} for row in rows}
        return Runs({row: {seed: run for seed, run in of.items() if run is not None} for row, of in runs.items()})


def _over_seeds(found: Sequence[Mapping[Name, Found]]) -> dict[Name, list[Found]]:
    """Turn one mapping per seed into one list over the seeds for every name.

    >>> _over_seeds([{"a": 1.0}, {"a": 2.0}])
    {'a': [1.0, 2.0]}
    """
    return {name: [one[name] for one in found] for name in found[0]}


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


Measure = Callable[[Settings], Measurement]

# Checks


@dataclass(frozen=True, kw_only=True)
class Check:
    """One statement on one measured number: it lies between `low` and `high`, either of which may be open.

    The claims write a check as `expect(NAME, RANGE).derived(STATEMENT, why=REASON)` if its range is derived from
    theory, with `printed` if it is a figure of the paper, and with `reading` if it rests on how we read one of its
    words.

    Attributes:
        name: The number, as the measurement names it. The interval of its mean over seeds or draws is judged.
        statement: The paper's statement, in one phrase.
        paper: The number or the words of the paper, if there are any.
        why: The reason for the range, written before the run: the number that would refute the statement.
        source: Where the range comes from: a figure of the paper, a derivation, or our reading of one of its words.
        exact: Whether the number has no randomness, so that one value decides; of several, each must lie in the range.
        binary: Whether each value is the answer 1 or 0 to a yes or no question, so that their share is judged.
        main: Whether this check decides the claim. An aside, which does not, is a side remark of the paper or of ours.
        scale: The only scale at which the number is measured; None for both.
        lacks: Data that the check needs and that were not available.
        erratum: Why the paper's number is wrong; `low` and `high` then bound the correct value.
    """

    name: str
    statement: str
    paper: float | str | None = None
    low: float | None = None
    high: float | None = None
    why: str
    source: Source | None = None
    exact: bool = False
    binary: bool = False
    main: bool = True
    scale: Scale | None = None
    lacks: str = ""
    erratum: str = ""

    def __post_init__(self) -> None:
        low, high = -math.inf if self.low is None else self.low, math.inf if self.high is None else self.high
        if (self.low is None and self.high is None) or not low <= high or not self.why:
            raise ValueError(
                f"check '{self.name}': expected a range with low <= high and a reason for it, got {self.low} to "
                f"{self.high} and {self.why!r}; pass low= or high=, and why="
            )


@dataclass(frozen=True)
class ExpectedRange:
    """The range that a check accepts for a number, with the paper's value.

    `derived`, `printed` and `reading` make the check of it, by the source of the range.
    """

    name: str
    _: KW_ONLY
    paper: float | str | None = None
    low: float | None = None
    high: float | None = None
    main: bool = True
    scale: Scale | None = None

    def _says(
        self,
        statement: str,
        *,
        why: str,
        source: Source,
        exact: bool = False,
        binary: bool = False,
        lacks: str = "",
        erratum: str = "",
    ) -> Check:
        """Return the check with this statement, and the reason for the range."""
        words: dict[str, Any] = {"statement": statement, "why": why, "source": source}
        return Check(**words, exact=exact, binary=binary, lacks=lacks, erratum=erratum, **vars(self))

    derived = partialmethod(_says, source="derived")
    printed = partialmethod(_says, source="paper")
    reading = partialmethod(_says, source="reading")


expect = ExpectedRange
aside = partial(ExpectedRange, main=False)


def near(name: str, value: float, error: float = 0.0, *, share: float = 0.0, **options: Any) -> ExpectedRange:
    """Expect a number within an error, or a share, of a value; `options` are those of `expect`."""
    return expect(name, low=(1 - share) * value - error, high=(1 + share) * value + error, **options)


# Claims


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Seconds that a run takes at each scale: the quick one on a CPU core, the full one on `device`."""

    quick_seconds: float
    full_seconds: float
    device: Literal["cpu", "gpu"] = "cpu"


@dataclass(frozen=True)
class Claim:
    """A quantitative statement of a paper: a figure, a table, a theorem.

    Attributes:
        measure: Returns the numbers that the checks name.
        id: Paper and place, such as "fixup/fig3".
        where: The place in the paper.
        statement: The claim in one sentence.
        paper_value: The numbers of the paper, in words.
        how: How it is measured here, in one sentence.
        seeds: The number of seeds of a full run; `quick_seeds` of a quick one.
        needs_data: The data set that a full run needs.
        lacks: Data that were not available for the full scale.
        stand_in: The data or networks that stand in for the paper's, such as "CIFAR-10 in place of ImageNet".
        precision: The arithmetic of a claim without training runs; a training run records its own.
        departures: Where the measurement departs from the paper, one phrase each.
        version: Raise it when the measurement changes, so that stored results are no longer used.
    """

    measure: Measure
    _: KW_ONLY
    id: str
    where: str
    statement: str
    paper_value: str
    how: str
    cost: Cost
    checks: tuple[Check, ...]
    seeds: int = 3
    quick_seeds: int = 1
    needs_data: str = ""
    lacks: str = ""
    stand_in: str = ""
    precision: str = "float32"
    departures: tuple[str, ...] = ()
    needs_training: bool = False
    version: int = 1

    @property
    def paper(self) -> str:
        """The short name of the paper, the first part of the id."""
        return self.id.partition("/")[0]

    def seeds_at(self, scale: Scale) -> tuple[int, ...]:
        """The default seeds of a run."""
        return tuple(range(self.quick_seeds if scale == "quick" else self.seeds))


def claim(**fields: Any) -> Callable[[Measure], Measure]:
    """Decorate a measurement to register it as a claim with these fields."""

    def add(measure: Measure) -> Measure:
        register(Claim(measure, **fields))
        return measure

    return add


training_claim = partial(claim, needs_training=True)
"""Decorate a measurement to register it as a claim on training runs."""


def rows_claim(
    rows: Callable[[Scale], Mapping[Any, TrainConfig]], words: str = "{}", **fields: Any
) -> Callable[[Callable[[Runs, Scale], Measurement]], Measure]:
    """Decorate a measurement of the training runs of a table, whose rows are trained with every seed.

    Args:
        rows: Returns the configurations of a scale by row.
        words: The names of the runs, with the row in the braces.
        fields: The other fields of the claim.
    """

    def add(measure: Callable[[Runs, Scale], Measurement]) -> Measure:
        return training_claim(**fields)(lambda s: measure(s.train_rows(rows(s.scale), words), s.scale))

    return add
