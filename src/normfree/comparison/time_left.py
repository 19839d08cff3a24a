"""How long the runs of a comparison will take, from those that ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import fmean

from normfree.comparison.process_pool import Reports
from normfree.report.terminal import duration


class TimeLeft:
    """An estimate of the time left.

    Runs of one model take about as long as its runs that ended. Models of which none has ended take time in proportion
    to their depth. As many runs as are in progress now share the rest.

    >>> left = TimeLeft([("resnet20", 20), ("resnet20", 20), ("resnet8", 8)], clock=lambda: 0.0)
    >>> left.seconds is None
    True
    >>> left.end(0, 60.0)
    >>> left.seconds, left.text  # 60 s of a resnet20 and 8/20 of that of a resnet8
    (84.0, 'about 1 min 24 s left')

    Args:
        runs: The model and the depth of every run.
        clock: Returns the time in seconds.
    """

    def __init__(self, runs: Sequence[tuple[str, int]], clock: Callable[[], float] = time.monotonic) -> None:
        self._runs, self._clock = runs, clock
        self._ended: dict[int, float] = {}
        self._begun: dict[int, float] = {}

    def see(self, reports: Reports) -> None:
        """Take in which runs are in progress."""
        self._begun = {number: self._begun.get(number, self._clock()) for number in reports}

    def end(self, number: int, seconds: float) -> None:
        """Take in that a run ended, and its time."""
        self._ended[number] = seconds
        self._begun.pop(number, None)

    @property
    def seconds(self) -> float | None:
        """The time left; None before the first run has ended."""
        if not self._ended:
            return None
        by_model: dict[str, list[float]] = {}
        for number, seconds in self._ended.items():
            by_model.setdefault(self._runs[number][0], []).append(seconds)
        per_layer = fmean(seconds / max(1, self._runs[number][1]) for number, seconds in self._ended.items())

        def rest(number: int) -> float:
            model, depth = self._runs[number]
            whole = fmean(by_model[model]) if model in by_model else per_layer * depth
            begun = self._begun.get(number)
            return whole if begun is None else max(0.0, whole - (self._clock() - begun))

        open_runs = [rest(number) for number in range(len(self._runs)) if number not in self._ended]
        return max(sum(open_runs) / max(1, len(self._begun)), max(open_runs, default=0.0))

    @property
    def text(self) -> str:
        """The time left in words; empty if it is not known or nothing is left."""
        seconds = self.seconds
        return f"about {duration(seconds)} left" if seconds and len(self._ended) < len(self._runs) else ""
