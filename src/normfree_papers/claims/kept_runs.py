"""The kept training runs: read from their folders, and found by what they compute and not by the folder's name.

A folder of an earlier release is named after the method as that release wrote it. `nf` of release 0.1 is today's
`nf:bias=false`. A claim that asks for `nf:bias=false` finds that run. A claim that asks for `nf` gets it too, if there
is no run of today, and is then stale.

This file imports nothing that trains.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from normfree.methods.method import parse_spec
from normfree.provenance import RELEASE
from normfree.train.config import TrainConfig, folder_name, plain_name
from normfree.train.run.run_folder import RunFolder
from normfree.train.settings import read_toml

_OPEN: dict[str, Any] = {"precision": "auto", "channels_last": None, "compile": None, "graph": None}


@dataclass(frozen=True)
class Trained:
    """A run that ended: its result, and one record per epoch."""

    result: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]

    @property
    def diverged(self) -> bool:
        """Whether its loss diverged; then it was not tested."""
        return bool(self.result["status"] == "diverged")

    def accuracy(self, chance: float) -> float:
        """The share of test images that it classifies correctly; `chance` for a diverged run."""
        return chance if self.diverged else float(self.result["test"]["accuracy"])


@dataclass(frozen=True)
class KeptRun:
    """The folder of a kept run; its files are read once."""

    path: Path

    @cached_property
    def result(self) -> dict[str, Any] | None:
        """The result; None if the run has not ended, or is no longer kept."""
        run = RunFolder(self.path)
        if not run.config_path.exists() or not run.result_path.exists():
            return None
        result = run.read_result()
        return None if result["status"] == "interrupted" else result

    @cached_property
    def config(self) -> TrainConfig:
        """The configuration, with its method in today's spelling."""
        return RunFolder(self.path).read_config()

    @cached_property
    def written_method(self) -> str:
        """The method as the release that made the run spelled it."""
        return str(read_toml(RunFolder(self.path).config_path)["method"])

    def trained(self) -> Trained:
        """The result and the metrics of a run that ended."""
        return Trained(self.result or {}, RunFolder(self.path).read_metrics())

    def is_of(self, method: str) -> bool:
        """Whether today's definition of a method made the run; otherwise an earlier definition did."""
        return _canonical(self.config.method) == _canonical(method)

    def asked_config(self) -> TrainConfig:
        """The configuration that the run was asked for, with its method in today's spelling.

        The kept configuration says how 'auto' and other open settings came out. The fingerprint in the folder's name
        is that of the settings as asked for, and tells which were open.
        """
        digits = re.search(r"-([0-9a-f]{12})(?:-[0-9.]+)?$", self.path.name)
        for is_open in product((True, False), repeat=len(_OPEN)) if digits else ():
            opened = {name: value for (name, value), left in zip(_OPEN.items(), is_open, strict=True) if left}
            asked = self.config.with_changes(**opened)
            if digits and asked.with_changes(method=self.written_method).fingerprint() == digits[1]:
                return asked
        return self.config


@dataclass(frozen=True)
class RunIndex:
    """The runs that ended in a folder."""

    kept: Path

    def find(self, config: TrainConfig) -> KeptRun | None:
        """The run with this configuration; one by an earlier definition of its method, if there is no other."""
        named = KeptRun(self.kept / folder_name(config))
        if named.result is not None and named.is_of(config.method):
            return named
        for run in self._similar(config):
            if _key(run.asked_config()) == _key(config) and run.result is not None:
                return run
        return named if named.result is not None else None

    def new_folder(self, config: TrainConfig) -> Path:
        """The folder for a run of today; its plain name may be taken by an earlier definition."""
        name, found = folder_name(config), self.find(config)
        taken = found is not None and not found.is_of(config.method)
        return self.kept / (f"{name}-{RELEASE}" if taken else name)

    def _similar(self, config: TrainConfig) -> list[KeptRun]:
        """The runs of the same model, method, rate and seed, whatever their other settings; the newest name first."""
        start = plain_name(f"{config.model}-{config.method.partition(':')[0]}")
        end = f"-lr{config.lr:g}-seed{config.seed}-"
        names = [name for name in self._names if name.startswith(start) and end in name]
        return [KeptRun(self.kept / name) for name in names if (self.kept / name / "config.toml").exists()]

    @cached_property
    def _names(self) -> list[str]:
        return sorted((path.name for path in self.kept.iterdir()), reverse=True) if self.kept.is_dir() else []


def _canonical(method: str) -> str:
    """A spelling of a method that does not depend on the order of its options; as it is, if it is not registered."""
    try:
        name, options = parse_spec(method)
    except ValueError:
        return method
    return f"{name} {options}"


def _key(config: TrainConfig) -> str:
    return folder_name(config.with_changes(method=_canonical(config.method)))
