"""Several processes that train one model together, as torchrun starts them.

Each takes its part of every batch; gradients, losses and the statistics of batch norm are averaged over all of them, so
that the numbers are those of one process. The first writes and prints. What the host decides by its own clock or
signals, all agree on after every step.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from normfree.nn.sync_batchnorm import sync_batch_norms_, unsync_batch_norms_

T = TypeVar("T")


class SharedError(ValueError):
    """An error of one process or more that all processes of the job raise, so that one of them may tell it."""


@dataclass(frozen=True)
class Processes:
    """This process among those of the job; alone it is number 0 of 1.

    Every method but `first` is called by all of them, at the same place. When one has ended, the others raise
    `ConnectionError` there.
    """

    rank: int = 0
    world: int = 1
    host: Any = None  # a group over the CPU, for what the host reads
    launcher: int | None = None  # torchrun's process, which may be killed

    @property
    def first(self) -> bool:
        """Whether this process writes and prints for all."""
        return self.rank == 0

    def sum_(self, tensor: Tensor) -> None:
        """Replace a tensor by its sum over all processes."""
        if self.world > 1:
            with _noticing(self.world):
                dist.all_reduce(tensor)

    def average_(self, tensor: Tensor) -> None:
        """Replace a tensor by its mean over all processes."""
        if self.world > 1:
            self.sum_(tensor)
            tensor.div_(self.world)

    def agree(self, number: int) -> int:
        """The largest of the processes' numbers; a process whose launcher is gone says SIGTERM, or it would stay."""
        if self.world == 1:
            return number
        if self.launcher is not None and os.getppid() != self.launcher:
            number = max(number, signal.SIGTERM)
        flag = torch.tensor(number)
        with _noticing(self.world):
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self.host)
        return int(flag)

    def tell(self, value: T) -> T:
        """The value that the first process has."""
        if self.world == 1:
            return value
        told = [value]
        with _noticing(self.world):
            dist.broadcast_object_list(told, src=0, group=self.host)
        return told[0]

    @torch.no_grad()
    def share_(self, tensors: Iterable[Tensor]) -> None:
        """Fill the tensors with the values that they have in the first process."""
        alike: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors if self.world > 1 else ():
            alike.setdefault(tensor.dtype, []).append(tensor)
        for found in alike.values():
            whole = torch.cat([tensor.flatten() for tensor in found])  # one message instead of thousands
            with _noticing(self.world):
                dist.broadcast(whole, src=0)
            for tensor, part in zip(found, whole.split([tensor.numel() for tensor in found]), strict=True):
                tensor.copy_(part.view(tensor.shape))

    @contextmanager
    def together(self) -> Iterator[None]:
        """Let an error of one process inside the block be one of all, who would otherwise wait for it.

        The block itself must not wait for other processes.

        Raises:
            SharedError: with the text of the first process that failed.
        """
        if self.world == 1:
            yield
            return
        error: Exception | None = None
        try:
            yield
        except (ValueError, OSError) as raised:  # what one sentence explains; anything else ends the process
            error = raised
        texts: list[str | None] = [None] * self.world
        with _noticing(self.world):
            dist.all_gather_object(texts, None if error is None else str(error), group=self.host)
        failed = [rank for rank, text in enumerate(texts) if text is not None]
        if failed:
            where = "" if len(failed) == self.world else f" (in process {failed[0]} of {self.world})"
            raise SharedError(f"{texts[failed[0]]}{where}") from error

    def wait(self) -> None:
        """Until all processes are here."""
        if self.world > 1:
            with _noticing(self.world):
                dist.barrier(group=self.host)


@contextmanager
def joined(device: torch.device) -> Iterator[Processes]:
    """Join the job that torchrun started, or be alone; NCCL on GPUs, gloo on the CPU.

    A process group that is there already is used, and left.

    Raises `ConnectionError` when the processes do not meet.
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
    with _noticing(world):
        host = dist.new_group(backend="gloo")
    try:
        yield Processes(dist.get_rank(), world, host, launcher)
    except ConnectionError:
        own = False  # to take the group down would wait for the process that is gone
        raise
    finally:
        if own:
            dist.destroy_process_group()


def synchronize_(model: nn.Module, processes: Processes) -> None:
    """Let every batch norm see the batch of all processes, in place.

    Raises `ValueError` for one that cannot.
    """
    if processes.world > 1:
        sync_batch_norms_(model, processes.sum_, processes.world)


def desynchronize_(model: nn.Module) -> None:
    """Let the model work without other processes again, in place."""
    unsync_batch_norms_(model)


@contextmanager
def _noticing(world: int) -> Iterator[None]:
    """Say in one sentence that another process is gone."""
    try:
        yield
    except RuntimeError as error:  # which is all that gloo raises; NCCL's are kinds of it
        raise ConnectionError(
            f"expected {world} processes to train together, but another one ended or cannot be reached; "
            "the last checkpoint is whole: start all of them again with --resume"
        ) from error
