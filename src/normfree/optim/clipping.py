"""Gradient clipping: adaptive, unit by unit (AGC), and by the global norm.

`clip_adaptively_` and `clip_by_norm_` work on lists of tensors, never synchronize with the device, and can be
captured in a CUDA graph. Tensors of one shape share a few kernels, so the cost does not grow with the number of layers.

Sharded gradients (DTensor, as FSDP2 makes them) have the unit norms over all processes. Rows of a matrix that is
sharded along axis 0 are whole on one process. All other norms are sums over processes, and one reduction per dimension
of a device mesh computes all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from normfree.arguments import check_arguments
from normfree.nn.model_state import is_sharded
from normfree.plan import remembered_plan, unwrapped

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_TINY = 1e-30  # avoids a division by 0 for a zero gradient, whose factor is 1 anyway
_Key = tuple[object, ...]


@torch.no_grad()
def clip_adaptively_(params: Sequence[Tensor], grads: Sequence[Tensor], clip: float = 0.01, eps: float = 1e-3) -> None:
    """Scale gradients so that ‖G_i‖ ≤ clip · max(‖W_i‖, eps) for every unit i, in place.

    A unit is a row of axis 0: an output channel of a convolution (with any number of groups) or an output of a linear
    layer. A scalar or vector is one unit, also if it has further dimensions of length 1, as the gains of
    weight-normalized and standardized layers. Norms of half-precision tensors are computed in float32. Non-finite
    gradients stay non-finite.

    Reference: Brock 2021, equation 3 and its code (the unit of a vector is the whole of it).

    >>> weight, grad = torch.tensor([[3.0, 4.0], [0.0, 0.0]]), torch.ones(2, 2)
    >>> clip_adaptively_([weight], [grad], clip=0.1, eps=0.1)
    >>> grad.norm(dim=1)
    tensor([0.5000, 0.0100])

    Raises:
        ValueError: If the two lists do not match, or if `clip` or `eps` is not positive.
    """
    if not clip > 0 or not eps > 0:
        raise ValueError(f"expected a positive clip and eps, got {clip:g} and {eps:g}")
    if len(params) != len(grads):
        raise ValueError(f"expected a gradient for each of {len(params)} parameters, got {len(grads)}")
    groups: dict[_Key, list[int]] = {}
    sharded: list[int] = []
    for i, (param, grad) in enumerate(zip(params, grads, strict=True)):
        if param.shape != grad.shape:
            raise ValueError(
                f"expected a gradient of its parameter's shape {tuple(param.shape)}, got {tuple(grad.shape)} at {i}"
            )
        if is_sharded(grad):
            sharded.append(i)
        elif param.numel():
            groups.setdefault((param.shape, param.dtype, grad.dtype, grad.device), []).append(i)
    for indices in groups.values():
        weights = torch.stack([params[i] for i in indices])
        steps = torch.stack([grads[i] for i in indices])
        most = _unit_norms(weights).clamp_min(eps).mul(clip)
        factor = (most / _unit_norms(steps).clamp_min(_TINY)).clamp_max(1.0)
        torch._foreach_copy_([grads[i] for i in indices], list((steps * factor).unbind()))
    if sharded:
        _clip_sharded_([params[i] for i in sharded], [grads[i] for i in sharded], clip, eps)  # type: ignore[misc]


def _is_vector(shape: Sequence[int]) -> bool:
    """Whether a tensor of this shape is one unit: a scalar, or a vector with any number of dimensions of length 1."""
    return sum(length > 1 for length in shape) <= 1


def _unit_norms(stacked: Tensor) -> Tensor:
    """Return the norm of every unit of tensors stacked along a new first axis, shaped to broadcast over them."""
    shape = stacked.shape[1:]
    unit_axes = 1 if _is_vector(shape) else 2
    flat = stacked.reshape(*stacked.shape[:unit_axes], -1)
    wide = torch.promote_types(stacked.dtype, torch.float32)
    norms: Tensor = torch.linalg.vector_norm(flat, dim=-1, dtype=wide)
    return norms.reshape(norms.shape + (1,) * (stacked.dim() - unit_axes))


@torch.no_grad()
def _clip_sharded_(params: Sequence[DTensor], grads: Sequence[DTensor], clip: float, eps: float) -> None:
    """Scale sharded gradients unit by unit, in place; see `clip_adaptively_`. All processes must call it together.

    Raises:
        ValueError: If a gradient is a partial sum, which is not reduced over the processes yet.
    """
    for i, grad in enumerate(grads):
        if any(placement.is_partial() for placement in grad.placements):
            raise ValueError(f"expected gradients that are reduced over the processes, got a partial sum at {i}")
    squares = _unit_squares([*params, *grads])
    weights, steps = squares[: len(params)], squares[len(params) :]
    for grad, weight, step in zip(grads, weights, steps, strict=True):
        most = weight.sqrt().clamp_min(eps).mul(clip)
        local: Tensor = grad.to_local()
        local.mul_((most / step.sqrt().clamp_min(_TINY)).clamp_max(1.0))


def _unit_squares(tensors: Sequence[DTensor]) -> list[Tensor]:
    """Return the squared norms of the units in each local shard, shaped to broadcast over it."""
    squares: list[Tensor] = []
    sums: dict[tuple[int, int], tuple[DTensor, list[int]]] = {}  # by mesh and its dimension
    for i, tensor in enumerate(tensors):
        local: Tensor = tensor.to_local()
        axes = range(0 if _is_vector(tensor.shape) else 1, local.dim())
        wide = torch.promote_types(local.dtype, torch.float32)
        squares.append(torch.linalg.vector_norm(local, dim=tuple(axes), keepdim=True, dtype=wide).square())
        for dimension, placement in enumerate(tensor.placements):
            if placement.is_shard() and placement.dim % local.dim() in axes:  # type: ignore[attr-defined]
                sums.setdefault((id(tensor.device_mesh), dimension), (tensor, []))[1].append(i)
    for (_, dimension), (tensor, members) in sums.items():
        flat = torch.cat([squares[i].flatten() for i in members])
        dist.all_reduce(flat, group=tensor.device_mesh.get_group(dimension))
        parts = flat.split([squares[i].numel() for i in members])
        for i, part in zip(members, parts, strict=True):
            squares[i] = part.view_as(squares[i])
    return squares


@torch.no_grad()
def clip_by_norm_(grads: Sequence[Tensor], max_norm: float) -> Tensor:
    """Multiply all gradients by min(1, max_norm/‖g‖), with ‖g‖ their global norm; return ‖g‖ as a tensor.

    Reference: Pascanu 2013, algorithm 1.

    >>> grads = [torch.tensor([3.0]), torch.tensor(4.0)]
    >>> clip_by_norm_(grads, 1.0), grads
    (tensor(5.), [tensor([0.6000]), tensor(0.8000)])

    Raises:
        ValueError: If `max_norm` is not positive.
    """
    if not max_norm > 0:
        raise ValueError(f"expected a positive max_norm, got {max_norm:g}")
    if not grads:
        return torch.zeros(())
    groups: dict[_Key, list[Tensor]] = {}
    for grad in grads:
        groups.setdefault((grad.device, grad.dtype), []).append(grad)
    norms: list[Tensor] = []
    for group in groups.values():
        wide = torch.promote_types(group[0].dtype, torch.float32)
        norms += torch._foreach_norm(group, 2, dtype=wide)
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(grads[0].device) for norm in norms]))
    factor = (max_norm / total.clamp_min(_TINY)).clamp_max(1.0)
    for group in groups.values():
        torch._foreach_mul_(group, factor.to(group[0].device))
    return total


def clip_grad_agc_(
    model: nn.Module | Iterable[Tensor],
    clip: float = 0.01,
    eps: float = 1e-3,
    *,
    exclude: Iterable[str] | None = None,
) -> None:
    """Clip gradients unit by unit: ‖G_i‖ ≤ clip · max(‖W_i‖, eps) for every output i of every layer.

    Call it between `backward` and `optimizer.step`. Parameters without a gradient are skipped. See
    `clip_adaptively_` for the definition of a unit.

    Reference: Brock 2021, section 4.1 and appendix E (no clipping of the final linear layer).

    Args:
        model: A model, whose output layers are not clipped, or parameters. Pass `agc_parameters(model)` to look for
            the output layers once instead of at every step.
        clip: The largest ratio of gradient to weight.
        eps: The smallest norm of a weight that counts, so that zero weights can learn.
        exclude: The names of the modules not to clip, instead of the output layers; `()` clips everything.

    Raises:
        ValueError: If `clip` or `eps` is not positive, if the model has no module of a name in `exclude`, or if no
            output layer is found and `exclude` is not given.
    """
    check_arguments(parameters=model, clipping=clip)
    if isinstance(model, nn.Module):
        parameters: list[Tensor] = list(agc_parameters(model, exclude=exclude))
    elif exclude is not None:
        raise ValueError(
            "expected a model to exclude modules from, got parameters; remove their parameters from the list"
        )
    else:
        parameters = _as_list(model)
    pairs = [(p, p.grad) for p in parameters if p.grad is not None]
    clip_adaptively_([p for p, _ in pairs], [g for _, g in pairs], clip, eps)


def clip_grad_norm_(model: nn.Module | Iterable[Tensor], max_norm: float) -> Tensor:
    """Clip the gradients of a model or of parameters by their global norm, and return that norm; see `clip_by_norm_`.

    Unlike torch's function of this name, it never synchronizes with the device.
    """
    parameters: list[Tensor] = list(model.parameters()) if isinstance(model, nn.Module) else _as_list(model)
    return clip_by_norm_([p.grad for p in parameters if p.grad is not None], max_norm)


def agc_parameters(model: nn.Module, *, exclude: Iterable[str] | None = None) -> list[nn.Parameter]:
    """Return the parameters for adaptive clipping: all but those of the output layers.

    The output layers (the classifier, or all heads) are those of the plan that the model remembers. Of a model without
    a plan it is the last `Linear`.

    Args:
        model: The model.
        exclude: The names of the modules to leave out, instead of the output layers; `()` leaves out none.

    Raises:
        ValueError: If the model has no module of a name in `exclude`, or if no output layer is found and `exclude` is
            not given.
    """
    if isinstance(exclude, str):
        exclude = (exclude,)
    excluded = {id(p) for module in _named(model, exclude) for p in module.parameters()}
    return [p for p in model.parameters() if id(p) not in excluded]


def _named(model: nn.Module, names: Iterable[str] | None) -> list[nn.Module]:
    """Return the modules of these names, or the output layers if none are given."""
    if names is None:
        return _output_layers(model)
    modules = dict(model.named_modules())
    for name in (names := list(names)):
        if name not in modules:
            raise ValueError(
                f"expected the name of a module of {type(model).__name__} in exclude, got '{name}'; "
                "take it from model.named_modules()"
            )
    return [modules[name] for name in names]


def _output_layers(model: nn.Module) -> list[nn.Module]:
    """Return the output layers that the plan names, else the last `Linear`; an empty list if the plan has none."""
    plan = remembered_plan(model)
    if plan is not None:
        modules = dict(unwrapped(model).named_modules())
        return [modules[layer.name] for layer in plan.classifier if layer.name in modules]
    linears: list[nn.Module] = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if not linears:
        raise ValueError(
            f"expected a model with a plan or a Linear classifier, got {type(model).__name__}; "
            "pass exclude= with the classifier's name, or exclude=() to clip everything"
        )
    return linears[-1:]


def _as_list(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return a list of one parameter or of many."""
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)
