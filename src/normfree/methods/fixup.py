"""Fixup: branches scaled by L^(-1/(2m-2)), last layers and classifier 0, scalar biases and multipliers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from normfree import theory
from normfree.methods.init_context import InitContext, gain
from normfree.methods.method import NONE, ONE, RESIDUAL_SUMS, Law, Method, Rule, ScalarRate
from normfree.methods.registry import register
from normfree.methods.transformer_branches import ATTENTION, linear_part
from normfree.plan import Branch, Layer


@dataclass(frozen=True)
class FixupInit:
    """Initializer of rules 1 and 2: He fan-out × L^(-1/(2m-2)) in the branches, last layers and classifier 0.

    Layers that the paper's networks do not have get He fan-out without the factor, as shortcuts do: further layers of
    the stem, layers between stages, and bounded gates. `scale` multiplies the factor; `bounded` also treats the softmax
    of an attention as a bounded gate. Without `zero_last` the last layer of a branch is scaled like the others; without
    `zero_classifier` the classifier keeps torch's default.
    """

    scale: float = 1.0
    bounded: bool = False
    zero_last: bool = True
    zero_classifier: bool = True

    def __call__(self, ctx: InitContext) -> None:
        plan = ctx.plan
        for layer in plan.stem[:1]:
            ctx.default_(layer)
        for layer in plan.stem[1:]:
            _he_fan_out_(ctx, layer)
        for branch in plan.branches:
            for layer in branch.shortcut_layers:
                _he_fan_out_(ctx, layer)
            for layer in branch.layers:
                self._branch_layer_(ctx, branch, layer)
        for layer in plan.body:
            _he_fan_out_(ctx, layer)
        for layer in plan.classifier:
            if self.zero_classifier:
                ctx.zero_(layer)
            else:
                ctx.default_(layer)

    def _branch_layer_(self, ctx: InitContext, branch: Branch, layer: Layer) -> None:
        """Initialize one layer of a branch."""
        total = len(ctx.plan.branches)
        if self.zero_last and layer in branch.ends:
            ctx.zero_(layer)
        elif self.bounded and branch.depth == ATTENTION:
            weight = ctx.normal(layer, gain(layer) / ctx.fans(layer)[1])
            linear_part(branch, layer, weight).mul_(self.scale * theory.fixup_scale(total, 2))
            ctx.set_(layer, weight)
        else:
            _he_fan_out_(ctx, layer, 1.0 if layer.gate else self.scale * theory.fixup_scale(total, branch.depth))


def _he_fan_out_(ctx: InitContext, layer: Layer, factor: float = 1.0) -> None:
    ctx.set_(layer, ctx.normal(layer, gain(layer) / ctx.fans(layer)[1]).mul_(factor))


@register
def fixup(
    *,
    bias: bool = True,
    scale: float = 1.0,
    branches: bool = True,
    scalar_lr: str = "0.1",
    multiplier: bool = True,
    zero_last: bool = True,
    zero_classifier: bool = True,
    slow_biases: bool = True,
) -> Method:
    """x' = p(x + β·f(x) + δ), with learnable β (initially 1) and δ (initially 0).

    A scalar bias precedes every layer and activation.

    The paper's ablations are options: `bias=false`; `scale=0.1,bias=false` and `scale=10,bias=false`; `branches=false`.
    Further options leave out other parts: `multiplier=false` the multiplier of a branch, `zero_classifier=false` the
    zeros in the classifier, and `zero_last=false` those in the last layer of a branch, which is then scaled like the
    others (the first option after equation 5). Rule 2 alone is all three with `bias=false`.
    `scalar_lr` is the learning rate of the scalars, relative to that of the weights: a tenth in the authors' code. Use
    `10/L` from 1,000 layers on: the biases all move together and would change the output by Θ(ηL).

    The biases of weight layers, which in Fixup's ResNets is the classifier's alone, learn at the scalars' rate as well,
    as in the authors' parameter groups. With `slow_biases=false` they learn at the weights' rate, as in release 0.1.

    An attention counts as four layers, as in the authors' code; see `fixup_bounded`. A classifier tied to the
    embeddings is not zero, so such a network starts above the loss of a uniform guess.

    Reference: fixup, section 3, rules 1 to 3 and equation 5; appendix C.1 for the ablations.
    """
    if not scale > 0:
        raise ValueError(f"expected option 'scale' of method 'fixup' to be positive, got {scale:g}")
    return Method(
        name="fixup",
        summary="rescaled initialization that updates the network by Θ(η) per step at any depth",
        paper="fixup",
        reference="fixup, section 3, equation 5",
        h="identity, or of x + b at transitions",
        weights="plain; He fan-out × L^(-1/(2m-2)), last and classifier 0, scalar biases",
        rule=Rule(
            beta=Law(1.0, learnable=True) if branches and multiplier else ONE,
            delta=Law(0.0, learnable=True) if bias else NONE,
        ),
        initializer=FixupInit(scale, zero_last=zero_last, zero_classifier=zero_classifier),
        skips=RESIDUAL_SUMS,
        scalar_biases=bias,
        remove_branches=not branches,
        scalar_rate=ScalarRate.parse(scalar_lr),
        slow_biases=slow_biases,
    )


@register
def fixup_bounded(*, scalar_lr: str = "0.1") -> Method:
    """`fixup` with m = 2 for attention: values × L^(-1/2), queries and keys without a factor.

    Fixup needs the input of a branch's last layer to shrink as L^(-1/2). With m = 4, query, key and value × L^(-1/6)
    would achieve this if they were multiplied with one another. But the softmax is bounded, so the output layer sees
    the scale of the values alone, and one step changes the function by Θ(η·L^(2/3)).

    Reference: none; it completes fixup, section 3, equation 5, for bounded factors.
    """
    return replace(
        fixup(scalar_lr=scalar_lr, slow_biases=False),
        name="fixup_bounded",
        summary="fixup that counts an attention as two layers, because its softmax is bounded: Θ(η) for Transformers",
        paper="none",
        reference="ours; docs/design.md",
        h="identity",
        weights="plain; as fixup, but values × L^(-1/2), queries and keys × 1",
        initializer=FixupInit(bounded=True),
        skips=("sequence",),
    )
