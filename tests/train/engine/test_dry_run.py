"""A dry run measures what the run itself then shows: parameters, steps, checkpoints and time; it leaves nothing."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import normfree as nf
from normfree.train.engine import dry_run
from normfree.train.engine.dry_run import DryRun, measure_run
from normfree.train.engine.process_state import StopRequestedError
from normfree.train.run import checkpoint
from normfree.train.text.text_data import open_text
from tiny_text import SIZE, write_pairs

CONFIG = nf.TrainConfig(model="resmlp-4-32", data="spirals", epochs=3, batch_size=64, device="cpu")


def test_numbers_are_those_of_the_run(tmp_path: Path) -> None:
    found = measure_run(CONFIG)
    began = time.perf_counter()
    result = nf.fit(CONFIG, out=tmp_path, picture=False)
    seconds = time.perf_counter() - began
    assert (found.parameters, found.steps) == (result.parameters, result.steps)
    assert (found.unit, found.items_per_step, found.precision, found.compiled) == ("images", 64, "float32", False)
    tensors, _ = checkpoint.load(tmp_path)
    assert found.checkpoint == sum(tensor.nbytes for tensor in tensors.values())
    # A machine that others use is no clock: the estimate need only have the right size.
    assert seconds / 10 < found.seconds < 10 * seconds
    assert found.validation_seconds > 0
    assert found.test_seconds > 0


def test_time_is_the_sum_of_its_parts() -> None:
    parts: dict[str, Any] = {
        "parameters": 1, "items_per_step": 2, "unit": "images", "device": "cpu", "precision": "float32",
        "compiled": False, "memory": 3, "free": None, "checkpoint": 4, "measured": 5, "translates": False,
    }  # fmt: skip
    found = DryRun(
        epochs=10,
        steps_per_epoch=7,
        setup_seconds=1.0,
        step_seconds=0.5,
        validation_seconds=2.0,
        test_seconds=3.0,
        **parts,
    )
    assert found.steps == 70
    assert found.seconds == 1.0 + 70 * 0.5 + 10 * 2.0 + 3.0
    assert found.to_json()["seconds"] == found.seconds


def test_nothing_is_written_and_no_state_is_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = torch.get_rng_state()
    measure_run(CONFIG)
    assert torch.equal(before, torch.get_rng_state())
    assert list(tmp_path.iterdir()) == []


def test_epochs_of_a_single_step_and_slow_steps_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dry_run, "_PATIENCE", 0.0)
    found = measure_run(CONFIG.with_changes(batch_size=6000, validation=0.0))
    assert (found.steps_per_epoch, found.measured, found.validation_seconds) == (1, 1, 0.0)


def test_scoring_of_a_large_part_is_extrapolated(monkeypatch: pytest.MonkeyPatch) -> None:
    config = CONFIG.with_changes(eval_batch_size=20)  # 100 batches of the test data
    scored = []
    original = dry_run.sum_scores

    def counted(*arguments: Any) -> Any:
        scored.append(1)
        time.sleep(0.002)
        return original(*arguments)

    monkeypatch.setattr(dry_run, "sum_scores", counted)
    monkeypatch.setattr(dry_run, "_SCORING", 0.05)
    found = measure_run(config)
    assert len(scored) < 60
    assert found.test_seconds > 100 * 0.002


def test_text_is_measured_in_tokens(tmp_path: Path) -> None:
    pytest.importorskip("sentencepiece")
    from normfree.data.text.prepared_folder import prepare_pairs

    files = write_pairs(tmp_path)
    prepare_pairs(tmp_path / "pairs", files, size=SIZE, say=lambda _: None)
    name = f"pairs:{tmp_path / 'pairs'}"
    config = nf.recipe("translation", data=name, model="transformer-1-1-16-32-2", epochs=2, batch_size=200)
    found = measure_run(config.with_changes(device="cpu"))
    assert found.unit == "tokens"
    assert found.translates == open_text(name).translates_test
    assert found.seconds > 0


def test_missing_data_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"run: normfree data get cifar10"):
        measure_run(CONFIG.with_changes(data="cifar10", data_dir=str(tmp_path)))


def test_sigterm_ends_it() -> None:
    def stop(done: int) -> None:
        if done == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(StopRequestedError):
        measure_run(CONFIG, stop)
