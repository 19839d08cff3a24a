"""Find runs below folders and read how far each is, without torch: cheap enough to ask again every second.

    runs = RunList([Path("runs")])
    for run in runs.read():
        print(run.folder, run.state, run.epoch)

Nothing is written, and a folder that is damaged becomes a `WatchedRun` that says so.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from normfree.checksums import check_sealed_text, parse_json, read_limited
from normfree.files import from_json_values
from normfree.folder_lock import is_held
from normfree.train.config import TrainConfig
from normfree.train.run.metrics_file import read_last_line
from normfree.train.run.result_file import RESULT, read_result
from normfree.train.settings import parse_toml

CONFIG, METRICS, PROGRESS, LOCK = "config.toml", "metrics.jsonl", "progress.json", "lock"
_SIGNS = {CONFIG, METRICS, RESULT, LOCK}  # two of these, or one and a checkpoint, make a folder that of a run
_MOST = 100_000  # folders in which runs are looked for
_SEARCH_SHARE = 0.05  # the largest share of the time that is spent on looking for new runs

State = Literal["starting", "running", "finished", "stopped", "diverged", "unfinished", "damaged"]
"""How a run is. 'unfinished' has neither a result nor a lock that can be read; 'starting' has taken no step yet."""
_STATES: dict[str, State] = {
    "finished": "finished",
    "diverged": "diverged",
    "interrupted": "stopped",
}  # by the status of a result


@dataclass(frozen=True, kw_only=True)
class WatchedRun:
    """How far a run is, as its files say; None for what they do not say.

    Attributes:
        folder: The folder of the run.
        state: See `State`.
        note: Why the folder is damaged, or which signal stopped the run.
        model, method, data: The main settings.
        epochs: The epochs of the whole run.
        epoch: The epochs done, with a fraction.
        loss, accuracy: The means of training in the last epoch.
        validation, test: The loss and the accuracy on these data.
        bleu: BLEU of the test sentences of a translation.
        throughput: Images or target tokens per second, the `unit`.
        classes: The number of classes, or of tokens in the vocabulary; 0 if it is not known.
        parameters: The number of parameters.
        seconds: The time of the run so far.
        left: The seconds that are left.
        updated: When the run last wrote one of its files, in seconds since 1970.
    """

    folder: Path
    state: State
    note: str = ""
    model: str = ""
    method: str = ""
    data: str = ""
    epochs: int | None = None
    epoch: float | None = None
    loss: float | None = None
    accuracy: float | None = None
    validation: tuple[float, float] | None = None
    test: tuple[float, float] | None = None
    bleu: float | None = None
    throughput: float | None = None
    unit: str = "images"
    classes: int = 0
    parameters: int | None = None
    seconds: float | None = None
    left: float | None = None
    updated: float = 0.0

    @property
    def is_alive(self) -> bool:
        """Whether a process works on the run."""
        return self.state in ("starting", "running")


class RunList:
    """The runs below some folders. Files that did not change since the last reading are not read again.

    Args:
        folders: Folders of runs, or folders above them.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders
        self._found: list[Path] = []
        self._search_again = 0.0  # the time of the next search
        self._read: dict[Path, tuple[object, WatchedRun]] = {}  # by folder, with the state of its files
        self.complete = True  # False if there were too many folders to look into all of them

    def read(self) -> list[WatchedRun]:
        """Return the runs: those at work first, then by the time of their last files."""
        began = time.monotonic()
        if began >= self._search_again:
            self._found, self.complete = _search(self._folders)
            now = time.monotonic()
            self._search_again = now + (now - began) / _SEARCH_SHARE
        self._read = {folder: self._current(folder) for folder in self._found}  # forgets those that are gone
        # An age alone would not tell whether a process works on a run that has not ended.
        runs = [
            _with_state(run, is_held(run.folder)) if run.state in ("unfinished", "stopped") else run
            for _, run in self._read.values()
        ]
        return sorted(runs, key=lambda run: (not run.is_alive, -run.updated, run.folder))

    def _current(self, folder: Path) -> tuple[object, WatchedRun]:
        files, before = _identities(folder), self._read.get(folder)
        return before if before is not None and before[0] == files else (files, _read_files(folder, files))


def read_run(folder: Path, *, held: bool) -> WatchedRun:
    """Read how far the run in a folder is; `held` says whether the calling process goes on with it.

    A damaged run has the state 'damaged' and says why.
    """
    return _with_state(_read_files(folder, _identities(folder)), held)


# Looking for runs


def _search(folders: Sequence[Path]) -> tuple[list[Path], bool]:
    """Return the folders of runs at and below folders, and whether all were looked into; links are not followed."""
    found: dict[Path, Path] = {}
    left, seen = list(reversed(folders)), 0
    while left and seen < _MOST:
        folder, seen = left.pop(), seen + 1
        try:
            with os.scandir(folder) as entries:
                listed = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
        except OSError:
            continue  # it was removed, or may not be read
        if _is_run(folder, listed):
            found.setdefault(folder.resolve(), folder)
        else:
            inner = sorted((name for name, is_folder in listed if is_folder and name[0] != "."), reverse=True)
            left += [folder / name for name in inner]
    return list(found.values()), not left


def _is_run(folder: Path, listed: Iterable[tuple[str, bool]]) -> bool:
    files = {name for name, is_folder in listed if not is_folder} & _SIGNS
    saved = any(is_folder and name.startswith("checkpoint-") for name, is_folder in listed)
    return len(files) + saved >= 2 or (files == {LOCK} and bool(is_held(folder)))


# Reading one run


def _identities(folder: Path) -> tuple[tuple[int, int, int] | None, ...]:
    """Return the time, size and number of every file that is read, which change when the file does."""
    return tuple(_identity(folder / name) for name in (CONFIG, METRICS, RESULT, PROGRESS))


def _identity(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _read_files(folder: Path, files: Sequence[tuple[int, int, int] | None]) -> WatchedRun:
    """Read the files of a run; whether a process works on it is left open."""
    updated = max((found[0] for found in files if found is not None), default=0) / 1e9
    has_config, has_metrics, has_result, _ = (found is not None for found in files)
    try:
        result = from_json_values(read_result(folder / RESULT)) if has_result else {}
        config = result.get("config") or (_read_config(folder / CONFIG) if has_config else {})
        last = read_last_line(folder / METRICS) if has_metrics else {}
        now = _read_progress(folder / PROGRESS)
    except (ValueError, OSError) as error:
        return WatchedRun(folder=folder, state="damaged", note=" ".join(str(error).split()), updated=updated)
    status = result.get("status")
    if status in ("finished", "diverged") or _number(now.get("step")) is None:
        now = {}  # left by a process that was killed at its end
    unit = "tokens" if "tokens_per_second" in {**result, **last, **now} else "images"
    told = {**last, **result, **now}  # the last one that says something counts
    return WatchedRun(
        folder=folder,
        state=_STATES.get(str(status), "unfinished"),
        note=f"signal {result['signal']}" if isinstance(result.get("signal"), int) else "",
        **{name: str(config.get(name, "")) for name in ("model", "method", "data")},
        epochs=_count(config.get("epochs")),
        epoch=_number(now.get("epoch", result.get("epochs", last.get("epoch")))),
        loss=_number(told.get("train_loss")),
        accuracy=_number(told.get("train_accuracy")),
        validation=_score(result.get("validation")) if result and not now else _logged(now) or _logged(last),
        test=_score(result.get("test")),
        bleu=_number(result["bleu"].get("score")) if result.get("bleu") else None,
        throughput=_number(told.get(f"{unit}_per_second")),
        unit=unit,
        classes=_count(told.get("classes")) or 0,
        parameters=_count(told.get("parameters")),
        seconds=_number(told.get("seconds")),
        left=_number(now.get("seconds_left")),
        updated=updated,
    )


def _with_state(run: WatchedRun, held: bool | None) -> WatchedRun:
    """Complete the state of a run that has not ended, given whether a process holds its lock."""
    if run.state not in ("unfinished", "stopped"):
        return run
    if held:
        left = None if run.left is None else max(0.0, run.left - (time.time() - run.updated))
        return replace(run, state="starting" if run.epoch is None else "running", note="", left=left)
    return replace(run, state="unfinished" if held is None else "stopped", left=None)


def _read_config(path: Path) -> dict[str, Any]:
    """Read the settings of a run as plain data, with today's defaults for those that are missing."""
    check_sealed_text(path, "the configuration of the run", "restore it")
    raw = read_limited(path)
    if not raw:
        raise ValueError(f"expected the configuration of a run in '{path}', got an empty file; start the run again")
    return {"epochs": TrainConfig.epochs, "data": TrainConfig.data, **parse_toml(raw, path)}


def _read_progress(path: Path) -> dict[str, Any]:
    """Read progress.json, which is not synced to the disk: after a power failure it may be anything."""
    try:
        found = from_json_values(parse_json(read_limited(path)))
    except (ValueError, OSError):
        return {}
    return found if isinstance(found, dict) else {}


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63 else None


def _number(value: object) -> float | None:
    """Return a number of a file, which may be forged; None if it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _logged(record: Mapping[str, Any]) -> tuple[float, float] | None:
    return _score({"loss": record.get("validation_loss"), "accuracy": record.get("validation_accuracy")})


def _score(found: object) -> tuple[float, float] | None:
    values = [_number(found.get(name)) for name in ("loss", "accuracy")] if isinstance(found, dict) else [None]
    return None if None in values else (values[0], values[1])  # type: ignore[return-value]
