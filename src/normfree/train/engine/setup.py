"""Prepare a run: open its data, build its model, and make it ready to train with batches, master weights and step."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from normfree.data import ImageSet
from normfree.errors import require_package
from normfree.models import BaseModel
from normfree.models.base import every_module
from normfree.models.builder import is_foreign
from normfree.nn.devices import LARGE, device_of, explained_shortage, require_memory, require_room_for_activations
from normfree.nn.model_state import eval_mode
from normfree.nn.residual import reset_precision_
from normfree.nn.sync_batchnorm import sync_batch_norms_, unsync_batch_norms_
from normfree.nn.weight_gradient_stream import use_side_stream_
from normfree.optim import agc_parameters, param_groups
from normfree.plan import ResidualPlan, kept_plan
from normfree.train.config import DEEP, TrainConfig
from normfree.train.data_sources import AS_BUILT, as_data, explained_worker_end, open_data
from normfree.train.engine.data_interface import BatchSums, Data, try_model
from normfree.train.engine.distributed import Processes, join_processes
from normfree.train.engine.forward import apply_precision_, forward_of, uncompile_
from normfree.train.engine.kernel_stages import Stage, prepare_stages
from normfree.train.engine.process_state import (
    Stop,
    StopRequestedError,
    collector_paused,
    objects_frozen,
    seeded_generators,
    torch_settings,
)
from normfree.train.engine.step import TrainStep
from normfree.train.run.run_folder import RunFolder
from normfree.train.run.run_records import Score

if TYPE_CHECKING:
    from normfree.data.text.prepared_folder import Prepared
    from normfree.train.text.generation import Bleu

_log = logging.getLogger("normfree.train")


class TrainSetup:
    """The model, data, batches and step of a run.

    `release` makes the model as `load` returns it: in float32, uncompiled, in evaluation mode. Its callbacks, in
    `cleanup`, run at once if the constructor fails.
    """

    def __init__(
        self,
        config: TrainConfig,
        model: nn.Module,
        plan: ResidualPlan | None,
        data: Data,
        stages: Sequence[Stage],
        device: torch.device,
        processes: Processes,
        seed_generators: Callable[..., None],
    ) -> None:
        self.config, self.model, self.plan, self.data = config, model, plan, data
        self.device, self.processes, self.seed_generators = device, processes, seed_generators
        self.config_text, self._schedule = config.to_toml(), config.lr_schedule
        self.folder: RunFolder | None = None
        self.stop = Stop()
        self.started = time.perf_counter()
        with ExitStack() as cleanup:
            originals: dict[str, Tensor] = {}
            cleanup.callback(_reset_, model, originals)
            if not all(module.training for module in every_module(model)):
                model.train()  # takes half a second for 10,000 layers
            model.to(device)
            named = dict(model.named_parameters())
            originals |= {name: p.detach() for name, p in named.items()}
            dtype = torch.float32
            if config.precision != "float32":
                dtype = apply_precision_(model, config.precision)
                _keep_precise_(named, stages, originals)
                _require_precision(model, config, data, device=device, dtype=dtype)
            if config.compile:
                cleanup.callback(uncompile_, model)
                use_side_stream_(model)
                cleanup.callback(use_side_stream_, model, False)
            self.inputs = data.inputs(config, device=device, dtype=dtype, processes=processes)
            cleanup.callback(getattr(self.inputs.feed, "close", lambda: None))  # ends workers, if it has some
            if processes.world > 1:
                sync_batch_norms_(model, processes.sum_, processes.world)
                cleanup.callback(unsync_batch_norms_, model)
            self.parameters = sum(p.numel() for p in named.values())
            self.step = TrainStep(
                model,
                parameter_groups(model, config, plan),
                self.inputs.feed,
                config,
                originals=originals,
                unclipped=classifier_parameters(model, plan) if config.clip == "agc" else (),
                loss=self.inputs.loss,
                reduce=processes.average_ if processes.world > 1 else None,
                stages=stages,
            )
            cleanup.callback(self.step.masters.release_)
            originals.clear()  # the masters have them
            self._evaluate = forward_of(model, stages=stages) if stages else None
            self.cleanup = cleanup.pop_all()

    @property
    def steps_per_epoch(self) -> int:
        """The number of steps per epoch."""
        return self.inputs.feed.steps

    def lr_factors(self, epoch: int) -> list[float]:
        """Return the factor of the learning rates in each step of an epoch, counted from 0."""
        steps, first = self.steps_per_epoch, epoch * self.steps_per_epoch
        return [self._schedule.factor(first + i, steps, self.config.epochs) for i in range(steps)]

    def score(self, batches: Iterable[Any]) -> Score:
        """Score the model, with its stages by kernels if it trains so."""
        sums = sum_scores(self.model, batches, self.inputs.sums, self._evaluate)
        self.processes.average_(sums)
        return mean_score(sums)

    def translate_test(self) -> tuple[list[str], Bleu | None, int]:
        """Translate the test sentences, if any, in the first process; return lines, BLEU, and a signal or 0."""
        if not (self.processes.first and self.data.translates_test):
            return [], None, 0
        try:
            lines, bleu = self.data.translate_test(self.model, self.config, self.stop.raise_if_requested)
        except StopRequestedError:
            return [], None, self.stop.requested or 0
        return lines, bleu, 0

    def release(self) -> None:
        """End the workers that read data, and leave the model as `load` returns it; a second call does nothing."""
        self.cleanup.close()


@torch.no_grad()
def sum_scores(
    model: nn.Module,
    batches: Iterable[Any],
    sums_of: BatchSums,
    forward: Callable[..., Tensor] | None = None,
) -> Tensor:
    """Score a model in evaluation mode; the mode of every module is restored.

    Args:
        model: The model.
        batches: The batches; each label is counted once.
        sums_of: The sums over one batch.
        forward: The function to call in place of the model, if any.

    Returns:
        Three float64 sums over all batches, for `mean_score`: the losses, the hits, and the number of labels.
    """
    sums = torch.zeros(3, dtype=torch.float64, device=next(model.parameters()).device)
    with eval_mode(model):
        for batch in batches:
            sums += sums_of(model if forward is None else forward, batch)
    return sums


def mean_score(sums: Tensor) -> Score:
    """Return the means over all labels; NaN if there are none."""
    loss, hits, labels = sums.tolist()
    return Score(loss / labels, hits / labels) if labels else Score(float("nan"), float("nan"))


def score(model: nn.Module, batches: Iterable[Any], sums_of: BatchSums) -> Score:
    """Score a model on batches that this process has alone; see `sum_scores`."""
    return mean_score(sum_scores(model, batches, sums_of))


@contextmanager
def open_run(
    config: TrainConfig,
    model: nn.Module | None,
    data: ImageSet | Prepared | None,
    plan: ResidualPlan | None,
    out: str | Path | None,
    *,
    resume: bool,
    overwrite: bool,
) -> Iterator[TrainSetup]:
    """Join the other processes, lock the folder, and prepare the run; everything is undone after the `with` block.

    While it is open, signals are recorded. torch's generators are restored at the end. `fit` has the same arguments.
    """
    started = time.perf_counter()
    device = device_of(config.device)
    if config.tensorboard:
        require_package("tensorboard", "tensorboard=true")
    with ExitStack() as stack:
        remedy = "use a smaller batch_size, more micro-batches (accumulate) or recompute=1"
        stack.enter_context(explained_shortage(f"'{config.model}' with batches of {config.batch_size:,}", remedy))
        stack.enter_context(explained_worker_end())
        processes = stack.enter_context(join_processes(device))
        stop = stack.enter_context(Stop())
        stop.at_once = True  # nothing is to be saved before training begins
        seed_generators = stack.enter_context(seeded_generators(device))
        folder = RunFolder(out) if out is not None and processes.first else None
        with processes.shared_errors():
            if folder is not None:
                stack.enter_context(folder.hold(resume=resume, overwrite=overwrite))
            # Release 0.1 trained a converted model without `plan` as one without a method.
            begun = resume and folder is not None and folder.config_path.exists()
            as_built = begun and folder is not None and folder.read_config().method == AS_BUILT
        if not processes.broadcast(as_built) and plan is None and not (model is None or isinstance(model, BaseModel)):
            plan = kept_plan(model)  # of a converted model
        with processes.shared_errors():
            prepared = prepare_training(
                config,
                model=model,
                data=data,
                plan=plan,
                resume=resume,
                device=device,
                processes=processes,
                seed_generators=seed_generators,
            )
            setup = stack.enter_context(prepared)
        setup.folder, setup.stop, setup.started = folder, stop, started
        for warning in config.warnings(config.epochs * setup.steps_per_epoch):
            _log.info(warning)
        yield setup


@contextmanager
def prepare_training(
    config: TrainConfig,
    *,
    model: nn.Module | None,
    data: ImageSet | Prepared | None,
    plan: ResidualPlan | None,
    resume: bool,
    device: torch.device,
    processes: Processes,
    seed_generators: Callable[..., None] = lambda *_: None,
) -> Iterator[TrainSetup]:
    """Open the data, build the model, check both, and yield the setup; it is released at the end of the `with` block.

    `seed_generators` seeds torch's generators, from which third-party models draw their initial weights.

    Raises `ValueError` if the configuration, the model and the data do not fit together.
    """
    with collector_paused():
        opened = open_data(config) if data is None else as_data(data)
        opened.require_usable()
        _require_room_for_batch(config, opened, device, processes.world)
        seed_generators(config.seed)
        if plan is not None and model is None:
            raise ValueError("expected `plan` together with the converted model, got a plan alone; pass model= as well")
        trained, plan = opened.build_model(config) if model is None else (model, plan)
        if not resume:  # a resumed run keeps its settings, even useless ones
            _require_effect(config, opened, foreign=is_foreign(config.model) and model is None)
        if model is not None or is_foreign(config.model):
            opened.require_scores(trained, config)
        if model is not None:
            config = config.with_changes(**model_settings(config, model, plan))
        if data is not None:
            config = config.with_changes(data=opened.name)
        branches = len(trained.plan.branches) if isinstance(trained, BaseModel) else 0
        left_open = config.compile is None
        config = config.resolved(cuda=device.type == "cuda", branches=branches, world=processes.world)
        if config.graph and device.type != "cuda":
            remedy = "resume the run on a machine with a GPU" if resume else "use graph=false"
            raise ValueError(f"expected a GPU for graph=true, got device '{device}'; {remedy}")
        micro_batch = config.batch_size // config.accumulate // processes.world
        _require_room_for_weights(trained, config, device)
        require_room_for_micro_batch(trained, config, opened, device, micro_batch)
        stages: Sequence[Stage] = ()
        if device.type == "cuda" or config.kernels == "stage":
            stages = prepare_stages(trained, config, device, micro_batch)
        config = config.with_changes(kernels="stage" if stages else "compiled")
        if left_open and stages and branches >= DEEP:
            config = config.with_changes(compile=False)  # compiling the rest of a deep network takes too long
    with torch_settings(device, config):
        with collector_paused():
            setup = TrainSetup(config, trained, plan, opened, stages, device, processes, seed_generators)
        try:
            with objects_frozen():
                yield setup
        finally:
            setup.release()


def model_settings(config: TrainConfig, model: nn.Module, plan: ResidualPlan | None = None) -> dict[str, Any]:
    """Return the settings that name a given model: its own name, method and form.

    A converted model has the method recorded in its plan, or the configured one if the plan has no record.
    """
    if isinstance(model, BaseModel):
        return {"model": model.name, "method": model.method.spec, "form": model.form}
    method = AS_BUILT
    if plan is not None:
        method = config.method if plan.changes is None else getattr(plan.changes, "method", AS_BUILT)
    return {"model": f"{type(model).__module__}:{type(model).__qualname__}", "method": method}


def _require_effect(config: TrainConfig, data: Data, *, foreign: bool) -> None:
    """Raise `ValueError` for a setting without effect on this data or third-party model; it would only name the run."""
    where = dict.fromkeys(data.unused_settings, data.kind) | ({"form": "a third-party model"} if foreign else {})
    for name in where:
        value = getattr(config, name)
        holds_nothing_out = name == "validation" and value == 0  # as the recipes for text say
        if value != getattr(TrainConfig, name) and not holds_nothing_out:
            raise ValueError(f"setting {name}={value} has no effect on {where[name]}; leave it out")


def parameter_groups(model: nn.Module, config: TrainConfig, plan: ResidualPlan | None = None) -> list[dict[str, Any]]:
    """Return the parameter groups of the model's method; a model without a method has one group."""
    rates: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    if isinstance(model, BaseModel):
        own: dict[str, Any] = {} if kept_plan(model) else {"method": model.method, "plan": model.plan}
        return param_groups(model, **own, **rates)
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
    if not isinstance(model, BaseModel):
        inputs = (x.to(device, dtype if x.is_floating_point() else None) for x in data.example(config, 2))
        expected = f"expected a model that computes in precision '{config.precision}'"
        try_model(model, inputs, expected, "use precision=float32")


def _keep_precise_(named: Mapping[str, nn.Parameter], stages: Sequence[Stage], originals: Mapping[str, Tensor]) -> None:
    """Give the blocks that run by kernels their unrounded parameters again: the kernels round them themselves."""
    kept = {id(parameter) for stage in stages for parameter in stage.parameters()}
    for name, parameter in named.items() if kept else ():
        if id(parameter) in kept:
            parameter.data = originals[name]


def _reset_(model: nn.Module, originals: Mapping[str, Tensor]) -> None:
    """Undo reduced precision, restore rounded parameters, and set evaluation mode."""
    for name, parameter in model.named_parameters():
        if name in originals:
            parameter.data = originals[name]
    reset_precision_(model)
    model.eval()


# Room in the memory: a run that does not fit is refused before it fills the memory


def _require_room_for_batch(config: TrainConfig, data: Data, device: torch.device, world: int) -> None:
    """Raise `ValueError` if the images of a batch do not fit into the memory."""
    if data.kind == "images":
        each = sum(x[0].nbytes for x in data.example(config, 1))
        batch = f"a batch of {config.batch_size:,} images"
        require_memory(batch, config.batch_size // world * each, "use a smaller batch_size", device)


def _require_room_for_weights(model: nn.Module, config: TrainConfig, device: torch.device) -> None:
    """Raise `ValueError` if the weights and their optimizer do not fit into the memory."""
    count = sum(parameter.numel() for parameter in model.parameters())
    vectors = 2 + (1 if config.optimizer == "sgd" else 2) + bool(config.ema)  # weights, gradient, optimizer, average
    remedy = "choose a smaller model, or another machine"
    require_memory(f"the weights of '{config.model}' and their optimizer", 4 * count * vectors, remedy, device)


def require_room_for_micro_batch(
    model: nn.Module, config: TrainConfig, data: Data, device: torch.device, size: int
) -> None:
    """Raise `ValueError` if the activations of a large micro-batch do not fit into the memory."""
    if data.kind != "images" or size < LARGE or config.recompute:
        return
    share = 0.5 if config.compile or config.precision != "float32" else 1.0  # a compiler or bf16 may keep half
    remedy = "use a smaller batch_size, or a larger accumulate"
    require_room_for_activations(model, data.example(config, 2), size, remedy, device, share)
