"""The record of a claim with its checks, and the registry of all claims.

A measurement returns named numbers. Each check of a claim names one of them, the range in which it must lie, and the
reason for that range. To add a claim, decorate its measurement with `@claim(...)` in a module of its paper, and add its
name to `MODULES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass
from functools import partial, partialmethod
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from normfree.errors import unknown_name
from normfree_papers.claims.run_cache import SCALES as SCALES
from normfree_papers.claims.run_cache import MeasuredRows
from normfree_papers.claims.run_cache import Scale as Scale
from normfree_papers.claims.run_cache import Settings as Settings
from normfree_papers.claims.seed_metrics import Measurement as Measurement
from normfree_papers.claims.seed_metrics import Runs

if TYPE_CHECKING:
    from normfree.train import TrainConfig

Source = Literal["paper", "derived", "reading"]


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


Measure = Callable[[Settings], Measurement]


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

    def seeds_at(self, scale: Scale) -> tuple[int, ...]:
        """The default seeds of a run."""
        return tuple(range(self.quick_seeds if scale == "quick" else self.seeds))

    def to_json(self) -> dict[str, Any]:
        """The record as plain data, without the measurement."""
        names = ("id", "paper", "where", "statement", "paper_value", "how", "cost", "needs_data", "needs_training")
        fields = {name: getattr(self, name) for name in (*names, "lacks", "proxy", "departures", "unbreakable")}
        return {**fields, "cost": asdict(self.cost), "departures": list(self.departures)}


# The registry, which imports the module of a claim when it is asked for

PAPERS = {
    "fixup": "Zhang, Dauphin, Ma 2019. Fixup initialization: residual learning without normalization",
    "wninit": "Arpit, Campos, Bengio 2019. How to initialize your network? Weight norm and ResNets",
    "robust": "ICLR 2022 submission. A robust initialization of residual blocks",
    "normdead": "Hoedt, Hochreiter, Klambauer 2022. Normalization is dead, long live normalization!",
    "beyond": "Beyond the papers: our own questions",
}
MODULES = {  # the claims of each module, in the order of the ledger
    "fixup.explosion": ("sec2", "thm1", "thm2"),
    "fixup.updates": ("eq5", "eq5_options"),
    "fixup.update_theorems": ("thm3", "thm4"),
    "fixup.transformer_update": ("sec4_3",),
    "fixup.training": ("sec3", "fig3", "fig4"),
    "fixup.image_tables": ("table1", "table4", "table2"),
    "fixup.translation": ("table3", "table3_multi30k", "table3_europarl"),
    "wninit.theorems": ("thm1", "thm2", "thm3", "thm4"),
    "wninit.norms": ("fig1", "sec3_lengths", "sec3"),
    "wninit.curvature": ("table2",),
    "wninit.depth": ("fig2_left", "fig2_right", "fig3_left", "fig3_right"),
    "wninit.warmup": ("fig4", "table1"),
    "robust.table": ("table1",),
    "robust.signal": ("fig2", "fig4", "fig5"),
    "robust.training": ("fig3", "fig6", "fig7"),
    "normdead.regression": ("eq1",),
    "normdead.batchnorm": ("eq3",),
    "normdead.invariances": ("sec2_3",),
    "normdead.moments": ("sec2_3_moments",),
    "normdead.costs": ("sec2_3_costs",),
    "normdead.skip_connections": ("sec3_2", "sec3_2_gradients"),
    "normdead.scaling_rules": ("sec4_1",),
    "normdead.signal_plots": ("fig4", "fig5"),
    "normdead.nf_signal": ("sec4_2",),
    "normdead.performance": ("sec4_3", "sec5_2_clipping", "sec4_3_regnet"),
    "normdead.nf_limits": ("sec5_1",),
    "normdead.batchnorm_parts": ("sec5_2",),
    "beyond.scalar_rate": ("scalar_rate", "scalar_rate_law"),
    "beyond.accuracy": ("precision", "isograd"),
    "beyond.equal_time": ("equal_time", "batch_sizes"),
    "beyond.converted": ("converted",),
    "beyond.transformer_rates": ("transformer_rates",),
}
_MODULE_OF = {f"{module.partition('.')[0]}/{name}": module for module, names in MODULES.items() for name in names}
_CLAIMS: dict[str, Claim] = {}


def register(claim: Claim) -> Claim:
    """Add a claim.

    Raises:
        ValueError: if its id is taken, or its paper is unknown.
    """
    if claim.paper not in PAPERS:
        raise unknown_name("paper of a claim", claim.paper, PAPERS)
    if claim.id in _CLAIMS:
        raise ValueError(f"expected a new claim, got '{claim.id}', which is registered; choose another id")
    _CLAIMS[claim.id] = claim
    return claim


def claim(**fields: Any) -> Callable[[Measure], Measure]:
    """Decorate a measurement to register it as a claim with these fields."""

    def add(measure: Measure) -> Measure:
        register(Claim(measure, **fields))
        return measure

    return add


training_claim = partial(claim, needs_training=True)
"""The same for a claim on training runs."""


def rows_claim(
    rows: Callable[[Scale], Mapping[Any, TrainConfig]], words: str = "{}", **fields: Any
) -> Callable[[Callable[[Runs, Scale], Measurement]], Measure]:
    """Decorate a measurement of the training runs of a table, whose rows are trained with every seed.

    Args:
        rows: Returns the configurations of a scale by row.
        words: The names of the runs, with the row in the braces.
        fields: The other fields of the claim.
    """
    return lambda measure: training_claim(**fields)(MeasuredRows(rows, words, measure))


def all_claims() -> tuple[Claim, ...]:
    """Every claim, by paper and in the order of the paper; imports all modules."""
    for module in MODULES:
        import_module(f"normfree_papers.{module}")
    places = list(_MODULE_OF)

    def place(claim: Claim) -> tuple[int, int]:
        return list(PAPERS).index(claim.paper), places.index(claim.id) if claim.id in places else len(places)

    return tuple(sorted(_CLAIMS.values(), key=place))


def get(claim_id: str) -> Claim:
    """The claim of an id; imports its module only.

    Raises:
        ValueError: for an unknown id, with the known ones, the closest first.
    """
    if claim_id in _MODULE_OF:
        import_module(f"normfree_papers.{_MODULE_OF[claim_id]}")
    if claim_id in _CLAIMS:
        return _CLAIMS[claim_id]
    known = [*_MODULE_OF, *(name for name in _CLAIMS if name not in _MODULE_OF)]
    if claim_id in PAPERS:
        own = [name for name in known if name.startswith(f"{claim_id}/")]
        raise ValueError(f"expected a claim, got the paper '{claim_id}'; name some of: {', '.join(own)}")
    raise unknown_name("claim", claim_id, known)
