"""Counts the faults by kind, and prints a table of them at the end."""

from collections import Counter
from typing import Any

import pytest

COUNTS = pytest.StashKey[dict[str, Counter[str]]]()
OUTCOMES = ("refused", "harmless", "accepted", "traceback")


@pytest.fixture
def count(request: pytest.FixtureRequest) -> Any:
    """Count an outcome of a kind of fault."""
    counts = request.config.stash.setdefault(COUNTS, {})

    def add(kind: str, outcome: str) -> None:
        counts.setdefault(kind, Counter())[outcome] += 1

    return add


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the table."""
    if not (counts := config.stash.get(COUNTS, None)):
        return
    terminalreporter.section("faults")
    terminalreporter.write_line(f"{'flipped bytes of':40s}" + "".join(f"{name:>12s}" for name in OUTCOMES))
    for kind, found in counts.items():
        terminalreporter.write_line(f"{kind:40s}" + "".join(f"{found[name]:12,d}" for name in OUTCOMES))
    total = sum(counts.values(), Counter[str]())
    terminalreporter.write_line(f"{'all':40s}" + "".join(f"{total[name]:12,d}" for name in OUTCOMES))
