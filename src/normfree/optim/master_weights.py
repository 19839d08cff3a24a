"""Master weights: the parameters of a model as one float32 vector, beside the weights used in forward and backward.

A training step then costs a few kernels at any depth: the update, the moving average, the norm of the gradient and its
reduction over processes are one operation on a vector each. The update is an `UpdateRule`: SGD with momentum, Adam or
AdamW. It reads and writes tensors only, so that a step can be compiled and captured in a CUDA graph.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from normfree.models.base import BaseModel
from normfree.nn.training_scalar_folding import (
    FoldableLayer,
    LayerKind,
    ParameterSlot,
    ScalarFolding,
    foldable_layers,
)

OptimizerName = Literal["sgd", "adam", "adamw"]
_HALF = {torch.bfloat16, torch.float16}
_ALIGNMENT = 64  # elements; tensor cores need their operands at such addresses


@dataclass(frozen=True)
class Group:
    """A contiguous part of the vector whose parameters share a learning rate and weight decay."""

    name: str
    span: slice
    lr: float
    weight_decay: float


class MasterWeights:
    """Float32 masters of a model's parameters and their gradient, each one vector.

    The *master vector* holds the float32 values of all parameters that learn; a float32 parameter becomes a view of it.
    The *compute vector* holds the values in half precision that forward and backward use; a parameter in half precision
    becomes a view of it, and `copy_to_model_` refreshes it. Learnable scalars around a layer in half precision are
    folded into the layer; see `normfree.nn.training_scalar_folding`. Parameters that need no gradient are not part of
    the vectors; see `frozen`.

    Float32 parameters of one shape can be adjacent in the vectors as a stack. `stacks` holds the stacks as tensors that
    learn in place of their parameters: a pass that reads a stack instead of hundreds of parameters costs a few kernels.

    A step is: backward pass, `gather_gradients_`, `unfold_gradients_`, an update of `values` by `gradient`,
    `copy_to_model_`. At the end, `release_` makes the model an ordinary one again.

    Args:
        model: The model; its parameters are replaced by views.
        groups: The parameter groups of `param_groups`.
        channels_last: Whether four-dimensional parameters are stored in that memory format.
        originals: Unrounded values of parameters that were converted to half precision, by name. The masters start from
            them.
        stacks: Lists of float32 parameters of one shape and one group, to be adjacent in this order.

    Raises:
        ValueError: If no parameter learns, or if the parameters have more than one dtype besides float32.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: Sequence[Mapping[str, Any]],
        *,
        channels_last: bool = False,
        originals: Mapping[str, Tensor] | None = None,
        stacks: Sequence[Sequence[nn.Parameter]] = (),
    ) -> None:
        originals = originals or {}
        self._stacked = {id(p): (number, i) for number, stack in enumerate(stacks) for i, p in enumerate(stack)}
        named = dict(model.named_parameters())
        names = {id(parameter): name for name, parameter in named.items()}
        dtypes = {p.dtype for group in groups for p in group["params"] if p.requires_grad}
        if not dtypes:
            whose = type(model).__name__
            raise ValueError(f"expected at least one parameter of {whose} that learns, got none; set requires_grad")
        dtypes -= {torch.float32}
        if len(dtypes) > 1 or not dtypes <= _HALF:
            raise ValueError(
                "expected parameters in float32 and at most one half-precision dtype, got "
                f"{', '.join(sorted(map(str, dtypes)))}; convert the model first"
            )
        half = {id(p) for p in named.values() if p.dtype != torch.float32}
        foldable = {id(found.layer.weight): found for found in (foldable_layers(model, half) if half else ())}
        self._half: list[tuple[slice, slice]] = []  # matching parts of the master and the compute vector
        self.groups: list[Group] = []
        slots = self._lay_out(groups, foldable)
        end, half_end = self.groups[-1].span.stop, self._half[-1][1].stop
        device = slots[0].parameter.device
        self.values = torch.zeros(end, device=device)
        self.gradient = torch.zeros(end, device=device)
        self._compute = torch.zeros(half_end, device=device, dtype=next(iter(dtypes), torch.float32))
        self._channels_last = channels_last
        self.parameters = {names[id(slot.parameter)]: slot.parameter for slot in slots}
        self._places = [(p.shape, self._strides(p), start) for p, start, *_ in slots]
        for view, (parameter, _, half_start, _) in zip(self.named(self.values).values(), slots, strict=True):
            view.copy_(originals.get(names[id(parameter)], parameter.detach()))
            if half_start is not None:
                view = self._compute.as_strided(view.shape, view.stride(), half_start)
            parameter.data = view
            parameter.grad = None
        self.gradients = self.named(self.gradient)
        starts = {id(slot.parameter): slot.start for slot in slots}
        places = [(starts[id(stack[0])], len(stack), stack[0].shape) for stack in stacks]
        self.stacks = [_stack(self.values, *place).detach().requires_grad_() for place in places]
        self._stack_gradients = [_stack(self.gradient, *place) for place in places]
        self._fixed = {name: p for name, p in named.items() if name not in self.parameters}
        self._fixed_values = {name: originals.get(name, p.detach()) for name, p in self._fixed.items()}
        self._folding: ScalarFolding | None = None
        self._elsewhere = {*self._stacked}  # parameters whose gradients come from a stack or `unfold_gradients_`
        if foldable:
            streams = model.streams() if isinstance(model, BaseModel) else ()
            self._folding = ScalarFolding(model, foldable, streams, slots, self.values)
            self._elsewhere |= {id(scalar.value) for scalar in self._folding.scalars()}
            self._folding.enable_()
        self.copy_to_model_()

    def _lay_out(
        self, groups: Sequence[Mapping[str, Any]], foldable: Mapping[int, FoldableLayer]
    ) -> list[ParameterSlot]:
        """Assign every parameter that learns its place in the vectors, group by group."""

        def order(parameter: nn.Parameter) -> tuple[bool, bool, LayerKind | tuple[()], tuple[int, int]]:
            """Sort half precision first, foldable layers of one kind together, and stacks last."""
            found, place = foldable.get(id(parameter)), self._stacked.get(id(parameter), (-1, 0))
            return parameter.dtype == torch.float32, found is not None, found.kind if found else (), place

        slots: list[ParameterSlot] = []
        end = half_end = 0
        for group in groups:
            start, half_start = end, half_end
            for parameter in sorted((p for p in group["params"] if p.requires_grad), key=order):
                size = _padded_size(parameter.numel())
                is_half = parameter.dtype != torch.float32
                slots.append(ParameterSlot(parameter, end, half_end if is_half else None, size))
                end += size
                half_end += size if is_half else 0
            length = half_end - half_start
            self._half.append((slice(start, start + length), slice(half_start, half_end)))
            self.groups.append(Group(group["name"], slice(start, end), group["lr"], group["weight_decay"]))
        return slots

    def named(self, vector: Tensor) -> dict[str, Tensor]:
        """View a vector with the masters' layout as tensors in the parameters' shapes, by qualified name.

        The vector begins at the start of its storage.
        """
        return {
            name: vector.as_strided(shape, strides, start)
            for name, (shape, strides, start) in zip(self.parameters, self._places, strict=True)
        }

    def _strides(self, parameter: nn.Parameter) -> tuple[int, ...]:
        """Return the strides of a parameter's view; stacks have no memory format."""
        shape = parameter.shape
        if self._channels_last and len(shape) == 4 and id(parameter) not in self._stacked:
            _, c, h, w = shape
            return (h * w * c, 1, w * c, c)
        return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))

    @torch.no_grad()
    def gather_gradients_(self, *, add: bool = False) -> None:
        """Move the parameters' gradients into the gradient vector; a missing gradient counts as 0.

        Call `unfold_gradients_` after the last of several calls.

        Args:
            add: Whether to add to the vector instead of overwriting it.
        """
        # One kernel moves many tensors if their dtypes and strides agree; one that differs would force a slow loop.
        alike: dict[tuple[torch.dtype, bool], tuple[list[Tensor], list[Tensor]]] = {}
        missing = []
        for into, stack in zip(self._stack_gradients, self.stacks, strict=True):
            gradient, stack.grad = stack.grad, None
            if gradient is None:
                missing.append(into)
            else:
                into.add_(gradient) if add else into.copy_(gradient)
        for into, parameter in zip(self.gradients.values(), self.parameters.values(), strict=True):
            gradient, parameter.grad = parameter.grad, None
            if gradient is None:
                if id(parameter) not in self._elsewhere:
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
    def unfold_gradients_(self) -> None:
        """Turn the gradient of the folded weights into that of the master vector."""
        if self._folding is not None:
            self._folding.unfold_gradients_(self.values, self.gradient)

    @torch.no_grad()
    def copy_to_model_(self) -> None:
        """Round the masters into the compute vector, with scalars folded in."""
        for masters, compute in self._half:
            if compute.stop > compute.start:
                self._compute[compute].copy_(self.values[masters])
        if self._folding is not None:
            self._folding.fold_weights_(self.values, self._compute)

    @torch.no_grad()
    def frozen(self) -> dict[str, Tensor]:
        """Return the parameters that need no gradient, unrounded unless the model itself changed them."""
        for name, parameter in self._fixed.items():
            value = self._fixed_values[name]
            value.copy_(torch.where(parameter == value.to(parameter.dtype), value, parameter.to(value.dtype)))
        return self._fixed_values

    @torch.no_grad()
    def publish_frozen_(self) -> None:
        """Round the tensors that `frozen` returned into the model, after you wrote to them."""
        for name, parameter in self._fixed.items():
            parameter.copy_(self._fixed_values[name])

    @torch.no_grad()
    def release_(self) -> None:
        """Give the parameters float32 storages of their own and unfold the scalars.

        Do not use the masters afterwards.
        """
        for name, value in self.frozen().items():
            self._fixed[name].data = value.float() if value.dtype in _HALF else value
        for parameter, view in zip(self.parameters.values(), self.named(self.values).values(), strict=True):
            parameter.data = view.clone(memory_format=torch.contiguous_format)
            parameter.grad = None
        if self._folding is not None:
            self._folding.enable_(False)


def _padded_size(size: int) -> int:
    """Return the number of elements that a parameter of `size` elements takes in a vector."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _stack(vector: Tensor, start: int, count: int, shape: torch.Size) -> Tensor:
    """View `count` adjacent parameters of one shape as (count, *shape); the first begins at `start`."""
    size = _padded_size(shape.numel())
    return vector[start : start + count * size].view(count, size)[:, : shape.numel()].view(count, *shape)


@dataclass(frozen=True, kw_only=True)
class UpdateRule:
    """An optimizer with its hyperparameters.

    The learning rate and the flag `alive` are tensors without dimensions. If a run is not alive, an update changes
    nothing, so its last good state is kept.
    """

    name: OptimizerName = "sgd"
    momentum: float = 0.9
    nesterov: bool = False
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    @property
    def num_states(self) -> int:
        """The number of state vectors of the optimizer."""
        return 2 if self.name != "sgd" else 1 if self.momentum else 0

    def update_(
        self,
        values: Tensor,
        gradient: Tensor,
        state: list[Tensor],
        *,
        lr: Tensor,
        weight_decay: float,
        step: Tensor,
        alive: Tensor,
    ) -> None:
        """Update `values` and `state` in place; if not `alive`, change nothing.

        Args:
            values: The parameters.
            gradient: Their gradient.
            state: The state vectors; as many as `num_states`.
            lr: The learning rate.
            weight_decay: The weight decay.
            step: The number of the step, from 1.
            alive: Whether the run's loss and gradients have been finite so far.
        """
        # Without a device to wait for, reading the flag is faster than computing with it.
        readable = values.device.type == "cpu" and not torch.compiler.is_compiling()
        if readable and not alive:
            return
        rule = self._adam if self.name != "sgd" else self._sgd
        updated = rule(values, gradient, state, lr, weight_decay, step)
        for old, new in zip((values, *state), updated, strict=True):
            old.copy_(new if readable else torch.where(alive, new, old))

    def _sgd(
        self, w: Tensor, g: Tensor, state: list[Tensor], lr: Tensor, weight_decay: float, step: Tensor
    ) -> tuple[Tensor, ...]:
        """v' = μ·v + g + λ·w;  w' = w - η·v', or w - η·(g + λ·w + μ·v') with Nesterov."""
        g = g + weight_decay * w if weight_decay else g
        if not state:
            return (w - lr * g,)
        v = (self.momentum * state[0]).add_(g)
        step = lr * (g + self.momentum * v if self.nesterov else v)
        return step.neg_().add_(w), v  # in place, because memory for a new vector costs more than the arithmetic

    def _adam(
        self, w: Tensor, g: Tensor, state: list[Tensor], lr: Tensor, weight_decay: float, step: Tensor
    ) -> tuple[Tensor, ...]:
        """m' = β₁m + (1-β₁)g;  v' = β₂v + (1-β₂)g²;  w' = w - η · m̂/(√v̂ + ε); AdamW decays w, Adam adds λ·w to g."""
        if self.name == "adam":
            g = g + weight_decay * w if weight_decay else g
        else:
            w = w * (1 - lr * weight_decay)
        one, two = self.betas
        m = one * state[0] + (1 - one) * g
        v = two * state[1] + (1 - two) * g * g
        size = (v / (1 - two**step)).sqrt() + self.eps
        return w - lr * (m / (1 - one**step)) / size, m, v
