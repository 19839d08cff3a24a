"""What a model is made of, found in one walk: at thousands of modules a walk takes as long as some layers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Parts:
    """The modules and the parameters of a model by name; a shared one stands under its first name."""

    modules: Mapping[str, nn.Module]
    parameters: Mapping[str, nn.Parameter]


def parts(model: nn.Module) -> Parts:
    """Walk a model once; the names and their order are those of `named_modules` and `named_parameters`.

    >>> list(parts(nn.Sequential(nn.Linear(2, 2), nn.ReLU())).modules)
    ['', '0', '1']
    """
    modules = dict(model.named_modules())
    parameters: dict[str, nn.Parameter] = {}
    seen: set[int] = set()
    for prefix, module in modules.items():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                parameters[f"{prefix}.{name}" if prefix else name] = parameter
    return Parts(modules, parameters)


def address(name: str) -> str:
    """The name of a module or sum without its numbers, which those that are built alike have in common.

    >>> address("layer3.1")
    'layer.'
    """
    return re.sub(r"\d+", "", name)
