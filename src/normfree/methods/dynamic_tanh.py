"""Dynamic tanh (DyT): a tanh with a learnable slope in place of each normalizer."""

from __future__ import annotations

from dataclasses import dataclass

from normfree.methods.initialize import InitContext
from normfree.methods.method import WITH_SEQUENCES, Method, register
from normfree.methods.standard_init import he_fan_in_
from normfree.nn.normalizers import DynamicTanh


@dataclass(frozen=True)
class DynamicTanhInit:
    """Initializer: He fan-in; in the tanh the given α, weight 1 and bias 0."""

    alpha: float

    def __call__(self, ctx: InitContext) -> None:
        for module in ctx.model.modules():
            if isinstance(module, DynamicTanh):
                module.start = self.alpha
                module.reset_parameters()
        he_fan_in_(ctx)


@register
def dyt(*, alpha: float = 0.5) -> Method:
    """w·tanh(α·x) + b in place of every normalizer, with w and b per channel; α is learnable and starts at 0.5.

    Conversion changes the normalizers only, neither weights nor sums.

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
        initializer=DynamicTanhInit(alpha),
        skips=WITH_SEQUENCES,
        norm="tanh",
    )
