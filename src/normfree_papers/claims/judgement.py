"""The judge: whether a claim holds, by the 95 % confidence interval of each of its numbers over seeds or draws.

Judging is a pure function of a claim and a result, fresh from a run or read from a file. The Student t quantile and the
binomial limits are computed here from closed forms and bisection, because scipy is no dependency.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, Literal

from normfree_papers.claims.claim import Check, Claim, Scale
from normfree_papers.claims.depth_curves import mean

Status = Literal["holds", "fails", "undecided", "not run"]
Verdict = Literal["holds", "fails", "undecided", "missing", "paper errs"]
LEVEL = 0.95
"""The confidence level of every interval that is shown or judged."""


def admits(check: Check, value: float) -> bool:
    """Whether a number lies in the range of a check; NaN lies in none."""
    return (check.low is None or value >= check.low) and (check.high is None or value <= check.high)


def checks_at(claim: Claim, scale: Scale) -> tuple[Check, ...]:
    """The checks whose numbers a run of this scale measures."""
    return tuple(check for check in claim.checks if check.scale in (None, scale) and not check.lacks)


@dataclass(frozen=True)
class Row:
    """A check beside the measured values, one per seed or draw."""

    check: Check
    values: tuple[float, ...] = ()

    @property
    def measured(self) -> float | None:
        """The mean of the values; None if there are none."""
        return mean(self.values) if self.values else None

    @cached_property
    def interval(self) -> Interval | None:
        """The 95 % confidence interval; None for an exact number, one value, and values that are not finite."""
        if self.check.exact or not self.values:
            return None
        return share_interval(self.values) if self.check.binary else mean_interval(self.values)

    @property
    def margin(self) -> float:
        """The distance of the mean from the nearest bound, in half widths of the interval; infinite without width."""
        interval, value = self.interval, self.measured
        if interval is None or value is None or not interval.low < interval.high:
            return math.inf
        bounds = (bound for bound in (self.check.low, self.check.high) if bound is not None)
        return min(abs(value - bound) for bound in bounds) / ((interval.high - interval.low) / 2)

    @cached_property
    def verdict(self) -> Verdict:
        """Whether the interval lies in the range.

        If a value is not finite, there is no interval, and the mean is infinite or NaN. If the mean lies outside the
        range, the check fails: a diverged run refutes "it trains". Otherwise the check holds if all of several values
        lie in the range.
        """
        check, interval = self.check, self.interval
        inside = all(admits(check, value) for value in self.values)
        finite = all(map(math.isfinite, self.values))
        good: Verdict = "paper errs" if check.erratum else "holds"
        if self.measured is None:
            return "missing"
        if check.exact:
            return good if inside else "fails"
        if interval is None:
            if not finite and not admits(check, self.measured):
                return "fails"
            return good if inside and len(self.values) > 1 else "undecided"
        if admits(check, interval.low) and admits(check, interval.high):
            return good
        below = check.low is not None and interval.high < check.low
        above = check.high is not None and interval.low > check.high
        return "fails" if below or above else "undecided"


@dataclass(frozen=True)
class Judgement:
    """Whether a claim holds, with one row per check."""

    status: Status
    rows: tuple[Row, ...] = field(default=(), repr=False)

    @property
    def deciding(self) -> Row | None:
        """The main check with the worst verdict, and among those the one nearest to its bound; None without numbers."""
        order: tuple[Verdict, ...] = ("fails", "undecided", "holds", "paper errs")
        measured = [row for row in self.rows if row.check.main and row.values]
        return min(measured, key=lambda row: (order.index(row.verdict), row.margin), default=None)

    @property
    def summary(self) -> str:
        """The number of checks by verdict, in words, main ones and asides apart."""
        rows = [row for row in self.rows if row.check.main]
        asides = [row for row in self.rows if not row.check.main]
        return "; ".join(filter(None, (_counted(rows, "check"), _counted(asides, "aside"))))

    @property
    def missing(self) -> tuple[Check, ...]:
        """The main checks without a number."""
        return tuple(row.check for row in self.rows if row.verdict == "missing" and row.check.main)

    @property
    def errata(self) -> tuple[str, ...]:
        """Why numbers in the paper are wrong, each reason once."""
        return tuple(dict.fromkeys(row.check.erratum for row in self.rows if row.verdict == "paper errs"))


def _counted(rows: Sequence[Row], noun: str) -> str:
    if not rows:
        return ""
    count, errors = Counter(row.verdict for row in rows), sum(row.verdict == "paper errs" for row in rows)
    good = count["holds"] + errors
    parts = [f"{good} of {len(rows)} {noun}{'s' * (len(rows) > 1)} hold{'s' * (len(rows) == 1)}"]
    parts += [f"{count['fails']} fail{'s' * (count['fails'] == 1)}"] if count["fails"] else []
    parts += [f"{count['undecided']} undecided"] if count["undecided"] else []
    parts += [f"{count['missing']} not measured"] if count["missing"] else []
    parts += [f"{errors} error{'s' * (errors > 1)} in the paper"] if errors else []
    return ", ".join(parts)


def judge(claim: Claim, result: Mapping[str, Any] | None) -> Judgement:
    """Judge the result of a claim; None means that there is none.

    The main checks decide. A claim *fails* when one of them fails, *holds* when all hold, and is *undecided* otherwise:
    an interval straddles a bound, a number has a single value, or one is missing. It was *not run* when no check has a
    number, even if there is a result: all its training runs may be missing. In a quick result, checks for the full
    scale count as missing. A wrong number in the paper does not decide: the check then states the correct one.
    """
    given: Mapping[str, Any] = {} if result is None else result
    values, scale = given.get("values", {}), given.get("scale", "full")
    tested = checks_at(claim, scale)
    others = (check for check in claim.checks if check not in tested and check.scale != "quick")
    rows = (*(_row(check, values.get(check.name)) for check in tested), *(Row(check) for check in others))
    if all(row.verdict == "missing" for row in rows):
        return Judgement("not run", rows)
    verdicts = {row.verdict for row in rows if row.check.main}
    if "fails" in verdicts:
        return Judgement("fails", rows)
    return Judgement("holds" if verdicts <= {"holds", "paper errs"} else "undecided", rows)


def _row(check: Check, value: Any) -> Row:
    stored = value.get("values", ()) if isinstance(value, Mapping) else () if value is None else (value,)
    return Row(check, tuple(float(number) for number in stored))  # also reads 'nan' and 'inf'


# Intervals


@dataclass(frozen=True)
class Interval:
    """A confidence interval, from `low` to `high`."""

    low: float
    high: float


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
