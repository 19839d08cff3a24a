"""The parameters of a model as one float32 vector, beside the weights that compute.

A step then costs a few kernels whatever the depth: the update, the moving average, the norm of the gradient and its
reduction over processes are each one operation on a vector.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normfree.models.base import BaseModel
from normfree.nn.scalar_folding import (
    FoldedLayer,
    Kind,
    Placed,
    ScalarFolding,
    carried_biases,
    foldable_layers,
    kind,
    padded,
)

_SHORT = {torch.bfloat16, torch.float16}


@dataclass(frozen=True)
class Group:
    """A stretch of the vector whose parameters share a learning rate and weight decay."""

    name: str
    stretch: slice
    lr: float
    weight_decay: float


class MasterWeights:
    """Float32 masters of a model's parameters and their gradient, each one vector.

    A parameter in float32 becomes a view of the masters themselves. One in a short type becomes a view of a second
    vector, which `publish_` refreshes. With `channels_last` parameters of four dimensions lie in that order.
    `named(vector)` gives a vector of the same layout by the parameters' qualified names and in their shapes. A
    parameter that needs no gradient is none of the masters; `frozen` tells its value. What was rounded to a short type
    begins with, or stays at, its value in `originals`, by name, where it is there.

    A layer in a short type takes in the learnable scalars around it, a bias b before it and a β behind it: β W and
    β (v + b W 1) are published instead of its W and v, and the scalars are left out when the model runs. With G and g
    the gradients of these, those of v, b and W are β g, β ⟨g, W 1⟩ and β (G + b g 1ᵀ), and that of β is
    ⟨G, W⟩ + ⟨g, v + b W 1⟩: the same function and gradients, but no activation is kept or read for a scalar. A δ of the
    residual stream goes to the biases that read the stream after it, see `carried_biases`, and its gradient is the sum
    of theirs.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: Sequence[Mapping[str, Any]],
        *,
        channels_last: bool = False,
        originals: Mapping[str, Tensor] | None = None,
    ) -> None:
        originals = originals or {}
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        kinds = {p.dtype for group in groups for p in group["params"] if p.requires_grad}
        if not kinds:
            whose = type(model).__name__
            raise ValueError(f"expected at least one parameter of {whose} that learns, got none; set requires_grad")
        kinds -= {torch.float32}
        if len(kinds) > 1 or not kinds <= _SHORT:
            raise ValueError(
                "expected parameters in float32 and at most one shorter type, got "
                f"{', '.join(sorted(map(str, kinds)))}; convert the model first"
            )
        short = {id(p) for p in model.parameters() if p.dtype != torch.float32}
        absorbing = {id(found.layer.weight): found for found in foldable_layers(model, short)}
        self._short: list[tuple[slice, slice]] = []  # stretches of the masters and of the computing vector
        self.groups: list[Group] = []
        placed = self._lay_out(groups, absorbing)
        end, short_end = self.groups[-1].stretch.stop, self._short[-1][1].stop
        device = placed[0].parameter.device
        self.values = torch.zeros(end, device=device)
        self.gradient = torch.zeros(end, device=device)
        self._compute = torch.zeros(short_end, device=device, dtype=next(iter(kinds), torch.float32))
        self._channels_last = channels_last
        self._starts = [place.start for place in placed]
        self.parameters = {names[id(place.parameter)]: place.parameter for place in placed}
        for view, (parameter, start, short_start) in zip(self.named(self.values).values(), placed, strict=True):
            view.copy_(originals.get(names[id(parameter)], parameter.detach()))
            computing, at = (self.values, start) if short_start is None else (self._compute, short_start)
            parameter.data = _view(computing, at, parameter, channels_last)
            parameter.grad = None
        self.gradients = self.named(self.gradient)
        self._fixed = {name: p for name, p in model.named_parameters() if name not in self.parameters}
        self._fixed_values = {name: originals.get(name, p.detach()) for name, p in self._fixed.items()}
        self._blocks = [found.block for found in absorbing.values() if found.block is not None]
        taken = dict.fromkeys(found.bias for found in absorbing.values() if found.bias is not None)
        carried = carried_biases(model, model.streams() if isinstance(model, BaseModel) else (), taken)
        self._absorption = ScalarFolding(placed, absorbing, self.values, carried) if absorbing else None
        deltas = [] if self._absorption is None else self._absorption.carried
        self._biases = [*taken, *deltas]
        self._folded = {id(scalar.value) for scalar in (*(block.beta for block in self._blocks), *self._biases)}
        self._leave_out(True)
        self.publish_()

    def _lay_out(self, groups: Sequence[Mapping[str, Any]], absorbing: Mapping[int, FoldedLayer]) -> list[Placed]:
        """Give every parameter that learns its place, group by group, and note the stretches."""

        def order(parameter: nn.Parameter) -> tuple[bool, bool, Kind | tuple[()]]:
            """Short types first, layers that take in the same scalars and have the same shape together."""
            found = absorbing.get(id(parameter))
            return parameter.dtype == torch.float32, found is not None, kind(found) if found else ()

        placed: list[Placed] = []
        end = short_end = 0
        for group in groups:
            start, short_start = end, short_end
            for parameter in sorted((p for p in group["params"] if p.requires_grad), key=order):
                size = padded(parameter.numel())
                is_short = parameter.dtype != torch.float32
                placed.append(Placed(parameter, end, short_end if is_short else None))
                end += size
                short_end += size if is_short else 0
            length = short_end - short_start
            self._short.append((slice(start, start + length), slice(short_start, short_end)))
            self.groups.append(Group(group["name"], slice(start, end), group["lr"], group["weight_decay"]))
        return placed

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
        if self._absorption is not None:
            self._absorption.finish_(self.values, self.gradient)

    @torch.no_grad()
    def publish_(self) -> None:
        """Round the masters into the weights that compute."""
        for masters, short in self._short:
            if short.stop > short.start:
                self._compute[short].copy_(self.values[masters])
        if self._absorption is not None:
            self._absorption.publish_(self.values, self._compute)

    @torch.no_grad()
    def frozen(self) -> dict[str, Tensor]:
        """The values of the parameters that need no gradient, unrounded but where the model itself changed them."""
        for name, parameter in self._fixed.items():
            value = self._fixed_values[name]
            value.copy_(torch.where(parameter == value.to(parameter.dtype), value, parameter.to(value.dtype)))
        return self._fixed_values

    @torch.no_grad()
    def publish_frozen_(self) -> None:
        """Round the values that `frozen` gave out into the weights that compute, after they were written."""
        for name, parameter in self._fixed.items():
            parameter.copy_(self._fixed_values[name])

    @torch.no_grad()
    def release_(self) -> None:
        """Give the parameters storages of their own, in float32, and the model its scalars; the masters are done."""
        for name, value in self.frozen().items():
            self._fixed[name].data = value.float() if value.dtype in _SHORT else value
        for parameter, view in zip(self.parameters.values(), self.named(self.values).values(), strict=True):
            parameter.data = view.clone(memory_format=torch.contiguous_format)
            parameter.grad = None
        self._leave_out(False)

    def _leave_out(self, absorbed: bool) -> None:
        """Let the model run without the scalars that are in its weights, or with them."""
        for block in self._blocks:
            block.beta_in_weight = absorbed
        for bias in self._biases:
            bias.absorbed = absorbed
        if self._absorption is not None:
            for end, number in zip(self._absorption.ends, self._absorption.at_ends, strict=True):
                end.carried = number if absorbed else None


def _view(vector: Tensor, start: int, like: Tensor, channels_last: bool) -> Tensor:
    """The stretch of `vector` from `start` on in the shape of `like`."""
    flat = vector[start : start + like.numel()]
    if channels_last and like.dim() == 4:
        n, c, h, w = like.shape
        return flat.view(n, h, w, c).permute(0, 3, 1, 2)
    return flat.view(like.shape)
