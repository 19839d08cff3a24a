"""Folders of runs as `fit` leaves them, written without training."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from normfree.storage.folder_lock import FolderLock
from normfree.storage.writing import to_json_values, write_sealed_json, write_sealed_text
from normfree.train.config import TrainConfig
from normfree.train.run.run_page import WatchedRun

EPOCH = {"train_loss": 1.0, "train_accuracy": 0.5, "lr": 0.1, "seconds": 2.0, "images_per_second": 1000.0}
VALIDATED = {"validation_loss": 1.2, "validation_accuracy": 0.4}
RUNNING = WatchedRun(
    folder=Path("runs/a"), state="running", model="resnet8", method="fixup", data="fashion14", epochs=4, epoch=2.5,
    loss=0.7, accuracy=0.71, validation=(1.2, 0.4), throughput=800.0, classes=10, seconds=5.0, left=60.0, updated=100.0,
)  # fmt: skip


def records(epochs: int, *, steps: int = 10, **changes: Any) -> list[dict[str, Any]]:
    """Metrics of some epochs, whose loss falls and whose accuracy rises."""
    return [
        {
            "step": steps * epoch, "epoch": epoch, **EPOCH, **VALIDATED, "train_loss": 2.0 / epoch,
            "train_accuracy": 1 - 0.8 / epoch, **changes,
        }
        for epoch in range(1, epochs + 1)
    ]  # fmt: skip


def write_run(
    folder: Path,
    metrics: Sequence[Mapping[str, Any]] = (),
    *,
    result: Mapping[str, Any] | None = None,
    progress: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Path:
    """Write the folder of a run; a result needs its status."""
    config = TrainConfig(**settings)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "lock").write_text("1")
    write_sealed_text(folder / "config.toml", config.to_toml())
    if metrics:
        lines = (json.dumps(to_json_values(record)) for record in metrics)
        (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    if progress is not None:
        (folder / "progress.json").write_text(json.dumps(to_json_values(progress)))
    if result is not None:
        defaults = {"steps": 10, "epochs": 2.0, "train_loss": 0.5, "train_accuracy": 0.8, "classes": 10}
        plain = {**defaults, "validation": None, "test": {"loss": 0.6, "accuracy": 0.75}, "parameters": 100}
        plain |= {"seconds": 9.0, "images_per_second": 500.0, "config": asdict(config)}
        write_sealed_json(folder / "result.json", {**plain, **result})
    return folder


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, as a process that trains there does."""
    with FolderLock(folder).hold():
        yield
