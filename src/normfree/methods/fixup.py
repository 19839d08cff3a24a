"""Fixup: branches scaled by L^(-1/(2m-2)), last layers and classifier 0, scalar biases and multipliers.

In a Transformer the branches are sorted into encoder and decoder, attention and feed-forward; the methods of
`transformer_methods` sort them, too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from normfree import theory
from normfree.methods.initialize import InitContext, gain
from normfree.methods.method import (
    NONE,
    ONE,
    RESIDUAL_SUMS,
    Law,
    Method,
    Rule,
    ScalarRate,
    require_choice,
    require_positive,
)
from normfree.methods.method_registry import register
from normfree.plan import Branch, Layer, ResidualPlan


@dataclass(frozen=True)
class FixupInit:
    """Initializer of rules 1 and 2: He fan-out × L^(-1/(2m-2)) in the branches, last layers and classifier 0.

    Layers that the paper's networks do not have get He fan-out without the factor, as shortcuts do: further layers of
    the stem, layers between stages, bounded gates, and branches that merge signals. If an activation follows the last
    layer of a branch, the layer is scaled like the others instead of set to 0, because a ReLU of 0 has no gradient.

    Args:
        scale: A further factor of the branches' weights.
        bounded: Whether the softmax of an attention counts as a bounded gate.
        xavier: Whether the branches of a Transformer are drawn by Xavier, as in the authors' code.
        zero_last: Whether the last layer of a branch is 0; else it is scaled like the others.
        zero_classifier: Whether the classifier is 0; else it keeps torch's default.
    """

    scale: float = 1.0
    bounded: bool = False
    xavier: bool = True
    zero_last: bool = True
    zero_classifier: bool = True

    def __call__(self, ctx: InitContext) -> None:
        plan = ctx.plan
        xavier = self.xavier and is_transformer(plan)
        for layer in plan.stem[:1]:
            ctx.default_(layer)
        for layer in plan.stem[1:]:
            _he_fan_out_(ctx, layer)
        for branch in plan.branches:
            for layer in branch.shortcut_layers:
                _he_fan_out_(ctx, layer)
            for layer in branch.layers:
                self._branch_layer_(ctx, branch, layer, xavier=xavier)
        for layer in plan.body:
            _he_fan_out_(ctx, layer)
        for layer in plan.classifier:
            if self.zero_classifier and not layer.must_be_nonzero:
                ctx.zero_(layer)
            else:
                ctx.default_(layer)

    def _branch_layer_(self, ctx: InitContext, branch: Branch, layer: Layer, *, xavier: bool) -> None:
        """Initialize one layer of a branch."""
        total = len(ctx.plan.branches)
        # A multiplier after an activation at the end of the branch counts as a layer.
        degree = branch.degree + any(last.must_be_nonzero for last in branch.last_layers)
        if self.zero_last and layer in branch.last_layers and not layer.must_be_nonzero and not branch.merges_signals:
            ctx.zero_(layer)
        elif layer.gate or branch.merges_signals:
            _he_fan_out_(ctx, layer)
        else:
            weight = fused_xavier(ctx, branch, layer) if xavier else _he_fan_out(ctx, layer)
            bounded = self.bounded and branch.degree == ATTENTION
            scaled = linear_part(branch, layer, weight) if bounded else weight
            scaled.mul_(self.scale * theory.fixup_scale(total, 2 if bounded else degree))
            ctx.set_(layer, weight)


def _he_fan_out(ctx: InitContext, layer: Layer) -> Tensor:
    return ctx.normal(layer, gain(layer) / ctx.fans(layer)[1])


def _he_fan_out_(ctx: InitContext, layer: Layer) -> None:
    ctx.set_(layer, _he_fan_out(ctx, layer))


@register
def fixup(
    *,
    bias: bool = True,
    scale: float = 1.0,
    branches: bool = True,
    scalar_lr: str = "auto",
    multiplier: bool = True,
    zero_last: bool = True,
    zero_classifier: bool = True,
    slow_biases: bool = True,
    transformer: str = "authors",
) -> Method:
    """x' = p(x + β·f(x) + δ), with learnable β (initially 1) and δ (initially 0).

    A scalar bias precedes every layer and activation.

    The paper's ablations are options: `bias=false`; `scale=0.1,bias=false` and `scale=10,bias=false`; `branches=false`.
    `multiplier=false` leaves out the multiplier of a branch, and `zero_classifier=false` the zeros in the classifier.
    `zero_last=false` scales the last layer of a branch like the others instead of setting it to 0 (the first option
    after equation 5). These three with `bias=false` are rule 2 alone.

    `scalar_lr` is the learning rate of the scalars, relative to that of the weights. `auto` is as in the authors' code:
    a tenth, but 1 in a Transformer. Use `10/L` from 1,000 layers on: the biases all move together and would change the
    output by Θ(ηL).

    The biases of weight layers learn at the scalars' rate, too, as in the authors' parameter groups. In Fixup's ResNets
    that is only the classifier's bias. With `slow_biases=false` they learn at the weights' rate, as in release 0.1.

    Transformers are those of the authors' code. Linear layers have no bias vectors (footnote 3). A branch has a scalar
    bias at its entry and a β; a feed-forward branch also has a scalar bias before and after the activation; no δ
    follows the sum. A bias and a multiplier end the encoder that a decoder reads. An attention counts as four layers
    (see `fixup_bounded`); query, key and value are drawn as one Xavier projection, feed-forward layers by Xavier.
    `transformer=biased` is what release 0.1 had: a bias vector in every linear layer but the key's, a scalar bias
    before every layer, δ after every sum, and He fan-out weights.

    Reference: fixup, section 3, rules 1 to 3 and equation 5; appendix C.1 for the ablations.
    Differs: in Transformers L is the number of all branches, as in the text; the authors' code has 12 in its place in
    the attention over the memory, at any depth. A classifier tied to the embeddings is not zero, so such a network
    starts above the loss of a uniform guess. A converted Transformer keeps its bias vectors and gets δ.
    """
    require_positive("fixup", scale=scale)
    require_choice("fixup", "transformer", transformer, ("authors", "biased"))
    return Method(
        name="fixup",
        summary="rescaled initialization that updates the network by Θ(η) per step at any depth",
        paper="fixup",
        reference="fixup, section 3, equation 5",
        shortcut_text="identity, or of x + b at transitions",
        weights_text="plain; He fan-out (Transformers: Xavier) × L^(-1/(2m-2)), last and classifier 0, scalar biases",
        rule=Rule(
            beta=Law(1.0, learnable=True) if branches and multiplier else ONE,
            delta=Law(0.0, learnable=True) if bias else NONE,
        ),
        initializer=FixupInit(
            scale, xavier=transformer == "authors", zero_last=zero_last, zero_classifier=zero_classifier
        ),
        skips=RESIDUAL_SUMS,
        scalar_biases=bias,
        transformer_biases="scalars" if transformer == "authors" else "both",
        remove_branches=not branches,
        scalar_rate=ScalarRate(0.1, in_transformers=1.0) if scalar_lr == "auto" else ScalarRate.parse(scalar_lr),
        slow_biases=slow_biases,
    )


@register
def fixup_bounded(*, scalar_lr: str = "auto", transformer: str = "authors") -> Method:
    """`fixup` with m = 2 for attention: values × L^(-1/2), queries and keys without a factor.

    By Fixup's equation 5, the input of a branch's last layer must shrink as L^(-1/2). With m = 4, Fixup scales query,
    key and value by L^(-1/6) each; their product would shrink as L^(-1/2). But an attention does not multiply the
    three: the softmax bounds the product of query and key. So the input of the output layer shrinks with the values
    alone, as L^(-1/6), and one step changes the function by Θ(η·L^(2/3)).

    The options are those of `fixup`.

    Reference: none; it completes fixup, section 3, equation 5, for bounded factors.
    """
    return replace(
        fixup(scalar_lr=scalar_lr, slow_biases=False, transformer=transformer),
        name="fixup_bounded",
        summary="fixup that counts an attention as two layers, because its softmax is bounded: Θ(η) for Transformers",
        paper="none",
        reference="ours; docs/design.md",
        shortcut_text="identity",
        weights_text="plain; as fixup, but values × L^(-1/2), queries and keys × 1",
        initializer=FixupInit(bounded=True, xavier=transformer == "authors"),
        skips=("sequence",),
    )


ATTENTION = 4  # the degree of an attention branch: query, key, value, output


@dataclass(frozen=True)
class TransformerStacks:
    """The branches of an encoder and of the decoder that reads it.

    In a model of one stack, encoder or decoder alone, all branches are in `encoder`: no layer attends to a memory.
    """

    encoder: tuple[Branch, ...]
    decoder: tuple[Branch, ...]

    @property
    def encoder_layers(self) -> int:
        """N: an encoder layer has one attention and one feed-forward branch."""
        return len(self.encoder) // 2

    @property
    def decoder_layers(self) -> int:
        """M: a decoder layer also has an attention over the memory."""
        return len(self.decoder) // 3


def transformer_stacks(plan: ResidualPlan, method: str) -> TransformerStacks:
    """Split the branches of a plan: the decoder begins where two attentions follow each other (self, then memory).

    Raises:
        ValueError: If the branches do not form Transformer layers; the message names `method`.
    """
    found = _split(plan)
    if found is None:
        raise ValueError(
            f"method '{method}' expects layers of attention and feed-forward branches, as a Transformer has, got "
            f"branches of the degrees {', '.join(str(b.degree) for b in plan.branches[:8])}; use 'fixup' for this model"
        )
    return found


def is_transformer(plan: ResidualPlan) -> bool:
    """Whether the branches of a plan are the attention and feed-forward layers of a Transformer."""
    return bool(plan.branches) and _split(plan) is not None


def _split(plan: ResidualPlan) -> TransformerStacks | None:
    attends = [branch.degree == ATTENTION for branch in plan.branches]
    two = next((i for i in range(len(attends) - 1) if attends[i] and attends[i + 1]), len(attends))
    found = TransformerStacks(plan.branches[:two], plan.branches[two:])
    expected = [True, False] * found.encoder_layers + [True, True, False] * found.decoder_layers
    return found if attends == expected else None


def linear_part(branch: Branch, layer: Layer, weight: Tensor) -> Tensor:
    """Return the rows of a layer's weight on which the output depends linearly: all but those of queries and keys.

    The layers of an attention must run in the order query, key, value, output, or one layer must hold query, key and
    value as three parts.
    """
    if branch.degree != ATTENTION or layer in branch.last_layers:
        return weight
    if layer.parts == 3:
        return weight[2 * len(weight) // 3 :]
    inside = [inner for inner in branch.layers if inner not in branch.last_layers and not inner.gate]
    return weight if layer == inside[-1] else weight[:0]


def fused_xavier(ctx: InitContext, branch: Branch, layer: Layer) -> Tensor:
    """Draw a layer of a Transformer from Xavier's uniform distribution, as fairseq of 2019 does.

    Query, key and value count as one projection with three times the outputs, so their variance is 2/(fan_in +
    3·fan_out). It is 2/(fan_in + fan_out) in the other layers.
    """
    fan_in, fan_out = ctx.fans(layer)
    parts = 3 if branch.degree == ATTENTION and layer not in branch.last_layers else 1
    return ctx.uniform(layer, 2.0 / (fan_in + parts * fan_out))


def scaled_xavier_(ctx: InitContext, branch: Branch, scale: float) -> None:
    """Set Xavier weights in a branch; those of value, output and feed-forward layers are multiplied by `scale`."""
    for layer in branch.layers:
        weight = ctx.xavier(layer)
        linear_part(branch, layer, weight).mul_(scale)
        ctx.set_(layer, weight)
