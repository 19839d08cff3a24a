"""Fold learnable scalars into the weight layers next to them during training in half precision.

A scalar bias b stands before the layer, and a multiplier β after it:

    β · (W (x + b) + v) = (β W) x + β (v + b W 1)

The folded layer computes the same function, and no activation is stored or read for a scalar. The scalars stay
parameters: training updates W, v, b and β, and every forward pass uses β W and β (v + b W 1). With G and g the
gradients of these two, the gradients are

    of W: β (G + b g 1ᵀ)    of v: β g    of b: β ⟨g, W 1⟩    of β: ⟨G, W⟩ + ⟨g, v + b W 1⟩

A bias δ after a residual sum moves to the biases that read the stream later, if every reader has one; its gradient is
the sum of theirs.

`normfree.optim.master_weights` holds W, v, b and β of all layers in one float32 vector, the *master vector*, and what
the forward pass uses in a half-precision vector, the *compute vector*. Folding for inference, after training, is in
`normfree.conversion.folding`.
"""

from __future__ import annotations

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
class FoldableLayer:
    """A layer, the scalar bias that it reads, and the block whose β multiplies its output."""

    layer: nn.Linear | nn.Conv2d
    bias: ScalarBias | None
    block: Residual | None

    @property
    def beta(self) -> ScalarMultiplier | None:
        """The multiplier after the layer."""
        return None if self.block is None else self.block.beta  # type: ignore[return-value]

    @property
    def kind(self) -> LayerKind:
        """The properties that layers of a group share: whether they have b, β and v, and the weight's shape."""
        layer = self.layer
        return self.bias is not None, self.beta is not None, layer.bias is not None, tuple(layer.weight.shape)


LayerKind = tuple[bool, bool, bool, tuple[int, ...]]


@dataclass(frozen=True)
class Stream:
    """A chain of residual blocks, and the modules that read its output."""

    blocks: Sequence[Residual]
    ends: Sequence[nn.Module | None]


class ParameterSlot(NamedTuple):
    """The place of a parameter: `size` elements of the master vector from `start` on.

    A parameter in half precision also has `size` elements of the compute vector, from `half_start` on.
    """

    parameter: nn.Parameter
    start: int
    half_start: int | None
    size: int


def foldable_layers(model: nn.Module, half: Collection[int] | None = None) -> list[FoldableLayer]:
    """Find the layers of residual branches into which a scalar can be folded.

    All their parameters are learnable, and no other module uses them. A scalar bias is folded into all layers that read
    it or into none; they must be linear and have a bias vector. A convolution takes a multiplier only, because the
    zeros that it pads with contain no bias.

    Args:
        model: The model.
        half: The ids of the parameters to consider; the default is all.
    """
    owners = _owners(model)

    def fits(layer: nn.Module) -> bool:
        held = [p for p in layer._parameters.values() if p is not None]
        considered = half is None or all(id(p) in half for p in held)
        return considered and _is_plain(layer) and all(_learns_alone(p, owners) for p in held)

    biases: dict[nn.Module, ScalarBias] = {}
    blocks: dict[nn.Module, Residual] = {}
    for block in model.modules():
        if not isinstance(block, Residual) or block.branch is None:
            continue
        for bias, layers in _bias_readers(block):
            foldable = all(fits(layer) and layer.bias is not None for layer in layers)
            if foldable and _learns_alone(bias.value, owners):
                biases.update(dict.fromkeys(layers, bias))
        last, beta = _last_layer(block.branch), block.beta
        if fits(last) and isinstance(beta, ScalarMultiplier) and _learns_alone(beta.value, owners):
            blocks[last] = block
    return [FoldableLayer(layer, biases.get(layer), blocks.get(layer)) for layer in {**biases, **blocks}]  # type: ignore[arg-type]


def foldable_deltas(
    model: nn.Module, streams: Iterable[Stream], folded: Collection[ScalarBias]
) -> dict[ScalarBias, list[ScalarBias]]:
    """Map each scalar bias that reads a residual stream to the preceding δ that can be moved into it.

    All δ of a stream move, or none. They move if every block begins with a bias in `folded`, the biases that are folded
    into layers, and if scalar biases read the stream's end. An attention's keys need no bias; see `_bias_readers`.
    """
    readers: dict[ScalarBias, list[ScalarBias]] = {}
    streams = list(streams)
    owners = _owners(model) if streams else Counter[int]()
    for stream in streams:
        deltas = [block.delta for block in stream.blocks]
        entries = [before[0] if len(before := _entry_modules(block)) == 1 else None for block in stream.blocks]
        if (
            stream.ends
            and all(isinstance(b, ScalarBias) and _learns_alone(b.value, owners) for b in (*deltas, *stream.ends))
            and all(_passes_constants(block) for block in stream.blocks)
            and all(entry in folded for entry in entries)
        ):
            places = [*enumerate(entries), *((len(deltas), end) for end in stream.ends)]
            readers |= {reader: deltas[:before] for before, reader in places if before}  # type: ignore[misc]
    return readers


def _owners(model: nn.Module) -> Counter[int]:
    """Count the modules that hold each parameter, by id; a module with several names counts several times."""
    named = model.named_modules(remove_duplicate=False)
    return Counter(id(p) for _, module in named for p in module._parameters.values())


def _learns_alone(value: Tensor, owners: Counter[int]) -> bool:
    return value.requires_grad and owners[id(value)] == 1


def _passes_constants(block: Residual) -> bool:
    """Whether the shortcut passes a constant through unchanged."""
    around = (block.shortcut, block.alpha, block.a, block.c, block.exit)
    return all(isinstance(part, nn.Identity) for part in around)


def _entry_modules(block: Residual) -> list[nn.Module]:
    return [*block.entry] if isinstance(block.entry, nn.Sequential) else [block.entry]


def _bias_readers(block: Residual) -> Iterator[tuple[ScalarBias, list[nn.Linear]]]:
    """Iterate over the scalar biases of a block, each with all the linear layers that read it.

    An attention's key layer is not among them: a bias adds the same to every logit of a query, so it changes nothing.
    """
    branch = block.branch
    last = _entry_modules(block)[-1:]
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


def _last_layer(branch: nn.Module) -> nn.Module:
    """Return the last layer of a branch; dropout after it commutes with a multiplier."""
    if isinstance(branch, Attention):
        return branch.out
    parts = [part for part in branch if not isinstance(part, nn.Dropout)] if isinstance(branch, nn.Sequential) else []
    return parts[-1] if parts else branch


def _is_plain(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Conv2d | nn.Linear) and weight_kind(layer) == "plain"


@dataclass(frozen=True)
class _AdjacentLayers:
    """Layers of one kind whose weights are adjacent in both vectors, so that one kernel handles all of them.

    `masters` are the positions of their weights in the master vector, and `computing` those in the compute vector.
    `layers` are their numbers among all folded layers. `elements` are the positions of their bias vectors in the
    concatenation of all bias vectors.
    """

    shape: torch.Size
    has_bias: bool
    has_beta: bool
    has_vector: bool
    masters: slice
    computing: slice
    layers: slice
    elements: slice

    def rows(self, vector: Tensor, part: slice) -> Tensor:
        """View the weights in a vector as a matrix with one row per layer."""
        return vector[part].view(self.layers.stop - self.layers.start, -1)

    def matrices(self, vector: Tensor) -> Tensor:
        """View the weights in a vector with the layout of the master vector as (layers, outputs, inputs)."""
        return self.rows(vector, self.masters)[:, : self.shape.numel()].view(-1, *self.shape)

    def vectors(self, elements: Tensor) -> Tensor:
        """View this group's part of a tensor over all elements of bias vectors as (…, layers, outputs)."""
        own: Tensor = elements[..., self.elements]
        return own.view(*own.shape[:-1], -1, self.shape[0])


class ScalarFolding:
    """Computes β W and β (v + b W 1) from the master vector, and the gradients of W, v, b and β from theirs.

    The scalars of all layers are gathered in one tensor, because every small kernel costs time. Between `fold_weights_`
    and `unfold_gradients_` the object stores β per layer, and β, b, W 1 and v + b W 1 per element of the bias vectors.
    A layer without β has 1 in its place, and one without b has 0. Here b includes the δ that the bias takes over. A
    bias that reads the end of a stream, and is not folded into a layer, gets its δ as a tensor, `ScalarBias.moved`.

    Args:
        model: The model.
        layers: The layers to fold into, by the id of their weight.
        streams: The residual streams of the model, if it declares them.
        slots: The places of all parameters that learn.
        values: The master vector.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Mapping[int, FoldableLayer],
        streams: Iterable[Stream],
        slots: Sequence[ParameterSlot],
        values: Tensor,
    ) -> None:
        starts = {id(slot.parameter): slot.start for slot in slots}
        half_starts = {id(slot.parameter): slot.half_start for slot in slots if slot.half_start is not None}
        found = [layers[i] for i in starts if i in layers]
        biases = [layer.bias for layer in found if layer.bias is not None]
        readers = foldable_deltas(model, streams, {*biases})
        self.deltas = list(dict.fromkeys(delta for deltas in readers.values() for delta in deltas))
        self._blocks = [layer.block for layer in found if layer.block is not None]
        self._left_out = [*dict.fromkeys(biases), *self.deltas]
        self._ends = [reader for reader in readers if reader not in {*biases}]
        self._end_sums = values.new_zeros(len(self._ends))
        sizes = {id(slot.parameter): slot.size for slot in slots}
        self._groups = list(_adjacent_layers(found, starts, half_starts, sizes))

        def indices(numbers: Iterable[int]) -> Tensor:
            return torch.tensor([*numbers], device=values.device, dtype=torch.int64)

        def positions(scalars: Iterable[ScalarBias | ScalarMultiplier]) -> Tensor:
            return indices(starts[id(scalar.value)] for scalar in scalars)

        self._bias_at, self._delta_at, self._end_at = positions(biases), positions(self.deltas), positions(self._ends)
        self._beta_at = positions(layer.beta for layer in found if layer.beta is not None)
        self._with_bias = indices(i for i, layer in enumerate(found) if layer.bias is not None)
        self._with_beta = indices(i for i, layer in enumerate(found) if layer.beta is not None)
        self._deltas_of_layers = _incidence(biases, self.deltas, readers).to(values)
        self._deltas_of_ends = _incidence(self._ends, self.deltas, readers).to(values)
        vectors = [(i, layer.layer.bias) for i, layer in enumerate(found) if layer.layer.bias is not None]

        def element_positions(begins: Mapping[int, int]) -> Tensor:
            spans = ((begins[id(vector)], len(vector)) for _, vector in vectors)
            return indices(i for begin, size in spans for i in range(begin, begin + size))

        self._vector_at, self._computing_at = element_positions(starts), element_positions(half_starts)
        self._layer_of_element = indices(i for i, vector in vectors for _ in range(len(vector)))
        self._beta, self._bias = values.new_ones(len(found)), values.new_zeros(len(found))
        self._scalar_gradients = values.new_zeros(2, len(found))  # of β and b, by layer
        elements = values.new_zeros(4, len(self._layer_of_element))
        self._row_sums, self._shifted, self._element_beta, self._element_bias = elements

    def scalars(self) -> list[ScalarBias | ScalarMultiplier]:
        """Return the scalars whose gradients `unfold_gradients_` computes, because the model runs without them."""
        return [*(block.beta for block in self._blocks), *self._left_out]  # type: ignore[list-item]

    def enable_(self, on: bool = True) -> None:
        """Let the model leave out the scalars that are folded into its weights; with `on=False`, use them again."""
        for block in self._blocks:
            block.beta_in_weight = on
        for bias in self._left_out:
            bias.folded = on
        for end, moved in zip(self._ends, self._end_sums, strict=True):
            end.moved = moved if on else None

    def fold_weights_(self, values: Tensor, computing: Tensor) -> None:
        """Write β W and β (v + b W 1) into the compute vector, and the sums of δ for the streams' ends."""
        if not self._groups:
            return
        self._beta[self._with_beta] = values[self._beta_at]
        biases = values[self._bias_at]
        if self.deltas:
            deltas = values[self._delta_at]
            biases += self._deltas_of_layers @ deltas
            torch.mv(self._deltas_of_ends, deltas, out=self._end_sums)
        self._bias[self._with_bias] = biases
        for group in self._groups:
            if group.has_beta:
                weights = group.rows(values, group.masters)
                torch.mul(weights, self._beta[group.layers].unsqueeze(1), out=group.rows(computing, group.computing))
            if group.has_bias:
                torch.sum(group.matrices(values), 2, out=group.vectors(self._row_sums))
        if len(self._layer_of_element):
            torch.take(self._beta, self._layer_of_element, out=self._element_beta)
            torch.take(self._bias, self._layer_of_element, out=self._element_bias)
            torch.addcmul(values[self._vector_at], self._element_bias, self._row_sums, out=self._shifted)
            computing[self._computing_at] = (self._shifted * self._element_beta).to(computing.dtype)

    def unfold_gradients_(self, values: Tensor, gradient: Tensor) -> None:
        """Turn the gradients of β W and β (v + b W 1) into those of W, v, β, b and δ, in place."""
        if not self._groups:
            return
        self._scalar_gradients.zero_()
        of_vectors = gradient[self._vector_at]
        products = torch.stack((of_vectors * self._shifted, of_vectors * self._row_sums))
        of_vectors *= self._element_beta
        gradient[self._vector_at] = of_vectors
        steps = of_vectors * self._element_bias
        for group in self._groups:
            of_beta, of_bias = of_both = self._scalar_gradients[:, group.layers]
            beta = self._beta[group.layers]
            if group.has_vector:
                torch.sum(group.vectors(products), 2, out=of_both)
                of_bias *= beta
            if group.has_beta:
                of_beta += (group.rows(gradient, group.masters) * group.rows(values, group.masters)).sum(1)
            if group.has_bias:
                weights, step = group.matrices(gradient), group.vectors(steps).unsqueeze(2)
                torch.addcmul(step, weights, beta.view(-1, 1, 1), out=weights)
            else:
                group.rows(gradient, group.masters).mul_(beta.unsqueeze(1))
        gradient[self._beta_at] = self._scalar_gradients[0, self._with_beta]
        gradient.index_fill_(0, self._bias_at, 0.0)
        of_biases = self._scalar_gradients[1, self._with_bias]
        gradient.index_add_(0, self._bias_at, of_biases)  # several layers may read one bias
        if self.deltas:
            of_ends = gradient[self._end_at]
            gradient[self._delta_at] = self._deltas_of_layers.T @ of_biases + self._deltas_of_ends.T @ of_ends


def _incidence(
    readers: Sequence[ScalarBias], deltas: Sequence[ScalarBias], deltas_of: Mapping[ScalarBias, Sequence[ScalarBias]]
) -> Tensor:
    """Return the matrix (readers, deltas) that is 1 where the reader takes over the δ, else 0."""
    number = {delta: i for i, delta in enumerate(deltas)}
    matrix = torch.zeros(len(readers), len(deltas))
    for row, reader in zip(matrix, readers, strict=True):
        row[[number[delta] for delta in deltas_of.get(reader, ())]] = 1
    return matrix


def _adjacent_layers(
    layers: Sequence[FoldableLayer],
    starts: Mapping[int, int],
    half_starts: Mapping[int, int],
    sizes: Mapping[int, int],
) -> Iterator[_AdjacentLayers]:
    """Group the layers of one kind whose weights are adjacent in the vectors."""

    def group_of(numbered: tuple[int, FoldableLayer]) -> tuple[LayerKind, int]:
        """Return a key in which start − number · size is equal for adjacent layers of equal size."""
        number, layer = numbered
        weight = id(layer.layer.weight)
        return layer.kind, starts[weight] - number * sizes[weight]

    layer_count = element_count = 0
    for ((has_bias, has_beta, has_vector, shape), _), numbered in groupby(enumerate(layers), key=group_of):
        members = [id(layer.layer.weight) for _, layer in numbered]
        start, half_start = starts[members[0]], half_starts[members[0]]
        length = len(members) * sizes[members[0]]
        elements = len(members) * shape[0] if has_vector else 0
        yield _AdjacentLayers(
            shape=torch.Size(shape),
            has_bias=has_bias,
            has_beta=has_beta,
            has_vector=has_vector,
            masters=slice(start, start + length),
            computing=slice(half_start, half_start + length),
            layers=slice(layer_count, layer_count + len(members)),
            elements=slice(element_count, element_count + elements),
        )
        layer_count, element_count = layer_count + len(members), element_count + elements
