"""Signals ask a run to stop; it finishes its step and saves."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable, Iterator
from types import FrameType, TracebackType
from typing import Any


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
