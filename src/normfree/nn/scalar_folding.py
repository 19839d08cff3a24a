"""Weight layers that can take in the scalars around them: a bias b before the layer, and a multiplier β behind it.

β · (W (x + b) + v) = (β W) x + β (v + b W 1): the same function, and no activation is read or kept for a scalar. The δ
behind a residual sum can go to the biases that read the stream after it, where all that reads it has one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from normfree.nn.attention import Attention
from normfree.nn.residual import Residual
from normfree.nn.scalars import ScalarBias, ScalarMultiplier
from normfree.nn.weight_layers import weight_kind


@dataclass(frozen=True)
class FoldedLayer:
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


def foldable_layers(model: nn.Module, short: Collection[int] | None = None) -> list[FoldedLayer]:
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
    return [FoldedLayer(layer, biases.get(layer), blocks.get(layer)) for layer in {**biases, **blocks}]  # type: ignore[arg-type]


def carried_biases(
    model: nn.Module, streams: Iterable[Stream], taken: Collection[ScalarBias]
) -> dict[ScalarBias, list[ScalarBias]]:
    """The scalar biases that read a stream of the model, each with the δ before it that it can take over.

    In a stream all δ move or none: every block must begin with a bias that layers took in (`taken`), and its end be
    read by scalar biases. Keys need none, as in `foldable_layers`.
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


_ALIGN = 64  # elements; the kernels of tensor cores want their operands on such addresses


def padded(size: int) -> int:
    """The elements that so many take in the vectors."""
    return -(-size // _ALIGN) * _ALIGN


class Placed(NamedTuple):
    """A parameter, where it begins in the masters, and where in the computing vector, if its type is short."""

    parameter: nn.Parameter
    start: int
    short: int | None


class _Layer(NamedTuple):
    """A layer that takes in scalars, and where its weight begins in the masters and in the computing vector."""

    found: FoldedLayer
    start: int
    short: int


@dataclass(frozen=True)
class Run:
    """Layers of one shape that take in the same scalars and whose weights W lie side by side.

    `masters` and `computing` are where their weights are, `layers` their numbers among all layers, and `elements` those
    of their bias vectors v among the elements of all vectors.
    """

    shape: torch.Size
    has_bias: bool
    has_beta: bool
    has_vector: bool
    masters: slice
    computing: slice
    layers: slice
    elements: slice

    def rows(self, vector: Tensor, stretch: slice) -> Tensor:
        """The weights of a vector, one a row."""
        return vector[stretch].view(-1, padded(self.shape.numel()))

    def matrices(self, vector: Tensor) -> Tensor:
        """The weights (layers, outputs, inputs) of a vector like the masters."""
        return self.rows(vector, self.masters)[:, : self.shape.numel()].view(-1, *self.shape)

    def vectors(self, elements: Tensor) -> Tensor:
        """The part (…, layers, outputs) of what is known of the elements of all vectors."""
        own: Tensor = elements[..., self.elements]
        return own.view(*own.shape[:-1], -1, self.shape[0])


class ScalarFolding:
    """All layers that take in scalars. What many layers need is gathered at once, since a small kernel costs time, too.

    Between `publish_` and `finish_` it remembers β of every layer, and of every element of the bias vectors β, b, W 1
    and v + b W 1; a layer without a scalar has 1 and 0 in its place. `values` are the masters. To a bias b belongs the
    sum of the δ that it has `carried`; one that no layer takes in gets it as a tensor.
    """

    def __init__(
        self,
        placed: Sequence[Placed],
        absorbing: Mapping[int, FoldedLayer],
        values: Tensor,
        carried: Mapping[ScalarBias, Sequence[ScalarBias]],
    ) -> None:
        starts = {id(place.parameter): place.start for place in placed}
        shorts = {id(place.parameter): place.short for place in placed if place.short is not None}
        layers = [_Layer(absorbing[i], starts[i], shorts[i]) for i in starts if i in absorbing]
        owned = [layer.found for layer in layers]
        self.runs = list(_runs(layers))
        self.carried = list(dict.fromkeys(delta for deltas in carried.values() for delta in deltas))
        taken = [found.bias for found in owned if found.bias is not None]
        self.ends = [reader for reader in carried if reader not in {*taken}]
        self.at_ends = values.new_zeros(len(self.ends))

        def numbers(found: Iterable[int]) -> Tensor:
            return torch.tensor([*found], device=values.device, dtype=torch.int64)

        def at(scalars: Iterable[ScalarBias | ScalarMultiplier]) -> Tensor:
            return numbers(starts[id(scalar.value)] for scalar in scalars)

        self._biases, self._deltas, self._ends = at(taken), at(self.carried), at(self.ends)
        self._betas = at(found.beta for found in owned if found.beta is not None)
        self._with_bias = numbers(i for i, found in enumerate(owned) if found.bias is not None)
        self._with_beta = numbers(i for i, found in enumerate(owned) if found.beta is not None)
        self._to_layers, self._to_ends = (_shares(rs, self.carried, carried).to(values) for rs in (taken, self.ends))
        vectors = [(i, found.layer.bias) for i, found in enumerate(owned) if found.layer.bias is not None]

        def elements_at(where: Mapping[int, int]) -> Tensor:
            """The places of all elements of all bias vectors, given those where the vectors begin."""
            begins = ((where[id(vector)], len(vector)) for _, vector in vectors)
            return numbers(i for begin, size in begins for i in range(begin, begin + size))

        self._vectors, self._computing = elements_at(starts), elements_at(shorts)
        self._layer_of = numbers(i for i, vector in vectors for _ in range(len(vector)))
        self._beta, self._bias = values.new_ones(len(owned)), values.new_zeros(len(owned))
        self._of_scalars = values.new_zeros(2, len(owned))  # the gradients of β and b, by layer
        elements = values.new_zeros(4, len(self._layer_of))
        self._sums, self._shifted, self._element_beta, self._element_bias = elements

    def publish_(self, values: Tensor, computing: Tensor) -> None:
        """Write β W and β (v + b W 1) where they compute, and what the ends have carried."""
        self._beta[self._with_beta] = values[self._betas]
        biases = values[self._biases]
        if self.carried:
            deltas = values[self._deltas]
            biases += self._to_layers @ deltas
            torch.mv(self._to_ends, deltas, out=self.at_ends)
        self._bias[self._with_bias] = biases
        for run in self.runs:
            if run.has_beta:
                weights = run.rows(values, run.masters)
                torch.mul(weights, self._beta[run.layers].unsqueeze(1), out=run.rows(computing, run.computing))
            if run.has_bias:
                torch.sum(run.matrices(values), 2, out=run.vectors(self._sums))
        if len(self._layer_of):
            torch.take(self._beta, self._layer_of, out=self._element_beta)
            torch.take(self._bias, self._layer_of, out=self._element_bias)
            torch.addcmul(values[self._vectors], self._element_bias, self._sums, out=self._shifted)
            computing[self._computing] = (self._shifted * self._element_beta).to(computing.dtype)

    def finish_(self, values: Tensor, gradient: Tensor) -> None:
        """Turn the gradients of β W and β (v + b W 1) into those of W, v, β, b and δ."""
        self._of_scalars.zero_()
        of_vectors = gradient[self._vectors]
        products = torch.stack((of_vectors * self._shifted, of_vectors * self._sums))
        of_vectors *= self._element_beta
        gradient[self._vectors] = of_vectors
        steps = of_vectors * self._element_bias
        for run in self.runs:
            of_beta, of_bias = of_both = self._of_scalars[:, run.layers]
            beta = self._beta[run.layers]
            if run.has_vector:
                torch.sum(run.vectors(products), 2, out=of_both)
                of_bias *= beta
            if run.has_beta:
                of_beta += (run.rows(gradient, run.masters) * run.rows(values, run.masters)).sum(1)
            if run.has_bias:
                weights, step = run.matrices(gradient), run.vectors(steps).unsqueeze(2)
                torch.addcmul(step, weights, beta.view(-1, 1, 1), out=weights)
            else:
                run.rows(gradient, run.masters).mul_(beta.unsqueeze(1))
        gradient[self._betas] = self._of_scalars[0, self._with_beta]
        gradient.index_fill_(0, self._biases, 0.0)
        of_biases = self._of_scalars[1, self._with_bias]
        gradient.index_add_(0, self._biases, of_biases)  # several layers may read one
        if self.carried:
            gradient[self._deltas] = self._to_layers.T @ of_biases + self._to_ends.T @ gradient[self._ends]


def _shares(
    readers: Sequence[ScalarBias], deltas: Sequence[ScalarBias], carried: Mapping[ScalarBias, Sequence[ScalarBias]]
) -> Tensor:
    """Which of the δ each reader carries: a row a reader, of 0 and 1."""
    number = {delta: i for i, delta in enumerate(deltas)}
    shares = torch.zeros(len(readers), len(deltas))
    for row, reader in zip(shares, readers, strict=True):
        row[[number[delta] for delta in carried.get(reader, ())]] = 1
    return shares


Kind = tuple[bool, bool, bool, tuple[int, ...]]


def kind(found: FoldedLayer) -> Kind:
    """What layers that are treated together have in common: bias, β, vector, and the weight's shape."""
    layer = found.layer
    return found.bias is not None, found.beta is not None, layer.bias is not None, tuple(layer.weight.shape)


def _runs(layers: Sequence[_Layer]) -> Iterator[Run]:
    """The layers, those together that are alike and lie side by side."""

    def run_of(numbered: tuple[int, _Layer]) -> tuple[Kind, int]:
        """Side by side are those whose start less their number's sizes agrees; groups may lie between others."""
        number, layer = numbered
        return kind(layer.found), layer.start - number * padded(layer.found.layer.weight.numel())

    before = elements = 0
    for ((has_bias, has_beta, has_vector, shape), _), numbered in groupby(enumerate(layers), key=run_of):
        run = [layer for _, layer in numbered]
        length = len(run) * padded(math.prod(shape))
        count = len(run) * shape[0] if has_vector else 0
        yield Run(
            shape=torch.Size(shape),
            has_bias=has_bias,
            has_beta=has_beta,
            has_vector=has_vector,
            masters=slice(run[0].start, run[0].start + length),
            computing=slice(run[0].short, run[0].short + length),
            layers=slice(before, before + len(run)),
            elements=slice(elements, elements + count),
        )
        before, elements = before + len(run), elements + count
