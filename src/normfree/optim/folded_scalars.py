"""Layers of the masters that take in the scalars around them; the formulas are those of `Masters`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor, nn

from normfree.nn.scalar_folding import Absorbing
from normfree.nn.scalars import ScalarBias, ScalarMultiplier

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

    found: Absorbing
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


class Absorption:
    """All layers that take in scalars. What many layers need is gathered at once, since a small kernel costs time, too.

    Between `publish_` and `finish_` it remembers β of every layer, and of every element of the bias vectors β, b, W 1
    and v + b W 1; a layer without a scalar has 1 and 0 in its place. `values` are the masters. To a bias b belongs the
    sum of the δ that it has `carried`; one that no layer takes in gets it as a tensor.
    """

    def __init__(
        self,
        placed: Sequence[Placed],
        absorbing: Mapping[int, Absorbing],
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


def kind(found: Absorbing) -> Kind:
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
