"""Checkpoints: tensors and plain state of a run, intact after a kill or a power failure at any moment.

    <run>/checkpoint-<step>/weights.safetensors    every tensor, bit for bit
    <run>/checkpoint-<step>/state.json             the plain state, with the sha256 of the tensors and of itself

A checkpoint is written under a temporary name, synced to the disk and renamed; only then are earlier ones removed.
Reading a checkpoint cannot run code. One process at a time may write into a run (see `RunFolder.hold`).
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as parse_tensors
from torch import Tensor

from normfree.checksums import parse_json
from normfree.files import TEMPORARY, explain_os_errors, render_weights, sync

WEIGHTS, STATE = "weights.safetensors", "state.json"
METRICS = "metrics.jsonl"  # in the folder of the run
_NAME = re.compile(r"checkpoint-(\d+)(?:-(\d+))?")  # with the second number if a step is saved again
_FORMAT = 1
_EARLIER = "the earlier checkpoint is intact"


def save(run: str | Path, tensors: Mapping[str, Tensor], state: Mapping[str, Any], *, keep: int = 1) -> Path:
    """Write a checkpoint into the folder of a run, and remove all but the last `keep`.

    Syncs the metrics first: when a checkpoint is on the disk, so are the metrics up to it.

    Args:
        run: The folder of the run, which exists already.
        tensors: The tensors by name, on any device. Views and shared storages are stored as tensors of their own.
        state: Plain data for JSON, with the step under 'step'. Floats are read back exactly, tuples as lists.
        keep: The number of checkpoints to keep. Checkpoints of later steps are removed in any case.

    Returns:
        The folder of the checkpoint.

    Raises:
        ValueError: If a tensor or a value cannot be written.
        OSError: If the disk is full or the folder cannot be written; earlier checkpoints stay intact.
    """
    run, step = Path(run), state.get("step")
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise ValueError(f"expected the number of the step under 'step' in the state, got {step!r}; pass an int >= 0")
    if keep < 1:
        raise ValueError(f"expected keep >= 1, got {keep}; at least the last checkpoint is kept")
    _check_plain(dict(state), "state")
    if (run / METRICS).exists():
        with explain_os_errors("the metrics", run / METRICS):
            sync(run / METRICS)
    with explain_os_errors("the checkpoint in", run, _EARLIER):
        if not run.is_dir():  # the folder of the run was moved away: do not begin another one silently
            code = errno.ENOTDIR if run.exists() else errno.ENOENT
            raise OSError(code, os.strerror(code))
        _remove_unfinished(run)
        weights = render_weights(tensors)
        temporary = Path(tempfile.mkdtemp(prefix=f"{TEMPORARY}checkpoint-", dir=run))
        try:
            temporary.chmod(0o755)
            for name, content in (
                (WEIGHTS, weights),
                (STATE, _render_state(hashlib.sha256(weights).hexdigest(), dict(state))),
            ):
                (temporary / name).write_bytes(content)
                sync(temporary / name)
            sync(temporary)
            target = run / f"checkpoint-{step}"
            again = [place[1] for place in map(_place, _all(run)) if place[0] == step]
            if again:
                target = run / f"checkpoint-{step}-{max(again) + 1}"
            temporary.rename(target)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        sync(run)
        earlier = [path for path in _all(run) if _place(path) < _place(target)]
        for path in _all(run):
            if path != target and path not in earlier[: keep - 1]:
                _remove(path)
    return target


def latest(run: str | Path) -> Path | None:
    """Return the folder of the newest checkpoint of a run, or None if there is none."""
    return next(iter(_all(Path(run))), None)


def step_of(checkpoint: Path) -> int:
    """Return the step of a checkpoint from the name of its folder; -1 if the name is not that of a checkpoint."""
    return _place(checkpoint)[0]


def load(run: str | Path, device: str | torch.device = "cpu") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the state of the newest checkpoint of a run.

    Raises:
        ValueError: If there is no checkpoint, or a file is damaged; the message names it.
    """
    return read(_newest(run), device)


def load_state(run: str | Path) -> dict[str, Any]:
    """Return the state of the newest checkpoint of a run, without its tensors, which may be large.

    Raises:
        ValueError: If there is no checkpoint, or its state is damaged.
    """
    return _read_state(_newest(run))[1]


def read(checkpoint: str | Path, device: str | torch.device = "cpu") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the state of one checkpoint; every byte is checked.

    Raises:
        ValueError: If a file is missing or damaged.
    """
    folder = Path(checkpoint)
    digest, state = _read_state(folder)
    raw = _read_bytes(folder / WEIGHTS)
    if hashlib.sha256(raw).hexdigest() != digest:
        raise ValueError(_damaged(folder / WEIGHTS, f"its sha256 is not that in {STATE}"))
    return {name: tensor.to(device) for name, tensor in parse_tensors(raw).items()}, state


# Content


def _render_state(weights: str, state: dict[str, Any]) -> bytes:
    """Return the bytes of state.json; NaN and infinity are written as Python does, so that they are read back."""
    body = {"format": _FORMAT, "weights": weights, "state": state}
    digest = hashlib.sha256(json.dumps(body).encode()).hexdigest()
    return (json.dumps({**body, "sha256": digest}, indent=1) + "\n").encode()


def _read_state(folder: Path) -> tuple[str, dict[str, Any]]:
    """Return the sha256 of the weights, and the state."""
    raw = _read_bytes(folder / STATE)
    try:
        found = parse_json(raw)
        digest, state = found["weights"], found["state"]
        whole = raw == _render_state(digest, state)  # any other byte, even a space, is damage
    except (ValueError, KeyError, TypeError):
        whole = False
    if not whole:
        raise ValueError(_damaged(folder / STATE, "it was changed after it was written"))
    return digest, state


def _check_plain(value: Any, where: str) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ValueError(f"expected text as keys in {where}, got {key!r}; JSON would turn it into text")
            _check_plain(item, f"{where}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check_plain(item, f"{where}[{index}]")
    elif not isinstance(value, str | int | float | None):
        raise ValueError(
            f"expected plain data for JSON at {where}, got {type(value).__name__}; pass tensors among the tensors"
        )


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise ValueError(_damaged(path, "missing")) from None


def _damaged(path: Path, why: str) -> str:
    folder = path.parent
    others = [other for other in _all(folder.parent) if other != folder]
    remedy = f"delete the folder '{folder.name}' to continue from '{others[0].name}', or " if others else ""
    return f"expected an intact checkpoint, but '{path}' is damaged ({why}); {remedy}start the run again"


# Names


def _place(path: Path) -> tuple[int, int]:
    """Return the step, and how often it was saved before."""
    match = _NAME.fullmatch(path.name)
    return (int(match[1]), int(match[2] or 0)) if match else (-1, 0)


def _all(run: Path) -> list[Path]:
    """Return the checkpoints of a run, newest first."""
    if not run.is_dir():
        return []
    found = [path for path in run.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=_place, reverse=True)


def _newest(run: str | Path) -> Path:
    found = latest(run)
    if found is None:
        raise ValueError(f"expected a checkpoint in '{run}', found none; start the run again")
    return found


def _remove(path: Path) -> None:
    """Remove a checkpoint; it is renamed first, so that half of it is never mistaken for a complete one."""
    hidden = path.with_name(f"{TEMPORARY}{path.name}")
    with suppress(OSError):  # a checkpoint too many is no reason to stop a run
        path.rename(hidden)
        shutil.rmtree(hidden)


def _remove_unfinished(run: Path) -> None:
    for path in run.glob(f"{TEMPORARY}checkpoint-*"):
        shutil.rmtree(path, ignore_errors=True)
