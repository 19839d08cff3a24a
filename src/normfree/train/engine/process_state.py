"""What a run changes in its process, and restores at its end.

`Stop` handles signals; `torch_settings` and `seeded_generators` change torch; `collector_paused` and `objects_frozen`
keep the garbage collector from searching a deep network; `LaunchQueue` keeps the host close to the GPU.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType, TracebackType
from typing import Any

import torch

from normfree.data.counter_rng import key
from normfree.train.config import TrainConfig

_AHEAD = 4  # steps that the host may be ahead of the device, so that it reacts to a signal soon
_RECOMPILE_LIMIT = 64  # shapes of blocks in a network, in training and evaluation; torch gives up at 8


class StopRequestedError(Exception):
    """A signal asked the run to stop."""


class Stop:
    """While it is open, SIGINT, SIGTERM and in a job of SLURM SIGUSR1 set `requested` instead of ending the process.

        with Stop() as stop:
            while not stop.requested:
                step()

    A SIGINT after the first signal raises `KeyboardInterrupt` at once. While `at_once` is set, the first SIGINT raises
    it too, because there is nothing to save yet. If one `Stop` is open inside another, the inner one passes the signal
    on to the outer one at its end, because its own work may be finished by then. A signal that is ignored stays
    ignored. Outside the main thread, where Python delivers no signals, `Stop` does nothing.
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


class UntilSignal:
    """Batches that end early, without an error, when a Unix signal asks the run to stop; `stop_signal` is then its
    number.

    It is not an error because all processes have to take part in the reduction at the end of an evaluation.
    """

    def __init__(self, batches: Iterable[Any], stop: Stop) -> None:
        self._batches, self._stop = batches, stop
        self.stop_signal = 0

    def __iter__(self) -> Iterator[Any]:
        for batch in self._batches:
            if self._stop.requested is not None:
                self.stop_signal = self._stop.requested
                return
            yield batch


def _slurm_signals() -> tuple[int, ...]:
    """The signal that `sbatch --signal=USR1@120` sends before the time of a job is over."""
    return (signal.SIGUSR1,) if "SLURM_JOB_ID" in os.environ else ()


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

    With the stage kernels it does not search: so few layers are left to cuDNN that the search would cost more time than
    it saves, and without it a run gives the same bits in every process. On the compiled path it searches: this saves
    time, but two processes may choose different algorithms, so that their numbers differ in rounding.

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
