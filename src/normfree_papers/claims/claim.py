"""What a claim is: one record of where it stands, what it says, how it is measured and when it holds; and the judge.

A claim's measurement gives named numbers, and each of its checks names one of them with the range in which it must lie
and where that range comes from. Judging is a pure function of a claim and a result, which may come straight from a run
or from a file.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from normfree.report import Table
from normfree.report.panels import Panel
from normfree.theory.errors import unknown_name

if TYPE_CHECKING:
    from normfree.train import TrainConfig
    from normfree_papers.claims.run_cache import Trained, Trainings

Scale = Literal["quick", "full"]
SCALES: tuple[Scale, ...] = ("quick", "full")
Status = Literal["holds", "partly", "fails", "not run"]
Verdict = Literal["holds", "fails", "missing", "paper errs"]
Progress = Callable[[int, int, str], None]
"""Called with steps done, steps in all, and what comes next."""

PAPERS = {
    "fixup": "Zhang, Dauphin, Ma 2019. Fixup initialization: residual learning without normalization",
    "wninit": "Arpit, Campos, Bengio 2019. How to initialize your network? Weight norm and ResNets",
    "robust": "ICLR 2022 submission. A robust initialization of residual blocks",
    "normdead": "Hoedt, Hochreiter, Klambauer 2022. Normalization is dead, long live normalization!",
}
MODULES = (  # where the claims are written, in the order of each paper
    "fixup.explosion",
    "fixup.updates",
    "fixup.attention",
    "fixup.depth",
    "fixup.training",
    "fixup.imagenet",
    "fixup.translation",
    "wninit.theorems",
    "wninit.start",
    "wninit.depth",
    "wninit.warmup",
    "robust.table",
    "robust.signal",
    "robust.training",
    "normdead.regression",
    "normdead.batchnorm",
    "normdead.invariances",
    "normdead.moments",
    "normdead.skips",
    "normdead.rules",
    "normdead.plots",
    "normdead.imitation",
    "normdead.limits",
    "normdead.pieces",
)


def _silent(done: int, total: int, what: str) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a claim is run: at which scale, with which seeds, on which device, on the data of which folder.

    `trainings` makes or finds the runs of a claim that needs training.
    """

    scale: Scale = "full"
    seeds: tuple[int, ...] = (0,)
    device: str = "cpu"
    data: Path | None = None
    progress: Progress = _silent
    trainings: Trainings | None = None

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

    def train(self, wanted: Mapping[str, TrainConfig]) -> dict[str, Trained | None]:
        """The runs of these names; None for one that is not there and was not to be made."""
        if self.trainings is None:
            raise ValueError("expected settings with trainings for a claim that trains, got none; pass trainings=")
        return self.trainings(wanted)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Seconds that a run takes at each scale, on one core or on the GPU that the full scale needs."""

    quick_seconds: float
    full_seconds: float
    device: Literal["cpu", "gpu"] = "cpu"


@dataclass(frozen=True, kw_only=True)
class Check:
    """One statement on one measured number: it lies between `low` and `high`, either of which may be open.

    `paper` is what the paper gives for it, and `why` says where the range comes from. Where there are several seeds,
    their mean is judged. A check that is not `main` is a side remark of the paper: where it fails, the claim holds in
    part. `scale` restricts it to one scale. `lacks` names data that it would take and that are not at hand. `erratum`
    says why the paper's number is known to be wrong; the range is then that of the right one.
    """

    name: str
    statement: str
    paper: float | str | None = None
    low: float | None = None
    high: float | None = None
    why: str
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

    @property
    def expected(self) -> str:
        """The range in words.

        >>> Check(name="x", statement="x is small", high=2, why="the text").expected
        '≤ 2'
        """
        if self.low is None or self.high is None:
            return f"≥ {self.low:.4g}" if self.low is not None else f"≤ {self.high:.4g}"
        digits = 6 if abs(self.high - self.low) < 0.01 * abs(self.high) else 4
        return f"{self.low:.{digits}g} to {self.high:.{digits}g}"

    def admits(self, value: float) -> bool:
        """Whether a number lies in the range; NaN lies in none."""
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What a run gives: numbers by name, alone or one a seed, and what to draw and print."""

    values: Mapping[str, float | Sequence[float]]
    panels: tuple[Panel, ...] = ()
    tables: tuple[Table, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A quantitative statement of a paper: a figure, a table, a theorem.

    `statement` and `how` are one sentence each; `paper_value` is what the paper gives, in words. `seeds` are how many
    a full run takes and `quick_seeds` a quick one. `lacks` names data that were not at hand for the full scale. Raise
    `version` when the measurement changes, so that stored results are taken no longer.
    """

    id: str
    where: str
    statement: str
    paper_value: str
    how: str
    cost: Cost
    checks: tuple[Check, ...]
    measure: Callable[[Settings], Measurement]
    seeds: int = 3
    quick_seeds: int = 1
    needs_data: str = ""
    lacks: str = ""
    needs_training: bool = False
    version: int = 1

    @property
    def paper(self) -> str:
        """The short name of the paper, which is the first part of the id."""
        return self.id.partition("/")[0]

    @property
    def name(self) -> str:
        """The second part of the id."""
        return self.id.partition("/")[2]

    def checks_at(self, scale: Scale) -> tuple[Check, ...]:
        """The checks that a run of a scale gives numbers for."""
        return tuple(check for check in self.checks if check.scale in (None, scale) and not check.lacks)

    def seeds_at(self, scale: Scale) -> tuple[int, ...]:
        """The seeds of a run unless others are asked for."""
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
    """A check beside what was measured, with its standard deviation over the seeds where there are several."""

    check: Check
    measured: float | None
    std: float | None
    verdict: Verdict


@dataclass(frozen=True)
class Judgement:
    """Whether a claim holds, and the rows that say why."""

    status: Status
    rows: tuple[Row, ...] = field(default=(), repr=False)

    @property
    def summary(self) -> str:
        """How many checks came out how, in words."""
        count = Counter(row.verdict for row in self.rows)
        parts = [f"{count['holds']} of {len(self.rows)} checks hold"]
        parts += [f"{count['fails']} fail{'s' if count['fails'] == 1 else ''}"] if count["fails"] else []
        parts += [f"{count['missing']} not measured"] if count["missing"] else []
        errors = count["paper errs"]
        parts += [f"{errors} error{'s' if errors > 1 else ''} in the paper"] if errors else []
        return ", ".join(parts)


def judge(claim: Claim, result: Mapping[str, Any] | None) -> Judgement:
    """Judge a result, as a run gives it or as it is read from a file; None means that there is none.

    A claim *fails* when a main check fails. It *holds* when every check does. In between it holds *partly*: a side
    remark fails, a number is missing, or one that the paper prints was found to be wrong. Where no check has a number
    it was *not run*, be there a result or not: all training runs behind it may be missing. A stand-in is judged by the
    checks of the full scale, too, which it leaves without a number: what it does not test is not said to hold.
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


# The registry

_CLAIMS: dict[str, Claim] = {}
_WRITTEN: dict[str, str] = {}  # the module of each


def register(claim: Claim, module: str = "") -> Claim:
    """Add a claim; the name of the module that it is written in gives it its place among the others.

    Raises `ValueError` when its id is taken, or its paper unknown.
    """
    if claim.paper not in PAPERS:
        raise unknown_name("paper of a claim", claim.paper, PAPERS)
    if claim.id in _CLAIMS:
        raise ValueError(f"expected a new claim, got '{claim.id}', which is registered; choose another id")
    _CLAIMS[claim.id], _WRITTEN[claim.id] = claim, module
    return claim


def claim(**fields: Any) -> Callable[[Callable[[Settings], Measurement]], Callable[[Settings], Measurement]]:
    """Register the decorated function as the measurement of a claim with these fields."""

    def add(measure: Callable[[Settings], Measurement]) -> Callable[[Settings], Measurement]:
        register(Claim(measure=measure, **fields), measure.__module__)
        return measure

    return add


def all_claims() -> tuple[Claim, ...]:
    """Every claim, by paper and in the order of the paper, whichever module was imported first."""
    modules = [import_module(f"normfree_papers.{name}").__name__ for name in MODULES]

    def place(claim: Claim) -> tuple[int, int]:
        written = _WRITTEN[claim.id]
        return list(PAPERS).index(claim.paper), modules.index(written) if written in modules else len(modules)

    return tuple(sorted(_CLAIMS.values(), key=place))


def get(claim_id: str) -> Claim:
    """The claim of an id; an unknown one is answered with those that are known, the closest first."""
    known = {claim.id: claim for claim in all_claims()}
    if claim_id in PAPERS:
        own = [name for name in known if name.startswith(f"{claim_id}/")]
        raise ValueError(f"expected a claim, got the paper '{claim_id}'; name some of: {', '.join(own)}")
    if claim_id not in known:
        raise unknown_name("claim", claim_id, known)
    return known[claim_id]
