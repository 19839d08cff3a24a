"""Numbers, durations and lists of names as text."""

from __future__ import annotations

import re
from collections.abc import Sequence

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
