"""The rules for both ends of a network: its input, its stem, its output and the loss; see `rules.py`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice
from typing import Any

from normfree.diagnostics.findings import Finding, SignalStatus, finding
from normfree.diagnostics.growth import LARGE, LAYER_GAIN, NOTICEABLE
from normfree.diagnostics.signals import Gain, InputFacts, Signal
from normfree.report.tables import compact

INPUT_OFFSET = 5.0  # mean over standard deviation; images in [0, 1] have 0.4 to 2.5
# Root mean squares. Normalized images have 1, images in [0, 1] 0.3 to 0.7.
INPUT_LARGE = 10.0  # bytes have 150
INPUT_SMALL = 0.01  # images that were divided by 255 twice have 0.002


IN_PLACE = "input changed in place"


def faults_of_the_input(signal: Signal) -> Iterator[Finding]:
    """Numbers that are not finite, samples that are all alike, and a scale or offset far from 1 and 0."""
    x = signal.inputs
    if any(c.finding == IN_PLACE for c in signal.checks):
        yield finding(IN_PLACE, "the input")
    if not x.finite:
        yield finding("input not finite", "the input")
    elif x.alike:
        yield finding("input constant", "the input", mean=x.mean)
    elif abs(x.mean) > INPUT_OFFSET * x.deviation:
        yield finding("input not centred", "the input", mean=x.mean, deviation=x.deviation)
    elif x.size < INPUT_SMALL or x.size > INPUT_LARGE:
        note = "; bytes need a division by 255" if 50 < x.size < 256 and x.mean > 0 else ""
        yield finding("input scale", "the input", size=x.size, note=note)


def large_embeddings(signal: Signal) -> Iterator[Finding]:
    """Embeddings that are larger than an input may be."""
    large = (s for s in signal.embeddings if INPUT_LARGE < s.value < math.inf)
    for spot in islice(large, 1):
        yield finding("embedding too large", spot.place, size=spot.value)


EMBEDDING_RATIO = 100.0  # of root mean squares: the smaller one has 1e-4 of the power of the larger


def small_embeddings(signal: Signal) -> Iterator[Finding]:
    """An embedding that is drowned by another one."""
    sizes = sorted((s for s in signal.embeddings if 0 < s.value < math.inf), key=lambda s: s.value)
    if len(sizes) > 1 and sizes[-1].value > EMBEDDING_RATIO * sizes[0].value:
        small, large = sizes[0], sizes[-1]
        ratio = large.value / small.value
        yield finding(
            "embedding too small", small.place, size=small.value, other=large.place, large=large.value, ratio=ratio
        )


TARGETS_LARGE = 30.0  # root mean square, also over that of the output, which has about 1 at the start; bytes have 150


def faults_of_the_targets(signal: Signal) -> Iterator[Finding]:
    """Targets that are too large, and a loss that is a sum."""
    y, head = signal.targets, signal.head
    reached = math.sqrt(head.mean_square) * TARGETS_LARGE if head.mean_square > 1 else TARGETS_LARGE
    if "float" in y.dtype and y.size > reached and not y.alike:
        yield finding("targets scale", "the targets", size=y.size)
    count = signal.zero_loss / math.log(head.classes) if head.classes > 1 and "NllLoss" in signal.graph.loss else 1.0
    if count > 3 and abs(count - round(count)) < 1e-3 * count:
        yield finding("loss is a sum", "the loss", count=round(count))


def constant_targets(signal: Signal) -> Iterator[Finding]:
    """Labels that are all the same; a float for all is the label of real images in an adversarial network."""
    if signal.targets.alike and "int" in signal.targets.dtype:
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
    elif {"NllLoss", "NllLoss2D"} & loss and not {"LogSoftmax", "Log"} & {*loss, graph.output}:
        yield finding("logits without a softmax", "the output")
    elif signal.unreachable > UNREACHABLE and "BinaryCrossEntropyWithLogits" not in loss:
        yield finding("{function} on the output", "the output", percent=signal.unreachable, **words)
    if graph.loss[:1] in BINARY_LOSSES and not _are_probabilities(signal.targets):
        yield finding("targets no probabilities", "the targets", low=signal.targets.lowest, high=signal.targets.highest)
    if signal.broadcast:
        yield finding("shapes of output and targets", "the output")


BINARY_LOSSES = (("BinaryCrossEntropy",), ("BinaryCrossEntropyWithLogits",))  # alone, without other terms


def _are_probabilities(targets: InputFacts) -> bool:
    return math.isnan(targets.lowest) or (targets.lowest >= 0 and targets.highest <= 1)


STEM_LARGE = LARGE  # second moment after the stem over that of the input; sound stems have 0.05 to 5
STEM_SMALL = 1e-6  # the same; embeddings and patches drawn with a deviation of 0.02 have 1e-4


def faults_of_the_stem(signal: Signal) -> Iterator[Finding]:
    """A stem that scales the input far up or down."""
    stem = [layer.name or "(model)" for layer in signal.plan.stem]
    if not stem or not signal.sums or math.isnan(signal.inputs.size) or not signal.inputs.size:
        return
    first = signal.sums[0]
    gain = (first.sum if first.layer else first.shortcut).power / signal.inputs.size**2
    if gain >= STEM_LARGE or 0 < gain <= STEM_SMALL:
        large, status = ("large", "exploding") if gain > 1 else ("small", "vanishing")
        yield finding("stem scale", stem[0], status, size=math.sqrt(gain), names=stem, large=large)  # type: ignore[arg-type]


OUTPUT_LARGE = 1e6  # second moment of the output over that of the last block
CLASSIFIER_GAIN = 100.0  # the same, above which a high first loss is the classifier's; sound ones have 0.01 to 3
ZERO_LOSS = 4.0  # times the loss of an output of zeros, if that is a binary cross-entropy
FIRST_LOSS = 4.0  # times log C plus 5; MNASNet starts at 12 with 10 classes
DRIFTED_LOSS = 2.0  # times log C plus 2: a drift of the forward signal shows at the output
LARGE_BIAS = 5.0  # of one class above the mean of all biases; torch draws them below 1
CONSTANT_OUTPUT = 1e-12  # variance over the batch relative to the second moment: no more than rounding


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
    zero = {layer.name for layer in signal.layers if layer.weight_norm == 0}
    if head.probabilities and with_loss and head.classes:
        yield finding("softmax before the loss", "the output")
    elif first_loss > limit or (grown >= OUTPUT_LARGE and not head.mean_square <= NOTICEABLE * signal.targets.size**2):
        yield _large_output(signal, grown, first_loss, log_classes)
    elif (
        head.variation <= CONSTANT_OUTPUT
        and head.mean_square > 0
        and not signal.inputs.alike
        and not zero & set(classifier)
    ):
        yield finding("constant output", "the output")


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
    if binary and max((s.value for s in signal.biases if s.place in classifier), default=0.0) > 1:
        return finding("prior of the wrong sign", place, status, text=text, names=names)
    if signal.classifier_bias >= LARGE_BIAS and head.favourite >= 0:
        bias = {"bias": signal.classifier_bias, "favourite": head.favourite}
        return finding("classifier bias", place, status, text=text, names=names, **bias)
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
