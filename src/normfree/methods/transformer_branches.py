"""The branches of a Transformer, sorted into encoder and decoder, attention and feed-forward."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from normfree.methods.initialize import InitContext
from normfree.plan import Branch, Layer, ResidualPlan

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
            f"branches of the degrees {', '.join(str(b.depth) for b in plan.branches[:8])}; use 'fixup' for this model"
        )
    return found


def is_transformer(plan: ResidualPlan) -> bool:
    """Whether the branches of a plan are the attention and feed-forward layers of a Transformer."""
    return bool(plan.branches) and _split(plan) is not None


def _split(plan: ResidualPlan) -> TransformerStacks | None:
    attends = [branch.depth == ATTENTION for branch in plan.branches]
    two = next((i for i in range(len(attends) - 1) if attends[i] and attends[i + 1]), len(attends))
    found = TransformerStacks(plan.branches[:two], plan.branches[two:])
    expected = [True, False] * found.encoder_layers + [True, True, False] * found.decoder_layers
    return found if attends == expected else None


def linear_part(branch: Branch, layer: Layer, weight: Tensor) -> Tensor:
    """Return the rows of a layer's weight that enter the output linearly: all but those of queries and keys.

    An attention's layers are assumed to run in the order query, key, value, output; or one layer holds query, key and
    value as three parts.
    """
    if branch.depth != ATTENTION or layer in branch.ends:
        return weight
    if layer.parts == 3:
        return weight[2 * len(weight) // 3 :]
    inside = [inner for inner in branch.layers if inner not in branch.ends and not inner.gate]
    return weight if layer == inside[-1] else weight[:0]


def fused_xavier(ctx: InitContext, branch: Branch, layer: Layer) -> Tensor:
    """Draw a layer of a Transformer from Xavier's uniform distribution, as fairseq of 2019 does.

    Query, key and value count as one projection with three times the outputs, so their variance is 2/(fan_in +
    3·fan_out). It is 2/(fan_in + fan_out) in the other layers.
    """
    fan_in, fan_out = ctx.fans(layer)
    parts = 3 if branch.depth == ATTENTION and layer not in branch.ends else 1
    return ctx.uniform(layer, 2.0 / (fan_in + parts * fan_out))


def scaled_xavier_(ctx: InitContext, branch: Branch, scale: float) -> None:
    """Set Xavier weights in a branch; those of value, output and feed-forward layers are multiplied by `scale`."""
    for layer in branch.layers:
        weight = ctx.xavier(layer)
        linear_part(branch, layer, weight).mul_(scale)
        ctx.set_(layer, weight)
