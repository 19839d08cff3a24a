"""DeepNorm: layer norm after a sum whose shortcut is scaled up, and branches that start small. It keeps layer norm."""

from __future__ import annotations

from typing import NamedTuple

from normfree.methods.init_context import InitContext
from normfree.methods.method import Law, Method, Rule
from normfree.methods.plain import xavier_
from normfree.methods.registry import register
from normfree.methods.transformer_branches import scaled_xavier_, stacks
from normfree.nn.residual import Residual
from normfree.nn.scalars import ScalarMultiplier
from normfree.plan import Branch


class Scales(NamedTuple):
    """α of the shortcut and β of the weights."""

    alpha: float
    beta: float


def encoder_scales(encoder: int, decoder: int) -> Scales:
    """0.81·(N⁴M)^(1/16) and 0.87·(N⁴M)^(-1/16); of one stack of N layers, (2N)^(1/4) and (8N)^(-1/4).

    Reference: Wang 2022, Figure 2.

    >>> encoder_scales(8, 0).alpha
    2.0
    """
    if not decoder:
        return Scales(float((2 * encoder) ** 0.25), float((8 * encoder) ** -0.25))
    size = float((encoder**4 * decoder) ** (1 / 16))
    return Scales(0.81 * size, 0.87 / size)


def decoder_scales(decoder: int) -> Scales:
    """(3M)^(1/4) and (12M)^(-1/4) for a decoder of M layers that reads an encoder.

    Reference: Wang 2022, Figure 2.
    """
    return Scales(float((3 * decoder) ** 0.25), float((12 * decoder) ** -0.25))


def shortcut_scalar(ctx: InitContext, branch: Branch, method: str) -> ScalarMultiplier:
    """The scalar on a branch's shortcut; `ValueError` where the model has none."""
    residual = ctx.modules.get(branch.place)
    found = residual.a if isinstance(residual, Residual) else None
    if not isinstance(found, ScalarMultiplier):
        raise ValueError(
            f"method '{method}' expects a scalar on the shortcut of '{branch.name}', got none; "
            f"build the model with method='{method}'"
        )
    return found


def _deepnorm_(ctx: InitContext) -> None:
    found = stacks(ctx.plan, "deepnorm")
    xavier_(ctx, (*ctx.plan.stem, *ctx.plan.body))
    scales = encoder_scales(found.encoder_layers, found.decoder_layers)
    for branches, (alpha, beta) in (
        (found.encoder, scales),
        (found.decoder, decoder_scales(found.decoder_layers or 1)),
    ):
        for branch in branches:
            shortcut_scalar(ctx, branch, "deepnorm").set_(alpha)
            scaled_xavier_(ctx, branch, beta)
    ctx.default_classifier_()


@register
def deepnorm() -> Method:
    """x' = LN(α·x + f(x)), Xavier's weights with value, output and feed-forward × β.

    Reference: Wang, Ma, Dong, Huang, Zhang & Wei 2022, section 3 and Figure 2.
    """
    return Method(
        name="deepnorm",
        summary="layer norm after each sum, its shortcut scaled up and the branches scaled down by the depth",
        paper="none",
        reference="Wang et al. 2022, Figure 2",
        kind="normalized",
        h="α·x, α = (2N)^¼ or by encoder and decoder",
        weights="layernorm kept; Xavier × (8N)^(-1/4) or by encoder and decoder",
        rule=Rule(a=Law(1.0, text="(2N)^¼ or by encoder and decoder", written=True)),
        initializer=_deepnorm_,
        form="post",
        forms=("post",),
        skips=("sequence",),
        norm="layer",
    )
