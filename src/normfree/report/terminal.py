"""Text for a terminal: numbers and names as text, the console, curves as one line of bars, and progress on stderr."""

from __future__ import annotations

import math
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
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


def compact(number: float) -> str:
    """Write a number with three significant digits, thousands separated; powers of ten below 1e-3 and above 1e6.

    >>> [compact(n) for n in (180.4, 0.01234, 1234567 / 100, 2.0, 1e-5, 3.5e7, 0.0, float("inf"))]
    ['180', '0.0123', '12,300', '2', '1e-5', '3.5e7', '0', 'inf']
    """
    if number != number or number in (float("inf"), float("-inf")) or number == 0:
        return f"{number:.3g}"
    rounded = float(f"{number:.3g}")
    if not 1e-3 <= abs(rounded) <= 1e6:
        digits, _, power = f"{rounded:.2e}".partition("e")
        return f"{digits.rstrip('0').rstrip('.')}e{int(power)}"
    return f"{rounded:,.0f}" if abs(rounded) >= 100 else f"{rounded:.3g}"


def shorten_names(names: Sequence[str], limit: int = 3) -> str:
    """List the first few names and count the rest.

    >>> shorten_names(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


_BARS = "▁▂▃▄▅▆▇█"
_UNBOUNDED = 100_000  # columns of a pipe


def open_console(*, stderr: bool = False) -> Console:
    """Return a console on stdout or stderr.

    It prints no colours and styles if NO_COLOR is set. In a pipe, lines are not wrapped unless COLUMNS is set.
    """
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    unbounded = not stream.isatty() and not os.environ.get("COLUMNS") and not os.environ.get("FORCE_COLOR")
    width = _UNBOUNDED if unbounded else None

    class PlainConsole(Console):
        """A console on which the texts it prints cannot move the cursor or change colours."""

        def print(self, *objects: Any, **settings: Any) -> None:
            super().print(*(printable(text) if type(text) is str else text for text in objects), **settings)

    if os.environ.get("NO_COLOR"):  # rich's own no_color keeps bold and dim
        return PlainConsole(file=stream, color_system=None, emoji=False, highlight=False, width=width)
    return PlainConsole(file=stream, emoji=False, highlight=False, width=width)


def sparkline(values: Sequence[float], width: int = 20) -> str:
    """Draw a curve as one line of bars; each bar is the mean logarithm of its share of the values.

    A bar is ✗ if one of its values is NaN or infinite, and 0 if all of them are zero. The line spans at least a decade,
    so that noise does not look like growth.

    >>> sparkline([1, 10, 100, 1000])
    '▁▃▆█'

    Raises:
        ValueError: if there are no values, the width is below 1, or a value is negative.
    """
    numbers = [float(value) for value in values]
    if not numbers or width < 1:
        raise ValueError(
            f"expected values and width >= 1, got {len(numbers)} values and width {width}; pass at least one"
        )
    if (negative := next((v for v in numbers if v < 0), None)) is not None:
        raise ValueError(f"expected values >= 0 for a logarithmic line, got {negative:g}; pass their sizes")
    count = min(width, len(numbers))
    edges = [len(numbers) * i // count for i in range(count + 1)]
    bars = [_mean_logarithm(numbers[a:b]) for a, b in pairwise(edges)]
    drawn = [bar for bar in bars if isinstance(bar, float)] or [0.0]
    low, high = min(drawn), max(drawn)
    if high - low < 1:
        low, high = (low + high) / 2 - 0.5, (low + high) / 2 + 0.5
    top = len(_BARS) - 1
    return "".join(bar if isinstance(bar, str) else _BARS[round((bar - low) / (high - low) * top)] for bar in bars)


def _mean_logarithm(values: Sequence[float]) -> float | str:
    if not all(map(math.isfinite, values)):
        return "✗"
    drawn = [math.log10(v) for v in values if v > 0]
    return math.fsum(v / len(drawn) for v in drawn) if drawn else "0"


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
