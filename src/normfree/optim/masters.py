"""The parameters of a model as one float32 vector, beside the weights that compute.

A step then costs a few kernels whatever the depth: the update, the moving average, the norm of the gradient and its
reduction over processes are each one operation on a vector.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from normfree.nn.absorbing import Absorbing, absorbing_layers
from normfree.nn.scalars import ScalarBias, ScalarMultiplier

_ALIGN = 64  # elements; the kernels of tensor cores want their operands on such addresses


@dataclass(frozen=True)
class Group:
    """A stretch of the vector whose parameters share a learning rate and weight decay."""

    name: str
    stretch: slice
    lr: float
    weight_decay: float


@dataclass(frozen=True)
class _Absorbed:
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
        return vector[stretch].view(-1, _padded(self.shape.numel()))

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


class Masters:
    """Float32 masters of a model's parameters and their gradient, each one vector.

    A parameter in float32 becomes a view of the masters themselves. One in a short type becomes a view of a second
    vector, which `publish_` refreshes. With `channels_last` parameters of four dimensions lie in that order.
    `named(vector)` gives a vector of the same layout by the parameters' qualified names and in their shapes. A
    parameter that needs no gradient is left alone.

    A layer in a short type takes in the learnable scalars around it, a bias b before it and a β behind it: β W and
    β (v + b W 1) are published instead of its W and v, and the scalars are left out when the model runs. With G and g
    the gradients of these, those of v, b and W are β g, β ⟨g, W 1⟩ and β (G + b g 1ᵀ), and that of β is
    ⟨G, W⟩ + ⟨g, v + b W 1⟩: the same function and gradients, but no activation is kept or read for a scalar.
    """

    def __init__(self, model: nn.Module, groups: Sequence[Mapping[str, Any]], *, channels_last: bool = False) -> None:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        short = {id(p) for p in model.parameters() if p.dtype != torch.float32}
        absorbing = _absorbing(model, short)

        def order(parameter: nn.Parameter) -> tuple[Any, ...]:
            """Short types first, layers that take in the same scalars and have the same shape together."""
            found = absorbing.get(id(parameter))
            return id(parameter) not in short, found is not None, _kind(found) if found else ()

        self.groups: list[Group] = []
        self._short: list[tuple[slice, slice]] = []  # stretches of the masters and of the computing vector
        placed: list[tuple[nn.Parameter, int, int | None]] = []
        end = short_end = 0
        for group in groups:
            start, short_start = end, short_end
            for parameter in sorted((p for p in group["params"] if p.requires_grad), key=order):
                is_short = id(parameter) in short
                placed.append((parameter, end, short_end if is_short else None))
                size = _padded(parameter.numel())
                end += size
                short_end += size if is_short else 0
            length = short_end - short_start
            self._short.append((slice(start, start + length), slice(short_start, short_end)))
            self.groups.append(Group(group["name"], slice(start, end), group["lr"], group["weight_decay"]))
        kinds = {p.dtype for p, _, _ in placed} - {torch.float32}
        if len(kinds) > 1 or not placed or not kinds <= {torch.bfloat16, torch.float16}:
            raise ValueError(
                "expected parameters in float32 and at most one shorter type, got "
                f"{', '.join(sorted(map(str, kinds))) or 'none'}; convert the model first"
            )
        device = placed[0][0].device
        self.values = torch.zeros(end, device=device)
        self.gradient = torch.zeros(end, device=device)
        self._compute = torch.zeros(short_end, device=device, dtype=next(iter(kinds), torch.float32))
        self._channels_last = channels_last
        self._starts = [start for _, start, _ in placed]
        self.parameters = {names[id(parameter)]: parameter for parameter, _, _ in placed}
        for view, (parameter, start, place) in zip(self.named(self.values).values(), placed, strict=True):
            view.copy_(parameter.detach())
            computing = self.values if place is None else self._compute
            parameter.data = _view(computing, start if place is None else place, parameter, channels_last)
            parameter.grad = None
        self.gradients = self.named(self.gradient)
        self._absorbed = list(_absorbed(placed, absorbing, device))
        self._blocks = [found.block for found in absorbing.values() if found.block is not None]
        self._biases = list({found.bias for found in absorbing.values() if found.bias is not None})
        scalars = [*(block.beta for block in self._blocks), *self._biases]
        self._folded = {id(scalar.value) for scalar in scalars}
        starts = {id(parameter): start for parameter, start, _ in placed}
        self._bias_places = torch.tensor(
            [starts[id(bias.value)] for bias in self._biases], device=device, dtype=torch.int64
        )
        self._leave_out(True)
        self.publish_()

    def named(self, vector: Tensor) -> dict[str, Tensor]:
        """The parts of a vector laid out like the masters, as views, by the parameters' names."""
        places = zip(self.parameters.items(), self._starts, strict=True)
        return {name: _view(vector, start, like, self._channels_last) for (name, like), start in places}

    @torch.no_grad()
    def collect_(self, *, add: bool = False) -> None:
        """Move the parameters' gradients into the vector, or add them to it; a missing one counts as 0.

        After the last of several, `finish_` is due.
        """
        # One kernel moves many tensors, if their types and strides agree; the others would drag all into a loop.
        alike: dict[tuple[torch.dtype, bool], tuple[list[Tensor], list[Tensor]]] = {}
        missing = []
        for into, parameter in zip(self.gradients.values(), self.parameters.values(), strict=True):
            gradient, parameter.grad = parameter.grad, None
            if gradient is None:
                if id(parameter) not in self._folded:  # `finish_` writes theirs
                    missing.append(into)
                continue
            key = (gradient.dtype, gradient.stride() == into.stride())
            targets, found = alike.setdefault(key, ([], []))
            targets.append(into)
            found.append(gradient)
        if missing and not add:
            torch._foreach_zero_(missing)
        for targets, found in alike.values():
            if add:
                torch._foreach_add_(targets, [gradient.float() for gradient in found])
            else:
                torch._foreach_copy_(targets, found)

    @torch.no_grad()
    def finish_(self) -> None:
        """Turn the gradients of what was published into those of the masters."""
        self.gradient.index_fill_(0, self._bias_places, 0.0)  # several layers add to one
        for part in self._absorbed:
            part.finish_(self.values, self.gradient)

    @torch.no_grad()
    def publish_(self) -> None:
        """Round the masters into the weights that compute."""
        for masters, short in self._short:
            if short.stop > short.start:
                self._compute[short].copy_(self.values[masters])
        for part in self._absorbed:
            part.publish_(self.values, self._compute)

    @torch.no_grad()
    def release_(self) -> None:
        """Give the parameters storages of their own, in float32, and the model its scalars; the masters are done."""
        for parameter, view in zip(self.parameters.values(), self.named(self.values).values(), strict=True):
            parameter.data = view.clone(memory_format=torch.contiguous_format)
        self._leave_out(False)

    def _leave_out(self, absorbed: bool) -> None:
        """Let the model run without the scalars that are in its weights, or with them."""
        for block in self._blocks:
            block.beta_in_weight = absorbed
        for bias in self._biases:
            bias.absorbed = absorbed


def _padded(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _view(vector: Tensor, start: int, like: Tensor, channels_last: bool) -> Tensor:
    """The stretch of `vector` from `start` on in the shape of `like`."""
    flat = vector[start : start + like.numel()]
    if channels_last and like.dim() == 4:
        n, c, h, w = like.shape
        return flat.view(n, h, w, c).permute(0, 3, 1, 2)
    return flat.view(like.shape)


def _absorbing(model: nn.Module, short: set[int]) -> dict[int, Absorbing]:
    """The layers in a short type that take in scalars, by their weights; all that read one bias, or none."""
    found = absorbing_layers(model)
    learning = {id(p) for p in model.parameters() if p.requires_grad}

    def fits(a: Absorbing) -> bool:
        weights = [p for p in (a.layer.weight, a.layer.bias) if p is not None]
        scalars = [scalar.value for scalar in (a.bias, a.beta) if scalar is not None]
        return all(id(p) in short & learning for p in weights) and all(id(p) in learning for p in scalars)

    left = {a.bias for a in found if not fits(a)} - {None}
    return {id(a.layer.weight): a for a in found if fits(a) and a.bias not in left}


def _kind(found: Absorbing) -> tuple[Any, ...]:
    """What layers that are treated together have in common."""
    weight = found.layer.weight
    return found.bias is not None, found.beta is not None, found.layer.bias is not None, tuple(weight.shape)


def _absorbed(
    placed: Sequence[tuple[nn.Parameter, int, int | None]], absorbing: Mapping[int, Absorbing], device: torch.device
) -> Iterator[_Absorbed]:
    """The layers that take in scalars, those together that are alike and lie side by side."""
    starts = {id(parameter): start for parameter, start, _ in placed}
    places = {id(parameter): place for parameter, _, place in placed}
    own = [(absorbing[id(p)], start, place or 0) for p, start, place in placed if id(p) in absorbing]

    def run_of(entry: tuple[int, tuple[Absorbing, int, int]]) -> tuple[Any, ...]:
        """Side by side are those whose start less their number's sizes agrees; groups may lie between others."""
        number, (found, start, _) = entry
        return *_kind(found), start - number * _padded(found.layer.weight.numel())

    for _, entries in groupby(enumerate(own), key=run_of):
        run = [entry for _, entry in entries]
        (first, start, place), layers = run[0], [found.layer for found, _, _ in run]
        length = len(run) * _padded(first.layer.weight.numel())
        biases = [found.bias for found, _, _ in run if found.bias is not None]
        betas = [found.beta for found, _, _ in run if found.beta is not None]
        vectors = [layer.bias for layer in layers if layer.bias is not None]
        shape = first.layer.weight.shape

        def at(scalars: Sequence[ScalarBias | ScalarMultiplier]) -> Tensor | None:
            return torch.tensor([starts[id(s.value)] for s in scalars], device=device) if scalars else None

        def stretches(where: Mapping[int, int | None], vectors: Sequence[Tensor] = vectors) -> Tensor | None:
            begins = torch.tensor([where[id(v)] or 0 for v in vectors], device=device)
            return begins.unsqueeze(1) + torch.arange(len(vectors[0]), device=device) if vectors else None

        yield _Absorbed(
            shape=shape,
            masters=slice(start, start + length),
            computing=slice(place, place + length),
            biases=at(biases),
            betas=at(betas),
            vectors=stretches(starts),
            computing_vectors=stretches(places),
            sums=torch.zeros(len(run), shape[0], device=device) if biases else None,
        )
