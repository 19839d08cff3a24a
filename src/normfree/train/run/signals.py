"""SIGINT and SIGTERM as a flag, so that a run can finish its step and save before it ends."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class Stop:
    """While it is open, SIGINT and SIGTERM set `requested` instead of ending the process.

        with Stop() as stop:
            while not stop.requested:
                step()

    A SIGINT after the first signal raises `KeyboardInterrupt` at once, for one who cannot wait. One inside another
    hands on at its end what it heard, since its own work may have been done by then. A signal that is ignored stays
    ignored, and outside the main thread, where Python delivers no signals, nothing is done.
    """

    def __init__(self) -> None:
        self.requested: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                    self._previous[number] = signal.signal(number, self._note)
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

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested is None:
            self.requested = number
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
