"""The processes that a run trains in: torch's settings and generators, signals, throughput, the queue of the GPU, and
several processes that train one model together, as torchrun starts them.

Everything that is changed here for a run is restored at its end.

Each of several processes takes its part of every batch. Gradients, losses and the statistics of batch norm are averaged
over all processes, so that the numbers are those of a single process. The first process writes and prints. After every
step all processes agree on decisions that depend on a clock or on a signal.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType, TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from normfree.data.counter_rng import key
from normfree.train.config import TrainConfig

_AHEAD = 4  # steps that the host may be ahead of the device, so that it reacts to a signal soon
_HUNG_SECONDS = 50.0  # how long processes that train wait for one that is behind
_RECOMPILE_LIMIT = 64  # shapes of blocks in a network, in training and evaluation; torch gives up at 8


@contextmanager
def torch_settings(device: torch.device, config: TrainConfig) -> Iterator[None]:
    """Apply the settings of torch that make a run fast, and restore them at the end of the `with` block.

    `config` names the path that runs: `kernels` is 'stage' or 'compiled', not 'auto'.
    """
    with ExitStack() as stack:
        if device.type == "cuda":
            stack.enter_context(torch.cuda.device(device))
            search = searches_algorithms(config)
            stack.enter_context(
                torch.backends.cudnn.flags(enabled=True, benchmark=search, deterministic=not search, allow_tf32=True)
            )
            torch.cuda.reset_peak_memory_stats(device)
        if config.compile:
            from torch._dynamo import config as dynamo  # imported here because they take seconds to load
            from torch._functorch import config as functorch

            stack.enter_context(dynamo.patch(recompile_limit=_RECOMPILE_LIMIT))
            # A deep network is short of memory, so activations that cost only one pass over memory are recomputed.
            keep = config.precision != "mixed"
            stack.enter_context(functorch.patch(ban_recompute_materialized_backward=keep))
        yield


def searches_algorithms(config: TrainConfig) -> bool:
    """Return whether cuDNN times its algorithms and takes the fastest.

    The stage kernels leave few layers to cuDNN, which do not win back the seconds of the search. Without it, a run has
    the same bits in every process. On the compiled path the search pays, but two processes may choose different
    algorithms, so that their numbers differ in rounding.

    Raises:
        ValueError: If the configuration leaves the path open.
    """
    if config.kernels == "auto":
        raise ValueError("expected kernels 'stage' or 'compiled', got 'auto'; choose the stages first")
    return config.kernels == "compiled"


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause Python's garbage collector, which searches all modules again and again while a deep network is built."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def objects_frozen() -> Iterator[None]:
    """Hide all objects that exist now from the garbage collector: a search of a deep network takes a second.

    It does nothing if some objects are frozen already, because their owner unfreezes them.
    """
    owned = gc.get_freeze_count() == 0
    if owned:
        gc.freeze()
    try:
        yield
    finally:
        if owned:
            gc.unfreeze()


@contextmanager
def seeded_generators(device: torch.device) -> Iterator[Callable[..., None]]:
    """Yield a function that seeds torch's generators of the CPU and of `device`; their state is restored at the end.

    Dropout and the factories of third-party models draw from these generators. A run calls the function before every
    step with its seed and the number of the step, so that a step draws the same numbers in a resumed run.
    """
    generators = [torch.default_generator]
    if device.type == "cuda":
        torch.cuda.init()  # which makes the generators
        generators.append(torch.cuda.default_generators[device.index])
    before = [generator.get_state() for generator in generators]

    def seed(*numbers: int) -> None:
        mixed = _mixed(*numbers)
        for generator in generators:
            generator.manual_seed(mixed)

    try:
        yield seed
    finally:
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)


def _mixed(*numbers: int) -> int:
    """Hash several numbers into one of 63 bits.

    >>> _mixed(0, 1) == _mixed(1, 0), 0 <= _mixed(7, 7) < 2**63
    (False, True)
    """
    state = 0
    for number in numbers:
        state = int(key(state + number))
    return (state % 2**64) >> 1


class Throughput:
    """Counts the images or tokens per second of the steps since `start`; time inside `paused` does not count."""

    def __init__(self, per_step: float) -> None:
        self._per_step, self._first, self._began = per_step, 0, time.perf_counter()

    def start(self, done: int) -> None:
        """Begin to count, after `done` steps."""
        self._first, self._began = done, time.perf_counter()

    def rate(self, done: int) -> float:
        """Return the throughput after `done` steps."""
        return (done - self._first) * self._per_step / max(time.perf_counter() - self._began, 1e-9)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time of the `with` block."""
        began = time.perf_counter()
        yield
        self._began += time.perf_counter() - began


class LaunchQueue:
    """Keeps the host from launching steps far ahead of a GPU; does nothing on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._events: deque[torch.cuda.Event] | None = deque() if device.type == "cuda" else None

    def push(self) -> None:
        """Record that a step was launched, and wait for the one launched a few steps before."""
        if self._events is not None:
            event = torch.cuda.Event()
            event.record()
            self._events.append(event)
            if len(self._events) > _AHEAD:
                self._events.popleft().synchronize()


class StopRequestedError(Exception):
    """A signal asked the run to stop."""


class Stop:
    """While it is open, SIGINT, SIGTERM and in a job of SLURM SIGUSR1 set `requested` instead of ending the process.

        with Stop() as stop:
            while not stop.requested:
                step()

    A SIGINT after the first signal raises `KeyboardInterrupt` at once. So does the first one while `at_once` is set,
    because there is nothing to save yet. If one `Stop` is open inside another, the inner one passes the signal on to
    the outer one at its end, because its own work may be finished by then. A signal that is ignored stays ignored.
    Outside the main thread, where Python delivers no signals, `Stop` does nothing.
    """

    def __init__(self) -> None:
        self.requested: int | None = None
        self.at_once = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, *_slurm_signals()):
                if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                    self._previous[number] = signal.signal(number, self._record)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._previous:
            number, handler = self._previous.popitem()
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)  # None: not set by Python
            outer = getattr(handler, "__self__", None)
            if isinstance(outer, Stop) and outer.requested is None:
                outer.requested = self.requested

    def raise_if_requested(self, done: int, total: int) -> None:
        """Raise `StopRequestedError` if a signal came and work is left; can be passed as a progress callback."""
        if self.requested is not None and done < total:
            raise StopRequestedError

    def _record(self, number: int, frame: FrameType | None) -> None:
        if self.requested is None:
            self.requested = number
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.at_once and number == signal.SIGINT:
            raise KeyboardInterrupt


def _slurm_signals() -> tuple[int, ...]:
    """The signal that `sbatch --signal=USR1@120` sends before the time of a job is over."""
    return (signal.SIGUSR1,) if "SLURM_JOB_ID" in os.environ else ()


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

    def agree(self, number: int) -> int:
        """Return the largest number that a process passes; if torchrun was killed, return SIGTERM in all processes."""
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
            "the last checkpoint is intact: start all of them again with --resume"
        ) from error
