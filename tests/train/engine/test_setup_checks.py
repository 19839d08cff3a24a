"""Sizes, packages and signals are looked at before any work."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import normfree as nf
from normfree.data.images.image_set import Split, image_set
from normfree.nn import devices
from normfree.train import RunFolder
from normfree.train.engine import setup
from normfree.train.engine.step import TrainStep
from tiny_images import tiny_images

SETTINGS: dict[str, Any] = {"model": "resmlp-2-8", "epochs": 1, "batch_size": 16, "workers": 0}


def fit(out: Path | None = None, **changes: Any) -> Any:
    return nf.fit(nf.TrainConfig(**{**SETTINGS, **changes}), data=tiny_images(), out=out, picture=False)


def test_batch_larger_than_the_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a batch of 1,000,000,000,000 images to fit into the memory"):
        fit(batch_size=10**12)


@pytest.mark.parametrize(("changes", "vectors"), [({}, 3), ({"optimizer": "adam"}, 4), ({"ema": 0.9}, 4)])
def test_weights_and_their_optimizer_are_counted(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], vectors: int
) -> None:
    count = sum(p.numel() for p in fit(epochs=0).model.parameters())
    monkeypatch.setattr(devices, "free_memory", lambda device=None: 4 * count * vectors)
    fit(batch_size=1, epochs=0, **changes)
    monkeypatch.setattr(devices, "free_memory", lambda device=None: 4 * count * vectors - 1)
    with pytest.raises(ValueError, match="expected the weights of 'resmlp-2-8' and their optimizer to fit"):
        fit(batch_size=1, epochs=0, **changes)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
        MemoryError(),
    ],
)
def test_memory_that_runs_out_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(self: TrainStep) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(TrainStep, "__call__", fail)
        with pytest.raises(ValueError, match=r"batches of 16 to fit into the memory, but it ran out; use a smaller"):
            fit(tmp_path)
    assert fit(tmp_path, batch_size=8).status == "finished"  # the folder is not lost


def test_other_errors_of_torch_pass_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: TrainStep) -> None:
        raise RuntimeError("shapes differ")

    monkeypatch.setattr(TrainStep, "__call__", fail)
    with pytest.raises(RuntimeError, match="shapes differ"):
        fit()


def test_missing_package_is_told_before_the_data_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.setattr(setup, "prepare_training", None)
    with pytest.raises(ValueError, match="tensorboard=true needs tensorboard, which is not installed"):
        fit(tmp_path / "run", tensorboard=True)
    assert not (tmp_path / "run").exists()


def test_images_of_two_sizes_are_refused_at_once() -> None:
    tiny = tiny_images()
    small = Split(tiny.test.images[..., :10, :10].contiguous(), tiny.test.labels)
    data = image_set("two", tiny.classes, tiny.train, small)
    with pytest.raises(ValueError, match=r"expected training and test images of one size in 'two', got .*10, 10"):
        nf.fit(nf.TrainConfig(**SETTINGS), data=data)


@pytest.mark.parametrize("where", ["setup", "first step"])
def test_interrupt_before_the_end_of_the_first_step_works_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("not reached")

    with monkeypatch.context() as patch:
        if where == "setup":
            patch.setattr(setup, "prepare_training", interrupt)
        else:
            patch.setattr(TrainStep, "__call__", interrupt)
        with pytest.raises(KeyboardInterrupt):
            fit(tmp_path, compile=where == "first step")  # which may compile for minutes
    assert not RunFolder(tmp_path).has_begun
    assert fit(tmp_path).status == "finished"
