"""Layers of the masters that take in the scalars around them; the formulas are those of `Masters`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
class Absorbed:
    """Layers of one shape whose weights W lie side by side, and the scalars b and β that they take in.

    Of a vector like the masters, `biases` and `betas` are the places of the scalars, one a layer, and `vectors` those
    of the layers' biases v, one a row; `computing_vectors` are the latter in the vector that computes. `sums` holds W 1
    between `publish_` and `finish_`.
    """

    shape: torch.Size
    masters: slice
    computing: slice
    biases: Tensor | None
    betas: Tensor | None
    vectors: Tensor | None
    computing_vectors: Tensor | None
    sums: Tensor | None

    def rows(self, vector: Tensor, stretch: slice) -> Tensor:
        """The weights of a vector, one a row."""
        return vector[stretch].view(-1, padded(self.shape.numel()))

    def publish_(self, values: Tensor, computing: Tensor) -> None:
        """Write β W and β (v + b W 1) where they compute."""
        weights = self.rows(values, self.masters)
        betas = 1.0 if self.betas is None else values[self.betas].unsqueeze(1)
        if self.betas is not None:
            self.rows(computing, self.computing).copy_(weights * betas)
        if self.sums is not None:
            torch.sum(self._matrices(weights), 2, out=self.sums)
        if self.vectors is not None:
            computing[self.computing_vectors] = (self._shifted(values) * betas).to(computing.dtype)

    def finish_(self, values: Tensor, gradient: Tensor) -> None:
        """Turn the gradients of β W and β (v + b W 1) into those of W, v and β, and add to those of b."""
        weights, of_weights = self.rows(values, self.masters), self.rows(gradient, self.masters)
        betas = 1.0 if self.betas is None else values[self.betas].unsqueeze(1)
        if self.betas is not None:
            gradient[self.betas] = (of_weights * weights).sum(1)
        if self.vectors is not None:
            of_vectors = gradient[self.vectors]
            if self.betas is not None:
                gradient[self.betas] += (of_vectors * self._shifted(values)).sum(1)
            if self.biases is not None and self.sums is not None:
                steps = of_vectors * values[self.biases].unsqueeze(1)
                self._matrices(of_weights).add_(steps.unsqueeze(2))
                gradient.index_add_(0, self.biases, (of_vectors * self.sums * betas).sum(1))
            if self.betas is not None:
                gradient[self.vectors] = of_vectors * betas
        if self.betas is not None:
            of_weights.mul_(betas)

    def _matrices(self, rows: Tensor) -> Tensor:
        """The weights (layers, outputs, inputs) in their rows."""
        return rows[:, : self.shape.numel()].view(-1, *self.shape)

    def _shifted(self, values: Tensor) -> Tensor:
        """v + b W 1."""
        vectors = values[self.vectors]
        if self.biases is None or self.sums is None:
            return vectors
        return vectors + values[self.biases].unsqueeze(1) * self.sums


def kind(found: Absorbing) -> tuple[Any, ...]:
    """What layers that are treated together have in common."""
    weight = found.layer.weight
    return found.bias is not None, found.beta is not None, found.layer.bias is not None, tuple(weight.shape)


def runs(placed: Sequence[Placed], absorbing: Mapping[int, Absorbing], device: torch.device) -> Iterator[Absorbed]:
    """The layers that take in scalars, those together that are alike and lie side by side."""
    starts = {id(parameter): start for parameter, start, _ in placed}
    places = {id(parameter): place for parameter, _, place in placed}
    own = [(absorbing[id(p)], start, place or 0) for p, start, place in placed if id(p) in absorbing]

    def run_of(entry: tuple[int, tuple[Absorbing, int, int]]) -> tuple[Any, ...]:
        """Side by side are those whose start less their number's sizes agrees; groups may lie between others."""
        number, (found, start, _) = entry
        return *kind(found), start - number * padded(found.layer.weight.numel())

    for _, entries in groupby(enumerate(own), key=run_of):
        run = [entry for _, entry in entries]
        (first, start, place), layers = run[0], [found.layer for found, _, _ in run]
        length = len(run) * padded(first.layer.weight.numel())
        biases = [found.bias for found, _, _ in run if found.bias is not None]
        betas = [found.beta for found, _, _ in run if found.beta is not None]
        vectors = [layer.bias for layer in layers if layer.bias is not None]
        shape = first.layer.weight.shape

        def at(scalars: Sequence[ScalarBias | ScalarMultiplier]) -> Tensor | None:
            return torch.tensor([starts[id(s.value)] for s in scalars], device=device) if scalars else None

        def stretches(where: Mapping[int, int | None], vectors: Sequence[Tensor] = vectors) -> Tensor | None:
            begins = torch.tensor([where[id(v)] or 0 for v in vectors], device=device)
            return begins.unsqueeze(1) + torch.arange(len(vectors[0]), device=device) if vectors else None

        yield Absorbed(
            shape=shape,
            masters=slice(start, start + length),
            computing=slice(place, place + length),
            biases=at(biases),
            betas=at(betas),
            vectors=stretches(starts),
            computing_vectors=stretches(places),
            sums=torch.zeros(len(run), shape[0], device=device) if biases else None,
        )
