"""The training runs that claims stand on: each is made once, kept by what it is, and shared by all claims.

    results/runs/<run>/   what is kept of a run that ended: result.json, config.toml, metrics.jsonl
    runs/claims/<run>/    a run under way, with its checkpoints

A claim asks for runs by name and configuration, and gets what is known of each. Where nothing may be trained, or only a
part, a run that is not kept comes back as None, and the claim leaves out the numbers that need it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normfree.comparison.process_pool import Reports, summarize_reports
from normfree.comparison.sweep import RunTask, ended_result, folder_name, train_runs
from normfree.files import TEMPORARY, explained, replacing, write_json
from normfree.train import RunFolder, TrainConfig

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

    With `only`, no run is trained but those of these names, or with one of these texts in their name where no run is
    called so; with an empty tuple, none.
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
            ValueError: for a run that cannot be trained, and a name that was given to another one.
        """
        for name, config in wanted.items():
            if self.asked.get(name, config) != config:
                raise ValueError(f"expected one run of the name {name!r}, got two that differ; rename one")
        self.asked |= wanted
        chosen = wanted if self._only is None else _chosen(wanted, self._only)
        self._train({name: wanted[name] for name in chosen if self._read(wanted[name]) is None})
        found = {name: self._read(config) for name, config in wanted.items()}
        self.missing |= {name: wanted[name] for name, trained in found.items() if trained is None}
        return found

    @property
    def trains(self) -> bool:
        """Whether any run may be trained."""
        return self._only is None or bool(self._only)

    def folder(self, config: TrainConfig) -> Path:
        """Where a run is kept."""
        return self.kept / folder_name(config)

    def _read(self, config: TrainConfig) -> Trained | None:
        result = ended_result(self.folder(config))
        return None if result is None else Trained(result, RunFolder(self.folder(config)).read_metrics())

    def _train(self, wanted: Mapping[str, TrainConfig]) -> None:
        # Two names may ask for the same run.
        tasks = {folder_name(config): config for config in wanted.values()}
        names = {folder_name(config): name for name, config in wanted.items()}
        left = [RunTask(config.with_changes(**self._place), self.work / folder) for folder, config in tasks.items()]
        done = 0

        def heard(said: Reports) -> None:
            self._tell(done, len(left), summarize_reports(said, [names[task.folder.name] for task in left]))

        def keep(task: RunTask, _: Mapping[str, Any]) -> None:
            nonlocal done
            self._keep(task.folder)
            done += 1
            self._tell(done, len(left), names[task.folder.name])

        self._tell(0, len(left), "")
        signal = train_runs(left, keep, jobs=self._jobs, on_report=heard)
        if signal is not None:
            raise StoppedError(signal)

    def _keep(self, folder: Path) -> None:
        """Copy what is small and names no folder; result.json comes last, since it says that the run has ended."""
        run, target = RunFolder(folder), RunFolder(self.kept / folder.name)
        here = {"data_dir": TrainConfig.data_dir}
        config = TrainConfig.from_toml(run.config_path).with_changes(**here)
        with explained("the run", target.path):
            target.path.mkdir(parents=True, exist_ok=True)
            for left in target.path.glob(f"{TEMPORARY}*"):  # of a process that was killed in here
                left.unlink(missing_ok=True)
            with replacing(target.config_path) as temporary:
                temporary.write_text(config.to_toml(), encoding="utf-8")
            with replacing(target.metrics_path) as temporary:  # empty where a run diverged in its first epoch
                temporary.write_bytes(run.metrics_path.read_bytes() if run.metrics_path.exists() else b"")
            result = run.read_result()
            write_json(target.result_path, {**result, "config": {**result["config"], **here}})

    def _tell(self, done: int, total: int, what: str) -> None:
        if self._progress is not None and total:
            self._progress(done, total, what)


def _chosen(names: Iterable[str], only: Sequence[str]) -> list[str]:
    """The names that are meant: one that is given whole means itself, and no other that contains it.

    >>> _chosen(["fixup, seed 1", "fixup, seed 10", "he, seed 1"], ["fixup, seed 1"])
    ['fixup, seed 1']
    >>> _chosen(["fixup, seed 1", "fixup, seed 10", "he, seed 1"], ["fixup"])
    ['fixup, seed 1', 'fixup, seed 10']
    """
    known = list(names)
    return [name for name in known if any(part == name or (part not in known and part in name) for part in only)]
