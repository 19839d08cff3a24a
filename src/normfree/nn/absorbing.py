"""Weight layers that can take in the scalars around them: a bias b before the layer, and a multiplier β behind it.

β · (W (x + b) + v) = (β W) x + β (v + b W 1): the same function, and no activation is read or kept for a scalar. The δ
behind a residual sum can go to the biases that read the stream after it, where all that reads it has one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
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


@dataclass(frozen=True)
class Stream:
    """Residual sums in order, each of which reads what the one before puts out, and the modules that read the last."""

    blocks: Sequence[Residual]
    ends: Sequence[nn.Module | None]


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


def carried_biases(model: nn.Module, taken: Collection[ScalarBias]) -> dict[ScalarBias, list[ScalarBias]]:
    """The scalar biases that read a stream of the model, each with the δ before it that it can take over.

    A model tells its streams by `streams()`. In each, all of its δ move or none: every sum but the first must be read
    by biases that layers took in (`taken`), and its end by scalar biases. Keys need none, as in `absorbing_layers`.
    """
    carried: dict[ScalarBias, list[ScalarBias]] = {}
    for stream in getattr(model, "streams", list)():
        deltas = [block.delta for block in stream.blocks]
        entries = [_entry(block) for block in stream.blocks]
        if (
            all(isinstance(delta, ScalarBias) and delta.learnable and delta.value.requires_grad for delta in deltas)
            and all(_passes_on(block) for block in stream.blocks)
            and all(entry in taken for entry in entries)
            and stream.ends
            and all(isinstance(end, ScalarBias) for end in stream.ends)
        ):
            readers = [*enumerate(entries), *((len(deltas), end) for end in stream.ends)]
            carried |= {reader: deltas[:before] for before, reader in readers if before}
    return carried


def _passes_on(block: Residual) -> bool:
    """Whether what is added to the input of a block is added to its output, but for what its branch makes of it."""
    around = (block.shortcut, block.alpha, block.a, block.c, block.exit)
    return all(isinstance(part, nn.Identity) for part in around)


def _entry(block: Residual) -> nn.Module | None:
    """What stands before the branch, if it is one module."""
    parts = [*block.entry] if isinstance(block.entry, nn.Sequential) else [block.entry]
    return parts[0] if len(parts) == 1 else None


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
