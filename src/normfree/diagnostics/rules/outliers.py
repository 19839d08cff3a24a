"""Outliers: single blocks that differ from similar blocks, such as one with a too large weight or without normalizer.

The fit of `growth.py` is robust, so a single block hardly changes it. This module finds such blocks,
and judges them.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import median
from typing import NamedTuple

from normfree.diagnostics.rules.findings import Finding, SignalStatus, finding
from normfree.diagnostics.rules.growth import NOTICEABLE, DepthPoint, bounded_exp
from normfree.diagnostics.signals import NUMBERS, Signal, SumSignal
from normfree.report.tables import compact, shorten_names

# Single blocks. At initialization, no network of this library whose signal is preserved, or grows as with batch norm,
# has an outlier by these limits. Inside stages no block differs by six spreads and a factor of 1.35 in both directions;
# the first block of a stage differs by up to 4, and in one direction alone by up to 11 (batch norm over four vectors).
SPREADS = 6.0  # threshold in robust standard deviations from similar blocks
INSIDE = 1.6  # least ratio, forward and backward in the same sense, inside a stage; CoAtNet has 1.5
OPENING = 10.0  # the same for the first two blocks of a stage, whose input differs from that of similar blocks
TRANSITION = 2.5  # the same for the branch of a block with a stride or another width; CoAtNet has 2
ALONE = 20.0  # least ratio in one direction alone, inside a stage
SIMILAR = 4  # number of the nearest similar blocks that a block is compared with
NOISE = 0.02  # added to the spread of log factors, so that tiny differences do not count
MOST = 0.75  # fraction of branches with the same variance, such as all that end in a normalizer or start at zero
SAME = 0.05  # relative difference of variances that count as the same; a normalizer's epsilon changes small ones


@dataclass(frozen=True)
class Outlier:
    """A block that differs from similar blocks.

    `forward` and `backward` are the factors by which the block changes the variance of the signal and of the gradient,
    `usual_forward` and `usual_backward` those of similar blocks; they are NaN in a direction that was not measured.
    `branch` is the variance of its branch's output, if all similar branches have the same, `usual_branch`.
    """

    name: str
    forward: float
    backward: float
    usual_forward: float
    usual_backward: float
    branch: float = math.nan
    usual_branch: float = math.nan

    @property
    def forward_excess(self) -> float:
        """The forward factor relative to that of similar blocks, 1 if it was not measured."""
        return _ratio(self.forward, self.usual_forward)

    @property
    def backward_excess(self) -> float:
        """The backward factor relative to that of similar blocks, 1 if it was not measured."""
        return _ratio(self.backward, self.usual_backward)

    @property
    def excess(self) -> float:
        """The largest ratio to similar blocks over all directions; 10 means ten times as much or as little."""
        pairs = (
            (self.forward, self.usual_forward),
            (self.backward, self.usual_backward),
            (self.branch, self.usual_branch),
        )
        return max((_above_one(a / b if b else math.inf) for a, b in pairs if not math.isnan(a + b)), default=1.0)

    def __str__(self) -> str:
        """Describe the outlier and similar blocks in one clause."""
        if not math.isnan(self.branch):
            return (
                f"{self.name} stands out: its branch has an output variance of {compact(self.branch)}, others have "
                f"{compact(self.usual_branch)}"
            )
        both = ((self.forward, self.usual_forward, "forward"), (self.backward, self.usual_backward, "backward"))
        measured = [(a, b, way) for a, b, way in both if not math.isnan(a)]
        own = " and ".join(f"×{compact(a)} {way}" for a, _, way in measured)
        others = " and ".join(f"×{compact(b)}" for _, b, _ in measured)
        return f"{self.name} stands out: {own}, where blocks like it have {others}"


class _BlockFactor(NamedTuple):
    """The log factor of a block, the usual one of similar blocks, and how far they differ.

    The unit of the difference is a robust standard deviation of the other blocks.
    """

    log: float
    usual: float
    spreads: float

    @property
    def difference(self) -> float:
        return self.log - self.usual


def find_outliers(signal: Signal) -> tuple[Outlier, ...]:
    """Find the blocks that differ most from the nearest similar blocks, largest excess first.

    Blocks that change the shape are left out. The first two sums of a stage, its first block, and the last one, whose
    gradient may come from elsewhere, count only if they differ in both directions. If a normalizer after a large block
    shrinks the signal again, the next block seems small; only the first of the two is an outlier.

    If nearly all branches have the same output variance, because they end in a normalizer or start at zero, a branch
    with another variance is an outlier anywhere. In a short stage there is nothing else to compare it with.
    """
    kinds = _kinds(signal)
    forward, backward = (_block_factors(signal.sums, kinds, backward=way) for way in (False, True))
    found: dict[int, Outlier] = {}
    repeated = _repeated(signal)
    for i in sorted({*forward, *backward} - repeated):
        opening = _is_opening(signal.sums, i) or _is_opening(signal.sums, i - 1) or _in_first_block(signal.sums, i)
        far = [way[i] for way in (forward, backward) if i in way and way[i].spreads >= SPREADS]
        same_sense = len(far) == 2 and far[0].difference * far[1].difference > 0
        least = math.log(OPENING if opening or signal.plain else INSIDE)  # pooling stands between plain layers
        inside = not opening and i < len(signal.sums) - 1 and not signal.plain
        if opening and same_sense and not _branch_differs(signal.sums, kinds, i, far[0].difference):
            continue  # a normalizer makes the branch large where the stem's output is small
        if (same_sense and min(abs(f.difference) for f in far) >= least) or (
            inside and any(abs(f.difference) >= math.log(ALONE) for f in far)
        ):
            own = [math.nan if i not in way else way[i].log for way in (forward, backward)]
            usual = [math.nan if i not in way else way[i].usual for way in (forward, backward)]
            found[i] = Outlier(signal.sums[i].name, *map(bounded_exp, own), *map(bounded_exp, usual))
    outliers = [o for i, o in found.items() if i - 1 not in found or o.excess > 1.5 * found[i - 1].excess]
    names = {o.name for o in outliers} | {signal.sums[i].name for i in repeated}
    outliers += [o for o in _outlying_branches(signal) if o.name not in names]
    return tuple(sorted(outliers, key=lambda o: -o.excess))


def _repeated(signal: Signal) -> set[int]:
    """The calls of blocks that run several times: they have the same weights, so that only their inputs differ."""
    blocks = [tuple(layer.name for layer in b.layers) for b in signal.plan.branches]
    if signal.plain or len(blocks) != len(signal.sums):
        return set()
    return {i for i, layers in enumerate(blocks) if layers and blocks.count(layers) > 1}


def without_outliers(
    outliers: Sequence[Outlier], points: Sequence[DepthPoint], *, backward: bool = False
) -> list[DepthPoint]:
    """Correct the points of one direction as if the outliers had the factors of similar blocks."""
    excess = {
        o.name: ratio
        for o in outliers
        if 0 < (ratio := o.backward / o.usual_backward if backward else o.forward / o.usual_forward) < math.inf
    }
    found: list[DepthPoint] = []
    factor = 1.0
    for point in points[:: -1 if backward else 1]:
        if not backward:
            factor *= excess.get(point.name, 1.0)
        found.append(point._replace(value=point.value / factor))
        if backward:  # the effect of a block on the gradient shows at the sum before it
            factor *= excess.get(point.name, 1.0)
    return found[:: -1 if backward else 1]


def strong_outliers(outliers: Sequence[Outlier], signal: Signal) -> Iterator[Finding]:
    """The blocks that change the signal or the gradient tenfold more or less than others: no small matter."""
    for outlier in outliers[:1]:
        ratio = max((outlier.forward_excess, outlier.backward_excess), key=lambda r: abs(math.log(r)))
        if abs(math.log(ratio)) >= math.log(NOTICEABLE):
            before = _module_before(outlier.name, ratio, signal)
            remedy = f"look at {before}: it changes the scale before {outlier.name}" if before else look_at(outliers)
            yield _wrong_size(before or outlier.name, ratio, signal, remedy, str(outlier))


def _wrong_size(place: str, ratio: float, signal: Signal, remedy: str, text: str = "") -> Finding:
    block, large = "layer" if signal.plain else "block", "large" if ratio > 1 else "small"
    status: SignalStatus = "exploding" if ratio > 1 else "vanishing"
    return finding("{block} too {large}", place, status, block=block, large=large, text=text, remedy=remedy)


def _module_before(name: str, ratio: float, signal: Signal) -> str:
    """The module right before an outlier that changes the scale instead of it; '' if none does."""
    places = [s.name for s in signal.sums]
    calls = [g.name for g in signal.gains]
    i = places.index(name)
    if not signal.plain or i == 0 or name not in calls or places[i - 1] not in calls:
        return ""
    stretch = signal.gains[calls.index(places[i - 1]) + 1 : calls.index(name) + 1]
    sign = 1 if ratio > 1 else -1
    gains = {g.name: sign * math.log(g.factor) for g in stretch if 0 < g.factor < math.inf}
    most = max(gains, key=gains.__getitem__, default=name)
    return most if most != name and gains[most] >= math.log(NOTICEABLE) else ""


def look_at(outliers: Sequence[Outlier]) -> str:
    """The remedy for blocks that stand out."""
    whose = "its" if len(outliers) == 1 else "their"
    names = shorten_names([o.name for o in outliers])
    return f"look at {names}: compare {whose} weights, scales and normalizers with the others'"


def _outlying_branches(signal: Signal) -> list[Outlier]:
    """The branches whose output variance differs from the nearest ones, if most branches of their kind have the same.

    A variance that changes gradually over the blocks is none.
    """
    alike: defaultdict[object, list[SumSignal]] = defaultdict(list)
    for s, kind in zip(signal.sums, _kinds(signal), strict=True):
        alike[kind[:5]].append(s)  # with any shortcut
    found = []
    for sums in alike.values():
        variances = [s.branch.variance for s in sums]
        usual = median(variances)
        others = [i for i, v in enumerate(variances) if not abs(v - usual) <= SAME * usual]
        if len(sums) < SIMILAR or len(sums) - len(others) < MOST * len(sums):
            continue
        for i in others:
            near = sorted((j for j in range(len(sums)) if j != i), key=lambda j: abs(j - i))[:SIMILAR]
            local = median(variances[j] for j in near)
            following = variances[i + 1] if i == 0 else local  # the first may begin a gradual change
            least = TRANSITION if sums[i].transition else INSIDE
            if all(not v or _above_one(variances[i] / v) >= least for v in (usual, local, following)):
                found.append(Outlier(sums[i].name, math.nan, math.nan, math.nan, math.nan, variances[i], usual))
    return found


def _kinds(signal: Signal) -> list[tuple[object, ...]]:
    """The kind of each block; only blocks of one kind are compared, such as attentions in a Transformer."""
    branches = signal.plan.branches
    if signal.plain:
        # A normalizer undoes the scale of its layer, and a factor compares a layer with the one before.
        normalized = [s.normalized for s in signal.sums]
        return list(zip(normalized, [False, *normalized], strict=False))
    if len(branches) != len(signal.sums):
        return [(NUMBERS.sub("", s.name),) for s in signal.sums]
    alternate = shapes_alternate(signal)
    shapes = [s.shape if alternate else () for s in signal.sums]
    return [
        (
            NUMBERS.sub("", b.name),
            b.degree,
            len(b.layers),
            len(b.first_layers),
            shape,
            b.shortcut,
            b.outer_branch is None,
        )
        for b, shape in zip(branches, shapes, strict=True)
    ]


MANY_RETURNS = 3  # to an earlier shape; a U-Net returns to each of its shapes once


def shapes_alternate(signal: Signal) -> bool:
    """Whether sums of different shapes take turns, as in two towers; they are not compared with each other."""
    shapes = [shape for shape, _ in groupby(s.shape for s in signal.sums)]
    return not signal.plain and len(shapes) - len(set(shapes)) >= MANY_RETURNS


def _block_factors(sums: Sequence[SumSignal], kinds: Sequence[object], *, backward: bool) -> dict[int, _BlockFactor]:
    """The factors of the blocks that can be compared, by their indices."""
    logs: dict[int, tuple[float, float]] = {}  # relative to the previous sum, and to the block's own shortcut
    for i, s in enumerate(sums):
        after, own = _levels(s, backward)
        before = own if _is_opening(sums, i) else _levels(sums[i - 1], backward)[0]
        if s.transition or not _is_positive(after) or not _is_positive(before):
            continue
        sign = -1 if backward else 1
        from_shortcut = sign * math.log(after / own) if _is_positive(own) else math.nan
        logs[i] = sign * math.log(after / before), from_shortcut
    inside = _by_kind(kinds, [j for j in logs if not _is_opening(sums, j) and not _is_opening(sums, j - 1)])
    not_first = _by_kind(kinds, [j for j in logs if not _is_opening(sums, j)])
    usual: dict[int, float] = {}
    for i in logs:
        opens = _is_opening(sums, i)  # no block of its stage is before it, so shortcuts are compared
        for similar in (inside, not_first):
            near = sorted(_nearest(similar[kinds[i]], i), key=lambda j: (sums[j].stage != sums[i].stage, abs(j - i)))
            values = [v for j in near[:SIMILAR] if not math.isnan(v := logs[j][opens])]
            if len(values) > 1:
                usual[i] = median(values)
                break
    differences = {i: abs(logs[i][0] - usual[i]) for i in usual}
    spread = _spreads_of_others(differences)
    return {i: _BlockFactor(logs[i][0], usual[i], differences[i] / (spread[i] + NOISE)) for i in usual if i in spread}


def _branch_differs(sums: Sequence[SumSignal], kinds: Sequence[object], i: int, sense: float) -> bool:
    """Whether the branch of a block is larger or smaller than that of the nearest similar blocks, in this sense.

    True where branches were not measured or have no similar ones.
    """
    similar = sorted((j for j in range(len(sums)) if j != i and kinds[j] == kinds[i]), key=lambda j: abs(j - i))
    values = [v for j in similar[:SIMILAR] if _is_positive(v := sums[j].branch.variance)]
    own = sums[i].branch.variance
    if not values or not _is_positive(own):
        return True
    return math.copysign(1.0, sense) * math.log(own / median(values)) >= math.log(INSIDE)


def _levels(s: SumSignal, backward: bool) -> tuple[float, float]:
    """The size of the signal, or of the gradient, at a sum and at its shortcut."""
    return (s.gradient_level, s.shortcut_gradient.variance) if backward else (s.level, s.shortcut.variance)


def _by_kind(kinds: Sequence[object], indices: Sequence[int]) -> defaultdict[object, list[int]]:
    """The indices by kind, in order."""
    found = defaultdict(list)
    for i in indices:
        found[kinds[i]].append(i)
    return found


def _nearest(indices: Sequence[int], i: int) -> list[int]:
    """The nearest indices on either side of one."""
    middle = bisect_left(indices, i)
    return [j for j in indices[max(0, middle - SIMILAR) : middle + SIMILAR + 1] if j != i]


def _spreads_of_others(differences: dict[int, float]) -> dict[int, float]:
    """For each index, the median of all other differences, scaled to a standard deviation of normal numbers."""
    ordered = sorted(differences.values())
    count = len(ordered) - 1
    if count < 2:
        return {}

    def other(rank: int, without: int) -> float:
        return ordered[rank if rank < without else rank + 1]

    ranks = {i: bisect_left(ordered, value) for i, value in differences.items()}
    return {i: 1.4826 * (other((count - 1) // 2, own) + other(count // 2, own)) / 2 for i, own in ranks.items()}


def _in_first_block(sums: Sequence[SumSignal], i: int) -> bool:
    """Whether a sum belongs to the block that begins its stage, such as `blocks.0.mlp` after `blocks.0.attn`."""
    first = next(s.name for s in sums if s.stage == sums[i].stage)
    block = re.match(r"[\w.]*?\.\d+(?=\.)", first)
    return block is not None and sums[i].name.startswith(f"{block.group()}.")


def _is_opening(sums: Sequence[SumSignal], i: int) -> bool:
    """Whether a block is the first of its stage."""
    return i == 0 or (i > 0 and sums[i].stage != sums[i - 1].stage)


def _is_positive(value: float) -> bool:
    return 0 < value < math.inf


def _above_one(ratio: float) -> float:
    return max(ratio, 1 / ratio) if ratio > 0 else math.inf


def _ratio(value: float, usual: float) -> float:
    return value / usual if 0 < value < math.inf and 0 < usual < math.inf else 1.0
