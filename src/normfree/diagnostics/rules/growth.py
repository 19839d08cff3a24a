"""The growth of a signal over depth: a robust fit, the limits of each word, and the remedies."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from statistics import median
from typing import Literal, NamedTuple

import numpy as np

from normfree.diagnostics.rules.findings import SEVERITY, Finding, SignalStatus, finding
from normfree.diagnostics.signals import Gain, Signal
from normfree.report.tables import compact, shorten_names

# The change over depth.
LARGE = 1e3  # a change that fails with any factor; residual networks with 1e4 did not train, with 4 they did
# A normalizer makes the scale of a weight irrelevant, so that a large gradient makes the weight grow and then learn
# more slowly. GoogLeNet, RepVGG and SelecSLS-60 have 1.6e3, 4e3 and 2.4e5, and train. MLPs with batch norm trained with
# 5e3 (24 layers), and hardly with 5e5 (36 layers).
LARGE_NORMALIZED = 3e5  # a growth of the gradient that fails in spite of normalizers
LARGE_WITH_SUMS = 1e8  # the same with residual sums; ConvMixer (768 channels, 32 blocks) has 1.4e7 and trains
FAST = 1.5  # a factor per block that matters after a few blocks; He without normalization has 2
# Batch norm with ReLU multiplies the squared gradient by π / (π - 1) = 1.47 per layer (mean-field theory), a sum with a
# shortcut by a factor that approaches 1 with depth. The limit is halfway on the log scale.
NORMALIZED_RATE = 1.21
NOTICEABLE = 10.0  # a change below which even a fast one does not matter
LAYER_GAIN = NOTICEABLE**2  # second moment of an output over that of the input; He's initialization has 2
# An exponential change is drifting from the square root of LARGE on: at twice the depth it fails.
GROWN = 4.0  # the least change inside stages that is called growing
OFFSETS = range(7)  # the variance at the beginning of a stage, in units of the variance that a block adds
BETTER = 0.6  # largest error of a power law relative to an exponential: 0.02 to 0.5 with batch norm, above 0.7 with He
# Without residual sums all layers are scaled alike, so that training recovers from more. MLPs whose second moment falls
# to 1.3e-4 from the first hidden layer to the last (torch's default, 7 layers) trained with SGD, with 6e-5 (Xavier,
# 16 layers) they stopped halfway, and with 4e-6 (torch's default, 9 layers) they stayed at chance. AlexNet and a
# Fourier neural operator have 5.9e-5 and 2.6e-5 with torch's default, and train with Adam. The limit is halfway from
# there to 4e-6 on the log scale; what is above it is drifting.
PLAIN_SMALL = 1e-5
PLAIN_DRIFTS = 1e-2  # a decay that is drifting
# A recurrent layer may forget by a factor per time step of 0.5; tanh with orthogonal weights has 0.7. With torch's
# default it has 0.2 to 0.4, which leaves enough of a short sequence: more than rounding does in float32, squared.
FORGETS = 0.5
FORGETS_SOON = 0.1
LOST_BY_ROUNDING = 1e-15

SHUT_GATE = 0.01  # the mean of a sigmoid that leaves 1e-4 of the squared signal, as much as vanishing does


class DepthPoint(NamedTuple):
    """The size of the signal at one place; only places of one stream and stage are fitted together."""

    name: str
    stream: str
    stage: int
    value: float


@dataclass(frozen=True)
class Direction:
    """The verdict on one direction.

    The backward direction runs from the last block to the first, so that a factor above 1 explodes in both directions.

    Attributes:
        status: The word for this direction; 'not measured' if the forward signal ends before the output.
        factor: The factor of the variance per block inside stages.
        total: The change of the variance from the first block on the signal's way to the last.
        worst: The block with the largest change.
        worst_factor: The factor of that block.
        broken_at: The first block on the signal's way where the variance is exactly 0 or not finite.
        inside: The change inside all stages together. It can be far larger than `total` if transitions reset the
            variance.
        sudden: Whether the variance was within bounds up to `broken_at`, so growth with depth is not the cause.
        fails_at: The number of blocks at which this factor is a failure, 0 if the change is no exponential.
    """

    status: SignalStatus | Literal["not measured"]
    factor: float
    total: float
    worst: str
    worst_factor: float
    broken_at: str = ""
    inside: float = math.nan
    sudden: bool = False
    fails_at: int = 0


def judge_direction(
    points: Sequence[DepthPoint],
    *,
    backward: bool = False,
    plain: bool = False,
    normalized: bool = False,
    gated: Collection[str] = (),
) -> Direction:
    """Judge one direction from the places in the order of the blocks.

    The growth inside a stage is a Theil–Sen fit of the log variance, so that one outlier does not count. The signal is
    *growing* if a power of the depth fits clearly better than an exponential. It is *exploding* if it changes a
    thousandfold, inside all stages together or from end to end, or tenfold from end to end with a factor of at least
    1.5 per block (measured in a stage of three or more). It is *vanishing* by the inverse numbers. The factor per block
    is not used for repeated calls of one layer. From end to end, the jump between two stages counts at most
    tenfold, and not at all in a network with normalizers that preserves the signal inside of all stages. An exponential
    change inside stages that does neither, but would at twice the depth, is *drifting*. A network without residual sums
    tolerates a decay to 1e-5 (`plain`), and one with normalizers a gradient that grows to 3e5, or to 1e8 with residual
    sums (`normalized`). The cells of an LSTM or GRU (`gated`) learn to keep their state, unless their gates are shut.

    Sums inside the branch of another sum are a stream of their own. A branch that starts small has a small gradient,
    which says nothing about depth, so that streams are not compared with each other. The worst stream counts.
    """
    if not points:
        return Direction("not measured", math.nan, math.nan, "", math.nan)
    travelled = list(points)[:: -1 if backward else 1]
    ended = next((p for p in travelled if not 0 < p.value < math.inf), None)
    broken = next((p for p in travelled if not math.isfinite(p.value)), None) or ended
    if broken is not None:
        before = [p.value for p in travelled[: travelled.index(broken)] if p.stream == broken.stream and p.value > 0]
        steps = [math.log(b / a) for a, b in pairwise(before)]
        change = sum(steps) - max(steps, key=abs, default=0.0)  # but for one jump, which is no growth over depth
        sudden = change > -math.log(LARGE) and (math.isfinite(broken.value) or change < math.log(LARGE))
        if math.isfinite(broken.value):
            return Direction("vanishing", math.nan, 0.0, broken.name, 0.0, broken.name, sudden=sudden)
        return Direction("exploding", math.nan, math.inf, broken.name, math.inf, broken.name, sudden=sudden)
    streams = [list(group) for _, group in groupby(sorted(points, key=lambda p: p.stream), lambda p: p.stream)]
    found = [_judge_stream(stream, backward, plain, normalized, gated) for stream in streams]
    return max(found, key=lambda d: SEVERITY.index(d.status))


def _judge_stream(
    points: Sequence[DepthPoint], backward: bool, plain: bool, normalized: bool, gated: Collection[str]
) -> Direction:
    stages = [p.stage for p in points]
    slope, inside, polynomial = _fit(stages, [math.log(p.value) for p in points])
    if backward:
        slope, inside = -slope, -inside
    travelled = list(points)[:: -1 if backward else 1]
    logs = [math.log(p.value) for p in travelled]
    ends = max(1, min(3, len(logs) // 8))
    end_to_end = median(logs[-ends:]) - median(logs[:ends])
    ends_of_stages = _end_to_end(stages if not backward else stages[::-1], logs)
    mostly_inside = 2 * len(set(stages)) <= len(points)
    if normalized and mostly_inside and abs(inside) < math.log(NOTICEABLE):
        ends_of_stages = inside  # only the jumps between stages are left, and normalizers take them up
    growth, decay = max(inside, ends_of_stages), min(inside, ends_of_stages)
    if normalized and not plain and not backward and max(p.value for p in points) <= NOTICEABLE:
        growth = min(growth, 0.0)  # a stream that starts from small embeddings grows to the size of normalized branches
    # One step per stage cannot show a trend; with batch norm it is 2.
    measured = max(map(stages.count, stages)) > 2
    tied = len(points) > 1 and len({p.name.partition("#")[0] for p in points}) == 1  # the steps of one layer
    fast = slope if measured and not tied else 0.0
    tolerant = backward and normalized
    normalized_limit = LARGE_NORMALIZED if plain else LARGE_WITH_SUMS
    large = math.log(normalized_limit if tolerant else LARGE)
    learns_to_keep = tied and module_of(points[0].name) in gated and slope > 2 * math.log(SHUT_GATE)
    forgets = tied and slope > math.log(FORGETS_SOON if end_to_end > math.log(LOST_BY_ROUNDING) else FORGETS)
    small = -math.log(PLAIN_SMALL) if plain else math.log(LARGE)
    drifts = math.log(PLAIN_DRIFTS) if plain else -small / 2
    steps = [b - a for a, b in pairwise(logs)] or [0.0]
    # Without its largest step, such as the one behind the first block, half of a fast change is left on the log scale.
    fast = fast if 2 * (abs(ends_of_stages) - max(map(abs, steps))) >= math.log(NOTICEABLE) else 0.0
    fast_growth = growth > 0 and not tolerant and fast >= math.log(FAST) and ends_of_stages >= math.log(NOTICEABLE)
    fast_decay = not plain and fast <= -math.log(FAST) and ends_of_stages <= -math.log(NOTICEABLE)
    status: SignalStatus = "preserved"
    # Without sums and normalizers nothing divides by what has accumulated, so that no power of the depth is meant.
    settles = normalized or not plain or not (growth >= large or fast_growth)
    if polynomial and inside >= math.log(GROWN) and settles:
        status = "growing"
    elif (growth >= large and (not tolerant or slope >= math.log(NORMALIZED_RATE))) or fast_growth:
        status = "exploding"
    elif (decay <= -small and not (forgets or learns_to_keep)) or fast_decay:
        status = "vanishing"
    elif measured and not polynomial and not learns_to_keep and not drifts < min(inside, growth) < large / 2:
        status = "drifting"
    falling = status == "vanishing" or (status == "drifting" and inside < 0)
    worst = (min if falling else max)(range(len(steps)), key=steps.__getitem__)
    # A forward sum shows the effect of its own block, a gradient that of the block after it.
    place = travelled[worst if backward else min(worst + 1, len(travelled) - 1)].name
    limit = small if slope < 0 else large
    depth = math.ceil(limit / abs(slope)) + 1 if status in ("drifting", "exploding", "vanishing") and slope else 0
    factor, total, worst_factor, inside_factor = map(bounded_exp, (slope, end_to_end, steps[worst], inside))
    return Direction(status, factor, total, place, worst_factor, inside=inside_factor, fails_at=depth)


def _end_to_end(stages: Sequence[int], logs: Sequence[float]) -> float:
    """The log change from end to end, on the signal's way, in which the jump between two stages counts only tenfold.

    Blocks of another kind, width or stream begin there, whose size says little about depth.
    """
    end_to_end = 0.0
    start = 0
    for i in range(1, len(logs) + 1):
        if i == len(logs) or stages[i] != stages[i - 1]:
            ends = max(1, min(3, (i - start) // 8))
            end_to_end += median(logs[i - ends : i]) - median(logs[start : start + ends])
            if i < len(logs):
                end_to_end += max(-math.log(NOTICEABLE), min(math.log(NOTICEABLE), logs[i] - logs[i - 1]))
            start = i
    return end_to_end


def _fit(stages: Sequence[int], logs: Sequence[float]) -> tuple[float, float, bool]:
    """The log factor per block inside stages, its sum over all stages, and whether a power of the depth fits better.

    Batch norm divides by the accumulated variance, so that the l-th block of a stage adds a fraction of 1/(l + k),
    where k is the variance at the beginning of the stage: the variance grows as a power of l + k (forward as l + k
    itself), not as an exponential. Two points cannot distinguish the two.
    """
    inside, steps, exponential_error = 0.0, 0, 0.0
    power_errors = np.zeros(len(OFFSETS))
    for stage in dict.fromkeys(stages):
        observed = np.array([log for log, s in zip(logs, stages, strict=True) if s == stage])
        if len(observed) < 2:
            continue
        depth = np.arange(1.0, len(observed) + 1)
        slopes, errors = _theil_sen(np.stack([depth, *(np.log(depth + k) for k in OFFSETS)]), observed)
        slope = float(slopes[0])
        if len(observed) > 2:
            exponential_error += errors[0]
            power_errors += errors[1:]
        inside += slope * (len(observed) - 1)
        steps += len(observed) - 1
    polynomial = bool(power_errors.min() < BETTER * exponential_error)
    return inside / steps if steps else 0.0, inside, polynomial


def _theil_sen(x: np.ndarray, y: np.ndarray, limit: int = 400) -> tuple[np.ndarray, np.ndarray]:
    """For each row of x, the median of the slopes between all pairs of points, and the error of a line with that slope.

    The intercept is a median, too, and the error is the sum of the distances. At most `limit` evenly spaced points are
    used for the fit.
    """
    chosen = np.linspace(0, len(y) - 1, min(len(y), limit)).round().astype(int)
    chosen_x, chosen_y = x[:, chosen], y[chosen]
    i, j = np.triu_indices(len(chosen), 1)
    slopes = np.median((chosen_y[j] - chosen_y[i]) / (chosen_x[:, j] - chosen_x[:, i]), axis=1, keepdims=True)
    starts = np.median(chosen_y - slopes * chosen_x, axis=1, keepdims=True)
    return slopes[:, 0], np.abs(y - starts - slopes * x).sum(1)


def bounded_exp(value: float) -> float:
    """The exponential of a number; infinite beyond the range of floats."""
    return math.inf if value >= 700 else math.exp(value)


POST_NORM_LEAST = 3  # sums that tell whether normalizers follow them; two blocks have so many behind the first
POST_NORM_SAME = 0.02  # relative difference of second moments after a normalizer, which are 1 at the start


def before_normalizers(signal: Signal) -> str:
    """The first sum, if normalizers follow all others, but not its small input, which says nothing about depth."""
    main = [s for s in signal.sums if s.around is None]
    powers = [s.shortcut.power for s in main[1:]]
    same = all(abs(p - powers[-1]) <= POST_NORM_SAME * p for p in powers[1:])  # the epsilon shows behind the first one
    same = same and all(powers[-1] / 2 < p < powers[-1] * 2 for p in powers[:1])
    return (
        main[0].name if len(powers) >= POST_NORM_LEAST and same and powers[0] > NOTICEABLE * main[0].sum.power else ""
    )


REPEATED_LAYER_ADVICE = (
    "a layer that is applied again and again needs orthogonal weights of its own size, or gates (LSTM, GRU)"
)
MANY_CALLS = 6  # of one layer, which make a sequence of their own: a recurrence, but no layer shared by two towers


def growth_finding(
    signal: Signal, forward: Direction, backward: Direction, status: SignalStatus, advice: str
) -> Finding:
    """The growth over depth as a finding; its place is the network, or the one layer that is applied repeatedly."""
    way, d = ("forward signal", forward) if forward.status == status else ("gradient", backward)
    if math.isnan(d.factor):
        return finding("{change}", d.broken_at or d.worst, status, change=way, remedy=advice)
    if d is forward and (one := _only_large_gain(signal, 1 if forward.total > 1 else -1)):
        size = f"multiplies the signal by {compact(math.sqrt(one.factor))}"
        remedy = f"look at {one.name}: it {size}, far more than any other module; compare its weights with the others'"
        words = {"block": "layer", "large": "large" if one.factor > 1 else "small", "text": ""}
        return finding("{block} too {large}", one.name, status, remedy=remedy, **words)
    names = [module_of(s.name) for s in signal.sums]
    once = module_of(d.worst)
    place = once if names.count(once) >= MANY_CALLS or len(set(names)) == 1 < len(names) else ""
    unit = "step" if place else "layer" if signal.plain else "block"
    if place and not signal.plain:
        advice = REPEATED_LAYER_ADVICE
    if not place and status != "drifting" and (jump := _jump(d, status, way, signal)):
        return jump
    where = "" if place or not d.worst or d.worst in advice else f"; the largest change is at {d.worst}"
    if where:
        where += f"; it runs from {signal.sums[0].name} to {signal.sums[-1].name}"
    change = f"{way} ×{d.factor:.2f} per {unit}"
    return finding("{change}", place, status, change=change, remedy=f"{advice}{where}")


def _jump(d: Direction, status: SignalStatus, way: str, signal: Signal) -> Finding | None:
    """A change at one place that makes up most of the change in all, and is a hundredfold."""
    one, end_to_end = math.log(d.worst_factor), math.log(d.total)
    if one * end_to_end <= 0 or abs(one) < max(math.log(LAYER_GAIN), 0.8 * abs(end_to_end)):
        return None
    remedy = (
        f"look at {d.worst} and next to it: the {way} changes ×{compact(d.worst_factor)} at this place, and hardly "
        f"elsewhere; it is too {'large' if one > 0 else 'small'} there by a weight, a factor or code between modules"
    )
    if len(reads := next((s.reads for s in signal.sums if s.name == d.worst), ())) > 1:
        remedy += f"; it reads {shorten_names(reads)}"
    return finding("{change}", d.worst, status, change=f"{way} ×{compact(d.worst_factor)}", remedy=remedy)


def _only_large_gain(signal: Signal, sign: int) -> Gain | None:
    """The one module that changes the signal a hundredfold in this sense, if all others do less than half of that."""
    logs = {
        g: sign * math.log(g.factor)
        for g in signal.gains
        if 0 < g.factor < math.inf and not g.normalized and (sign > 0 or not re.search("Pool|Embed", g.kind))
    }
    most = max(logs, key=logs.__getitem__, default=None)
    if most is None or logs[most] < math.log(LAYER_GAIN):
        return None
    return most if all(v < logs[most] / 2 for g, v in logs.items() if g is not most) else None


def module_of(name: str) -> str:
    """The module of a call; '' for an addition of the model's own code."""
    return name.partition("#")[0].replace("(model)", "")


def growth_advice(
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
        return REPEATED_LAYER_ADVICE
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
