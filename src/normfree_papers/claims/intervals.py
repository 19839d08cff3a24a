"""Confidence intervals of a mean over seeds, and of a share of yes or no outcomes.

The Student t quantile and the binomial limits are computed here from closed forms and bisection, because scipy is no
dependency.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

LEVEL = 0.95
"""The confidence level of every interval that is shown or judged."""


@dataclass(frozen=True)
class Interval:
    """A confidence interval, from `low` to `high`."""

    low: float
    high: float


def mean(values: Sequence[float]) -> float:
    """The mean; infinite or NaN if a value is."""
    return (math.fsum(values) if all(map(math.isfinite, values)) else sum(values)) / len(values)


def mean_interval(values: Sequence[float]) -> Interval | None:
    """The t-interval of the mean: mean ± t·s/√n; None for one value, or if a value is not finite.

    It assumes independent values with about a normal mean. Values that are all equal give an interval of no width: the
    number does not depend on the seed.

    >>> limits = mean_interval([1.0, 3.0])
    >>> round(limits.low, 4), round(limits.high, 4)
    (-10.7062, 14.7062)
    """
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return None
    centre = mean(values)
    half = t_quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(centre - half, centre + half)


def share_interval(outcomes: Sequence[float]) -> Interval:
    """The exact (Clopper-Pearson) interval of the share of successes among outcomes of 0 and 1.

    The t-interval has no width if all outcomes agree, and would call three of three certain.

    Raises:
        ValueError: for no outcomes, or other values than 0 and 1.

    >>> limits = share_interval([1, 1, 1])
    >>> round(limits.low, 4), limits.high
    (0.2924, 1.0)
    """
    if not outcomes or any(outcome not in (0, 1) for outcome in outcomes):
        raise ValueError(f"expected outcomes of 0 and 1, got {list(outcomes)}; leave out binary= for another number")
    yes, count, tail = sum(outcome == 1 for outcome in outcomes), len(outcomes), (1 - LEVEL) / 2
    low = _root(lambda p: _at_least(yes, count, p) - tail) if yes > 0 else 0.0
    high = _root(lambda p: tail - _at_least(count - yes, count, 1 - p)) if yes < count else 1.0
    return Interval(low, high)


def _at_least(yes: int, count: int, p: float) -> float:
    """The probability of at least `yes` successes."""
    return math.fsum(math.comb(count, k) * p**k * (1 - p) ** (count - k) for k in range(yes, count + 1))


@cache
def t_quantile(degrees: int, level: float = LEVEL) -> float:
    """The t for which a Student variable lies within ±t with probability `level`.

    >>> round(t_quantile(2), 3)
    4.303
    """
    if degrees < 1 or not 0 < level < 1:
        raise ValueError(f"expected degrees >= 1 and 0 < level < 1, got {degrees} and {level}")
    return math.sqrt(degrees) * math.tan(_root(lambda u: _within(u * math.pi / 2, degrees) - level) * math.pi / 2)


def _within(angle: float, degrees: int) -> float:
    """P(|T| <= √ν tan θ), the finite sum for whole ν (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    odd = degrees % 2
    term = math.cos(angle) if odd else 1.0
    total = 0.0
    for k in range(degrees // 2):
        total += term
        term *= math.cos(angle) ** 2 * ((2 * k + 2) / (2 * k + 3) if odd else (2 * k + 1) / (2 * k + 2))
    return 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total


def _root(rises: Callable[[float], float]) -> float:
    """The zero of an increasing function between 0 and 1, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if rises(middle) < 0 else (low, middle)
    return (low + high) / 2
