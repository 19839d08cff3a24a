"""The findings: a fault with its place, its severity, its clause and its remedy, from the table `findings.toml`.

Most facts are faults by themselves, or in a range that the table gives; `module_rules` and `signal_rules` find the
others. `docs/diagnosis.md` has an example of each.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from normfree.diagnostics.signals import CONSTANT, SURE, Fact, Signal, SumSignal
from normfree.report.tables import compact, shorten_names

if TYPE_CHECKING:
    from normfree.diagnostics.rules.growth import Direction

SignalStatus = Literal["preserved", "growing", "drifting", "vanishing", "exploding", "faulty", "dead branch"]
SEVERITY: tuple[SignalStatus, ...] = SignalStatus.__args__  # type: ignore[attr-defined]  # from the least on
HARMLESS: tuple[SignalStatus, ...] = ("preserved", "growing", "drifting")


@dataclass(frozen=True)
class FindingRow:
    """One row of the table; braces stand for the numbers and names of a case."""

    word: str
    severity: SignalStatus
    found_if: str
    remedy: str
    text: str = ""
    fact: str = ""
    least: float = -math.inf
    below: float = math.inf
    unless: Literal["", "another place", "anything"] = ""


def _read_table() -> dict[str, FindingRow]:
    table = tomllib.loads(Path(__file__).with_name("findings.toml").read_text(encoding="utf-8"))
    return {word: FindingRow(word, **row) for word, row in table.items()}


FINDINGS = _read_table()
_PRIORITY = {word: number for number, word in enumerate(FINDINGS)}


@dataclass(frozen=True)
class Finding:
    """One fault.

    Attributes:
        cause: The fault in a few words, such as 'forgotten skip'.
        place: The module or sum, 'the input' or 'the output'.
        status: The verdict that it causes.
        text: The fault with its numbers, as a clause.
        remedy: The place to look at and what to change there, as a clause.
        word: The row of the table.
    """

    cause: str
    place: str
    status: SignalStatus
    text: str
    remedy: str
    word: str = ""

    def __str__(self) -> str:
        """Return the cause and the place."""
        return f"{self.cause} at {self.place}" if self.place else self.cause

    @property
    def unless(self) -> str:
        """Of what the fault may be a consequence: 'another place', 'anything', or nothing."""
        return FINDINGS[self.word].unless if self.word in FINDINGS else ""


def _written(key: str, value: Any) -> str:
    if isinstance(value, str | int):
        return str(value)
    if isinstance(value, float):
        return f"{100 * value:.0f} %" if key == "percent" else compact(value)
    return shorten_names(list(value))


def finding(word: str, place: str, /, status: SignalStatus | None = None, **values: Any) -> Finding:
    """Fill a row of the table; lists of names are shortened, and numbers written compactly.

    >>> str(finding("unused module", "head", names=["head"]))
    'unused module at head'
    """
    row = FINDINGS[word]
    filled = {key: _written(key, value) for key, value in values.items()}
    filled["place"] = place or "the model"
    cause, text, remedy = (part.format(**filled) for part in (row.word, row.text, row.remedy))
    return Finding(cause, place, status or row.severity, text, remedy, word)


def by_priority(found: Iterator[Finding] | Sequence[Finding]) -> list[Finding]:
    """Sort findings as the table does: causes before their consequences."""
    return sorted(found, key=lambda f: _PRIORITY[f.word])


@dataclass(frozen=True)
class RuleInput:
    """What the rules judge.

    Attributes:
        signal: The measured signal.
        forward: The verdict on the growth of the signal over depth.
        backward: The same for the gradient.
        dead: The branches in which no weight gets a gradient.
        starting: The layers whose weights are zero, but learn, as those of a readout or a gate.
        zero_layer: The first layer outside of branches, but for the classifier, whose weights are zero and stay so;
            '' if there is none.
    """

    signal: Signal
    forward: Direction
    backward: Direction
    dead: Sequence[SumSignal]
    starting: set[str]

    @property
    def zero_layer(self) -> str:
        outside = {layer.name for layer in (*self.signal.plan.stem, *self.signal.plan.body)} - self.starting
        return next((name for name in self.signal.zero_layers if name in outside), "")


def faulty_facts(case: RuleInput) -> Iterator[Finding]:
    """The facts that are faults by themselves, or in the range that the table gives."""
    signal = case.signal
    consequences = ("samples mixed", "place in the batch", "state between calls") * (signal.head.variation <= CONSTANT)
    consequences += ("samples left out",) * (signal.head.confidence > SURE)
    for row in FINDINGS.values():
        facts = signal.by_kind[row.fact or row.word]
        if row.fact:
            facts = [f for f in facts if row.least <= f.value < row.below]
        if facts and row.word not in consequences:
            yield finding_of(row.word, facts)


def finding_of(word: str, facts: Sequence[Fact]) -> Finding:
    """The finding for facts of one kind, of which the first is the one that its text describes."""
    fact = facts[0]
    way, _, name = fact.place.partition(" ")
    place, spot = (name, fact.place) if way in ("before", "behind") else (fact.place, f"at {fact.place}")
    names = list(dict.fromkeys(f.place for f in facts))
    values: dict[str, Any] = {"value": fact.value, "percent": fact.value, "mean": fact.mean, "detail": fact.detail}
    return finding(word, place, spot=spot, names=names, function=fact.detail, **values)
