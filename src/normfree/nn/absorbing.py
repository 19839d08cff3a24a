"""Weight layers that can take in the scalars around them: a bias b before the layer, and a multiplier β behind it.

β · (W (x + b) + v) = (β W) x + β (v + b W 1): the same function, and no activation is read or kept for a scalar.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import pairwise

from torch import nn

from normfree.nn.attention import Attention
from normfree.nn.residual import Residual
from normfree.nn.scalars import ScalarBias, ScalarMultiplier
from normfree.nn.weight import weight_kind


@dataclass(frozen=True)
class Absorbing:
    """A layer, the scalar bias that it reads, and the block whose β multiplies what it puts out."""

    layer: nn.Linear | nn.Conv2d
    bias: ScalarBias | None
    block: Residual | None

    @property
    def beta(self) -> ScalarMultiplier | None:
        """The multiplier behind the layer."""
        return None if self.block is None else self.block.beta  # type: ignore[return-value]


def absorbing_layers(model: nn.Module, short: Collection[int] | None = None) -> list[Absorbing]:
    """The layers of residual branches that could take in a scalar; of all, or of those with weights in `short`, by id.

    All that they hold learns, and nothing else uses it. A bias is taken in by linear layers that have a bias vector,
    all that read it or none. A convolution pads with zeros, to which no bias was added, so it takes in a multiplier
    only.
    """
    owners = Counter(id(p) for module in model.modules() for p in module._parameters.values())
    biases: dict[nn.Module, ScalarBias] = {}
    blocks: dict[nn.Module, Residual] = {}
    for block in model.modules():
        if not isinstance(block, Residual) or block.branch is None:
            continue
        for bias, layers in _readers(block):
            if bias.learnable and all(_plain(layer) and layer.bias is not None for layer in layers):
                biases.update(dict.fromkeys(layers, bias))
        last = _last(block.branch)
        if _plain(last) and isinstance(block.beta, ScalarMultiplier) and block.beta.learnable:
            blocks[last] = block

    def fits(found: Absorbing) -> bool:
        weights = [p for p in (found.layer.weight, found.layer.bias) if p is not None]
        scalars = [scalar.value for scalar in (found.bias, found.beta) if scalar is not None]
        alone = all(owners[id(p)] == 1 and p.requires_grad for p in (*weights, *scalars))
        return alone and (short is None or all(id(p) in short for p in weights))

    every = [Absorbing(layer, biases.get(layer), blocks.get(layer)) for layer in {**biases, **blocks}]  # type: ignore[arg-type]
    kept_out = {found.bias for found in every if found.bias is not None and not fits(found)}
    return [found for found in every if fits(found) and found.bias not in kept_out]


def _readers(block: Residual) -> Iterator[tuple[ScalarBias, list[nn.Linear]]]:
    """The scalar biases of a block, each with the linear layers that read it and nothing else.

    Keys need no bias: it adds the same to every logit of a query, and leaves the attention as it is.
    """
    branch = block.branch
    entry = [*block.entry][-1:] if isinstance(block.entry, nn.Sequential) else [block.entry]
    before = [] if block.shortcut_reads_entry else [bias for bias in entry if isinstance(bias, ScalarBias)]
    if isinstance(branch, Attention):
        for bias in before:
            yield bias, [branch.q] if branch.cross else [branch.q, branch.v]
        if branch.memory_bias is not None:
            yield branch.memory_bias, [branch.v]
        if isinstance(branch.bias, ScalarBias):
            yield branch.bias, [branch.out]
    elif isinstance(branch, nn.Sequential):
        for bias, layer in pairwise([*before, *branch]):
            if isinstance(bias, ScalarBias) and isinstance(layer, nn.Linear):
                yield bias, [layer]


def _last(branch: nn.Module) -> nn.Module:
    """The last layer of a branch; dropout behind it does not mind a multiplier."""
    if isinstance(branch, Attention):
        return branch.out
    parts = [part for part in branch if not isinstance(part, nn.Dropout)] if isinstance(branch, nn.Sequential) else []
    return parts[-1] if parts else branch


def _plain(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Conv2d | nn.Linear) and weight_kind(layer) == "plain"
