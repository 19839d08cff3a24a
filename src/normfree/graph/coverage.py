"""Whether a plan accounts for every weight of a model."""

from __future__ import annotations

from torch import nn

from normfree.nn.weight_layers import WEIGHT_LAYERS
from normfree.plan import ResidualPlan


def unaccounted(model: nn.Module, plan: ResidualPlan) -> tuple[str, ...]:
    """The parameters of two or more dimensions that the plan neither lists as weight layers nor as standing aside.

    What is named here was not reached on the example (an unused head, an expert that was not chosen), or was used in a
    way that is not understood (a recurrent layer).

    >>> import torch
    >>> from normfree.graph import discover
    >>> model = nn.Sequential(nn.Linear(4, 4), nn.GRU(4, 4))
    >>> unaccounted(model, discover(model, torch.zeros(2, 4)))
    ('1.weight_ih_l0', '1.weight_hh_l0')
    """
    modules = dict(model.named_modules())
    known: set[int] = set()
    for layer in plan.layers():
        module = modules.get(layer.name)
        if isinstance(module, WEIGHT_LAYERS):
            known.update(id(p) for p in module.parameters())  # its gains and whatever its weight is made of
        elif module is not None:
            known.add(id(getattr(module, layer.parameter, None)))
    return tuple(
        name
        for name, parameter in model.named_parameters()
        if parameter.dim() >= 2 and id(parameter) not in known and name not in plan.aside
    )
