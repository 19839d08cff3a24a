"""NF-ResNets: each branch input divided by its expected standard deviation, and standardized weights."""

from __future__ import annotations

from dataclasses import dataclass, replace

from normfree import theory
from normfree.methods.initialize import InitContext
from normfree.methods.method import Law, Method, Rule, require_positive
from normfree.methods.method_registry import register
from normfree.methods.standard_init import he_fan_in_
from normfree.plan import Position


@dataclass(frozen=True)
class InverseStd:
    """The law α = 1/√E[Var[x]]: the variance restarts at the projection of each stage and grows by β² per branch."""

    beta: float

    def __call__(self, position: Position) -> float:
        first = position.index_in_stage == 1
        branches = position.previous_stage_size if first else position.index_in_stage - 1
        return float((1 + branches * self.beta**2) ** -0.5)


def _standardized_(ctx: InitContext) -> None:
    gamma = theory.variance_gain("relu")
    for layer, module in ctx.each(ctx.plan.hidden()):
        ctx.set_(layer, ctx.normal(layer, 1.0 / ctx.fans(layer)[0]))
        module.gain.fill_(gamma**0.5 if layer.reads_activation else 1.0)  # type: ignore[operator]
    ctx.default_classifier_()


@register
def nf(*, beta: float = 0.2, bias: bool = True) -> Method:
    """x' = x + β·f(α·x), α = 1/√E[Var[x]], with centred and scaled weight standardization.

    Every layer has a bias, initially 0, which takes the place of batch norm's shift (section 5.2). `bias=false` leaves
    the biases out, as release 0.1 did; the classifier keeps its own.

    `beta=1` gives the plots of the survey; 0.2 is Brock's choice for training. The survey and Brock swap the names α
    and β: here β multiplies the branch's output and α its input.

    Reference: normdead, section 4.2, equation 5 and appendix A.2; Brock 2021, sections 3 and 4.
    """
    require_positive("nf", beta=beta)
    return Method(
        name="nf",
        summary="normalizer-free ResNet: analytic scaling before each branch, standardized weights",
        paper="normdead",
        reference="normdead, section 4.2",
        shortcut_text="pre-activated at transitions",
        weights_text=f"centred, scaled weight standardization; fan-in{', biases 0' if bias else ''}",
        rule=Rule(alpha=Law(InverseStd(beta), text="1/√E[Var]"), beta=Law(beta, text=f"{beta:g}")),
        initializer=_standardized_,
        form="pre",
        forms=("pre",),
        shortcut="conv",
        weight_kind="standardized",
        layer_bias=bias,
        decay="weights",
    )


@register
def nf_he(*, beta: float = 0.2, bias: bool = True) -> Method:
    """`nf` with plain He weights, the left plot of Figure 5. Reference: normdead, Figure 5, left, and appendix A.3."""
    return replace(
        nf(beta=beta, bias=bias),
        name="nf_he",
        summary="nf with plain He weights: the mean drifts and the branches' variance is not kept",
        reference="normdead, Figure 5, left",
        weights_text=f"plain; He fan-in{', biases 0' if bias else ''}",
        initializer=he_fan_in_,
        weight_kind="plain",
    )
