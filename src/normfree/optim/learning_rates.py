"""Learning rates: `param_groups` gives each kind of parameter its rate, and a `Schedule` changes all rates over a run.

A schedule is a pure function: the step gives a factor in [0, 1] on every group's rate. Steps t count from 0 to
T = epochs · steps_per_epoch. A warm-up of W steps multiplies the schedule by (t + 1)/W or its square, so the first step
has a positive rate and step W - 1 the full one. Cosine and linear decay begin after the warm-up; the milestones of a
step schedule do not move.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import nn

from normfree.arguments import check_arguments
from normfree.methods import Method, get
from normfree.methods.fixup import is_transformer
from normfree.nn.normalizers import NORM_TYPES
from normfree.nn.scalars import ScalarBias, ScalarMultiplier, scalars_of
from normfree.nn.weight_layers import WEIGHT_LAYERS
from normfree.plan import ResidualPlan, remembered_method, remembered_plan, unwrapped

ScheduleKind = Literal["constant", "step", "cosine", "inverse_sqrt", "linear"]
WarmupShape = Literal["linear", "quadratic"]


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
