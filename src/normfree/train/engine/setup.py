"""A model made ready for training: on its device and in its precision, with its batches, masters and step."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from normfree.models import BaseModel
from normfree.nn.model_state import evaluating
from normfree.nn.overlap import overlap_
from normfree.nn.residual import reset_precision_
from normfree.optim import agc_parameters, param_groups
from normfree.optim.master_weights import MasterWeights
from normfree.optim.update_rules import UpdateRule
from normfree.plan import ResidualPlan
from normfree.train.config import TrainConfig
from normfree.train.data import Data
from normfree.train.engine.distributed import Processes, desynchronize_, synchronize_
from normfree.train.engine.forward import apply_precision_, forward_of, uncompile_
from normfree.train.engine.step import StepSettings, TrainStep
from normfree.train.image_data import AS_BUILT


class TrainSetup:
    """Everything that a run trains with; `release` gives the model back as `load` returns it.

    `cleanup` holds what `release` does. If the setup fails halfway, it is done at once.
    """

    def __init__(
        self,
        config: TrainConfig,
        model: nn.Module,
        plan: ResidualPlan | None,
        data: Data,
        device: torch.device,
        processes: Processes,
    ) -> None:
        self.config, self.model, self.plan, self.data = config, model, plan, data
        self.device, self.processes = device, processes
        with ExitStack() as cleanup:
            originals: dict[str, Tensor] = {}
            cleanup.callback(_reset_, model, originals)
            model.train().to(device)
            layout = bool(config.channels_last)
            originals |= {name: p.detach() for name, p in model.named_parameters()}
            dtype = apply_precision_(model, config.precision)
            _require_precision(model, config, data, device=device, dtype=dtype)
            if config.compile:
                overlap_(model)
            self.inputs = data.inputs(config, device=device, dtype=dtype, channels_last=layout, processes=processes)
            cleanup.callback(_close, self.inputs.feed)
            synchronize_(model, processes)
            self.parameters = sum(p.numel() for p in model.parameters())
            masters = MasterWeights(
                model, parameter_groups(model, config, plan), channels_last=layout, originals=originals
            )
            cleanup.callback(masters.release_)
            originals.clear()  # the masters have them
            self.step = self._make_step(masters)
            self.cleanup = cleanup.pop_all()

    @property
    def epoch_steps(self) -> int:
        """The number of steps per epoch."""
        return self.inputs.feed.steps

    def _make_step(self, masters: MasterWeights) -> TrainStep:
        config = self.config
        return TrainStep(
            self.model,
            forward_of(self.model, compile=bool(config.compile), region=config.region, recompute=config.recompute),
            masters,
            UpdateRule(
                name=config.optimizer,
                momentum=config.momentum,
                nesterov=config.nesterov,
                betas=config.betas,
                eps=config.eps,
            ),
            self.inputs.feed,
            StepSettings(
                label_smoothing=config.label_smoothing,
                accumulate=config.accumulate,
                clip=config.clip,
                clip_at=config.clip_at,
                unclipped=classifier_parameters(self.model, self.plan) if config.clip == "agc" else (),
                ema=config.ema,
                loss_limit=config.loss_limit,
            ),
            loss=self.inputs.loss,
            reduce=self.processes.average_ if self.processes.world > 1 else None,
            compile=bool(config.compile),
        )

    def release(self) -> None:
        """End the workers that read data, and leave the model as `load` returns it; a second call does nothing."""
        self.cleanup.close()


def parameter_groups(model: nn.Module, config: TrainConfig, plan: ResidualPlan | None = None) -> list[dict[str, Any]]:
    """Return the parameter groups of the model's method; a model without a method has one group."""
    rates: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    if isinstance(model, BaseModel):
        return param_groups(model, **rates)
    if plan is not None and config.method != AS_BUILT:
        return param_groups(model, method=config.method, plan=plan, **rates)
    return [{"name": "weights", "params": list(model.parameters()), **rates}]


def classifier_parameters(model: nn.Module, plan: ResidualPlan | None = None) -> tuple[str, ...]:
    """Return the names of the parameters that adaptive clipping leaves alone.

    Raises `ValueError` if the model has no classifier.
    """
    last = None if plan is None or not plan.classifier else [layer.name for layer in plan.classifier]
    try:
        clipped = {id(parameter) for parameter in agc_parameters(model, exclude=last)}
    except ValueError as error:
        raise ValueError(
            f"expected a model with a Linear classifier, which clip=agc leaves alone, got {type(model).__name__}; use "
            "clip=norm, or none"
        ) from error
    return tuple(name for name, parameter in model.named_parameters() if id(parameter) not in clipped)


def _require_precision(
    model: nn.Module, config: TrainConfig, data: Data, *, device: torch.device, dtype: torch.dtype
) -> None:
    """Raise `ValueError` if a third-party model cannot compute in the precision of the configuration."""
    if isinstance(model, BaseModel) or config.precision == "float32":
        return
    inputs = [x.to(device, dtype if x.is_floating_point() else None) for x in data.example(config, 2)]
    try:
        with evaluating(model):
            model(*inputs)
    except RuntimeError as error:
        raise ValueError(
            f"expected a model that computes in precision '{config.precision}', but {type(model).__name__} stopped: "
            f"{str(error).splitlines()[0]}; use precision=float32"
        ) from error


def _reset_(model: nn.Module, originals: Mapping[str, Tensor]) -> None:
    """Leave a model in evaluation mode and without other processes, its rounded parameters as they were before."""
    for name, parameter in model.named_parameters():
        if name in originals:
            parameter.data = originals[name]
    uncompile_(model)
    desynchronize_(model)
    overlap_(reset_precision_(model), False)
    model.eval()


def _close(feed: Any) -> None:
    """End the workers of a feed that has some."""
    close = getattr(feed, "close", None)
    if close is not None:
        close()
