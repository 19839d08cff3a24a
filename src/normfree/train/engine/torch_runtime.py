"""The processes that a run trains in: torch's settings and generators, signals, throughput, the queue of the GPU, and
several processes that train one model together, as torchrun starts them.

Everything that is changed here for a run is restored at its end.

Each of several processes takes its part of every batch. Gradients, losses and the statistics of batch norm are averaged
over all processes, so that the numbers are those of a single process. The first process writes and prints. After every
step all processes agree on decisions that depend on a clock or on a signal.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch

from normfree.data.counter_rng import key
from normfree.train.config import TrainConfig

_AHEAD = 4  # steps that the host may be ahead of the device, so that it reacts to a signal soon
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
