"""The console, and progress on stderr: times, shares and metrics as text."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from rich.console import Console

# All of Unicode's control characters except tab and newline, and those that change the direction of text.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def duration(seconds: float) -> str:
    """Write a time in its two largest units.

    >>> [duration(s) for s in (0.4, 59.6, 61, 3599, 7260, 180000)]
    ['0 s', '1 min 0 s', '1 min 1 s', '59 min 59 s', '2 h 1 min', '50 h 0 min']
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def printable(text: str) -> str:
    """Write the control characters of a text visibly, so that a name from a file cannot command a terminal.

    >>> printable("layer\\x1b[2J, one\\nline\\ttab")
    'layer\\\\x1b[2J, one\\nline\\ttab'
    """
    return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


def percent(fraction: float | None, spread: float | None = None, *, digits: int = 1) -> str:
    """Write a fraction of 1, and its spread if there is one, in per cent; None is blank.

    >>> percent(0.8351), percent(0.8351, 0.0123), percent(0.8351, digits=2), percent(None)
    ('83.5 %', '83.5 ± 1.2 %', '83.51 %', '')
    """
    if fraction is None:
        return ""
    error = "" if spread is None else f" ± {100 * spread:.{digits}f}"
    return f"{100 * fraction:.{digits}f}{error} %"


_UNBOUNDED = 100_000  # columns of a pipe


def open_console(*, stderr: bool = False) -> Console:
    """Return a console on stdout or stderr.

    It prints no colours and styles if NO_COLOR is set. In a pipe, lines are not wrapped unless COLUMNS is set. Square
    brackets are text, as in pip install '.[plots]', and not rich's markup.
    """
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    unbounded = not stream.isatty() and not os.environ.get("COLUMNS") and not os.environ.get("FORCE_COLOR")
    width = _UNBOUNDED if unbounded else None

    class PlainConsole(Console):
        """A console on which the texts it prints cannot move the cursor or change colours."""

        def print(self, *objects: Any, **settings: Any) -> None:
            super().print(*(printable(text) if type(text) is str else text for text in objects), **settings)

    plain: dict[str, Any] = {"file": stream, "markup": False, "emoji": False, "highlight": False, "width": width}
    if os.environ.get("NO_COLOR"):  # rich's own no_color keeps bold and dim
        return PlainConsole(color_system=None, **plain)
    return PlainConsole(**plain)


ProgressCallback = Callable[[int, int, str], None]  # steps done, steps in total, a text on the current one

EVERY = 2.0  # seconds between two lines, and before the first
_PATIENCE = 5.0  # seconds before the line of a notice
_NOTEBOOK = 0.5  # the same in a notebook, where a line takes the place of the one before
_SHARE = 0.04  # minimum gap between lines, as a fraction of elapsed time, so that a long log stays short
_WIDE = 120  # columns of a terminal with room for every part of the bar
_RECENT = 15  # times over which the speed is measured, so that a slow start is forgotten


class Update(Protocol):
    """Reports the steps done, the total if it has changed, and a text on the current step."""

    def __call__(self, done: int, total: int | None = None, now: str = "", /) -> None: ...


@contextmanager
def progress(
    what: str,
    total: int | None = None,
    *,
    done: int = 0,
    every: float | None = None,
    show: bool = True,
    estimate: bool = True,
) -> Iterator[Update]:
    """Show how far work is and how long it will take: a bar that disappears at the end, or plain lines.

    In a notebook it is one line that is updated in place.

        with progress("resnet110", steps, done=resumed) as update:
            update(step, steps, metrics_text(loss=1.2, accuracy=0.4, throughput=18000))

    Args:
        what: The name of the work.
        total: The number of steps, if it is known.
        done: The steps of an earlier process, which do not count for the speed.
        every: The least number of seconds between plain lines (default: `EVERY`). Shorter work prints no line.
        show: False shows nothing, as in all processes of a distributed run but one.
        estimate: Whether to show the time left at the speed so far; False for work whose texts say it.
    """
    if not show:
        yield lambda *_: None
        return
    console = open_console(stderr=True)
    if in_notebook():
        pause = _NOTEBOOK if every is None else every
        with _lines(_NotebookLine(), what, total, done, pause, estimate=estimate, share=0.0) as update:
            yield update
    elif console.is_terminal:
        with _bar(console, what, total, done, estimate) as update:
            yield update
    else:
        with _lines(console, what, total, done, EVERY if every is None else every, estimate=estimate) as update:
            yield update


@contextmanager
def notice(text: str) -> Iterator[None]:
    """Print a line on stderr if the `with` block takes long, where there is no bar: in a pipe, or in a log."""
    console = open_console(stderr=True)
    timer = threading.Timer(_PATIENCE, lambda: console.print(text, markup=False, soft_wrap=True))
    timer.daemon = True
    if not console.is_terminal:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def _bar(console: Console, what: str, total: int | None, before: int, estimate: bool) -> Iterator[Update]:
    from rich import progress as rich
    from rich.table import Column

    wide = console.width >= _WIDE
    columns: tuple[rich.ProgressColumn, ...] = (
        rich.TextColumn("{task.fields[what]}", markup=False),
        rich.BarColumn(bar_width=25 if wide else 10),
        rich.TextColumn("{task.fields[count]}"),
        *((rich.TimeElapsedColumn(),) if wide else ()),
        *((rich.TimeRemainingColumn(),) if estimate else ()),
        # The one column that may take a second line where there is no room.
        rich.TextColumn("{task.fields[now]}", markup=False, table_column=Column(no_wrap=False)),
    )
    with rich.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total, completed=before, what=what, count="", now="")

        def update(done: int, total: int | None = total, now: str = "", /) -> None:
            count = f"{done}/{total}" if total is not None else f"{done}"
            bar.update(task, completed=done, total=total, count=count, now=now)

        yield update


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook, such as Jupyter's."""
    return "ipykernel" in sys.modules and "IPython" in sys.modules and sys.modules["IPython"].get_ipython() is not None


class _NotebookLine:
    """Prints each line of a notebook in place of the one before."""

    def __init__(self) -> None:
        self._handle: Any = None

    def print(self, text: str, **_: Any) -> None:
        content = {"text/plain": printable(text)}
        if self._handle is None:
            from IPython.display import display

            self._handle = display(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)


@contextmanager
def _lines(
    console: Console | _NotebookLine,
    what: str,
    total: int | None,
    before: int,
    every: float,
    *,
    estimate: bool,
    share: float | None = None,
) -> Iterator[Update]:
    share = _SHARE if share is None else share
    start = last = changed = time.perf_counter()
    known = before
    recent = deque([(start, before)], maxlen=_RECENT)

    def update(done: int, total: int | None = total, now: str = "", /) -> None:
        nonlocal last, changed, known
        moment = time.perf_counter()
        if done != known:
            changed, known = moment, done
        if moment - last >= max(every, share * (moment - start)):
            last = moment
            print_line(moment, done, total, now)
        if done != recent[-1][1] and moment - recent[-1][0] >= every:
            recent.append((moment, done))

    def print_line(moment: float, done: int, total: int | None, now: str) -> None:
        count = f"{done} of {total} done" if total is not None else f"{done} done"
        left = _time_left(moment, changed, done, total, *recent[0]) if estimate and total is not None else ""
        parts = (f"{what}: {count} after {duration(moment - start)}", left and f"{left} left", now)
        console.print(", ".join(part for part in parts if part), markup=False, soft_wrap=True)

    yield update
    if (seconds := time.perf_counter() - start) >= every:
        console.print(f"{what}: ended after {duration(seconds)}", markup=False, soft_wrap=True)


def metrics_text(
    *,
    loss: float | None = None,
    accuracy: float | None = None,
    validation: float | None = None,
    throughput: float | None = None,
    unit: str = "images",
) -> str:
    """Write the metrics of a training run in one line; `validation` is the accuracy on the validation data.

    >>> metrics_text(loss=1.23456, accuracy=0.4567, validation=0.5012, throughput=18123.4)
    'loss 1.235, accuracy 45.7 %, validation 50.1 %, 18,123 images/s'
    """
    texts = [f"loss {loss:.4g}"] if loss is not None else []
    texts += [f"accuracy {percent(accuracy)}"] if accuracy is not None else []
    texts += [f"validation {percent(validation)}"] if validation is not None else []
    texts += [f"{throughput:,.0f} {unit}/s"] if throughput is not None else []
    return ", ".join(texts)


@contextmanager
def training_progress(model: str, *, done: int = 0, show: bool = True) -> Iterator[Callable[[Any], None]]:
    """Show the progress of a training run until the end of the `with` block; yield a function of its `Snapshot`s.

    The line has the metrics of the run; `done` and `show` are those of `progress`.
    """
    with progress(model, done=done, show=show) as update:

        def show_progress(now: Any) -> None:
            validation = None if now.validation is None else now.validation.accuracy
            text = metrics_text(
                loss=now.loss, accuracy=now.accuracy, validation=validation, throughput=now.throughput, unit=now.unit
            )
            update(now.done, now.total, text)

        yield show_progress


def _time_left(moment: float, changed: float, done: int, total: int, start: float, before: int) -> str:
    """The time left at the speed between an earlier time and the last change; '' if it is not known.

    >>> _time_left(15.0, 10.0, 1, 4, 0.0, 0)  # 30 s at the change, 5 s ago
    '25 s'
    """
    if done <= before or changed <= start or total < done:
        return ""
    left = (total - done) * (changed - start) / (done - before) - (moment - changed)
    return duration(left) if left >= 0 else ""
