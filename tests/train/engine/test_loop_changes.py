"""Ways on: another length, a folder that is used again, an earlier checkpoint in place of a damaged one."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import normfree as nf
from normfree.train import RunFolder, RunResult
from normfree.train.engine import loop as engine
from normfree.train.run import checkpoint
from tiny_images import tiny_images

STEPS = 5  # of an epoch


def fit(out: Path, *, resume: bool = False, overwrite: bool = False, **changes: Any) -> RunResult:
    settings = {"model": "resmlp-2-8", "epochs": 3, "batch_size": 16, "workers": 0, "lr": 0.05, **changes}
    return nf.fit(nf.TrainConfig(**settings), data=tiny_images(), out=out, resume=resume, overwrite=overwrite)


@pytest.fixture(autouse=True, scope="module")
def no_picture() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "write_curves", lambda *_: None)
        yield


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run of three epochs."""
    fit(tmp_path / "run", keep_last=3)
    return tmp_path / "run"


def steps(run: Path) -> set[int]:
    return {checkpoint.step_of(path) for path in run.glob("checkpoint-*")}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != "lock"}


def spoil(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


# Another length


def test_finished_run_goes_on_with_more_epochs(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    result = fit(run, resume=True, epochs=5, schedule="cosine")
    assert (result.status, result.steps, result.config.epochs) == ("finished", 5 * STEPS, 5)
    stored = RunFolder(run).read_result()
    assert (stored["steps"], stored["config"]["epochs"]) == (5 * STEPS, 5)
    assert [record["epoch"] for record in RunFolder(run).read_metrics()] == [1, 2, 3, 4, 5]
    assert "began with epochs=3 and continues with epochs=5; its rates follow the new schedule" in caplog.text
    assert nf.train.read_config(run).epochs == 5


def test_constant_rate_gives_the_longer_run_to_the_bit(tmp_path: Path) -> None:
    fit(tmp_path / "long", epochs=4, schedule="constant")
    fit(tmp_path / "run", epochs=2, schedule="constant")
    fit(tmp_path / "run", epochs=4, schedule="constant", resume=True)
    one, two = (checkpoint.load(tmp_path / name)[0] for name in ("long", "run"))
    assert all(torch.equal(one[name], two[name]) for name in {**one, **two})


def test_run_that_is_stopped_while_it_is_extended_is_unfinished(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(engine.Trainer, "_train", refuse)
        with pytest.raises(RuntimeError, match="killed"):
            fit(run, resume=True, epochs=4)
    assert RunFolder(run).status == "unfinished"  # not the result of three epochs
    assert fit(run, resume=True, epochs=4).steps == 4 * STEPS


def test_fewer_epochs_than_were_trained_are_refused(run: Path) -> None:
    before = contents(run)
    with pytest.raises(ValueError, match="expected at least the 3 epochs that the run has trained, got 2"):
        fit(run, resume=True, epochs=2)
    assert contents(run) == before


@pytest.mark.parametrize(
    ("old", "new"), [("lr = 0.05", "lr = 0.06"), ("seed = 0", "seed = 1"), ("flip = false", "flip = true")]
)
def test_edited_configuration_is_noticed(run: Path, old: str, new: str) -> None:
    path = run / "config.toml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    name = new.split()[0]
    with pytest.raises(ValueError, match=rf"config.toml|the checkpoint in .* has {name}="):
        nf.fit(nf.train.read_config(run), data=tiny_images(), out=run, resume=True)
    with pytest.raises(ValueError, match=rf"config.toml|the checkpoint in .* has {name}="):
        nf.load(run)
    path.write_text(text.replace(old, new).partition("# sha256")[0])  # as of an earlier release: the checkpoint knows
    with pytest.raises(ValueError, match=rf"the checkpoint in .* has {name}="):
        nf.fit(nf.train.read_config(run), data=tiny_images(), out=run, resume=True)
    with pytest.raises(ValueError, match=rf"the checkpoint in .* has {name}="):
        nf.load(run)


# A folder that is used again


def test_folder_of_a_run_that_never_took_a_step_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(engine.Trainer, "_train", refuse)
        with pytest.raises(RuntimeError, match="out of memory"):
            fit(tmp_path, epochs=1, batch_size=80)
    assert RunFolder(tmp_path).exists
    assert fit(tmp_path, epochs=1).status == "finished"  # with another configuration
    with pytest.raises(
        ValueError,
        match=r"holds one \(finished\); continue .* train --resume .* or resume=True, replace it with --overwrite",
    ):
        fit(tmp_path, epochs=1)


def test_overwriting_replaces_the_run_and_nothing_else(run: Path, tmp_path: Path) -> None:
    (run / "notes.txt").write_text("mine")
    fit(tmp_path / "other", epochs=1, lr=0.01)
    assert fit(run, overwrite=True, epochs=1, lr=0.01).status == "finished"
    one, two = contents(run), contents(tmp_path / "other")
    assert one.pop("notes.txt") == b"mine"
    assert one.keys() == two.keys()
    assert one["checkpoint-5/weights.safetensors"] == two["checkpoint-5/weights.safetensors"]
    assert fit(tmp_path / "new", overwrite=True, epochs=0).status == "finished"  # there need not be one


@pytest.mark.parametrize("changes", [{"model": "resnet9"}, {"method": "nothing"}, {"batch_size": 10**12}])
def test_run_is_not_overwritten_by_one_that_cannot_begin(run: Path, changes: dict[str, Any]) -> None:
    before = contents(run)
    with pytest.raises(ValueError, match=r"expect|unknown|form"):
        fit(run, overwrite=True, **changes)
    assert contents(run) == before


# An earlier checkpoint in place of a damaged one


@pytest.mark.parametrize("file", ["weights.safetensors", "state.json"])
def test_damaged_checkpoint_costs_the_epochs_since_the_one_before(
    run: Path, tmp_path: Path, file: str, caplog: pytest.LogCaptureFixture
) -> None:
    good = tmp_path / "good"
    shutil.copytree(run, good)
    assert steps(run) == {5, 10, 15}
    spoil(run / "checkpoint-15" / file)
    assert fit(run, resume=True, keep_last=3).status == "finished"
    assert f"checkpoint-15/{file}' is damaged" in caplog.text
    assert "the run continues from 'checkpoint-10'" in caplog.text
    one, two = checkpoint.load(good)[0], checkpoint.load(run)[0]
    assert all(torch.equal(one[name], two[name]) for name in {**one, **two})
    assert RunFolder(run).read_result()["test"] == RunFolder(good).read_result()["test"]
    assert [record["step"] for record in RunFolder(run).read_metrics()] == [5, 10, 15]
    assert steps(run) == {5, 10, 15}


def test_last_and_best_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accuracies = iter([0.2, 0.8, 0.3, 0.4, 0.5])
    score = engine.Trainer._score

    def chosen(self: Any, batches: Any) -> Any:
        found = score(self, batches)
        return found._replace(accuracy=next(accuracies)) if batches is self.inputs.validation else found

    monkeypatch.setattr(engine.Trainer, "_score", chosen)
    fit(tmp_path, epochs=5)
    assert steps(tmp_path) == {10, 20, 25}
    best, last = checkpoint.load(tmp_path, best=True), checkpoint.load(tmp_path)
    assert (best[1]["step"], best[1]["score"], last[1]["step"]) == (10, 0.8, 25)
    for loaded, (stored, _) in ((nf.load(tmp_path, best=True), best), (nf.load(tmp_path), last)):
        assert all(torch.equal(p, stored[f"model.{name}"]) for name, p in loaded.named_parameters())
    monkeypatch.undo()
    fit(tmp_path / "one", keep_last=1, keep_best=False)
    assert steps(tmp_path / "one") == {15}


def test_error_of_a_write_ends_the_run_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save, seen = checkpoint.save, []

    def refuse(run: Path, tensors: Any, state: Any, **options: Any) -> Path:
        seen.append(state["step"])
        if state["step"] > STEPS:
            raise OSError("could not write the checkpoint: no room")
        return save(run, tensors, state, **options)

    monkeypatch.setattr(checkpoint, "save", refuse)
    with pytest.raises(OSError, match="no room"):
        fit(tmp_path, epochs=30)
    assert seen == [5, 10]
    assert steps(tmp_path) == {5}


def test_every_epoch_is_told_and_an_error_of_the_listener_ends_the_run(tmp_path: Path) -> None:
    told: list[dict[str, Any]] = []
    settings: dict[str, Any] = {"model": "resmlp-2-8", "epochs": 3, "batch_size": 16, "workers": 0, "lr": 0.05}
    config, data = nf.TrainConfig(**settings), tiny_images()
    nf.fit(config, data=data, out=tmp_path / "whole", on_epoch=told.append)
    assert told == RunFolder(tmp_path / "whole").read_metrics()
    assert [record["epoch"] for record in told] == [1, 2, 3]

    def stop(record: dict[str, Any]) -> None:
        if record["epoch"] == 2:
            raise LookupError

    with pytest.raises(LookupError):
        nf.fit(config, data=data, out=tmp_path / "stopped", on_epoch=stop)
    stopped = RunFolder(tmp_path / "stopped")
    assert (stopped.status, stopped.saved_step) == ("unfinished", 2 * STEPS)
    again = nf.fit(config, data=data, out=tmp_path / "stopped", resume=True, on_epoch=told.append)
    assert again.status == "finished"
    assert [record["epoch"] for record in told] == [1, 2, 3, 3]
    assert told[3]["train_loss"] == told[2]["train_loss"]  # to the last bit
