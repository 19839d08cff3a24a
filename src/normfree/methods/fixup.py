"""Fixup: branches scaled by L^(-1/(2m-2)), their last layer and the classifier 0, scalar biases and multipliers."""

from __future__ import annotations

from normfree import theory
from normfree.methods.record import NONE, ONE, Law, Method, Rule, ScalarRate
from normfree.methods.registry import register
from normfree.methods.site import Site, fans, gain
from normfree.nn.weight import set_weight_


def _fixup_(site: Site, scale: float) -> None:
    """Rules 1 and 2: He fan-out × L^(-1/(2m-2)) in the branches, the last layers and the classifier 0."""
    plan = site.plan
    for _, module in site.each(plan.stem):
        site.default_(module)
    for branch in plan.branches:
        for layer, module in site.each(branch.shortcut_layers):
            set_weight_(module, site.normal(module, gain(layer) / fans(module)[1]))
        for layer, module in site.each(branch.layers[:-1]):
            std = scale * theory.fixup_scale(len(plan.branches), branch.depth)
            set_weight_(module, site.normal(module, gain(layer) / fans(module)[1]).mul_(std))
        for _, module in site.each(branch.layers[-1:]):
            set_weight_(module, module.weight.new_zeros(module.weight.shape))
    for _, module in site.each(plan.classifier):
        set_weight_(module, module.weight.new_zeros(module.weight.shape))


@register
def fixup(*, bias: bool = True, scale: float = 1.0, branches: bool = True, scalar_lr: str = "0.1") -> Method:
    """x' = p(x + β·f(x) + δ), β learnable, 1, δ learnable, 0, and a scalar bias before every layer and activation.

    The paper's ablations are options: `bias=false`; `scale=0.1,bias=false` and `scale=10,bias=false`; `branches=false`.
    `scalar_lr` is the learning rate of the scalars as a multiple of the weights': a tenth in the paper; `1/L` at
    thousands of layers, where the biases, which all move together, would change the output by Θ(ηL).

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
        initializer=lambda site: _fixup_(site, scale),
        scalar_biases=bias,
        remove_branches=not branches,
        scalar_rate=ScalarRate.parse(scalar_lr),
    )
