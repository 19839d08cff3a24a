"""The training runs of claims: each is trained once, kept under the fingerprint of its settings, and shared.

    results/runs/<run>/   the files kept of a run that ended: result.json, config.toml, metrics.jsonl
    runs/claims/<run>/    a run in progress, with its checkpoints

A claim asks for runs by name and configuration. A run that is not kept and may not be trained is None, and the claim
leaves out the numbers that need it.

Kept runs are found by what they compute and not by the folder's name. A folder of an earlier release is named after
the method as that release wrote it. `nf` of release 0.1 is today's `nf:bias=false`. A claim that asks for
`nf:bias=false` finds that run. A claim that asks for `nf` also uses that run if no newer one exists; it is then stale.

This file imports nothing that trains.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, Literal

from normfree.methods.method_registry import parse_spec
from normfree.storage.provenance import RELEASE
from normfree.storage.writing import plain_name
from normfree.train.config import TrainConfig, folder_name
from normfree.train.run.run_folder import RunFolder
from normfree.train.setting_fields import read_toml
from normfree_papers.claims.canary import stale_probes
from normfree_papers.claims.seed_metrics import EndedRun

FreshnessState = Literal["fresh", "stale", "unknown", ""]
Progress = Callable[[int, int, str], None]
"""Called with the steps done, the number of steps, and the name of the next step."""
_OPEN: dict[str, Any] = {"precision": "auto", "channels_last": None, "compile": None, "graph": None}


@dataclass(frozen=True)
class KeptRun:
    """The folder of a kept run, and the method that a claim asked for; its files are read once."""

    path: Path
    asked_method: str = ""

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

    def trained(self) -> EndedRun:
        """The result and the metrics of a run that ended."""
        return EndedRun(self.result or {}, RunFolder(self.path).read_metrics())

    def is_of(self, method: str) -> bool:
        """Whether today's definition of a method made the run; otherwise an earlier definition did."""
        return _canonical(self.config.method) == _canonical(method)

    def asked_config(self) -> TrainConfig:
        """The configuration as it was requested, with its method in today's spelling.

        The stored configuration has the values that the run chose for open settings such as 'auto'. The folder's name
        has the fingerprint of the requested settings. So each set of open settings is tried until the fingerprint fits.
        """
        digits = re.search(r"-([0-9a-f]{12})(?:-[0-9.]+)?$", self.path.name)
        for is_open in product((True, False), repeat=len(_OPEN)) if digits else ():
            opened = {name: value for (name, value), left in zip(_OPEN.items(), is_open, strict=True) if left}
            asked = self.config.with_changes(**opened)
            if digits and asked.with_changes(method=self.written_method).fingerprint() == digits[1]:
                return asked
        return self.config

    def freshness(self, commits: Mapping[str, Any]) -> tuple[FreshnessState, str]:
        """Whether today's code would make this run, and the reason; `commits` has the canaries of earlier commits.

        A result of release 0.1 does not say which method was asked for: it is the one that the run's file names.
        """
        if self.result is None:
            return "unknown", "no longer kept"
        wanted = self.asked_method or self.written_method
        if not self.is_of(wanted):
            return "stale", f"made with {self.config.method}, not {wanted}"
        probes = stale_probes(self.config, self.result.get("canary") or commits.get(self.result["commit"], "unknown"))
        if probes is None:
            return "unknown", "without reference values to compare"
        if probes:
            return "stale", f"for which today's code computes other reference values ({', '.join(probes)})"
        return "fresh", ""


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


class StoppedError(Exception):
    """A signal ended the training; the runs so far are kept."""

    def __init__(self, signal: int) -> None:
        super().__init__(f"stopped by signal {signal}")
        self.signal = signal


class RunCache:
    """Finds training runs in a folder, and trains those that are missing.

    Args:
        kept: Folder of the runs that ended.
        work: Folder of the runs in progress.
        device: Where to train.
        data: Folder of the data sets.
        jobs: Number of runs at a time on this machine; None lets a cluster decide.
        on: Where to train; `resources` are those of each run on a cluster. See `choose_executor`.
        only: Train only the runs with these names; any other string selects all names that contain it. An
            empty sequence trains nothing.
        progress: Called with the runs done, the number of runs, and a status text.

    Attributes:
        asked: The configurations of all runs that were asked for, by name.
        missing: Those that are neither kept nor were trained.
        records: Folder and method of the others, as a result stores them.
    """

    def __init__(
        self,
        kept: Path,
        work: Path,
        *,
        device: str = "cpu",
        data: Path | None = None,
        jobs: int | None = 1,
        on: str = "local",
        resources: Mapping[str, float | None] | None = None,
        only: Sequence[str] | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.kept, self.work = kept, work
        self._place = {"device": device, **({} if data is None else {"data_dir": str(data)})}
        self._engine: dict[str, Any] = {"on": on, "jobs": jobs, "device": device, **(resources or {})}
        self._only, self._progress = only, progress
        self.asked: dict[str, TrainConfig] = {}
        self.missing: dict[str, TrainConfig] = {}
        self.records: dict[str, dict[str, str]] = {}
        self._index = RunIndex(kept)

    def __call__(self, wanted: Mapping[str, TrainConfig]) -> dict[str, EndedRun | None]:
        """Return the runs by name, after training those that are missing and may be trained.

        A run by an earlier definition of its method is missing if it may be trained; otherwise it is used.

        Raises:
            StoppedError: after SIGINT or SIGTERM; the same call continues.
            ValueError: for a run that cannot be trained, and a name that another run has.
        """
        for name, config in wanted.items():
            if self.asked.get(name, config) != config:
                raise ValueError(f"expected one run of the name {name!r}, got two that differ; rename one")
        self.asked |= wanted
        found = {name: self._index.find(config) for name, config in wanted.items()}
        chosen = wanted if self._only is None else _chosen(wanted, self._only)
        absent = {name: wanted[name] for name in chosen if _is_absent(found[name], wanted[name])}
        if absent:
            self._train(absent)
            self._index = RunIndex(self.kept)
            found |= {name: self._index.find(config) for name, config in absent.items()}
        for name, run in found.items():
            if run is None:
                self.missing[name] = wanted[name]
            else:
                self.records[name] = {"folder": run.path.name, "method": wanted[name].method}
        return {name: None if run is None else run.trained() for name, run in found.items()}

    @property
    def trains(self) -> bool:
        """Whether any run may be trained."""
        return self._only is None or bool(self._only)

    def _train(self, wanted: Mapping[str, TrainConfig]) -> None:
        from normfree.comparison.run_executor import choose_executor  # reading stored runs does not load the trainer
        from normfree_papers.claims.run_training import train_and_keep

        here = {name: config.with_changes(**self._place) for name, config in wanted.items()}
        report = self._progress or (lambda done, total, what: None)
        work = self.work if self._engine["on"] == "local" else self.work.absolute()
        executor = choose_executor(**self._engine, shared=work)
        signal = train_and_keep(here, work, self._index.new_folder, executor=executor, report=report)
        if signal is not None:
            raise StoppedError(signal)


def kept_runs(kept: Path, result: Mapping[str, Any]) -> dict[str, KeptRun]:
    """The training runs of a result that were made, by name; the record of a missing run has no folder.

    >>> list(kept_runs(Path(), {"runs": {"fixup": {"folder": "resnet110-fixup"}, "he_in": {"gpu_seconds": 60}}}))
    ['fixup']
    """
    runs = result.get("runs", {}).items()
    return {name: KeptRun(kept / run["folder"], run.get("method", "")) for name, run in runs if "folder" in run}


@dataclass(frozen=True)
class Freshness:
    """Whether runs are stale, with the reasons; the state is empty without runs."""

    state: FreshnessState = ""
    reasons: tuple[str, ...] = ()


def freshness_of(runs: Iterable[KeptRun], out: Path) -> Freshness:
    """The freshness of the runs of a result; `out` is the folder of the results, with canaries.json."""
    path = out / "canaries.json"
    commits = json.loads(path.read_text(encoding="utf-8"))["commits"] if path.exists() else {}
    made = [run.freshness(commits) for run in runs]
    states = {state for state, _ in made}
    worst: FreshnessState = next((state for state in ("stale", "unknown", "fresh") if state in states), "")
    counted = sorted(Counter(made).items(), key=lambda item: (item[0][0], -item[1]))
    reasons = (f"{count} of {len(made)} runs {reason}" for (_, reason), count in counted if reason)
    return Freshness(worst, tuple(reasons))


def missing_runs(result: Mapping[str, Any]) -> dict[str, float]:
    """The training runs of a result that were not made, by name, with the seconds that each takes on a GPU."""
    runs = result.get("runs", {}).items()
    return {name: float(run.get("gpu_seconds", math.nan)) for name, run in runs if "folder" not in run}


def _canonical(method: str) -> str:
    """A spelling of a method that does not depend on the order of its options; as it is, if it is not registered."""
    try:
        name, options = parse_spec(method)
    except ValueError:
        return method
    return f"{name} {options}"


def _key(config: TrainConfig) -> str:
    return folder_name(config.with_changes(method=_canonical(config.method)))


def _is_absent(run: KeptRun | None, config: TrainConfig) -> bool:
    return run is None or not run.is_of(config.method)


def _chosen(names: Iterable[str], only: Sequence[str]) -> list[str]:
    """The selected names: a text that is a name selects that run alone, another one all names that contain it.

    >>> _chosen(["fixup, seed 1", "fixup, seed 10", "he, seed 1"], ["fixup, seed 1"])
    ['fixup, seed 1']
    >>> _chosen(["fixup, seed 1", "fixup, seed 10", "he, seed 1"], ["fixup"])
    ['fixup, seed 1', 'fixup, seed 10']
    """
    known = list(names)
    return [name for name in known if any(part == name or (part not in known and part in name) for part in only)]
