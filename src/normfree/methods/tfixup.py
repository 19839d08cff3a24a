"""T-Fixup: a Transformer without layer norm and without warm-up, by the scale of values, outputs and embeddings."""

from __future__ import annotations

from normfree.methods.init_context import InitContext
from normfree.methods.method import Method
from normfree.methods.plain import xavier_
from normfree.methods.registry import register
from normfree.methods.transformer_branches import scaled_xavier_, stacks


def encoder_scale(layers: int) -> float:
    """0.67 · N^(-1/4)."""
    return float(0.67 * layers**-0.25)


def decoder_scale(layers: int) -> float:
    """(9M)^(-1/4), which is also that of the embeddings."""
    return float((9 * layers) ** -0.25)


def _tfixup_(ctx: InitContext) -> None:
    found = stacks(ctx.plan, "tfixup")
    xavier_(ctx, (*ctx.plan.stem, *ctx.plan.body))
    ctx.embed_(decoder_scale(found.decoder_layers or found.encoder_layers))
    for branch in found.encoder:
        scaled_xavier_(ctx, branch, encoder_scale(found.encoder_layers))
    for branch in found.decoder:
        scaled_xavier_(ctx, branch, decoder_scale(found.decoder_layers))
    ctx.default_classifier_()


@register
def tfixup() -> Method:
    """Xavier's weights; value, output and feed-forward × 0.67·N^(-1/4) in the encoder, × (9M)^(-1/4) in the decoder.

    Embeddings are N(0, 1/d) × (9M)^(-1/4). Neither layer norm nor warm-up.

    Reference: Huang, Pérez, Ba & Volkovs 2020, section 3.2.
    Differs: drawn from a normal distribution instead of a uniform one; a model of one stack of N layers, which the
    paper does not have, takes the encoder's scale and (9N)^(-1/4) for its embeddings. The embeddings of other people's
    models are left alone.
    """
    return Method(
        name="tfixup",
        summary="a Transformer's values, outputs, feed-forward layers and embeddings scaled down: no warm-up",
        paper="none",
        reference="Huang et al. 2020, section 3.2",
        h="identity",
        weights="plain; Xavier × 0.67·N^(-1/4) or (9M)^(-1/4), embeddings too",
        initializer=_tfixup_,
        skips=("sequence",),
    )
