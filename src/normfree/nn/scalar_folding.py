"""Weight layers that can take in the scalars around them: a bias b before the layer, and a multiplier β behind it.

β · (W (x + b) + v) = (β W) x + β (v + b W 1): the same function, and no activation is read or kept for a scalar. The δ
behind a residual sum can go to the biases that read the stream after it, where all that reads it has one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor, nn

from normfree.nn.attention import Attention
from normfree.nn.residual import Residual
from normfree.nn.scalars import ScalarBias, ScalarMultiplier
from normfree.nn.weight_layers import weight_kind


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
    owners = _owners(model)

    def fits(layer: nn.Module) -> bool:
        held = layer._parameters.values()
        here = short is None or all(id(p) in short for p in held if p is not None)
        return here and _plain(layer) and all(_learns_alone(p, owners) for p in held if p is not None)

    biases: dict[nn.Module, ScalarBias] = {}
    blocks: dict[nn.Module, Residual] = {}
    for block in model.modules():
        if not isinstance(block, Residual) or block.branch is None:
            continue
        for bias, layers in _readers(block):
            able = all(fits(layer) and layer.bias is not None for layer in layers)
            if able and _learns_alone(bias.value, owners):
                biases.update(dict.fromkeys(layers, bias))
        last, beta = _last(block.branch), block.beta
        if fits(last) and isinstance(beta, ScalarMultiplier) and _learns_alone(beta.value, owners):
            blocks[last] = block
    return [Absorbing(layer, biases.get(layer), blocks.get(layer)) for layer in {**biases, **blocks}]  # type: ignore[arg-type]


def carried_biases(
    model: nn.Module, streams: Iterable[Stream], taken: Collection[ScalarBias]
) -> dict[ScalarBias, list[ScalarBias]]:
    """The scalar biases that read a stream of the model, each with the δ before it that it can take over.

    In a stream all δ move or none: every block must begin with a bias that layers took in (`taken`), and its end be
    read by scalar biases. Keys need none, as in `absorbing_layers`.
    """
    owners = _owners(model)
    carried: dict[ScalarBias, list[ScalarBias]] = {}
    for stream in streams:
        deltas = [block.delta for block in stream.blocks]
        entries = [before[0] if len(before := _entries(block)) == 1 else None for block in stream.blocks]
        moving = [*deltas, *stream.ends]
        if (
            stream.ends
            and all(isinstance(bias, ScalarBias) and _learns_alone(bias.value, owners) for bias in moving)
            and all(_passes_on(block) for block in stream.blocks)
            and all(entry in taken for entry in entries)
        ):
            readers = [*enumerate(entries), *((len(deltas), end) for end in stream.ends)]
            carried |= {reader: deltas[:before] for before, reader in readers if before}  # type: ignore[misc]
    return carried


def _owners(model: nn.Module) -> Counter[int]:
    """How often each parameter is held, by id; a module that has several names counts as often."""
    named = model.named_modules(remove_duplicate=False)
    return Counter(id(p) for _, module in named for p in module._parameters.values())


def _learns_alone(value: Tensor, owners: Counter[int]) -> bool:
    return value.requires_grad and owners[id(value)] == 1


def _passes_on(block: Residual) -> bool:
    """Whether what is added to the input of a block is added to its output, but for what its branch makes of it."""
    around = (block.shortcut, block.alpha, block.a, block.c, block.exit)
    return all(isinstance(part, nn.Identity) for part in around)


def _entries(block: Residual) -> list[nn.Module]:
    """What stands before the branch, in order."""
    return [*block.entry] if isinstance(block.entry, nn.Sequential) else [block.entry]


def _readers(block: Residual) -> Iterator[tuple[ScalarBias, list[nn.Linear]]]:
    """The scalar biases of a block, each with the linear layers that read it and nothing else.

    Keys need no bias: it adds the same to every logit of a query, and leaves the attention as it is.
    """
    branch = block.branch
    last = _entries(block)[-1:]
    before = [] if block.shortcut_reads_entry else [bias for bias in last if isinstance(bias, ScalarBias)]
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
