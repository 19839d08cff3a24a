"""Faults of functions: activations without a derivative, softmaxes, gates, normalizers, unused modules and the loss."""

from __future__ import annotations

from collections.abc import Iterator

from normfree.diagnostics.autograd_graph import Spot
from normfree.diagnostics.growth import Finding
from normfree.diagnostics.limits import GATE, HEAVY_BIAS, SATURATED, SHUT_GATE, UNREACHABLE
from normfree.diagnostics.model_signal import Signal
from normfree.report.terminal import compact, shorten_names

BOUNDED = ("Sigmoid", "Hardsigmoid", "Tanh", "Hardtanh", "Softmax")


def unused_modules(signal: Signal) -> Iterator[Finding]:
    """Modules that take no part in the output although others like them do, and weights that no optimizer gets."""
    if names := shorten_names(signal.graph.unregistered):
        yield Finding(
            "weights not registered",
            signal.graph.unregistered[0],
            "faulty",
            f"the weights in {names} are not parameters of the model",
            f"look at {names}: layers in a plain list or dictionary are not found by parameters(), so that they never "
            "learn and are not saved; use nn.ModuleList or nn.ModuleDict",
        )
    if signal.unused:
        names = shorten_names(signal.unused)
        yield Finding(
            "unused module",
            signal.unused[0],
            "faulty",
            f"{names} {'are' if len(signal.unused) > 1 else 'is'} never used",
            f"look at {names}: the forward pass does not call it, or ignores its output, so that it never learns",
        )


def faults_of_the_loss(signal: Signal) -> Iterator[Finding]:
    """An output that does not fit the loss or the targets."""
    graph, loss = signal.graph, set(signal.graph.loss)
    function, behind = graph.output.lower(), f"behind {graph.output_place}" if graph.output_place else "at the end"
    if "BinaryCrossEntropyWithLogits" in loss and graph.output in BOUNDED:
        yield _at_output(
            f"{function} before the loss",
            f"the output is already a {function}, and the loss takes a sigmoid of it",
            f"look at the {function} {behind}: the loss takes logits, so leave it out",
        )
    elif "LogSoftmax" in loss and graph.output in (*BOUNDED[:-1], "Relu"):
        yield _at_output(
            f"{function} before the loss",
            f"the output is a {function}, and the loss takes a softmax of it, which needs numbers of any size",
            f"look at the {function} {behind}: the loss takes logits, so leave it out",
        )
    elif {"NllLoss", "NllLoss2D"} & loss and "LogSoftmax" not in loss and graph.output != "LogSoftmax":
        logarithm = "Log" in loss or graph.output == "Log"
        if not logarithm:
            yield _at_output(
                "logits without a softmax",
                "the loss takes log-probabilities, but the output has not been through log_softmax",
                "look at the loss: use cross_entropy, or end the network with log_softmax",
            )
    elif signal.unreachable > UNREACHABLE and "BinaryCrossEntropyWithLogits" not in loss:
        yield _at_output(
            f"{function} on the output",
            f"{100 * signal.unreachable:.0f} % of the targets are outside the range of {function}",
            f"look at the {function} {behind}: the output cannot reach the targets; leave the activation out",
        )
    if signal.broadcast:
        yield _at_output(
            "shapes of output and targets",
            "output and targets differ in shape, so that the loss compares every sample with every other one",
            "look at the loss: give the output and the targets the same shape, by squeeze or unsqueeze",
        )


def _at_output(cause: str, text: str, remedy: str) -> Finding:
    return Finding(cause, "the output", "faulty", text, remedy)


def faulty_functions(signal: Signal) -> Iterator[Finding]:
    """Gates of recurrent layers that are shut, softmaxes over the wrong axis, and a function that follows itself."""
    graph = signal.graph
    for gate in signal.shut_gates[:1]:
        yield Finding(
            f"{gate.function} gate shut",
            gate.place,
            "vanishing",
            f"the {gate.function} gate of {gate.place} is {compact(gate.value)} by its bias",
            f"look at the biases of {gate.place}: they shut its {gate.function} gate, so that early time steps have no "
            "gradient; start them at 0 or above",
        )
    for spot in graph.doubled[:1]:
        yield Finding(
            f"{spot.function} twice",
            spot.place,
            "faulty",
            f"a {spot.function} reads the output of another {spot.function} behind {spot.place}",
            f"look behind {spot.place}: one {spot.function} follows another; leave one out",
        )
    for place in graph.single_softmax[:1]:
        yield Finding(
            "softmax of one value",
            place,
            "faulty",
            f"a softmax over one value follows {place}, which is 1 for every input",
            f"look behind {place}: the softmax runs over an axis of size 1, so that its weights are all one and "
            f"{place} gets no gradient; choose the axis of the positions or classes",
        )
    for place in graph.batch_softmax[:1]:
        yield Finding(
            "softmax over the batch",
            place,
            "faulty",
            f"a softmax behind {place} runs over the samples of the batch",
            f"look behind {place}: the softmax is normalized over dimension 0, the samples; use the last dimension",
        )


def saturated_functions(signal: Signal) -> Iterator[Finding]:
    """Activations, gates and attentions that hardly pass a gradient."""
    seen = [s for s in signal.graph.openness if _is_saturated(s)]
    if seen:
        first = seen[-1]  # nodes come from the output to the input
        names = shorten_names(list(dict.fromkeys(s.place for s in reversed(seen))))
        yield Finding(
            f"saturated {first.function}",
            first.place,
            "faulty",
            f"the {first.function} behind {names} passes {compact(first.value)} of the squared gradient that it could "
            "pass",
            f"look at {names}: the {first.function} behind is saturated, because its input is too large; make the "
            "weights, biases or the scale there smaller",
        )


def _is_saturated(spot: Spot) -> bool:
    """Whether a function hardly passes a gradient; a gate counts only if it is shut."""
    if spot.function == "sigmoid" and not GATE[0] <= spot.mean <= GATE[1]:
        return spot.mean < SHUT_GATE
    return spot.value < SATURATED


def swamped_normalizers(signal: Signal) -> Iterator[Finding]:
    """Normalizers whose epsilon is far above the variance that they divide by."""
    if swamped := signal.graph.swamped:
        names = shorten_names(list(dict.fromkeys(s.place for s in reversed(swamped))))
        last = swamped[-1]
        yield Finding(
            "epsilon too large",
            last.place,
            "vanishing",
            f"the variance at {last.place} is {compact(last.value)}, and its epsilon {compact(float(last.function))}",
            f"look at {names}: the epsilon (eps) is far above the variance, so that the normalizer makes the signal "
            "small instead of normal; use an eps of 1e-5, or larger weights before it",
        )


def noisy_dropout(signal: Signal) -> Iterator[Finding]:
    """A dropout that adds far more noise than it leaves signal."""
    for spot in signal.dropouts[:1]:
        yield Finding(
            "dropout too strong",
            spot.place,
            "faulty",
            f"{spot.place} drops {100 * spot.value:.0f} % of the signal",
            f"look at {spot.place}: its probability is {compact(spot.value)}; p is the part that is dropped, not kept",
        )


def large_embeddings(signal: Signal) -> Iterator[Finding]:
    """Embeddings that are larger than an input may be."""
    for spot in signal.embeddings[:1]:
        yield Finding(
            "embedding too large",
            spot.place,
            "faulty",
            f"the embedding {spot.place} has a root mean square of {compact(spot.value)}, where 0.02 to 1 is usual",
            f"look at {spot.place}: its vectors are too large; draw them with a standard deviation of 0.02 to 1",
        )


def heavy_biases(signal: Signal) -> Iterator[Finding]:
    """Layers whose bias is far larger than what their weights add to it."""
    last = {layer.name for layer in signal.plan.classifier}
    heavy = [
        g
        for g in signal.gains
        if g.bias > HEAVY_BIAS and g.name in signal.heavy_biases and not g.normalized and g.name not in last
    ]
    if heavy:
        first = heavy[0]
        names = shorten_names(list(dict.fromkeys(g.name for g in heavy)))
        yield Finding(
            "bias too large",
            first.name,
            "faulty",
            f"the bias of {first.name} is {compact(first.bias**0.5)} times as large as the rest of its output",
            f"look at the bias of {names}: it swamps the signal, so that all samples look alike; start it at 0",
        )
