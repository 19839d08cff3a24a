"""Dynamic tanh: a squashing function that stands where the normalizer stood."""

from __future__ import annotations

from normfree.methods.init_context import InitContext
from normfree.methods.method import WITH_SEQUENCES, Method
from normfree.methods.plain import he_fan_in_
from normfree.methods.registry import register
from normfree.nn.normalizers import DynamicTanh


def _dyt_(ctx: InitContext, alpha: float) -> None:
    """He fan-in, γ = 1, β = 0 and the given α."""
    for module in ctx.model.modules():
        if isinstance(module, DynamicTanh):
            module.start = alpha
            module.reset_parameters()
    he_fan_in_(ctx)


@register
def dyt(*, alpha: float = 0.5) -> Method:
    """γ·tanh(α·x) + β in place of every normalizer, γ and β a channel, α learnable and 0.5 at the start.

    Conversion leaves everything but the normalizers as it is, weights and sums too.

    Reference: Zhu, Chen, He, LeCun & Liu 2025, section 4, algorithm 1.
    """
    if not alpha > 0:
        raise ValueError(f"expected option 'alpha' of method 'dyt' to be positive, got {alpha:g}")
    return Method(
        name="dyt",
        summary="tanh with learnable slope in place of each normalizer: squashes large values without statistics",
        paper="none",
        reference="Zhu et al. 2025, section 4",
        h="identity",
        weights="plain; He fan-in, dynamic tanh for the normalizer",
        initializer=lambda ctx: _dyt_(ctx, alpha),
        skips=WITH_SEQUENCES,
        norm="tanh",
    )
