"""The rules for the signal on its way: the input, numbers that are not finite, the branches, the gradient, variation.

`loss_rules.py` has the rules for the output and the loss, `module_rules.py` those for single modules and functions, and
`findings.toml` the words and remedies. The functions are pure, and each limit stands above its rule with its reason.
Unless stated otherwise a limit is a ratio of variances or of second moments, not of standard deviations.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, pairwise
from typing import Any

from normfree.diagnostics.rules.findings import HARMLESS, Finding, RuleInput, finding
from normfree.diagnostics.rules.growth import NOTICEABLE, POST_NORM_LEAST, POST_NORM_SAME
from normfree.diagnostics.signals import (
    CONSTANT,
    INPUT_LARGE,
    INPUT_OFFSET,
    INPUT_SMALL,
    Fact,
    Signal,
    Stats,
    SumSignal,
)
from normfree.report.tables import compact, shorten_names


def faults_of_the_input(case: RuleInput) -> Iterator[Finding]:
    """Numbers that are not finite, samples that are all alike, and a scale or offset far from 1 and 0."""
    x, signal = case.signal.inputs, case.signal
    if not x.finite:
        yield finding("input not finite", "the input")
    elif x.alike:
        yield finding("input constant", "the input", mean=x.mean)
    elif x.highest <= 0 and any(s.level == 0 or s.variation <= CONSTANT for s in signal.sums[:1]):
        yield finding("input all negative", "the input", mean=x.mean)
    elif abs(x.mean) > INPUT_OFFSET * x.deviation and _is_read(signal, lambda f: f.mean > INPUT_OFFSET):
        yield finding("input not centred", "the input", mean=x.mean, deviation=x.deviation)
    elif (x.size < INPUT_SMALL or x.size > INPUT_LARGE) and _is_read(
        signal, lambda f: f.value < INPUT_SMALL if x.size < INPUT_SMALL else f.value > INPUT_LARGE
    ):
        note = "; bytes need a division by 255" if 50 < x.size < 256 and x.mean > 0 else ""
        yield finding("input scale", "the input", size=x.size, note=note)


def _is_read(signal: Signal, is_alike: Callable[[Fact], bool]) -> bool:
    """Whether a weight layer reads numbers like the input's, or reads none of what differs between the samples.

    A model that takes logarithms, looks up indices or normalizes by itself does not read them.
    """
    drowned = any(s.variation < DROWNED * signal.inputs.variation for s in signal.sums[:1])
    return drowned or not signal.by_kind["read"] or any(map(is_alike, signal.by_kind["read"]))


EMBEDDING_RATIO = 100.0  # of root mean squares: the smaller one has 1e-4 of the power of the larger


def small_embeddings(case: RuleInput) -> Iterator[Finding]:
    """An embedding that is drowned by another one."""
    sizes = sorted((f for f in case.signal.by_kind["embedding"] if 0 < f.value < math.inf), key=lambda f: f.value)
    if len(sizes) > 1 and sizes[-1].value > EMBEDDING_RATIO * sizes[0].value:
        small, large = sizes[0], sizes[-1]
        words: dict[str, Any] = {"size": small.value, "other": large.place, "large": large.value}
        words["ratio"] = large.value / small.value
        yield finding("embedding too small", small.place, **words)


DIVISIONS = ("div", "div_", "__truediv__", "__rtruediv__", "__itruediv__", "true_divide", "reciprocal", "rsqrt")
NOT_FINITE = {
    **dict.fromkeys(DIVISIONS, "it divides by zero; add a small number (epsilon) to what it divides by"),
    **dict.fromkeys(("log", "log2", "log10"), "the logarithm of zero or less; add a small number (epsilon) inside it"),
    **dict.fromkeys(("sqrt", "pow", "__pow__"), "a root of less than zero, or a power of zero or of a large number"),
    **dict.fromkeys(("exp", "expm1"), "the exponential of a large number overflows; limit it, or subtract the maximum"),
    **dict.fromkeys(
        ("softmax", "log_softmax", "scaled_dot_product_attention", "multi_head_attention_forward"),
        "all values of a softmax are -inf, as behind a mask that hides every position (an inverted padding mask)",
    ),
}  # by function, what makes its result infinite or NaN


def non_finite(case: RuleInput) -> Iterator[Finding]:
    """The weight, the module or the precision that makes the signal infinite or NaN."""
    signal, forward = case.signal, case.forward
    for fact in signal.by_kind["overflow"][:1]:  # squares that are infinite under a root or a fraction
        place = fact.place or "the model"
        yield _half_precision(
            place, f"inside {place}", "zeros, because the squares inside are beyond 65504, the largest of float16"
        )
    if not signal.unmeasured or not signal.inputs.finite:
        return
    why = ": a weight is not finite, or something divides by zero or takes a root or logarithm outside its range"
    if function := signal.origin_function:
        reason = NOT_FINITE.get(function, "its numbers leave the range of the type or of the function")
        reads = f"; it reads {signal.origin_reads}" if signal.origin_reads not in ("", signal.origin) else ""
        why = f"; {function.strip('_')} returns infinity or NaN there: {reason}{reads}"
    if signal.broken:
        yield finding("weight not finite", signal.broken[0], names=signal.broken)
    elif signal.half:
        place = signal.origin or signal.unmeasured
        yield _half_precision(place, f"at {place}", "numbers beyond 65504, the largest of float16")
    elif forward.broken_at and forward.sudden:
        first = signal.sums[0].name
        where = forward.broken_at if forward.broken_at != first else f"{first} and the layers before it"
        inner = f" ({signal.origin})" if signal.origin and signal.origin != forward.broken_at else ""
        yield finding("not finite", forward.broken_at, text=f"{where} is not finite", where=f"{where}{inner}", why=why)
    elif not forward.broken_at:
        where = signal.origin or "the layers between the last block and the output"
        text, why = "the values become non-finite after the last block", why if signal.origin or function else ""
        yield finding("not finite", signal.origin or "the output", text=text, where=where, why=why)


def _half_precision(place: str, where: str, numbers: str) -> Finding:
    remedy = "compute the squares and their mean in float32 there"
    if not where.startswith("inside"):
        remedy = "use bfloat16 or float32, or smaller weights and inputs"
    remedy = f"half precision (float16) overflows {where}: {remedy}"
    return finding("half precision overflow", place, numbers=numbers, remedy=remedy)


CONSTANT_BRANCH = 1e-10  # variance relative to the squared mean; rounding of float32 leaves about 1e-14
SHUT = 1e-20  # second moment of a branch over that of its shortcut; layer scales of 1e-6 leave 1e-17
DROWNS = 1e4  # the same for a branch that is too large; GPT with small words has 300 in its first block


def _is_constant(branch: Stats) -> bool:
    return branch.variance <= CONSTANT_BRANCH * branch.mean_square


def faulty_branches(case: RuleInput) -> Iterator[Finding]:
    """Branches that are cut off, that never learn, whose output does not depend on their input, or is too small."""
    signal = case.signal
    layers = {s.name: {m.name for m in b.layers} for s, b in zip(signal.sums, signal.plan.branches, strict=False)}
    reached = {name.rpartition(".")[0] for name in signal.graph.reached}
    # Else the gradient of the branch is rounded to zero, by saturation or an explosion.
    cut = (s for s in case.dead if not _is_constant(s.branch) and not layers.get(s.name, set()) & reached)
    yield from (finding("detached branch", s.name) for s in islice(cut, 1))
    cut_off = [b for a, b in pairwise(signal.sums) if a.sum_gradient.norm > 0 and _has_detached_shortcut(b)]
    # A step that starts from a detached estimate every time does so by design.
    detached = (s for s in cut_off if not _in_all_calls(s, cut_off, signal))
    yield from (finding("detached shortcut", s.name) for s in islice(detached, 1))
    for s in islice((s for s in case.dead if _is_constant(s.branch)), 1):
        yield finding("dead branch", s.name, constant="" if s.branch.norm == 0 else "it only returns a constant; ")
    zero = set(signal.zero_layers)
    constant = list(signal.constant_sums) + [
        s.name
        for s, branch in zip(signal.sums, signal.plan.branches, strict=False)
        if s.branch.norm > 0
        and _is_constant(s.branch)
        and not _is_constant(s.shortcut)
        and s not in case.dead
        and not zero & {layer.name for layer in branch.last_layers}
    ]
    if constant and not signal.inputs.alike:
        yield finding("constant branch", constant[0], names=constant)
    if shut := [s.name for s in signal.sums if 0 < s.branch.power < SHUT * s.shortcut.power]:
        yield finding("shut branch", shut[0], names=shut)


def _has_detached_shortcut(s: SumSignal) -> bool:
    """Whether the shortcut of a sum varies, but no gradient passes it, although one does the branch."""
    return math.isnan(s.shortcut_gradient.norm) and s.branch_gradient.norm > 0 and s.shortcut.variance > 0


def _in_all_calls(s: SumSignal, found: Sequence[SumSignal], signal: Signal) -> bool:
    """Whether all calls of a block but the first are among those that were found, and there are several."""
    block = s.name.partition("#")[0]
    calls = [other for other in signal.sums if other.name.partition("#")[0] == block]
    return len(calls) > 2 and all(other in found for other in calls[1:])


def drowning_branches(case: RuleInput) -> Iterator[Finding]:
    """Branches beside which nothing is left of what their shortcuts carry."""
    streams = zip(case.signal.sums, case.signal.plan.branches, strict=False)
    sums = [s for s, b in streams if b.shortcut == "identity"]
    if sums := [s for s in sums if 0 < s.shortcut.power * DROWNS < s.branch.power < math.inf]:
        yield large_branches(sums)


def large_branches(sums: list[SumSignal]) -> Finding:
    """The finding for branches that are far larger than their shortcuts."""
    names, most = shorten_names([s.name for s in sums]), max(s.branch.power / s.shortcut.power for s in sums)
    text = f"the branch of {names} has up to {compact(most)} times the power of its shortcut"
    remedy = (
        f"look at the branch of {names}: it is so large that nothing is left of what it is added to; make its weights "
        "or its scale smaller"
    )
    return finding("{block} too {large}", sums[0].name, block="branch", large="large", text=text, remedy=remedy)


ACTIVATION = "LU|Threshold|Tanh"  # in the name of a class


def silent(case: RuleInput) -> Iterator[Finding]:
    """A place from which on the signal is exactly zero."""
    signal, forward = case.signal, case.forward
    if case.zero_layer or signal.origin in case.starting:
        return
    broken = forward.broken_at if forward.sudden and forward.status == "vanishing" else ""
    if signal.unmeasured or not (broken or (signal.origin and not forward.broken_at)):
        return
    names = [s.name for s in signal.sums]
    behind = broken or "the output"
    before = names[(names.index(broken) if broken else len(names)) - 1] if broken != names[0] else ""
    place, kind = signal.origin or behind, signal.origin_kind
    if broken and kind.startswith("Embedding"):  # a table of biases may start at zero
        place = broken
    if signal.half:
        remedy = (
            f"look at {place}: in half precision (float16) numbers or their squares overflow or become zero between "
            f"{before or 'the input'} and {behind}; use bfloat16 or float32 there"
        )
        yield finding("half precision overflow", place, "vanishing", numbers="zeros in float16", remedy=remedy)
    elif "Dropout" in kind:
        yield finding("dropout of everything", place, kind=kind)
    elif any(s.value == 0 and s.place == f"{place}.weight" for s in signal.by_kind["scale"]) and "Norm" in kind:
        yield finding("zero scale", place, names=[place])
    elif "Norm" in kind:
        yield finding("normalizer of one value", place)
    elif signal.plain and broken and before and (not signal.origin or re.search(ACTIVATION, kind)):
        yield finding("dead layer", before, behind=behind)
    else:
        where = behind if before else f"{behind} and the layers before it"
        yield finding("no signal", place, where=place if signal.origin else where)


def gradient_cut(case: RuleInput) -> Iterator[Finding]:
    """A place that no gradient, or no finite one, passes."""
    signal, forward, backward = case.signal, case.forward, case.backward
    place = backward.broken_at
    if signal.loss_cut:
        one_class = {"LogSoftmax", "Softmax"} & set(signal.graph.loss) and signal.head.classes < 2
        yield finding("loss of one class" if one_class else "loss without a gradient", "the output")
        return
    if (cut := [name for name in signal.cut_layers if name not in signal.frozen_layers]) and not place:
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
    elif constant and signal.plain and signal.origin and not re.search(ACTIVATION, signal.origin_kind):
        yield finding("no signal", signal.origin, where=signal.origin)
    elif constant and signal.plain:
        yield finding("dead layer", place, behind=where)
    elif zero := [s.place.rpartition(".")[0] for s in signal.by_kind["scale"] if s.value == 0 and s.detail == "norm"]:
        yield finding("zero scale", zero[0], names=zero)
    else:
        also = ", or a ReLU that is never positive or a factor of zero does"
        yield finding("gradient cut", place, text="", spot=f"between {place} and {where}", also=also)


DROWNED = 1 / 300  # of the variation over samples that is left behind one place; latent arrays leave 1/60
# The same where the constant has at most unit size, so that the signal is small; the positions of a small Whisper, with
# a second moment of 0.5, leave 1/1130, and it trains.
DROWNED_WHILE_SMALL = 1 / 2000
ALIKE_SAMPLES = 1e-4  # of the variation of the input that is left at any place; sound networks keep 5e-3 or more
BY_DESIGN = 1e-7  # of a branch over its shortcut: layer scales of 1e-6 leave 1e-12, and the sum shows its shortcut


def drowned_samples(case: RuleInput) -> Iterator[Finding]:
    """A place behind which a constant, such as positions or a bias, is far larger than what differs by sample.

    The signal may also fall below the constants by and by. The mean over n positions leaves 1/n of the variation.
    """
    signal = case.signal
    first = before = signal.inputs.variation
    shape: tuple[int, ...] = ()
    for i, s in enumerate(signal.sums):
        lost = positions_lost(shape, s.shape)
        first, before, shape = first / lost, before / lost, s.shape
        if s.variation == 0 < s.sum.power:  # queries or latents, which are the same for all samples on purpose
            return
        starts_small = not s.layer and s.branch.power < BY_DESIGN * s.shortcut.power
        starts_small = starts_small or _has_detached_shortcut(s)  # from an estimate, such as the places of pixels
        drowned = (DROWNED if s.sum.power > 1 else DROWNED_WHILE_SMALL) * before
        if not starts_small and 0 < s.variation < max(drowned, ALIKE_SAMPLES * first):
            stem = [layer.name for layer in signal.plan.stem if layer.name] if i == 0 else []
            names = [*stem, s.name] if s.name not in stem else stem
            at_once = s.variation < drowned and (case.forward.status != "exploding" or names[0] == case.forward.worst)
            word = "samples drowned" if at_once else "samples alike"
            yield finding(word, names[0], names=names, share=1 / s.variation, left=s.variation)
            return
        before = s.variation if s.variation > 0 else before


def positions_lost(before: tuple[int, ...], after: tuple[int, ...]) -> float:
    """How many numbers of a sample became one between two places, if their positions were pooled."""
    return max(1.0, math.prod(before[1:]) / math.prod(after[1:])) if len(after) < len(before) else 1.0


ALIKE_TOKENS = 5e-4  # variation over the positions; sound networks have 9e-4 (a Fourier neural operator) or more


def alike_tokens(case: RuleInput) -> Iterator[Finding]:
    """Blocks that make all positions of a sequence, or all nodes of a graph, alike."""
    zero = set(case.signal.zero_layers)
    measured = [s for s in case.signal.sums if s.name not in zero]
    if measured and measured[0].token_variation > NOTICEABLE * ALIKE_TOKENS:
        alike = (s for s in measured if s.token_variation < ALIKE_TOKENS)
        yield from (finding("tokens alike", s.name, value=s.token_variation) for s in islice(alike, 1))


# The part of the first block's signal that is left on the shortcut if a normalizer follows every sum: 1e-1 with 6
# encoder layers, 1e-3 with 12 and 1e-6.5 with 24, which need a warm-up; 1e-14 with 48, which hardly train.
POST_NORM_LEFT = 1e-9
POST_NORM_SUMS = 72  # from 36 layers on, narrow ones with 1e-3 hardly train either
POST_NORM_DEEP = 1e-2  # the part that is too small with so many sums
POST_NORM_BRANCH = 100.0  # second moment of a branch over that of its shortcut; sound ones have about 1


def deep_post_norm(case: RuleInput) -> Iterator[Finding]:
    """A normalizer after every sum, so that the shortcut forgets the early blocks."""
    signal = case.signal
    main = [s for s in signal.sums if s.around is None and not s.layer and not s.transition]
    powers = [s.shortcut.power for s in main[1:]]
    sums = [s.sum.power for s in main]
    if case.forward.status not in HARMLESS or 2 * len(signal.plan.body) >= len(main):
        return  # layers stand between the sums, which is no post-norm
    if len(powers) < POST_NORM_LEAST or not all(0 < p < math.inf for p in (*powers, *sums)):
        return
    if not all(0.5 < s.sum.power / (s.shortcut.power + s.branch.power) < 2 for s in main[1:]):
        return  # the shortcut or the branch is scaled in the sum
    middle = sorted(powers)[len(powers) // 2]
    same = sum(abs(p / middle - 1) <= POST_NORM_SAME for p in powers)
    changed = sum(abs(p / s - 1) > POST_NORM_SAME for p, s in zip(powers, sums, strict=False))
    if same < 0.9 * len(powers) or changed < 0.5 * len(powers):
        return
    left = sum(math.log10(p / s) for p, s in zip(powers, sums[1:], strict=True))
    large = [s for s in main[1:] if s.branch.power > POST_NORM_BRANCH * s.shortcut.power]
    if left <= math.log10(POST_NORM_DEEP) and 2 * len(large) > len(main):
        yield large_branches(large)
    elif left <= math.log10(POST_NORM_DEEP if len(main) >= POST_NORM_SUMS else POST_NORM_LEFT):
        first, last = main[0].name, main[-1].name
        yield finding("deep post-norm ({sums} sums)", "", sums=len(main), left=f"{left:.0f}", first=first, last=last)


SIGNAL_RULES = (
    faults_of_the_input,
    small_embeddings,
    non_finite,
    faulty_branches,
    silent,
    gradient_cut,
    deep_post_norm,
    drowned_samples,
    alike_tokens,
)
