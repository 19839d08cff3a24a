"""Made-up training runs, for the claims that need training."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from normfree.train import TrainConfig
from normfree.train.config import folder_name
from normfree_papers.claims import reproduction
from normfree_papers.claims.claim import Claim, Measurement, Settings
from normfree_papers.claims.judgement import Judgement, judge
from normfree_papers.claims.registry import get
from normfree_papers.claims.reproduction import Result, collect, panels_of, stored
from normfree_papers.claims.seed_metrics import EndedRun

Make = Callable[[str, TrainConfig], EndedRun | None]


class MadeUpRuns:
    """A stand-in for `RunCache`: a function makes each run from its name and configuration, or None."""

    trains = True

    def __init__(self, make: Make) -> None:
        self.make = make
        self.asked: dict[str, TrainConfig] = {}
        self.missing: dict[str, TrainConfig] = {}

    def __call__(self, wanted: Mapping[str, TrainConfig]) -> dict[str, EndedRun | None]:
        self.asked |= wanted
        found = {name: self.make(name, config) for name, config in wanted.items()}
        self.missing |= {name: wanted[name] for name, run in found.items() if run is None}
        return found

    @property
    def records(self) -> dict[str, dict[str, str]]:
        made = {name: config for name, config in self.asked.items() if name not in self.missing}
        return {name: {"folder": folder_name(config), "method": config.method} for name, config in made.items()}


def measure(claim: Claim, make: Make, **fields: Any) -> tuple[Measurement, Judgement, MadeUpRuns]:
    """The measurement of a claim with made-up runs, its judgement, and the runs that it asked for.

    The judgement is that of `judge_means`: a few made-up seeds stand for many that are alike.
    """
    runs = MadeUpRuns(make)
    settings = Settings(runs=runs, **fields)  # type: ignore[arg-type]
    measurement = claim.measure(settings)
    result = collect(claim, settings, measurement, 1.0)
    assert panels_of(result) == measurement.panels
    return measurement, judge_means(claim, result), runs


def judge_means(claim: Claim, result: Mapping[str, Any]) -> Judgement:
    """The judgement as if the means were known without error: every mean is measured twice and has no spread.

    The answers to a yes or no question stay as they are.
    """
    binary = {check.name for check in claim.checks if check.binary}
    values = {
        name: value if name in binary else {"values": [value["mean"]] * 2} for name, value in result["values"].items()
    }
    return judge(claim, {**result, "values": values})


def checks_that(judgement: Judgement, verdict: str) -> set[str]:
    """The names of the checks with a verdict."""
    return {row.check.name for row in judgement.rows if row.verdict == verdict}


def reproduce(claim_id: str, settings: Settings, out: Path, *, again: bool = False) -> tuple[Result, Judgement]:
    """Run a claim unless its result is stored, and judge it."""
    claim = get(claim_id)
    before = None if again else stored(out, claim, settings.scale)
    result = reproduction.reproduce(claim, settings, out, before)
    return result, judge(claim, result)
