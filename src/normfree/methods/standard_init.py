"""Standard initializations, which ignore residual sums: He by fan-in or fan-out, and Xavier."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from normfree.methods.initialize import InitContext, gain
from normfree.methods.method import WITH_SEQUENCES, Method
from normfree.methods.method_registry import register
from normfree.plan import Layer


def he_fan_in_(ctx: InitContext) -> None:
    """Var[W] = γ/fan_in for every layer, γ = 2 where the layer reads a ReLU; the classifier keeps the default.

    Reference: robust, equation 1; He 2015, equation 10.
    """
    draw_normal_(ctx, lambda layer, fan_in, fan_out: gain(layer) / fan_in)


def he_fan_out_(ctx: InitContext) -> None:
    """Var[W] = γ/fan_out for every layer, γ = 2 where the layer reads a ReLU; the classifier keeps the default.

    Reference: robust, equation 2; He 2015, equation 14.
    """
    draw_normal_(ctx, lambda layer, fan_in, fan_out: gain(layer) / fan_out)


def draw_normal_(ctx: InitContext, variance: Callable[[Layer, int, int], float]) -> None:
    """Draw every layer but the classifier from N(0, variance(layer, fan_in, fan_out)); the classifier keeps torch's."""
    for layer in ctx.plan.hidden():
        ctx.set_(layer, ctx.normal(layer, variance(layer, *ctx.fans(layer))))
    ctx.default_classifier_()


def xavier_(ctx: InitContext, layers: Iterable[Layer]) -> None:
    """Draw the given layers from N(0, 2/(fan_in + fan_out))."""
    for layer in layers:
        ctx.set_(layer, ctx.xavier(layer))


@register
def he_in() -> Method:
    """He initialization that preserves the forward signal of a plain network."""
    return Method(
        name="he_in",
        summary="He initialization by fan-in; the signal of a residual network doubles at every sum",
        paper="robust, fixup",
        reference="robust, equation 1; fixup, section 2",
        kind="initialization",
        shortcut_text="as built",
        weights_text="plain; N(0, 2/fan_in)",
        initializer=he_fan_in_,
        skips=WITH_SEQUENCES,
    )


@register
def he_out() -> Method:
    """He initialization that preserves the backward signal of a plain network."""
    return replace(
        he_in(),
        name="he_out",
        summary="He initialization by fan-out; the gradient of a residual network doubles at every sum",
        reference="robust, equation 2",
        weights_text="plain; N(0, 2/fan_out)",
        initializer=he_fan_out_,
    )


def _xavier_everywhere_(ctx: InitContext) -> None:
    xavier_(ctx, ctx.plan.layers())


@register
def xavier() -> Method:
    """Glorot's compromise between fan-in and fan-out, for linear units."""
    return replace(
        he_in(),
        name="xavier",
        summary="Glorot initialization; the baseline of fixup's Table 1, which needs a small learning rate",
        paper="fixup",
        reference="fixup, Table 1; Glorot & Bengio 2010, equation 12",
        weights_text="plain; N(0, 2/(fan_in + fan_out))",
        initializer=_xavier_everywhere_,
    )
