"""The update of a training step: SGD with momentum, Adam or AdamW, on whole vectors of parameters.

It reads and writes tensors only, so that a step can be compiled and captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

OptimizerName = Literal["sgd", "adam", "adamw"]


@dataclass(frozen=True, kw_only=True)
class UpdateRule:
    """An optimizer with its hyperparameters.

    The learning rate and the flag `alive` are tensors without dimensions. If a run is not alive, an update changes
    nothing, so its last good state is kept.
    """

    name: OptimizerName = "sgd"
    momentum: float = 0.9
    nesterov: bool = False
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    @property
    def num_states(self) -> int:
        """The number of state vectors of the optimizer."""
        return 2 if self.name != "sgd" else 1 if self.momentum else 0

    def update_(
        self,
        values: Tensor,
        gradient: Tensor,
        state: list[Tensor],
        *,
        lr: Tensor,
        weight_decay: float,
        step: Tensor,
        alive: Tensor,
    ) -> None:
        """Update `values` and `state` in place; if not `alive`, change nothing.

        Args:
            values: The parameters.
            gradient: Their gradient.
            state: The state vectors; as many as `num_states`.
            lr: The learning rate.
            weight_decay: The weight decay.
            step: The number of the step, from 1.
            alive: Whether the run's loss and gradients have been finite so far.
        """
        # Without a device to wait for, reading the flag is faster than computing with it.
        readable = values.device.type == "cpu" and not torch.compiler.is_compiling()
        if readable and not alive:
            return
        rule = self._adam if self.name != "sgd" else self._sgd
        updated = rule(values, gradient, state, lr, weight_decay, step)
        for old, new in zip((values, *state), updated, strict=True):
            old.copy_(new if readable else torch.where(alive, new, old))

    def _sgd(
        self, w: Tensor, g: Tensor, state: list[Tensor], lr: Tensor, weight_decay: float, step: Tensor
    ) -> tuple[Tensor, ...]:
        """v' = μ·v + g + λ·w;  w' = w - η·v', or w - η·(g + λ·w + μ·v') with Nesterov."""
        g = g + weight_decay * w if weight_decay else g
        if not state:
            return (w - lr * g,)
        v = (self.momentum * state[0]).add_(g)
        step = lr * (g + self.momentum * v if self.nesterov else v)
        return step.neg_().add_(w), v  # in place, because memory for a new vector costs more than the arithmetic

    def _adam(
        self, w: Tensor, g: Tensor, state: list[Tensor], lr: Tensor, weight_decay: float, step: Tensor
    ) -> tuple[Tensor, ...]:
        """m' = β₁m + (1-β₁)g;  v' = β₂v + (1-β₂)g²;  w' = w - η · m̂/(√v̂ + ε); AdamW decays w, Adam adds λ·w to g."""
        if self.name == "adam":
            g = g + weight_decay * w if weight_decay else g
        else:
            w = w * (1 - lr * weight_decay)
        one, two = self.betas
        m = one * state[0] + (1 - one) * g
        v = two * state[1] + (1 - two) * g * g
        size = (v / (1 - two**step)).sqrt() + self.eps
        return w - lr * (m / (1 - one**step)) / size, m, v
