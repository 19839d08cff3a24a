"""Hugging Face: parameter groups for `Trainer`, a callback that logs the signal, and checkpoints that load again.

    trainer = GroupedTrainer(model=converted, args=arguments, train_dataset=data)
    trainer.add_callback(HuggingFaceSignal(trainer, every=100))
    trainer.train()
    model = nf.load("output/checkpoint-500")

transformers itself cannot load such a checkpoint: its classes build the normalization layers again. So the model type
in `config.json` becomes 'normfree-…', which the Auto classes refuse by name and all others warn about.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback

from normfree.conversion.saving import EXAMPLE, PLAN, describe, pack_example
from normfree.diagnostics.monitor import Monitor
from normfree.optim.learning_rates import param_groups
from normfree.plan import remembered_example, remembered_plan, unwrapped
from normfree.storage.reading import list_checksums
from normfree.storage.writing import render_weights, write_bytes, write_json, write_sealed_json

WEIGHTS = "model.safetensors"  # of transformers
MODEL_TYPE = "normfree-"


class GroupedTrainer(Trainer):  # type: ignore[misc]
    """A `Trainer` whose optimizer has the parameter groups of the model's method, so that scalars keep their own rate.

    Combine it with a subclass of yours: `class MyTrainer(GroupedTrainer, OtherTrainer)`.
    """

    optimizer: torch.optim.Optimizer | None

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Make the optimizer that the arguments name, with `normfree.param_groups`.

        Raises:
            ValueError: If the model was not converted or built by normfree.
        """
        if self.optimizer is None:
            held = model or self.model
            kind, settings = self.get_optimizer_cls_and_kwargs(self.args, held)
            groups = param_groups(held, lr=self.args.learning_rate, weight_decay=self.args.weight_decay)
            self.optimizer = kind(groups, **settings)
        assert self.optimizer is not None
        return self.optimizer


class HuggingFaceSignal(TrainerCallback):  # type: ignore[misc]
    """Log the signal of the model during a run of `Trainer`, and store the conversion beside each checkpoint.

    A measurement repeats the last forward pass of the step, with the model's own loss, and leaves no trace. Its
    numbers go where the trainer logs: the history, TensorBoard, W&B and others.

    Args:
        trainer: The trainer that logs.
        every: The number of steps between two measurements.

    Attributes:
        monitor: The `Monitor`, None before the run.
    """

    def __init__(self, trainer: Trainer, every: int = 100) -> None:
        self.trainer, self.every = trainer, every
        self.monitor: Monitor | None = None
        self._call: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._handle: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        """Watch the calls of the model."""
        self.monitor = Monitor(unwrapped(model), every=self.every, log=lambda numbers, _: self.trainer.log(numbers))
        self._remove()
        self._handle = unwrapped(model).register_forward_pre_hook(self._remember, with_kwargs=True)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure if a measurement is due."""
        if self.monitor is None or self._call is None or (state.global_step - 1) % self.every:
            return
        positional, named = self._call
        self._call, self.monitor.count = None, state.global_step
        loss_is_due = control.should_log  # which `Trainer.log` resets
        self.monitor.measure(positional if positional and not named else named)
        control.should_log = loss_is_due

    def on_save(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        """Store the conversion in the checkpoint that was just written."""
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if state.is_world_process_zero and remembered_plan(model) is not None and (folder / "config.json").exists():
            _describe_conversion(unwrapped(model), folder)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop watching."""
        self._remove()

    def _remember(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if model.training and torch.is_grad_enabled():
            self._call = args, {name: value for name, value in kwargs.items() if value is not None}

    def _remove(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None


def save_pretrained(model: Any, folder: str | Path) -> Path:
    """Write a converted model of transformers with its `save_pretrained`, so that `normfree.load(folder)` loads it.

    Args:
        model: A model of transformers that `convert` returned.
        folder: The folder to write.

    Returns:
        The folder.

    Raises:
        ValueError: If the model was not converted.
    """
    if remembered_plan(model) is None or remembered_example(model) is None:
        raise ValueError(f"expected a converted model, got {type(model).__name__}; convert it by normfree.convert")
    unwrapped(model).save_pretrained(folder)
    _describe_conversion(unwrapped(model), Path(folder))
    return Path(folder)


def _describe_conversion(model: Any, folder: Path) -> None:
    """Store the plan, the example and the configuration of the original; rename the model type in config.json."""
    plan = remembered_plan(model)
    assert plan is not None
    tensors, packed = pack_example(remembered_example(model))
    architecture = getattr(type(model), "plain_class", type(model)).__name__
    config = json.loads(json.dumps(model.config.to_dict(), default=str))
    record = {**describe(plan), "model": architecture, "example": packed, "weights": WEIGHTS}
    write_bytes(folder / EXAMPLE, render_weights(tensors))
    files = list_checksums({name: folder / name for name in (EXAMPLE, WEIGHTS) if (folder / name).exists()})
    write_sealed_json(folder / PLAN, {**record, "transformers": [architecture, config], "files": files})
    written = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if not str(written.get("model_type", "")).startswith(MODEL_TYPE):
        written["model_type"] = f"{MODEL_TYPE}{written.get('model_type', '')}"
        write_json(folder / "config.json", written)
