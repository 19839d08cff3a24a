"""The rules for modules, their weights and functions: zero, equal, frozen, tied, unused, saturated or unlike others.

`rules.py` has the rules for the signal. The functions are pure, and each limit stands above its rule with its reason.
Unless stated otherwise a limit is a ratio of variances or of second moments, not of standard deviations.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice, pairwise
from typing import Any, NamedTuple

from normfree.diagnostics.findings import FINDINGS, Finding, finding
from normfree.diagnostics.growth import LARGE, NOTICEABLE, SHUT_GATE
from normfree.diagnostics.signals import CONSTANT, INPUT_LARGE, NUMBERS, SURE, Fact, LayerSignal, ModuleFact, Signal
from normfree.plan import Branch
from normfree.report.tables import shorten_names

SIMILAR = 4  # number of similar blocks that tell what is usual
MOST = 0.75  # fraction of them that must agree
LEAST_DROPPED = 1 - 1 / NOTICEABLE  # the noise, p / (1 - p) of the squared signal, is then nine times the signal


class FactRule(NamedTuple):
    """A finding for the first fact of a kind, or the last one, whose value is a fault; the kind may be the word."""

    word: str
    kind: str = ""
    is_fault: Callable[[float], bool] = lambda _value: True
    last: bool = False


IN_PLACE = FactRule("input changed in place")
LARGE_EMBEDDING = FactRule("embedding too large", "embedding", lambda size: INPUT_LARGE < size < math.inf)
NORMALIZER_OF_ONE = FactRule("normalizer of one value")
FACT_RULES = (
    FactRule("dropout too strong", "dropout", lambda p: LEAST_DROPPED <= p < 1),
    FactRule("{function} gate shut", "gate", lambda mean: mean < SHUT_GATE),
    FactRule("{function} twice"),
    FactRule("softmax of one value"),
    FactRule("softmax over the batch"),
    FactRule("softmax over the wrong axis"),
    FactRule("mask of the wrong side", last=True),
    FactRule("mask of the diagonal", last=True),
    FactRule("statistics never move"),
    FactRule("padding attended to", last=True),
)
AT_LAST = ("input ignored", "later positions seen", "targets not shifted")  # may be consequences of other faults
RULED = {rule.word for rule in (IN_PLACE, NORMALIZER_OF_ONE, *FACT_RULES)}
ELSEWHERE = {
    *RULED,
    *AT_LAST,
    "targets scale",
    "targets no probabilities",
    "weights not registered",
    "epsilon too large",
    "attention masked out",
    "copies of one module",
}


def fact_faults(signal: Signal, *rules: FactRule) -> Iterator[Finding]:
    """The findings of some rules."""
    for rule in rules:
        facts = [f for f in signal.by_kind[rule.kind or rule.word] if rule.is_fault(f.value)]
        places = list(dict.fromkeys(f.place for f in facts))
        wanted = places[-1 if rule.last else 0] if places else None
        yield from islice((finding_of(f, rule.word) for f in facts if f.place == wanted), 1)


def finding_of(fact: Fact, word: str = "") -> Finding:
    """The finding for a fact; `word` is its word, if that is not the kind of the fact."""
    way, _, name = fact.place.partition(" ")
    place, spot = (name, fact.place) if way in ("before", "behind") else (fact.place, f"at {fact.place}")
    sizes: dict[str, Any] = dict.fromkeys(("value", "size", "p", "percent"), fact.value)
    return finding(word or fact.kind, place, spot=spot, detail=fact.detail, function=fact.detail, **sizes)


NOISY = 5.0  # squared difference of two passes over that of two samples


def late_checks(signal: Signal) -> Iterator[Finding]:
    """Inputs that a network with a sound signal ignores, or should not see."""
    yield from (finding_of(fact) for fact in signal.facts if fact.kind in AT_LAST)


def failed_checks(signal: Signal) -> Iterator[Finding]:
    """The facts that are faults by themselves, and noise that is larger than the differences between samples."""
    elsewhere = set(ELSEWHERE)
    if signal.head.variation <= CONSTANT:
        elsewhere |= {"samples mixed", "place in the batch", "state between calls"}
    if signal.head.confidence > SURE:
        elsewhere |= {"samples left out"}
    checks = [f for f in signal.facts if f.kind in FINDINGS and f.kind not in elsewhere]
    for fact in sorted(checks, key=lambda f: list(FINDINGS).index(f.kind)):
        yield finding_of(fact)
    for fact in signal.by_kind["noise"]:
        if fact.value > NOISY and fact.place:
            yield finding_of(replace(fact, value=math.sqrt(fact.value)), "noise too strong")


def unused_modules(signal: Signal) -> Iterator[Finding]:
    """Modules that take no part in the output although others like them do, and weights that no optimizer gets."""
    if names := [f.place for f in signal.by_kind["weights not registered"]]:
        yield finding("weights not registered", names[0], names=names)
    elif made := signal.by_kind["weights made in the forward pass"]:
        yield finding("weights not registered", made[0].place, names=[f"the layer that {made[0].place} makes or calls"])
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
    if not signal.frozen_in_use or signal.cut:  # a gradient that is cut off on the way says more
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
        alike[NUMBERS.sub("", f.name), f.role].append(f)
    for (pattern, role), facts in alike.items():
        tied = [f for f in facts if role == "layer" and f.same_as and NUMBERS.sub("", f.same_as) == pattern]
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
            alike[NUMBERS.sub("", f.name)].append(f)
    for facts in alike.values():
        kinds = Counter(f.kind for f in facts)
        odd = [f for f in facts[1:-1] if kinds[f.kind] == 1]
        if len(kinds) == 2 and len(facts) > SIMILAR and odd:
            usual, others = kinds.most_common(1)[0]
            yield finding("unusual activation", odd[0].name, kind=odd[0].kind, others=others, usual=usual)
            return


def forgotten_skips(signal: Signal) -> Iterator[Finding]:
    """Blocks without the residual sum that most blocks like them have."""
    homes = Counter(b.home for b in signal.plan.branches)  # a loop adds several branches in one module
    in_loops = {layer.name for b in signal.plan.branches if homes[b.home] >= SIMILAR for layer in b.layers}
    inside = Counter(NUMBERS.sub("", name) for name in in_loops)
    body = list(dict.fromkeys(layer.name for layer in signal.plan.body))
    outside = Counter(NUMBERS.sub("", name) for name in body)
    stray = [n for n in body if NUMBERS.search(n) and inside[NUMBERS.sub("", n)] >= 3 * outside[NUMBERS.sub("", n)]]
    if signal.missing_sums:
        add = "add nothing to their" if len(signal.missing_sums) > 1 else "adds nothing to its"
        text = f"{shorten_names(signal.missing_sums)} {add} input, unlike others of the class"
        also = ", or leaves f(x) out of it"
        yield finding("forgotten skip", signal.missing_sums[0], names=signal.missing_sums, text=text, also=also)
    elif stray and not signal.constant_sums:
        stand = "stand" if len(stray) > 1 else "stands"
        text = f"{shorten_names(stray)} {stand} in no branch, unlike the same layer of other blocks"
        yield finding("forgotten skip", stray[0], names=stray, text=text, also=" there, or f does not read x")


AROUND_ZERO = 0.5  # mean of the gains of a normalizer over their root mean square, which is 1 at the usual start
EQUAL_SHARE = 0.5  # of the filters of a layer that equal another one


def faulty_weights(signal: Signal, zero_layer: str) -> Iterator[Finding]:
    """Normalizers of one value, gains around zero, layers of zeros outside of branches, frozen and equal weights."""
    yield from fact_faults(signal, NORMALIZER_OF_ONE)
    gains = [f for f in signal.by_kind["scale"] if f.detail == "norm"]
    # All of them: the last ones of the branches alone may start at 0.
    if gains and all(abs(f.mean) < AROUND_ZERO * f.value for f in gains):
        names = [f.place.removesuffix(".weight") for f in gains]
        yield finding("gains around zero", names[0], names=names, size=max(f.value for f in gains))
    if zero_layer:
        yield finding("zero weights", zero_layer)
    if names := _frozen_among_others(signal):
        yield finding("frozen weights", names[0], names=names, verb="require" if len(names) > 1 else "requires")
    last = {layer.name for layer in signal.plan.classifier}
    for fact in islice(signal.by_kind["copies of one module"], 1):
        names = [name.rpartition(".")[0] for name in fact.detail.split(", ")]
        yield finding("copies of one module", fact.place, names=names)
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
        alike[NUMBERS.sub("", layer.name)].append(layer)
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
    return next((name for name in signal.zero_layers if name in outside), "")


def zero_starts(signal: Signal) -> set[str]:
    """The layers whose weights are zero, but get a gradient, and behind which nothing waits for them.

    Either the output varies without them, or they make the output themselves, as a readout does.
    """
    if signal.unmeasured:
        return set()
    late = {layer.name for layer in signal.layers if layer.weight_norm == 0 and layer.gradient_norm > 0}
    return late if signal.head.variation > CONSTANT else late & {signal.graph.output_place}


def missing_activations(signal: Signal) -> Iterator[Finding]:
    """A linear network, and a layer of a branch without the activation that it has in similar branches."""
    layers = [layer for layer in signal.plan.layers() if not layer.gate]
    recurrent = any("#" in s.name for s in signal.sums) or len(signal.layers) < len(layers)
    attention = any(b.depth > len(b.layers) for b in signal.plan.branches)
    graph = {name.rpartition(".")[0] for name in signal.graph.reached}
    unseen = any((layer.reads_activation or layer.feeds_activation) and layer.name not in graph for layer in layers)
    if len(layers) >= 3 and not (recurrent or attention or unseen or signal.graph.nonlinear):
        linear = [f.name for f in signal.modules if f.role == "activation"]
        place = linear[0] if linear else ""  # as a leaky ReLU of slope 1
        yield finding("no activation", place, first=layers[0].name, also=f"; look at {place}" if place else "")
    # In a chain of layers of one size, but not at the code of an autoencoder, whose size differs.
    chain = [layer for layer in signal.plan.body if not layer.gate]
    units = {layer.name: layer.units for layer in signal.layers}
    patterns = Counter(NUMBERS.sub("", layer.name) for layer in chain if layer.reads_activation)
    without = [
        b.name
        for a, b in pairwise(chain)
        if not b.reads_activation
        and units.get(a.name) == units.get(b.name)
        and patterns[NUMBERS.sub("", b.name)] >= SIMILAR
        and NUMBERS.sub("", a.name) == NUMBERS.sub("", b.name)
    ]
    active_in = patterns.total()
    simple = not signal.plan.branches and not recurrent and not any(layer.gate for layer in signal.plan.body)
    if simple and len(without) == 1 and active_in >= max(SIMILAR, len(chain) - 2):
        yield finding("forgotten activation", without[0], names=without, others=active_in)
    alike: defaultdict[object, list[Branch]] = defaultdict(list)
    for b in signal.plan.branches:
        alike[NUMBERS.sub("", b.name), tuple(NUMBERS.sub("", layer.name) for layer in b.layers), b.depth].append(b)
    for branches in alike.values():
        # The first block of a list reads what stands before the list.
        first = {branches[0].name, *(b.name for b in branches if re.search(r"\b0\b", b.name))}
        entries = {layer.name for b in branches if b.name in first for layer in b.first_layers}
        for every in zip(*(b.layers for b in branches), strict=True):
            same = [layer for layer in every if layer.name not in entries]
            without = [layer.name for layer in same if not layer.reads_activation]
            others = len(same) - len(without)
            if without and len(every) >= SIMILAR and others >= MOST * len(same):
                yield finding("forgotten activation", without[0], names=without, others=others)
                return


STEM_LARGE = LARGE  # second moment after the stem over that of what it reads; sound stems have 0.05 to 5
STEM_SMALL = 1e-6  # the same; embeddings and patches drawn with a deviation of 0.02 have 1e-4


def faults_of_the_stem(signal: Signal) -> Iterator[Finding]:
    """A stem that scales what it reads far up or down."""
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


def faulty_functions(signal: Signal) -> Iterator[Finding]:
    """Normalizers with a large epsilon, dropouts, shut gates, wrong softmaxes, and a function that follows itself."""
    if swamped := signal.by_kind["epsilon too large"][::-1]:  # nodes come from the output to the input
        names = list(dict.fromkeys(s.place for s in swamped))
        first = swamped[0]
        yield finding("epsilon too large", first.place, variance=first.value, eps=float(first.detail), names=names)
    yield from fact_faults(signal, *FACT_RULES)
    zero = [name.rpartition(".")[0] for name in signal.zero_layers]
    masked = {f.place: f for f in signal.by_kind["attention masked out"] if f.place.rpartition(".")[0] not in zero}
    for fact in islice(reversed(masked.values()), 1):
        yield finding_of(fact)


SATURATED = 1 / NOTICEABLE  # of the squared gradient that a function could pass; tanh of N(0, 5.3²) has it
GATE = (0.1, 0.9)  # a sigmoid with a mean outside of this range is a gate, which may be nearly shut or open on purpose


def saturated_functions(signal: Signal, *, gates: bool) -> Iterator[Finding]:
    """Activations, gates and attentions that hardly pass a gradient; a gate counts only if it is shut.

    Args:
        gates: Whether to look at shut gates only, or at all others only.
    """

    def is_saturated(f: Fact) -> bool:
        gate = f.detail == "sigmoid" and not GATE[0] <= f.mean <= GATE[1]
        return gate == gates and (f.mean < SHUT_GATE if gate else f.value < SATURATED)

    if seen := [f for f in reversed(signal.by_kind["openness"]) if is_saturated(f)]:
        names = list(dict.fromkeys(f.place for f in seen))
        first = seen[0]
        yield finding("saturated {function}", first.place, function=first.detail, names=names, value=first.value)


LARGE_RADIUS = 1.05  # below, 70 steps do not make a factor of 1,000
SMALL_RADIUS = 0.1  # of a recurrent weight, which forgets all but 99 % in a step; torch's default has 0.58


def recurrences(signal: Signal) -> Iterator[Finding]:
    """Recurrent weights that make the state explode or vanish with time."""
    for s in signal.by_kind["recurrence"]:
        explodes = s.detail == "relu" and s.value > LARGE_RADIUS and s.value ** (2 * signal.steps) >= LARGE
        if explodes or (s.value < SMALL_RADIUS and signal.steps > 2):
            large, does = ("large", "explodes") if explodes else ("small", "vanishes")
            words = {"large": large, "does": does, "radius": s.value, "steps": signal.steps}
            yield finding("recurrence too {large}", s.place, "exploding" if explodes else "vanishing", **words)
            return
