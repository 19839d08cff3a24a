"""What a signal means: growth a block from a robust fit, one word for it, the worst place, and what to do.

The words: *preserved*, *growing* (by ever less a block, as with batch norm), *exploding*, *vanishing*, *dead branch*.
Single blocks that stand out are told where the network would be preserved or growing without them. Judging is a pure
function of the signal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median
from typing import Any, Literal

import numpy as np

from normfree.diagnostics.outliers import Odd, odd_blocks
from normfree.diagnostics.propagation import Signal
from normfree.diagnostics.sum_hooks import SumSignal

Status = Literal["preserved", "growing", "vanishing", "exploding", "dead branch"]
SEVERITY: tuple[Status, ...] = ("preserved", "growing", "vanishing", "exploding", "dead branch")

CALM: tuple[Status, ...] = ("preserved", "growing")

FAST = 1.5  # a factor a block at which a handful of blocks already matter: He without normalization has 2
MANIFEST = 10.0  # a change from end to end below which even a fast one is no matter
GROWN = 4.0  # a change that calls for a word at all
OFFSETS = range(7)  # blocks' worth of variance that a stage may begin with
BETTER = 0.6  # a power law must leave less of an exponential's error: 0.02 to 0.5 with batch norm, 0.7 and more with He
LARGE = 1e3  # a change at which any factor is too much; networks with 1e4 did not train, with 4 they did


@dataclass(frozen=True)
class Direction:
    """The verdict on one direction: the factor a block inside stages, the total change, and the worst block.

    `total` is the change from the first block that the signal meets to the last; `inside` is that inside the stages,
    taken together, which can be far more where stages begin anew.

    The backward direction is counted from the last block to the first, so that a factor above 1 explodes in both. It is
    not measured where the forward signal ends before the output.

    `broken_at` is the first block, on the signal's way, where it is exactly 0 or no finite number; `sudden` says that
    it was within bounds until then, so that no law of growth is to blame.
    """

    status: Status | Literal["not measured"]
    factor: float
    total: float
    worst: str
    worst_factor: float
    broken_at: str = ""
    inside: float = math.nan
    sudden: bool = False


@dataclass(frozen=True)
class Verdict:
    """The word for the network, the two directions, the dead branches, what to do, and blocks that stand out.

    Such blocks are told where the network is preserved or growing but for them, or would be without them.
    """

    status: Status
    forward: Direction
    backward: Direction
    dead: tuple[str, ...]
    sentence: str
    recommendation: str
    odd: tuple[Odd, ...] = ()

    @property
    def word(self) -> str:
        """The status, and the block that stands out where there is one."""
        if not self.odd:
            return self.status
        return f"{self.status}, {'but for' if self.status in CALM else 'by'} {self.odd[0].name}"

    def at_least(self, status: Status) -> bool:
        """Whether the verdict is this bad or worse.

        A block that stands out counts as growing, and as vanishing where it does so tenfold: that is no growth which
        normalization bears.
        """
        harm: list[Status] = [self.status]
        harm += ["vanishing" if odd.by >= MANIFEST else "growing" for odd in self.odd]
        return max(map(SEVERITY.index, harm)) >= SEVERITY.index(status)

    def to_json(self) -> dict[str, Any]:
        """The verdict as plain data."""
        return asdict(self)


def judge(signal: Signal, *, method: str = "", admits: Callable[[str], bool] = lambda _name: True) -> Verdict:
    """Judge a signal; `method` is the one that the network has, which is not recommended to it.

    `admits` says of a method's name whether the network can have it; others are not recommended either.

    Growth inside a stage is a Theil–Sen fit of the log variance, so that one odd block does not count; it is *growing*
    (by ever less a block, as with batch norm) when a power of the depth fits clearly better than an exponential. A
    direction explodes when it changes a thousandfold, inside the stages taken together or from end to end, or tenfold
    from end to end with a factor of at least 1.5 a block (seen in a stage of three or more); it vanishes by the inverse
    numbers. A branch is dead when none of its weights gets a gradient, although one arrives at its sum; one that merely
    starts at zero, as with Fixup, is not. Sums that no gradient reaches because the branch around them starts at zero
    are left out of the backward direction. Single odd blocks (`odd_blocks`) are told by name, and are to be looked at
    rather than a method used where the words are good but for them, or would be without them.
    """
    waiting = _waiting(signal.sums)
    left_out = set(waiting)
    if signal.unmeasured:
        left_out.update(s.name for s in signal.sums if math.isnan(s.sum_gradient.variance))
    reached = [s for s in signal.sums if s.name not in left_out]
    series = (
        [(s.name, s.stage, s.sum.variance) for s in signal.sums],
        [(s.name, s.stage, s.sum_gradient.variance) for s in reached],
    )
    forward, backward = (_direction(way, backward=i == 1) for i, way in enumerate(series))
    dead = tuple(s for s in reached if s.sum_gradient.norm > 0 and not s.learns)
    statuses: list[Status] = [d.status for d in (forward, backward) if d.status != "not measured"]
    if dead:
        statuses.append("dead branch")
    status = max(statuses, key=SEVERITY.index)
    behind = _behind(signal) if forward.status in CALM else ""
    if behind and not dead:
        status = "exploding"
    odd = () if dead or behind or forward.broken_at or backward.broken_at else odd_blocks(signal)
    if odd and status not in CALM:
        without = (_direction(_without(odd, way, backward=i == 1), backward=i == 1) for i, way in enumerate(series))
        odd = odd if all(d.status in (*CALM, "not measured") for d in without) else ()
    sentence = _sentence(forward, backward, dead, waiting, odd, signal.unmeasured)
    if signal.unsummed:
        add = "add" if len(signal.unsummed) > 1 else "adds"
        sentence += f"; {_few(signal.unsummed)} {add} nothing to the input, as others of the class do"
    if behind:
        sentence += f"; {behind}"
        advice = "look at the layers between the last block and the output"
    elif odd:
        whose = "its" if len(odd) == 1 else "their"
        advice = (
            f"look at {_few([o.name for o in odd])}: compare {whose} weights, scales and normalizers with the others'"
        )
    else:
        first, last = signal.sums[0].name, signal.sums[-1].name
        advice = _place(forward, backward, dead, first, last)
        if not advice and signal.unsummed:
            advice = f"look at {_few(signal.unsummed)}: the forward pass has no sum x + f(x), or leaves f(x) out of it"
        advice = advice or _advice(forward, backward, method, admits)
    return Verdict(status, forward, backward, tuple(s.name for s in dead), sentence, advice, odd)


def _behind(signal: Signal) -> str:
    """What is wrong behind the last block, if anything."""
    last = signal.sums[-1].sum
    grown = signal.output / power if (power := last.variance + last.mean_square) > 0 else math.nan
    if signal.unmeasured:
        return "the numbers end behind the last block"
    return f"the output is ×{math.sqrt(grown):.1e} as large as the signal there" if grown >= LARGE**2 else ""


def _without(
    odd: Sequence[Odd], series: Sequence[tuple[str, int, float]], *, backward: bool
) -> list[tuple[str, int, float]]:
    """The series as if these blocks did what their likes do."""
    excess = {
        o.name: ratio
        for o in odd
        if 0 < (ratio := o.backward / o.usual_backward if backward else o.forward / o.usual_forward) < math.inf
    }
    found: list[tuple[str, int, float]] = []
    factor = 1.0
    for name, stage, value in series[:: -1 if backward else 1]:
        if not backward:
            factor *= excess.get(name, 1.0)
        found.append((name, stage, value / factor))
        if backward:  # what a block does to the gradient is seen at the sum before it
            factor *= excess.get(name, 1.0)
    return found[:: -1 if backward else 1]


def _waiting(sums: Sequence[SumSignal]) -> list[str]:
    """The sums without a gradient inside a branch that puts out zero; the sum around, which comes later, has one."""
    known = {s.name: s for s in sums}
    found: dict[str, None] = {}
    for s in reversed(sums):
        outer = None if s.around is None else known.get(s.around)
        if outer is None or s.sum_gradient.norm != 0:
            continue
        if outer.name in found or (outer.branch.norm == 0 and outer.sum_gradient.norm > 0):
            found[s.name] = None
    return list(reversed(found))


def _direction(series: Sequence[tuple[str, int, float]], *, backward: bool) -> Direction:
    """Judge one direction from name, stage and variance; in the order of the blocks, whatever way the signal goes."""
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
    status: Status = "preserved"
    fast = slope if max(map(list(stages).count, stages)) > 2 else 0.0  # one step a stage is no law: batch norm's is 2
    if polynomial and inside >= math.log(GROWN):
        status = "growing"
    elif growth >= math.log(LARGE) or (fast >= math.log(FAST) and whole >= math.log(MANIFEST)):
        status = "exploding"
    elif decay <= -math.log(LARGE) or (fast <= -math.log(FAST) and whole <= -math.log(MANIFEST)):
        status = "vanishing"
    steps = [b - a for a, b in pairwise(logs)] or [0.0]
    worst = (min if status == "vanishing" else max)(range(len(steps)), key=steps.__getitem__)
    # Forward a sum is what its own block made of the signal; backward, what the block after it made of the gradient.
    place = travelled[worst if backward else min(worst + 1, len(travelled) - 1)][0]
    return Direction(status, math.exp(slope), _exp(whole), place, _exp(steps[worst]), inside=_exp(inside))


def _fit(stages: Sequence[int], logs: Sequence[float]) -> tuple[float, float, bool]:
    """The log factor a block inside stages, its sum over all stages, and whether a power of the depth fits better.

    Batch norm divides by the accumulated variance, so that the l-th block of a stage adds a share of 1/(l + k), where
    k is what the stage began with: the variance goes as a power of l + k (forward as l + k itself), not as an
    exponential. Two points cannot tell the two apart.
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
    """For each row of x, the median of the slopes between all pairs, and what a line with it leaves of y.

    The intercept is a median, too, and the error the sum of the distances. Long series are thinned evenly for the fit.
    """
    keep = np.linspace(0, len(y) - 1, min(len(y), limit)).round().astype(int)
    few_x, few_y = x[:, keep], y[keep]
    i, j = np.triu_indices(len(keep), 1)
    slopes = np.median((few_y[j] - few_y[i]) / (few_x[:, j] - few_x[:, i]), axis=1, keepdims=True)
    starts = np.median(few_y - slopes * few_x, axis=1, keepdims=True)
    return slopes[:, 0], np.abs(y - starts - slopes * x).sum(1)


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf


def _sentence(
    forward: Direction,
    backward: Direction,
    dead: Sequence[SumSignal],
    waiting: Sequence[str],
    odd: Sequence[Odd],
    unmeasured: str,
) -> str:
    def say(what: str, d: Direction) -> str:
        if d.status == "not measured":
            return f"{what} is {not_measured(unmeasured)}"
        if d.broken_at:
            reason = "leaves the range of numbers" if math.isinf(d.total) else "is exactly 0"
            return f"{what} {reason} at {d.broken_at}"
        if d.status == "preserved":
            word = "is preserved" if 1 / MANIFEST <= d.total <= MANIFEST else "stays within bounds"
            return f"{what} {word} (×{d.factor:.2f} a block inside stages, ×{d.total:.2g} in all)"
        if d.status == "growing":
            changes = f"×{d.inside:.2g} inside stages, ×{d.total:.2g} in all"
            return f"{what} grows as a power of the depth, by ever less a block ({changes})"
        stages = f", ×{d.inside:.1e} inside stages" if abs(math.log10(d.inside / d.total)) > 1 else ""
        return f"{what} is {d.status}: ×{d.factor:.2f} a block{stages}, ×{d.total:.1e} in all, worst at {d.worst}"

    parts = [say("the forward signal", forward), say("the gradient", backward)]
    if dead:
        names = _few([s.name for s in dead])
        parts.append(
            f"{len(dead)} branch{'es are' if len(dead) > 1 else ' is'} dead ({names}): no weight gets a gradient"
        )
    if waiting:
        whom = "them" if len(waiting) > 1 else "it"
        parts.append(f"no gradient reaches {_few(waiting)} yet: the branch around {whom} starts at zero")
    parts += map(str, odd[:3])
    return "; ".join(parts)


def not_measured(place: str) -> str:
    """Why there is no gradient: the forward signal ended at a place.

    >>> not_measured("body.0.7")
    'not measured: the forward signal is not a number from body.0.7 on'
    """
    return f"not measured: the forward signal is not a number from {place} on"


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _place(forward: Direction, backward: Direction, dead: Sequence[SumSignal], first: str, last: str) -> str:
    """Where to look and for what, when it is one place that no method would mend."""
    if forward.sudden:
        where = forward.broken_at if forward.broken_at != first else f"{first} and what comes before it"
        if forward.status == "vanishing":
            return f"look at {where}: something puts out zero, a ReLU that is never positive or a weight of zeros"
        return (
            f"look at {where}: a weight is not finite, or something divides by zero or takes a root or logarithm "
            "outside its range"
        )
    if cut := [s.name for s in dead if s.branch.variance > 1e-6 * s.branch.mean_square]:
        return f"look at the branch of {cut[0]}: it puts out a signal, but detach() or no_grad cuts its gradient off"
    if dead:
        return (
            f"look at the branch of {dead[0].name}: two zero layers with an activation between never learn ('fixup' "
            "zeroes only a branch's last), nor do those around a ReLU that is never positive"
        )
    if backward.sudden:
        where = "the output" if backward.broken_at == last else "the next sum"
        if backward.status == "vanishing":
            return (
                f"look between {backward.broken_at} and {where}: detach() or no_grad cuts the gradient off there, or a "
                "ReLU that is never positive or a factor of zero does"
            )
        return f"look between {backward.broken_at} and {where}: something there has no finite slope, as a root at zero"
    return ""


def _advice(forward: Direction, backward: Direction, method: str, admits: Callable[[str], bool]) -> str:
    """What to do; a network that has the method to be recommended is not as the method left it."""
    advice = _remedy(forward, backward, admits)
    if not method or f"'{method}'" not in advice:
        return advice
    worse = max((d for d in (backward, forward) if d.status != "not measured"), key=lambda d: SEVERITY.index(d.status))
    place = worse.broken_at or worse.worst
    return f"it has '{method}' already, which does not do this by itself: look at {place}"


def _remedy(forward: Direction, backward: Direction, admits: Callable[[str], bool]) -> str:
    """What to do, with methods that the network admits; every network with residual sums admits Fixup."""

    def use(*names: str) -> str:
        admitted = [f"'{name}'" for name in names if admits(name)] or ["'fixup'"]
        return f"use {' or '.join(admitted)}"

    if forward.status == "exploding":
        return f"{use('fixup', 'wn')} to hold the signal at any depth"
    if forward.status == "vanishing":
        return f"the weights are too small for the depth: {use('fixup', 'wn')}"
    if backward.status == "exploding":
        return f"only the gradient explodes: {use('isograd', 'convshort')} to preserve it, or clip gradients"
    if backward.status == "vanishing":
        return f"early blocks hardly learn: {use('isograd', 'fixup')} to preserve the gradient"
    if any(d.status == "growing" and max(d.inside, d.total) >= LARGE for d in (forward, backward)):
        return f"large, but no explosion: normalization bears it; without normalization {use('isograd', 'fixup')}"
    return "nothing to do"
