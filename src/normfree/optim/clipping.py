"""Gradient clipping: adaptive, unit by unit, and by the global norm.

The cores `agc_` and `norm_` work on lists of tensors, wait for no number from the device and can be captured in a CUDA
graph; tensors of one shape go through the same few kernels, however many layers a network has.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from normfree.plan import ResidualPlan

_TINY = 1e-30  # keeps a zero gradient from dividing by 0; its factor is 1 all the same
_Key = tuple[object, ...]


@torch.no_grad()
def agc_(params: Sequence[Tensor], grads: Sequence[Tensor], clip: float = 0.01, eps: float = 1e-3) -> None:
    """Scale gradients so that ‖G_i‖ ≤ clip · max(‖W_i‖, eps) for every unit i, in place.

    A unit is a row of axis 0: an output channel of a convolution (of any number of groups), an output of a linear
    layer. Scalars, vectors and what is a vector but for dimensions of length 1, such as the gains of weight-normalized
    and standardized layers, are one unit. Norms of half-precision tensors are taken in float32. A gradient that is not
    finite stays so.

    Reference: Brock 2021, equation 3 and its code (the unit of a vector is the whole of it).

    >>> weight, grad = torch.tensor([[3.0, 4.0], [0.0, 0.0]]), torch.ones(2, 2)
    >>> agc_([weight], [grad], clip=0.1, eps=0.1)
    >>> grad.norm(dim=1)
    tensor([0.5000, 0.0100])

    Raises `ValueError` when the two lists do not match or a bound is not positive.
    """
    if not clip > 0 or not eps > 0:
        raise ValueError(f"expected a positive clip and eps, got {clip:g} and {eps:g}")
    if len(params) != len(grads):
        raise ValueError(f"expected a gradient for each of {len(params)} parameters, got {len(grads)}")
    alike: dict[_Key, list[int]] = {}
    for i, (param, grad) in enumerate(zip(params, grads, strict=True)):
        if param.shape != grad.shape:
            raise ValueError(
                f"expected a gradient of its parameter's shape {tuple(param.shape)}, got {tuple(grad.shape)} at {i}"
            )
        if param.numel():
            alike.setdefault((param.shape, param.dtype, grad.dtype, grad.device), []).append(i)
    for indices in alike.values():
        weights = torch.stack([params[i] for i in indices])
        steps = torch.stack([grads[i] for i in indices])
        most = _unit_norms(weights).clamp_min(eps).mul(clip)
        factor = (most / _unit_norms(steps).clamp_min(_TINY)).clamp_max(1.0)
        torch._foreach_copy_([grads[i] for i in indices], list((steps * factor).unbind()))


def _unit_norms(stacked: Tensor) -> Tensor:
    """The norm of every unit of tensors stacked along a new first axis, shaped to broadcast over them."""
    shape = stacked.shape[1:]
    kept = 1 if sum(length > 1 for length in shape) <= 1 else 2  # a vector is one unit
    flat = stacked.reshape(*stacked.shape[:kept], -1)
    wide = torch.promote_types(stacked.dtype, torch.float32)
    norms: Tensor = torch.linalg.vector_norm(flat, dim=-1, dtype=wide)
    return norms.reshape(norms.shape + (1,) * (stacked.dim() - kept))


@torch.no_grad()
def norm_(grads: Sequence[Tensor], max_norm: float) -> Tensor:
    """Multiply all gradients by min(1, max_norm/‖g‖), ‖g‖ the norm of all of them together; returns ‖g‖ on the device.

    Reference: Pascanu 2013, algorithm 1.

    >>> grads = [torch.tensor([3.0]), torch.tensor(4.0)]
    >>> norm_(grads, 1.0), grads
    (tensor(5.), [tensor([0.6000]), tensor(0.8000)])

    Raises `ValueError` when `max_norm` is not positive.
    """
    if not max_norm > 0:
        raise ValueError(f"expected a positive max_norm, got {max_norm:g}")
    if not grads:
        return torch.zeros(())
    alike: dict[_Key, list[Tensor]] = {}
    for grad in grads:
        alike.setdefault((grad.device, grad.dtype), []).append(grad)
    norms: list[Tensor] = []
    for group in alike.values():
        wide = torch.promote_types(group[0].dtype, torch.float32)
        norms += torch._foreach_norm(group, 2, dtype=wide)
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(grads[0].device) for norm in norms]))
    factor = (max_norm / total.clamp_min(_TINY)).clamp_max(1.0)
    for group in alike.values():
        torch._foreach_mul_(group, factor.to(group[0].device))
    return total


def clip_grad_agc_(
    model: nn.Module | Iterable[Tensor],
    clip: float = 0.01,
    eps: float = 1e-3,
    *,
    exclude: Iterable[str] | None = None,
) -> None:
    """Clip the gradients of a model (or of some parameters) unit by unit, see `agc_`; call it before the optimizer.

    Of a model, the classifier is left out, or the modules named in `exclude`. Parameters without a gradient are
    skipped. Call it with `agc_parameters(model)` to look for the classifier once and not at every step.

    Reference: Brock 2021, section 4.1 and appendix E (no clipping of the final linear layer).

    Raises `ValueError` where `agc_` or `agc_parameters` does.
    """
    if isinstance(model, nn.Module):
        parameters: list[Tensor] = list(agc_parameters(model, exclude=exclude))
    elif exclude is not None:
        raise ValueError("expected a model to exclude modules from, got parameters; leave theirs out of the list")
    else:
        parameters = _listed(model)
    pairs = [(p, p.grad) for p in parameters if p.grad is not None]
    agc_([p for p, _ in pairs], [g for _, g in pairs], clip, eps)


def clip_grad_norm_(model: nn.Module | Iterable[Tensor], max_norm: float) -> Tensor:
    """Clip the gradients of a model (or of some parameters) by their norm, see `norm_`; returns that norm.

    Unlike torch's function of this name it never looks at the number, so the device does not wait.
    """
    parameters: list[Tensor] = list(model.parameters()) if isinstance(model, nn.Module) else _listed(model)
    return norm_([p.grad for p in parameters if p.grad is not None], max_norm)


def agc_parameters(model: nn.Module, *, exclude: Iterable[str] | None = None) -> list[nn.Parameter]:
    """The parameters that adaptive clipping looks at: all but those of the classifier.

    The classifier is what the model's plan says, else the last `Linear`. `exclude` names the modules to leave out
    instead; with `exclude=()` none is.

    Raises `ValueError` for a name that the model lacks, and when no classifier is found and `exclude` not given.
    """
    if isinstance(exclude, str):
        exclude = (exclude,)
    left_out: set[int] = set()
    for name in _classifier(model) if exclude is None else exclude:
        try:
            left_out |= {id(p) for p in model.get_submodule(name).parameters()}
        except AttributeError:
            raise ValueError(
                f"expected the name of a module of {type(model).__name__} in exclude, got '{name}'; "
                "take it from model.named_modules()"
            ) from None
    return [p for p in model.parameters() if id(p) not in left_out]


def _classifier(model: nn.Module) -> list[str]:
    """The qualified names of the classifier's layers."""
    plan = getattr(model, "plan", None)
    if isinstance(plan, ResidualPlan) and plan.classifier:
        return [layer.name for layer in plan.classifier]
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not linears:
        raise ValueError(
            f"expected a model with a plan or a Linear classifier, got {type(model).__name__}; "
            "pass exclude= with the classifier's name, or exclude=() to clip everything"
        )
    return linears[-1:]


def _listed(parameters: Iterable[Tensor]) -> list[Tensor]:
    """A list of one parameter or of many."""
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)
