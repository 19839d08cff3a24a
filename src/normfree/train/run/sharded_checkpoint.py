"""Checkpoints of sharded models (FSDP2): every process writes its part, by PyTorch's distributed checkpoints.

    <run>/checkpoint-<step>/shard-….safetensors    the tensors of each process
    <run>/checkpoint-<step>/state.json             the plain state, with the sha256 of every file and of itself

Nothing is pickled: PyTorch's safetensors storage keeps the places of the parts in the headers of the files. Another
number of processes can load them.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from normfree.storage.reading import Checksum
from normfree.train.engine.distributed import Processes, explained_disconnection
from normfree.train.run import checkpoint

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
_MODEL, _OPTIMIZER = "model.", "optimizer."


def save_sharded(
    run: str | Path,
    model: nn.Module,
    state: Mapping[str, Any],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    keep: int = 2,
) -> Path:
    """Write a checkpoint of a sharded model; all processes call this together.

    Args:
        run: A folder that exists and that all processes see.
        model: The model, sharded by `fully_shard` or not.
        state: Plain data for JSON, with the step under 'step'.
        optimizer: Its optimizer, if it is to be saved.
        keep: The number of checkpoints to keep.

    Returns:
        The folder of the checkpoint.

    Raises:
        ValueError: In all processes, if it cannot be written; earlier checkpoints stay intact.
        ConnectionError: If another process ended.
    """
    with explained_disconnection(dist.get_world_size()):
        return _save(Path(run), model, state, optimizer, keep)


def _save(
    run: Path, model: nn.Module, state: Mapping[str, Any], optimizer: torch.optim.Optimizer | None, keep: int
) -> Path:
    processes = _processes()
    tensors, plain = _parts(model, optimizer)
    told: str | None = None  # the folder that the other processes were told to write into

    def write(folder: Path) -> dict[str, str]:
        nonlocal told
        told = processes.broadcast(str(folder))
        _write(tensors, folder)
        return {path.name: Checksum.of(path).sha256 for path in sorted(folder.glob("*.safetensors"))}

    saved = None
    with processes.shared_errors():
        if processes.first:
            try:
                saved = checkpoint.publish(run, {**state, "optimizer": plain}, write, keep=keep)
            finally:
                if told is None:
                    processes.broadcast(None)  # the others do not write either
        elif (folder := processes.broadcast(None)) is not None:
            _write(tensors, Path(folder))
    return Path(str(processes.broadcast(saved)))


def load_sharded_(
    run: str | Path, model: nn.Module, *, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Any]:
    """Fill a model and its optimizer from the newest checkpoint that is intact; all processes call this together.

    Args:
        run: The folder that was given to `save_sharded`.
        model: A model with the same parameters, sharded over any number of processes.
        optimizer: Its optimizer, if it was saved.

    Returns:
        The plain state that was saved.

    Raises:
        ValueError: In all processes, if there is no checkpoint, all are damaged, or the model does not fit.
        ConnectionError: If another process ended.
    """
    with explained_disconnection(dist.get_world_size()):
        processes, found = _processes(), None
        with processes.shared_errors():
            if processes.first:
                found = checkpoint.first_intact(run, _verify_shards)
        folder, state = processes.broadcast(found)  # type: ignore[misc]  # of the first process
        tensors, _ = _parts(model, optimizer)
        _load(tensors, folder)
        set_model_state_dict(model, _named(tensors, _MODEL))
        plain = state.pop("optimizer")
        if optimizer is not None:
            set_optimizer_state_dict(model, optimizer, {**_named(tensors, _OPTIMIZER), **plain}, options=_FLAT)
    return state


def _verify_shards(folder: Path) -> dict[str, Any]:
    if (folder / checkpoint.WEIGHTS).exists():
        raise ValueError(f"expected a checkpoint of several processes, got one of a single process in '{folder}'")
    return checkpoint.verify(folder)


def read_shards(folder: Path) -> dict[str, Tensor]:
    """Put the shards of a checkpoint together, in one process: the model's tensors and those of its optimizer, by name.

    Raises:
        ValueError: If a shard is missing.
    """
    reader = HuggingFaceStorageReader(str(folder))
    stored: dict[str, Any] = reader.read_metadata().state_dict_metadata
    tensors = {name: torch.empty(of.size, dtype=of.properties.dtype) for name, of in stored.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        _load(tensors, folder, no_dist=True)
    return tensors


def _load(tensors: dict[str, Tensor], folder: Path, **options: Any) -> None:
    try:
        load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)), **options)
    except (CheckpointException, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[-1]
        raise ValueError(f"expected the model that was saved in '{folder}', got another: {reason}") from error


def _parts(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return all tensors of a model and its optimizer by name, and the plain values of the optimizer."""
    tensors: dict[str, Any] = {f"{_MODEL}{name}": value for name, value in get_model_state_dict(model).items()}
    flat: dict[str, Any] = {}
    if optimizer is not None:
        flat = get_optimizer_state_dict(model, optimizer, options=_FLAT)
    plain = {name: value for name, value in flat.items() if not isinstance(value, Tensor)}
    return tensors | {f"{_OPTIMIZER}{name}": flat[name] for name in flat.keys() - plain.keys()}, plain


def _named(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _write(tensors: dict[str, Tensor], folder: Path) -> None:
    try:
        save(tensors, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))
    except CheckpointException as error:
        if not dist.get_rank():  # the others get its error
            raise ValueError(f"could not write the shards in '{folder}': {str(error).splitlines()[-1]}") from error


def _processes() -> Processes:
    return Processes(dist.get_rank(), dist.get_world_size())
