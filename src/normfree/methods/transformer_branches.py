"""How the branches of a Transformer divide: attention and feed-forward, encoder and decoder."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from normfree.methods.init_context import InitContext
from normfree.plan import Branch, Layer, ResidualPlan

ATTENTION = 4  # the degree of an attention branch: query, key, value, output


@dataclass(frozen=True)
class Stacks:
    """The branches of an encoder and of a decoder that reads it, with the number of layers of each.

    A model of one stack, encoder or decoder alone, is all `encoder`: its layers have no attention over a memory.
    """

    encoder: tuple[Branch, ...]
    decoder: tuple[Branch, ...]

    @property
    def encoder_layers(self) -> int:
        """N: an encoder layer is one attention and one feed-forward branch."""
        return len(self.encoder) // 2

    @property
    def decoder_layers(self) -> int:
        """M: a decoder layer has an attention over the memory besides."""
        return len(self.decoder) // 3


def stacks(plan: ResidualPlan, method: str) -> Stacks:
    """Read the stacks off a plan: a decoder's attention over itself is followed by one over the memory.

    Raises `ValueError` when the branches are no sequence of such layers.
    """
    attends = [branch.depth == ATTENTION for branch in plan.branches]
    two = next((i for i in range(len(attends) - 1) if attends[i] and attends[i + 1]), len(attends))
    found = Stacks(plan.branches[:two], plan.branches[two:])
    expected = [True, False] * found.encoder_layers + [True, True, False] * found.decoder_layers
    if attends != expected:
        raise ValueError(
            f"method '{method}' expects layers of attention and feed-forward branches, as a Transformer has, got "
            f"branches of the degrees {', '.join(str(b.depth) for b in plan.branches[:8])}; use 'fixup' for this model"
        )
    return found


def linear_part(branch: Branch, layer: Layer, weight: Tensor) -> Tensor:
    """The rows of a layer's weight that a branch is linear in: none of an attention's queries and keys.

    The layers of an attention are taken in the order they run, query, key, value, output; or query, key and value are
    three parts of one.
    """
    if branch.depth != ATTENTION or layer in branch.ends:
        return weight
    if layer.parts == 3:
        return weight[2 * len(weight) // 3 :]
    inside = [inner for inner in branch.layers if inner not in branch.ends and not inner.gate]
    return weight if layer == inside[-1] else weight[:0]


def scaled_xavier_(ctx: InitContext, branch: Branch, scale: float) -> None:
    """Xavier's weights for a branch, those of value, output and feed-forward layers times `scale`."""
    for layer in branch.layers:
        weight = ctx.xavier(layer)
        linear_part(branch, layer, weight).mul_(scale)
        ctx.set_(layer, weight)
