"""The claims of `robust` on the signal before training: the plots of Figures 2, 4 and 5.

All three are judged by the whole network, from the first residual sum to the last. Inside a stage, the product of a
branch's fan-ins is that of its fan-outs, so only the transitions distinguish the two. Fan-in weights are the control.

Reference: "A robust initialization of residual blocks", ICLR 2022 submission, sections 3 and 4.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch

from normfree.diagnostics.propagation import propagate
from normfree.diagnostics.signals import Signal
from normfree.methods import InitContext, Method, get
from normfree.methods.initialize import gain, standardized
from normfree.models import build
from normfree_papers.claims.claim import Check, Claim, Cost, Measurement, Settings, aside, expect
from normfree_papers.claims.depth_curves import chart, decades, factor_per_block, geometric_means, stage_starts
from normfree_papers.claims.registry import register
from normfree_papers.robust.gradient_theory import Weights, expected_curve


def _standardized(fan: int) -> Callable[[InitContext], None]:
    """An initializer: He by fan-in (0) or fan-out (1), each layer standardized after sampling, as in section 4."""

    def initialize(ctx: InitContext) -> None:
        for layer in ctx.plan.hidden():
            ctx.set_(layer, standardized(ctx.normal(layer), gain(layer) / ctx.fans(layer)[fan]))
        ctx.default_classifier_()

    return initialize


PROPOSED = {
    "idshort": "IdShort (proposed)",
    "learnscalar": "LearnScalar (proposed)",
    "convshort": "ConvShort (proposed)",
}
BROCK = {f"{name}_brock": label.replace("(proposed)", "(Brock)") for name, label in PROPOSED.items()}
# LearnScalar starts as IdShort: one curve shows both, and a check compares them.
_KEPT = {name: label for name, label in PROPOSED.items() if name != "learnscalar"}
_BROCK = {f"{name}_brock": BROCK[f"{name}_brock"] for name in _KEPT}
_FAN_IN = {f"{name}_in": label.replace("(proposed)", "(He fan-in, the control)") for name, label in _KEPT.items()}
_PLAIN = {"he_in": "ResNet (He fan-in)", "he_out": "ResNet (He fan-out)"}
_NORMED = {"bn_in": "ResNet BN (He fan-in)", "bn_out": "ResNet BN (He fan-out)"}
_OURS = {"isograd": "isograd (ours)"}
LEGEND = {**_KEPT, **_FAN_IN, **_PLAIN, **_NORMED, "bn_identity": "ResNet BN, identity shortcuts", **_BROCK, **_OURS}
_PANELS = {
    "scaled shortcuts": (*_KEPT.values(), *_FAN_IN.values(), *_BROCK.values(), *_OURS.values()),
    "plain or normalized": tuple(name for name in LEGEND.values() if name.startswith("ResNet")),
}
_MADE = {  # method and fan of the curves that are no methods of their own
    "bn_in": ("batchnorm_convshort", 0),
    "bn_out": ("batchnorm_convshort", 1),
    "bn_identity": ("batchnorm", 0),
    "he_in": ("he_in", 0),
    "he_out": ("he_in", 1),
}


def _method(name: str) -> Method:
    """The method of a curve of the legend."""
    if name in _FAN_IN:
        return get(f"{name.removesuffix('_in')}:fan=in")
    if name not in _MADE:
        return get(name)
    method, fan = _MADE[name]
    return replace(get(method), initializer=_standardized(fan))


# Checks

_SAME = (
    "the first sum has a tenth to ten times the gradient variance of the last, one decade on the figure's logarithmic "
    "axis; a larger change in either direction refutes it"
)
_WEIGHTS: dict[str, Weights] = {
    **dict.fromkeys(_KEPT, "fan-out"),
    **dict.fromkeys(_FAN_IN, "fan-in"),
    **dict.fromkeys(_BROCK, "Brock"),
}
_TOLERANCE = 0.3


def derived_decades(depth: int, name: str) -> float:
    """log10 of first over last gradient variance by the rules, strides and zero-padded borders included."""
    method = name.partition("_")[0]
    return decades(expected_curve(f"preact_resnet{depth}", method, _WEIGHTS[name], c=math.sqrt(0.5)), backward=True)


def _within(direction: str, name: str, statement: str, word: str) -> Check:
    thing = _SAME if direction == "backward" else _SAME.replace("gradient variance", "variance")
    return expect(f"{direction} decades, {name}", paper=word, low=-1.0, high=1.0).reading(
        statement, why=f"our reading of the word '{word}': {thing}"
    )


def _beyond(direction: str, name: str, statement: str, word: str) -> Check:
    return expect(f"{direction} decades, {name}", paper=word, low=1.0).reading(
        statement,
        why=f"our reading of the word '{word}': growth by more than one decade over the whole network, the limit at "
        "which 'conserve' ends; less refutes it",
    )


def _figure_checks() -> tuple[Check, ...]:
    checks = []
    for name, label in _KEPT.items():
        checks += [
            _within("backward", name, f"{label}: the gradient is conserved over the whole network", "conserve"),
            expect(f"change by fan-in less change by fan-out, {name}", paper="proper initialization", low=0.0).reading(
                f"{label}: fan-out weights conserve the gradient better than fan-in weights, in decades over the whole "
                "network",
                why="our reading of the word 'proper': fan-out is proposed 'to preserve the backwards variance', so "
                "the control must change it more; a negative number refutes it",
            ),
            aside(f"forward growth of a plain ResNet less change, {name}", paper="up to some amount", low=0.0).reading(
                f"{label}: the signal changes less than in a plain ResNet, in decades over the whole network",
                why="our reading of the word 'some amount': less than without the proposed sum; a negative number "
                "refutes it",
            ),
        ]
    for name, label in _BROCK.items():
        checks += [
            _within("forward", name, f"{label}: the signal is preserved over the whole network", "preserves"),
            _beyond("backward", name, f"{label}: the gradient explodes over the whole network", "exploding"),
            expect(f"backward a block, {name}", paper="exponentially", low=1.0).reading(
                f"{label}: the gradient grows from block to block inside stages",
                why="our reading of the word 'exponentially': a factor above 1 per block; 1 or less refutes it",
            ),
        ]
    for direction, thing in (("forward", "signal"), ("backward", "gradient")):
        checks += [
            *(
                _beyond(direction, name, f"{label}: the {thing} is not preserved", "do not preserve")
                for name, label in _PLAIN.items()
            ),
            *(
                _within(direction, name, f"{label}: batch norm keeps the {thing}", "fix things up")
                for name, label in _NORMED.items()
            ),
        ]
    checks.append(
        expect("LearnScalar against IdShort", paper="α initialized at 1", high=0.0).derived(
            "LearnScalar starts as IdShort: largest relative difference of the gradient variances",
            why="a factor of exactly 1 on the shortcut changes no bit",
            exact=True,
        )
    )
    checks += [
        aside(f"backward decades over the derived, {name}", low=-_TOLERANCE, high=_TOLERANCE).derived(
            f"{label}: the change over the whole network is that of the rule with strides and borders, in decades",
            why="the map of variances is carried back position by position; a layer of n channels varies by 5/n, in "
            "all 0.24 decades for one image and position; the mean of the logarithm lies 0.07 lower, and the mean over "
            "8 labels takes an eighth",
        )
        for name, label in (_KEPT | _FAN_IN | _BROCK).items()
    ]
    checks.append(
        aside("backward decades, isograd", low=-1.0, high=1.0).reading(
            "isograd, which is ours and corrects for stride and border, conserves the gradient",
            why=f"our reading of the word 'conserve': {_SAME}",
        )
    )
    return tuple(checks)


# Measurement


def _signal(depth: int, name: str, seed: int, settings: Settings) -> Signal:
    g = torch.Generator().manual_seed(seed)
    batch = 4 if settings.quick else 8
    model = build(f"preact_resnet{depth}", _method(name), generator=g, device=settings.device)
    x, y = torch.randn(batch, 3, 32, 32, generator=g), torch.randint(10, (batch,), generator=g)
    return propagate(model, x.to(settings.device), y.to(settings.device))


def _figure(depth: int, settings: Settings) -> Measurement:
    """Variance of signal and gradient at every block's output, for all curves of the legend.

    Reference: robust, section 4, Figure 2; appendix A, Figures 4 and 5.
    Differs: our "classical ResNet" has identity shortcuts except where the shape changes. With batch norm it has the
    1×1 convolutions of Table 1 in every block; a second curve shows batch norm with identity shortcuts.
    """
    values: dict[str, list[float]] = {}
    forward: dict[str, tuple[float, ...]] = {}
    backward: dict[str, tuple[float, ...]] = {}
    found = settings.over_seeds_of(LEGEND, lambda name, seed: _signal(depth, name, seed, settings))
    stages = [s.stage for s in found["idshort"][0].sums]
    for name, label in LEGEND.items():
        ahead = [signal.series("sum") for signal in found[name]]
        back = [signal.series("sum_gradient") for signal in found[name]]
        values[f"forward a block, {name}"] = [factor_per_block(curve, stages) for curve in ahead]
        values[f"backward a block, {name}"] = [factor_per_block(curve, stages, backward=True) for curve in back]
        values[f"forward decades, {name}"] = [decades(curve) for curve in ahead]
        values[f"backward decades, {name}"] = [decades(curve, backward=True) for curve in back]
        forward[label], backward[label] = geometric_means(ahead), geometric_means(back)
    for name in _WEIGHTS:
        exact = derived_decades(depth, name)
        values[f"backward decades over the derived, {name}"] = [v - exact for v in values[f"backward decades, {name}"]]
    values |= _comparisons(values)
    learnable = _signal(depth, "learnscalar", settings.seeds[0], settings).series("sum_gradient")
    fixed = found["idshort"][0].series("sum_gradient")
    values["LearnScalar against IdShort"] = [max(abs(a / b - 1) for a, b in zip(learnable, fixed, strict=True))]
    # Twelve curves in one panel would be a tangle.
    panels = tuple(
        chart(
            f"ResNet-{depth}, {kind}: {title}", {n: curves[n] for n in names}, "variance", stages=stage_starts(stages)
        )
        for kind, names in _PANELS.items()
        for title, curves in (("forward, the signal", forward), ("backward, its gradient", backward))
    )
    return Measurement(
        values=values,
        panels=panels,
        notes=(
            f"{4 if settings.quick else 8} images of N(0, 1) noise, 32×32, cross-entropy with random labels; geometric "
            f"means over seeds {list(settings.seeds)}",
            "decades are log10 over the whole network: of the last over the first sum forward, and of the first over "
            "the last backward; factors per block are geometric means inside stages",
            f"by the rule itself, IdShort with fan-out loses {-derived_decades(depth, 'idshort'):.2f} decades at "
            f"strides and borders, with fan-in {-derived_decades(depth, 'idshort_in'):.2f}",
            "LearnScalar starts as IdShort, so their curves are one",
        ),
    )


def _comparisons(values: Mapping[str, list[float]]) -> dict[str, list[float]]:
    """How much less the proposed rules change gradient and signal than their controls, seed by seed."""
    compared = {}
    for name in _KEPT:
        ours, control = (values[f"backward decades, {which}"] for which in (name, f"{name}_in"))
        compared[f"change by fan-in less change by fan-out, {name}"] = [
            abs(theirs) - abs(mine) for mine, theirs in zip(ours, control, strict=True)
        ]
        signal, plain = (values[f"forward decades, {which}"] for which in (name, "he_in"))
        compared[f"forward growth of a plain ResNet less change, {name}"] = [
            theirs - abs(mine) for mine, theirs in zip(signal, plain, strict=True)
        ]
    return compared


for _number, _depth, _quick, _full, _seeds in ((2, 50, 28, 85, 5), (4, 18, 14, 50, 10), (5, 101, 58, 110, 3)):
    register(
        Claim(
            id=f"robust/fig{_number}",
            where=f"Figure {_number}",
            statement=f"In ResNet-{_depth}, fan-out weights with √½ at every sum conserve the gradient over the whole "
            "network, where Brock's weights preserve the signal and let the gradient explode.",
            paper_value="a plot: the proposed flat, Brock's and plain ResNets exponential in depth",
            how=f"Variance of signal and gradient at every sum of pre-activation ResNet-{_depth} at 32×32, for the "
            "curves of the legend and for the proposed sums with fan-in weights.",
            cost=Cost(quick_seconds=_quick, full_seconds=_full),
            checks=_figure_checks(),
            departures=(
                "the shortcut convolution reads the pre-activated input, the only one for which the printed gains hold",
                "classical ResNets have identity shortcuts where the shape stays",
            ),
            seeds=_seeds,
            quick_seeds=2,
            version=2,
            measure=partial(_figure, _depth),
        ),
    )
