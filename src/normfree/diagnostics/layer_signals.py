"""Weight layers in the backward pass: the norms of weights and gradients, and the branches that learn."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from normfree.diagnostics.moments import norms, to_floats
from normfree.nn.model_state import ModelParts
from normfree.nn.scalars import ScalarBias
from normfree.plan import Branch, ResidualPlan

BYTES_AT_ONCE = 2**28  # of gradients that are reduced together; a reduction costs about 0.3 ms on a GPU


@dataclass(frozen=True)
class LayerSignal:
    """The norms of a layer's weight and of its gradient; a composed weight counts with all its parts."""

    name: str
    weight_norm: float
    gradient_norm: float

    @property
    def ratio(self) -> float:
        """Gradient norm over weight norm: the relative size of an SGD step with learning rate 1."""
        return self.gradient_norm / self.weight_norm if self.weight_norm else math.inf


@contextmanager
def gradient_norms(parameters: Mapping[str, nn.Parameter]) -> Iterator[dict[str, Tensor]]:
    """Collect the norm of each parameter's gradient by the end of the context, and discard the gradients.

    Gradients arrive roughly in the reverse order of the parameters. They are reduced at the end, and for a large model
    also every `BYTES_AT_ONCE` on the way, which bounds the memory that they take.
    """
    found: dict[str, Tensor] = {}
    handles = []

    def reduce_arrived(names: Iterable[str]) -> None:
        arrived = {name: g for name in names if (g := parameters[name].grad) is not None}
        found.update(norms(arrived))
        for name in arrived:
            parameters[name].grad = None

    try:
        for names, last in _portions(parameters):
            handles.append(last.register_post_accumulate_grad_hook(lambda _p, names=names: reduce_arrived(names)))
        yield found
        reduce_arrived(parameters)
    finally:
        for handle in handles:
            handle.remove()


def _portions(parameters: Mapping[str, nn.Parameter]) -> Iterator[tuple[list[str], nn.Parameter]]:
    """Per device, in reverse order: yield a parameter every `BYTES_AT_ONCE`, with all names so far."""
    names: dict[torch.device, list[str]] = {}
    waiting: dict[torch.device, int] = {}
    for name, parameter in reversed(list(parameters.items())):
        device = parameter.device
        names.setdefault(device, []).append(name)
        waiting[device] = waiting.get(device, 0) + parameter.nbytes
        if waiting[device] > BYTES_AT_ONCE and parameter.requires_grad:
            yield names[device].copy(), parameter
            waiting[device] = 0


def layer_signals(
    parts: ModelParts, plan: ResidualPlan, gradients: Mapping[str, Tensor]
) -> tuple[tuple[LayerSignal, ...], dict[str, float]]:
    """The weight layers in the order of the plan, each once, and the norm of every parameter's gradient as a number.

    Tied weights have the name of the first.
    """
    first_names = {id(p): name for name, p in parts.parameters.items()}
    weights: dict[str, list[str]] = {}
    for layer in plan.layers():
        name = layer.name if layer.parameter == "weight" else layer.path
        if name not in weights:
            module = parts.modules[layer.name]
            plain = module._parameters.get(layer.parameter)
            composed = [plain] if plain is not None else [p for n, p in module.named_parameters() if n != "bias"]
            weights[name] = [first_names[id(p)] for p in composed]
    weight_norms = norms({name: parts.parameters[name] for names in weights.values() for name in names})
    both = {("weight", name): norm for name, norm in weight_norms.items()}
    both |= {("gradient", name): norm for name, norm in gradients.items()}
    numbers = to_floats(both)  # one wait for the device
    sizes = {name: numbers["weight", name] for name in weight_norms}
    slopes = {name: numbers["gradient", name] for name in gradients}
    layers = tuple(
        LayerSignal(layer, math.hypot(*(sizes[n] for n in names)), math.hypot(*(slopes.get(n, 0.0) for n in names)))
        for layer, names in weights.items()
        if names
    )
    return layers, slopes


def learning_branches(parts: ModelParts, plan: ResidualPlan, gradients: Mapping[str, float]) -> set[str]:
    """The branches in which a weight or multiplier, or one of their block, has a nonzero gradient.

    A bias does not count: its gradient does not reach the layers before it.
    """
    owners: dict[str, list[str]] = {}
    homes: dict[str, list[Branch]] = {}
    for branch in plan.branches:
        homes.setdefault(branch.place, []).append(branch)
        for layer in branch.layers:
            owners.setdefault(layer.name, []).append(branch.name)  # several if a block is called several times
    outside = {layer.name for layer in (*plan.stem, *plan.body, *plan.classifier)}
    outside |= {layer.name for branch in plan.branches for layer in branch.shortcut_layers}
    found: set[str] = set()
    for name, gradient in gradients.items():
        module = name.rpartition(".")[0]
        is_bias = name.endswith(("bias", ".shift", ".delta")) or isinstance(parts.modules[module], ScalarBias)
        if gradient == 0.0 or is_bias:
            continue
        if module in owners:
            found.update(owners[module])
        elif module not in outside:
            prefix = module
            while prefix and prefix not in homes:
                prefix = prefix.rpartition(".")[0]
            found.update(branch.name for branch in homes.get(prefix, ()))
    return found
