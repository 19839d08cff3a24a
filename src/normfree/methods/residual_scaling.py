"""Residual sums scaled by fixed or learnable numbers.

IdShort, LearnScalar and ConvShort of robust, x' = √½ · (h(x) + f(x)), have two initializations. He by fan-out,
standardized after sampling, preserves the gradient ("ours" in the paper). Brock's, γ/fan_in per output channel with γ =
2/(1 - 1/π), preserves the forward signal, and the gradient explodes. The others weigh branch and shortcut: √½, a small
β, Hanin's r^l, Shao's, SkipInit and ReZero.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from normfree import theory
from normfree.methods.initialize import InitContext, gain, standardized
from normfree.methods.method import RESIDUAL_SUMS, SQRT_HALF, Law, Method, Rule, require_choice, require_positive
from normfree.methods.method_registry import register
from normfree.methods.standard_init import he_fan_in_
from normfree.plan import Position


@dataclass(frozen=True)
class StandardizedHe:
    """Initializer: Var[W] = γ/fan, standardized after sampling; shortcuts take `shortcut_gain` for γ if given."""

    fan: str = "out"
    shortcut_gain: float | None = None

    def __call__(self, ctx: InitContext) -> None:
        shortcuts = {layer for branch in ctx.plan.branches for layer in branch.shortcut_layers}
        for layer in ctx.plan.hidden():
            gamma = gain(layer)
            if self.shortcut_gain is not None and layer in shortcuts:
                gamma = self.shortcut_gain
            fan_in, fan_out = ctx.fans(layer)
            ctx.set_(layer, standardized(ctx.normal(layer), gamma / (fan_in if self.fan == "in" else fan_out)))
        ctx.default_classifier_()


def _brock_(ctx: InitContext) -> None:
    gamma = theory.variance_gain("relu")
    for layer in ctx.plan.hidden():
        variance = (gamma if layer.reads_activation else 1.0) / ctx.fans(layer)[0]
        ctx.set_(layer, standardized(ctx.normal(layer), variance, per_channel=True))
    ctx.default_classifier_()


@register
def idshort(*, fan: str = "out") -> Method:
    """x' = √½ · (x + f(x)); with the ablation `fan=in`, weights by fan-in.

    Reference: robust, section 3.3, setup 1, equation 5. Shape-changing blocks use ConvShort's shortcut (footnote 1).
    """
    require_choice("idshort", "fan", fan, ("in", "out"))
    return Method(
        name="idshort",
        summary="scaled identity shortcut: the gradient's variance is kept from block to block",
        paper="robust",
        reference="robust, section 3.3, setup 1",
        weights_text="plain; He fan-out, standardized after sampling",
        rule=Rule(c=SQRT_HALF),
        initializer=StandardizedHe(fan),
        form="pre",
        shortcut="conv",
    )


def _one_at_identities(position: Position) -> float | None:
    return None if position.transition else 1.0


@register
def learnscalar() -> Method:
    """x' = √½ · (a·x + f(x)), with a learnable, initially 1.

    Reference: robust, section 3.3, setup 2.
    """
    return replace(
        idshort(),
        name="learnscalar",
        summary="as idshort, with a learnable scalar on the identity shortcut",
        reference="robust, section 3.3, setup 2",
        shortcut_text="a·x, learnable, 1",
        rule=Rule(c=SQRT_HALF, a=Law(_one_at_identities, text="learnable, 1", learnable=True)),
    )


@register
def convshort(*, reads: str = "entry", gain: float = 2.0, fan: str = "out") -> Method:
    """x' = √½ · (W_s z + f(x)) with z the pre-activated input and a 1×1 convolution W_s in every block.

    With the ablation `reads=raw` the shortcut reads the raw x with the printed gain of 2, and the gradient explodes;
    with `reads=raw,gain=1` it does not. With `fan=in` the weights are by fan-in.

    Reference: robust, section 3.3, setup 3.
    Differs: the paper writes h(x) = W_s x, but its printed gains hold for the pre-activated input only; with the raw
    input the gradient explodes with depth.
    """
    require_choice("convshort", "reads", reads, ("entry", "raw"))
    require_choice("convshort", "fan", fan, ("in", "out"))
    require_positive("convshort", gain=gain)
    return replace(
        idshort(),
        name="convshort",
        summary="a 1×1 convolution of the pre-activated input in every shortcut",
        reference="robust, section 3.3, setup 3",
        shortcut_text="1×1 convolution of the pre-activated input, every block",
        weights_text="plain; He fan-out, standardized after sampling, the shortcut too",
        initializer=StandardizedHe(fan, gain),
        shortcut="conv everywhere",
        shortcut_reads="raw" if reads == "raw" else "entry",
    )


def _with_brock(method: Method) -> Method:
    return replace(
        method,
        name=f"{method.name}_brock",
        summary=f"{method.name} with Brock's initialization: forward kept, gradient explodes",
        reference=f"{method.reference}; equation 3",
        weights_text="plain; per output channel γ/fan_in, γ = 2/(1-1/π)",
        initializer=_brock_,
    )


@register
def idshort_brock() -> Method:
    """`idshort` with Brock's initialization. Reference: robust, equation 3."""
    return _with_brock(idshort())


@register
def learnscalar_brock() -> Method:
    """`learnscalar` with Brock's initialization. Reference: robust, equation 3."""
    return _with_brock(learnscalar())


@register
def convshort_brock() -> Method:
    """`convshort` with Brock's initialization. Reference: robust, equation 3."""
    return _with_brock(convshort())


@register
def sqrt_half() -> Method:
    """x' = √½ · (x + f(x)).

    Reference: fixup, section 4.1, baseline 1; normdead, section 3.2; Balduzzi 2017.
    """
    return Method(
        name="sqrt_half",
        summary="halve the variance at every sum: it is preserved, but the shortcut fades with depth",
        paper="fixup, normdead",
        reference="normdead, equation 5 with α = √½",
        weights_text="plain; He fan-in",
        rule=Rule(c=SQRT_HALF),
        initializer=he_fan_in_,
        skips=RESIDUAL_SUMS,
    )


@register
def small_branch(*, beta: float = 0.2) -> Method:
    """x' = x + β·f(x) with one small β for all branches.

    Reference: normdead, section 3.2 (β in [0.1, 0.3]; the source, Szegedy 2016, keeps batch norm).
    """
    require_positive("small_branch", beta=beta)
    return replace(
        sqrt_half(),
        name="small_branch",
        summary="one small factor on every branch: growth is slower, and still exponential",
        paper="normdead",
        reference="normdead, section 3.2; Szegedy 2016",
        rule=Rule(beta=Law(beta, text=f"{beta:g}")),
    )


@dataclass(frozen=True)
class GeometricSeries:
    """The law r^l of the branch's index l."""

    r: float

    def __call__(self, position: Position) -> float:
        return float(self.r**position.index)


@register
def hanin(*, r: float = 0.9) -> Method:
    """x' = x + r^l·f(x): the sum of the factors converges, so the variance stays bounded.

    Reference: normdead, section 3.2; Hanin & Rolnick 2018, theorem 6.
    """
    if not 0 < r < 1:
        raise ValueError(f"expected option 'r' of method 'hanin' between 0 and 1, got {r:g}")
    return replace(
        sqrt_half(),
        name="hanin",
        summary="branches weighted by a geometric series: the variance is bounded, not preserved",
        paper="normdead",
        reference="normdead, section 3.2; Hanin & Rolnick 2018",
        rule=Rule(beta=Law(GeometricSeries(r), text=f"{r:g}^l")),
    )


def _shao_beta(position: Position) -> float:
    return float((position.index + position.total) ** -0.5)


def _shao_shortcut(position: Position) -> float:
    return float((1 - _shao_beta(position) ** 2) ** 0.5)


@register
def shao() -> Method:
    """x' = √(1-β²)·x + β·f(x), β² = 1/(l + L): every branch has the same weight at the output.

    Reference: normdead, section 4.1; Shao 2020.
    """
    return replace(
        sqrt_half(),
        name="shao",
        summary="shortcut and branch weighted so that the variance is kept and every branch counts the same",
        paper="normdead",
        reference="normdead, section 4.1; Shao 2020",
        shortcut_text="√(1-β²)·x",
        rule=Rule(a=Law(_shao_shortcut, text="√(1-β²)"), beta=Law(_shao_beta, text="1/√(l + L)")),
    )


@register
def skipinit() -> Method:
    """x' = x + β·f(x) with β learnable, from 0.

    Reference: normdead, section 4.1; De & Smith 2020.
    """
    return replace(
        sqrt_half(),
        name="skipinit",
        summary="a learnable factor on every branch that starts at 0: the network starts as its shortcut",
        paper="normdead",
        reference="normdead, section 4.1; De & Smith 2020",
        rule=Rule(beta=Law(0.0, learnable=True)),
    )


def _default_(ctx: InitContext) -> None:
    for layer in ctx.plan.layers():
        ctx.default_(layer)


@register
def rezero() -> Method:
    """`skipinit` with the framework's default weights.

    Reference: robust, section 1; Bachlechner 2020, equation 3.
    """
    return replace(
        skipinit(),
        name="rezero",
        summary="as skipinit, with the framework's default weights",
        paper="robust",
        reference="robust, section 1; Bachlechner 2020",
        weights_text="plain; framework default",
        initializer=_default_,
    )
