"""The training runs that claims stand on: each is made once, kept by what it is, and shared by all claims.

    results/runs/<run>/   what is kept of a run that ended: result.json, config.toml, metrics.jsonl
    runs/claims/<run>/    a run under way, with its checkpoints

A claim asks for runs by name and configuration, and gets what is known of each. Where nothing may be trained, or only a
part, a run that is not kept comes back as None, and the claim leaves out the numbers that need it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normfree.experiments.runs import Task, ended, folder_name, train
from normfree.experiments.workers import run_tasks
from normfree.files import replacing
from normfree.train import RunFolder, TrainConfig
from normfree.train.signals import Stop

Progress = Callable[[int, int, str], None]


class StoppedError(Exception):
    """A signal ended the training; what was done is kept."""

    def __init__(self, signal: int) -> None:
        super().__init__(f"stopped by signal {signal}")
        self.signal = signal


@dataclass(frozen=True)
class Trained:
    """A run that ended: its result, and what it logged after every epoch."""

    result: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]

    @property
    def diverged(self) -> bool:
        """Whether its loss left all bounds; it was not tested then."""
        return bool(self.result["status"] == "diverged")

    def accuracy(self, chance: float) -> float:
        """The share of test images it gets right; a diverged run's is that of chance."""
        return chance if self.diverged else float(self.result["test"]["accuracy"])


class Trainings:
    """Trains what is asked for unless it is kept in `kept`; `asked` and `missing` tell what was, by name.

    With `only`, no run is trained but those whose name contains it; with an empty tuple, none.
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

    def __call__(self, wanted: Mapping[str, TrainConfig]) -> dict[str, Trained | None]:
        """What is known of each run, after training those that are not kept.

        Raises:
            StoppedError: after SIGINT or SIGTERM; the same call goes on from there.
            ValueError: for a run that cannot be trained.
        """
        self.asked |= wanted
        left = {
            name: config
            for name, config in wanted.items()
            if self._read(config) is None and (self._only is None or any(part in name for part in self._only))
        }
        self._train(left)
        found = {name: self._read(config) for name, config in wanted.items()}
        self.missing |= {name: wanted[name] for name, trained in found.items() if trained is None}
        return found

    def folder(self, config: TrainConfig) -> Path:
        """Where a run is kept."""
        return self.kept / folder_name(config)

    def _read(self, config: TrainConfig) -> Trained | None:
        result = ended(self.folder(config))
        return None if result is None else Trained(result, RunFolder(self.folder(config)).read_metrics())

    def _train(self, wanted: Mapping[str, TrainConfig]) -> None:
        # Two names may ask for the same run.
        tasks = {folder_name(config): config for config in wanted.values()}
        names = {folder_name(config): name for name, config in wanted.items()}
        left = [Task(config.with_changes(**self._place), self.work / folder) for folder, config in tasks.items()]
        done = 0
        self._tell(0, len(left), "")
        with Stop() as stop:
            for number, result in run_tasks(train, left, jobs=self._jobs, stop=stop):
                if result["status"] == "interrupted":
                    raise StoppedError(result["signal"])
                self._keep(left[number].folder)
                done += 1
                self._tell(done, len(left), names[left[number].folder.name])
            if stop.requested:
                raise StoppedError(stop.requested)

    def _keep(self, folder: Path) -> None:
        """Copy what is small; result.json comes last, since it says that the run has ended."""
        run, target = RunFolder(folder), RunFolder(self.kept / folder.name)
        target.path.mkdir(parents=True, exist_ok=True)
        config = TrainConfig.from_toml(run.config_path).with_changes(data_dir=TrainConfig.data_dir)  # names no folder
        with replacing(target.config_path) as temporary:
            temporary.write_text(config.to_toml(), encoding="utf-8")
        for source, copy in ((run.metrics_path, target.metrics_path), (run.result_path, target.result_path)):
            with replacing(copy) as temporary:
                shutil.copyfile(source, temporary)

    def _tell(self, done: int, total: int, what: str) -> None:
        if self._progress is not None and total:
            self._progress(done, total, what)
