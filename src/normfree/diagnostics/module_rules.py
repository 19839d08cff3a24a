"""The rules for modules and their weights: zero, equal, frozen, tied, unused or unlike others; see `rules.py`."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import islice, pairwise

from normfree.diagnostics.blocks import name_pattern
from normfree.diagnostics.findings import Finding, finding
from normfree.diagnostics.loss_rules import CONSTANT_OUTPUT
from normfree.diagnostics.signals import LayerSignal, ModuleFact, Signal
from normfree.plan import Branch

SIMILAR = 4  # number of similar blocks that tell what is usual
MOST = 0.75  # fraction of them that must agree


def unused_modules(signal: Signal) -> Iterator[Finding]:
    """Modules that take no part in the output although others like them do, and weights that no optimizer gets."""
    if names := signal.graph.unregistered:
        yield finding("weights not registered", names[0], names=names)
    if unused := [name for name in signal.unused if not is_last_of_list(name, signal)]:
        yield finding("unused module", unused[0], names=unused, verb="are" if len(unused) > 1 else "is")


def is_last_of_list(name: str, signal: Signal) -> bool:
    """Whether a module runs and is the last one of a list, so that nothing of the list would read its output."""
    parent, _, number = name.rpartition(".")
    prefix = f"{parent}." if parent else ""
    numbers = {f.name.removeprefix(prefix).partition(".")[0] for f in signal.modules if f.name.startswith(prefix)}
    last = number.isdigit() and int(number) > 0 and not any(n.isdigit() and int(n) > int(number) for n in numbers)
    return last and any(f"{layer.name}.".startswith(f"{name}.") for layer in signal.layers)


def nothing_learns(signal: Signal) -> Iterator[Finding]:
    """All parameters that take part in the output are frozen."""
    if not signal.frozen_in_use:
        return
    names = list(signal.idle) or [layer.name for layer in signal.plan.classifier or list(signal.plan.layers())[-1:]]
    text = "every parameter is frozen"
    if signal.idle:
        text = "the parameters that require a gradient take no part in the output, and all others are frozen"
    yield finding("nothing learns", names[0] if names else "the output", text=text, names=names or ["the model"])


def unlike_modules(signal: Signal) -> Iterator[Finding]:
    """Modules that are repeated or tied by mistake, and single ones that differ from all others like them."""
    if again := [f for f in signal.modules if f.role == "list"]:
        names = list(dict.fromkeys(name for f in again for name in (f.same_as, f.name)))
        yield finding("module repeated", names[0], names=names, verb="are")
    for f in islice((f for f in signal.modules if f.role == "shared"), 1):
        yield finding("module shared and frozen", f.name, names=[f.same_as, f.name])
    alike: defaultdict[tuple[str, str], list[ModuleFact]] = defaultdict(list)
    for f in signal.modules:
        alike[name_pattern(f.name), f.role].append(f)
    for (pattern, role), facts in alike.items():
        tied = [f for f in facts if role == "layer" and f.same_as and name_pattern(f.same_as) == pattern]
        if tied and len(facts) > SIMILAR and len(facts) - 2 * len(tied) >= len(facts) / 2:
            yield finding("weights tied", tied[0].name, names=[tied[0].same_as, *(f.name for f in tied)])
        still = [f.name for f in facts if role == "normalizer" and not f.training]
        if still and len(facts) > SIMILAR and len(still) <= (1 - MOST) * len(facts):
            verb = "are" if len(still) > 1 else "is"
            yield finding("normalizer in evaluation mode", still[0], names=still, verb=verb)


def unusual_activation(signal: Signal) -> Iterator[Finding]:
    """One activation inside of a list that is of another class than all others."""
    alike: defaultdict[str, list[ModuleFact]] = defaultdict(list)
    for f in signal.modules:
        if f.role == "activation":
            alike[name_pattern(f.name)].append(f)
    for facts in alike.values():
        kinds = Counter(f.kind for f in facts)
        odd = [f for f in facts[1:-1] if kinds[f.kind] == 1]
        if len(kinds) == 2 and len(facts) > SIMILAR and odd:
            usual, others = kinds.most_common(1)[0]
            yield finding("unusual activation", odd[0].name, kind=odd[0].kind, others=others, usual=usual)
            return


EQUAL_SHARE = 0.5  # of the filters of a layer that equal another one


def faulty_weights(signal: Signal, zero_layer: str) -> Iterator[Finding]:
    """Normalizers of one value, layers of zeros outside of branches, frozen layers and equal filters."""
    for name in signal.graph.single_norms[:1]:
        yield finding("normalizer of one value", name)
    if zero_layer:
        yield finding("zero weights", zero_layer)
    if names := _frozen_among_others(signal):
        yield finding("frozen weights", names[0], names=names, verb="require" if len(names) > 1 else "requires")
    last = {layer.name for layer in signal.plan.classifier}
    equal = [
        layer
        for layer in signal.layers
        if layer.equal >= EQUAL_SHARE and layer.name not in last and math.isfinite(layer.weight_norm)
    ]
    if equal:
        names = [layer.name for layer in equal]
        yield finding("equal filters", names[0], percent=equal[0].equal, names=names)


def _frozen_among_others(signal: Signal) -> list[str]:
    """The frozen layers between layers of the same name, but for numbers, most of which learn.

    All other frozen layers are meant: a backbone, a teacher, a critic, or the layers under adapters.
    """
    alike: defaultdict[str, list[LayerSignal]] = defaultdict(list)
    for layer in signal.layers:
        alike[name_pattern(layer.name)].append(layer)
    found = []
    for layers in alike.values():
        learning = [i for i, layer in enumerate(layers) if not layer.frozen]
        if len(layers) >= SIMILAR and 2 * len(learning) > len(layers):
            found += [layer.name for layer in layers[learning[0] : learning[-1]] if layer.frozen]
    return found


def find_zero_layer(signal: Signal, starts: set[str]) -> str:
    """The first layer outside of branches, but for the classifier, whose weights are zero and stay so; '' if none.

    Args:
        starts: The layers of `zero_starts`.
    """
    outside = {layer.name for layer in (*signal.plan.stem, *signal.plan.body)} - starts
    return next((layer.name for layer in signal.layers if layer.weight_norm == 0 and layer.name in outside), "")


def zero_starts(signal: Signal) -> set[str]:
    """The layers whose weights are zero, but get a gradient, in a network whose output varies without them."""
    if signal.unmeasured or not signal.head.variation > CONSTANT_OUTPUT:
        return set()
    return {layer.name for layer in signal.layers if layer.weight_norm == 0 and layer.gradient_norm > 0}


def missing_activations(signal: Signal) -> Iterator[Finding]:
    """A linear network, and a layer of a branch without the activation that it has in similar branches."""
    layers = [layer for layer in signal.plan.layers() if not layer.gate]
    recurrent = any("#" in s.name for s in signal.sums) or len(signal.layers) < len(layers)
    attention = any(b.depth > len(b.layers) for b in signal.plan.branches)
    active = any(layer.activated_in or layer.activated_out for layer in layers)
    if len(layers) >= 3 and not (recurrent or attention or active or signal.graph.nonlinear):
        yield finding("no activation", "", first=layers[0].name)
    # In a chain of layers of one size, but not at the code of an autoencoder, whose size differs.
    chain = [layer for layer in signal.plan.body if not layer.gate]
    units = {layer.name: layer.units for layer in signal.layers}
    patterns = Counter(name_pattern(layer.name) for layer in chain if layer.activated_in)
    without = [
        b.name
        for a, b in pairwise(chain)
        if not b.activated_in
        and units.get(a.name) == units.get(b.name)
        and patterns[name_pattern(b.name)] >= SIMILAR
        and name_pattern(a.name) == name_pattern(b.name)
    ]
    active_in = patterns.total()
    simple = not signal.plan.branches and not recurrent and not any(layer.gate for layer in signal.plan.body)
    if simple and len(without) == 1 and active_in >= max(SIMILAR, len(chain) - 2):
        yield finding("forgotten activation", without[0], names=without, others=active_in)
    alike: defaultdict[object, list[Branch]] = defaultdict(list)
    for b in signal.plan.branches:
        alike[name_pattern(b.name), tuple(name_pattern(layer.name) for layer in b.layers), b.depth].append(b)
    for branches in alike.values():
        # The first block of a list reads what stands before the list.
        first = {branches[0].name, *(b.name for b in branches if re.search(r"\b0\b", b.name))}
        entries = {layer.name for b in branches if b.name in first for layer in b.entries}
        for every in zip(*(b.layers for b in branches), strict=True):
            same = [layer for layer in every if layer.name not in entries]
            without = [layer.name for layer in same if not layer.activated_in]
            others = len(same) - len(without)
            if without and len(every) >= SIMILAR and others >= MOST * len(same):
                yield finding("forgotten activation", without[0], names=without, others=others)
                return


DEAD_SHARE = 0.8  # of units without a gradient; on samples that are nearly alike, half of all ReLUs are off
DEAD_BY_CHANCE = 1e-4  # the probability that so many units are off by chance, each with probability 1/2


def dead_units(signal: Signal) -> Iterator[Finding]:
    """Layers in which most units get no gradient, more than chance explains (a Chernoff bound)."""

    def chance(share: float, units: int) -> float:
        return math.exp(-units * sum(q * math.log(2 * q) for q in (share, 1 - share) if q > 0))

    gates = {layer.name for layer in signal.plan.layers() if layer.gate}
    dead = [
        layer
        for layer in signal.layers
        if layer.dead >= DEAD_SHARE and layer.name not in gates and chance(layer.dead, layer.units) < DEAD_BY_CHANCE
    ]
    if dead:
        worst = max(dead, key=lambda layer: layer.dead)
        yield finding("dead units", worst.name, percent=worst.dead, names=[layer.name for layer in dead])
