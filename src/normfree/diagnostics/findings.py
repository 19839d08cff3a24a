"""The findings: a fault with its place, its severity, its clause and its remedy, from the table of `finding_words.py`.

`module_rules.py` and `rules.py` tell when a finding holds. `docs/diagnosis.md` has an example of each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from normfree.diagnostics.finding_words import TABLE
from normfree.report.tables import compact, shorten_names

SignalStatus = Literal["preserved", "growing", "drifting", "vanishing", "exploding", "faulty", "dead branch"]
SEVERITY: tuple[SignalStatus, ...] = SignalStatus.__args__  # type: ignore[attr-defined]  # from the least on


class FindingRow(NamedTuple):
    """One row of the table; braces stand for the numbers and names of a case."""

    word: str
    status: SignalStatus
    limit: str
    text: str
    remedy: str


def _read(table: str) -> dict[str, FindingRow]:
    found: dict[str, FindingRow] = {}
    lines: list[str] = []
    for line in [*table.strip().splitlines(), "|"]:
        if "|" in line:
            if lines:
                word, status, limit = (piece.strip() for piece in lines[0].split("|"))
                text, remedy = lines[1].strip(), " ".join(piece.strip() for piece in lines[2:])
                found[word] = FindingRow(word, status, limit, text if text != "-" else "", remedy)  # type: ignore[arg-type]
            lines = []
        if line:
            lines.append(line)
    return found


FINDINGS = _read(TABLE)


@dataclass(frozen=True)
class Finding:
    """One fault.

    Attributes:
        cause: The fault in a few words, such as 'forgotten skip'.
        place: The module or sum, 'the input' or 'the output'.
        status: The verdict that it causes.
        text: The fault with its numbers, as a clause.
        remedy: The place to look at and what to change there, as a clause.
    """

    cause: str
    place: str
    status: SignalStatus
    text: str
    remedy: str

    def __str__(self) -> str:
        """Return the cause and the place."""
        return f"{self.cause} at {self.place}" if self.place else self.cause


def _written(key: str, value: Any) -> str:
    if isinstance(value, str | int):
        return str(value)
    if isinstance(value, float):
        return f"{100 * value:.0f} %" if key == "percent" else compact(value)
    return shorten_names(list(value))


def finding(word: str, place: str, /, status: SignalStatus | None = None, **values: Any) -> Finding:
    """Fill a row of the table; lists of names are shortened, and numbers written compactly.

    >>> str(finding("unused module", "head", names=["head"], verb="is"))
    'unused module at head'
    """
    row = FINDINGS[word]
    filled = {key: _written(key, value) for key, value in values.items()}
    filled["place"] = place or "the model"
    cause, text, remedy = (part.format(**filled) for part in (row.word, row.text, row.remedy))
    return Finding(cause, place, status or row.status, text, remedy)
