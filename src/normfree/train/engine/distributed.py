"""Several processes that train one model together, as torchrun starts them.

Each takes its part of every batch. Gradients, losses and the statistics of batch norm are averaged over all processes,
so that the numbers are those of a single process. The first process writes and prints. After every step all processes
agree on decisions that depend on a clock or on a signal.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

_HUNG_SECONDS = 50.0  # how long processes that train wait for one that is behind


T = TypeVar("T")


class SharedError(ValueError):
    """An error that occurred in one or more processes and is raised in all; the first process reports it."""


@dataclass
class Processes:
    """This process among those of the job; a single process is number 0 of 1.

    All processes call each method at the same point of the program. If one of them has ended, the others raise
    `ConnectionError` there. While `watching` is set, they also do so if one hangs for 50 seconds. It is not set while a
    process compiles or works alone.
    """

    rank: int = 0
    world: int = 1
    host: Any = None  # a process group over the CPU, for values that the host reads
    launcher: int | None = None  # the id of torchrun's process, which may be killed
    host_watched: Any = None  # like `host`, but it waits for `_HUNG_SECONDS` only
    watching: bool = False

    @property
    def first(self) -> bool:
        """Whether this process writes and prints."""
        return self.rank == 0

    @property
    def _group(self) -> Any:
        return self.host_watched if self.watching else self.host

    def sum_(self, tensor: Tensor) -> None:
        """Replace a tensor by its sum over all processes, in place."""
        if self.world > 1:
            with explained_disconnection(self.world):
                dist.all_reduce(tensor, group=self._group if tensor.is_cpu else None)

    def average_(self, tensor: Tensor) -> None:
        """Replace a tensor by its mean over all processes, in place."""
        if self.world > 1:
            self.sum_(tensor)
            tensor.div_(self.world)

    def maximum(self, number: int) -> int:
        """Return the largest number that any process passes; at least SIGTERM if torchrun was killed."""
        if self.world == 1:
            return number
        if self.launcher is not None and os.getppid() != self.launcher:
            number = max(number, signal.SIGTERM)
        flag = torch.tensor(number)
        with explained_disconnection(self.world):
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group)
        return int(flag)

    def broadcast(self, value: T) -> T:
        """Return the value that the first process passes."""
        if self.world == 1:
            return value
        values = [value]
        with explained_disconnection(self.world):
            dist.broadcast_object_list(values, src=0, group=self._group)
        return values[0]

    @torch.no_grad()
    def broadcast_(self, tensors: Iterable[Tensor]) -> None:
        """Replace tensors by those of the first process, in place."""
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors if self.world > 1 else ():
            by_type.setdefault(tensor.dtype, []).append(tensor)
        for found in by_type.values():
            whole = torch.cat([tensor.flatten() for tensor in found])  # one message instead of thousands
            with explained_disconnection(self.world):
                dist.broadcast(whole, src=0)
            for tensor, part in zip(found, whole.split([tensor.numel() for tensor in found]), strict=True):
                tensor.copy_(part.view(tensor.shape))

    @contextmanager
    def shared_errors(self) -> Iterator[None]:
        """Raise an error of one process inside the `with` block in all processes, which would otherwise wait for it.

        The block itself must not wait for other processes.

        Raises:
            SharedError: With the text of the first process that failed.
        """
        if self.world == 1:
            yield
            return
        error: Exception | None = None
        try:
            yield
        except (ValueError, OSError) as raised:  # errors that one sentence explains; any other ends the process
            error = raised
        texts: list[str | None] = [None] * self.world
        with explained_disconnection(self.world):
            dist.all_gather_object(texts, None if error is None else str(error), group=self._group)
        failed = [rank for rank, text in enumerate(texts) if text is not None]
        if failed:
            where = "" if len(failed) == self.world else f" (in process {failed[0]} of {self.world})"
            raise SharedError(f"{texts[failed[0]]}{where}") from error

    def barrier(self) -> None:
        """Wait until all processes are here."""
        if self.world > 1:
            with explained_disconnection(self.world):
                dist.barrier(group=self._group)


@contextmanager
def join_processes(device: torch.device) -> Iterator[Processes]:
    """Join the processes that torchrun started, if it did, with NCCL on GPUs and gloo on the CPU.

    A process group that exists already is used, and not destroyed at the end.

    Raises `ConnectionError` if the processes cannot connect.
    """
    own = not (dist.is_available() and dist.is_initialized())
    world = int(os.environ.get("WORLD_SIZE", "1")) if own else dist.get_world_size()
    if world == 1:
        yield Processes()
        return
    launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
    if own:
        try:
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        except (RuntimeError, ValueError) as error:  # the latter without the address of the others
            reason = str(error).partition("\n")[0]
            raise ConnectionError(
                f"expected {world} processes to train together, as WORLD_SIZE says, but they could not meet: {reason}; "
                "start them with torchrun"
            ) from error
    with explained_disconnection(world):
        host = dist.new_group(backend="gloo")
        host_watched = dist.new_group(backend="gloo", timeout=timedelta(seconds=_HUNG_SECONDS))
    try:
        yield Processes(dist.get_rank(), world, host, launcher, host_watched)
    except ConnectionError:
        own = False  # destroying the group would wait for the process that ended
        raise
    finally:
        if own:
            dist.destroy_process_group()


@contextmanager
def explained_disconnection(world: int) -> Iterator[None]:
    """Explain in one sentence that another process ended."""
    try:
        yield
    except RuntimeError as error:  # gloo raises nothing else, and NCCL's errors are subclasses
        raise ConnectionError(
            f"expected {world} processes to train together, but another one ended, hangs or cannot be reached; "
            "if the run has a checkpoint, it is intact: start all of them again with --resume"
        ) from error
