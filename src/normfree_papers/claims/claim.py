"""The record of a claim, its checks, and the judge.

A measurement returns named numbers. Each check of a claim names one of them, the range in which it must lie, and the
reason for that range. Judging is a pure function of a claim and a result, fresh from a run or read from a file. It
decides by the 95 % confidence interval of a number over its seeds or draws.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field
from functools import cached_property, partial, partialmethod
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from normfree.errors import unknown_name
from normfree.report import Table
from normfree.report.panels import Panel
from normfree_papers.claims.intervals import Interval, mean, mean_interval, share_interval

if TYPE_CHECKING:
    from normfree.train import TrainConfig
    from normfree_papers.claims.kept_runs import Trained
from normfree_papers.claims.run_cache import RunCache

Scale = Literal["quick", "full"]
SCALES: tuple[Scale, ...] = ("quick", "full")
Status = Literal["holds", "fails", "undecided", "not run"]
Verdict = Literal["holds", "fails", "undecided", "missing", "paper errs"]
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

    The claims write a check as `expect(NAME, RANGE).derived(STATEMENT, why=REASON)`, where the range is derived;
    `printed` stands for a figure of the paper, and `reading` for our reading of one of its words.

    Attributes:
        name: The number, as the measurement names it. The interval of its mean over seeds or draws is judged.
        statement: The paper's statement, in one phrase.
        paper: The number or the words of the paper, if there are any.
        why: The reason for the range, written before the run: the number that would refute the statement.
        source: Where the range comes from: a figure of the paper, a derivation, or our reading of one of its words.
        exact: Whether the number has no randomness, so that one value decides; of several, each must lie in the range.
        binary: Whether each value is the answer 1 or 0 to a yes or no question, so that their share is judged.
        main: Whether this check decides the claim; an aside is shown beside it.
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
        binary: bool = False,
        lacks: str = "",
        erratum: str = "",
    ) -> Check:
        """Add the claimed half: the statement, the reason for the range, and where the range comes from."""
        claimed: dict[str, Any] = {"statement": statement, "why": why, "source": source}
        return Check(**claimed, exact=exact, binary=binary, lacks=lacks, erratum=erratum, **vars(self))

    derived = partialmethod(says, source="derived")
    printed = partialmethod(says, source="paper")
    reading = partialmethod(says, source="reading")


expect = Expectation
aside = partial(Expectation, main=False)  # a side remark of the paper


def near(name: str, value: float, error: float = 0.0, *, share: float = 0.0, **options: Any) -> Expectation:
    """Expect a number within an error, or a share, of a value; `options` are those of `expect`."""
    return expect(name, low=(1 - share) * value - error, high=(1 + share) * value + error, **options)


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
        names = ("id", "paper", "where", "statement", "paper_value", "how", "cost", "needs_data", "needs_training")
        fields = {name: getattr(self, name) for name in (*names, "lacks", "proxy", "departures", "unbreakable")}
        return {**fields, "cost": asdict(self.cost), "departures": list(self.departures)}


# The judge


@dataclass(frozen=True)
class Row:
    """A check beside the measured values, one per seed or draw."""

    check: Check
    values: tuple[float, ...] = ()

    @property
    def measured(self) -> float | None:
        """The mean of the values; None if there are none."""
        return mean(self.values) if self.values else None

    @cached_property
    def interval(self) -> Interval | None:
        """The 95 % confidence interval; None for an exact number, one value, and values that are not finite."""
        if self.check.exact or not self.values:
            return None
        return share_interval(self.values) if self.check.binary else mean_interval(self.values)

    @property
    def margin(self) -> float:
        """The distance of the mean from the nearest bound, in half widths of the interval; infinite without width."""
        interval, value = self.interval, self.measured
        if interval is None or value is None or not interval.low < interval.high:
            return math.inf
        bounds = (bound for bound in (self.check.low, self.check.high) if bound is not None)
        return min(abs(value - bound) for bound in bounds) / ((interval.high - interval.low) / 2)

    @cached_property
    def verdict(self) -> Verdict:
        """Whether the interval lies in the range.

        If a value is not finite, there is no interval, and the mean is infinite or NaN. That refutes a bound on its
        side: a diverged run refutes "it trains". If that side is open, all values must lie in the range.
        """
        check, interval = self.check, self.interval
        inside = all(map(check.admits, self.values))
        finite = all(map(math.isfinite, self.values))
        good: Verdict = "paper errs" if check.erratum else "holds"
        if self.measured is None:
            return "missing"
        if check.exact:
            return good if inside else "fails"
        if interval is None:
            if not finite and not check.admits(self.measured):
                return "fails"
            return good if inside and len(self.values) > 1 else "undecided"
        if check.admits(interval.low) and check.admits(interval.high):
            return good
        below = check.low is not None and interval.high < check.low
        above = check.high is not None and interval.low > check.high
        return "fails" if below or above else "undecided"


@dataclass(frozen=True)
class Judgement:
    """Whether a claim holds, with one row per check."""

    status: Status
    rows: tuple[Row, ...] = field(default=(), repr=False)

    @property
    def deciding(self) -> Row | None:
        """The main check with the worst verdict, and among those the one nearest to its bound; None without numbers."""
        order: tuple[Verdict, ...] = ("fails", "undecided", "holds", "paper errs")
        measured = [row for row in self.rows if row.check.main and row.values]
        return min(measured, key=lambda row: (order.index(row.verdict), row.margin), default=None)

    @property
    def summary(self) -> str:
        """The number of checks by verdict, in words, main ones and asides apart."""
        rows = [row for row in self.rows if row.check.main]
        asides = [row for row in self.rows if not row.check.main]
        return "; ".join(filter(None, (_counted(rows, "check"), _counted(asides, "aside"))))

    @property
    def missing(self) -> tuple[Check, ...]:
        """The main checks without a number."""
        return tuple(row.check for row in self.rows if row.verdict == "missing" and row.check.main)

    @property
    def errata(self) -> tuple[str, ...]:
        """Why numbers in the paper are wrong, each reason once."""
        return tuple(dict.fromkeys(row.check.erratum for row in self.rows if row.verdict == "paper errs"))


def _counted(rows: Sequence[Row], noun: str) -> str:
    if not rows:
        return ""
    count, errors = Counter(row.verdict for row in rows), sum(row.verdict == "paper errs" for row in rows)
    good = count["holds"] + errors
    parts = [f"{good} of {len(rows)} {noun}{'s' * (len(rows) > 1)} hold{'s' * (len(rows) == 1)}"]
    parts += [f"{count['fails']} fail{'s' * (count['fails'] == 1)}"] if count["fails"] else []
    parts += [f"{count['undecided']} undecided"] if count["undecided"] else []
    parts += [f"{count['missing']} not measured"] if count["missing"] else []
    parts += [f"{errors} error{'s' * (errors > 1)} in the paper"] if errors else []
    return ", ".join(parts)


def judge(claim: Claim, result: Mapping[str, Any] | None) -> Judgement:
    """Judge the result of a claim; None means that there is none.

    The main checks decide. A claim *fails* when one of them fails, *holds* when all hold, and is *undecided* otherwise:
    an interval straddles a bound, a number has a single value, or one is missing. It was *not run* when no check has a
    number, even if there is a result: all its training runs may be missing. In a quick result, checks for the full
    scale count as missing. A wrong number in the paper does not decide: the check then states the correct one.
    """
    given: Mapping[str, Any] = {} if result is None else result
    values, scale = given.get("values", {}), given.get("scale", "full")
    tested = claim.checks_at(scale)
    others = (check for check in claim.checks if check not in tested and check.scale != "quick")
    rows = (*(_row(check, values.get(check.name)) for check in tested), *(Row(check) for check in others))
    if all(row.verdict == "missing" for row in rows):
        return Judgement("not run", rows)
    verdicts = {row.verdict for row in rows if row.check.main}
    if "fails" in verdicts:
        return Judgement("fails", rows)
    return Judgement("holds" if verdicts <= {"holds", "paper errs"} else "undecided", rows)


def _row(check: Check, value: Any) -> Row:
    stored = value.get("values", ()) if isinstance(value, Mapping) else () if value is None else (value,)
    return Row(check, tuple(float(number) for number in stored))  # also reads 'nan' and 'inf'
