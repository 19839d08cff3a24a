"""Where an initializer works: the model, its plan, the source of randomness, and the draws themselves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from normfree import theory
from normfree.nn.weight import WEIGHT_LAYERS, set_weight_
from normfree.plan import Layer, ResidualPlan


@dataclass(frozen=True)
class Site:
    """What an initializer sees. Every draw comes from `generator`, or from torch's global one when that is None."""

    model: nn.Module
    plan: ResidualPlan
    generator: torch.Generator | None = None
    example: Tensor | None = None
    modules: dict[str, nn.Module] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "modules", dict(self.model.named_modules()))

    def module(self, layer: Layer) -> nn.Conv2d | nn.Linear:
        """The weight layer of that name; `ValueError` when the model has none."""
        module = self.modules.get(layer.name)
        if not isinstance(module, WEIGHT_LAYERS):
            got = "nothing" if module is None else type(module).__name__
            raise ValueError(f"expected a weight layer at '{layer.name}', got {got}; the plan is of another model")
        return module  # type: ignore[return-value]  # Conv1d and Conv3d have the same fields

    def each(self, layers: Iterable[Layer]) -> Iterator[tuple[Layer, nn.Conv2d | nn.Linear]]:
        """Each layer with its module."""
        return ((layer, self.module(layer)) for layer in layers)

    def normal(self, module: nn.Conv2d | nn.Linear, variance: float = 1.0) -> Tensor:
        """A weight with independent N(0, variance) entries, drawn where the generator lives."""
        device = self.generator.device if self.generator else "cpu"
        draw = torch.empty(module.weight.shape, device=device).normal_(generator=self.generator)
        return draw.mul_(variance**0.5)

    def orthogonal(self, module: nn.Conv2d | nn.Linear) -> Tensor:
        """A weight whose (rows, rest) matrix is orthogonal, from the Haar measure (QR with the signs corrected)."""
        device = self.generator.device if self.generator else "cpu"
        return nn.init.orthogonal_(torch.empty(module.weight.shape, device=device), generator=self.generator)

    def default_(self, module: nn.Conv2d | nn.Linear) -> None:
        """The framework's default weight, U(-1/√fan_in, 1/√fan_in), so that Var[W] = 1/(3·fan_in)."""
        device = self.generator.device if self.generator else "cpu"
        draw = torch.empty(module.weight.shape, device=device).uniform_(-1, 1, generator=self.generator)
        set_weight_(module, draw.div_(fans(module)[0] ** 0.5))

    def default_classifier_(self) -> None:
        """Give the classifier the framework's default weight; its bias stays 0."""
        for _, module in self.each(self.plan.classifier):
            self.default_(module)


def fans(module: nn.Conv2d | nn.Linear) -> tuple[int, int]:
    """Fan-in and fan-out, k²·c and k²·d a group."""
    out, per_group, *kernel = module.weight.shape
    groups = getattr(module, "groups", 1)
    return theory.fan_in(per_group * groups, tuple(kernel), groups), theory.fan_out(out, tuple(kernel), groups)


def gain(layer: Layer) -> float:
    """γ of He's rule: 2 for a layer that reads a ReLU, 1 for one that does not."""
    return theory.forward_gain("relu") if layer.activated_in else 1.0


def standardized(weight: Tensor, variance: float, *, per_channel: bool = False) -> Tensor:
    """Shift and scale a sampled weight to mean 0 and exactly this variance, over all or over each output channel.

    Reference: robust, section 4 ("we perform the empirical standardization"); per channel as equation 3.
    """
    rows = weight.flatten(1) if per_channel else weight.flatten().unsqueeze(0)
    centred = rows - rows.mean(1, keepdim=True)
    # A row of one weight has no variance of its own and keeps its drawn value.
    std = centred.square().mean(1, keepdim=True).sqrt()
    centred = torch.where(std > 0, centred / std.clamp_min(1e-12), rows)
    scaled: Tensor = centred * variance**0.5
    return scaled.view_as(weight)
