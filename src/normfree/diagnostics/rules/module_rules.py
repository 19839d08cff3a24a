"""The rules for modules, their weights and functions: zero, equal, frozen, tied, unused, saturated or unlike others.

`signal_rules.py` has the rules for the signal, `findings.toml` the words and remedies. The functions are pure, and each
limit stands above its rule with its reason. Unless stated otherwise a limit is a ratio of variances or of second
moments, not of standard deviations.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

from normfree.diagnostics.rules.findings import HARMLESS, Finding, RuleInput, finding, finding_of
from normfree.diagnostics.rules.growth import LARGE, NOTICEABLE, SHUT_GATE
from normfree.diagnostics.signals import CONSTANT, NUMBERS, Fact, Signal
from normfree.plan import Branch, Layer
from normfree.report.tables import shorten_names

SIMILAR = 4  # number of similar layers that tell what is usual
MOST = 0.75  # fraction of them that must agree


def unlike_others(
    things: Iterable[tuple[str, Any]], *, inside: bool = True
) -> Iterator[tuple[list[tuple[str, Any]], Any, int]]:
    """Find what differs from most things of the same name, but for numbers, as `blocks.3.norm` from `blocks.*.norm`.

    Args:
        things: Names, each with a property.
        inside: Whether the first and the last things of a name may differ, as the first layers that are frozen.

    Yields:
        The things that differ, the property that the others have, and the number of the others.
    """
    alike: defaultdict[str, list[tuple[str, Any]]] = defaultdict(list)
    for name, value in things:
        alike[NUMBERS.sub("", name)].append((name, value))
    for group in alike.values():
        usual, count = Counter(value for _, value in group).most_common(1)[0]
        places = [i for i, (_, value) in enumerate(group) if value == usual]
        compared = group[places[0] : places[-1]] if inside else group
        different = [(name, value) for name, value in compared if value != usual]
        if different and len(group) > SIMILAR and count >= MOST * len(group):
            yield different, usual, count


def unlike_modules(case: RuleInput) -> Iterator[Finding]:
    """Single modules that are tied, frozen, in another mode or of another class than most modules like them."""
    modules = case.signal.modules
    tied = {f.name: f.same_as for f in modules if f.role == "layer"}
    same_kind = {n: bool(s) and NUMBERS.sub("", s) == NUMBERS.sub("", n) for n, s in tied.items()}
    for different, usual, _ in unlike_others(same_kind.items(), inside=False):
        if not usual:
            yield finding("weights tied", different[0][0], names=[tied[different[0][0]], *(n for n, _ in different)])
    for different, training, _ in unlike_others((f.name, f.training) for f in modules if f.role == "normalizer"):
        if training:
            names = [name for name, _ in different]
            yield finding("normalizer in evaluation mode", names[0], names=names)
    for different, frozen, _ in unlike_others((layer.name, layer.frozen) for layer in case.signal.layers):
        if not frozen:
            names = [name for name, _ in different]
            yield finding("frozen weights", names[0], names=names)
    for different, usual, count in unlike_others((f.name, f.kind) for f in modules if f.role == "activation"):
        if len(different) == 1:
            ((name, kind),) = different
            yield finding("unusual activation", name, kind=kind, others=count, usual=usual)


def repeated_modules(case: RuleInput) -> Iterator[Finding]:
    """Modules that stand in a list several times, or under another name and are frozen."""
    if again := [f for f in case.signal.modules if f.role == "list"]:
        names = list(dict.fromkeys(name for f in again for name in (f.same_as, f.name)))
        yield finding("module repeated", names[0], names=names)
    if shared := [f for f in case.signal.modules if f.role == "shared"]:
        yield finding("module shared and frozen", shared[0].name, names=[shared[0].same_as, shared[0].name])


def unused_modules(case: RuleInput) -> Iterator[Finding]:
    """Modules that take no part in the output although others like them do, and weights that no optimizer gets."""
    signal = case.signal
    if made := signal.by_kind["weights made in the forward pass"]:
        yield finding("weights not registered", made[0].place, names=[f"the layer that {made[0].place} makes or calls"])
    if unused := [name for name in signal.unused if not is_last_of_list(name, signal)]:
        yield finding("unused module", unused[0], names=unused)
    if signal.only_frozen_used and not signal.cut_layers:  # else a gradient that is cut off on the way says more
        names = list(signal.unreached) or [
            layer.name for layer in signal.plan.classifier or list(signal.plan.layers())[-1:]
        ]
        text = "every parameter is frozen"
        if signal.unreached:
            text = "the parameters that require a gradient take no part in the output, and all others are frozen"
        yield finding("nothing learns", names[0] if names else "the output", text=text, names=names or ["the model"])


def is_last_of_list(name: str, signal: Signal) -> bool:
    """Whether a module runs in the last item of a list, so that no other item reads its output."""
    parts = name.split(".")
    return any(_is_last_item(".".join(parts[: n + 1]), signal) for n, part in enumerate(parts) if part.isdigit())


def _is_last_item(name: str, signal: Signal) -> bool:
    parent, _, number = name.rpartition(".")
    prefix = f"{parent}." if parent else ""
    numbers = {f.name.removeprefix(prefix).partition(".")[0] for f in signal.modules if f.name.startswith(prefix)}
    last = number.isdigit() and int(number) > 0 and not any(n.isdigit() and int(n) > int(number) for n in numbers)
    return last and any(f"{layer.name}.".startswith(f"{name}.") for layer in signal.layers)


def forgotten_skips(case: RuleInput) -> Iterator[Finding]:
    """Blocks without the residual sum that most blocks like them have."""
    signal = case.signal
    homes = Counter(b.home for b in signal.plan.branches)  # a loop adds several branches in one module
    in_loops = {layer.name for b in signal.plan.branches if homes[b.home] >= SIMILAR for layer in b.layers}
    inside = Counter(NUMBERS.sub("", name) for name in in_loops)
    body = list(dict.fromkeys(layer.name for layer in signal.plan.body))
    outside = Counter(NUMBERS.sub("", name) for name in body)
    stray = [n for n in body if NUMBERS.search(n) and inside[NUMBERS.sub("", n)] >= 3 * outside[NUMBERS.sub("", n)]]
    if signal.missing_sums:
        text = f"nothing is added to the input of {shorten_names(signal.missing_sums)}, unlike others of the class"
        also = ", or leaves f(x) out of it"
        yield finding("forgotten skip", signal.missing_sums[0], names=signal.missing_sums, text=text, also=also)
    elif stray and not signal.constant_sums:
        text = f"in no branch, unlike the same layer of other blocks: {shorten_names(stray)}"
        yield finding("forgotten skip", stray[0], names=stray, text=text, also=" there, or f does not read x")


AROUND_ZERO = 0.5  # mean of the gains of a normalizer over their root mean square, which is 1 at the usual start
SMALL_GAIN = 0.1  # root mean square of all gains
TINY_SCALE = 1e-7  # root mean square of a vector of scales: below the rounding of float32; CaiT starts with 1e-6
EQUAL_SHARE = 0.5  # of the filters of a layer that equal another one


def faulty_weights(case: RuleInput) -> Iterator[Finding]:
    """Scales that are tiny, gains around zero, layers of zeros outside of branches, and equal filters."""
    signal = case.signal
    gains = [f for f in signal.by_kind["scale"] if f.detail == "norm"]
    small = all(TINY_SCALE < f.value < SMALL_GAIN for f in gains)
    # All of them: the last ones of the branches alone may start at 0.
    if gains and (small or all(abs(f.mean) < AROUND_ZERO * f.value for f in gains)):
        names = [f.place.removesuffix(".weight") for f in gains]
        yield finding("gains around zero", names[0], names=names, size=max(f.value for f in gains))
    if tiny := [f for f in signal.by_kind["scale"] if 0 < f.value < TINY_SCALE]:
        yield finding_of("tiny scale", tiny)
    if case.zero_layer:
        yield finding("zero weights", case.zero_layer)
    last = {layer.name for layer in signal.plan.classifier}
    equal = [x for x in signal.layers if x.equal >= EQUAL_SHARE and x.name not in last and x.weight_norm < math.inf]
    if equal:
        yield finding("equal filters", equal[0].name, percent=equal[0].equal, names=[x.name for x in equal])


def starting_layers(signal: Signal) -> set[str]:
    """The layers whose weights are zero, but get a gradient, and behind which nothing waits for them.

    Either the output varies without them, or they make the output themselves, as a readout does, or the gate of a
    branch.
    """
    if signal.unmeasured:
        return set()
    starting = {layer.name for layer in signal.layers if layer.weight_norm == 0 and layer.gradient_norm > 0}
    if signal.head.variation > CONSTANT:
        return starting
    return starting & {signal.graph.output_place, *gating_layers(signal)}


def gating_layers(signal: Signal) -> set[str]:
    """The layers that make gates or modulate the signal."""
    return {layer.name for layer in signal.plan.layers() if layer.gate or layer.modulates}


def missing_activations(case: RuleInput) -> Iterator[Finding]:
    """A linear network, and a layer without the activation that it has in similar places."""
    signal = case.signal
    layers = [layer for layer in signal.plan.layers() if not layer.gate]
    recurrent = any("#" in s.name for s in signal.sums) or len(signal.layers) < len(layers)
    attention = any(b.degree > len(b.layers) for b in signal.plan.branches)
    graph = {name.rpartition(".")[0] for name in signal.graph.reached}
    unseen = any((layer.reads_activation or layer.feeds_activation) and layer.name not in graph for layer in layers)
    if len(layers) >= 3 and not (recurrent or attention or unseen or signal.graph.nonlinear):
        linear = [f.name for f in signal.modules if f.role == "activation"]
        place = linear[0] if linear else ""  # as a leaky ReLU of slope 1
        yield finding("no activation", place, first=layers[0].name, also=f"; look at {place}" if place else "")
    gated = any(layer.gate for layer in signal.plan.body)
    groups = () if signal.plan.branches or recurrent or gated else (_chain(signal),)
    for group in (*groups, *_branch_layers(signal)):
        without = [layer.name for layer in group if not layer.reads_activation]
        others = len(group) - len(without)
        if without and len(group) > SIMILAR and others >= MOST * len(group):
            yield finding("forgotten activation", without[0], names=without, others=others)
            return


def _chain(signal: Signal) -> list[Layer]:
    """The layers of a chain behind the first, but for those that change the size, as at the code of an autoencoder."""
    units = {layer.name: layer.units for layer in signal.layers}
    return [
        b
        for a, b in pairwise(signal.plan.body)
        if units.get(a.name) == units.get(b.name) and NUMBERS.sub("", a.name) == NUMBERS.sub("", b.name)
    ]


def _branch_layers(signal: Signal) -> Iterator[list[Layer]]:
    """The layers at the same place of similar branches; the first block of a list reads what stands before the list."""
    alike: defaultdict[object, list[Branch]] = defaultdict(list)
    for b in signal.plan.branches:
        alike[NUMBERS.sub("", b.name), tuple(NUMBERS.sub("", layer.name) for layer in b.layers), b.degree].append(b)
    for branches in alike.values():
        first = {branches[0].name, *(b.name for b in branches if re.search(r"\b0\b", b.name))}
        entries = {layer.name for b in branches if b.name in first for layer in b.first_layers}
        for every in zip(*(b.layers for b in branches), strict=True):
            yield [layer for layer in every if layer.name not in entries]


STEM_LARGE = LARGE  # second moment after the stem over that of what it reads; sound stems have 0.05 to 5
STEM_SMALL = 1e-6  # the same; embeddings and patches drawn with a deviation of 0.02 have 1e-4


def faults_of_the_stem(case: RuleInput) -> Iterator[Finding]:
    """A stem that scales what it reads far up or down."""
    signal = case.signal
    stem = [layer.name or "(model)" for layer in signal.plan.stem]
    size = next((f.value for f in signal.by_kind["read"] if f.place in stem), signal.inputs.size)
    if not stem or not signal.sums or math.isnan(size) or not size:
        return
    first = signal.sums[0]
    gain = (first.sum if first.layer else first.shortcut).power / size**2
    if gain >= STEM_LARGE or 0 < gain <= STEM_SMALL:
        large, status = ("large", "exploding") if gain > 1 else ("small", "vanishing")
        yield finding("stem scale", stem[0], status, size=math.sqrt(gain), names=stem, large=large)  # type: ignore[arg-type]


DEAD_SHARE = 0.8  # of units without a gradient; on samples that are nearly alike, half of all ReLUs are off
DEAD_BY_CHANCE = 1e-4  # the probability that so many units are off by chance, each with probability 1/2


def dead_units(case: RuleInput) -> Iterator[Finding]:
    """Layers in which most units get no gradient, more than chance explains (a Chernoff bound)."""

    def chance(share: float, units: int) -> float:
        return math.exp(-units * sum(q * math.log(2 * q) for q in (share, 1 - share) if q > 0))

    gates = {layer.name for layer in case.signal.plan.layers() if layer.gate}
    dead = [x for x in case.signal.layers if x.dead >= DEAD_SHARE and x.name not in gates]
    dead = [x for x in dead if chance(x.dead, x.units) < DEAD_BY_CHANCE]
    if dead and case.forward.status != "exploding":
        worst = max(dead, key=lambda layer: layer.dead)
        yield finding("dead units", worst.name, percent=worst.dead, names=[layer.name for layer in dead])


SATURATED = 1 / NOTICEABLE  # of the squared gradient that a function could pass; tanh of N(0, 5.3²) has it
GATE = (0.1, 0.9)  # a sigmoid with a mean outside of this range is a gate, which may be nearly shut or open on purpose


def saturated_functions(case: RuleInput) -> Iterator[Finding]:
    """Activations, gates and attentions that hardly pass a gradient; a gate counts only if it is shut.

    While the signal or the gradient changes with depth, that may be the cause.
    """

    def is_gate(f: Fact) -> bool:
        return f.detail == "sigmoid" and not GATE[0] <= f.mean <= GATE[1]

    seen = case.signal.by_kind["openness"] if case.forward.status in HARMLESS else []
    shut = [f for f in seen if is_gate(f) and f.mean < SHUT_GATE]
    saturated = [f for f in seen if not is_gate(f) and f.value < SATURATED and case.backward.status in HARMLESS]
    yield from (finding_of("saturated {function}", facts) for facts in (shut, saturated) if facts)


def even_attentions(case: RuleInput) -> Iterator[Finding]:
    """Attentions whose weights are all exactly equal, although no weights before them are zero."""
    zero = [name.rpartition(".")[0] for name in case.signal.zero_layers]
    masked = [f for f in case.signal.by_kind["even attention"] if f.place.rpartition(".")[0] not in zero]
    yield from (finding_of("attention masked out", masked) for _ in masked[:1])


LARGE_RADIUS = 1.05  # below, 70 steps do not make a factor of 1,000
SMALL_RADIUS = 0.1  # of a recurrent weight, which forgets all but 99 % in a step; torch's default has 0.58


def recurrences(case: RuleInput) -> Iterator[Finding]:
    """Recurrent weights that make the state explode or vanish with time."""
    steps = case.signal.steps
    for s in case.signal.by_kind["recurrence"]:
        explodes = s.detail == "relu" and s.value > LARGE_RADIUS and s.value ** (2 * steps) >= LARGE
        if explodes or (s.value < SMALL_RADIUS and steps > 2):
            large, does = ("large", "explodes") if explodes else ("small", "vanishes")
            words = {"large": large, "does": does, "radius": s.value, "steps": steps}
            yield finding("recurrence too {large}", s.place, "exploding" if explodes else "vanishing", **words)
            return


MODULE_RULES = (
    unlike_modules,
    repeated_modules,
    unused_modules,
    forgotten_skips,
    faulty_weights,
    missing_activations,
    faults_of_the_stem,
    dead_units,
    saturated_functions,
    even_attentions,
    recurrences,
)
