"""`initialize_`: check that a method fits a network, then write every parameter."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor, nn

from normfree.methods.init_context import Batch, InitContext
from normfree.methods.method import Method, get
from normfree.nn.model_state import restored_on_error
from normfree.nn.normalizers import NORM_TYPES, is_norm
from normfree.nn.residual import NEUTRAL, Residual
from normfree.nn.scalar_wrapping import scalars_of
from normfree.nn.scalars import ScalarBias, ScalarMultiplier
from normfree.nn.weight_layers import WEIGHT_LAYERS, weight_kind
from normfree.plan import ResidualPlan, remembered_plan


@torch.no_grad()
def initialize_(
    model: nn.Module,
    method: str | Method,
    plan: ResidualPlan | None = None,
    *,
    example: Batch | None = None,
    generator: torch.Generator | None = None,
    restore: bool = True,
) -> nn.Module:
    """Initialize a model by a method, in place.

    Writes weights, biases (0), scalars (by the method's rule) and normalizers (neutral); adds and removes no module.
    Embeddings of normfree's Transformers are drawn; other embeddings, and layers tied to them, stay unchanged.

    Args:
        model: The model. It must have the modules that the method needs: build or convert it with the same method.
        method: A method, or its name with options, such as `"hanin:r=0.8"`.
        plan: The residual branches of the model. The default is the plan that the model remembers from its
            conversion or construction; for any other, pass the one from `discover`.
        example: A batch of inputs, for data-driven methods such as `"lsuv"`.
        generator: The source of all draws, so that one seed gives the same weights on any device. The default is
            torch's global generator.
        restore: Whether an error leaves the model unchanged; this copies every weight first.

    Returns:
        The model.

    Raises:
        ValueError: If the method needs residual branches and the plan has none, if it needs a batch and gets none, if
            the model lacks the method's modules, or if a weight is computed from other parameters and cannot be set.
            The model is then unchanged.
    """
    method = get(method)
    if plan is None:
        plan = remembered_plan(model)
        if plan is None:
            raise ValueError(
                f"expected a model that provides a plan, got {type(model).__name__}; "
                "pass plan=normfree.discover(model, example)"
            )
    ctx = InitContext(model, plan, generator, example)
    _check(ctx, method)
    with restored_on_error(model) if restore else nullcontext():
        _write_(ctx, method)
    return model


def _write_(ctx: InitContext, method: Method) -> None:
    """Reset normalizers, scalars and biases, set the scalars of the rule, then run the method's initializer."""
    for module in ctx.modules.values():
        if isinstance(module, NORM_TYPES):
            module.reset_parameters()
        elif isinstance(module, ScalarBias) and module.learnable:
            module.set_(0.0)
        elif isinstance(module, ScalarMultiplier) and module.learnable:
            module.set_(1.0)
    for branch in ctx.plan.branches:
        residual = ctx.modules.get(branch.name)
        if isinstance(residual, Residual):
            residual.set_scalars_(method.rule.at(branch.position))
    for scalar, value in _added_scalars(ctx.plan).items():
        ctx.model.get_parameter(scalar).fill_(value)
    ctx.zero_biases_()
    ctx.embed_()
    method.initializer(ctx)


def _added_scalars(plan: ResidualPlan) -> dict[str, float]:
    """Return the initial values of the scalars that a conversion added, by parameter name."""
    added = () if plan.changes is None else plan.changes.added
    return {scalar.name: scalar.value for scalar in added if scalar.value is not None}


def _check_added_scalars(ctx: InitContext, method: Method) -> None:
    """Raise if a converted model has the scalars of another method, or if the plan does not list its scalars."""
    added = _added_scalars(ctx.plan)
    parameters = dict(ctx.model.named_parameters()) if added else {}
    by = "" if ctx.plan.changes is None else ctx.plan.changes.method
    if added and by != method.spec:
        raise ValueError(
            f"method '{method.spec}' expects its own scalars, got those of '{by}', by which the model was converted; "
            f"convert the original again, by '{method.spec}'"
        )
    for name, module in ctx.modules.items():
        missing = [scalar for scalar in scalars_of(module) if (f"{name}.{scalar}" if name else scalar) not in added]
        if missing:
            raise ValueError(
                f"expected the plan of the conversion, got one that does not list the scalar {missing[0]} of '{name}'; "
                "pass the plan that convert returned, or convert the original again"
            )
    for scalar in added:
        if scalar not in parameters:
            raise ValueError(f"expected a scalar '{scalar}', got a model without it; the plan belongs to another model")


def check_example(ctx: InitContext, method: Method) -> None:
    """Raise if a data-driven method lacks a usable batch, or if the model has layers that it cannot measure."""
    if not method.needs_example:
        return
    if ctx.example is None:
        raise ValueError(
            f"method '{method.name}' sets its weights from data: expected a batch, got none; pass example="
        )
    given = (ctx.example,) if isinstance(ctx.example, Tensor) else ctx.example
    values = torch.cat([t.double().flatten() for t in given])
    if not (values.numel() and values.isfinite().all() and values.var(unbiased=False) > 0):
        shapes = " and ".join(str(tuple(t.shape)) for t in given)
        raise ValueError(
            f"method '{method.name}' sets its weights from data: expected a batch of finite values that vary, got "
            f"shape {shapes} without them; pass example=a batch of the training data"
        )
    for layer, module in ctx.each(ctx.plan.layers()):
        if not isinstance(module, WEIGHT_LAYERS):
            raise ValueError(
                f"method '{method.name}' measures the output of each layer: expected convolutions and linear layers, "
                f"got {type(module).__name__} at '{layer.name}'; use a method that needs no batch, such as 'fixup'"
            )


def _check(ctx: InitContext, method: Method) -> None:
    """Raise if the plan, the model's modules or the batch do not fit the method."""
    if "none" not in method.skips:
        ctx.plan.require_branches(method.name)
    check_example(ctx, method)
    for layer in ctx.plan.layers():
        ctx.module(layer)  # raises if the model does not have the layer
    named = {branch.name for branch in ctx.plan.branches}
    for name, module in ctx.modules.items():
        if isinstance(module, Residual) and module.branch is not None and name not in named:
            raise ValueError(
                f"expected a plan of every residual block, got one without '{name}'; the plan belongs to another model"
            )
    _check_added_scalars(ctx, method)
    remedy = f"build the model with method='{method.name}', or convert it"
    if ctx.plan.changes is not None:
        remedy = f"convert the original again, by '{method.spec}'"
    for layer, weighted in ctx.each(ctx.plan.hidden()):
        if weight_kind(weighted) != method.weight:
            raise ValueError(
                f"method '{method.name}' expects {method.weight} layers, got {type(weighted).__name__} at "
                f"'{layer.name}'; {remedy}"
            )
    if method.kind == "norm-free":
        for name, module in ctx.modules.items():
            if is_norm(module):
                raise ValueError(
                    f"method '{method.name}' expects a model without normalization, got {type(module).__name__} at "
                    f"'{name}'; {remedy}"
                )
    for branch in ctx.plan.branches if not _added_scalars(ctx.plan) else ():  # else the conversion added every scalar
        _check_scalars(ctx, method, branch.name, method.rule.at(branch.position), remedy)


def _check_scalars(ctx: InitContext, method: Method, name: str, values: dict[str, float], remedy: str) -> None:
    """Raise if a sum lacks a scalar whose initial value is not neutral."""
    residual = ctx.modules.get(name)
    for scalar, value in values.items():
        present = isinstance(residual, Residual) and not isinstance(getattr(residual, scalar), nn.Identity)
        if not present and value != NEUTRAL[scalar]:
            raise ValueError(
                f"method '{method.name}' expects a scalar {scalar} = {value:g} in the sum '{name}', got none; {remedy}"
            )
