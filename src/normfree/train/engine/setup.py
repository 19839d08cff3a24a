"""What a run trains with, put together: the model on its device and in its precision, its data, masters and step."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from normfree.nn.overlap import overlap_
from normfree.nn.residual import reset_precision_
from normfree.optim.master_weights import MasterWeights
from normfree.optim.update_rules import UpdateRule
from normfree.plan import ResidualPlan
from normfree.train.config import TrainConfig
from normfree.train.engine.distributed import Processes, desynchronize_, synchronize_
from normfree.train.engine.forward import apply_precision_, forward_of, uncompile_
from normfree.train.engine.inputs import Data, inputs_of
from normfree.train.engine.model_setup import classifier_of, groups_of, require_precision
from normfree.train.engine.step import Step, StepSettings


class Rig:
    """A model that is made ready to be trained by a configuration; `release` gives it back as `load` would.

    `undo` is what `release` does, also where putting it together fails on the way.
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
        with ExitStack() as undo:
            originals: dict[str, Tensor] = {}
            undo.callback(_plain_, model, originals)
            model.train().to(device)
            layout = bool(config.channels_last)
            originals |= {name: p.detach() for name, p in model.named_parameters()}
            dtype = apply_precision_(model, config.precision)
            require_precision(model, config, data, device=device, dtype=dtype)
            if config.compile:
                overlap_(model)
            self.inputs = inputs_of(config, data, device=device, dtype=dtype, channels_last=layout, processes=processes)
            undo.callback(_close, self.inputs.feed)
            synchronize_(model, processes)
            self.parameters = sum(p.numel() for p in model.parameters())
            groups = groups_of(model, config, plan)
            masters = MasterWeights(model, groups, channels_last=layout, originals=originals)
            undo.callback(masters.release_)
            originals.clear()  # the masters have them
            self.step = self._step(masters)
            self.undo = undo.pop_all()

    @property
    def steps(self) -> int:
        """The steps of an epoch."""
        return self.inputs.feed.steps

    def _step(self, masters: MasterWeights) -> Step:
        config = self.config
        return Step(
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
                unclipped=classifier_of(self.model, self.plan) if config.clip == "agc" else (),
                ema=config.ema,
                loss_limit=config.loss_limit,
            ),
            loss=self.inputs.loss,
            reduce=self.processes.average_ if self.processes.world > 1 else None,
            compile=bool(config.compile),
        )

    def release(self) -> None:
        """End what reads data, and leave the model as `load` gives it; once is enough."""
        self.undo.close()


def _plain_(model: nn.Module, originals: Mapping[str, Tensor]) -> None:
    """Leave a model in evaluation mode and without other processes, what was rounded as it was before."""
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
