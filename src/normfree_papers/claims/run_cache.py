"""The training runs of claims: each is trained once, kept under the fingerprint of its settings, and shared.

    results/runs/<run>/   the files kept of a run that ended: result.json, config.toml, metrics.jsonl
    runs/claims/<run>/    a run in progress, with its checkpoints

A claim asks for runs by name and configuration. A run that is not kept and may not be trained is None, and the claim
leaves out the numbers that need it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from normfree.train.config import TrainConfig
from normfree_papers.claims.kept_runs import KeptRun, RunIndex, Trained

Progress = Callable[[int, int, str], None]


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
        from normfree_papers.claims.run_training import train_and_keep  # reading stored runs does not load the trainer

        here = {name: config.with_changes(**self._place) for name, config in wanted.items()}
        report = self._progress or (lambda done, total, what: None)
        signal = train_and_keep(here, self.work, self._index.new_folder, jobs=self._jobs, report=report)
        if signal is not None:
            raise StoppedError(signal)


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
