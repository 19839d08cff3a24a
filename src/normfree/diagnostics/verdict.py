"""The verdict on a signal: one word for it, the growth per block from a robust fit, the worst block, and the remedy.

The words are *preserved*, *growing* (by less and less per block, as with batch norm), *exploding*, *vanishing* and
*dead branch*. Outliers are reported if the network is preserved or growing without them. The verdict is a pure function
of the signal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median
from typing import Any, Literal

import numpy as np

from normfree.diagnostics.outliers import Outlier, bounded_exp, find_outliers, without_outliers
from normfree.diagnostics.propagation import Signal
from normfree.diagnostics.sum_hooks import SumSignal
from normfree.report.formatting import shorten_names

SignalStatus = Literal["preserved", "growing", "vanishing", "exploding", "dead branch"]
SEVERITY: tuple[SignalStatus, ...] = ("preserved", "growing", "vanishing", "exploding", "dead branch")

HARMLESS: tuple[SignalStatus, ...] = ("preserved", "growing")

FAST = 1.5  # a factor per block that matters after a few blocks; He without normalization has 2
NOTICEABLE = 10.0  # a change from end to end below which even a fast one does not matter
GROWN = 4.0  # the least change inside stages that is called growing
OFFSETS = range(7)  # the variance at the beginning of a stage, in units of the variance that a block adds
BETTER = 0.6  # largest error of a power law relative to an exponential: 0.02 to 0.5 with batch norm, above 0.7 with He
LARGE = 1e3  # a change that is too large with any factor; networks with 1e4 did not train, with 4 they did


@dataclass(frozen=True)
class Direction:
    """The verdict on one direction.

    The backward direction runs from the last block to the first, so that a factor above 1 explodes in both directions.

    Attributes:
        status: The word for this direction; 'not measured' if the forward signal ends before the output.
        factor: The factor of the variance per block inside stages.
        total: The change of the variance from the first block on the signal's way to the last.
        worst: The block with the largest change.
        worst_factor: The factor of that block.
        broken_at: The first block on the signal's way where the variance is exactly 0 or not finite.
        inside: The change inside all stages together. It can be far larger than `total` if transitions reset the
            variance.
        sudden: Whether the variance was within bounds up to `broken_at`, so growth with depth is not the cause.
    """

    status: SignalStatus | Literal["not measured"]
    factor: float
    total: float
    worst: str
    worst_factor: float
    broken_at: str = ""
    inside: float = math.nan
    sudden: bool = False


@dataclass(frozen=True)
class Verdict:
    """The verdict on a signal.

    Attributes:
        status: The word for the network, the worst of both directions.
        forward: The verdict on the forward signal.
        backward: The verdict on the gradient.
        dead: The branches in which no weight gets a gradient.
        sentence: A description of the signal.
        recommendation: The remedy, or the place to look at.
        outliers: The blocks that stand out, if the network is preserved or growing without them.
    """

    status: SignalStatus
    forward: Direction
    backward: Direction
    dead: tuple[str, ...]
    sentence: str
    recommendation: str
    outliers: tuple[Outlier, ...] = ()

    @property
    def word(self) -> str:
        """The status, with the name of the first outlier if there is one."""
        if not self.outliers:
            return self.status
        return f"{self.status}, {'except' if self.status in HARMLESS else 'because of'} {self.outliers[0].name}"

    def at_least(self, status: SignalStatus) -> bool:
        """Tell whether the verdict is this bad or worse.

        An outlier counts as growing, and as vanishing if it differs tenfold, which normalization cannot
        compensate.

        Args:
            status: 'preserved', 'growing', 'vanishing', 'exploding' or 'dead branch', in order of severity.

        Returns:
            True if the status of the network or of an outlier is at least as severe.
        """
        found: list[SignalStatus] = [self.status]
        found += ["vanishing" if outlier.excess >= NOTICEABLE else "growing" for outlier in self.outliers]
        return max(map(SEVERITY.index, found)) >= SEVERITY.index(status)

    def to_json(self) -> dict[str, Any]:
        """Return the verdict as plain data; numbers may be NaN or infinite."""
        data = asdict(self)
        data["odd"] = data.pop("outliers")  # key kept for compatibility with 0.1
        return data


def judge(signal: Signal, *, method: str = "", supports: Callable[[str], bool] = lambda _name: True) -> Verdict:
    """Judge a signal.

    The growth inside a stage is a Theil–Sen fit of the log variance, so that one outlier does not count. The signal is
    *growing* if a power of the depth fits clearly better than an exponential. A direction is *exploding* if it changes
    a thousandfold, inside all stages together or from end to end, or tenfold from end to end with a factor of at least
    1.5 per block (measured in a stage of three or more). It is *vanishing* by the inverse numbers. A branch is *dead*
    if none of its weights gets a gradient although one arrives at its sum; a branch that merely starts at zero, as with
    Fixup, is not. Sums that no gradient reaches because the branch around them starts at zero are left out of the
    backward direction. If the signal is harmless without its outliers, the verdict recommends to look at them and not
    to use a method.

    Args:
        signal: The result of `propagate`.
        method: The method that the network has, which is not recommended.
        supports: Tells whether the network can have the method of this name. Other methods are not recommended.

    Returns:
        One word for the network, both directions, a description, and the remedy.
    """
    waiting = _not_reached_yet(signal.sums)
    left_out = set(waiting)
    if signal.unmeasured:
        left_out.update(s.name for s in signal.sums if math.isnan(s.sum_gradient.variance))
    reached = [s for s in signal.sums if s.name not in left_out]
    forward_series = [(s.name, s.stage, s.sum.variance) for s in signal.sums]
    backward_series = [(s.name, s.stage, s.sum_gradient.variance) for s in reached]
    forward = _direction(forward_series)
    backward = _direction(backward_series, backward=True)
    dead = tuple(s for s in reached if s.sum_gradient.norm > 0 and not s.learns)
    statuses: list[SignalStatus] = [d.status for d in (forward, backward) if d.status != "not measured"]
    if dead:
        statuses.append("dead branch")
    status = max(statuses, key=SEVERITY.index)
    after_blocks = _problem_after_blocks(signal) if forward.status in HARMLESS else ""
    if after_blocks and not dead:
        status = "exploding"
    broken = dead or after_blocks or forward.broken_at or backward.broken_at
    outliers = () if broken else find_outliers(signal)
    if outliers and status not in HARMLESS:
        corrected = (
            _direction(without_outliers(outliers, forward_series)),
            _direction(without_outliers(outliers, backward_series, backward=True), backward=True),
        )
        outliers = outliers if all(d.status in (*HARMLESS, "not measured") for d in corrected) else ()
    sentence = _sentence(forward, backward, dead, waiting, outliers, signal.unmeasured)
    if signal.missing_sums:
        add = "add nothing to their" if len(signal.missing_sums) > 1 else "adds nothing to its"
        sentence += f"; {shorten_names(signal.missing_sums)} {add} input, unlike others of the class"
    if after_blocks:
        sentence += f"; {after_blocks}"
        advice = "look at the layers between the last block and the output"
    elif outliers:
        whose = "its" if len(outliers) == 1 else "their"
        names = shorten_names([o.name for o in outliers])
        advice = f"look at {names}: compare {whose} weights, scales and normalizers with the others'"
    else:
        first, last = signal.sums[0].name, signal.sums[-1].name
        advice = _suspect(forward, backward, dead, first, last)
        if not advice and signal.missing_sums:
            names = shorten_names(signal.missing_sums)
            advice = f"look at {names}: the forward pass has no sum x + f(x), or leaves f(x) out of it"
        advice = advice or _advice(forward, backward, method, supports)
    return Verdict(status, forward, backward, tuple(s.name for s in dead), sentence, advice, outliers)


def _problem_after_blocks(signal: Signal) -> str:
    """The problem between the last block and the output; '' if there is none."""
    last = signal.sums[-1].sum
    grown = signal.output / power if (power := last.variance + last.mean_square) > 0 else math.nan
    if signal.unmeasured:
        return "the values become non-finite after the last block"
    return f"the output is ×{math.sqrt(grown):.1e} as large as the signal there" if grown >= LARGE**2 else ""


def _not_reached_yet(sums: Sequence[SumSignal]) -> list[str]:
    """The sums without a gradient inside a branch that returns zero, while the sum around them has a gradient."""
    known = {s.name: s for s in sums}
    found: dict[str, None] = {}
    for s in reversed(sums):
        outer = None if s.around is None else known.get(s.around)
        if outer is None or s.sum_gradient.norm != 0:
            continue
        if outer.name in found or (outer.branch.norm == 0 and outer.sum_gradient.norm > 0):
            found[s.name] = None
    return list(reversed(found))


def _direction(series: Sequence[tuple[str, int, float]], *, backward: bool = False) -> Direction:
    """Judge one direction from names, stages and variances in the order of the blocks."""
    if not series:
        return Direction("not measured", math.nan, math.nan, "", math.nan)
    names, stages, values = zip(*series, strict=True)
    travelled = list(zip(names, values, strict=True))[:: -1 if backward else 1]
    broken = next((name for name, value in travelled if not math.isfinite(value)), "")
    silent = next((name for name, value in travelled if value <= 0), "")
    if broken or silent:
        before = [value for _, value in travelled[: [name for name, _ in travelled].index(broken or silent)]]
        sudden = not before or 1 / LARGE < before[-1] / before[0] < LARGE
        if broken:
            return Direction("exploding", math.nan, math.inf, broken, math.inf, broken, sudden=sudden)
        return Direction("vanishing", math.nan, 0.0, silent, 0.0, silent, sudden=sudden)
    slope, inside, polynomial = _fit(stages, [math.log(value) for value in values])
    if backward:
        slope, inside = -slope, -inside
    logs = [math.log(value) for _, value in travelled]
    ends = max(1, min(3, len(logs) // 8))
    whole = median(logs[-ends:]) - median(logs[:ends])
    growth, decay = max(inside, whole), min(inside, whole)
    status: SignalStatus = "preserved"
    # One step per stage cannot show a trend; with batch norm it is 2.
    fast = slope if max(map(list(stages).count, stages)) > 2 else 0.0
    if polynomial and inside >= math.log(GROWN):
        status = "growing"
    elif growth >= math.log(LARGE) or (fast >= math.log(FAST) and whole >= math.log(NOTICEABLE)):
        status = "exploding"
    elif decay <= -math.log(LARGE) or (fast <= -math.log(FAST) and whole <= -math.log(NOTICEABLE)):
        status = "vanishing"
    steps = [b - a for a, b in pairwise(logs)] or [0.0]
    worst = (min if status == "vanishing" else max)(range(len(steps)), key=steps.__getitem__)
    # A forward sum shows the effect of its own block, a gradient that of the block after it.
    place = travelled[worst if backward else min(worst + 1, len(travelled) - 1)][0]
    factor, total, worst_factor, inside_factor = map(bounded_exp, (slope, whole, steps[worst], inside))
    return Direction(status, factor, total, place, worst_factor, inside=inside_factor)


def _fit(stages: Sequence[int], logs: Sequence[float]) -> tuple[float, float, bool]:
    """The log factor per block inside stages, its sum over all stages, and whether a power of the depth fits better.

    Batch norm divides by the accumulated variance, so that the l-th block of a stage adds a fraction of 1/(l + k),
    where k is the variance at the beginning of the stage: the variance grows as a power of l + k (forward as l + k
    itself), not as an exponential. Two points cannot distinguish the two.
    """
    inside, steps, exponential_error = 0.0, 0, 0.0
    power_errors = np.zeros(len(OFFSETS))
    for stage in dict.fromkeys(stages):
        observed = np.array([log for log, s in zip(logs, stages, strict=True) if s == stage])
        if len(observed) < 2:
            continue
        depth = np.arange(1.0, len(observed) + 1)
        slopes, errors = _theil_sen(np.stack([depth, *(np.log(depth + k) for k in OFFSETS)]), observed)
        slope = float(slopes[0])
        if len(observed) > 2:
            exponential_error += errors[0]
            power_errors += errors[1:]
        inside += slope * (len(observed) - 1)
        steps += len(observed) - 1
    polynomial = bool(power_errors.min() < BETTER * exponential_error)
    return inside / steps if steps else 0.0, inside, polynomial


def _theil_sen(x: np.ndarray, y: np.ndarray, limit: int = 400) -> tuple[np.ndarray, np.ndarray]:
    """For each row of x, the median of the slopes between all pairs of points, and the error of a line with that slope.

    The intercept is a median, too, and the error is the sum of the distances. At most `limit` evenly spaced points are
    used for the fit.
    """
    chosen = np.linspace(0, len(y) - 1, min(len(y), limit)).round().astype(int)
    chosen_x, chosen_y = x[:, chosen], y[chosen]
    i, j = np.triu_indices(len(chosen), 1)
    slopes = np.median((chosen_y[j] - chosen_y[i]) / (chosen_x[:, j] - chosen_x[:, i]), axis=1, keepdims=True)
    starts = np.median(chosen_y - slopes * chosen_x, axis=1, keepdims=True)
    return slopes[:, 0], np.abs(y - starts - slopes * x).sum(1)


def _sentence(
    forward: Direction,
    backward: Direction,
    dead: Sequence[SumSignal],
    waiting: Sequence[str],
    outliers: Sequence[Outlier],
    unmeasured: str,
) -> str:
    def describe(what: str, d: Direction) -> str:
        if d.status == "not measured":
            return f"{what} is {not_measured(unmeasured)}"
        if d.broken_at:
            reason = "overflows" if math.isinf(d.total) else "is exactly 0"
            return f"{what} {reason} at {d.broken_at}"
        if d.status == "preserved":
            word = "is preserved" if 1 / NOTICEABLE <= d.total <= NOTICEABLE else "stays within bounds"
            return f"{what} {word} (×{d.factor:.2f} per block inside stages, ×{d.total:.2g} in all)"
        if d.status == "growing":
            changes = f"×{d.inside:.2g} inside stages, ×{d.total:.2g} in all"
            return f"{what} grows as a power of the depth, by less and less per block ({changes})"
        stages = f", ×{d.inside:.1e} inside stages" if abs(math.log10(d.inside / d.total)) > 1 else ""
        return f"{what} is {d.status}: ×{d.factor:.2f} per block{stages}, ×{d.total:.1e} in all, worst at {d.worst}"

    parts = [describe("the forward signal", forward), describe("the gradient", backward)]
    if dead:
        names = shorten_names([s.name for s in dead])
        parts.append(
            f"{len(dead)} branch{'es are' if len(dead) > 1 else ' is'} dead ({names}): no weight gets a gradient"
        )
    if waiting:
        whom = "them" if len(waiting) > 1 else "it"
        parts.append(f"no gradient reaches {shorten_names(waiting)} yet: the branch around {whom} starts at zero")
    parts += map(str, outliers[:3])
    return "; ".join(parts)


def not_measured(place: str) -> str:
    """The reason for missing gradients: the forward signal ended at a place.

    >>> not_measured("body.0.7")
    'not measured: the forward signal is not finite from body.0.7 on'
    """
    return f"not measured: the forward signal is not finite from {place} on"


def _suspect(forward: Direction, backward: Direction, dead: Sequence[SumSignal], first: str, last: str) -> str:
    """The place to look at and its possible defects, if the problem is local, so no method would fix it."""
    if forward.sudden:
        where = forward.broken_at if forward.broken_at != first else f"{first} and the layers before it"
        if forward.status == "vanishing":
            return (
                f"look at {where}: something returns zero, such as a ReLU that is never positive or a weight of zeros"
            )
        return (
            f"look at {where}: a weight is not finite, or something divides by zero or takes a root or logarithm "
            "outside its range"
        )
    if cut := [s.name for s in dead if s.branch.variance > 1e-6 * s.branch.mean_square]:
        return f"look at the branch of {cut[0]}: it returns a signal, but detach() or no_grad cuts its gradient off"
    if dead:
        return (
            f"look at the branch of {dead[0].name}: two zero layers with an activation between them never learn "
            "('fixup' zeroes only the last); neither do layers around a ReLU that is never positive"
        )
    if backward.sudden:
        where = "the output" if backward.broken_at == last else "the next sum"
        if backward.status == "vanishing":
            return (
                f"look between {backward.broken_at} and {where}: detach() or no_grad cuts the gradient off there, or a "
                "ReLU that is never positive or a factor of zero does"
            )
        return f"look between {backward.broken_at} and {where}: something there has no finite "
        "derivative, such as sqrt at 0"
    return ""


def _advice(forward: Direction, backward: Direction, method: str, supports: Callable[[str], bool]) -> str:
    """The remedy; a network that already has the recommended method has been changed at some place."""
    advice = _remedy(forward, backward, supports)
    if not method or f"'{method}'" not in advice:
        return advice
    worse = max((d for d in (backward, forward) if d.status != "not measured"), key=lambda d: SEVERITY.index(d.status))
    place = worse.broken_at or worse.worst
    return f"it has '{method}' already, which does not cause this: look at {place}"


def _remedy(forward: Direction, backward: Direction, supports: Callable[[str], bool]) -> str:
    """The remedy, with methods that the network supports; every network with residual sums supports Fixup."""

    def use(*names: str) -> str:
        supported = [f"'{name}'" for name in names if supports(name)] or ["'fixup'"]
        return f"use {' or '.join(supported)}"

    if forward.status == "exploding":
        return f"{use('fixup', 'wn')} to preserve the signal at any depth"
    if forward.status == "vanishing":
        return f"the weights are too small for the depth: {use('fixup', 'wn')}"
    if backward.status == "exploding":
        return f"only the gradient explodes: {use('isograd', 'convshort')} to preserve it, or clip gradients"
    if backward.status == "vanishing":
        return f"early blocks hardly learn: {use('isograd', 'fixup')} to preserve the gradient"
    if any(d.status == "growing" and max(d.inside, d.total) >= LARGE for d in (forward, backward)):
        return f"large, but no explosion: it trains with normalization; without normalization {use('isograd', 'fixup')}"
    return "nothing to do"
