"""The record of a claim, its checks, and the judge.

A measurement returns named numbers. Each check of a claim names one of them, the range in which it must lie, and the
reason for that range. Judging is a pure function of a claim and a result, fresh from a run or read from a file.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from normfree.report import Table
from normfree.report.panels import Panel
from normfree.theory.errors import unknown_name

if TYPE_CHECKING:
    from normfree.train import TrainConfig
    from normfree_papers.claims.run_cache import RunCache, Trained

Scale = Literal["quick", "full"]
SCALES: tuple[Scale, ...] = ("quick", "full")
Status = Literal["holds", "partly", "fails", "not run"]
Verdict = Literal["holds", "fails", "missing", "paper errs"]
Source = Literal["paper", "derived", "reading"]
Progress = Callable[[int, int, str], None]
"""Called with the steps done, the number of steps, and the name of the next step."""


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

    def each_seed(self) -> Iterator[int]:
        """Yield the seeds, and report each as a step."""
        for step, seed in enumerate(self.seeds):
            self.progress(step, len(self.seeds), f"seed {seed}")
            yield seed

    def each_seed_of(self, names: Iterable[str]) -> Iterator[tuple[str, int]]:
        """Yield every name with every seed, and report each pair as a step."""
        pairs = [(name, seed) for name in names for seed in self.seeds]
        for step, (name, seed) in enumerate(pairs):
            self.progress(step, len(pairs), f"{name}, seed {seed}")
            yield name, seed

    def train(self, wanted: Mapping[str, TrainConfig]) -> dict[str, Trained | None]:
        """Return the runs by name; None for a run that is missing and may not be trained."""
        if self.runs is None:
            raise ValueError("expected settings with runs= for a claim that trains, got none; pass a RunCache")
        return self.runs(wanted)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Seconds that a run takes at each scale: the quick one on a CPU core, the full one on `device`."""

    quick_seconds: float
    full_seconds: float
    device: Literal["cpu", "gpu"] = "cpu"


@dataclass(frozen=True, kw_only=True)
class Check:
    """One statement on one measured number: it lies between `low` and `high`, either of which may be open.

    The claims write a check as `expect(NAME, RANGE).says(STATEMENT, why=REASON)`.

    Attributes:
        name: The number, as the measurement names it. Over several seeds, the mean is judged.
        statement: The paper's statement, in one phrase.
        paper: The number or the words of the paper, if there are any.
        why: The reason for the range, written before the run: the number that would refute the statement.
        source: Where the range comes from: a figure of the paper, a derivation, or our reading of one of its words.
        exact: Whether the number has no randomness, so that one value decides.
        main: Whether a failure of this check fails the claim; otherwise it only holds in part.
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

    def admits(self, value: float) -> bool:
        """Whether a number lies in the range; NaN lies in none."""
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)


@dataclass(frozen=True)
class Expectation:
    """The measured half of a check: the name of a number, the paper's value, and the range."""

    name: str
    _: KW_ONLY
    paper: float | str | None = None
    low: float | None = None
    high: float | None = None
    main: bool = True
    scale: Scale | None = None

    def says(
        self,
        statement: str,
        *,
        why: str,
        source: Source | None = None,
        exact: bool = False,
        lacks: str = "",
        erratum: str = "",
    ) -> Check:
        """Add the claimed half: the statement, the reason for the range, and where the range comes from."""
        return Check(
            statement=statement, why=why, source=source, exact=exact, lacks=lacks, erratum=erratum, **vars(self)
        )


expect = Expectation
aside = partial(Expectation, main=False)  # a side remark of the paper


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The outcome of a run: numbers by name, alone or one per seed, and panels, tables and notes to show."""

    values: Mapping[str, float | Sequence[float]]
    panels: tuple[Panel, ...] = ()
    tables: tuple[Table, ...] = ()
    notes: tuple[str, ...] = ()


def by_name(found: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """Numbers by name, one per seed, from one mapping per seed.

    >>> by_name([{"a": 1.0}, {"a": 2.0}])
    {'a': [1.0, 2.0]}
    """
    return {name: [one[name] for one in found] for name in found[0]}


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
        proxy: The data or networks that stand in for the paper's, such as "CIFAR-10 in place of ImageNet".
        precision: The arithmetic of a claim without training runs; a training run records its own.
        departures: Where the measurement departs from the paper, one phrase each.
        unbreakable: Why no error planted in the code can make the claim fail, if none can.
        version: Raise it when the measurement changes, so that stored results are no longer used.
    """

    measure: Callable[[Settings], Measurement]
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
    proxy: str = ""
    precision: str = "float32"
    departures: tuple[str, ...] = ()
    unbreakable: str = ""
    needs_training: bool = False
    version: int = 1

    @property
    def paper(self) -> str:
        """The short name of the paper, the first part of the id."""
        return self.id.partition("/")[0]

    @property
    def name(self) -> str:
        """The second part of the id."""
        return self.id.partition("/")[2]

    def checks_at(self, scale: Scale) -> tuple[Check, ...]:
        """The checks whose numbers a run of this scale measures."""
        return tuple(check for check in self.checks if check.scale in (None, scale) and not check.lacks)

    def seeds_at(self, scale: Scale) -> tuple[int, ...]:
        """The default seeds of a run."""
        return tuple(range(self.quick_seeds if scale == "quick" else self.seeds))

    def to_json(self) -> dict[str, Any]:
        """The record as plain data, without the measurement."""
        cost = {"quick_seconds": self.cost.quick_seconds, "full_seconds": self.cost.full_seconds}
        return {
            "id": self.id,
            "paper": self.paper,
            "where": self.where,
            "statement": self.statement,
            "paper_value": self.paper_value,
            "how": self.how,
            "cost": {**cost, "device": self.cost.device},
            "needs_data": self.needs_data,
            "needs_training": self.needs_training,
        }


# The judge


@dataclass(frozen=True)
class Row:
    """A check beside the measured number, with its standard deviation over several seeds."""

    check: Check
    measured: float | None
    std: float | None
    verdict: Verdict


@dataclass(frozen=True)
class Judgement:
    """Whether a claim holds, with one row per check."""

    status: Status
    rows: tuple[Row, ...] = field(default=(), repr=False)

    @property
    def summary(self) -> str:
        """The number of checks by verdict, in words."""
        count = Counter(row.verdict for row in self.rows)
        parts = [f"{count['holds']} of {len(self.rows)} checks hold"]
        parts += [f"{count['fails']} fail{'s' if count['fails'] == 1 else ''}"] if count["fails"] else []
        parts += [f"{count['missing']} not measured"] if count["missing"] else []
        errors = count["paper errs"]
        parts += [f"{errors} error{'s' if errors > 1 else ''} in the paper"] if errors else []
        return ", ".join(parts)

    @property
    def errata(self) -> tuple[str, ...]:
        """Why numbers in the paper are wrong, each reason once."""
        return tuple(dict.fromkeys(row.check.erratum for row in self.rows if row.verdict == "paper errs"))


def judge(claim: Claim, result: Mapping[str, Any] | None) -> Judgement:
    """Judge the result of a claim; None means that there is none.

    A claim *fails* when a main check fails, and *holds* when every check does. In between it holds *partly*: a side
    remark fails, a number is missing, or the paper's number is wrong. It was *not run* when no check has a number, even
    if there is a result: all its training runs may be missing. In a quick result, checks for the full scale count as
    'missing'.
    """
    given: Mapping[str, Any] = {} if result is None else result
    values, scale = given.get("values", {}), given.get("scale", "full")
    tested = claim.checks_at(scale)
    others = (check for check in claim.checks if check not in tested and check.scale != "quick")
    rows = (*(_row(check, values.get(check.name)) for check in tested), *(_row(check, None) for check in others))
    if all(row.verdict == "missing" for row in rows):
        return Judgement("not run", rows)
    if any(row.verdict == "fails" and row.check.main for row in rows):
        return Judgement("fails", rows)
    return Judgement("holds" if all(row.verdict == "holds" for row in rows) else "partly", rows)


def _row(check: Check, value: Any) -> Row:
    measured, std = (value.get("mean"), value.get("std")) if isinstance(value, Mapping) else (value, None)
    if measured is None:
        return Row(check, None, None, "missing")
    measured = float(measured)  # also reads 'nan' and 'inf'
    if not check.admits(measured):
        return Row(check, measured, std, "fails")
    return Row(check, measured, std, "paper errs" if check.erratum else "holds")
