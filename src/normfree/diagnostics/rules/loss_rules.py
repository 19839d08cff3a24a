"""The rules for the targets, the loss and the output: what does not fit, and a first loss far above that of chance.

The functions are pure, and each limit stands above its rule with its reason.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from normfree.diagnostics.rules.findings import Finding, RuleInput, SignalStatus, finding
from normfree.diagnostics.rules.growth import LAYER_GAIN, NOTICEABLE
from normfree.diagnostics.signals import CONSTANT, Gain, Signal
from normfree.report.tables import compact


def faults_of_the_targets(case: RuleInput) -> Iterator[Finding]:
    """A loss that is a sum, and labels that are all the same.

    A float for all is the label of real images in an adversarial network. Classes without a unit of the last layer are
    places of similar samples, of which the first may be the right one.
    """
    signal, head = case.signal, case.signal.head
    count = signal.zero_loss / math.log(head.classes) if head.classes > 1 and "NllLoss" in signal.graph.loss else 1.0
    if 3 < count < math.inf and abs(count - round(count)) < 1e-3 * count:
        yield finding("loss is a sum", "the loss", count=round(count))
    units = [layer.units for layer in signal.layers if layer.name == signal.graph.output_place]
    placed = head.classes > 1 and any(0 < n != head.classes for n in units)
    labels = signal.targets.alike and "int" in signal.targets.dtype
    if labels and not placed and not signal.by_kind["targets unused"]:
        yield finding("targets constant", "the targets", mean=signal.targets.mean)


def faults_of_the_loss(case: RuleInput) -> Iterator[Finding]:
    """An output that does not fit the loss or the targets."""
    signal = case.signal
    kinds = {
        "bounded logits": "{function} before the loss",
        "no softmax": "logits without a softmax",
        "wrong axis of classes": "log-probabilities over the wrong axis",
        "targets out of range": "{function} on the output",
    }
    for kind, word in kinds.items():
        if found := signal.by_kind[kind]:
            behind = f"behind {found[0].place}" if found[0].place else "at the end"
            words: dict[str, Any] = {"function": found[0].detail, "percent": found[0].value, "behind": behind}
            yield finding(word, "the output", **words)
            break
    if signal.broadcast:
        yield finding("shapes of output and targets", "the output")


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
    # An output that is a density or an energy may have any size, and so may one whose targets are large.
    wanted = signal.by_kind["targets unused"] or head.mean_square <= NOTICEABLE * signal.targets.size**2
    functions = set(signal.graph.loss)
    logits = "LogSoftmax" in functions or {"Sub", "Mul"} <= functions <= DIVERGENCE
    if head.probabilities and with_loss and head.classes and logits:
        yield finding("softmax before the loss", "the output")
    elif first_loss > limit or (grown >= OUTPUT_LARGE and not wanted):
        yield _large_output(signal, grown, first_loss, log_classes)
    elif _is_constant_output(signal):
        ends = next(iter(signal.by_kind["variation ends"]), None)
        spot = "at the end of the network" if ends is None else f"at {ends.place}, and between {ends.detail} and it"
        steps = [f.name for f in signal.modules if f.kind in ("RNN", "GRU", "LSTM")]
        also = ""
        if ends is not None and ends.detail in steps:
            also = f"; the step of {ends.detail} that is read has forgotten it, as after padding"
        yield finding("constant output", "the output", spot=spot, also=also)


def _is_constant_output(signal: Signal) -> bool:
    """Whether the output is the same for all samples, and does not wait for branches or a classifier that are zero."""
    waits = any(layer.name in signal.zero_layers for layer in signal.plan.classifier)
    waits = waits or (not signal.plain and not any(s.branch.norm for s in signal.sums))
    return signal.head.variation <= CONSTANT and signal.head.mean_square > 0 and not (signal.inputs.alike or waits)


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
    why = f"; {numbers}{sure}" if numbers and head.classes else ""
    return finding(cause, place, status, text=text, names=names, why=why)


def _largest_gain(signal: Signal) -> Gain | None:
    """The module before the classifier that makes the signal larger than any other, if it does so by far."""
    last = {layer.name for layer in signal.plan.classifier}
    gains = [g for g in signal.gains if g.factor >= LAYER_GAIN and not g.normalized and g.name not in last]
    return max(gains, key=lambda g: g.factor, default=None)


LOSS_RULES = (faults_of_the_targets, faults_of_the_loss)
