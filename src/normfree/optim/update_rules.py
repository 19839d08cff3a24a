"""Update rules on one vector: SGD with momentum, Adam and AdamW.

A rule reads and writes only tensors, so that a step can be compiled and captured: the learning rate and whether the run
is still alive are tensors without dimensions. A run that is not alive changes nothing, which keeps its last good state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

OptimizerName = Literal["sgd", "adam", "adamw"]


@dataclass(frozen=True, kw_only=True)
class UpdateRule:
    """An optimizer by name with its numbers."""

    name: OptimizerName = "sgd"
    momentum: float = 0.9
    nesterov: bool = False
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    @property
    def memories(self) -> int:
        """How many vectors the optimizer remembers."""
        return 2 if self.name != "sgd" else 1 if self.momentum else 0

    def update_(
        self,
        values: Tensor,
        gradient: Tensor,
        memory: list[Tensor],
        *,
        lr: Tensor,
        weight_decay: float,
        count: Tensor,
        alive: Tensor,
    ) -> None:
        """One step number `count` (from 1) of `values` against `gradient`, in place; nothing when not `alive`."""
        new = self._adam if self.name != "sgd" else self._sgd
        changed = new(values, gradient, memory, lr, weight_decay, count)
        for old, fresh in zip((values, *memory), changed, strict=True):
            old.copy_(torch.where(alive, fresh, old))

    def _sgd(
        self, w: Tensor, g: Tensor, memory: list[Tensor], lr: Tensor, weight_decay: float, count: Tensor
    ) -> tuple[Tensor, ...]:
        """v' = μ·v + g + λ·w;  w' = w - η·v', or w - η·(g + λ·w + μ·v') with Nesterov."""
        g = g + weight_decay * w if weight_decay else g
        if not memory:
            return (w - lr * g,)
        v = self.momentum * memory[0] + g
        return w - lr * (g + self.momentum * v if self.nesterov else v), v

    def _adam(
        self, w: Tensor, g: Tensor, memory: list[Tensor], lr: Tensor, weight_decay: float, count: Tensor
    ) -> tuple[Tensor, ...]:
        """m' = β₁m + (1-β₁)g;  v' = β₂v + (1-β₂)g²;  w' = w - η · m̂/(√v̂ + ε); AdamW decays w, Adam adds λ·w to g."""
        if self.name == "adam":
            g = g + weight_decay * w if weight_decay else g
        else:
            w = w * (1 - lr * weight_decay)
        one, two = self.betas
        m = one * memory[0] + (1 - one) * g
        v = two * memory[1] + (1 - two) * g * g
        size = (v / (1 - two**count)).sqrt() + self.eps
        return w - lr * (m / (1 - one**count)) / size, m, v
