"""Read the metrics of a run: one JSON object per line, each with a 'step'; a killed process may cut off the last."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from normfree.checksums import parse_json, read_limited
from normfree.files import from_json_values


def read_lines(path: Path) -> list[tuple[bytes, dict[str, Any]]]:
    """Return the lines of a metrics file and their records, without an incomplete end.

    Raises `ValueError` if a line before the last complete one is damaged.
    """
    complete = read_limited(path).split(b"\n")[:-1]
    parsed = [(raw, _record(raw)) for raw in complete]
    while parsed and parsed[-1][1] is None:
        parsed.pop()
    for number, (_, record) in enumerate(parsed, start=1):
        if record is None:
            raise ValueError(
                f"expected a JSON object with a 'step' in line {number} of '{path}', but it is damaged; delete the line"
            )
    return [(raw, record) for raw, record in parsed if record is not None]


def _record(raw: bytes) -> dict[str, Any] | None:
    try:
        record = parse_json(raw)
    except ValueError:
        return None
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        return None
    found: dict[str, Any] = from_json_values(record)
    return found
