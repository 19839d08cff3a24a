"""Read the metrics of a run: one JSON object per line, each with a 'step'; a killed process may cut off the last."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from normfree.checksums import parse_json, read_limited, require_regular
from normfree.files import from_json_values

_END = 1 << 16  # bytes at the end of a file in which the last record is looked for; a record has a few hundred


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


def read_last_line(path: Path) -> dict[str, Any]:
    """Return the last complete record of a metrics file, without reading the others; {} if there is none.

    Raises `ValueError` if the end of the file holds none although lines are there.
    """
    require_regular(path)
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _END))
        lines = file.read(_END).split(b"\n")[:-1]
    for raw in reversed(lines):
        if (record := _record(raw)) is not None:
            return record
    if lines:
        raise ValueError(f"expected JSON objects with a 'step' in '{path}', but its end is damaged; delete the lines")
    return {}


def _record(raw: bytes) -> dict[str, Any] | None:
    try:
        record = parse_json(raw)
    except ValueError:
        return None
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        return None
    found: dict[str, Any] = from_json_values(record)
    return found
