"""Small training runs on a CPU: a stand-in for `RunCache` that trains in this process, where an error can be planted.

A claim asks for its runs by name and configuration. The runs whose names match get the changes of a trial, such as a
shallower network or fewer images, and are trained in a folder that is deleted. All others are missing, so the claim
leaves out the numbers that need them.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from mutants import MUTANTS
from normfree.train import RunFolder, TrainConfig, fit
from normfree_papers.claims.seed_metrics import EndedRun

Changes = Mapping[str, Mapping[str, Any]]
"""New settings by a pattern of the runs' names; the first pattern that is found in a name counts."""

_HERE: dict[str, Any] = {"device": "cpu", "workers": 0, "checkpoint_minutes": 0.0, "keep_best": False}


class SmallRuns:
    """Trains the runs whose names match a pattern of `changes`; the others are missing.

    A configuration is trained once per planted error that changes it, also if several claims ask for it.
    """

    trains = True
    _trained: ClassVar[dict[tuple[str, TrainConfig], EndedRun]] = {}  # by planted error and configuration

    def __init__(self, changes: Changes, error: str) -> None:
        self._changes, self._error = changes, error
        self.asked: dict[str, TrainConfig] = {}
        self.records: dict[str, dict[str, str]] = {}
        self.missing: dict[str, TrainConfig] = {}

    def __call__(self, wanted: Mapping[str, TrainConfig]) -> dict[str, EndedRun | None]:
        self.asked |= wanted
        return {name: self._find(name, config) for name, config in wanted.items()}

    def _find(self, name: str, config: TrainConfig) -> EndedRun | None:
        changes = next((of for pattern, of in self._changes.items() if re.search(pattern, name)), None)
        if changes is None:
            self.missing[name] = config
            return None
        error = self._error if MUTANTS[self._error].changes(config.method) else "nothing"
        key = error, config.with_changes(**{**_HERE, **changes})
        if key not in self._trained:
            self._trained[key] = train(key[1])
        return self._trained[key]


def train(config: TrainConfig) -> EndedRun:
    """Train one run, and forget its folder."""
    with TemporaryDirectory() as temporary:
        folder = RunFolder(Path(temporary) / "run")
        fit(config, out=folder.path, picture=False)
        return EndedRun(folder.read_result(), tuple(folder.read_metrics()))
