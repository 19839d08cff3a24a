"""Fixup: branches scaled by L^(-1/(2m-2)), their last layer and the classifier 0, scalar biases and multipliers."""

from __future__ import annotations

from dataclasses import replace

from normfree import theory
from normfree.methods.init_context import InitContext, gain
from normfree.methods.method import NONE, ONE, RESIDUAL_SUMS, Law, Method, Rule, ScalarRate
from normfree.methods.registry import register
from normfree.methods.transformer_branches import ATTENTION, linear_part
from normfree.plan import Layer


def _fixup_(ctx: InitContext, scale: float, *, bounded: bool = False) -> None:
    """Rules 1 and 2: He fan-out × L^(-1/(2m-2)) in the branches, the last layers and the classifier 0.

    What the paper's networks do not have, a second layer in the stem, layers between stages and bounded gates, gets He
    fan-out without the factor, as shortcuts do. `bounded` takes the softmax of an attention for such a gate, too.
    """
    plan = ctx.plan

    def he_(layer: Layer, factor: float = 1.0) -> None:
        ctx.set_(layer, ctx.normal(layer, gain(layer) / ctx.fans(layer)[1]).mul_(factor))

    for layer in plan.stem[:1]:
        ctx.default_(layer)
    for layer in plan.stem[1:]:
        he_(layer)
    for branch in plan.branches:
        for layer in branch.shortcut_layers:
            he_(layer)
        for layer in branch.layers:
            if layer in branch.ends:
                ctx.zero_(layer)
            elif bounded and branch.depth == ATTENTION:
                weight = ctx.normal(layer, gain(layer) / ctx.fans(layer)[1])
                linear_part(branch, layer, weight).mul_(scale * theory.fixup_scale(len(plan.branches), 2))
                ctx.set_(layer, weight)
            else:
                he_(layer, 1.0 if layer.gate else scale * theory.fixup_scale(len(plan.branches), branch.depth))
    for layer in plan.body:
        he_(layer)
    for layer in plan.classifier:
        ctx.zero_(layer)


@register
def fixup(*, bias: bool = True, scale: float = 1.0, branches: bool = True, scalar_lr: str = "0.1") -> Method:
    """x' = p(x + β·f(x) + δ), β learnable, 1, δ learnable, 0, and a scalar bias before every layer and activation.

    The paper's ablations are options: `bias=false`; `scale=0.1,bias=false` and `scale=10,bias=false`; `branches=false`.
    `scalar_lr` is the learning rate of the scalars as a multiple of the weights': a tenth in the authors' code; `10/L`
    from 1,000 layers on, where the biases, which all move together, would change the output by Θ(ηL).

    An attention counts as four layers, as in the authors' code; see `fixup_bounded`. An output that shares the weight
    of the embeddings is not zero, so that such a network starts above the loss of a guess.

    Reference: fixup, section 3, rules 1 to 3 and equation 5; appendix C.1 for the ablations.
    """
    if not scale > 0:
        raise ValueError(f"expected option 'scale' of method 'fixup' to be positive, got {scale:g}")
    return Method(
        name="fixup",
        summary="rescaled initialization that updates the network by Θ(η) a step at any depth",
        paper="fixup",
        reference="fixup, section 3, equation 5",
        h="identity, or of x + b at transitions",
        weights="plain; He fan-out × L^(-1/(2m-2)), last and classifier 0, scalar biases",
        rule=Rule(beta=Law(1.0, learnable=True) if branches else ONE, delta=Law(0.0, learnable=True) if bias else NONE),
        initializer=lambda ctx: _fixup_(ctx, scale),
        skips=RESIDUAL_SUMS,
        scalar_biases=bias,
        remove_branches=not branches,
        scalar_rate=ScalarRate.parse(scalar_lr),
    )


@register
def fixup_bounded(*, scalar_lr: str = "0.1") -> Method:
    """`fixup` with m = 2 for attention: values × L^(-1/2), queries and keys without a factor.

    Fixup wants the branch's input to its last layer to shrink as L^(-1/2). With m = 4, query, key and value × L^(-1/6)
    give that only if they were multiplied with one another; but the softmax is bounded, the output layer sees the
    values' scale alone, and one step changes the function by Θ(η·L^(2/3)).

    Reference: none; it completes fixup, section 3, equation 5, for bounded factors.
    """
    return replace(
        fixup(scalar_lr=scalar_lr),
        name="fixup_bounded",
        summary="fixup that counts an attention as two layers, since its softmax is bounded: Θ(η) for Transformers",
        paper="none",
        reference="ours; docs/design.md",
        h="identity",
        weights="plain; as fixup, but values × L^(-1/2), queries and keys × 1",
        initializer=lambda ctx: _fixup_(ctx, 1.0, bounded=True),
        skips=("sequence",),
    )
