"""The tables of `make faults`: printed at its end, and written to docs/reliability.md.

    make faults
    python tests/support/fault_tables.py --write

A table of the page stands between `<!-- faults: NAME -->` and `<!-- end -->`.
"""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from fault_kinds import ROWS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reliability.md"
STORED = "faults/tables"  # in pytest's cache
COMMAND = "make faults"


class Table(NamedTuple):
    """The columns of a table: those that name a fault, then the outcomes."""

    tests: str  # the file that counts
    names: tuple[str, ...]
    outcomes: tuple[str, ...]


TABLES = {
    "files": Table(
        "tests/faults/test_flipped_bytes.py", ("flipped bytes of",), ("refused", "harmless", "accepted", "traceback")
    ),
    "data": Table("tests/faults/test_damaged_data.py", ("damaged file",), ("refused", "read", "traceback")),
    "processes": Table(
        "tests/faults/test_disturbed_processes.py",
        ("work", "fault"),
        ("whole", "refused", "lost", "accepted", "traceback", "hang"),
    ),
}
Counts = dict[str, dict[str, Any]]
"""By table: the counted outcomes of each row, and the seconds that its tests took."""


def rows(name: str, counts: Counts) -> list[list[str]]:
    """The lines of a table with its head and its sum, as text."""
    table = TABLES[name]
    order = {names: place for place, names in enumerate(ROWS[name])}  # the workers of xdist count in any order
    found = sorted(counts[name]["rows"], key=lambda row: order.get(tuple(row[0]), len(order)))
    total = sum((Counter(row) for _, row in found), Counter[str]())
    lines = [[*table.names, "tried", *table.outcomes]]
    for names, row in [*found, (["all", *[""] * (len(table.names) - 1)], total)]:
        lines.append([*names, *(f"{n:,}" for n in (sum(row.values()), *(row.get(o, 0) for o in table.outcomes)))])
    return lines


def plain(name: str, counts: Counts) -> str:
    """A table for the terminal."""
    lines = rows(name, counts)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    names = len(TABLES[name].names)

    def render(line: list[str]) -> str:
        cells = enumerate(zip(line, widths, strict=True))
        return "  ".join(cell.ljust(width) if i < names else cell.rjust(width) for i, (cell, width) in cells)

    return "\n".join(map(render, lines))


def markdown(name: str, counts: Counts) -> str:
    """A table for the page, with the command and the time it took."""
    head, *body = rows(name, counts)
    names = len(TABLES[name].names)
    lines = [head, ["---"] * names + ["---:"] * (len(head) - names), *body]
    minutes = counts[name]["seconds"] / 60
    taken = f"By `pytest -m faults {TABLES[name].tests}`, a part of `{COMMAND}`, in {minutes:.1f} minutes of one core."
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + f"\n\n{taken}"


def put(page: str, counts: Counts) -> str:
    """The page with its tables replaced."""
    for name in counts:
        begin, end = f"<!-- faults: {name} -->", "<!-- end -->"
        before, _, rest = page.partition(begin)
        _, found, after = rest.partition(end)
        if not found:
            raise ValueError(f"expected '{begin}' and '{end}' in the page; add them")
        page = f"{before}{begin}\n\n{markdown(name, counts)}\n\n{end}{after}"
    return page


def read_page(page: str, name: str) -> list[tuple[tuple[str, ...], dict[str, int]]]:
    """The rows of a table in the page: their names, and what was counted by the head of its column."""
    table = page.partition(f"<!-- faults: {name} -->")[2].partition("<!-- end -->")[0]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"]
    names = len(TABLES[name].names)
    heads = lines[0][names:] if lines else []
    return [
        (tuple(line[:names]), dict(zip(heads, (int(cell.replace(",", "")) for cell in line[names:]), strict=True)))
        for line in lines[2:]
    ]


if __name__ == "__main__":
    stored = ROOT / ".pytest_cache" / "v" / STORED
    if not stored.exists():
        sys.exit(f"error: expected the counts of `{COMMAND}`, found none; run it first")
    kept: Counts = json.loads(stored.read_text(encoding="utf-8"))
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(put(PAGE.read_text(encoding="utf-8"), kept), encoding="utf-8")
    else:
        print("\n\n".join(plain(name, kept) for name in kept))
