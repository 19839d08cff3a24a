"""The training runs of claims: each is trained once, kept under the fingerprint of its settings, and shared.

    results/runs/<run>/   the files kept of a run that ended: result.json, config.toml, metrics.jsonl
    runs/claims/<run>/    a run in progress, with its checkpoints

A claim asks for runs by name and configuration. A run that is not kept and may not be trained is None, and the claim
leaves out the numbers that need it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from normfree.comparison.process_pool import Reports, summarize_reports
from normfree.comparison.sweep import RunTask, folder_name, train_runs
from normfree.files import TEMPORARY, atomic_path, explain_os_errors, write_json
from normfree.models import build
from normfree.models.foreign import is_foreign
from normfree.train import RunFolder, TrainConfig
from normfree.train.data import is_text
from normfree_papers.claims.run_index import RunIndex, is_earlier

Progress = Callable[[int, int, str], None]

# Measured on one H200: operations per second of a wide network, seconds per image and layer of a narrow one, and
# seconds to set up.
_FLOPS, _NARROW, _SET_UP = 4e14, 0.5e-6, 40.0
_IMAGES = {"fashion14": 6_000, "mnist": 60_000}  # training images; other data sets count as CIFAR-10
_CIFAR_IMAGES = 50_000
_TOKENS = {"multi30k": 4.3e5, "europarl": 6.0e6}  # target tokens for training, by the first word of the folder's name
_TOKEN_SPEED = 3e5  # per second, of a Transformer of 6 + 6 layers; assumed
_DEEP, _STEP = 160, 18  # deeper networks are not built for an estimate: 10,000 layers take half a minute


class StoppedError(Exception):
    """A signal ended the training; the runs so far are kept."""

    def __init__(self, signal: int) -> None:
        super().__init__(f"stopped by signal {signal}")
        self.signal = signal


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


class RunCache:
    """Finds training runs in a folder, and trains those that are missing.

    Args:
        kept: Folder of the runs that ended.
        work: Folder of the runs in progress.
        device: Where to train.
        data: Folder of the data sets.
        jobs: Number of runs at a time.
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
        jobs: int = 1,
        only: Sequence[str] | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.kept, self.work = kept, work
        self._place = {"device": device, **({} if data is None else {"data_dir": str(data)})}
        self._jobs, self._only, self._progress = jobs, only, progress
        self.asked: dict[str, TrainConfig] = {}
        self.missing: dict[str, TrainConfig] = {}
        self.records: dict[str, dict[str, str]] = {}
        self._index = RunIndex(kept)

    def __call__(self, wanted: Mapping[str, TrainConfig]) -> dict[str, Trained | None]:
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
        folders = {name: self._index.find(config) for name, config in wanted.items()}
        chosen = wanted if self._only is None else _chosen(wanted, self._only)
        absent = {name: wanted[name] for name in chosen if _is_absent(folders[name], wanted[name])}
        if absent:
            self._train(absent)
            self._index = RunIndex(self.kept)
            folders |= {name: self._index.find(config) for name, config in absent.items()}
        for name, folder in folders.items():
            if folder is None:
                self.missing[name] = wanted[name]
            else:
                self.records[name] = {"folder": folder.name, "method": wanted[name].method}
        return {name: None if folder is None else _read(folder) for name, folder in folders.items()}

    @property
    def trains(self) -> bool:
        """Whether any run may be trained."""
        return self._only is None or bool(self._only)

    def _train(self, wanted: Mapping[str, TrainConfig]) -> None:
        # Two names may ask for the same run.
        tasks = {folder_name(config): config for config in wanted.values()}
        names = {folder_name(config): name for name, config in wanted.items()}
        left = [RunTask(config.with_changes(**self._place), self.work / folder) for folder, config in tasks.items()]
        done = 0

        def show(reports: Reports) -> None:
            self._report(done, len(left), summarize_reports(reports, [names[task.folder.name] for task in left]))

        def keep(task: RunTask, _: Mapping[str, Any]) -> None:
            nonlocal done
            self._keep(task.folder, self._index.new_folder(task.config))
            done += 1
            self._report(done, len(left), names[task.folder.name])

        self._report(0, len(left), "")
        signal = train_runs(left, keep, jobs=self._jobs, on_report=show)
        if signal is not None:
            raise StoppedError(signal)

    def _keep(self, folder: Path, kept: Path) -> None:
        """Copy result, config and metrics (they contain no local paths); result.json comes last and marks the end."""
        run, target = RunFolder(folder), RunFolder(kept)
        here = {"data_dir": TrainConfig.data_dir}
        config = TrainConfig.from_toml(run.config_path).with_changes(**here)
        with explain_os_errors("the run", target.path):
            target.path.mkdir(parents=True, exist_ok=True)
            for left in target.path.glob(f"{TEMPORARY}*"):  # of a process that was killed in here
                left.unlink(missing_ok=True)
            with atomic_path(target.config_path) as temporary:
                temporary.write_text(config.to_toml(), encoding="utf-8")
            with atomic_path(target.metrics_path) as temporary:  # empty if a run diverged in its first epoch
                temporary.write_bytes(run.metrics_path.read_bytes() if run.metrics_path.exists() else b"")
            result = run.read_result()
            write_json(target.result_path, {**result, "config": {**result["config"], **here}})

    def _report(self, done: int, total: int, what: str) -> None:
        if self._progress is not None:
            self._progress(done, total, what)


def _is_absent(folder: Path | None, config: TrainConfig) -> bool:
    return folder is None or is_earlier(folder, config)


def _read(folder: Path) -> Trained:
    run = RunFolder(folder)
    return Trained(run.read_result(), run.read_metrics())


def _chosen(names: Iterable[str], only: Sequence[str]) -> list[str]:
    """The selected names: a text that is a name selects that run alone, another one all names that contain it.

    >>> _chosen(["fixup, seed 1", "fixup, seed 10", "he, seed 1"], ["fixup, seed 1"])
    ['fixup, seed 1']
    >>> _chosen(["fixup, seed 1", "fixup, seed 10", "he, seed 1"], ["fixup"])
    ['fixup, seed 1', 'fixup, seed 10']
    """
    known = list(names)
    return [name for name in known if any(part == name or (part not in known and part in name) for part in only)]


# Estimates


def gpu_seconds(config: TrainConfig) -> float:
    """About how long a run takes on one H200, for planning; a third-party model is not built and counts as small."""
    if is_text(config.data):
        return 2 * _SET_UP + config.epochs * _TOKENS.get(Path(config.data).name.partition("-")[0], 0.0) / _TOKEN_SPEED
    layers, operations = (0.0, 0.0) if is_foreign(config.model) else _size(config.model)
    images = _IMAGES.get(config.data, _CIFAR_IMAGES) * (1 - config.validation)
    return _SET_UP + config.epochs * images * max(layers * _NARROW, 3 * operations / _FLOPS)


@cache
def _size(model: str) -> tuple[float, float]:
    """Weight layers of a model, and operations of a forward pass of one image in the shape of CIFAR-10.

    Both are linear in the depth, so that those of a deep network follow from two others of its family.
    """
    named = re.fullmatch(r"(resnet|wrn-|mlp-|resmlp-|cnn-)(\d+)(.*)", model)
    if named is not None and int(named[2]) > _DEEP:
        depth = int(named[2])
        steps = (depth - 60) // _STEP
        (a, b), (c, d) = (_size(f"{named[1]}{depth - n * _STEP}{named[3]}") for n in (steps, steps - 1))
        return a + steps * (c - a), b + steps * (d - b)
    x = torch.empty(2, 3, 32, 32, device="meta")
    network = build(model, "he_in", example=x, device="meta")
    with FlopCounterMode(display=False) as counter:
        network(x)
    return sum(1 for p in network.parameters() if p.dim() > 1), counter.get_total_flops() / 2
