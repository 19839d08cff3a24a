"""The rules: which findings hold for the measured facts. `findings.py` has their words and remedies.

`loss_rules.py` has those of the input, the output and the loss.

The functions are pure, and each limit stands above its rule with its reason. Unless stated otherwise a limit is a
ratio of variances or of second moments, not of standard deviations.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice

from normfree.diagnostics.blocks import name_pattern
from normfree.diagnostics.findings import FINDINGS, Finding, finding
from normfree.diagnostics.growth import LARGE, NOTICEABLE, Direction
from normfree.diagnostics.loss_rules import CONSTANT_OUTPUT, IN_PLACE
from normfree.diagnostics.module_rules import SIMILAR
from normfree.diagnostics.signals import SURE, Signal, Spot, Stats, SumSignal
from normfree.report.tables import shorten_names


def non_finite(signal: Signal, forward: Direction) -> Iterator[Finding]:
    """The weight, the module or the precision that makes the signal infinite or NaN."""
    if not signal.unmeasured or not signal.inputs.finite:
        return
    divides = ": a weight is not finite, or something divides by zero or takes a root or logarithm outside its range"
    if signal.broken:
        verb = "hold" if len(signal.broken) > 1 else "holds"
        yield finding("weight not finite", signal.broken[0], names=signal.broken, verb=verb)
    elif signal.half:
        place = signal.origin or signal.unmeasured
        remedy = (
            f"half precision (float16) overflows at {place}: use bfloat16 or float32, or smaller weights and inputs"
        )
        numbers = "numbers beyond 65504, the largest of float16"
        yield finding("half precision overflow", place, numbers=numbers, remedy=remedy)
    elif forward.broken_at and forward.sudden:
        first = signal.sums[0].name
        where = forward.broken_at if forward.broken_at != first else f"{first} and the layers before it"
        inner = f" ({signal.origin})" if signal.origin and signal.origin != forward.broken_at else ""
        text = f"{where} is not finite"
        yield finding("not finite", forward.broken_at, text=text, where=f"{where}{inner}", why=divides)
    elif not forward.broken_at:
        where = signal.origin or "the layers between the last block and the output"
        text, why = "the values become non-finite after the last block", divides if signal.origin else ""
        yield finding("not finite", signal.origin or "the output", text=text, where=where, why=why)


def forgotten_skips(signal: Signal) -> Iterator[Finding]:
    """Blocks without the residual sum that most blocks like them have."""
    homes = Counter(b.home for b in signal.plan.branches)  # a loop adds several branches in one module
    in_loops = {layer.name for b in signal.plan.branches if homes[b.home] >= SIMILAR for layer in b.layers}
    inside = Counter(map(name_pattern, in_loops))
    body = list(dict.fromkeys(layer.name for layer in signal.plan.body))
    outside = Counter(map(name_pattern, body))
    stray = [n for n in body if re.search(r"\d", n) and inside[name_pattern(n)] >= 3 * outside[name_pattern(n)]]
    if signal.missing_sums:
        add = "add nothing to their" if len(signal.missing_sums) > 1 else "adds nothing to its"
        text = f"{shorten_names(signal.missing_sums)} {add} input, unlike others of the class"
        also = ", or leaves f(x) out of it"
        yield finding("forgotten skip", signal.missing_sums[0], names=signal.missing_sums, text=text, also=also)
    elif stray and not signal.constant_sums:
        stand = "stand" if len(stray) > 1 else "stands"
        text = f"{shorten_names(stray)} {stand} in no branch, unlike the same layer of other blocks"
        yield finding("forgotten skip", stray[0], names=stray, text=text, also=" there, or f does not read x")


SHUT_GATE = 0.01  # the mean of a sigmoid that leaves 1e-4 of the squared signal, as much as vanishing does
LEAST_DROPPED = 1 - 1 / NOTICEABLE  # the noise, p / (1 - p) of the squared signal, is then nine times the signal


def faulty_functions(signal: Signal) -> Iterator[Finding]:
    """Normalizers with a large epsilon, dropouts, shut gates, wrong softmaxes, and a function that follows itself."""
    graph = signal.graph
    if swamped := graph.swamped[::-1]:  # nodes come from the output to the input
        names = dict.fromkeys(s.place for s in swamped)
        first = swamped[0]
        yield finding(
            "epsilon too large", first.place, variance=first.value, eps=float(first.function), names=list(names)
        )
    strong = (s for s in (*signal.dropouts, *graph.dropped) if LEAST_DROPPED <= s.value < 1)
    for s in islice(strong, 1):
        yield finding("dropout too strong", s.place, percent=s.value, p=s.value)
    for s in islice((s for s in signal.gates if s.value < SHUT_GATE), 1):
        yield finding("{function} gate shut", s.place, function=s.function, value=s.value)
    for s in graph.doubled[:1]:
        yield finding("{function} twice", s.place, function=s.function)
    for place in graph.single_softmax[:1]:
        yield finding("softmax of one value", place)
    for place in graph.batch_softmax[:1]:
        yield finding("softmax over the batch", place)
    for place in graph.wrong_axis[:1]:
        yield finding("softmax over the wrong axis", place)
    for place in graph.future_only[-1:]:
        yield finding("mask of the wrong side", place)
    zero = [layer.name.rpartition(".")[0] for layer in signal.layers if layer.weight_norm == 0]
    for place in islice((p for p in graph.uniform[::-1] if p.rpartition(".")[0] not in zero), 1):
        yield finding("attention masked out", place)


SATURATED = 1 / NOTICEABLE  # of the squared gradient that a function could pass; tanh of N(0, 5.3²) has it
GATE = (0.1, 0.9)  # a sigmoid with a mean outside of this range is a gate, which may be nearly shut or open on purpose


def saturated_functions(signal: Signal) -> Iterator[Finding]:
    """Activations, gates and attentions that hardly pass a gradient."""
    if seen := [s for s in reversed(signal.graph.openness) if _is_saturated(s)]:
        names = list(dict.fromkeys(s.place for s in seen))
        yield finding(
            "saturated {function}", seen[0].place, function=seen[0].function, names=names, value=seen[0].value
        )


def _is_saturated(spot: Spot) -> bool:
    """Whether a function hardly passes a gradient; a gate counts only if it is shut."""
    if spot.function == "sigmoid" and not GATE[0] <= spot.mean <= GATE[1]:
        return spot.mean < SHUT_GATE
    return spot.value < SATURATED


LARGE_RADIUS = 1.05  # below, 70 steps do not make a factor of 1,000
SMALL_RADIUS = 0.1  # of a recurrent weight, which forgets all but 99 % in a step; torch's default has 0.58


def recurrences(signal: Signal) -> Iterator[Finding]:
    """Recurrent weights that make the state explode or vanish with time."""
    for s in signal.recurrences:
        explodes = s.function == "relu" and s.value > LARGE_RADIUS and s.value ** (2 * signal.steps) >= LARGE
        if explodes or (s.value < SMALL_RADIUS and signal.steps > 2):
            large, does = ("large", "explodes") if explodes else ("small", "vanishes")
            words = {"large": large, "does": does, "radius": s.value, "steps": signal.steps}
            yield finding("recurrence too {large}", s.place, "exploding" if explodes else "vanishing", **words)
            return


NOISY = 5.0  # squared difference of two passes over that of two samples


def broken_invariants(signal: Signal) -> Iterator[Finding]:
    """Checks of `invariants.py` that failed, and noise that is larger than the differences between samples."""
    elsewhere = {*AT_LAST, IN_PLACE}
    if signal.head.variation <= CONSTANT_OUTPUT:
        elsewhere |= {"samples mixed", "state between calls"}
    if signal.head.confidence > SURE:
        elsewhere |= {"samples left out"}
    for c in sorted(signal.checks, key=lambda c: list(FINDINGS).index(c.finding)):
        if c.finding not in elsewhere:
            place = c.place.removeprefix("before ")
            yield finding(c.finding, place, spot=_where(c.place), detail=c.detail, value=c.value)
    if signal.noise > NOISY and (place := signal.noise_place):
        yield finding(
            "noise too strong", place.removeprefix("before "), size=math.sqrt(signal.noise), spot=_where(place)
        )


AT_LAST = ("input ignored", "later positions seen", "targets not shifted")  # may be consequences of other faults


DROWNED = 1 / 300  # of the variation over samples that is left behind one place; latent arrays leave 1/60
BY_DESIGN = 1e-7  # of a branch over its shortcut: layer scales of 1e-6 leave 1e-12, and the sum shows its shortcut


def drowned_samples(signal: Signal) -> Iterator[Finding]:
    """A place behind which a constant, such as positions or a bias, is far larger than what differs by sample."""
    before = signal.inputs.variation
    for i, s in enumerate(signal.sums):
        starts_small = not s.layer and s.branch.power < BY_DESIGN * s.shortcut.power
        if not starts_small and 0 < s.variation < DROWNED * before:
            stem = [layer.name for layer in signal.plan.stem if layer.name] if i == 0 else []
            names = [*stem, s.name] if s.name not in stem else stem
            yield finding("samples drowned", names[0], names=names, share=1 / s.variation)
            return
        before = s.variation if s.variation > 0 else before


ALIKE_TOKENS = 1e-3  # variation over the positions; sound networks have 0.03 or more


def alike_tokens(signal: Signal) -> Iterator[Finding]:
    """Blocks that make all positions of a sequence, or all nodes of a graph, alike."""
    zero = {layer.name for layer in signal.layers if layer.weight_norm == 0}
    measured = [s for s in signal.sums if s.name not in zero]
    if measured and measured[0].token_variation > NOTICEABLE * ALIKE_TOKENS:
        alike = (s for s in measured if s.token_variation < ALIKE_TOKENS)
        for s in islice(alike, 1):
            yield finding("tokens alike", s.name, value=s.token_variation)


def sound_but_wrong(signal: Signal) -> list[Finding]:
    """Inputs that a network with a sound signal ignores, or should not see."""
    last = [finding(c.finding, c.place, detail=c.detail) for c in signal.checks if c.finding in AT_LAST]
    return [*alike_tokens(signal), *last]


def _where(place: str) -> str:
    return place if place.startswith("before") else f"at {place}"


CONSTANT_BRANCH = 1e-10  # variance relative to the squared mean; rounding of float32 leaves about 1e-14


def _is_constant(branch: Stats) -> bool:
    return branch.variance <= CONSTANT_BRANCH * branch.mean_square


def faulty_branches(signal: Signal, dead: Sequence[SumSignal]) -> Iterator[Finding]:
    """Branches that are cut off, that never learn, or whose output does not depend on their input."""
    for s in islice((s for s in dead if not _is_constant(s.branch)), 1):
        yield finding("detached branch", s.name)
    for s in islice((s for s in dead if _is_constant(s.branch)), 1):
        constant = "" if s.branch.norm == 0 else "it only returns a constant; "
        yield finding("dead branch", s.name, constant=constant)
    zero = {layer.name for layer in signal.layers if layer.weight_norm == 0}
    names = list(signal.constant_sums) + [
        s.name
        for s, branch in zip(signal.sums, signal.plan.branches, strict=False)
        if s.branch.norm > 0
        and _is_constant(s.branch)
        and not _is_constant(s.shortcut)
        and s not in dead
        and not zero & {layer.name for layer in branch.ends}
    ]
    if names and not signal.inputs.alike:
        yield finding("constant branch", names[0], names=names)


SHUT = 1e-20  # second moment of a branch over that of its shortcut; layer scales of 1e-6 leave 1e-17
TINY_SCALE = 1e-7  # root mean square of a vector of scales: below the rounding of float32; CaiT starts with 1e-6


def small_branches(signal: Signal) -> Iterator[Finding]:
    """Branches that are too small to change their sum: a gate that is shut, or scales below rounding."""
    shut = [s.name for s in signal.sums if 0 < s.branch.power < SHUT * s.shortcut.power]
    tiny = [s.place for s in signal.scales if 0 < s.value < TINY_SCALE]
    if shut:
        yield finding("shut branch", shut[0], names=shut)
    elif tiny:
        yield finding("tiny scale", tiny[0], names=tiny, verb="are" if len(tiny) > 1 else "is")


def silent(signal: Signal, forward: Direction) -> Iterator[Finding]:
    """A place from which on the signal is exactly zero."""
    broken = forward.broken_at if forward.sudden and forward.status == "vanishing" else ""
    if signal.unmeasured or not (broken or (signal.origin and not forward.broken_at)):
        return
    names = [s.name for s in signal.sums]
    behind = broken or "the output"
    before = names[(names.index(broken) if broken else len(names)) - 1] if broken != names[0] else ""
    place, kind = signal.origin or behind, signal.origin_kind
    if signal.half:
        remedy = (
            f"look at {place}: in half precision (float16) numbers or their squares overflow or become zero between "
            f"{before or 'the input'} and {behind}; use bfloat16 or float32 there"
        )
        yield finding("half precision overflow", place, "vanishing", numbers="zeros in float16", remedy=remedy)
    elif "Dropout" in kind:
        yield finding("dropout of everything", place, kind=kind, why="its probability is 1")
    elif "Norm" in kind:
        if any(s.value == 0 and s.place == f"{place}.weight" for s in signal.scales):
            yield finding("zero scale", place, names=[place])
            return
        why = "it normalizes groups of one value"
        made = finding("dropout of everything", place, kind=kind, why=why)
        yield Finding("normalizer of one value", place, made.status, made.text, made.remedy)
    elif signal.plain and broken and before and (not signal.origin or re.search("LU|Threshold|Tanh", kind)):
        yield finding("dead layer", before, behind=behind)
    else:
        where = signal.origin or (behind if before else f"{behind} and the layers before it")
        yield finding("no signal", place, where=where)


def gradient_cut(signal: Signal, forward: Direction, backward: Direction) -> Iterator[Finding]:
    """A place that no gradient, or no finite one, passes."""
    place = backward.broken_at
    if signal.loss_cut:
        yield finding("loss without a gradient", "the output")
        return
    frozen = {layer.name for layer in signal.layers if layer.frozen}
    if (cut := [name for name in signal.cut if name not in frozen]) and not place:
        text = f"{cut[-1]} changes the output, but gets no gradient"
        also = ", or a mask of zeros (all padding) does, so that it does not learn"
        yield finding("gradient cut", cut[-1], text=text, spot=f"behind {cut[-1]}", also=also)
    if not place or not backward.sudden or forward.broken_at:
        return
    names = [s.name for s in signal.sums]
    after = next(iter(signal.sums[names.index(place) + 1 :]), None)
    where = "the output" if after is None else after.name if signal.plain else "the next sum"
    constant = after is not None and _is_constant(after.sum) and not signal.inputs.alike
    if backward.status != "vanishing":
        origin = signal.gradient_origin
        spot = f"at {origin}" if origin else f"between {place} and {where}"
        function = f"the function {signal.gradient_function}" if origin else "something"
        yield finding("gradient not finite", origin or place, spot=spot, function=function)
    elif signal.half and not constant:
        yield finding("half precision underflow", place)
    elif constant and signal.plain and signal.origin and not re.search("LU|Threshold|Tanh", signal.origin_kind):
        yield finding("no signal", signal.origin, where=signal.origin)
    elif constant and signal.plain:
        yield finding("dead layer", place, behind=where)
    elif zero := [s.place.rpartition(".")[0] for s in signal.scales if s.value == 0 and s.function == "norm"]:
        yield finding("zero scale", zero[0], names=zero)
    else:
        also = ", or a ReLU that is never positive or a factor of zero does"
        yield finding("gradient cut", place, text="", spot=f"between {place} and {where}", also=also)


# The part of the first block's signal that is left on the shortcut if a normalizer follows every sum: 1e-1 with 6
# encoder layers, 1e-3 with 12 and 1e-6.5 with 24, which need a warm-up; 1e-14 with 48, which hardly train.
POST_NORM_LEFT = 1e-9
POST_NORM_SUMS = 72  # from 36 layers on, narrow ones with 1e-3 hardly train either
POST_NORM_DEEP = 1e-2  # the part that is too small with so many sums
POST_NORM_SAME = 0.02  # relative difference of second moments after a normalizer, which are 1 at the start


def before_normalizers(signal: Signal) -> str:
    """The first sum, if normalizers follow all others, but not its small input, which says nothing about depth."""
    main = [s for s in signal.sums if s.around is None]
    powers = [s.shortcut.power for s in main[1:]]
    same = all(abs(p - powers[-1]) <= POST_NORM_SAME * p for p in powers)
    return main[0].name if len(powers) >= SIMILAR and same and powers[0] > NOTICEABLE * main[0].sum.power else ""


def deep_post_norm(signal: Signal) -> Iterator[Finding]:
    """A normalizer after every sum, so that the shortcut forgets the early blocks."""
    main = [s for s in signal.sums if s.around is None and not s.layer and not s.transition]
    powers = [s.shortcut.power for s in main[1:]]
    sums = [s.sum.power for s in main]
    if 2 * len(signal.plan.body) >= len(main):
        return  # layers stand between the sums, which is no post-norm
    if len(powers) < 4 or not all(0 < p < math.inf for p in (*powers, *sums)):
        return
    if not all(0.5 < s.sum.power / (s.shortcut.power + s.branch.power) < 2 for s in main[1:]):
        return  # the shortcut or the branch is scaled in the sum
    middle = sorted(powers)[len(powers) // 2]
    same = sum(abs(p / middle - 1) <= POST_NORM_SAME for p in powers)
    changed = sum(abs(p / s - 1) > POST_NORM_SAME for p, s in zip(powers, sums, strict=False))
    if same < 0.9 * len(powers) or changed < 0.5 * len(powers):
        return
    left = sum(math.log10(p / s) for p, s in zip(powers, sums[1:], strict=True))
    if left <= math.log10(POST_NORM_DEEP if len(main) >= POST_NORM_SUMS else POST_NORM_LEFT):
        yield finding("deep post-norm ({sums} sums)", "", sums=len(main), left=f"{left:.0f}")
