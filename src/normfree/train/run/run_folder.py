"""The folder of a run; one process at a time may write into it.

config.toml      the effective configuration            metrics.jsonl    one JSON object per line, each with a 'step'
checkpoint-…/    see `normfree.train.run.checkpoint`    result.json      status, numbers, commit, versions, hardware
lock             held while a process trains here
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path, PurePath
from typing import Any, Literal, cast, get_args

from torch import Tensor

from normfree.checksums import (
    Checksum,
    check_sealed_text,
    list_checksums,
    parse_json,
    read_limited,
    read_sealed_json,
    write_sealed_json,
)
from normfree.files import TEMPORARY, atomic_path, explain_os_errors, from_json_values, to_json_values
from normfree.methods.history import FIRST_RELEASE
from normfree.provenance import commit, hardware, versions
from normfree.train.config import TrainConfig
from normfree.train.run import checkpoint
from normfree.train.run.lock import FolderLock, require_own_files

_log = logging.getLogger("normfree.train")

RunStatus = Literal["finished", "interrupted", "diverged"]
_PATH = re.compile(r"(?<![\w/.~])~?(?:/[\w.+@~-]+){2,}")  # an absolute path inside a text; a URL has two slashes
_NAMED = re.compile(r"[a-z]+:(?!//)")  # the kind before a folder of data, such as 'pairs:.data/multi30k'
_REPLACED = (checkpoint.METRICS, "curves.png", "plan.json", "translations.txt", "vocabulary.model", "config.toml")
# Names that `atomic_path` gives to files that are not finished.
_UNFINISHED = re.compile(re.escape(TEMPORARY) + r"(?:\w{8}|[0-9a-f]{16})\.(?:toml|jsonl?|png|txt|model)")


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
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._metrics: FileIO | None = None
        self._lock = FolderLock(self.path)

    @property
    def config_path(self) -> Path:
        """The path of the configuration."""
        return self.path / "config.toml"

    @property
    def metrics_path(self) -> Path:
        """The path of the metrics."""
        return self.path / checkpoint.METRICS

    @property
    def result_path(self) -> Path:
        """The path of the result."""
        return self.path / "result.json"

    @property
    def exists(self) -> bool:
        """Whether the folder holds a run, even one that has just begun."""
        files = (self.config_path, self.metrics_path, self.result_path)
        return any(file.exists() for file in files) or checkpoint.latest(self.path) is not None

    @property
    def has_begun(self) -> bool:
        """Whether the run in the folder has a checkpoint, a result or metrics; otherwise nothing is lost without it."""
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

    # Writing

    @contextmanager
    def hold(self, *, resume: bool = False, overwrite: bool = False) -> Iterator[RunFolder]:
        """Create or open the folder, and lock it until the `with` block or the process ends.

        Args:
            resume: Whether the folder has to hold a run already; otherwise it must not, unless that never took a step.
            overwrite: Whether it may hold a run, which `clear` removes.

        Yields:
            This folder.

        Raises:
            ValueError: If another process holds the folder, if there is a run and neither `resume` nor `overwrite`, if
                there is no run and `resume` is true, or if a file of the user has the name of one of a run.
            OSError: If the folder cannot be made or written.
        """
        if resume and not self.exists:
            raise ValueError(f"expected a run to resume in '{self.path}', found none; start it without --resume")
        with explain_os_errors("the run's folder", self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        if not resume:
            require_own_files(self.path, (*_REPLACED, self.result_path.name, "tensorboard"))
        with self._lock.hold():
            if self.has_begun and not resume and not overwrite:
                raise ValueError(
                    f"expected a folder without a run, but '{self.path}' holds one ({self.status}); continue it "
                    "with --resume, replace it with --overwrite, or choose another folder"
                )
            checkpoint.remove_unfinished(self.path)
            for path in self.path.glob(f"{TEMPORARY}*"):  # of a killed process
                if _UNFINISHED.fullmatch(path.name) and path.is_file() and not path.is_symlink():
                    path.unlink(missing_ok=True)
            try:
                yield self
            finally:
                self._close()

    def require_held(self) -> None:
        """Raise `ValueError` if the folder was moved, removed or replaced since `hold`; every write asks first."""
        self._lock.require_held()

    def clear(self) -> None:
        """Remove the files of a run, its configuration last; files of other names stay."""
        self.require_held()
        self._close()
        with explain_os_errors("the run's folder", self.path):
            self.result_path.unlink(missing_ok=True)
            for saved in checkpoint.newest_first(self.path):
                checkpoint.remove(saved)
            shutil.rmtree(self.path / "tensorboard", ignore_errors=True)
            for name in _REPLACED:
                (self.path / name).unlink(missing_ok=True)

    def remove_result(self) -> None:
        """Remove the result of a run that is trained further."""
        self.require_held()
        self.result_path.unlink(missing_ok=True)

    def read_config(self, *, warn: bool = False) -> TrainConfig:
        """Read the configuration; one that names no release is of the first.

        Args:
            warn: Whether to log a warning if it has no checksum, because an earlier release wrote it.

        Raises:
            ValueError: If it was altered after it was written, or is damaged.
        """
        remedy = "restore it, or start another run with the changed settings by --config"
        check_sealed_text(self.config_path, "the configuration of the run", remedy, warn=warn)
        return TrainConfig.from_toml(self.config_path, unnamed=FIRST_RELEASE)

    def require_resumable(self, config: TrainConfig, free: Collection[str]) -> None:
        """Raise `ValueError` if the run diverged, or has another configuration; settings in `free` may differ."""
        if self.config_path.exists():
            before = self.read_config()
            require_same_settings(before, config, free, f"the run in '{self.path}'")
            if before.kernels not in ("auto", config.kernels):
                _log.warning(
                    "kernels: the run in '%s' began with kernels=%s and goes on with kernels=%s, so it does not "
                    "continue bit for bit",
                    self.path,
                    before.kernels,
                    config.kernels,
                )
        if self.status == "diverged":
            raise ValueError(
                f"expected a run that can be resumed, but the one in '{self.path}' diverged; "
                "start another one with a lower learning rate, or another method"
            )

    def resume(self, device: str = "cpu") -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Read the newest checkpoint that is intact, and remove the metrics of later steps.

        Args:
            device: The device of the tensors.

        Returns:
            The tensors and the plain state; None if there is no checkpoint yet.

        Raises:
            ValueError: If all checkpoints, or the metrics up to this one, are damaged.
        """
        self.require_held()
        found = None
        if checkpoint.latest(self.path) is not None:
            found = checkpoint.load_intact(self.path, device)
        self.cut_metrics(found[1]["step"] if found else -1)
        return found

    def append(self, record: Mapping[str, Any]) -> None:
        """Append a line to the metrics; it is handed to the operating system before this returns.

        Args:
            record: The numbers by name, with the step under 'step'.

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
                self._metrics = FileIO(self.metrics_path, "a")
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
        kept = [raw for raw, record in _lines(self.metrics_path) if record["step"] <= step]
        if (listed := self._listed_metrics()) is not None and sum(len(raw) + 1 for raw in kept) < listed.size:
            self.result_path.unlink()  # it lists metrics that are now cut
        with explain_os_errors("the metrics", self.metrics_path), atomic_path(self.metrics_path) as temporary:
            temporary.write_bytes(b"".join(raw + b"\n" for raw in kept))

    def write_result(self, result: Mapping[str, Any], device: str = "cpu") -> None:
        """Write result.json with commit, versions, hardware and date; absolute paths are cut to their last part.

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
        origin = {
            "commit": commit(),
            "versions": versions(),
            "hardware": hardware(device),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        with explain_os_errors("the result", self.result_path):
            files = list_checksums({path.name: path for path in (self.metrics_path,) if path.exists()})
            write_sealed_json(self.result_path, {**_without_folders({**result, **origin}), "files": files})

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
        self._check_metrics()
        return [record for _, record in _lines(self.metrics_path)]

    def _check_metrics(self) -> None:
        """Compare the metrics with the checksum in result.json; those of a resumed run go on after that part."""
        if (listed := self._listed_metrics()) is not None:
            listed.check(
                read_limited(self.metrics_path)[: listed.size],
                str(self.metrics_path),
                "restore it, or start the run again",
            )

    def _listed_metrics(self) -> Checksum | None:
        """Return the checksum of the metrics in result.json; None if there is no result, or one of before."""
        files = self.read_result().get("files") if self.result_path.exists() else None
        name = self.metrics_path.name
        return Checksum.from_json(files[name]) if isinstance(files, dict) and name in files else None

    def read_result(self) -> dict[str, Any]:
        """Return the content of result.json.

        Raises:
            ValueError: If there is no result, or the file is damaged.
        """
        if not self.result_path.exists():
            raise ValueError(f"expected a result at '{self.result_path}', found none; finish the run with --resume")
        result = read_sealed_json(self.result_path, "the result of a run", "delete it", warn=False)
        if result.get("status") not in get_args(RunStatus):
            raise ValueError(f"expected a result with a status, but '{self.result_path}' is damaged; delete it")
        return result


def require_same_settings(before: TrainConfig, config: TrainConfig, free: Collection[str], whose: str) -> None:
    """Raise `ValueError` with the names of all settings that differ, other than those in `free`."""
    values = ((name, value, getattr(config, name)) for name, value in asdict(before).items())
    differing = [f"{name} {a!r}, not {b!r}" for name, a, b in values if a != b and name not in free]
    if differing:
        raise ValueError(
            f"expected the configuration of {whose}, got a different one: it has {'; '.join(differing)}; resume it "
            f"without changes (only {', '.join(sorted(free))} may change), or choose another folder"
        )


def _lines(path: Path) -> list[tuple[bytes, dict[str, Any]]]:
    """Return the lines of a metrics file and their records, without an incomplete end.

    Raises `ValueError` if a line before the last complete one is damaged.
    """
    parsed = [
        (raw, _record(raw)) for raw in read_limited(path).split(b"\n")[:-1]
    ]  # text after the last newline is incomplete
    while parsed and parsed[-1][1] is None:
        parsed.pop()
    for number, (_, record) in enumerate(parsed, start=1):
        if record is None:
            raise ValueError(
                f"expected a JSON object with a 'step' in line {number} of '{path}', but it is damaged; delete the line"
            )
    return [(raw, record) for raw, record in parsed if record is not None]


def _record(raw: bytes) -> dict[str, Any] | None:
    try:
        record = parse_json(raw)
    except ValueError:
        return None
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        return None
    found: dict[str, Any] = from_json_values(record)
    return found


def _without_folders(value: Any) -> Any:
    """Cut absolute paths in plain data to their last part.

    >>> _without_folders({"data": "/home/me/.data", "why": "no room in '/home/me/run'", "speed": "9 images/s"})
    {'data': '.data', 'why': "no room in 'run'", 'speed': '9 images/s'}
    >>> _without_folders(["pairs:/home/me and you/de-en", "--set data=text:/home/me/a", "https://a.org/b/c"])
    ['pairs:de-en', '--set data=text:a', 'https://a.org/b/c']
    """
    if isinstance(value, Mapping):
        return {key: _without_folders(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_folders(item) for item in value]
    if isinstance(value, PurePath):
        value = str(value)
    if not isinstance(value, str):
        return value
    named = _NAMED.match(value)
    kind = named[0] if named else ""
    if PurePath(value.removeprefix(kind)).is_absolute():
        return kind + PurePath(value).name
    return _PATH.sub(lambda match: match[0].rpartition("/")[2], value)
