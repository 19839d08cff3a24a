"""Faults at one place: what is wrong, where, and what to do. Growth over depth is judged in `growth.py`.

Each function looks for one family of faults in a signal. `docs/diagnosis.md` has an example of each.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence

from normfree.diagnostics.growth import Direction, Finding
from normfree.diagnostics.limits import (
    CONSTANT_BRANCH,
    POST_NORM_DEEP,
    POST_NORM_LEFT,
    POST_NORM_SAME,
    POST_NORM_SUMS,
    SHUT,
    SIMILAR,
)
from normfree.diagnostics.model_signal import Signal
from normfree.diagnostics.moments import Stats
from normfree.diagnostics.places import name_pattern
from normfree.diagnostics.sum_hooks import SumSignal
from normfree.diagnostics.weight_faults import zeroed
from normfree.report.formatting import shorten_names

DIVIDES = (
    "a weight is not finite, or something divides by zero or takes a root or logarithm outside its range"  # of a sum
)


def non_finite(signal: Signal, forward: Direction) -> Iterator[Finding]:
    """The weight, the module or the precision that makes the signal infinite or NaN."""
    if not signal.unmeasured or not signal.inputs.finite:
        return
    place = signal.unmeasured if not signal.plain or not signal.origin else signal.origin
    if signal.broken:
        names = shorten_names(signal.broken)
        yield Finding(
            "weight not finite",
            signal.broken[0],
            "exploding",
            f"{names} {'hold' if len(signal.broken) > 1 else 'holds'} NaN or infinity",
            f"look at {signal.broken[0]}: the weight is not finite; load or initialize it again",
        )
    elif signal.half:
        where = signal.origin or place
        yield Finding(
            "half precision overflow",
            where,
            "exploding",
            f"{where} returns numbers beyond 65504, the largest of float16",
            f"half precision (float16) overflows at {where}: use bfloat16 or float32, or smaller weights and inputs",
        )
    elif forward.broken_at and forward.sudden:
        first = signal.sums[0].name
        where = forward.broken_at if forward.broken_at != first else f"{first} and the layers before it"
        inner = f" ({signal.origin})" if signal.origin and signal.origin != forward.broken_at else ""
        yield Finding(
            "not finite", forward.broken_at, "exploding", f"{where} is not finite", f"look at {where}{inner}: {DIVIDES}"
        )
    elif not forward.broken_at:
        where = signal.origin or "the layers between the last block and the output"
        yield Finding(
            "not finite",
            signal.origin or "the output",
            "exploding",
            "the values become non-finite after the last block",
            f"look at {where}: {DIVIDES}"
            if signal.origin
            else "look at the layers between the last block and the output",
        )


def forgotten_skips(signal: Signal) -> Iterator[Finding]:
    """Blocks without the residual sum that most blocks like them have."""
    homes = Counter(b.home for b in signal.plan.branches)  # a loop adds several branches in one module
    in_loops = {layer.name for b in signal.plan.branches if homes[b.home] >= SIMILAR for layer in b.layers}
    inside = Counter(map(name_pattern, in_loops))
    body = list(dict.fromkeys(layer.name for layer in signal.plan.body))
    outside = Counter(map(name_pattern, body))
    stray = [n for n in body if re.search(r"\d", n) and inside[name_pattern(n)] >= 3 * outside[name_pattern(n)]]
    if stray and not signal.missing_sums and not signal.constant_sums:
        names = shorten_names(stray)
        yield Finding(
            "forgotten skip",
            stray[0],
            "faulty",
            f"{names} {'stand' if len(stray) > 1 else 'stands'} in no branch, unlike the same layer of other blocks",
            f"look at {names}: the forward pass has no sum x + f(x) there, or f does not read x",
        )
    if signal.missing_sums:
        names = shorten_names(signal.missing_sums)
        add = "add nothing to their" if len(signal.missing_sums) > 1 else "adds nothing to its"
        yield Finding(
            "forgotten skip",
            signal.missing_sums[0],
            "faulty",
            f"{names} {add} input, unlike others of the class",
            f"look at {names}: the forward pass has no sum x + f(x), or leaves f(x) out of it",
        )


def faulty_branches(signal: Signal, dead: Sequence[SumSignal]) -> Iterator[Finding]:
    """Branches that are cut off, that never learn, or whose output does not depend on their input."""
    if cut := [s for s in dead if not _is_constant(s.branch)]:
        yield Finding(
            "detached branch",
            cut[0].name,
            "dead branch",
            "",
            f"look at the branch of {cut[0].name}: it returns a signal, but detach() or no_grad cuts its gradient off",
        )
    if still := [s for s in dead if _is_constant(s.branch)]:
        constant = "" if still[0].branch.norm == 0 else "it only returns a constant; "
        yield Finding(
            "dead branch",
            still[0].name,
            "dead branch",
            "",
            f"look at the branch of {still[0].name}: {constant}two zero layers with an activation between them never "
            "learn ('fixup' zeroes only the last); neither do layers around a ReLU that is never positive",
        )
    zero = {layer.name for layer in signal.layers if layer.weight_norm == 0}
    ends = {b.name: {layer.name for layer in b.ends} for b in signal.plan.branches}
    known = [ends.get(b.name, set()) for b in signal.plan.branches]
    names_of_dead = {s.name for s in dead}
    constant_branches = list(signal.constant_sums) + [
        s.name
        for s, last in zip(signal.sums, known, strict=False)
        if s.branch.norm > 0
        and _is_constant(s.branch)
        and not _is_constant(s.shortcut)
        and s.name not in names_of_dead
        and not last & zero
    ]
    if constant_branches and not signal.inputs.alike:
        names = shorten_names(constant_branches)
        yield Finding(
            "constant branch",
            constant_branches[0],
            "faulty",
            f"the branch of {names} returns a constant",
            f"look at the branch of {constant_branches[0]}: its output does not depend on its input; it reads another "
            "tensor, or an activation in it is saturated or never positive",
        )


def small_branches(signal: Signal) -> Iterator[Finding]:
    """Branches that are too small to change their sum: a gate that is shut, or scales below rounding."""
    shut = [
        s.name
        for s in signal.sums
        if 0 < s.branch.mean_square + s.branch.variance < SHUT * (s.shortcut.mean_square + s.shortcut.variance)
    ]
    if shut:
        size = "its gate is shut, or a scale is next to zero"
        yield Finding(
            "shut branch",
            shut[0],
            "dead branch",
            f"the branch of {shorten_names(shut)} is below 1e-10 of its shortcut",
            f"look at the branch of {shut[0]}: it is dead, because {size}; look at biases and scales",
        )
    elif signal.tiny_scales:
        names = shorten_names(signal.tiny_scales)
        yield Finding(
            "tiny scale",
            signal.tiny_scales[0],
            "vanishing",
            f"{names} {'are' if len(signal.tiny_scales) > 1 else 'is'} below 1e-7, but not zero",
            f"look at {names}: layer scales below the rounding of float32 leave their branches a gradient that is too "
            "small; start at 1e-6 or more, or at exactly 0",
        )


def _is_constant(branch: Stats) -> bool:
    return branch.variance <= CONSTANT_BRANCH * branch.mean_square


def gradient_cut(signal: Signal, forward: Direction, backward: Direction) -> Iterator[Finding]:
    """A place that no gradient, or no finite one, passes."""
    if signal.cut and not backward.broken_at:
        name = signal.cut[-1]
        yield Finding(
            "gradient cut",
            name,
            "vanishing",
            f"{name} changes the output, but gets no gradient",
            f"look behind {name}: detach() or no_grad cuts the gradient off there, so that it does not learn",
        )
    if not backward.broken_at or not backward.sudden or forward.broken_at:
        return
    names = [s.name for s in signal.sums]
    i = names.index(backward.broken_at)
    is_last = i == len(names) - 1
    where = "the output" if is_last else names[i + 1] if signal.plain else "the next sum"
    if backward.status != "vanishing":
        place = signal.gradient_origin or backward.broken_at
        spot = f"at {place}" if signal.gradient_origin else f"between {place} and {where}"
        what = f"the function {signal.gradient_function}" if signal.gradient_origin else "something"
        remedy = f"look {spot}: {what} has no finite derivative there, as sqrt at 0; add a small number inside it"
        yield Finding("gradient not finite", place, "exploding", "", remedy)
        return
    after = None if is_last else signal.sums[i + 1].sum
    constant = after is not None and _is_constant(after) and not signal.inputs.alike
    if signal.half and not constant:
        yield Finding(
            "half precision underflow",
            backward.broken_at,
            "vanishing",
            "",
            f"the gradient is exactly 0 from {backward.broken_at} on in half precision (float16): scale the loss, or "
            "use bfloat16",
        )
    elif constant and signal.plain:
        yield _dead_layer(backward.broken_at, where)
    else:
        yield Finding(
            "gradient cut",
            backward.broken_at,
            "vanishing",
            "",
            f"look between {backward.broken_at} and {where}: detach() or no_grad cuts the gradient off there, or a "
            "ReLU that is never positive or a factor of zero does",
        )


def silent(signal: Signal, forward: Direction) -> Iterator[Finding]:
    """A place from which on the signal is exactly zero."""
    broken = forward.broken_at if forward.sudden and forward.status == "vanishing" else ""
    if zeroed(signal) or signal.unmeasured or not (broken or (signal.origin and not forward.broken_at)):
        return
    names = [s.name for s in signal.sums]
    behind = broken or "the output"
    before = names[(names.index(broken) if broken else len(names)) - 1] if broken != names[0] else ""
    kind = signal.origin_kind
    if signal.half:
        yield Finding(
            "half precision overflow",
            signal.origin or behind,
            "vanishing",
            f"{signal.origin or behind} returns zeros in float16",
            f"look at {signal.origin or behind}: in half precision (float16) numbers or their squares overflow or "
            f"become zero between {before or 'the input'} and {behind}; use bfloat16 or float32 there",
        )
    elif "Dropout" in kind or "Norm" in kind:
        why = "its probability is 1" if "Dropout" in kind else "it normalizes groups of one value"
        what = "dropout of everything" if "Dropout" in kind else "normalizer of one value"
        remedy = f"look at {signal.origin} ({kind}): it returns zeros for all inputs; {why}, or its scale is zero"
        yield Finding(what, signal.origin, "vanishing", f"{signal.origin} returns zero", remedy)
    elif signal.plain and broken and before and (not signal.origin or re.search("LU|Threshold|Tanh", kind)):
        yield _dead_layer(before, behind)
    else:
        where = signal.origin or (behind if before else f"{behind} and the layers before it")
        yield Finding(
            "no signal",
            signal.origin or behind,
            "vanishing",
            "",
            f"look at {where}: something returns zero, such as a ReLU that is never positive or a weight of zeros",
        )


def _dead_layer(name: str, behind: str) -> Finding:
    """A layer whose activation is never positive, in a network without residual sums."""
    return Finding(
        "dead layer",
        name,
        "vanishing",
        f"{behind} does not depend on the input",
        f"look at {name}: the ReLU behind it is never positive, so that nothing passes; look at its bias and weights",
    )


def deep_post_norm(signal: Signal) -> Iterator[Finding]:
    """A normalizer after every sum, so that the shortcut forgets the early blocks."""
    main = [s for s in signal.sums if s.around is None and not s.layer and not s.transition]
    powers = [s.shortcut.mean_square + s.shortcut.variance for s in main[1:]]
    sums = [s.sum.mean_square + s.sum.variance for s in main]
    branches = [s.branch.mean_square + s.branch.variance for s in main]
    if len(powers) < 4 or not all(0 < p < math.inf for p in (*powers, *sums)):
        return
    if not all(0.5 < s / (p + b) < 2 for p, s, b in zip(powers, sums[1:], branches[1:], strict=True)):
        return  # the shortcut or the branch is scaled in the sum
    middle = sorted(powers)[len(powers) // 2]
    same = sum(abs(p / middle - 1) <= POST_NORM_SAME for p in powers)
    changed = sum(abs(p / s - 1) > POST_NORM_SAME for p, s in zip(powers, sums, strict=False))
    if same < 0.9 * len(powers) or changed < 0.5 * len(powers):
        return
    left = sum(math.log10(p / s) for p, s in zip(powers, sums[1:], strict=True))
    if left <= math.log10(POST_NORM_DEEP if len(main) >= POST_NORM_SUMS else POST_NORM_LEFT):
        yield Finding(
            f"deep post-norm ({len(main)} sums)",
            "",
            "vanishing",
            f"a normalizer follows every sum, so that 1e{left:.0f} of the first block's signal is left on the shortcut "
            f"after {len(main)} sums",
            "move the normalizer into the branch, x + f(norm(x)) (pre-norm), or use 'fixup'",
        )
