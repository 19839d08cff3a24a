"""Networks with normalization, for comparison: the normalizers of the survey normdead, each with its weights."""

from __future__ import annotations

from dataclasses import replace

from normfree.methods.fixup import fused_xavier
from normfree.methods.initialize import InitContext
from normfree.methods.method import SKIPS_WITHOUT_SEQUENCES, WITH_SEQUENCES, Method
from normfree.methods.method_registry import register
from normfree.methods.standard_init import draw_normal_, he_fan_in_


def _method(name: str, summary: str, reference: str) -> Method:
    """Return the base record; each method normalizes through a layer, the weights, or the activation."""
    return Method(
        name=name,
        summary=summary,
        paper="normdead",
        reference=reference,
        kind="normalized",
        weights_text=f"{name} for comparison; He fan-in",
        initializer=he_fan_in_,
        skips=SKIPS_WITHOUT_SEQUENCES,
    )


@register
def batchnorm() -> Method:
    """Batch normalization. Reference: normdead, section 2.2 and Figure 4; Ioffe & Szegedy 2015."""
    summary = "statistics over the batch: growth becomes linear"
    reference = "normdead, section 2.2; Ioffe & Szegedy 2015"
    return replace(_method("batchnorm", summary, reference), paper="all", norm="batch")


@register
def batchnorm_convshort() -> Method:
    """Batch normalization with a 1×1 convolution in every shortcut, the baseline of `robust` and of its Table 1."""
    return replace(
        batchnorm(),
        name="batchnorm_convshort",
        summary="batch norm with a 1×1 convolution in every shortcut, the baseline of robust",
        paper="robust",
        reference="robust, Table 1 and Figure 3",
        shortcut_text="1×1 convolution of the pre-activated input, every block",
        weights_text="batchnorm for comparison; He fan-in",
        form="pre",
        skips=("residual",),
        shortcut="conv everywhere",
    )


@register
def layernorm(*, xavier: bool = False) -> Method:
    """Layer normalization. Reference: normdead, section 2.3; Ba 2016.

    With `xavier=true`, the branches of a Transformer are drawn as in the baseline of fixup's Table 3: by Xavier, with
    query, key and value as one projection. That baseline also has its norms after the sums: `form="post"`.
    """
    summary, reference = "statistics over all features of a sample", "normdead, section 2.3; Ba 2016"
    method = replace(_method("layernorm", summary, reference), norm="layer", skips=WITH_SEQUENCES)
    return replace(method, initializer=_xavier_branches_, skips=("sequence",)) if xavier else method


def _xavier_branches_(ctx: InitContext) -> None:
    he_fan_in_(ctx)
    for branch in ctx.plan.branches:
        for layer in branch.layers:
            ctx.set_(layer, fused_xavier(ctx, branch, layer))


@register
def rmsnorm() -> Method:
    """Division by the root mean square of a position's features. Reference: Zhang & Sennrich 2019, equation 4."""
    return replace(
        layernorm(),
        name="rmsnorm",
        summary="division by the root mean square of the features of each position of a sequence",
        paper="none",
        reference="Zhang & Sennrich 2019, equation 4",
        weights_text="rmsnorm for comparison; He fan-in",
        norm="rms",
        skips=("sequence",),
    )


@register
def groupnorm() -> Method:
    """Group normalization. Reference: normdead, section 2.3; Wu & He 2018."""
    summary, reference = "statistics over groups of channels of a sample", "normdead, section 2.3; Wu & He 2018"
    return replace(_method("groupnorm", summary, reference), norm="group")


@register
def instancenorm() -> Method:
    """Instance normalization. Reference: normdead, section 2.3; Ulyanov 2017."""
    summary, reference = "statistics over each channel of a sample", "normdead, section 2.3; Ulyanov 2017"
    return replace(_method("instancenorm", summary, reference), norm="instance", spatial_only=True)


@register
def spectralnorm() -> Method:
    """Weights over their largest singular value. Reference: normdead, section 2.3; Miyato 2018."""
    summary = "weights divided by their largest singular value"
    method = _method("spectralnorm", summary, "normdead, section 2.3; Miyato 2018")
    return replace(method, weights_text="spectral norm; He fan-in", weight_kind="spectral")


def _normprop_(ctx: InitContext) -> None:
    for layer, module in ctx.each(ctx.plan.hidden()):
        ctx.set_(layer, ctx.normal(layer))
        module.gain.fill_(1 / 1.21)  # type: ignore[operator]  # a weight-norm layer, checked by `initialize_`
    ctx.default_classifier_()


@register
def normprop() -> Method:
    """Rows of unit norm times 1/1.21, and a ReLU with zero mean and unit variance.

    Reference: normdead, section 2.3; Arpit 2016, sections 3.3 and 3.4 (1.21 for the Jacobian's singular values).
    """
    summary = "statistics computed in expectation and built into layer and activation"
    return replace(
        _method("normprop", summary, "normdead, section 2.3; Arpit 2016"),
        weights_text="weight norm, g = 1/1.21; ReLU made zero-mean, unit-variance",
        initializer=_normprop_,
        weight_kind="weight_norm",
        activation="normprop",
    )


def _lecun_fan_in_(ctx: InitContext) -> None:
    draw_normal_(ctx, lambda layer, fan_in, fan_out: 1.0 / fan_in)


@register
def selu(*, dropout: float = 0.0) -> Method:
    """SELU with Var[W] = 1/fan_in, and alpha dropout with the given probability.

    Reference: normdead, section 2.3; Klambauer 2017.
    """
    if not 0 <= dropout < 1:
        raise ValueError(f"expected option 'dropout' of method 'selu' in [0, 1), got {dropout:g}")
    summary = "an activation with a fixed point at zero mean and unit variance"
    return replace(
        _method("selu", summary, "normdead, section 2.3; Klambauer 2017"),
        weights_text="plain; N(0, 1/fan_in), SELU, alpha dropout",
        initializer=_lecun_fan_in_,
        activation="selu",
        dropout=dropout,
    )
