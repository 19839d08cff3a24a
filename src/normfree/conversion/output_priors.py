"""Keep the biases of output layers that somebody set on purpose, such as the prior of a focal loss."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from normfree.errors import listed
from normfree.graph.flow import Flow
from normfree.plan import ResidualPlan
from normfree.report.tables import compact

_MOST_VALUES = 8  # distinct values of a prior; biases that were drawn or trained differ in nearly all entries


class OutputPriors:
    """The biases of output layers that are priors.

    A prior has few distinct values, not all 0: the same for all classes, or one for the scores and one for the boxes. A
    single number is a prior if it is larger than torch's default draws, U(-1/√fan_in, 1/√fan_in).
    """

    def __init__(self, model: nn.Module, plan: ResidualPlan, flow: Flow) -> None:
        self._found: dict[str, tuple[Tensor, Tensor]] = {}  # each bias and its values
        for layer in dict.fromkeys((*plan.classifier, *plan.layers())):
            module = model.get_submodule(layer.name)
            weight, bias = getattr(module, layer.parameter), getattr(module, "bias", None)
            if layer.parameter != "weight" or not isinstance(bias, nn.Parameter) or not _is_prior(bias, weight):
                continue
            if layer in plan.classifier or flow.returns_unchanged(layer.path):
                self._found.setdefault(layer.name, (bias, bias.detach().clone()))

    @torch.no_grad()
    def restore_(self) -> list[str]:
        """Write the priors back. Returns a note on them, if there are any."""
        for bias, values in self._found.values():
            bias.copy_(values)
        if not self._found:
            return []
        texts = {name: ", ".join(map(compact, v.unique().tolist())) for name, (_, v) in self._found.items()}
        return [f"kept the bias of output layers, which looks like a prior set on purpose: {listed(texts, texts)}"]


def _is_prior(bias: Tensor, weight: Tensor) -> bool:
    if not bias.any():
        return False
    if bias.numel() == 1:
        return bool(bias.abs() > 1.01 * weight.numel() ** -0.5)
    return bool(bias.unique().numel() <= min(bias.numel() // 2, _MOST_VALUES))
