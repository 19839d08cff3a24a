"""A plugin of pytest: counts the faults by kind, prints tables at the end, and keeps them for fault_tables.py.

tests/conftest.py names it. A conftest.py in tests/faults would do for one process only: with xdist, the main process
collects no tests, so it would not load that file, and each worker would keep its own part.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fault_tables import STORED, TABLES, Counts, plain

COUNTS = pytest.StashKey[dict[str, dict[tuple[str, ...], Counter[str]]]]()
SECONDS = pytest.StashKey[Counter[str]]()


def _counter(request: pytest.FixtureRequest, table: str) -> Iterator[Callable[..., None]]:
    counts = request.config.stash.setdefault(COUNTS, {}).setdefault(table, {})
    begun = time.monotonic()

    def add(*names_and_outcome: str) -> None:
        *names, outcome = names_and_outcome
        assert outcome in TABLES[table].outcomes
        counts.setdefault(tuple(names), Counter())[outcome] += 1

    yield add
    request.config.stash.setdefault(SECONDS, Counter())[table] += time.monotonic() - begun  # type: ignore[assignment]


@pytest.fixture
def count(request: pytest.FixtureRequest) -> Iterator[Callable[..., None]]:
    """Count an outcome of flipping a byte of a kind of file."""
    yield from _counter(request, "files")


@pytest.fixture
def count_process(request: pytest.FixtureRequest) -> Iterator[Callable[..., None]]:
    """Count an outcome of a work and a kind of fault."""
    yield from _counter(request, "processes")


@pytest.fixture
def count_data(request: pytest.FixtureRequest) -> Iterator[Callable[..., None]]:
    """Count an outcome of damaging a kind of data file that has no checksum."""
    yield from _counter(request, "data")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Let a worker of xdist hand its counts to the main process."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["faults"] = _counts(session.config)


class Collector:
    """Adds the counts of the workers to those of the main process."""

    def pytest_testnodedown(self, node: Any) -> None:
        """Take the counts of a worker that has ended."""
        stash = node.config.stash
        for table, found in getattr(node, "workeroutput", {}).get("faults", {}).items():
            counts = stash.setdefault(COUNTS, {}).setdefault(table, {})
            for names, row in found["rows"]:
                counts.setdefault(tuple(names), Counter()).update(row)
            stash.setdefault(SECONDS, Counter())[table] += found["seconds"]


def pytest_configure(config: pytest.Config) -> None:
    """Collect the counts of workers, if there are any."""
    if config.pluginmanager.hasplugin("xdist"):
        config.pluginmanager.register(Collector())


def _counts(config: pytest.Config) -> Counts:
    return {
        table: {
            "rows": [(list(names), dict(row)) for names, row in found.items()],
            "seconds": config.stash[SECONDS][table],
        }
        for table, found in config.stash.get(COUNTS, {}).items()
        if found
    }


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the tables, and keep them; the workers of xdist have handed over theirs."""
    if hasattr(config, "workerinput"):
        return
    counts = _counts(config)
    for table in counts:
        terminalreporter.section(f"faults: {table}")
        terminalreporter.write_line(plain(table, counts))
    if getattr(config, "cache", None) and "faults" in config.getoption("markexpr"):  # not the small part in `make test`
        kept: Counts = config.cache.get(STORED, {})
        for table, found in counts.items():
            kept[table] = _joined(kept.get(table), found)
        config.cache.set(STORED, kept)


def _joined(earlier: dict[str, Any] | None, found: dict[str, Any]) -> dict[str, Any]:
    """The rows of both, so that a table may be counted in parts; only the new ones if a row was counted again."""
    names = {tuple(row[0]) for row in found["rows"]}
    if earlier is None or any(tuple(row[0]) in names for row in earlier["rows"]):
        return found
    return {"rows": [*earlier["rows"], *found["rows"]], "seconds": earlier["seconds"] + found["seconds"]}
