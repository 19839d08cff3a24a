"""The rules for the signal on its way: the input, the stem, the branches, the gradient, the output and the loss.

`module_rules.py` has the rules for single modules and functions, `finding_words.py` the words and remedies. The
functions are pure, and each limit stands above its rule with its reason. Unless stated otherwise a limit is a ratio of
variances or of second moments, not of standard deviations.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

from normfree.diagnostics.findings import Finding, SignalStatus, finding
from normfree.diagnostics.growth import LAYER_GAIN, NOTICEABLE, Direction
from normfree.diagnostics.module_rules import finding_of
from normfree.diagnostics.signals import (
    CONSTANT,
    INPUT_LARGE,
    INPUT_OFFSET,
    INPUT_SMALL,
    Fact,
    Gain,
    Signal,
    Stats,
    SumSignal,
)
from normfree.report.tables import compact


def faults_of_the_input(signal: Signal) -> Iterator[Finding]:
    """Numbers that are not finite, samples that are all alike, and a scale or offset far from 1 and 0."""
    x = signal.inputs
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


def non_finite(signal: Signal, forward: Direction) -> Iterator[Finding]:
    """The weight, the module or the precision that makes the signal infinite or NaN."""
    if not signal.unmeasured or not signal.inputs.finite:
        return
    divides = ": a weight is not finite, or something divides by zero or takes a root or logarithm outside its range"
    if function := signal.origin_function:
        function = function.strip("_")
        reason = NOT_FINITE.get(signal.origin_function, "its numbers leave the range of the type or of the function")
        divides = f"; {function} returns infinity or NaN there: {reason}"
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
        text, why = "the values become non-finite after the last block", divides if signal.origin or function else ""
        yield finding("not finite", signal.origin or "the output", text=text, where=where, why=why)


def hidden_overflow(signal: Signal) -> Iterator[Finding]:
    """Squares that are infinite in half precision, under a root or a fraction, so that the result is finite."""
    for fact in islice(signal.by_kind["overflow"], 1):
        place = fact.place or "the model"
        remedy = (
            f"half precision (float16) overflows inside {place}: compute the squares and their mean in float32 there"
        )
        numbers = "zeros, because the squares inside are beyond 65504, the largest of float16"
        yield finding("half precision overflow", place, numbers=numbers, remedy=remedy)


EMBEDDING_RATIO = 100.0  # of root mean squares: the smaller one has 1e-4 of the power of the larger


def small_embeddings(signal: Signal) -> Iterator[Finding]:
    """An embedding that is drowned by another one."""
    sizes = sorted((s for s in signal.by_kind["embedding"] if 0 < s.value < math.inf), key=lambda s: s.value)
    if len(sizes) > 1 and sizes[-1].value > EMBEDDING_RATIO * sizes[0].value:
        small, large = sizes[0], sizes[-1]
        ratio = large.value / small.value
        yield finding(
            "embedding too small", small.place, size=small.value, other=large.place, large=large.value, ratio=ratio
        )


def faults_of_the_targets(signal: Signal) -> Iterator[Finding]:
    """Targets that are too large, and a loss that is a sum."""
    head = signal.head
    for fact in signal.by_kind["targets scale"][:1]:
        yield finding_of(fact)
    count = signal.zero_loss / math.log(head.classes) if head.classes > 1 and "NllLoss" in signal.graph.loss else 1.0
    if 3 < count < math.inf and abs(count - round(count)) < 1e-3 * count:
        yield finding("loss is a sum", "the loss", count=round(count))


def constant_targets(signal: Signal) -> Iterator[Finding]:
    """Labels that are all the same; a float for all is the label of real images in an adversarial network.

    Classes without a unit of the last layer are places of similar samples, of which the first may be the right one.
    """
    units = [layer.units for layer in signal.layers if layer.name == signal.graph.output_place]
    placed = signal.head.classes > 1 and any(0 < n != signal.head.classes for n in units)
    if signal.targets.alike and "int" in signal.targets.dtype and not placed:
        yield finding("targets constant", "the targets", mean=signal.targets.mean)


BOUNDED = ("Sigmoid", "Hardsigmoid", "Tanh", "Hardtanh", "Softmax")
UNREACHABLE = 0.1  # of the targets outside the range of the output


def faults_of_the_loss(signal: Signal) -> Iterator[Finding]:
    """An output that does not fit the loss or the targets."""
    graph, loss = signal.graph, set(signal.graph.loss)
    function, behind = graph.output.lower(), f"behind {graph.output_place}" if graph.output_place else "at the end"
    words: dict[str, Any] = {"function": function, "behind": behind}
    if "BinaryCrossEntropyWithLogits" in loss and graph.output in BOUNDED:
        text = f"the output is already a {function}, and the loss takes a sigmoid of it"
        yield finding("{function} before the loss", "the output", text=text, **words)
    elif "LogSoftmax" in loss and graph.output in (*BOUNDED[:-1], "Relu"):
        text = f"the output is a {function}, and the loss takes a softmax of it, which needs numbers of any size"
        yield finding("{function} before the loss", "the output", text=text, **words)
    elif {"NllLoss", "NllLoss2D", "CtcLoss"} & loss and not {"LogSoftmax", "Log"} & {*loss, graph.output}:
        yield finding("logits without a softmax", "the output")
    elif signal.unreachable > UNREACHABLE and "BinaryCrossEntropyWithLogits" not in loss:
        yield finding("{function} on the output", "the output", percent=signal.unreachable, **words)
    for fact in signal.by_kind["targets no probabilities"][:1]:
        yield finding(fact.kind, "the targets", low=fact.value, high=fact.mean)
    if signal.broadcast:
        yield finding("shapes of output and targets", "the output")


CONSTANT_BRANCH = 1e-10  # variance relative to the squared mean; rounding of float32 leaves about 1e-14


def _is_constant(branch: Stats) -> bool:
    return branch.variance <= CONSTANT_BRANCH * branch.mean_square


def faulty_branches(signal: Signal, dead: Sequence[SumSignal]) -> Iterator[Finding]:
    """Branches that are cut off, that never learn, or whose output does not depend on their input."""
    layers = {s.name: {m.name for m in b.layers} for s, b in zip(signal.sums, signal.plan.branches, strict=False)}
    reached = {name.rpartition(".")[0] for name in signal.graph.reached}
    cut = (s for s in dead if not _is_constant(s.branch) and not layers.get(s.name, set()) & reached)
    for s in islice(cut, 1):  # else its gradient is rounded to zero, by saturation or an explosion
        yield finding("detached branch", s.name)
    for s in islice((s for s in dead if _is_constant(s.branch)), 1):
        constant = "" if s.branch.norm == 0 else "it only returns a constant; "
        yield finding("dead branch", s.name, constant=constant)
    zero = set(signal.zero_layers)
    names = list(signal.constant_sums) + [
        s.name
        for s, branch in zip(signal.sums, signal.plan.branches, strict=False)
        if s.branch.norm > 0
        and _is_constant(s.branch)
        and not _is_constant(s.shortcut)
        and s not in dead
        and not zero & {layer.name for layer in branch.last_layers}
    ]
    if names and not signal.inputs.alike:
        yield finding("constant branch", names[0], names=names)


SHUT = 1e-20  # second moment of a branch over that of its shortcut; layer scales of 1e-6 leave 1e-17
TINY_SCALE = 1e-7  # root mean square of a vector of scales: below the rounding of float32; CaiT starts with 1e-6


def small_branches(signal: Signal) -> Iterator[Finding]:
    """Branches that are too small to change their sum: a gate that is shut, or scales below rounding."""
    shut = [s.name for s in signal.sums if 0 < s.branch.power < SHUT * s.shortcut.power]
    tiny = [s.place for s in signal.by_kind["scale"] if 0 < s.value < TINY_SCALE]
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
        if any(s.value == 0 and s.place == f"{place}.weight" for s in signal.by_kind["scale"]):
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
        one_class = {"LogSoftmax", "Softmax"} & set(signal.graph.loss) and signal.head.classes < 2
        yield finding("loss of one class" if one_class else "loss without a gradient", "the output")
        return
    if (cut := [name for name in signal.cut if name not in signal.frozen_layers]) and not place:
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
    elif zero := [s.place.rpartition(".")[0] for s in signal.by_kind["scale"] if s.value == 0 and s.detail == "norm"]:
        yield finding("zero scale", zero[0], names=zero)
    else:
        also = ", or a ReLU that is never positive or a factor of zero does"
        yield finding("gradient cut", place, text="", spot=f"between {place} and {where}", also=also)


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
    zero = set(signal.zero_layers)
    measured = [s for s in signal.sums if s.name not in zero]
    if measured and measured[0].token_variation > NOTICEABLE * ALIKE_TOKENS:
        alike = (s for s in measured if s.token_variation < ALIKE_TOKENS)
        for s in islice(alike, 1):
            yield finding("tokens alike", s.name, value=s.token_variation)


DIVERGENCE = {"Sub", "Mul", "Sum", "Mean", "Div"}  # kl_div, which takes the logarithm of the targets only
OUTPUT_LARGE = 1e6  # second moment of the output over that of the last block
CLASSIFIER_GAIN = 100.0  # the same, above which a high first loss is the classifier's; sound ones have 0.01 to 3
ZERO_LOSS = 4.0  # times the loss of an output of zeros, if that is a binary cross-entropy
FIRST_LOSS = 4.0  # times log C plus 5; MNASNet starts at 12 with 10 classes
DRIFTED_LOSS = 2.0  # times log C plus 2: a drift of the forward signal shows at the output
LARGE_BIAS = 5.0  # of one class above the mean of all biases; torch draws them below 1


def faults_of_the_head(signal: Signal, *, drifting: bool = False) -> Iterator[Finding]:
    """An output that is too large, constant, saturated or already a probability, and a first loss far above log C.

    The limit of the loss is lower if the forward signal drifts.
    """
    head, classifier = signal.head, [layer.name for layer in signal.plan.classifier]
    power = signal.sums[-1].sum.power
    grown = head.mean_square / power if power > 0 else math.nan
    log_classes = math.log(head.classes) if head.classes else math.nan
    with_loss = not math.isnan(signal.loss)
    # Any loss can be compared with its own value for zeros, but only a cross-entropy with log C.
    built_in = signal.graph.loss[:1] in (("NllLoss",), ("NllLoss2D",)) and "float" not in signal.targets.dtype
    chance = signal.zero_loss if "NllLoss" in signal.graph.loss and signal.zero_loss > 0 else log_classes
    limit = DRIFTED_LOSS * chance + 2 if drifting else FIRST_LOSS * chance + 5
    first_loss = head.chance_loss if classifier and not with_loss else math.nan
    if built_in:
        first_loss = signal.loss
    elif "BinaryCrossEntropyWithLogits" in signal.graph.loss and signal.zero_loss > 0:
        first_loss, limit = signal.loss, ZERO_LOSS * signal.zero_loss
    elif with_loss and signal.zero_loss > 0 and head.mean_square > NOTICEABLE * max(1.0, signal.targets.size**2):
        first_loss, limit = signal.loss, NOTICEABLE * signal.zero_loss
    zero = set(signal.zero_layers)
    functions = set(signal.graph.loss)
    logits = "LogSoftmax" in functions or {"Sub", "Mul"} <= functions <= DIVERGENCE
    if head.probabilities and with_loss and head.classes and logits:
        yield finding("softmax before the loss", "the output")
    elif first_loss > limit or (grown >= OUTPUT_LARGE and not head.mean_square <= NOTICEABLE * signal.targets.size**2):
        yield _large_output(signal, grown, first_loss, log_classes)
    elif head.variation <= CONSTANT and head.mean_square > 0 and not signal.inputs.alike and not zero & set(classifier):
        ends = next(iter(signal.by_kind["variation ends"]), None)
        spot = "at the end of the network" if ends is None else f"at {ends.place}, and between {ends.detail} and it"
        steps = [f.name for f in signal.modules if f.kind in ("RNN", "GRU", "LSTM")]
        also = ""
        if ends is not None and ends.detail in steps:
            also = f"; the step of {ends.detail} that is read has forgotten it, as after padding"
        yield finding("constant output", "the output", spot=spot, also=also)


def _large_output(signal: Signal, grown: float, first_loss: float, log_classes: float) -> Finding:
    """The reason for a high first loss or a large output: a bias, a layer before the classifier, or the classifier."""
    head, classifier = signal.head, [layer.name for layer in signal.plan.classifier]
    gains = {g.name: g.factor for g in signal.gains}
    classifier.sort(key=lambda name: -gains.get(name, 0.0))
    place, names = classifier[0] if classifier else "the output", classifier or ["the last layer"]
    binary = "BinaryCrossEntropyWithLogits" in signal.graph.loss
    chance = f"with zeros it is {compact(signal.zero_loss)}"
    if {"NllLoss", "NllLoss2D"} & set(signal.graph.loss) or math.isnan(signal.zero_loss):
        chance = f"by chance it is log {head.classes} = {compact(log_classes)}"
    numbers = "" if math.isnan(first_loss) else f"the first loss is {compact(first_loss)}, {chance}"
    sure = f"; the softmax is saturated ({head.confidence:.3f} for the likeliest class)" * (head.confidence > 0.9)
    large = f"; the output is ×{compact(math.sqrt(grown))} as large as the signal there" * (grown >= OUTPUT_LARGE)
    text = f"{numbers}{sure}{large}" if numbers and head.classes else large.removeprefix("; ")
    status: SignalStatus = "exploding" if grown >= OUTPUT_LARGE else "faulty"
    if binary and any(f.value > 1 for f in signal.by_kind["bias"]):
        return finding("prior of the wrong sign", place, status, text=text, names=names)
    bias = max((f.value for f in signal.by_kind["largest bias"]), default=0.0)
    if bias >= LARGE_BIAS and head.favourite >= 0:
        return finding("classifier bias", place, status, text=text, names=names, bias=bias, favourite=head.favourite)
    cause = "classifier scale" if grown > CLASSIFIER_GAIN or not head.classes else "first loss"
    if cause == "first loss" and (layer := _largest_gain(signal)):
        text = f"{layer.name} multiplies the signal by {compact(math.sqrt(layer.factor))}; {text}"
        remedy = f"look at {layer.name}: its weights or its scale are too large; {numbers}{sure}"
        words = {"block": "layer", "large": "large"}
        return finding("{block} too {large}", layer.name, status, text=text, remedy=remedy, **words)
    return finding(
        cause, place, status, text=text, names=names, why=f"; {numbers}{sure}" if numbers and head.classes else ""
    )


def _largest_gain(signal: Signal) -> Gain | None:
    """The module before the classifier that makes the signal larger than any other, if it does so by far."""
    last = {layer.name for layer in signal.plan.classifier}
    gains = [g for g in signal.gains if g.factor >= LAYER_GAIN and not g.normalized and g.name not in last]
    return max(gains, key=lambda g: g.factor, default=None)
