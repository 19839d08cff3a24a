"""A TensorBoard log has every number of a run once."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import normfree as nf
from normfree.train import RunFolder
from normfree.train.engine.run_display import TensorBoardLog
from tiny_images import tiny_images


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls that a stand-in for TensorBoard receives."""
    told: list[Any] = []

    class SummaryWriter:
        def __init__(self, folder: str, purge_step: int | None = None) -> None:
            told.append((Path(folder).name, purge_step))

        def add_scalar(self, name: str, value: float, step: int) -> None:
            told.append((name, value, step))

        def flush(self) -> None:
            pass

        def close(self) -> None:
            told.append("closed")

    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monkeypatch.setattr("normfree.train.engine.loop.write_curves", lambda *_: None)
    return told


def test_log_gets_every_number_once(tmp_path: Path, written: list[Any]) -> None:
    config = nf.TrainConfig(model="cnn-4-8", method="he_in", epochs=2, batch_size=40, tensorboard=True)
    nf.fit(config, data=tiny_images(), out=tmp_path)
    records = RunFolder(tmp_path).read_metrics()
    expected = [(name, value, r["step"]) for r in records for name, value in r.items() if name != "step"]
    assert written == [("tensorboard", 1), *expected, "closed"]  # a killed run may have logged, and saved nothing
    written.clear()
    nf.fit(config, data=tiny_images(), out=tmp_path, resume=True)
    assert written == [("tensorboard", 5), "closed"]  # steps beyond the fourth would be hidden


def test_missing_tensorboard_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ValueError, match=r"pip install '\.\[tracking\]'"):
        TensorBoardLog(tmp_path)


def test_log_can_be_read_by_tensorboard(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    log = TensorBoardLog(tmp_path)
    log({"step": 3, "train_loss": 0.5})
    log.close()
    found = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in found.Scalars("train_loss")] == [(3, 0.5)]
