"""Faults at the two ends of a network: its input, its stem, and its output with the first loss."""

from __future__ import annotations

import math
from collections.abc import Iterator

from normfree.diagnostics.growth import Finding, SignalStatus
from normfree.diagnostics.limits import (
    CLASSIFIER_GAIN,
    CONSTANT_OUTPUT,
    DRIFTED_LOSS,
    FIRST_LOSS,
    INPUT_LARGE,
    INPUT_OFFSET,
    INPUT_SMALL,
    LARGE_BIAS,
    LAYER_GAIN,
    OUTPUT_LARGE,
    STEM_LARGE,
    STEM_SMALL,
)
from normfree.diagnostics.model_signal import Gain, Signal
from normfree.report.terminal import compact, shorten_names


def faults_of_the_input(signal: Signal) -> Iterator[Finding]:
    """Numbers that are not finite, samples that are all alike, and a scale or offset far from 1 and 0."""
    x = signal.inputs
    if not x.finite:
        yield Finding(
            "input not finite",
            "the input",
            "faulty",
            "the input holds NaN or infinity",
            "look at the data: the input holds NaN or infinity, so nothing behind it can be measured",
        )
    if not x.finite or math.isnan(x.size):
        return
    if x.alike:
        yield Finding(
            "input constant",
            "the input",
            "faulty",
            f"all samples of the input are the same (mean {compact(x.mean)})",
            "look at the data: give a batch of different samples",
        )
    elif abs(x.mean) > INPUT_OFFSET * x.deviation:
        yield Finding(
            "input not centred",
            "the input",
            "faulty",
            f"the input has a mean of {compact(x.mean)} and a standard deviation of {compact(x.deviation)}",
            "look at the data: subtract the mean, and divide by the standard deviation",
        )
    elif not INPUT_SMALL <= x.size <= INPUT_LARGE:
        bytes_ = "; bytes need a division by 255" if 50 < x.size < 256 and x.mean > 0 else ""
        yield Finding(
            "input scale",
            "the input",
            "faulty",
            f"the input has a root mean square of {compact(x.size)}, where about 1 is usual",
            f"look at the data: divide the input by its standard deviation{bytes_}",
        )


def faults_of_the_stem(signal: Signal) -> Iterator[Finding]:
    """A stem that scales the input far up or down."""
    stem = signal.plan.stem
    if not stem or not signal.sums or math.isnan(signal.inputs.size) or not signal.inputs.size:
        return
    first = signal.sums[0]
    after = first.sum if first.layer else first.shortcut
    gain = (after.mean_square + after.variance) / signal.inputs.size**2
    if gain >= STEM_LARGE or 0 < gain <= STEM_SMALL:
        yield Finding(
            "stem scale",
            stem[0].name,
            "exploding" if gain > 1 else "vanishing",
            f"the stem multiplies the input by {compact(math.sqrt(gain))}",
            f"look at {shorten_names([layer.name for layer in stem])}: the weights of the stem are too "
            f"{'large' if gain > 1 else 'small'}",
        )


def _largest_gain(signal: Signal) -> Gain | None:
    """The module before the classifier that makes the signal larger than any other, if it does so by far."""
    last = {layer.name for layer in signal.plan.classifier}
    gains = [g for g in signal.gains if g.factor >= LAYER_GAIN and not g.normalized and g.name not in last]
    return max(gains, key=lambda g: g.factor, default=None)


def faults_of_the_head(signal: Signal, *, drifting: bool = False) -> Iterator[Finding]:
    """An output that is too large, constant, saturated or already a probability, and a first loss far above log C.

    The limit of the loss is lower if the forward signal drifts.
    """
    head, classifier = signal.head, shorten_names([layer.name for layer in signal.plan.classifier]) or "the last layer"
    place = signal.plan.classifier[0].name if signal.plan.classifier else "the output"
    last = signal.sums[-1]
    grown = head.mean_square / power if (power := last.sum.mean_square + last.sum.variance) > 0 else math.nan
    log_classes = math.log(head.classes) if head.classes else math.nan
    with_loss = not math.isnan(signal.loss)
    limit = DRIFTED_LOSS * log_classes + 2 if drifting else FIRST_LOSS * log_classes + 5
    first_loss = signal.loss if with_loss else head.chance_loss if signal.plan.classifier else math.nan
    if head.probabilities and with_loss and head.classes:
        yield Finding(
            "softmax before the loss",
            "the output",
            "faulty",
            "the output is not negative and adds up to 1",
            "look at the end of the network: cross-entropy takes logits, so leave the softmax out",
        )
    elif first_loss > limit or grown >= OUTPUT_LARGE:
        numbers = (
            f"the first loss is {compact(first_loss)}, by chance it is log {head.classes} = {compact(log_classes)}"
        )
        sure = f"; the softmax is saturated ({head.confidence:.3f} for the likeliest class)" * (head.confidence > 0.9)
        large = f"; the output is ×{compact(math.sqrt(grown))} as large as the signal there" * (grown >= OUTPUT_LARGE)
        text = f"{numbers}{sure}{large}" if head.classes else large.removeprefix("; ")
        status: SignalStatus = "exploding" if grown >= OUTPUT_LARGE else "faulty"
        if signal.classifier_bias >= LARGE_BIAS and head.favourite >= 0:
            above = f"{compact(signal.classifier_bias)} above the mean makes class {head.favourite} certain"
            yield Finding("classifier bias", place, status, text, f"look at the bias of {classifier}: {above}")
        else:
            cause = "classifier scale" if grown > CLASSIFIER_GAIN or not head.classes else "first loss"
            if cause == "first loss" and (large_layer := _largest_gain(signal)):
                gain = f"{large_layer.name} multiplies the signal by {compact(math.sqrt(large_layer.factor))}"
                remedy = f"look at {large_layer.name}: its weights or its scale are too large; {numbers}{sure}"
                yield Finding("layer too large", large_layer.name, status, f"{gain}; {text}", remedy)
                return
            where = "look at the layers between the last block and the output"
            why = f"; {numbers}{sure}" if head.classes else ""
            remedy = f"{where}: the logits are too large, by the weights of {classifier} or a scale behind it{why}"
            yield Finding(cause, place, status, text, remedy)
    elif head.variation <= CONSTANT_OUTPUT and head.mean_square > 0 and not signal.inputs.alike:
        zero = {layer.name for layer in signal.layers if layer.weight_norm == 0}
        if not zero & {layer.name for layer in signal.plan.classifier}:
            yield Finding(
                "constant output",
                "the output",
                "faulty",
                "the output is the same for every sample",
                "look at the end of the network: the output does not depend on the input",
            )
