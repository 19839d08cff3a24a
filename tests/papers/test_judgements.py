"""Snapshot of all judgements; `make claims` writes it again after a new result or claim.

Look at the difference before you commit it.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from normfree_papers.claims.claim_status import Entry, entries
from normfree_papers.claims.judgement import Row

RESULTS = Path(__file__).parents[2] / "results"
JUDGEMENTS = Path(__file__).with_name("judgements.json")


def judged(entry: Entry) -> dict[str, Any]:
    """The status of a claim, and the checks with their ranges, numbers and verdicts."""
    checks = [
        [row.check.name, row.check.statement, row.check.low, row.check.high, *_measured(row), row.verdict]
        for row in entry.judgement.rows
    ]
    return {"status": entry.status, "checks": checks}


def _measured(row: Row) -> list[Any]:
    """Mean and number of values, and the interval, to eight digits, which do not depend on the machine."""
    ends = [] if row.interval is None else [row.interval.low, row.interval.high]
    mean, *limits = [None if x is None else float(f"{x:.8g}") for x in (row.measured, *ends)]
    return [mean, len(row.values), limits]


ENTRIES = {entry.claim.id: entry for entry in entries(RESULTS)}
BEFORE = json.loads(JUDGEMENTS.read_text(encoding="utf-8")) if __name__ != "__main__" else {}


def test_judgements_are_those_of_all_claims() -> None:
    assert list(BEFORE) == list(ENTRIES)


@pytest.mark.parametrize("claim_id", BEFORE)
def test_judgement_is_as_before(claim_id: str) -> None:
    assert judged(ENTRIES[claim_id]) == BEFORE[claim_id]


def write() -> None:
    """Write one line per check, so that a difference shows which one changed."""
    claims = []
    for claim_id, entry in ENTRIES.items():
        found = judged(entry)
        checks = ",\n".join(json.dumps(check, ensure_ascii=False) for check in found["checks"])
        claims.append(f'{json.dumps(claim_id)}: {{"status": "{found["status"]}", "checks": [\n{checks}\n]}}')
    JUDGEMENTS.write_text("{\n" + ",\n".join(claims) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    write()
