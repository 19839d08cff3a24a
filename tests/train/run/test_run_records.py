"""The result of a run: which score judges it, whether it guesses, and its plain data; its curves."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from normfree.train import RunFolder, RunResult, TrainConfig
from normfree.train.run import run_page as curves
from normfree.train.run.run_page import write_curves
from normfree.train.run.run_records import Score

FINISHED = RunResult(
    status="finished",
    config=TrainConfig(seed=3),
    model=nn.Linear(2, 10),
    steps=8,
    epochs=2.0,
    train_loss=2.0,
    train_accuracy=0.2,
    validation=None,
    test=Score(1.5, 0.4),
    linear_accuracy=None,
    parameters=30,
    classes=10,
    seconds=1.0,
    setup_seconds=0.1,
    throughput=100.0,
)


@pytest.mark.parametrize(
    ("changes", "judged", "guesses"),
    [
        ({"test": Score(2.3, 0.1)}, "test", True),
        ({"test": Score(9.0, 0.12)}, "test", True),
        ({"test": Score(2.6, 0.567)}, "test", False),  # wrong with confidence, and right more often than not
        ({"test": Score(1.4, 0.5), "train_loss": 3.0}, "test", False),  # an epoch that began far above
        ({"test": None, "validation": Score(1.4, 0.5), "train_loss": 3.0}, "validation", False),
        ({"test": None, "train_loss": 2.3, "train_accuracy": 0.1}, "training", True),
        ({"test": None, "train_loss": 1.9, "train_accuracy": 0.1}, "training", False),
        ({"test": Score(2.4, 0.4), "unit": "tokens"}, "test", True),
        ({"test": Score(2.0, 0.1), "unit": "tokens"}, "test", False),
    ],
)
def test_what_was_learned_is_judged_by_the_score(changes: dict[str, Any], judged: str, guesses: bool) -> None:
    result = replace(FINISHED, **changes)
    assert result.judged is not None
    assert (result.judged[0], result.guesses) == (judged, guesses)


def test_result_without_any_score_is_not_judged() -> None:
    result = replace(FINISHED, test=None, train_loss=None, train_accuracy=None)
    assert result.judged is None
    assert not result.guesses


def test_loss_of_a_guess() -> None:
    assert FINISHED.guess_loss == math.log(10)
    assert not replace(FINISHED, classes=1, test=Score(9.0, 0.0)).guesses, "with one class there is nothing to guess"


def test_plain_data_can_be_written() -> None:
    plain = json.loads(json.dumps(FINISHED.to_json()))
    assert "model" not in plain
    assert (plain["seed"], plain["config"]["model"], plain["test"]) == (3, "resnet20", {"loss": 1.5, "accuracy": 0.4})
    assert (plain["images_per_second"], plain["validation"]) == (100.0, None)
    assert not {"bleu", "inputs", "throughput", "unit"} & set(plain)
    assert replace(FINISHED, unit="tokens").to_json()["tokens_per_second"] == 100.0


def logged(path: Path) -> RunFolder:
    run = RunFolder(path)
    with run.hold():
        for epoch in (1, 2):
            run.append({"step": epoch, "epoch": epoch, "train_loss": 2.0 / epoch, "train_accuracy": 0.5, "lr": 0.1})
    return run


def test_picture_is_drawn_where_there_is_something_to_draw(tmp_path: Path) -> None:
    assert write_curves(RunFolder(tmp_path / "none").read_metrics(), "x", tmp_path / "none.png") is None
    path = write_curves(logged(tmp_path).read_metrics(), "resnet8, fixup", tmp_path / "curves.png")
    assert path == tmp_path / "curves.png"
    assert path.read_bytes().startswith(b"\x89PNG")


def test_run_needs_no_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> None:
        raise ImportError("no matplotlib")

    monkeypatch.setattr(curves, "write_plot", missing)
    assert write_curves(logged(tmp_path).read_metrics(), "x", tmp_path / "curves.png") is None
