"""A sign of life of long work: a bar on a terminal, else a line now and then, on stderr."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from normfree.report.terminal import open_console

if TYPE_CHECKING:
    from rich.console import Console

EVERY = 2.0  # seconds between two lines, and before the first
_SHARE = 0.04  # of the time so far that passes at least between two lines, so that a long log stays short
_WIDE = 120  # columns of a terminal with room for all
_RECENT = 15  # moments over which the speed is taken, so that a slow start is forgotten


class Update(Protocol):
    """Says how much is done, of how much if that has changed, and what goes on."""

    def __call__(self, done: int, total: int | None = None, now: str = "", /) -> None: ...


@contextmanager
def progress(
    what: str, total: int | None = None, *, done: int = 0, every: float | None = None, show: bool = True
) -> Iterator[Update]:
    """Show how far work is and how long it will take: a bar that is gone afterwards, or plain lines.

        with progress("resnet110", steps, done=resumed) as update:
            update(step, steps, numbers(loss=1.2, accuracy=0.4, throughput=18000))

    Args:
        what: the work, in a word.
        total: the number of steps, where it is known.
        done: steps that an earlier process did, which say nothing about the speed.
        every: seconds between plain lines at the least (`EVERY`); work that is done sooner prints none.
        show: False shows nothing, for all processes of a group but one.
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
            tell(moment, done, total, now)
        if done != recent[-1][1] and moment - recent[-1][0] >= every:
            recent.append((moment, done))

    def tell(moment: float, done: int, total: int | None, now: str) -> None:
        count = f"{done} of {total} done" if total is not None else f"{done} done"
        left = _left(moment, changed, done, total, *recent[0]) if total is not None else ""
        parts = (f"{what}: {count} after {duration(moment - start)}", left and f"{left} left", now)
        console.print(", ".join(part for part in parts if part), markup=False, soft_wrap=True)

    yield update
    if (seconds := time.perf_counter() - start) >= every:
        console.print(f"{what}: ended after {duration(seconds)}", markup=False, soft_wrap=True)


def numbers(
    *, loss: float | None = None, accuracy: float | None = None, throughput: float | None = None, unit: str = "images"
) -> str:
    """What a training run says of itself in a line.

    >>> numbers(loss=1.23456, accuracy=0.4567, throughput=18123.4)
    'loss 1.235, accuracy 45.7 %, 18,123 images/s'
    """
    texts = [f"loss {loss:.4g}"] if loss is not None else []
    texts += [f"accuracy {100 * accuracy:.1f} %"] if accuracy is not None else []
    texts += [f"{throughput:,.0f} {unit}/s"] if throughput is not None else []
    return ", ".join(texts)


def duration(seconds: float) -> str:
    """A time in its two largest units.

    >>> [duration(s) for s in (0.4, 59.6, 61, 3599, 7260, 180000)]
    ['0 s', '1 min 0 s', '1 min 1 s', '59 min 59 s', '2 h 1 min', '50 h 0 min']
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def _left(moment: float, changed: float, done: int, total: int, start: float, before: int) -> str:
    """The time left, at the speed from an earlier moment to that of the last change; '' where it is not known.

    >>> _left(15.0, 10.0, 1, 4, 0.0, 0)  # 30 s at the change, 5 s ago
    '25 s'
    """
    if done <= before or changed <= start or total < done:
        return ""
    left = (total - done) * (changed - start) / (done - before) - (moment - changed)
    return duration(left) if left >= 0 else ""
