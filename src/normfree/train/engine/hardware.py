"""The device of a run, the settings of torch that make it fast there, and how far the host may run ahead of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from normfree.nn.devices import device_of as device_of
from normfree.train.config import TrainConfig

_AHEAD = 4  # steps that the host may be ahead of the device, so that a signal is heard soon
_RECOMPILE_LIMIT = 64  # shapes of blocks in a network, in training and evaluation; torch gives up at 8


@contextmanager
def fast(device: torch.device, config: TrainConfig) -> Iterator[None]:
    """The settings of torch that a fast run needs, as they were before afterwards."""
    with ExitStack() as stack:
        if device.type == "cuda":
            stack.enter_context(torch.cuda.device(device))
            stack.enter_context(torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=True))
            torch.cuda.reset_peak_memory_stats(device)
        if config.compile:
            from torch._dynamo import config as dynamo  # only here, because they take seconds to load
            from torch._functorch import config as functorch

            stack.enter_context(dynamo.patch(recompile_limit=_RECOMPILE_LIMIT))
            # A deep network is short of memory: what costs no more than a pass over it is computed again.
            keep = config.precision != "mixed"
            stack.enter_context(functorch.patch(ban_recompute_materialized_backward=keep))
        yield


class InFlight:
    """Keeps the host from running far ahead of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._events: deque[torch.cuda.Event] | None = deque() if device.type == "cuda" else None

    def launched(self) -> None:
        """Note a step, and wait for one that was launched a few steps before."""
        if self._events is not None:
            event = torch.cuda.Event()
            event.record()
            self._events.append(event)
            if len(self._events) > _AHEAD:
                self._events.popleft().synchronize()
