from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from shutil import copytree, ignore_patterns
from typing import Any

import pytest

from normfree.cli import main
from normfree.report.panels import Curve, Panel
from normfree_papers.claims import registry as claims
from normfree_papers.claims.claim import Check, Claim, Cost, Measurement, Settings

Make = Callable[..., Claim]


def measure(settings: Settings) -> Measurement:
    """Measure one number per seed, with a picture."""
    settings.progress(0, 1, "the only step")
    numbers = [1.0 + 0.1 * seed for seed in settings.seeds]
    panel = Panel("numbers", (Curve("one", tuple(numbers)), Curve("gone", (float("nan"),) * len(numbers))), log_y=False)
    return Measurement(values={"one": numbers, "two": 2.0}, panels=(panel,), notes=("a note",))


CLAIM = Claim(
    id="fixup/fake",
    where="Nowhere",
    statement="One is one.",
    paper_value="1",
    how="By looking.",
    cost=Cost(quick_seconds=1, full_seconds=1),
    checks=(
        Check(name="one", statement="one is about 1", paper=1.0, low=0.8, high=1.6, why="it is one", source="reading"),
        Check(name="two", statement="two is above 1", low=1.0, why="it is two", source="derived", exact=True),
    ),
    measure=measure,
)


@pytest.fixture
def fake() -> Claim:
    """A claim that holds, in no registry."""
    return CLAIM


@pytest.fixture
def stored_results(tmp_path: Path) -> Path:
    """A copy of the stored results, in which a command may write; their runs are a link."""
    results = Path(__file__).parents[2] / "results"
    folder = copytree(results, tmp_path / "results", ignore=ignore_patterns("runs", "*.png", "benchmarks"))
    (folder / "runs").symlink_to(results / "runs")
    return folder


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    """Run the command line in this process: exit status, stdout and stderr."""
    for name in ("COLUMNS", "FORCE_COLOR", "NORMFREE_TRACEBACK"):
        monkeypatch.delenv(name, raising=False)

    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            main(["reproduce", *arguments])
        captured = capsys.readouterr()
        return int(caught.value.code or 0), captured.out, captured.err

    return call


@pytest.fixture
def counted(fake: Claim) -> Any:
    """A measurement that counts its runs."""

    def once(settings: Settings) -> Measurement:
        once.runs += 1
        return fake.measure(settings)

    once.runs = 0
    return once


@pytest.fixture
def make() -> Iterator[Make]:
    """Register a claim made from fields, and take it out again."""
    claims.all_claims()
    made = []

    def add(**fields: object) -> Claim:
        made.append(claims.register(replace(CLAIM, **fields)))
        return made[-1]

    yield add
    for claim in made:
        claims._CLAIMS.pop(claim.id)
