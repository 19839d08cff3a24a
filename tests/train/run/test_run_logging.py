import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import normfree as nf
from normfree.train import RunFolder
from normfree.train.run import run_logging as curves
from normfree.train.run.run_logging import EventLog, write_curves
from tiny_images import tiny_images


def logged(path: Path) -> RunFolder:
    run = RunFolder(path)
    with run.hold():
        for epoch in (1, 2):
            run.append({"step": epoch, "epoch": epoch, "train_loss": 2.0 / epoch, "train_accuracy": 0.5, "lr": 0.1})
    return run


def test_picture_is_drawn_where_there_is_something_to_draw(tmp_path: Path) -> None:
    assert write_curves(RunFolder(tmp_path / "none"), "x") is None
    path = write_curves(logged(tmp_path), "resnet8, fixup")
    assert path == tmp_path / "curves.png"
    assert path.read_bytes().startswith(b"\x89PNG")


def test_run_needs_no_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any) -> None:
        raise ImportError("no matplotlib")

    monkeypatch.setattr(curves, "draw_training_curves", missing)
    assert write_curves(logged(tmp_path), "x") is None


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
        EventLog(tmp_path)


def test_log_can_be_read_by_tensorboard(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    log = EventLog(tmp_path)
    log({"step": 3, "train_loss": 0.5})
    log.close()
    found = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in found.Scalars("train_loss")] == [(3, 0.5)]
