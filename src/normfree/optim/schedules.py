"""Learning-rate schedules as pure functions: the step gives a factor in [0, 1] on every group's learning rate.

Steps t count from 0 to T = epochs · steps_per_epoch. A warm-up of W steps multiplies the schedule by (t + 1)/W or its
square, so the first step has a positive rate and step W - 1 the full one. Cosine and linear decay begin after the
warm-up; the milestones of a step schedule do not move.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

ScheduleKind = Literal["constant", "step", "cosine", "inverse_sqrt", "linear"]
WarmupShape = Literal["linear", "quadratic"]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A schedule and its warm-up, independent of the length of a run.

    >>> halves = Schedule(kind="step", milestones=(0.5,), decay=0.1)
    >>> [halves.factor(step, steps_per_epoch=10, epochs=4) for step in (0, 19, 20)]
    [1.0, 1.0, 0.1]

    Attributes:
        kind: The kind of decay.
        milestones: The fractions of the run after which a step schedule multiplies the rate by `decay`.
        decay: The factor at a milestone.
        by: Whether a cosine falls after every step or after every epoch.
        warmup: The length of the warm-up.
        warmup_in: The unit of that length.
        warmup_shape: Whether the rate grows linearly or quadratically during the warm-up.

    Raises:
        ValueError: If a name is unknown or a number is out of range.
    """

    kind: ScheduleKind = "constant"
    milestones: tuple[float, ...] = (0.5, 0.75)
    decay: float = 0.1
    by: Literal["step", "epoch"] = "step"
    warmup: float = 0.0
    warmup_in: Literal["epochs", "steps"] = "epochs"
    warmup_shape: WarmupShape = "linear"

    def __post_init__(self) -> None:
        allowed = {
            "kind": get_args(ScheduleKind),
            "by": ("step", "epoch"),
            "warmup_in": ("epochs", "steps"),
            "warmup_shape": get_args(WarmupShape),
        }
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise ValueError(
                    f"expected one of {', '.join(values)} for '{name}' of a schedule, got {getattr(self, name)!r}"
                )
        if not all(0 <= m <= 1 for m in self.milestones) or list(self.milestones) != sorted(self.milestones):
            raise ValueError(
                f"expected milestones as rising fractions of the run between 0 and 1, got {list(self.milestones)}"
            )
        if not 0 < self.decay <= 1:
            raise ValueError(f"expected a decay above 0 and at most 1 for a schedule, got {self.decay:g}")
        if not 0 <= self.warmup < math.inf:
            raise ValueError(f"expected a warm-up of at least 0 {self.warmup_in}, got {self.warmup:g}")

    def factor(self, step: int, steps_per_epoch: int, epochs: float) -> float:
        """Return the factor on the learning rate at a step; after the end of the run it stays constant.

        The factor is warm-up(t) times one of: 1 (constant); decay^k after k milestones (step); √(W/max(t + 1, W))
        (inverse_sqrt); ½·(1 + cos π·p) (cosine); 1 - p (linear). Here p = (t - W)/(T - W), clipped to [0, 1]; with
        `by="epoch"`, a cosine takes the first step of the epoch for t.

        Reference: Goyal 2017, section 2.2 (linear warm-up); the code of wninit (quadratic); Loshchilov & Hutter 2017,
        equation 5, without restarts (cosine); Vaswani 2017, equation 3, without its constant (inverse_sqrt).

        Args:
            step: The step t, from 0.
            steps_per_epoch: The number of steps per epoch.
            epochs: The length of the run.

        Raises:
            ValueError: If the step or the length is negative.
        """
        if step < 0 or steps_per_epoch < 1 or epochs < 0:
            raise ValueError(
                "expected a step of at least 0, at least 1 step per epoch and at least 0 epochs, "
                f"got {step}, {steps_per_epoch} and {epochs:g}"
            )
        total = round(steps_per_epoch * epochs)
        warmup = round(self.warmup * (steps_per_epoch if self.warmup_in == "epochs" else 1))
        factor = self._decayed(step, steps_per_epoch, total, warmup)
        if step >= warmup:
            return factor
        return ((step + 1) / warmup) ** (2 if self.warmup_shape == "quadratic" else 1) * factor

    def _decayed(self, step: int, steps_per_epoch: int, total: int, warmup: int) -> float:
        """Return the factor without the warm-up."""
        if self.kind == "step":
            # Rounded, because 136/182 of 182 epochs must be the start of epoch 136 and not the step after it.
            return float(self.decay ** sum(round(milestone * total) <= step for milestone in self.milestones))
        if self.kind == "inverse_sqrt":
            constant_steps = max(warmup, 1)
            return math.sqrt(constant_steps / max(step + 1, constant_steps))
        if self.kind == "constant":
            return 1.0
        if self.kind == "cosine" and self.by == "epoch":
            step -= step % steps_per_epoch
        progress = min(max(step - warmup, 0) / max(total - warmup, 1), 1.0)
        return 0.5 * (1 + math.cos(math.pi * progress)) if self.kind == "cosine" else 1 - progress
