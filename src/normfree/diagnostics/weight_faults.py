"""Faults of weights: zeros, equal filters, units that never learn, frozen layers, and a network without activations."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator

from normfree.diagnostics.growth import Finding
from normfree.diagnostics.limits import DEAD_BY_CHANCE, DEAD_SHARE, EQUAL_SHARE, MOST, SIMILAR
from normfree.diagnostics.model_signal import Signal
from normfree.diagnostics.places import name_pattern
from normfree.plan import Branch
from normfree.report.terminal import shorten_names


def no_activation(signal: Signal) -> Iterator[Finding]:
    """A network in which no layer reads or feeds an activation: it is linear."""
    layers = [layer for layer in signal.plan.layers() if not layer.gate]
    recurrent = any("#" in s.name for s in signal.sums) or len(signal.layers) < len(layers)
    attention = any(b.depth > len(b.layers) for b in signal.plan.branches)
    if len(layers) < 3 or recurrent or attention or signal.activations or signal.graph.nonlinear:
        return
    if not any(layer.activated_in or layer.activated_out for layer in layers):
        yield Finding(
            "no activation",
            "",
            "faulty",
            "no activation stands between the layers, so that the network is linear",
            f"put an activation between the layers, from {layers[0].name} on: without any the network is linear",
        )


def forgotten_activation(signal: Signal) -> Iterator[Finding]:
    """A layer inside a branch that reads no activation, while the same layer of similar branches does."""
    alike: defaultdict[object, list[Branch]] = defaultdict(list)
    for b in signal.plan.branches:
        alike[name_pattern(b.name), tuple(name_pattern(layer.name) for layer in b.layers), b.depth].append(b)
    for branches in alike.values():
        for layers in zip(*(b.layers for b in branches), strict=True):
            without = [layer.name for layer in layers if not layer.activated_in]
            if without and len(layers) >= SIMILAR and len(layers) - len(without) >= MOST * len(layers):
                names = shorten_names(without)
                yield Finding(
                    "forgotten activation",
                    without[0],
                    "faulty",
                    f"{names} reads no activation, unlike the same layer of {len(layers) - len(without)} other blocks",
                    f"look at {names}: put the activation before it, as in the other blocks; without it, two layers in "
                    "a row are one linear map",
                )
                return


def faulty_weights(signal: Signal) -> Iterator[Finding]:
    """Layers outside of branches whose weights are zero, equal filters, and units that never learn."""
    for name in signal.single_values[:1]:
        yield Finding(
            "normalizer of one value",
            name,
            "vanishing",
            f"{name} normalizes groups of one value",
            f"look at {name}: a group of one value is normalized to zero; use fewer groups or a larger input",
        )
    for name in zeroed(signal)[:1]:
        yield Finding(
            "zero weights",
            name,
            "vanishing",
            f"all weights of {name} are zero",
            f"look at {name}: its weights are all zero, so nothing passes through it; initialize it",
        )
    yield from _frozen(signal)
    last = {layer.name for layer in signal.plan.classifier}
    equal = [
        layer
        for layer in signal.layers
        if layer.equal >= EQUAL_SHARE and layer.name not in last and math.isfinite(layer.weight_norm)
    ]
    if equal:
        names = shorten_names([layer.name for layer in equal])
        yield Finding(
            "equal filters",
            equal[0].name,
            "faulty",
            f"{100 * equal[0].equal:.0f} % of the filters of {names} are equal to another one",
            f"look at {names}: equal filters get equal gradients and stay equal; draw the weights at random",
        )


def _frozen(signal: Signal) -> Iterator[Finding]:
    """Frozen layers behind layers that learn; a frozen backbone, or most layers with adapters, are meant."""
    frozen = [layer.name for layer in signal.layers if layer.frozen]
    first = next((i for i, layer in enumerate(signal.layers) if not layer.frozen), 0)
    late = [layer.name for layer in signal.layers[first:] if layer.frozen]
    if late and 2 * len(frozen) < len(signal.layers):
        names = shorten_names(late)
        yield Finding(
            "frozen weights",
            late[0],
            "faulty",
            f"{names} {'require' if len(late) > 1 else 'requires'} no gradient, while earlier layers learn",
            f"look at {names}: the weights are frozen (requires_grad is False)",
        )


def zeroed(signal: Signal) -> list[str]:
    """The layers outside of branches, but for the classifier, whose weights are all zero."""
    outside = {layer.name for layer in (*signal.plan.stem, *signal.plan.body)}
    return [layer.name for layer in signal.layers if layer.weight_norm == 0 and layer.name in outside]


def dead_units(signal: Signal) -> Iterator[Finding]:
    """Layers in which most units get no gradient, more than chance explains."""
    gates = {layer.name for layer in signal.plan.layers() if layer.gate}
    dead = [
        layer
        for layer in signal.layers
        if layer.dead >= DEAD_SHARE
        and layer.name not in gates
        and _chance(layer.units, round(layer.dead * layer.units)) < DEAD_BY_CHANCE
    ]
    if dead:
        worst = max(dead, key=lambda layer: layer.dead)
        names = shorten_names([layer.name for layer in dead])
        yield Finding(
            "dead units",
            worst.name,
            "faulty",
            f"{100 * worst.dead:.0f} % of the units of {worst.name} get no gradient",
            f"look at {names}: the ReLU behind is never positive for most units; look at the biases and the scale of "
            "the input",
        )


def _chance(units: int, dead: int) -> float:
    """The probability that this many units or more are off, each with probability 1/2 (a Chernoff bound)."""
    share = dead / units if units else 0.0
    if share <= 0.5:
        return 1.0
    entropy = sum(q * math.log(2 * q) for q in (share, 1 - share) if q > 0)
    return math.exp(-units * entropy)
