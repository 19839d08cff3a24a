"""Admin: layer norm after a sum whose shortcut is scaled by a profile of the branches. It keeps layer norm."""

from __future__ import annotations

from torch import Tensor

from normfree.methods.deepnorm import shortcut_scalar
from normfree.methods.init_context import InitContext
from normfree.methods.method import Law, Method, Rule
from normfree.methods.plain import xavier_
from normfree.methods.registry import register
from normfree.methods.transformer_branches import stacks
from normfree.nn.scalars import ScalarMultiplier


class _Profile:
    """1 + Σ Var[f] over the branches of a stack that have run; the 1 is the variance of what comes in."""

    def __init__(self) -> None:
        self.variance = 1.0

    def write_(self, omega: ScalarMultiplier) -> None:
        """Set ω of the branch that comes next."""
        omega.set_(self.variance**0.5)

    def count(self, out: Tensor) -> None:
        """Add the variance of what a branch put out."""
        self.variance += out.double().var(unbiased=False).item()


def _admin_(ctx: InitContext) -> None:
    found = stacks(ctx.plan, "admin")
    inside = [layer for branch in ctx.plan.branches for layer in branch.layers]
    xavier_(ctx, (*ctx.plan.stem, *ctx.plan.body, *inside))
    ctx.default_classifier_()
    hooks = []
    for branches in (found.encoder, found.decoder):
        profile = _Profile()
        for branch in branches:
            omega = shortcut_scalar(ctx, branch, "admin")
            residual = ctx.modules[branch.place]
            hooks += [
                residual.register_forward_pre_hook(lambda _m, _a, omega=omega, p=profile: p.write_(omega)),
                residual.branch.register_forward_hook(lambda _m, _a, out, p=profile: p.count(out)),  # type: ignore[union-attr]
            ]
    try:
        ctx.run()
    finally:
        for hook in hooks:
            hook.remove()


@register
def admin() -> Method:
    """x' = LN(ω·x + f(x)), ω learnable, ω_i² = 1 + Σ_{j<i} Var[f_j(x_{j-1})] as one batch shows it.

    The sum starts anew in a decoder. The pass that profiles the branches has the ω of all branches before already.

    Reference: Liu, Liu, Gao, Chen & Han 2020, section 4.2; the 1, for the input, is from the authors' code.
    Differs: ω is one number a branch, where the authors have a vector of equal ones.
    """
    return Method(
        name="admin",
        summary="layer norm after each sum, its shortcut scaled by the variance of the branches before it on a batch",
        paper="none",
        reference="Liu et al. 2020, section 4.2",
        kind="normalized",
        h="ω·x, learnable, √(1 + Σ Var[f]) on a batch",
        weights="layernorm kept; Xavier",
        rule=Rule(a=Law(1.0, text="learnable, √(1 + Σ Var[f]) on a batch", learnable=True, written=True)),
        initializer=_admin_,
        form="post",
        forms=("post",),
        skips=("sequence",),
        norm="layer",
        needs_example=True,
    )
