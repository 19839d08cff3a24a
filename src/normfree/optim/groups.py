"""Parameter groups: which parameters learn slower and which are not decayed, by what they are and never by name."""

from __future__ import annotations

from typing import Any

from torch import nn

from normfree.methods import Method, get
from normfree.nn.normalizers import NORM_TYPES
from normfree.nn.scalar_wrapping import scalars_of
from normfree.nn.scalars import ScalarBias, ScalarMultiplier
from normfree.nn.weight_layers import WEIGHT_LAYERS
from normfree.plan import ResidualPlan


def param_groups(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float = 0.0,
    method: str | Method | None = None,
    plan: ResidualPlan | None = None,
) -> list[dict[str, Any]]:
    """The groups that the method of `model` asks for, to hand to any torch optimizer.

    Scalars learn at the method's rate (a tenth of `lr` for Fixup, or ∝ 1/L); gains and biases are not decayed where the
    method says so. Every parameter is in exactly one group; each group has a `name`. A model that was not built here
    needs `method` and `plan`, those it was converted with.

    >>> from normfree.models import build
    >>> [(g["name"], g["lr"]) for g in param_groups(build("resnet20", "fixup"), lr=0.1)]
    [('weights', 0.1), ('scalars', 0.010000000000000002)]

    Raises `ValueError` when the model states no method or plan and none is given.
    """
    record = getattr(model, "method", None) if method is None else get(method)
    if not isinstance(record, Method):
        raise ValueError(f"expected a model with a method, got {type(model).__name__}; pass method=, or build it here")
    stated = getattr(model, "plan", None) if plan is None else plan
    if not isinstance(stated, ResidualPlan):
        raise ValueError(f"expected a model with a plan, got {type(model).__name__}; pass plan=normfree.discover(…)")
    if not lr > 0 or weight_decay < 0:
        raise ValueError(f"expected a positive lr and a weight decay of at least 0, got {lr} and {weight_decay}")
    sorted_out: dict[str, list[nn.Parameter]] = {"weights": [], "gains and biases": [], "scalars": []}
    seen: set[int] = set()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in seen:  # a shared parameter belongs to the first group that holds it
                seen.add(id(parameter))
                sorted_out[_class(module, name, parameter)].append(parameter)
    if record.decay == "all":
        sorted_out["weights"] += sorted_out.pop("gains and biases")
    rate = lr * record.scalar_rate.factor(len(stated.branches))
    undecayed = 0.0 if record.decay == "weights" else weight_decay
    settings = {
        "weights": {"lr": lr, "weight_decay": weight_decay},
        "gains and biases": {"lr": lr, "weight_decay": undecayed},
        "scalars": {"lr": rate, "weight_decay": undecayed},
    }
    return [{"name": n, "params": params, **settings[n]} for n, params in sorted_out.items() if params]


def _class(module: nn.Module, name: str, parameter: nn.Parameter) -> str:
    """What a parameter is, from the type of the module that holds it."""
    if isinstance(module, ScalarBias | ScalarMultiplier) or name in scalars_of(module):
        return "scalars"
    if isinstance(module, WEIGHT_LAYERS):
        return "weights" if name == "weight" else "gains and biases"
    # Of other people's modules a matrix is a weight (a fused projection, an embedding), a vector in whatever shape is
    # none.
    matrix = sum(size > 1 for size in parameter.shape) > 1
    return "weights" if matrix and not isinstance(module, NORM_TYPES) else "gains and biases"
