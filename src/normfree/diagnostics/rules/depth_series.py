"""Which places of a network are compared over depth: the streams, stages and series of its sums or layers.

`growth.py` judges the series.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from normfree.diagnostics.rules.findings import HARMLESS
from normfree.diagnostics.rules.growth import (
    MANY_CALLS,
    DepthPoint,
    Direction,
    before_normalizers,
    judge_direction,
    module_of,
)
from normfree.diagnostics.rules.module_rules import is_last_of_list
from normfree.diagnostics.rules.outliers import Outlier, shapes_alternate, without_outliers
from normfree.diagnostics.rules.signal_rules import positions_lost
from normfree.diagnostics.signals import Signal, SumSignal


class DepthSeries:
    """The signal and the gradient at all places that are compared with each other.

    Sums that no gradient reaches yet or ever, outputs that the loss ignores, frozen layers and scores are left out.

    Attributes:
        waiting: The sums that no gradient reaches, because the branch around them starts at zero.
        reached: The sums that the gradient should reach.
        forward_points: The sizes of the signal, in the order of the plan.
        backward_points: The sizes of the gradient, in the same order.
    """

    def __init__(self, signal: Signal, starting: set[str]) -> None:
        self.sums = signal.sums
        self.waiting = _not_reached_yet(signal.sums)
        left_out = {*self.waiting, *_side_outputs(signal), *_meant_to_rest(signal)}
        if signal.unmeasured:
            left_out.update(s.name for s in signal.sums if math.isnan(s.sum_gradient.variance))
        left_out.update(s.name for s in signal.sums if s.gradient_level == 0 < s.sum_gradient.norm)  # alike in all
        if starting and signal.plain:  # nor has what stands before them a gradient yet
            left_out.update(s.name for s in signal.sums if s.sum_gradient.norm == 0)
        self.reached = [s for s in signal.sums if s.name not in left_out]
        scores, first, streams = _scores(signal), before_normalizers(signal), _streams(signal)
        stages = _stages(signal.sums, streams)
        rescaled, pooled = _rescaled(signal.sums), _pooled(signal.sums)

        def point(s: SumSignal, size: float) -> list[DepthPoint]:
            left = s.name == first or (s.name in scores and 0 < size < math.inf)
            return [] if left else [DepthPoint(s.name, streams[s.name], stages[s.name], size)]

        forward = [s for s in signal.sums if s.level != 0 or not starting]
        self.forward_points = [p for s in forward for p in point(s, s.level / rescaled[s.name])]
        sizes = {s.name: s.gradient_level * rescaled[s.name] * pooled[s.name] for s in self.reached}
        self.backward_points = [p for s in self.reached for p in point(s, sizes[s.name])]
        # Where every way has weights, or all branches return zero, the layers make a network without sums.
        shortcuts = {b.shortcut for b in signal.plan.branches}
        weighted = bool(shortcuts) and shortcuts <= {"projection", "parallel"}
        plain = signal.plain or weighted or not any(s.branch.norm for s in signal.sums)
        gated = {f.place for f in signal.by_kind["gate"]}
        self._kind: dict[str, Any] = {"plain": plain, "normalized": signal.normalized, "gated": gated}

    def judge(self) -> tuple[Direction, Direction]:
        """Judge the forward signal and the gradient."""
        return self._judge(self.forward_points, backward=False), self._judge(self.backward_points, backward=True)

    def judge_without(self, outliers: Sequence[Outlier]) -> tuple[Direction, Direction]:
        """Judge both directions as if some blocks had the factors of similar blocks."""
        points = without_outliers(outliers, self.forward_points)
        back = without_outliers(outliers, self.backward_points, backward=True)
        return judge_direction(points, **self._kind), judge_direction(back, backward=True, **self._kind)

    def _judge(self, points: Sequence[DepthPoint], *, backward: bool) -> Direction:
        """Judge one direction; a change between parallel layers counts only if a chain of layers shows it, too.

        Each layer of a series reads the one before; of several the one with the largest signal, or gradient, counts.
        """
        found = judge_direction(points, backward=backward, **self._kind)
        if found.status in HARMLESS or found.broken_at or not any(s.layer for s in self.sums):
            return found
        size = {p.name: p.value for p in points}
        series: dict[str, list[str]] = {}
        for s in self.sums[::-1] if backward else self.sums:
            sources = s.reads
            if backward:  # the gradient may come from the output itself
                sources = () if s.read_by_output else tuple(t.name for t in self.sums if s.name in t.reads)
            before = max((n for n in sources if n in series), key=lambda n: size.get(n, 0.0), default="")
            series[s.name] = [*series.get(before, ()), s.name]
        alone: dict[str, Direction] = {}
        for name in reversed(series):
            if name not in alone:
                inside = [p for p in points if p.name in series[name]]
                judged = judge_direction(inside, backward=backward, **self._kind)
                if judged.status not in (*HARMLESS, "not measured"):
                    return found
                alone |= dict.fromkeys(series[name], judged)
        return next(iter(alone.values()))


def _rescaled(sums: Sequence[SumSignal]) -> dict[str, float]:
    """By how much the first normalizer has rescaled the signal up to each layer of a network without sums.

    It undoes the scale of the layers before it, forward and backward, so that its own step is no growth.
    """
    found: dict[str, float] = {}
    known = {s.name: s for s in sums}
    for s in sums:
        before = max((known[n] for n in s.reads if n in found), key=lambda b: b.level, default=None)
        found[s.name] = 1.0 if before is None else found[before.name]
        first = before is not None and s.normalized and not before.normalized and found[s.name] == 1
        if first and before is not None and 0 < before.level < math.inf and 0 < s.level < math.inf:
            found[s.name] = s.level / before.level
    return found


def _pooled(sums: Sequence[SumSignal]) -> dict[str, float]:
    """By how much the mean over positions has divided the gradient down to each layer of a network without sums.

    Each of n positions gets 1/n of the gradient, and the weights before them the sum over all.
    """
    found = dict.fromkeys((s.name for s in sums), 1.0)
    known = {s.name: s for s in sums}
    for after in reversed(sums):
        for s in (known[name] for name in after.reads if name in known):
            divided = after.gradient_level / s.gradient_level if 0 < s.gradient_level < math.inf else 1.0
            lost = positions_lost(s.shape, after.shape)
            found[s.name] = max(found[s.name], found[after.name] * max(1.0, min(lost, divided)))
    return found


def _streams(signal: Signal) -> dict[str, str]:
    """The streams of the sums.

    These are the calls of one layer, else the sums of one branch, and of one shape if shapes alternate. Two towers of
    different resolution, or words and their letters, do so.
    """
    calls = Counter(module_of(s.name) for s in signal.sums)
    often = {name for name, count in calls.items() if name and count >= MANY_CALLS}
    alternate = shapes_alternate(signal)
    found: dict[str, str] = {}
    for s in signal.sums:
        module = module_of(s.name)
        own = f"{s.around or ''} {s.shape}" if alternate else s.around or ""
        found[s.name] = module if module in often else own
    return found


def _stages(sums: Sequence[SumSignal], streams: Mapping[str, str]) -> dict[str, int]:
    """Number the stages of the sums: those of the plan, and a new one where another list of blocks or size begins.

    Two sums belong to the same list if their names agree up to the first number. All calls of one layer are one stage.
    """
    lists = [re.split(r"\d", s.name)[0] for s in sums]
    counts = Counter(lists)
    found: dict[str, int] = {}
    number = 0
    for i, s in enumerate(sums):
        new_list = i > 0 and lists[i] != lists[i - 1] and min(counts[lists[i]], counts[lists[i - 1]]) > 1
        # The variance of a gradient depends on the number of positions that share it.
        resized = i > 0 and s.shape != sums[i - 1].shape
        if i == 0 or s.stage != sums[i - 1].stage or ((new_list or resized) and not s.layer):
            number += 1
        found[s.name] = 0 if streams[s.name] == module_of(s.name) != "" else number
    return found


def _scores(signal: Signal) -> set[str]:
    """The layers of one unit among wider ones: a score or a gate, whose size says nothing about depth."""
    units = {layer.name: layer.units for layer in signal.layers}
    narrow = {s.name for s in signal.sums if s.layer and units.get(module_of(s.name)) == 1}
    return narrow if len(narrow) < len(signal.sums) else set()


def _side_outputs(signal: Signal) -> list[str]:
    """The layers without a gradient although earlier ones have one: they lead to an output that the loss ignores."""
    with_gradient = [s.sum_gradient.norm > 0 for s in signal.sums]
    first = with_gradient.index(True) if signal.plain and True in with_gradient else len(signal.sums)
    return [s.name for s, some in zip(signal.sums[first:], with_gradient[first:], strict=True) if not some]


def _meant_to_rest(signal: Signal) -> list[str]:
    """The sums without a gradient whose layers are all frozen, or learn by other ways, or hold the last of a list."""
    resting = set(signal.frozen_layers)
    called = Counter(layer.name for b in signal.plan.branches for layer in b.layers)
    resting |= {layer.name for layer in signal.layers if layer.gradient_norm > 0 and called[layer.name] == 1}
    last = [f"{name}." for name in signal.unused if is_last_of_list(name, signal)]
    layers = [{layer.name for layer in b.layers} for b in signal.plan.branches]
    if signal.plain:
        layers = [{module_of(s.name)} for s in signal.sums]
    without = [(s.name, own) for s, own in zip(signal.sums, layers, strict=False) if s.sum_gradient.norm == 0]
    unread = {name for _, own in without for name in own if f"{name}.".startswith(tuple(last))}
    return [name for name, own in without if own and (own <= resting or own & unread)]


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
