"""Single blocks that stand out from those like them: a weight that is far too large, a normalizer that was forgotten.

A law of growth is fitted so that one odd block does not count; here it is looked for.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from normfree.diagnostics.propagation import Signal
from normfree.diagnostics.sum_hooks import SumSignal, address

# No network of ours whose signal is preserved, or grows as with batch norm, has such a block at initialization: inside
# stages none is off by six spreads and 1.35 both ways, the first of a stage by up to 4, one way alone by up to 11
# (batch norm over four vectors).
SPREADS = 6.0  # how far a factor is off, in spreads of all others around those of their likes
INSIDE = 1.35  # and by how much at least: forward and backward, the same way
OPENING = 10.0  # the same for the first two blocks of a stage, whose input is another than that of their likes
ALONE = 20.0  # in one direction alone, inside stages
LIKES = 4  # the nearest blocks of the same kind that a block is compared with
NOISE = 0.02  # a spread in logarithms below which all is alike
MOST = 0.75  # of the branches that put out the same, as those do which end in a normalizer, or start at zero
SAME = 0.05  # how far the same may be apart: a normalizer's small constant counts where the variance is small


@dataclass(frozen=True)
class Odd:
    """A block that stands out: what it does to the variances of signal and gradient, and what those like it do.

    Numbers are NaN where a direction was not measured. `branch` is the variance that its branch puts out, where it
    stands out by that: all others put out the same.
    """

    name: str
    forward: float
    backward: float
    usual_forward: float
    usual_backward: float
    branch: float = math.nan
    usual_branch: float = math.nan

    @property
    def by(self) -> float:
        """By how much it stands out, in the direction where that is more; 10 for ten times as much or as little."""
        pairs = (
            (self.forward, self.usual_forward),
            (self.backward, self.usual_backward),
            (self.branch, self.usual_branch),
        )
        return max((_far(a / b if b else math.inf) for a, b in pairs if not math.isnan(a + b)), default=1.0)

    def __str__(self) -> str:
        """What is to be said of it."""
        if not math.isnan(self.branch):
            return (
                f"{self.name} stands out: its branch puts out a variance of {self.branch:.3g}, where others have "
                f"{self.usual_branch:.3g}"
            )
        both = ((self.forward, self.usual_forward, "forward"), (self.backward, self.usual_backward, "backward"))
        seen = [(a, b, way) for a, b, way in both if not math.isnan(a)]
        own = " and ".join(f"×{a:.3g} {way}" for a, _, way in seen)
        others = " and ".join(f"×{b:.3g}" for _, b, _ in seen)
        return f"{self.name} stands out: {own}, where blocks like it have {others}"


class _Step(NamedTuple):
    """The logarithm of a block's factor, that of its likes, and how far it is off in spreads of the others."""

    log: float
    usual: float
    spreads: float

    @property
    def off(self) -> float:
        return self.log - self.usual


def odd_blocks(signal: Signal) -> tuple[Odd, ...]:
    """The blocks whose factor is far from that of the nearest blocks of the same kind, the most striking first.

    Blocks that change the shape are left out. The first of a stage are told only when they stand out in both
    directions, and so is the last of all, whose gradient may come from elsewhere.

    A block so large that a normalizer behind it takes it back makes the next one seem small; only the first is told.

    Where nearly all branches put out the same variance, because they end in a normalizer or start at zero, one that
    does not is told wherever it stands: a short stage has nothing else to compare it with.
    """
    kinds = _kinds(signal)
    forward, backward = (_steps(signal.sums, kinds, backward=way) for way in (False, True))
    found = {}
    for i in sorted({*forward, *backward}):
        opening = _opening(signal.sums, i) or _opening(signal.sums, i - 1)
        ways = [way[i] for way in (forward, backward) if i in way and way[i].spreads >= SPREADS]
        same = len(ways) == 2 and ways[0].off * ways[1].off > 0
        least = math.log(OPENING if opening else INSIDE)
        inside = not opening and i < len(signal.sums) - 1
        if (same and min(abs(s.off) for s in ways) >= least) or (
            inside and any(abs(s.off) >= math.log(ALONE) for s in ways)
        ):
            numbers = [math.nan if i not in way else way[i].log for way in (forward, backward)]
            usual = [math.nan if i not in way else way[i].usual for way in (forward, backward)]
            found[i] = Odd(signal.sums[i].name, *map(_exp, numbers), *map(_exp, usual))
    told = [odd for i, odd in found.items() if i - 1 not in found or odd.by > 1.5 * found[i - 1].by]
    names = {odd.name for odd in told}
    told += [odd for odd in _odd_branches(signal) if odd.name not in names]
    return tuple(sorted(told, key=lambda odd: -odd.by))


def _odd_branches(signal: Signal) -> list[Odd]:
    """The branches that put out another variance than most of their kind, which put out the same."""
    alike: defaultdict[object, list[SumSignal]] = defaultdict(list)
    for s, kind in zip(signal.sums, _kinds(signal), strict=True):
        alike[kind[:4]].append(s)  # whatever the shortcut
    found = []
    for sums in alike.values():
        usual = median(s.branch.variance for s in sums)
        others = [s for s in sums if not abs(s.branch.variance - usual) <= SAME * usual]
        if len(sums) >= LIKES and len(sums) - len(others) >= MOST * len(sums):
            found += [
                Odd(s.name, math.nan, math.nan, math.nan, math.nan, s.branch.variance, usual)
                for s in others
                if not usual or _far(s.branch.variance / usual) >= INSIDE
            ]
    return found


def _kinds(signal: Signal) -> list[tuple[object, ...]]:
    """What must be the same of two blocks that are compared: a Transformer's attention is not like its feed-forward."""
    branches = signal.plan.branches
    if len(branches) != len(signal.sums):
        return [(address(s.name),) for s in signal.sums]
    return [(address(b.name), b.depth, len(b.layers), len(b.entries), b.shortcut, b.around is None) for b in branches]


def _steps(sums: Sequence[SumSignal], kinds: Sequence[object], *, backward: bool) -> dict[int, _Step]:
    """The blocks that can be compared, by their places."""
    logs: dict[int, tuple[float, float]] = {}
    for i, s in enumerate(sums):
        after = s.sum_gradient if backward else s.sum
        own = s.shortcut_gradient if backward else s.shortcut
        before = own if _opening(sums, i) else sums[i - 1].sum_gradient if backward else sums[i - 1].sum
        if s.transition or not all(_positive(v) for v in (after.variance, before.variance)):
            continue
        sign = -1 if backward else 1
        alone = sign * math.log(after.variance / own.variance) if _positive(own.variance) else math.nan
        logs[i] = sign * math.log(after.variance / before.variance), alone
    settled = _pools(kinds, [j for j in logs if not _opening(sums, j) and not _opening(sums, j - 1)])
    inner = _pools(kinds, [j for j in logs if not _opening(sums, j)])
    usual: dict[int, float] = {}
    for i in logs:
        opens = _opening(sums, i)  # nothing of its stage is before it: compare what blocks make of their shortcut
        for pool in (settled, inner):
            near = sorted(_near(pool[kinds[i]], i), key=lambda j: (sums[j].stage != sums[i].stage, abs(j - i)))
            values = [v for j in near[:LIKES] if not math.isnan(v := logs[j][opens])]
            if len(values) > 1:
                usual[i] = median(values)
                break
    off = {i: abs(logs[i][0] - usual[i]) for i in usual}
    spread = _spreads_without(off)
    return {i: _Step(logs[i][0], usual[i], off[i] / (spread[i] + NOISE)) for i in usual if i in spread}


def _pools(kinds: Sequence[object], places: Sequence[int]) -> defaultdict[object, list[int]]:
    """The places by kind, in order."""
    found = defaultdict(list)
    for i in places:
        found[kinds[i]].append(i)
    return found


def _near(places: Sequence[int], i: int) -> list[int]:
    """A few places on either side of one."""
    middle = bisect_left(places, i)
    return [j for j in places[max(0, middle - LIKES) : middle + LIKES + 1] if j != i]


def _spreads_without(off: dict[int, float]) -> dict[int, float]:
    """For each place, the spread of all others: their median distance, as of a normal distribution."""
    ordered = sorted(off.values())
    left = len(ordered) - 1
    if left < 2:
        return {}

    def other(place: int, without: int) -> float:
        return ordered[place if place < without else place + 1]

    places = {i: bisect_left(ordered, value) for i, value in off.items()}
    return {i: 1.4826 * (other((left - 1) // 2, own) + other(left // 2, own)) / 2 for i, own in places.items()}


def _opening(sums: Sequence[SumSignal], i: int) -> bool:
    """Whether a block is the first of its stage."""
    return i == 0 or (i > 0 and sums[i].stage != sums[i - 1].stage)


def _positive(value: float) -> bool:
    return 0 < value < math.inf


def _far(ratio: float) -> float:
    return max(ratio, 1 / ratio) if ratio > 0 else math.inf


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
