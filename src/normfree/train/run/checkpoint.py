"""Checkpoints: tensors and plain state of a run, intact after a kill or a power failure at any moment.

    <run>/checkpoint-<step>/weights.safetensors    every tensor, bit for bit
    <run>/checkpoint-<step>/state.json             the plain state, with the sha256 of the tensors and of itself

A checkpoint is written under a temporary name, synced to the disk and renamed; only then are earlier ones removed. The
state also has the length and sha256 of the metrics up to its step. Reading a checkpoint cannot run code. One process at
a time may write into a run (see `RunFolder.hold`); any process may read it at the same time.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from normfree.storage.reading import Checksum, has_kinds, parse_json, read_limited, read_tensors
from normfree.storage.writing import TEMPORARY, explain_os_errors, render_weights, require_plain, sync, temporary_folder
from normfree.train.run.run_records import METRICS

T = TypeVar("T")
WEIGHTS, STATE = "weights.safetensors", "state.json"
_log = logging.getLogger("normfree.train")
_NAME = re.compile(r"checkpoint-(\d+)(?:-(\d+))?")  # with the second number if a step is saved again
_UNFINISHED = re.compile(r"checkpoint-(?:\w{8}|[0-9a-f]{16}|\d+(?:-\d+)?)")  # after the prefix of temporary names
_REMEDY = "; delete its folder to continue from another checkpoint, or start the run again"
_TRIES = 5  # to read a checkpoint while another process replaces it
_FORMAT = 1
_NUMBER = int | float
# The kinds of the values that a run reads from a state, which may be forged.
_KINDS: dict[str, Any] = {"step": int, "seconds": _NUMBER, "validation": list | None, "config": str}
_KINDS |= {"classes": list, "input_shape": list, "vocabulary": int}


def save(
    run: str | Path, tensors: Mapping[str, Tensor], state: Mapping[str, Any], *, keep: int = 1, keep_best: bool = False
) -> Path:
    """Write a checkpoint into the folder of a run, and remove all but the last `keep` and the best.

    Syncs the metrics first: when a checkpoint is on the disk, so are the metrics up to it.

    Args:
        run: The folder of the run, which exists already.
        tensors: The tensors by name, on any device. Views and shared storages are stored as tensors of their own.
        state: Plain data for JSON, with the step under 'step'. Floats are read back exactly, tuples as lists.
        keep: The number of checkpoints to keep. Checkpoints of later steps are removed in any case.
        keep_best: Whether to keep also the one with the highest 'score' in its state; of equal ones, the latest.

    Returns:
        The folder of the checkpoint.

    Raises:
        ValueError: If a tensor or a value cannot be written.
        OSError: If the disk is full or the folder cannot be written; earlier checkpoints stay intact.
    """

    def write(folder: Path) -> str:
        weights = render_weights(tensors)
        (folder / WEIGHTS).write_bytes(weights)
        return hashlib.sha256(weights).hexdigest()

    return publish(Path(run), state, write, keep=keep, keep_best=keep_best)


def publish(
    run: Path, state: Mapping[str, Any], write: Callable[[Path], Any], *, keep: int = 1, keep_best: bool = False
) -> Path:
    """Make a checkpoint as `save` does. `write` puts the tensors into a folder, and returns their sha256."""
    step = state.get("step")
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise ValueError(f"expected the number of the step under 'step' in the state, got {step!r}; pass an int >= 0")
    if keep < 1:
        raise ValueError(f"expected keep >= 1, got {keep}; at least the last checkpoint is kept")
    require_plain(dict(state), "state")
    metrics = None
    if (run / METRICS).exists():
        with explain_os_errors("the metrics", run / METRICS):
            metrics = _digest_of_metrics((run / METRICS).read_bytes(), step)
            sync(run / METRICS)
    with explain_os_errors("the checkpoint in", run, "the earlier checkpoint is intact"):
        os.listdir(run)  # raises if the folder of the run was moved away, in which case a new one must not be made
        remove_unfinished(run)
        temporary = temporary_folder(run, "checkpoint")
        try:
            (temporary / STATE).write_bytes(_render_state(write(temporary), dict(state), metrics))
            for path in sorted(temporary.iterdir(), key=lambda path: path.name == STATE):
                sync(path)
            sync(temporary)
            target = run / f"checkpoint-{step}"
            again = [place[1] for place in map(_place, run.iterdir()) if place[0] == step]
            if again:
                target = run / f"checkpoint-{step}-{max(again) + 1}"
            temporary.rename(target)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        sync(run)
        upto = [path for path in newest_first(run) if _place(path) <= _place(target)]
        kept = {*upto[:keep], best_of(upto) if keep_best else None}
        for path in newest_first(run):
            if path not in kept:
                remove(path)
    return target


class Writer:
    """Writes checkpoints in a thread, one at a time, while training continues.

    A kill at any moment leaves the previous checkpoint, as with `save`. An error is raised by the next call.

    Args:
        run: The folder of the run.
        before: Called before each write; it raises if the folder may not be written.
        **options: Those of `save`.
    """

    def __init__(self, run: Path, before: Callable[[], None], **options: Any) -> None:
        self._run, self._before, self._options = run, before, options
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.seconds = 0.0  # how long the last write took

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Wait for the previous write, then begin to write a checkpoint; the tensors must not change meanwhile."""
        self.wait()
        self._thread = threading.Thread(target=self._write, args=(tensors, state), name="normfree checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Wait until the checkpoint is on the disk.

        Raises:
            ValueError, OSError: If it could not be written; earlier ones stay intact.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.raise_error()

    def raise_error(self) -> None:
        """Raise the error of a write that has failed, if any, without waiting for a write in progress."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait for the thread; drop its error, because another one may be propagating."""
        with suppress(ValueError, OSError):
            self.wait()

    def _write(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        began = time.perf_counter()
        try:
            self._before()
            save(self._run, tensors, state, **self._options)
        except BaseException as error:  # the main thread raises it
            self._error = error
        self.seconds = time.perf_counter() - began


def latest(run: str | Path) -> Path | None:
    """Return the folder of the newest checkpoint of a run, or None if there is none."""
    return next(iter(newest_first(run)), None)


def step_of(checkpoint: Path) -> int:
    """Return the step of a checkpoint from the name of its folder; -1 if the name is not that of a checkpoint."""
    return _place(checkpoint)[0]


def best_of(checkpoints: Iterable[Path]) -> Path | None:
    """Return the checkpoint with the highest score, the latest of equal ones; None if no state has a score."""
    scored = []
    for path in checkpoints:
        with suppress(ValueError, OSError):  # a damaged state has no score
            score = read_state(path)[1].get("score")
            if isinstance(score, float) and score == score:
                scored.append((score, _place(path), path))
    return max(scored)[2] if scored else None


def load(run: str | Path, *, best: bool = False) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the state of the newest checkpoint of a run, or of the best; see `read`."""
    return _read_while_training(run, read, best=best)


def load_state(run: str | Path) -> dict[str, Any]:
    """Return the state of the newest checkpoint of a run, without its tensors, which may be large."""
    return _read_while_training(run, lambda path: read_state(path)[1])


def _read_while_training(run: str | Path, read: Callable[[Path], T], *, best: bool = False) -> T:
    """Read the newest or best checkpoint; if another process replaces it, read the next one."""
    for left in reversed(range(_TRIES)):
        path = best_of(newest_first(run)) if best else latest(run)
        if path is None:
            raise _none_in(run, best=best)
        try:
            return read(path)
        except ValueError as error:
            if not left or path.exists():
                others = [other.name for other in newest_first(run) if other != path]
                other = f"delete the folder '{path.name}' to continue from '{others[0]}', or " if others else ""
                raise ValueError(str(error).replace(_REMEDY, f"; {other}start the run again")) from error
    raise AssertionError


def load_intact(run: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the newest checkpoint that is intact; the log names the damaged ones that it passes over.

    Raises:
        ValueError: If there is no checkpoint, if all are damaged, or if the metrics up to its step were changed.
    """
    path, found = first_intact(run, read)
    _require_metrics(Path(run), path)
    return found


def first_intact(run: str | Path, read: Callable[[Path], T]) -> tuple[Path, T]:
    """Return the newest checkpoint that `read` accepts, and its result; raise the first error if there is none."""
    errors: list[ValueError | OSError] = []
    for path in newest_first(run):
        try:
            found = read(path)
        except (ValueError, OSError) as error:  # an OSError if the disk cannot read it
            errors.append(error)
            continue
        for damage in errors:
            _log.warning("%s; the run continues from '%s'", str(damage).partition(";")[0], path.name)
        return path, found
    if errors and isinstance(errors[0], ValueError):
        raise ValueError(str(errors[0]).replace(_REMEDY, "; start the run again")) from errors[0]
    raise errors[0] if errors else _none_in(run)


def _none_in(run: str | Path, *, best: bool = False) -> ValueError:
    kind = " with a validation score" if best else ""
    remedy = "load the last one, or train with a validation part" if best else "start the run again"
    return ValueError(f"expected a checkpoint{kind} in '{run}', found none; {remedy}")


def read(checkpoint: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the state of one checkpoint, with shards put together; errors are those of `verify`."""
    folder = Path(checkpoint)
    state = verify(folder)
    if not isinstance(read_state(folder)[0], dict):
        with _missing_is_damage(folder / WEIGHTS):  # another process may remove it
            tensors = read_tensors(folder / WEIGHTS)
    else:
        from normfree.train.run.sharded_checkpoint import read_shards  # imported here because few models are sharded

        tensors = read_shards(folder)
    return tensors, state


def verify(folder: Path) -> dict[str, Any]:
    """Return the state of a checkpoint. Raises `ValueError` if a file of it is missing or damaged."""
    digests, state = read_state(folder)
    for name, digest in (digests if isinstance(digests, dict) else {WEIGHTS: digests}).items():
        path = folder / Path(name).name
        with _missing_is_damage(path):
            if Checksum.of(path).sha256 != digest:
                raise ValueError(_damaged(path, f"its sha256 is not that in {STATE}"))
    return state


# Content


def _render_state(weights: Any, state: dict[str, Any], metrics: dict[str, Any] | None) -> bytes:
    """Return the bytes of state.json; NaN and infinity are written as Python does, so that they are read back."""
    body = {"format": _FORMAT, "weights": weights, "state": state}
    if metrics is not None:  # earlier releases have none
        body["metrics"] = metrics
    digest = hashlib.sha256(json.dumps(body).encode()).hexdigest()
    return (json.dumps({**body, "sha256": digest}, indent=1) + "\n").encode()


def read_state(folder: Path) -> tuple[Any, dict[str, Any]]:
    """Return the sha256 of the weights, by the name of the file if there are several, and the state."""
    with _missing_is_damage(folder / STATE):
        raw = read_limited(folder / STATE)
    try:
        found = parse_json(raw)
        digest, state = found["weights"], found["state"]
        whole = raw == _render_state(digest, state, found.get("metrics"))  # any other byte, even a space, is damage
        whole = whole and _has_known_kinds(state)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        whole = False
    if not whole:
        raise ValueError(_damaged(folder / STATE, "it was changed after it was written"))
    return digest, state


def _has_known_kinds(state: Mapping[str, Any]) -> bool:
    """Whether the values that a run stores have the kinds that it reads; others may be anything."""
    if not has_kinds(state, _KINDS):
        return False
    score = state.get("validation") or [0.0, 0.0]  # loss and accuracy
    return len(score) == 2 and all(isinstance(value, _NUMBER) for value in score) and state.get("step", 0) >= 0


def _digest_of_metrics(content: bytes, step: int) -> dict[str, Any]:
    """Return the length and the sha256 of all lines up to a step."""
    end = 0
    for line in content.splitlines(keepends=True):
        try:
            if not line.endswith(b"\n") or json.loads(line)["step"] > step:
                break
        except (ValueError, KeyError, TypeError, RecursionError):
            break
        end += len(line)
    return {"bytes": end, "sha256": hashlib.sha256(content[:end]).hexdigest()}


def _require_metrics(run: Path, folder: Path) -> None:
    """Raise `ValueError` if the metrics up to a checkpoint are not those that the run wrote; none at all are fine."""
    known, path = json.loads((folder / STATE).read_bytes()).get("metrics"), run / METRICS
    if known is None or not path.exists():
        return
    listed = Checksum.from_json(known)
    if Checksum.of(read_limited(path)[: listed.size]).sha256 != listed.sha256:
        raise ValueError(
            f"expected the metrics in '{path}' as the run wrote them, but they were changed; restore the file, or "
            "delete it to continue without them"
        )


@contextmanager
def _missing_is_damage(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise ValueError(_damaged(path, "missing")) from None


def _damaged(path: Path, why: str) -> str:
    return f"expected an intact checkpoint, but '{path}' is damaged ({why}){_REMEDY}"


# Names


def _place(path: Path) -> tuple[int, int]:
    """Return the step, and how often it was saved before."""
    match = _NAME.fullmatch(path.name)
    return (int(match[1]), int(match[2] or 0)) if match else (-1, 0)


def newest_first(run: str | Path) -> list[Path]:
    """Return the checkpoints of a run, newest first."""
    named = (path for path in Path(run).glob("checkpoint-*") if _place(path)[0] >= 0)
    # Other programs have folders of such names, too.
    ours = (path for path in named if (path / STATE).is_file() or (path / WEIGHTS).is_file())
    return sorted(ours, key=_place, reverse=True)


def remove(path: Path) -> None:
    """Remove a checkpoint, unless it holds other files; it is renamed first, so that nobody reads a part of it."""
    if not all(inside.name == STATE or inside.suffix == ".safetensors" for inside in path.iterdir()):
        return  # with files of the user
    hidden = path.with_name(f"{TEMPORARY}{path.name}")
    with suppress(OSError):  # a run does not stop because an old checkpoint stays
        path.rename(hidden)
        shutil.rmtree(hidden)


def remove_unfinished(run: Path) -> None:
    """Remove what a killed process left of a checkpoint; files of other names stay."""
    for path in run.glob(f"{TEMPORARY}checkpoint-*"):
        if _UNFINISHED.fullmatch(path.name.removeprefix(TEMPORARY)) and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
