"""The rules for growth over depth and single blocks of the wrong size, and their remedies; see `rules.py`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence

from normfree.diagnostics import end_rules
from normfree.diagnostics.findings import SEVERITY, Finding, SignalStatus, finding
from normfree.diagnostics.growth import LARGE, NOTICEABLE, Direction
from normfree.diagnostics.model_signal import Gain, Signal
from normfree.diagnostics.outliers import Outlier
from normfree.report.terminal import compact, shorten_names

RECURRENT = "a layer that is applied again and again needs orthogonal weights of its own size, or gates (LSTM, GRU)"
MANY_CALLS = 6  # of one layer, which make a sequence of their own: a recurrence, but no layer shared by two towers


def strong_outliers(outliers: Sequence[Outlier], signal: Signal) -> Iterator[Finding]:
    """The blocks that change the signal or the gradient tenfold more or less than others: no small matter."""
    for outlier in outliers[:1]:
        ratio = max((outlier.forward_excess, outlier.backward_excess), key=lambda r: abs(math.log(r)))
        if abs(math.log(ratio)) >= math.log(NOTICEABLE):
            before = _module_before(outlier.name, ratio, signal)
            remedy = f"look at {before}: it changes the scale before {outlier.name}" if before else look_at(outliers)
            yield _wrong_size(before or outlier.name, ratio, signal, remedy, str(outlier))


def _wrong_size(place: str, ratio: float, signal: Signal, remedy: str, text: str = "") -> Finding:
    block, large = "layer" if signal.plain else "block", "large" if ratio > 1 else "small"
    status: SignalStatus = "exploding" if ratio > 1 else "vanishing"
    return finding("{block} too {large}", place, status, block=block, large=large, text=text, remedy=remedy)


def _module_before(name: str, ratio: float, signal: Signal) -> str:
    """The module right before an outlier that changes the scale instead of it; '' if none does."""
    places = [s.name for s in signal.sums]
    calls = [g.name for g in signal.gains]
    i = places.index(name)
    if not signal.plain or i == 0 or name not in calls or places[i - 1] not in calls:
        return ""
    stretch = signal.gains[calls.index(places[i - 1]) + 1 : calls.index(name) + 1]
    sign = 1 if ratio > 1 else -1
    gains = {g.name: sign * math.log(g.factor) for g in stretch if 0 < g.factor < math.inf}
    most = max(gains, key=gains.__getitem__, default=name)
    return most if most != name and gains[most] >= math.log(NOTICEABLE) else ""


def look_at(outliers: Sequence[Outlier]) -> str:
    """The remedy for blocks that stand out."""
    whose = "its" if len(outliers) == 1 else "their"
    names = shorten_names([o.name for o in outliers])
    return f"look at {names}: compare {whose} weights, scales and normalizers with the others'"


def growth(forward: Direction, backward: Direction, status: SignalStatus, advice: str, signal: Signal) -> Finding:
    """The growth over depth as a finding; its place is the network, or the one layer that is applied repeatedly."""
    way, d = ("forward signal", forward) if forward.status == status else ("gradient", backward)
    if math.isnan(d.factor):
        return finding("{change}", d.broken_at or d.worst, status, change=way, remedy=advice)
    if d is forward and (one := _only_large_gain(signal, 1 if forward.total > 1 else -1)):
        size = f"multiplies the signal by {compact(math.sqrt(one.factor))}"
        remedy = f"look at {one.name}: it {size}, far more than any other module; compare its weights with the others'"
        words = {"block": "layer", "large": "large" if one.factor > 1 else "small", "text": ""}
        return finding("{block} too {large}", one.name, status, remedy=remedy, **words)
    names = [module(s.name) for s in signal.sums]
    once = module(d.worst)
    place = once if names.count(once) >= MANY_CALLS or len(set(names)) == 1 < len(names) else ""
    unit = "step" if place else "layer" if signal.plain else "block"
    if place and not signal.plain:
        advice = RECURRENT
    if not place and status != "drifting" and (jump := _jump(d, status, way)):
        return jump
    where = "" if place or not d.worst or d.worst in advice else f"; the largest change is at {d.worst}"
    if where:
        where += f"; it runs from {signal.sums[0].name} to {signal.sums[-1].name}"
    change = f"{way} ×{d.factor:.2f} per {unit}"
    return finding("{change}", place, status, change=change, remedy=f"{advice}{where}")


def _jump(d: Direction, status: SignalStatus, way: str) -> Finding | None:
    """A change at one place that makes up most of the change in all, and is a hundredfold."""
    one, whole = math.log(d.worst_factor), math.log(d.total)
    if one * whole <= 0 or abs(one) < max(math.log(end_rules.LAYER_GAIN), 0.8 * abs(whole)):
        return None
    remedy = (
        f"look at {d.worst} and next to it: the {way} changes ×{compact(d.worst_factor)} at this place, and hardly "
        f"elsewhere; it is too {'large' if one > 0 else 'small'} there by a weight, a factor or code between modules"
    )
    return finding("{change}", d.worst, status, change=f"{way} ×{compact(d.worst_factor)}", remedy=remedy)


def _only_large_gain(signal: Signal, sign: int) -> Gain | None:
    """The one module that changes the signal a hundredfold in this sense, if all others do less than half of that."""
    logs = {
        g: sign * math.log(g.factor)
        for g in signal.gains
        if 0 < g.factor < math.inf and not g.normalized and (sign > 0 or not re.search("Pool|Embed", g.kind))
    }
    most = max(logs, key=logs.__getitem__, default=None)
    if most is None or logs[most] < math.log(end_rules.LAYER_GAIN):
        return None
    return most if all(v < logs[most] / 2 for g, v in logs.items() if g is not most) else None


def module(name: str) -> str:
    """The module of a call; '' for an addition of the model's own code."""
    return name.partition("#")[0].replace("(model)", "")


def advice(
    signal: Signal, forward: Direction, backward: Direction, method: str, supports: Callable[[str], bool]
) -> str:
    """The remedy; a network that already has the recommended method has been changed at some place."""
    advice = _plain_remedy(signal, forward, backward) if signal.plain else _remedy(forward, backward, supports)
    if not method or f"'{method}'" not in advice:
        return advice
    worse = max((d for d in (backward, forward) if d.status != "not measured"), key=lambda d: SEVERITY.index(d.status))
    place = worse.broken_at or worse.worst
    return f"it has '{method}' already, which does not cause this: look at {place}"


def _remedy(forward: Direction, backward: Direction, supports: Callable[[str], bool]) -> str:
    """The remedy, with methods that the network supports; every network with residual sums supports Fixup."""

    def use(*names: str) -> str:
        supported = [f"'{name}'" for name in names if supports(name)] or ["'fixup'"]
        return f"use {' or '.join(supported)}"

    if forward.status == "exploding":
        return f"{use('fixup', 'wn')} to preserve the signal at any depth"
    if forward.status == "vanishing":
        return f"the weights are too small for the depth: {use('fixup', 'wn')}"
    if backward.status == "exploding":
        return f"only the gradient explodes: {use('isograd', 'convshort')} to preserve it, or clip gradients"
    if backward.status == "vanishing":
        return f"early blocks hardly learn: {use('isograd', 'fixup')} to preserve the gradient"
    drifting = [d.fails_at for d in (forward, backward) if d.status == "drifting"]
    if drifting:
        return f"keep it below {min(drifting)} blocks, or {use('fixup', 'wn')} to preserve the signal at any depth"
    if any(d.status == "growing" and max(d.inside, d.total) >= LARGE for d in (forward, backward)):
        return f"large, but no explosion: it trains with normalization; without normalization {use('isograd', 'fixup')}"
    return "nothing to do"


def _plain_remedy(signal: Signal, forward: Direction, backward: Direction) -> str:
    """The remedy for a network without residual sums, which depends on its activation."""
    wrong = [d for d in (forward, backward) if d.status not in ("preserved", "growing", "not measured")]
    if not wrong:
        return "nothing to do"
    activation = signal.graph.activation
    if any("#" in s.name for s in signal.sums):
        return RECURRENT
    falls = wrong[0].factor < 1 or (wrong[0].status == "vanishing" and math.isnan(wrong[0].factor))
    if "sigmoid" in activation:
        return "sigmoid passes at most a quarter of the gradient per layer: use ReLU and He's initialization ('he_in')"
    if activation == "tanh":
        cause = "the weights are too small for tanh" if falls else "tanh is saturated: the weights are too large"
        return f"{cause}; draw them with a variance of 1 to 2.8 / fan-in (Xavier), or use ReLU and 'he_in'"
    if activation:
        cause = "the weights lack the gain of the activation" if falls else "the weights are too large"
        return f"{cause}: {activation} needs a variance of 2 / fan-in, He's initialization ('he_in'), or use 'wn'"
    return "without activations the weights need a variance of 1 / fan-in: use 'xavier' or 'wn'"
