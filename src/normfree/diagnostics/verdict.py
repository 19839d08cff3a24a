"""The verdict on a signal: one word, the findings with their places, and the remedy.

The words are *preserved*, *growing* (by less and less per block, as with batch norm), *drifting* (exponentially, but
not yet a failure at this depth), *vanishing*, *exploding*, *faulty* (at one place, whatever the depth) and *dead
branch*. The verdict is a pure function of the signal. `docs/diagnosis.md` explains the words and their limits.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from normfree.diagnostics import module_rules, rules
from normfree.diagnostics.findings import SEVERITY, Finding, SignalStatus
from normfree.diagnostics.growth import (
    HARMLESS,
    LARGE,
    MANY_CALLS,
    NOTICEABLE,
    DepthPoint,
    Direction,
    before_normalizers,
    deep_post_norm,
    growth_advice,
    growth_finding,
    judge_direction,
    module_of,
)
from normfree.diagnostics.outliers import (
    Outlier,
    find_outliers,
    look_at,
    shapes_alternate,
    strong_outliers,
    without_outliers,
)
from normfree.diagnostics.signals import Signal, SumSignal
from normfree.report.tables import compact, shorten_names

_MOST_FINDINGS = 3  # that are named beside the first


@dataclass(frozen=True)
class Verdict:
    """The verdict on a signal.

    Attributes:
        status: The word for the network, the worst of both directions and of all findings.
        forward: The verdict on the forward signal.
        backward: The verdict on the gradient.
        dead: The branches in which no weight gets a gradient.
        sentence: A description of the signal.
        recommendation: The remedy, or the place to look at.
        outliers: The blocks that stand out, if the network is preserved, growing or drifting without them.
        findings: The faults, the cause before its consequences.
    """

    status: SignalStatus
    forward: Direction
    backward: Direction
    dead: tuple[str, ...]
    sentence: str
    recommendation: str
    outliers: tuple[Outlier, ...] = ()
    findings: tuple[Finding, ...] = ()

    @property
    def word(self) -> str:
        """The status and the first finding, or the name of the first outlier if that is all."""
        if self.findings:
            first = self.findings[0]
            return str(first) if first.cause.startswith(self.status) else f"{self.status}: {first}"
        return f"{self.status}, except {self.outliers[0].name}" if self.outliers else self.status

    @property
    def more(self) -> str:
        """A note on the findings after the first, whose remedies the recommendation does not name; '' without any."""
        if len(self.findings) < 2:
            return ""
        others = ", ".join(map(str, self.findings[1 : 1 + _MOST_FINDINGS]))
        rest = f", … ({len(self.findings) - 1} in all)" if len(self.findings) > 1 + _MOST_FINDINGS else ""
        return f"then look at the other findings, each with its remedy in verdict.findings: {others}{rest}"

    @property
    def is_healthy(self) -> bool:
        """Whether there is nothing to do: no finding, no outlier, and no change that fails at a larger depth."""
        large = any(max(d.inside, d.total) >= LARGE for d in (self.forward, self.backward))
        return self.status in ("preserved", "growing") and not self.findings and not self.outliers and not large

    def at_least(self, status: SignalStatus) -> bool:
        """Tell whether the verdict is this bad or worse.

        An outlier counts as growing, and as vanishing if it differs tenfold, which normalization cannot
        compensate.

        Args:
            status: 'preserved', 'growing', 'drifting', 'vanishing', 'exploding', 'faulty' or 'dead branch', in order
                of severity.

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

    Both directions are judged by `judge_direction`, and single places by the rules. A branch is *dead*
    if none of its weights gets a gradient although one arrives at its sum; a branch that merely starts at zero, as with
    Fixup, is not. Sums that no gradient reaches because the branch around them starts at zero are left out of the
    backward direction. If the signal is harmless without its outliers, the verdict recommends to look at them and not
    to use a method.

    Args:
        signal: The result of `propagate`.
        method: The method that the network has, which is not recommended.
        supports: Tells whether the network can have the method of this name. Other methods are not recommended.

    Returns:
        One word for the network, both directions, the findings, a description, and the remedy.
    """
    waiting = _not_reached_yet(signal.sums)
    left_out = set(waiting)
    if signal.unmeasured:
        left_out.update(s.name for s in signal.sums if math.isnan(s.sum_gradient.variance))
    left_out.update(_side_outputs(signal))
    left_out.update(_meant_to_rest(signal))
    left_out.update(s.name for s in signal.sums if s.gradient_level == 0 < s.sum_gradient.norm)  # alike in all samples
    late = module_rules.zero_starts(signal)
    if late and signal.plain:  # nor has what stands before them a gradient yet
        left_out.update(s.name for s in signal.sums if s.sum_gradient.norm == 0)
    reached = [s for s in signal.sums if s.name not in left_out]
    scores = _scores(signal)
    first = before_normalizers(signal)
    streams = _streams(signal)
    stages = _stages(signal.sums, streams)
    points = [
        DepthPoint(s.name, streams[s.name], stages[s.name], s.level)
        for s in signal.sums
        if (s.level != 0 or not late) and not (s.name in scores and 0 < s.level < math.inf)
    ]
    back_points = [
        DepthPoint(s.name, streams[s.name], stages[s.name], s.gradient_level)
        for s in reached
        if s.name != first and not (s.name in scores and 0 < s.gradient_level < math.inf)
    ]
    gated = {f.place for f in signal.by_kind["gate"]}
    # While all branches return zero, the layers on the shortcuts are a network without sums.
    plain = signal.plain or not any(s.branch.norm for s in signal.sums)
    kind: dict[str, Any] = {"plain": plain, "normalized": signal.normalized, "gated": gated}
    forward = _judge_series([p for p in points if p.name != first], signal.sums, **kind)
    backward = _judge_series(back_points, signal.sums, backward=True, **kind)
    dead = tuple(s for s in reached if s.sum_gradient.norm > 0 and not s.learns)
    local = _local_faults(signal, forward, backward, dead, late)
    outliers = () if dead or forward.broken_at or backward.broken_at or signal.unmeasured else find_outliers(signal)
    if outliers and not {forward.status, backward.status} <= {"preserved", "growing", "not measured"}:
        corrected = (
            judge_direction(without_outliers(outliers, points), **kind),
            judge_direction(without_outliers(outliers, back_points, backward=True), backward=True, **kind),
        )
        outliers = outliers if all(d.status in (*HARMLESS, "not measured") for d in corrected) else ()
        if outliers:  # a drift may be the step of one block
            forward, backward = (
                new if old.status == "drifting" else old
                for old, new in zip((forward, backward), corrected, strict=True)
            )
    findings = [*local, *strong_outliers(outliers, signal)]
    measured: list[SignalStatus] = [d.status for d in (forward, backward) if d.status != "not measured"]
    worst: SignalStatus = max(measured, key=SEVERITY.index, default="preserved")
    advice = growth_advice(signal, forward, backward, method, supports)
    if not findings and not outliers and worst not in ("preserved", "growing"):
        findings.append(growth_finding(signal, forward, backward, worst, advice))
    if forward.status in HARMLESS and (not findings or worst == "drifting"):
        drifting = bool(findings) and forward.status == "drifting"
        ends = tuple(rules.faults_of_the_head(signal, drifting=drifting))
        if drifting and [f.cause for f in ends] == ["first loss"]:
            findings = [replace(findings[0], status="exploding" if forward.factor > 1 else "vanishing")]  # it shows
        else:
            findings = [*ends, *findings]
        local = (*local, *ends)
    if not outliers and all(f.status == "drifting" for f in findings):
        local = (*local, *rules.alike_tokens(signal), *module_rules.late_checks(signal))
        findings = [*local, *findings]
    status = max([worst, *(f.status for f in findings)], key=SEVERITY.index)
    texts = [f.text for f in local if f.text]
    sentence = "; ".join([*_sentences(signal, forward, backward, dead, waiting, outliers), *texts])
    if findings or outliers:
        advice = findings[0].remedy if findings else look_at(outliers)
    names = tuple(s.name for s in dead)
    return Verdict(status, forward, backward, names, sentence, advice, outliers, tuple(findings))


def _judge_series(points: Sequence[DepthPoint], sums: Sequence[SumSignal], **kind: Any) -> Direction:
    """Judge one direction; a change between layers that stand side by side counts only if a series shows it, too.

    Each layer of a series reads the one before; of several the one with the largest signal, or gradient, counts.
    """
    found = judge_direction(points, **kind)
    if found.status in HARMLESS or found.broken_at or not any(s.reads for s in sums):
        return found
    size = {p.name: p.value for p in points}
    way = sums[::-1] if kind.get("backward") else sums
    series: dict[str, list[str]] = {}
    for s in way:
        sources = [t.name for t in sums if s.name in t.reads] if kind.get("backward") else s.reads
        before = max((n for n in sources if n in series), key=lambda n: size.get(n, 0.0), default="")
        series[s.name] = [*series.get(before, ()), s.name]
    alone: dict[str, Direction] = {}
    for name in reversed(series):
        if name not in alone:
            judged = judge_direction([p for p in points if p.name in series[name]], **kind)
            if judged.status not in (*HARMLESS, "not measured"):
                return found
            alone |= dict.fromkeys(series[name], judged)
    return next(iter(alone.values()))


def _local_faults(
    signal: Signal, forward: Direction, backward: Direction, dead: Sequence[SumSignal], late: set[str]
) -> tuple[Finding, ...]:
    """The faults at single places, causes before their consequences; `late` are the layers that start at zero."""
    zero_layer = module_rules.find_zero_layer(signal, late)
    found = [
        *module_rules.fact_faults(signal, module_rules.IN_PLACE),
        *rules.hidden_overflow(signal),
        *rules.faults_of_the_input(signal),
        *rules.non_finite(signal, forward),
        *rules.faults_of_the_targets(signal),
        *module_rules.fact_faults(signal, module_rules.LARGE_EMBEDDING),
        *rules.small_embeddings(signal),
        *rules.faults_of_the_loss(signal),
        *module_rules.nothing_learns(signal),
        *module_rules.unlike_modules(signal),
        *module_rules.forgotten_skips(signal),
        *module_rules.unused_modules(signal),
        *module_rules.faulty_weights(signal, zero_layer),
        *module_rules.missing_activations(signal),
        *module_rules.faulty_functions(signal),
        *module_rules.recurrences(signal),
        *module_rules.failed_checks(signal),
        *rules.faulty_branches(signal, dead),
        *rules.small_branches(signal),
        *(() if zero_layer or signal.origin in late else rules.silent(signal, forward)),
        *rules.gradient_cut(signal, forward, backward),
    ]
    if forward.status in HARMLESS:  # else it is a consequence of the depth, as a small gradient behind tanh may be
        found += module_rules.saturated_functions(signal, gates=True)
        found += module_rules.saturated_functions(signal, gates=False) if backward.status in HARMLESS else ()
    found += module_rules.dead_units(signal) if forward.status != "exploding" else ()
    found += module_rules.faults_of_the_stem(signal)
    if forward.status in HARMLESS:
        found += deep_post_norm(signal)
    found = found or [*module_rules.unusual_activation(signal), *rules.constant_targets(signal)]
    places = {f.place for f in found}  # a bias may make a layer dead, which says more
    drowned = [f for f in rules.drowned_samples(signal) if f.place not in places]
    return (*found, *(f for f in drowned if forward.status != "exploding" or f.place == forward.worst))


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
    last = {name for name in signal.unused if module_rules.is_last_of_list(name, signal)}
    layers = [{layer.name for layer in b.layers} for b in signal.plan.branches]
    if signal.plain:
        layers = [{module_of(s.name)} for s in signal.sums]
    still = [(s.name, own) for s, own in zip(signal.sums, layers, strict=False) if s.sum_gradient.norm == 0]
    return [name for name, own in still if own and (own <= resting or own & last)]


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


def _sentences(
    signal: Signal,
    forward: Direction,
    backward: Direction,
    dead: Sequence[SumSignal],
    waiting: Sequence[str],
    outliers: Sequence[Outlier],
) -> Iterator[str]:
    yield _describe("the forward signal", forward, signal)
    yield _describe("the gradient", backward, signal)
    if dead:
        names = shorten_names([s.name for s in dead])
        yield f"{len(dead)} branch{'es are' if len(dead) > 1 else ' is'} dead ({names}): no weight gets a gradient"
    if waiting:
        whom = "them" if len(waiting) > 1 else "it"
        yield f"no gradient reaches {shorten_names(waiting)} yet: the branch around {whom} starts at zero"
    yield from map(str, outliers[:3])


def _describe(what: str, d: Direction, signal: Signal) -> str:
    block = "layer" if signal.plain else "block"
    stages = "" if signal.plain else " inside stages"
    if d.status == "not measured":
        why = "every sum starts at zero, or its gradient is the same for all samples"
        return f"{what} is {not_measured(signal.unmeasured) if signal.unmeasured else f'not measured: {why}'}"
    if d.broken_at:
        return f"{what} {'overflows' if math.isinf(d.total) else 'is exactly 0'} at {d.broken_at}"
    if d.status == "preserved":
        word = "is preserved" if 1 / NOTICEABLE <= d.total <= NOTICEABLE else "stays within bounds"
        return f"{what} {word} (×{d.factor:.2f} per {block}{stages}, ×{compact(d.total)} in all)"
    if d.status == "growing":
        changes = f"×{compact(d.inside)}{stages}, ×{compact(d.total)} in all"
        return f"{what} grows as a power of the depth, by less and less per {block} ({changes})"
    if d.status == "drifting":
        fails = f"which fails from about {d.fails_at} {block}s on"
        return f"{what} is drifting: ×{d.factor:.2f} per {block}, ×{compact(d.inside)} in all{stages}, {fails}"
    inside = f", ×{compact(d.inside)} inside stages" if abs(math.log10(d.inside / d.total)) > 1 else ""
    return f"{what} is {d.status}: ×{d.factor:.2f} per {block}{inside}, ×{compact(d.total)} in all, worst at {d.worst}"


def not_measured(place: str) -> str:
    """The reason for missing gradients: the forward signal ended at a place.

    >>> not_measured("body.0.7")
    'not measured: the forward signal is not finite from body.0.7 on'
    """
    return f"not measured: the forward signal is not finite from {place} on"
