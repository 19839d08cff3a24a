"""The parameters of a model as one float32 vector, beside the weights that compute.

A step then costs a few kernels whatever the depth: the update, the moving average, the norm of the gradient and its
reduction over processes are each one operation on a vector.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from normfree.nn.residual import Residual, scaled_weights

_ALIGN = 64  # elements; the kernels of tensor cores want their operands on such addresses


@dataclass(frozen=True)
class Group:
    """A stretch of the vector whose parameters share a learning rate and weight decay."""

    name: str
    stretch: slice
    lr: float
    weight_decay: float


@dataclass(frozen=True)
class _Scaled:
    """Weights of one size that lie side by side, and are multiplied by a β each before they compute."""

    masters: slice
    computing: slice
    betas: Tensor  # the places of the β in the vector

    def rows(self, vector: Tensor, stretch: slice) -> Tensor:
        """The weights of a vector, one a row."""
        return vector[stretch].view(len(self.betas), -1)


class Masters:
    """Float32 masters of a model's parameters and their gradient, each one vector.

    A parameter in float32 becomes a view of the masters themselves. One in a short type becomes a view of a second
    vector, which `publish_` refreshes. With `channels_last` parameters of four dimensions lie in that order.
    `named(vector)` gives a vector of the same layout by the parameters' qualified names and in their shapes. A
    parameter that needs no gradient is left alone.

    Where a learnable β multiplies what a layer in a short type puts out, β · W is published instead of W, and the
    block leaves out β. With G the gradient of β · W, that of W is β · G and that of β is ⟨G, W⟩: the same function and
    gradients, but no activation is kept or read for β.
    """

    def __init__(self, model: nn.Module, groups: Sequence[Mapping[str, Any]], *, channels_last: bool = False) -> None:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        short = {id(p) for p in model.parameters() if p.dtype != torch.float32}
        scaled = {id(w): (block, b) for block, w, b in scaled_weights(model) if id(w) in short}

        def order(parameter: nn.Parameter) -> tuple[bool, bool, int]:
            """Short types first, scaled weights of one size together."""
            is_scaled = id(parameter) in scaled
            return id(parameter) not in short, is_scaled, parameter.numel() if is_scaled else 0

        self.groups: list[Group] = []
        self._short: list[tuple[slice, slice]] = []  # stretches of the masters and of the computing vector
        placed: list[tuple[nn.Parameter, int, int | None]] = []
        end = short_end = 0
        for group in groups:
            start, short_start = end, short_end
            for parameter in sorted((p for p in group["params"] if p.requires_grad), key=order):
                is_short = id(parameter) in short
                placed.append((parameter, end, short_end if is_short else None))
                size = _padded(parameter)
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
        self._scaled = list(_scaled(placed, scaled, device))
        self._folded = {id(beta) for _, beta in scaled.values()}
        self._blocks = [block for block, _ in scaled.values()]
        for block in self._blocks:
            block.beta_in_weight = True
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
        """Turn the gradients of published weights β · W into those of W and β."""
        for part in self._scaled:
            weights, gradients = part.rows(self.values, part.masters), part.rows(self.gradient, part.masters)
            self.gradient[part.betas] = (gradients * weights).sum(1)
            gradients.mul_(self.values[part.betas].unsqueeze(1))

    @torch.no_grad()
    def publish_(self) -> None:
        """Round the masters into the weights that compute."""
        for masters, short in self._short:
            if short.stop > short.start:
                self._compute[short].copy_(self.values[masters])
        for part in self._scaled:
            product = part.rows(self.values, part.masters) * self.values[part.betas].unsqueeze(1)
            part.rows(self._compute, part.computing).copy_(product)

    @torch.no_grad()
    def release_(self) -> None:
        """Give the parameters back storages of their own, in float32, and the blocks their β; the masters are done."""
        for parameter, view in zip(self.parameters.values(), self.named(self.values).values(), strict=True):
            parameter.data = view.clone(memory_format=torch.contiguous_format)
        for block in self._blocks:
            block.beta_in_weight = False


def _padded(parameter: nn.Parameter) -> int:
    return -(-parameter.numel() // _ALIGN) * _ALIGN


def _view(vector: Tensor, start: int, like: Tensor, channels_last: bool) -> Tensor:
    """The stretch of `vector` from `start` on in the shape of `like`."""
    flat = vector[start : start + like.numel()]
    if channels_last and like.dim() == 4:
        n, c, h, w = like.shape
        return flat.view(n, h, w, c).permute(0, 3, 1, 2)
    return flat.view(like.shape)


def _scaled(
    placed: Sequence[tuple[nn.Parameter, int, int | None]],
    scaled: Mapping[int, tuple[Residual, nn.Parameter]],
    device: torch.device,
) -> Sequence[_Scaled]:
    """The scaled weights by size."""
    starts = {id(parameter): start for parameter, start, _ in placed}
    found = []
    numbered = enumerate(entry for entry in placed if id(entry[0]) in scaled)
    # Side by side are those of one size whose start less their number's sizes agrees; groups may lie between others.
    for (size, _), entries in groupby(numbered, key=lambda e: (_padded(e[1][0]), e[1][1] - e[0] * _padded(e[1][0]))):
        run = [entry for _, entry in entries]
        start, place = run[0][1], run[0][2] or 0
        blocks = [scaled[id(parameter)] for parameter, _, _ in run]
        betas = torch.tensor([starts[id(beta)] for _, beta in blocks], device=device)
        length = size * len(run)
        found.append(_Scaled(slice(start, start + length), slice(place, place + length), betas))
    return found
