"""Layers of the masters that take in the scalars around them; the formulas are those of `Masters`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from normfree.nn.absorbing import Absorbing
from normfree.nn.scalars import ScalarBias, ScalarMultiplier

Placed = tuple[nn.Parameter, int, int | None]  # a parameter, where it begins in the masters, and where it computes
_ALIGN = 64  # elements; the kernels of tensor cores want their operands on such addresses


def padded(size: int) -> int:
    """The elements that so many take in the vectors."""
    return -(-size // _ALIGN) * _ALIGN


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
        starts = {id(parameter): start for parameter, start, _ in placed}
        places = {id(parameter): place for parameter, _, place in placed}
        own = [(absorbing[id(p)], start, place or 0) for p, start, place in placed if id(p) in absorbing]
        self.runs = list(_runs(own))
        self.carried = list(dict.fromkeys(delta for deltas in carried.values() for delta in deltas))
        taken = [found.bias for found, _, _ in own if found.bias is not None]
        self.ends = [reader for reader in carried if reader not in {*taken}]
        self.at_ends = values.new_zeros(len(self.ends))

        def numbers(found: Iterable[int]) -> Tensor:
            return torch.tensor([*found], device=values.device, dtype=torch.int64)

        def at(scalars: Iterable[ScalarBias | ScalarMultiplier]) -> Tensor:
            return numbers(starts[id(scalar.value)] for scalar in scalars)

        self._biases, self._deltas, self._ends = at(taken), at(self.carried), at(self.ends)
        self._betas = at(found.beta for found, _, _ in own if found.beta is not None)
        self._with_bias = numbers(i for i, (found, _, _) in enumerate(own) if found.bias is not None)
        self._with_beta = numbers(i for i, (found, _, _) in enumerate(own) if found.beta is not None)
        self._to_layers, self._to_ends = (_shares(rs, self.carried, carried).to(values) for rs in (taken, self.ends))
        vectors = [(i, found.layer.bias) for i, (found, _, _) in enumerate(own) if found.layer.bias is not None]
        sizes = numbers(len(vector) for _, vector in vectors)
        within = torch.arange(int(sizes.sum()), device=values.device) - (sizes.cumsum(0) - sizes).repeat_interleave(
            sizes
        )
        self._layer_of = numbers(i for i, _ in vectors).repeat_interleave(sizes)
        self._vectors, self._computing = (
            numbers(where[id(vector)] or 0 for _, vector in vectors).repeat_interleave(sizes) + within
            for where in (starts, places)
        )
        self._beta, self._bias = values.new_ones(len(own)), values.new_zeros(len(own))
        self._of_scalars = values.new_zeros(2, len(own))  # the gradients of β and b, by layer
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


def kind(found: Absorbing) -> tuple[Any, ...]:
    """What layers that are treated together have in common."""
    weight = found.layer.weight
    return found.bias is not None, found.beta is not None, found.layer.bias is not None, tuple(weight.shape)


def _runs(own: Sequence[tuple[Absorbing, int, int]]) -> Iterator[Run]:
    """The layers, each with the places of its weight, those together that are alike and lie side by side."""

    def run_of(entry: tuple[int, tuple[Absorbing, int, int]]) -> tuple[Any, ...]:
        """Side by side are those whose start less their number's sizes agrees; groups may lie between others."""
        number, (found, start, _) = entry
        return *kind(found), start - number * padded(found.layer.weight.numel())

    layers = elements = 0
    for _, entries in groupby(enumerate(own), key=run_of):
        run = [entry for _, entry in entries]
        first, start, place = run[0]
        weight, vector = first.layer.weight, first.layer.bias
        length = len(run) * padded(weight.numel())
        count = 0 if vector is None else len(run) * len(vector)
        yield Run(
            shape=weight.shape,
            has_bias=first.bias is not None,
            has_beta=first.beta is not None,
            has_vector=vector is not None,
            masters=slice(start, start + length),
            computing=slice(place, place + length),
            layers=slice(layers, layers + len(run)),
            elements=slice(elements, elements + count),
        )
        layers, elements = layers + len(run), elements + count
