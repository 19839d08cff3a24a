"""Lightning: a callback that logs the signal of the model.

Trainer(callbacks=[LightningSignal(every=100)]).fit(module, data)
"""

from __future__ import annotations

from typing import Any

from torch import nn

from normfree.diagnostics.monitor import Monitor
from normfree.diagnostics.propagation import Loss
from normfree.plan import kept_plan

try:
    from lightning.pytorch import Callback
except ImportError:
    from pytorch_lightning import Callback


class LightningSignal(Callback):  # type: ignore[misc]
    """Log the signal of a model during a run of Lightning.

    The model is the first converted one inside the Lightning module, or else the module itself. A measurement leaves
    no trace. Its numbers go to the trainer's loggers.

    Args:
        every: The number of steps between two measurements.
        loss: A function of the output and the targets (default: the model's own loss, or cross-entropy).

    Attributes:
        monitor: The `Monitor`, None before the run.
    """

    def __init__(self, every: int = 100, loss: Loss | None = None) -> None:
        super().__init__()
        self.every, self.loss = every, loss
        self.monitor: Monitor | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Find the model."""
        converted = (module for module in pl_module.modules() if kept_plan(module) is not None)
        model: nn.Module = next(converted, pl_module)
        self.monitor = Monitor(model, every=self.every, loss=self.loss)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Measure if a measurement is due; a batch is (inputs, targets), or a mapping for the model's own loss."""
        if self.monitor is None or (trainer.global_step - 1) % self.every:
            return
        pair = isinstance(batch, tuple | list) and len(batch) == 2
        inputs, targets = batch if pair else (batch, None)
        self.monitor.count = trainer.global_step
        record = self.monitor.measure(inputs, targets)
        for logger in trainer.loggers:  # `log_dict` would repeat the numbers at every later step
            logger.log_metrics(record.scalars(), step=record.step)
