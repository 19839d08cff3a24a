"""A real run of Lightning logs the signal, and learns as without the callback."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import normfree as nf
from normfree.frameworks.lightning import LightningSignal


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.one, self.two = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.two(self.one(self.norm(x)).relu())  # type: ignore[no-any-return]


class Module(LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), *(Block(8) for _ in range(3)), nn.Linear(8, 2))
        self.net, _ = nf.convert(net, "fixup", torch.randn(6, 4), generator=torch.Generator().manual_seed(0))

    def training_step(self, batch: Any, index: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(nf.param_groups(self.net, lr=0.1), momentum=0.9)


def data(count: int) -> Any:
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=8)


def fit(module: Module, logger: Any, count: int, epochs: int, callbacks: list[Any]) -> None:
    trainer = Trainer(
        max_epochs=epochs, logger=logger, callbacks=callbacks, accelerator="cpu", log_every_n_steps=1,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, barebones=False,
    )  # fmt: skip
    trainer.fit(module, data(count))


def logged(folder: Path) -> list[dict[str, str]]:
    import csv

    with next(folder.rglob("metrics.csv")).open(encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if row.get("signal/loss")]


def test_run_logs_the_signal_and_is_the_same_without(tmp_path: Path) -> None:
    watched, plain = Module(), Module()
    callback = LightningSignal(every=2)
    fit(watched, CSVLogger(tmp_path), 32, 1, [callback])
    fit(plain, False, 32, 1, [])
    rows = logged(tmp_path)
    assert [int(row["step"]) for row in rows] == [0, 2]
    assert callback.monitor is not None
    assert callback.monitor.model is watched.net
    assert [float(row["signal/loss"]) for row in rows] == pytest.approx([m.loss for m in callback.monitor.moments])
    assert all(float(row["signal/backward_per_block"]) > 0 for row in rows)
    held = plain.state_dict()
    assert all(torch.equal(t, held[name]) for name, t in watched.state_dict().items())


@pytest.mark.slow
def test_longer_run_logs_to_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    fit(Module(), TensorBoardLogger(tmp_path), 256, 3, [LightningSignal(every=10)])
    events = EventAccumulator(str(next(tmp_path.rglob("events.*")).parent))
    events.Reload()
    losses = events.Scalars("signal/loss")
    assert [event.step for event in losses] == list(range(0, 96, 10))
    assert losses[-1].value < losses[0].value
    assert {"signal/forward_per_block", "signal/backward_in_all"} <= set(events.Tags()["scalars"])
