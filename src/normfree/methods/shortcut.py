"""Shortcuts that share the sum's variance: IdShort, LearnScalar and ConvShort, x' = √½ · (h(x) + f(x)).

There are two initializations. He by fan-out, standardized after sampling, preserves the gradient ("ours" in the paper).
Brock's, γ²/fan_in per output channel, preserves the forward signal, and the gradient explodes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from normfree import theory
from normfree.methods.initialize import InitContext, gain, standardized
from normfree.methods.method import SQRT_HALF, Law, Method, Rule, register
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
        variance = (gamma if layer.activated_in else 1.0) / ctx.fans(layer)[0]
        ctx.set_(layer, standardized(ctx.normal(layer), variance, per_channel=True))
    ctx.default_classifier_()


def _require_fan(method: str, fan: str) -> str:
    if fan not in ("in", "out"):
        raise ValueError(f"expected option 'fan' of method '{method}' to be in or out, got '{fan}'")
    return fan


@register
def idshort(*, fan: str = "out") -> Method:
    """x' = √½ · (x + f(x)); with the ablation `fan=in`, weights by fan-in.

    Reference: robust, section 3.3, setup 1, equation 5. Shape-changing blocks use ConvShort's shortcut (footnote 1).
    """
    return Method(
        name="idshort",
        summary="scaled identity shortcut: the gradient's variance is kept from block to block",
        paper="robust",
        reference="robust, section 3.3, setup 1",
        h="identity",
        weights="plain; He fan-out, standardized after sampling",
        rule=Rule(c=SQRT_HALF),
        initializer=StandardizedHe(_require_fan("idshort", fan)),
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
        h="a·x, learnable, 1",
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
    if reads not in ("entry", "raw"):
        raise ValueError(f"expected option 'reads' of method 'convshort' to be entry or raw, got '{reads}'")
    if not gain > 0:
        raise ValueError(f"expected option 'gain' of method 'convshort' to be positive, got {gain:g}")
    return replace(
        idshort(),
        name="convshort",
        summary="a 1×1 convolution of the pre-activated input in every shortcut",
        reference="robust, section 3.3, setup 3",
        h="1×1 convolution of the pre-activated input, every block",
        weights="plain; He fan-out, standardized after sampling, the shortcut too",
        initializer=StandardizedHe(_require_fan("convshort", fan), gain),
        shortcut="conv everywhere",
        shortcut_reads="raw" if reads == "raw" else "entry",
    )


def _with_brock(method: Method) -> Method:
    return replace(
        method,
        name=f"{method.name}_brock",
        summary=f"{method.name} with Brock's initialization: forward kept, gradient explodes",
        reference=f"{method.reference}; equation 3",
        weights="plain; per output channel γ²/fan_in, γ² = 2/(1-1/π)",
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
