"""Parameter groups: learning rate and weight decay by the kind of parameter."""

from __future__ import annotations

from typing import Any

from torch import nn

from normfree.arguments import check_arguments
from normfree.methods import Method, get
from normfree.methods.fixup import is_transformer
from normfree.nn.normalizers import NORM_TYPES
from normfree.nn.scalars import ScalarBias, ScalarMultiplier, scalars_of
from normfree.nn.weight_layers import WEIGHT_LAYERS
from normfree.plan import ResidualPlan, remembered_method, remembered_plan, unwrapped


def param_groups(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float = 0.0,
    method: str | Method | None = None,
    plan: ResidualPlan | None = None,
) -> list[dict[str, Any]]:
    """Return the parameter groups of a model by its method, for any torch optimizer.

    Scalars have the method's learning rate: for Fixup a tenth of `lr`, and `lr` in a Transformer. For Fixup the biases
    of weight layers, such as the classifier's, belong to the scalars. Some methods do not decay gains and biases. Every
    parameter is in exactly one group.

    Schedulers that scale the rates keep their ratio. `OneCycleLR` and `CyclicLR` replace them: give these one rate per
    group, `max_lr=[g["lr"] for g in groups]`, because a single `max_lr` would give scalars the rate of the weights.

    >>> from normfree.models import build
    >>> [(g["name"], g["lr"]) for g in param_groups(build("resnet20", "fixup"), lr=0.1)]
    [('weights', 0.1), ('scalars', 0.010000000000000002)]

    Args:
        model: The model.
        lr: The learning rate of the weights.
        weight_decay: The weight decay.
        method: The method; the default is the one that the model was built or converted with.
        plan: The plan; the default is the one that the model remembers.

    Returns:
        A list of dictionaries with the keys `name`, `params`, `lr` and `weight_decay`.

    Raises:
        ValueError: If the model has no method or plan and none is given, or if a number is invalid.
    """
    check_arguments(model=model, lr=lr, weight_decay=weight_decay, plan=plan)
    chosen = _method_of(model) if method is None else get(method)
    plan = remembered_plan(model) if plan is None else plan
    if plan is None:
        raise ValueError(f"expected a model with a plan, got {type(model).__name__}; pass plan=normfree.discover(…)")
    if not lr > 0 or weight_decay < 0:
        raise ValueError(f"expected a positive lr and a weight decay of at least 0, got {lr} and {weight_decay}")
    params_by_kind: dict[str, list[nn.Parameter]] = {"weights": [], "gains and biases": [], "scalars": []}
    seen: set[int] = set()
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in seen:  # a shared one belongs to the first group
                seen.add(id(parameter))
                kind = _kind(module, name, parameter)
                slow = chosen.slow_biases and kind == "gains and biases" and name.endswith("bias")
                params_by_kind["scalars" if slow else kind].append(parameter)
    if chosen.decay == "all":
        params_by_kind["weights"] += params_by_kind.pop("gains and biases")
    rate = lr * chosen.scalar_rate.factor(len(plan.branches), transformer=is_transformer(plan))
    undecayed = 0.0 if chosen.decay == "weights" else weight_decay
    settings = {
        "weights": {"lr": lr, "weight_decay": weight_decay},
        "gains and biases": {"lr": lr, "weight_decay": undecayed},
        "scalars": {"lr": rate, "weight_decay": undecayed},
    }
    return [{"name": n, "params": params, **settings[n]} for n, params in params_by_kind.items() if params]


def _method_of(model: nn.Module) -> Method:
    """Return the method that a model was converted or built with."""
    spec = remembered_method(model)
    if spec is None:
        raise ValueError(
            f"expected a model that was built or converted with a method, got {type(model).__name__}; pass method="
        )
    made_by = getattr(unwrapped(model), "method", None)
    return made_by if isinstance(made_by, Method) and made_by.spec == spec else get(spec)  # it need not be registered


def _kind(module: nn.Module, name: str, parameter: nn.Parameter) -> str:
    """Return the kind of a parameter, from the type of the module that holds it."""
    if isinstance(module, ScalarBias | ScalarMultiplier) or name in scalars_of(module):
        return "scalars"
    if isinstance(module, WEIGHT_LAYERS):
        return "weights" if name == "weight" else "gains and biases"
    # In third-party modules a matrix is a weight (a fused projection, an embedding); a vector of any shape is not.
    matrix = sum(size > 1 for size in parameter.shape) > 1
    return "weights" if matrix and not isinstance(module, NORM_TYPES) else "gains and biases"
