"""What a folder gives back is what was trained, bit for bit."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import normfree as nf
from normfree.train import read_config
from normfree.train.engine import loop as engine
from normfree.train.engine.step import TrainStep
from normfree.train.run import checkpoint
from tiny_images import tiny_images


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "write_curves", lambda *_: None)
    monkeypatch.setattr("normfree.train.data_sources.load", lambda name, root: tiny_images())


def fit(out: Path, **changes: Any) -> nf.train.RunResult:
    return nf.fit(nf.TrainConfig(**{"model": "resnet8", "epochs": 2, "batch_size": 16, **changes}), out=out)


def same(one: nn.Module, two: nn.Module) -> bool:
    a, b = one.state_dict(), two.state_dict()
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in a)


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "fixup"},
        {"method": "batchnorm", "ema": 0.9, "channels_last": True},
        {"method": "wn_data", "model": "cnn-4-8"},
        {"method": "lsuv", "model": "resmlp-2-16"},
        {"method": "fixup", "form": "pre"},
    ],
    ids=lambda changes: changes["method"],
)
def test_loaded_model_and_its_score_are_those_of_the_run(tmp_path: Path, changes: dict[str, Any]) -> None:
    result = fit(tmp_path, **changes)
    state = torch.get_rng_state()
    loaded = nf.load(tmp_path)
    assert same(loaded, result.model)
    assert not loaded.training
    assert nf.evaluate(tmp_path) == result.test
    assert torch.equal(torch.get_rng_state(), state)


def test_score_of_a_bf16_run_is_close_in_float32(tmp_path: Path) -> None:
    result = fit(tmp_path, precision="bf16", method="batchnorm")
    assert result.test
    assert same(nf.load(tmp_path), result.model)
    assert nf.evaluate(tmp_path).loss == pytest.approx(result.test.loss, rel=1e-2)


def test_unfinished_run_gives_its_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def stop(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 7:
            os.kill(os.getpid(), signal.SIGTERM)

    original = TrainStep.__call__
    monkeypatch.setattr(TrainStep, "__call__", lambda self: (stop(), original(self))[1])
    result = fit(tmp_path)
    assert (result.status, result.steps) == ("interrupted", 7)
    assert same(nf.load(tmp_path), result.model)
    for path in tmp_path.glob("result.json"):
        path.unlink()  # as after a kill
    assert same(nf.load(tmp_path), result.model)


def test_what_is_no_run_is_one_sentence(tmp_path: Path) -> None:
    for call in (nf.load, nf.evaluate, read_config):
        with pytest.raises(ValueError, match=r"expected a run in .* found no (config.toml|such folder)"):
            call(tmp_path / "none")
    with pytest.raises(ValueError, match=r"found no config.toml and no plan.json there"):
        nf.load(tmp_path)
    (tmp_path / "config.toml").touch()
    with pytest.raises(ValueError, match=r"expected the configuration of a run in '.*', got an empty file; start"):
        read_config(tmp_path)
    (tmp_path / "config.toml").write_text("lr = 0.1\n")
    with pytest.raises(ValueError, match=r"expected a checkpoint in .* found none"):
        nf.load(tmp_path)
    (tmp_path / "config.toml").write_text("lr = fast\n")
    with pytest.raises(ValueError, match="is not valid TOML"):
        nf.load(tmp_path)


def test_checkpoint_of_another_model_is_one_sentence(tmp_path: Path) -> None:
    fit(tmp_path, epochs=0)
    tensors, state = checkpoint.load(tmp_path)
    name = "model.classifier.weight"
    for wrong in ({**tensors, name: tensors[name][:3]}, {k: t for k, t in tensors.items() if k != name}):
        checkpoint.save(tmp_path, wrong, state)
        with pytest.raises(ValueError, match=r"got Network, which differs in 'classifier.weight' and 0 more") as caught:
            nf.load(tmp_path)
        assert "\n" not in str(caught.value)
