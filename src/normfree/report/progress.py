"""The progress of long work on stderr: a bar on a terminal, otherwise a line from time to time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from normfree.report.formatting import duration, percent
from normfree.report.terminal import open_console

if TYPE_CHECKING:
    from rich.console import Console

ProgressCallback = Callable[[int, int, str], None]  # steps done, steps in total, a text on the current one

EVERY = 2.0  # seconds between two lines, and before the first
_SHARE = 0.04  # minimum gap between lines, as a fraction of elapsed time, so that a long log stays short
_WIDE = 120  # columns of a terminal with room for every part of the bar
_RECENT = 15  # times over which the speed is measured, so that a slow start is forgotten


class Update(Protocol):
    """Reports the steps done, the total if it has changed, and a text on the current step."""

    def __call__(self, done: int, total: int | None = None, now: str = "", /) -> None: ...


@contextmanager
def progress(
    what: str, total: int | None = None, *, done: int = 0, every: float | None = None, show: bool = True
) -> Iterator[Update]:
    """Show how far work is and how long it will take: a bar that disappears at the end, or plain lines.

        with progress("resnet110", steps, done=resumed) as update:
            update(step, steps, metrics_text(loss=1.2, accuracy=0.4, throughput=18000))

    Args:
        what: The name of the work.
        total: The number of steps, if it is known.
        done: The steps of an earlier process, which do not count for the speed.
        every: The least number of seconds between plain lines (default: `EVERY`). Shorter work prints no line.
        show: False shows nothing, as in all processes of a distributed run but one.
    """
    console = open_console(stderr=True)
    if not show:
        yield lambda *_: None
    elif console.is_terminal:
        with _bar(console, what, total, done) as update:
            yield update
    else:
        with _lines(console, what, total, done, EVERY if every is None else every) as update:
            yield update


@contextmanager
def _bar(console: Console, what: str, total: int | None, before: int) -> Iterator[Update]:
    from rich import progress as rich
    from rich.table import Column

    wide = console.width >= _WIDE
    columns: tuple[rich.ProgressColumn, ...] = (
        rich.TextColumn("{task.fields[what]}", markup=False),
        rich.BarColumn(bar_width=25 if wide else 10),
        rich.TextColumn("{task.fields[count]}"),
        *((rich.TimeElapsedColumn(),) if wide else ()),
        rich.TimeRemainingColumn(),
        # The one column that may take a second line where there is no room.
        rich.TextColumn("{task.fields[now]}", markup=False, table_column=Column(no_wrap=False)),
    )
    with rich.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total, completed=before, what=what, count="", now="")

        def update(done: int, total: int | None = total, now: str = "", /) -> None:
            count = f"{done}/{total}" if total is not None else f"{done}"
            bar.update(task, completed=done, total=total, count=count, now=now)

        yield update


@contextmanager
def _lines(console: Console, what: str, total: int | None, before: int, every: float) -> Iterator[Update]:
    start = last = changed = time.perf_counter()
    known = before
    recent = deque([(start, before)], maxlen=_RECENT)

    def update(done: int, total: int | None = total, now: str = "", /) -> None:
        nonlocal last, changed, known
        moment = time.perf_counter()
        if done != known:
            changed, known = moment, done
        if moment - last >= max(every, _SHARE * (moment - start)):
            last = moment
            print_line(moment, done, total, now)
        if done != recent[-1][1] and moment - recent[-1][0] >= every:
            recent.append((moment, done))

    def print_line(moment: float, done: int, total: int | None, now: str) -> None:
        count = f"{done} of {total} done" if total is not None else f"{done} done"
        left = _time_left(moment, changed, done, total, *recent[0]) if total is not None else ""
        parts = (f"{what}: {count} after {duration(moment - start)}", left and f"{left} left", now)
        console.print(", ".join(part for part in parts if part), markup=False, soft_wrap=True)

    yield update
    if (seconds := time.perf_counter() - start) >= every:
        console.print(f"{what}: ended after {duration(seconds)}", markup=False, soft_wrap=True)


def metrics_text(
    *, loss: float | None = None, accuracy: float | None = None, throughput: float | None = None, unit: str = "images"
) -> str:
    """Write the metrics of a training run in one line.

    >>> metrics_text(loss=1.23456, accuracy=0.4567, throughput=18123.4)
    'loss 1.235, accuracy 45.7 %, 18,123 images/s'
    """
    texts = [f"loss {loss:.4g}"] if loss is not None else []
    texts += [f"accuracy {percent(accuracy)}"] if accuracy is not None else []
    texts += [f"{throughput:,.0f} {unit}/s"] if throughput is not None else []
    return ", ".join(texts)


def _time_left(moment: float, changed: float, done: int, total: int, start: float, before: int) -> str:
    """The time left at the speed between an earlier time and the last change; '' if it is not known.

    >>> _time_left(15.0, 10.0, 1, 4, 0.0, 0)  # 30 s at the change, 5 s ago
    '25 s'
    """
    if done <= before or changed <= start or total < done:
        return ""
    left = (total - done) * (changed - start) / (done - before) - (moment - changed)
    return duration(left) if left >= 0 else ""
