"""Methods that were made for Transformers: dynamic tanh, T-Fixup, DeepNorm and Admin.

Dynamic tanh (DyT) puts a tanh with a learnable slope in the place of each normalizer. The others scale Xavier weights
or shortcuts by the depth: T-Fixup has no normalizer; DeepNorm and Admin keep layer norm after each sum.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from normfree.methods.fixup import scaled_xavier_, transformer_stacks
from normfree.methods.initialize import InitContext
from normfree.methods.method import WITH_SEQUENCES, Law, Method, Rule, require_positive
from normfree.methods.method_registry import register
from normfree.methods.standard_init import he_fan_in_, xavier_
from normfree.nn.normalizers import DynamicTanh
from normfree.nn.residual import Residual
from normfree.nn.scalars import ScalarMultiplier
from normfree.plan import Branch


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
    require_positive("dyt", alpha=alpha)
    return Method(
        name="dyt",
        summary="tanh with learnable slope in place of each normalizer: squashes large values without statistics",
        reference="Zhu et al. 2025, section 4",
        weights_text="plain; He fan-in, dynamic tanh for the normalizer",
        initializer=DynamicTanhInit(alpha),
        skips=WITH_SEQUENCES,
        norm="tanh",
    )


def tfixup_encoder_scale(layers: int) -> float:
    """Return T-Fixup's scale of an encoder of N layers, 0.67 · N^(-1/4)."""
    return float(0.67 * layers**-0.25)


def tfixup_decoder_scale(layers: int) -> float:
    """Return T-Fixup's scale of a decoder of M layers and of the embeddings, (9M)^(-1/4)."""
    return float((9 * layers) ** -0.25)


def _tfixup_(ctx: InitContext) -> None:
    found = transformer_stacks(ctx.plan, "tfixup")
    xavier_(ctx, (*ctx.plan.stem, *ctx.plan.body))
    ctx.draw_embeddings_(tfixup_decoder_scale(found.decoder_layers or found.encoder_layers))
    for branch in found.encoder:
        scaled_xavier_(ctx, branch, tfixup_encoder_scale(found.encoder_layers))
    for branch in found.decoder:
        scaled_xavier_(ctx, branch, tfixup_decoder_scale(found.decoder_layers))
    ctx.default_classifier_()


@register
def tfixup() -> Method:
    """Xavier weights; value, output and feed-forward × 0.67·N^(-1/4) in the encoder, × (9M)^(-1/4) in the decoder.

    Embeddings are N(0, 1/d) × (9M)^(-1/4). There is neither layer norm nor warm-up.

    Reference: Huang, Pérez, Ba & Volkovs 2020, section 3.2.
    Differs: weights are normal instead of uniform. A model of one stack of N layers, which the paper does not have,
    takes the encoder's scale, and (9N)^(-1/4) for its embeddings. Embeddings of third-party models stay unchanged.
    """
    return Method(
        name="tfixup",
        summary="a Transformer's values, outputs, feed-forward layers and embeddings scaled down: no warm-up",
        reference="Huang et al. 2020, section 3.2",
        weights_text="plain; Xavier × 0.67·N^(-1/4) or (9M)^(-1/4), embeddings too",
        initializer=_tfixup_,
        skips=("sequence",),
    )


class DeepNormScales(NamedTuple):
    """DeepNorm's factors: α of the shortcut and β of the weights."""

    alpha: float
    beta: float


def deepnorm_encoder_scales(encoder: int, decoder: int) -> DeepNormScales:
    """Return 0.81·(N⁴M)^(1/16) and 0.87·(N⁴M)^(-1/16); for one stack of N layers, (2N)^(1/4) and (8N)^(-1/4).

    Reference: Wang 2022, Figure 2.

    >>> deepnorm_encoder_scales(8, 0).alpha
    2.0
    """
    if not decoder:
        return DeepNormScales(float((2 * encoder) ** 0.25), float((8 * encoder) ** -0.25))
    size = float((encoder**4 * decoder) ** (1 / 16))
    return DeepNormScales(0.81 * size, 0.87 / size)


def deepnorm_decoder_scales(decoder: int) -> DeepNormScales:
    """Return (3M)^(1/4) and (12M)^(-1/4) for a decoder of M layers that reads an encoder.

    Reference: Wang 2022, Figure 2.
    """
    return DeepNormScales(float((3 * decoder) ** 0.25), float((12 * decoder) ** -0.25))


def shortcut_scalar(ctx: InitContext, branch: Branch, method: str) -> ScalarMultiplier:
    """Return the scalar on a branch's shortcut; raise `ValueError` if the model has none."""
    residual = ctx.modules.get(branch.home)
    found = residual.a if isinstance(residual, Residual) else None
    if not isinstance(found, ScalarMultiplier):
        raise ValueError(
            f"method '{method}' expects a scalar on the shortcut of '{branch.name}', got none; "
            f"build the model with method='{method}'"
        )
    return found


def _deepnorm_(ctx: InitContext) -> None:
    found = transformer_stacks(ctx.plan, "deepnorm")
    xavier_(ctx, (*ctx.plan.stem, *ctx.plan.body))
    scales = deepnorm_encoder_scales(found.encoder_layers, found.decoder_layers)
    for branches, (alpha, beta) in (
        (found.encoder, scales),
        (found.decoder, deepnorm_decoder_scales(found.decoder_layers or 1)),
    ):
        for branch in branches:
            shortcut_scalar(ctx, branch, "deepnorm").set_(alpha)
            scaled_xavier_(ctx, branch, beta)
    ctx.default_classifier_()


@register
def deepnorm() -> Method:
    """x' = LN(α·x + f(x)) with Xavier weights, those of value, output and feed-forward × β.

    Reference: Wang, Ma, Dong, Huang, Zhang & Wei 2022, section 3 and Figure 2.
    """
    return Method(
        name="deepnorm",
        summary="layer norm after each sum, its shortcut scaled up and the branches scaled down by the depth",
        reference="Wang et al. 2022, Figure 2",
        kind="normalized",
        shortcut_text="α·x, α = (2N)^¼ or by encoder and decoder",
        weights_text="layernorm kept; Xavier × (8N)^(-1/4) or by encoder and decoder",
        rule=Rule(a=Law(1.0, text="(2N)^¼ or by encoder and decoder", set_by_initializer=True)),
        initializer=_deepnorm_,
        form="post",
        forms=("post",),
        skips=("sequence",),
        norm="layer",
    )


class _VarianceProfile:
    """1 + Σ Var[f] over the branches of a stack that have run; the 1 is the variance of the stack's input."""

    def __init__(self) -> None:
        self.variance = 1.0

    def write_(self, omega: ScalarMultiplier) -> None:
        """Set ω of the next branch."""
        omega.set_(self.variance**0.5)

    def count(self, out: Tensor) -> None:
        """Add the variance of a branch's output."""
        self.variance += out.double().var(unbiased=False).item()


def _admin_(ctx: InitContext) -> None:
    found = transformer_stacks(ctx.plan, "admin")
    inside = [layer for branch in ctx.plan.branches for layer in branch.layers]
    xavier_(ctx, (*ctx.plan.stem, *ctx.plan.body, *inside))
    ctx.default_classifier_()
    with ExitStack() as hooks:
        for branches in (found.encoder, found.decoder):
            profile = _VarianceProfile()
            for branch in branches:
                omega = shortcut_scalar(ctx, branch, "admin")
                block: Any = ctx.modules[branch.home]
                before = block.register_forward_pre_hook(lambda _m, _a, omega=omega, p=profile: p.write_(omega))
                after = block.branch.register_forward_hook(lambda _m, _a, out, p=profile: p.count(out))
                hooks.enter_context(before)
                hooks.enter_context(after)
        ctx.run_model()


@register
def admin() -> Method:
    """x' = LN(ω·x + f(x)) with ω learnable, from ω_i² = 1 + Σ_{j<i} Var[f_j(x_{j-1})] on one batch.

    The sum restarts in a decoder. One forward pass sets all ω: each branch already sees the ω of those before it.

    Reference: Liu, Liu, Gao, Chen & Han 2020, section 4.2; the 1, for the input, is from the authors' code.
    Differs: ω is one number per branch; the authors have a vector of equal numbers.
    """
    return Method(
        name="admin",
        summary="layer norm after each sum, its shortcut scaled by the variance of the branches before it on a batch",
        reference="Liu et al. 2020, section 4.2",
        kind="normalized",
        shortcut_text="ω·x, learnable, √(1 + Σ Var[f]) on a batch",
        weights_text="layernorm kept; Xavier",
        rule=Rule(a=Law(1.0, text="learnable, √(1 + Σ Var[f]) on a batch", learnable=True, set_by_initializer=True)),
        initializer=_admin_,
        form="post",
        forms=("post",),
        skips=("sequence",),
        norm="layer",
        needs_example=True,
    )
