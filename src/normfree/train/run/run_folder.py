"""The folder of a run; one process at a time may write into it.

config.toml      the effective configuration            metrics.jsonl    one JSON object per line, each with a 'step'
checkpoint-…/    see `normfree.train.run.checkpoint`    result.json      status, numbers, commit, versions, hardware
lock             held while a process trains here        signal.jsonl     the signal over depth, if it is measured
progress.json    how far a run is that has not ended     page.html        the run on one page; curves.png, its picture
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any, Literal, cast, get_args

from torch import Tensor

from normfree.methods.method_registry import FIRST_RELEASE
from normfree.plan import ResidualPlan
from normfree.storage.folder_lock import FolderLock
from normfree.storage.provenance import origin, without_folders
from normfree.storage.reading import Checksum, has_checksum, list_checksums, read_limited
from normfree.storage.writing import (
    TEMPORARY,
    atomic_path,
    explain_os_errors,
    to_json_values,
    write_sealed_json,
    write_sealed_text,
    write_text,
)
from normfree.train.config import TrainConfig
from normfree.train.run import checkpoint
from normfree.train.run.run_records import (
    CONFIG,
    LOCK,
    METRICS,
    PAGE,
    PROGRESS,
    RESULT,
    SIGNAL,
    RunStatus,
    check_config,
    read_lines,
    read_result,
)

_log = logging.getLogger("normfree.train")

PICTURE = "curves.png"
_REPLACED = (METRICS, PICTURE, PAGE, PROGRESS, SIGNAL, "plan.json", "translations.txt", "vocabulary.model", CONFIG)
# Names that `atomic_path` gives to files that are not finished.
_UNFINISHED = re.compile(re.escape(TEMPORARY) + r"(?:\w{8}|[0-9a-f]{16})\.(?:toml|jsonl?|png|html|txt|model)")


class RunFolder:
    """The folder of a run. Any process may read it; one process at a time may `hold` it and write.

        run = RunFolder("runs/one")
        with run.hold(resume=True):
            tensors, state = run.resume() or fresh()
            run.append({"step": 1, "train_loss": 2.3})
            checkpoint.save(run.path, tensors, {"step": 1})
            run.write_result({"status": "finished"})

    Args:
        path: The folder; `hold` makes it.

    Attributes:
        config_path: The path of the configuration.
        metrics_path: The path of the metrics.
        result_path: The path of the result.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config_path, self.metrics_path = self.path / CONFIG, self.path / METRICS
        self.result_path = self.path / RESULT
        self._metrics: FileIO | None = None
        self._lock: FolderLock | None = None

    @property
    def exists(self) -> bool:
        """Whether the folder holds a run, even one that has just begun."""
        files = (self.config_path, self.metrics_path, self.result_path)
        return any(file.exists() for file in files) or checkpoint.latest(self.path) is not None

    @property
    def has_begun(self) -> bool:
        """Whether the run in the folder has a checkpoint, a result or metrics, which replacing it would lose."""
        files = (self.metrics_path, self.result_path)
        return any(file.exists() and file.stat().st_size for file in files) or self.saved_step is not None

    @property
    def saved_step(self) -> int | None:
        """The step of the newest checkpoint, by its name; None if there is none."""
        newest = checkpoint.latest(self.path)
        return None if newest is None else checkpoint.step_of(newest)

    @property
    def status(self) -> RunStatus | Literal["unfinished"] | None:
        """How the run last ended; 'unfinished' while training or after a kill, None if there is no run.

        A run that is resumed keeps its status until it ends again.

        Raises:
            ValueError: If result.json is damaged.
        """
        if not self.result_path.exists():
            return "unfinished" if self.exists else None
        return cast(RunStatus, self.read_result()["status"])

    # Writing: every path begins with `write_path`

    @property
    def write_path(self) -> Path:
        """The path for writing. While the folder is held, the path leads to it even if the folder is moved."""
        return self.path if self._lock is None else self._lock.write_path

    @contextmanager
    def hold(self, *, resume: bool = False, overwrite: bool = False) -> Iterator[RunFolder]:
        """Create or open the folder, and lock it until the `with` block or the process ends.

        Args:
            resume: Whether the folder must hold a run. If not, it may hold only a run that never took a step.
            overwrite: Whether it may hold a run, which `clear` removes.

        Raises:
            ValueError: If another process has locked the folder, if it holds a run that is neither resumed nor
                overwritten, if it holds none to resume, or if a run would replace a file of the user.
            OSError: If the folder cannot be made or written.
        """
        if resume:
            self._require_run()
        else:
            self._require_own_files()
        self._lock = FolderLock(self.path)
        with self._lock.hold(make=not resume):
            if resume:
                self._require_run()  # it may have been moved just before
            if not resume:
                self.require_new(overwrite=overwrite)
            checkpoint.remove_unfinished(self.write_path)
            for path in self.write_path.glob(f"{TEMPORARY}*"):  # of a killed process
                if _UNFINISHED.fullmatch(path.name) and path.is_file() and not path.is_symlink():
                    path.unlink(missing_ok=True)
            try:
                yield self
            finally:
                self._close()

    def require_new(self, *, overwrite: bool) -> None:
        """Raise `ValueError` if the folder holds a run that has begun, unless it is to be overwritten."""
        if self.has_begun and not overwrite:
            raise ValueError(
                f"expected a folder without a run, but '{self.path}' holds one ({self.status}); continue it with "
                f"normfree train --resume {self.path} or resume=True, replace it with --overwrite or overwrite=True"
            )

    def _require_run(self) -> None:
        if not self.exists:
            raise ValueError(f"expected a run to resume in '{self.path}', found none; start it without --resume")

    def _require_own_files(self) -> None:
        """Raise `ValueError` if no run of normfree is in the folder, but other files with names that a run replaces."""
        if checkpoint.latest(self.path) is not None:
            return
        names = (*_REPLACED, RESULT, "tensorboard")
        checkpoints = (path for path in self.path.glob("checkpoint-*") if checkpoint.step_of(path) >= 0)
        found = [path for path in (*(self.path / name for name in names), *checkpoints) if os.path.lexists(path)]
        if not found or has_checksum(self.config_path):
            return
        if (self.path / LOCK).is_file():  # it ended before its first step, or is of an earlier release
            with suppress(ValueError, OSError):
                if not self.config_path.exists() or self.read_config():
                    return
        raise ValueError(
            f"expected a folder of its own for the run, but '{found[0]}' is not of a run and would be replaced; "
            "move it, or choose another folder"
        )

    def require_held(self) -> None:
        """Raise `ValueError` if the folder was moved, removed or replaced since `hold`; every write asks first."""
        if self._lock is not None:
            self._lock.require_held()

    def open_writer(self, **options: Any) -> checkpoint.Writer:
        """Return a writer of checkpoints for this folder, while it is held; the options are those of `save`."""
        assert self._lock is not None
        return checkpoint.Writer(self._lock.write_path, self._lock.require_held, **options)

    def clear(self) -> None:
        """Remove the files of a run, its configuration last; files of other names stay."""
        self.require_held()
        self._close()
        with explain_os_errors("the run's folder", self.path):
            (self.write_path / RESULT).unlink(missing_ok=True)
            for saved in checkpoint.newest_first(self.write_path):
                checkpoint.remove(saved)
            shutil.rmtree(self.write_path / "tensorboard", ignore_errors=True)
            for name in _REPLACED:
                (self.write_path / name).unlink(missing_ok=True)

    def remove_result(self) -> None:
        """Remove the result of a run that is trained further."""
        self.require_held()
        (self.write_path / RESULT).unlink(missing_ok=True)

    def write_config(self, text: str, plan: ResidualPlan | None = None, *, source: str = "") -> None:
        """Write the configuration as TOML, and the plan of a model that was converted from `source`."""
        self.require_held()
        with explain_os_errors("the configuration", self.config_path):
            write_sealed_text(self.write_path / CONFIG, text)
        if plan is not None and plan.changes is not None:
            from normfree.conversion.saving import PLAN, describe  # imported here because few models are converted

            with explain_os_errors("the plan", self.path / PLAN):
                write_sealed_json(self.write_path / PLAN, describe(plan, source=source))

    def read_config(self) -> TrainConfig:
        """Read the configuration; one that names no release is of the first.

        Raises:
            ValueError: If it was altered after it was written, or is damaged.
        """
        check_config(self.config_path)
        return TrainConfig.from_toml(self.config_path, written_by=FIRST_RELEASE)

    def require_resumable(self, config: TrainConfig, free: Collection[str]) -> None:
        """Raise `ValueError` if the run diverged, or has another configuration; settings in `free` may differ."""
        if self.config_path.exists():
            before = self.read_config()
            config.require_same(before, free, f"the run in '{self.path}'")
            if before.kernels not in ("auto", config.kernels):
                change = f"began with kernels={before.kernels} and continues with kernels={config.kernels}"
                _log.warning("kernels: the run in '%s' %s, so it does not continue bit for bit", self.path, change)
        if self.status == "diverged":
            raise ValueError(
                f"expected a run that can be resumed, but the one in '{self.path}' diverged; "
                "start another one with a lower learning rate, or another method"
            )

    def resume(
        self,
        config: TrainConfig | None = None,
        free: Collection[str] = (),
        steps_per_epoch: int = 1,
        accept: Callable[[dict[str, Any]], None] = lambda state: None,
    ) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Read the newest checkpoint that is intact, and remove the metrics of later steps.

        Args:
            config: The configuration to continue with; None if any fits.
            free: The settings that may differ from those of the run.
            steps_per_epoch: The number of steps per epoch.
            accept: Called with the plain state before a file is changed; it raises if the state does not fit.

        Returns the tensors and the plain state; None if there is no checkpoint yet.

        Raises:
            ValueError: If the run diverged or has another configuration, or if all checkpoints, or the metrics up to
                this one, are damaged.
        """
        self.require_held()
        if config is not None:
            self.require_resumable(config, free)
        found = None
        if checkpoint.latest(self.path) is not None:
            found = checkpoint.load_intact(self.path)
            accept(found[1])  # first, because other data has other epochs
        if found is not None and config is not None and "config" in found[1]:  # config.toml may have been edited since
            before = TrainConfig.from_toml_text(found[1]["config"], str(self.path))
            config.require_same(before, free, f"the checkpoint in '{self.path}'")
            _require_epochs(before, config, found[1]["step"], steps_per_epoch)
        self.require_held()  # the folder that was read is the one that was locked
        self.cut_metrics(found[1]["step"] if found else -1)
        return found

    def append(self, record: Mapping[str, Any]) -> None:
        """Append numbers by name, with the step under 'step', to the metrics; the operating system has them at the end.

        Raises:
            ValueError: If there is no step.
            OSError: If it cannot be written.
        """
        if not isinstance(record.get("step"), int):
            raise ValueError(f"expected the number of the step under 'step', got {record.get('step')!r}; pass an int")
        self.require_held()
        line = json.dumps(to_json_values(record), ensure_ascii=False, allow_nan=False).encode() + b"\n"
        with explain_os_errors("the metrics", self.metrics_path):
            if self._metrics is None:
                self._metrics = FileIO(self.write_path / METRICS, "a")
            end = self._metrics.seek(0, 2)
            try:
                while line:  # a nearly full disk takes a part at first
                    line = line[self._metrics.write(line) :]
            except OSError:
                with suppress(OSError):
                    self._metrics.truncate(end)
                raise

    def cut_metrics(self, step: int) -> None:
        """Remove the metrics of later steps and an incomplete last line, so that a resumed run logs no step twice."""
        if not self.metrics_path.exists():
            return
        self._close()  # its file is about to be replaced
        kept = [raw for raw, record in read_lines(self.metrics_path) if record["step"] <= step]
        if (listed := self._listed_metrics()) is not None and sum(len(raw) + 1 for raw in kept) < listed.size:
            (self.write_path / RESULT).unlink()  # it lists metrics that are now cut
        place = self.write_path / METRICS
        with explain_os_errors("the metrics", self.metrics_path), atomic_path(place) as temporary:
            temporary.write_bytes(b"".join(raw + b"\n" for raw in kept))

    def write_result(self, result: Mapping[str, Any], device: str = "cpu") -> dict[str, Any]:
        """Write result.json with commit, versions, hardware and date, and return its content.

        Absolute paths are cut to their last part.

        Args:
            result: Plain data with a status under 'status'.
            device: The device that the run was trained on.

        Raises:
            ValueError: If there is no status.
            OSError: If it cannot be written; an earlier result stays intact.
        """
        if result.get("status") not in get_args(RunStatus):
            known = ", ".join(get_args(RunStatus))
            raise ValueError(f"expected a status, one of {known}, got {result.get('status')!r}; set it")
        self.require_held()
        with explain_os_errors("the result", self.result_path):
            files = list_checksums({path.name: path for path in (self.metrics_path,) if path.exists()})
            written = {**without_folders({**result, **origin(device)}), "files": files}
            write_sealed_json(self.write_path / RESULT, written)
        return written

    def write_picture(self, draw: Callable[[Path], object]) -> None:
        """Let a function draw the picture of the run into a file."""
        self.require_held()
        with explain_os_errors("the picture", self.path / PICTURE):
            draw(self.write_path / PICTURE)

    def write_translations(self, lines: Iterable[str]) -> None:
        """Write the translations of the test sentences, one per line."""
        self.require_held()
        path = self.write_path / "translations.txt"
        with explain_os_errors("the translations", path):
            write_text(path, "".join(f"{line}\n" for line in lines))

    def _close(self) -> None:
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None

    # Reading

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return the metrics so far, with NaN and infinities as floats and without an incomplete last line.

        Raises:
            ValueError: If a line before the end is damaged.
        """
        if not self.metrics_path.exists():
            return []
        if (listed := self._listed_metrics()) is not None:  # a resumed run has appended more
            start = read_limited(self.metrics_path)[: listed.size]
            listed.check(start, str(self.metrics_path), "restore it, or start the run again")
        return [record for _, record in read_lines(self.metrics_path)]

    def _listed_metrics(self) -> Checksum | None:
        """Return the checksum of the metrics in result.json; None without a result, or of an earlier release."""
        files = self.read_result().get("files") if self.result_path.exists() else None
        return Checksum.from_json(files[METRICS]) if isinstance(files, dict) and METRICS in files else None

    def read_result(self) -> dict[str, Any]:
        """Return the content of result.json. Raises `ValueError` if there is none, or it is damaged."""
        return read_result(self.result_path)


def _require_epochs(before: TrainConfig, config: TrainConfig, step: int, steps_per_epoch: int) -> None:
    """Raise `ValueError` for fewer epochs than the run has trained; the log says that a schedule has changed."""
    done = -(-step // steps_per_epoch)
    if config.epochs < done:
        raise ValueError(
            f"expected at least the {done} epochs that the run has trained, got {config.epochs}; ask for more"
        )
    if config.epochs != before.epochs:
        change = f"the run began with epochs={before.epochs} and continues with epochs={config.epochs}"
        _log.warning("epochs: %s; its rates follow the new schedule from step %d on", change, step)
