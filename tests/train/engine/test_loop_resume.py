"""A run that is killed, stopped or runs out of disk goes on as if nothing had happened, to the last bit."""

import errno
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
import torch

import normfree as nf
from compared_runs import differences
from forked_runs import Runs, forked_runs
from normfree.data.images.image_set import ImageSet, Split
from normfree.storage.writing import write_sealed_text
from normfree.train import RunFolder, RunResult
from normfree.train.data_sources import MemoryImages
from normfree.train.engine import loop as engine
from normfree.train.engine.step import image_loss
from normfree.train.run import checkpoint
from normfree.train.run import run_page as curves
from stopped_steps import stop_at
from tiny_images import tiny_images

# Everything that a run can forget: order, every augmentation, momentum, average, warm-up, running statistics.
ALL = {
    "model": "resnet8",
    "epochs": 4,
    "batch_size": 16,
    "crop": 2,
    "flip": True,
    "cutout": 4,
    "mixup": 0.5,
    "randaugment": (2, 9),
    "ema": 0.9,
    "momentum": 0.9,
    "nesterov": True,
    "warmup": 1.0,
    "label_smoothing": 0.1,
    "workers": 0,
}
STEPS = 5  # of an epoch: 72 images after a tenth is held out


def config(**changes: Any) -> nf.TrainConfig:
    return nf.TrainConfig(**{**ALL, **changes})


def fit(out: Path | None = None, *, resume: bool = False, **changes: Any) -> RunResult:
    return nf.fit(config(**changes), data=tiny_images(), out=out, resume=resume)


def tensors(run: Path) -> dict[str, torch.Tensor]:
    return checkpoint.load(run)[0]


def is_one_line_error(text: str) -> bool:
    return text.startswith("error: ") and text.count("\n") == 1 and "Traceback" not in text


@pytest.fixture(autouse=True, scope="module")
def no_picture() -> Iterator[None]:
    """Leave out what takes longer than a run here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "write_curves", lambda *_: None)
        yield


@pytest.fixture(scope="module")
def runs() -> Iterator[Runs]:
    with forked_runs() as started:
        yield started


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The uninterrupted run of Fixup."""
    out = tmp_path_factory.mktemp("whole") / "run"
    assert fit(out).status == "finished"
    return out


@pytest.fixture(scope="module")
def whole_by_command(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same by the command; its process has one thread, which rounds in another order than two."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "config.toml").write_text(config(device="cpu").to_toml())
    runs.start("train", "--config", str(folder / "config.toml"), "--out", str(folder / "run"), prints=folder / "prints")
    assert runs.wait() == 0, (folder / "prints").read_text()
    return folder / "run"


# kill -9


@pytest.mark.parametrize("method", ["fixup", "batchnorm"])
@pytest.mark.faults
def test_run_killed_at_random_moments_equals_the_uninterrupted_one(runs: Runs, tmp_path: Path, method: str) -> None:
    one, two, prints = tmp_path / "one", tmp_path / "two", tmp_path / "prints"
    (tmp_path / "config.toml").write_text(config(method=method, checkpoint_minutes=0.001, device="cpu").to_toml())
    settings = ("--config", str(tmp_path / "config.toml"))
    runs.start("train", *settings, "--out", str(one), prints=prints)
    begun = time.monotonic()
    assert runs.wait() == 0, prints.read_text()
    lasted = time.monotonic() - begun
    draws, kills = random.Random(method), 0
    while kills < 3:
        started = RunFolder(two).exists
        process = runs.start("train", *(["--resume"] if started else [*settings, "--out"]), str(two), prints=prints)
        time.sleep(draws.uniform(0.05, 0.4) * lasted)
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
        if runs.wait() == 0:  # done before it was killed often enough
            shutil.rmtree(two)
            kills, lasted = 0, lasted / 2
        else:
            kills += 1
    runs.start("train", *(["--resume"] if RunFolder(two).exists else [*settings, "--out"]), str(two), prints=prints)
    assert runs.wait() == 0, prints.read_text()
    assert differences(one, two) == []


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("normfree.train.engine.loop:RunFolder.append", 2),  # logged, but not saved
        ("normfree.train.engine.loop:checkpoint.save", 4),  # saved, and nothing after it
        ("normfree.train.run.checkpoint:sync", 8),  # in the middle of writing a checkpoint
        ("normfree.train.engine.loop:write_curves", 1),  # after everything
    ],
)
@pytest.mark.faults
def test_run_killed_at_the_worst_moment_equals_the_uninterrupted_one(
    runs: Runs, whole_by_command: Path, tmp_path: Path, name: str, call: int
) -> None:
    out, prints = tmp_path / "run", tmp_path / "prints"
    settings = str(whole_by_command / "config.toml")
    runs.start("train", "--config", settings, "--out", str(out), prints=prints, die=(name, call))
    assert runs.wait() == -signal.SIGKILL, prints.read_text()
    runs.start("train", "--resume", str(out), prints=prints)
    assert runs.wait() == 0, prints.read_text()
    assert differences(whole_by_command, out) == []


# Signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.faults
def test_run_stopped_inside_epochs_equals_the_uninterrupted_one(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    reached = 0
    for calls in (3, 4, 1):
        with monkeypatch.context() as patch:
            stop_at(patch, calls, number)
            result = fit(tmp_path, resume=bool(reached))
        reached += calls
        assert (result.status, result.signal, result.steps, result.test) == ("interrupted", number, reached, None)
        assert reached % STEPS
        assert RunFolder(tmp_path).status == "interrupted"
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert fit(tmp_path, resume=True).status == "finished"
    assert differences(whole, tmp_path) == []


@pytest.mark.parametrize(
    "changes", [{"method": "batchnorm", "optimizer": "adamw", "nesterov": False}, {"method": "selu:dropout=0.2"}]
)
def test_running_statistics_and_dropout_go_on_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    fit(one, epochs=2, **changes)
    with monkeypatch.context() as patch:
        stop_at(patch, 3, signal.SIGTERM)
        fit(two, epochs=2, **changes)
    torch.rand(7)  # another process would have drawn other numbers
    fit(two, epochs=2, resume=True, **changes)
    assert differences(one, two) == []


@pytest.mark.parametrize("what", ["memory0.", "average."])
def test_state_that_is_lost_changes_the_result(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    with monkeypatch.context() as patch:
        stop_at(patch, 7, signal.SIGTERM)
        fit(tmp_path)
    saved, state = checkpoint.load(tmp_path)
    lost = {name: torch.zeros_like(t) if name.startswith(what) else t for name, t in saved.items()}
    checkpoint.save(tmp_path, lost, state)
    fit(tmp_path, resume=True)
    assert any(name.startswith(what) for name in differences(whole, tmp_path))


def test_finished_run_is_only_scored_again(whole: Path, tmp_path: Path) -> None:
    again = tmp_path / "run"
    shutil.copytree(whole, again)
    result = fit(again, resume=True)
    assert (result.status, result.steps) == ("finished", 4 * STEPS)
    assert differences(whole, again) == []


# Refusals, after which everything is as before


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != "lock"}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"seed": 1}, r"has seed=0, but this command gives seed=1; resume it without changes"),
        (
            {"flip": False, "lr": 0.2},
            r"has flip=True, lr=0.1, but this command gives flip=False, lr=0.2; resume",
        ),
    ],
)
def test_resume_with_another_configuration_names_the_field(whole: Path, changes: dict[str, Any], says: str) -> None:
    before = contents(whole)
    with pytest.raises(ValueError, match=says):
        fit(whole, resume=True, **changes)
    assert contents(whole) == before


def test_resume_may_change_what_changes_no_number(whole: Path, tmp_path: Path) -> None:
    again = tmp_path / "run"
    shutil.copytree(whole, again)
    assert fit(again, resume=True, workers=1, checkpoint_epochs=2, checkpoint_minutes=1.0).status == "finished"


def test_resume_with_other_data_or_another_model_is_refused(whole: Path) -> None:
    with pytest.raises(ValueError, match=r"has data=tiny, but this command gives data=other"):
        nf.fit(config(), data=tiny_images(name="other"), out=whole, resume=True)
    with pytest.raises(ValueError, match=r"has model=resnet8, .*but this command gives model=resnet14, "):
        nf.fit(
            config(),
            data=tiny_images(),
            model=nf.build("resnet14", "fixup", example=torch.zeros(1, 1, 14, 14)),
            out=whole,
            resume=True,
        )


@pytest.mark.parametrize("file", ["weights.safetensors", "state.json"])
def test_damaged_checkpoint_is_refused_by_name(whole: Path, tmp_path: Path, file: str) -> None:
    again = tmp_path / "run"
    shutil.copytree(whole, again)
    latest = checkpoint.latest(again)
    assert latest
    for earlier in again.glob("checkpoint-*"):
        if earlier != latest:
            shutil.rmtree(earlier)
    raw = bytearray((latest / file).read_bytes())
    raw[len(raw) // 2] ^= 1
    (latest / file).write_bytes(raw)
    before = contents(again)
    with pytest.raises(ValueError, match=rf"'{latest / file}' is damaged"):
        fit(again, resume=True)
    with pytest.raises(ValueError, match="is damaged"):
        nf.load(again)
    assert contents(again) == before


def test_run_that_is_held_is_refused(whole: Path) -> None:
    with RunFolder(whole).hold(resume=True), pytest.raises(ValueError, match=f"is held by process {os.getpid()}"):
        fit(whole, resume=True)


def test_folder_with_a_run_is_not_begun_again(whole: Path) -> None:
    before = contents(whole)
    with pytest.raises(ValueError, match=r"holds one \(finished\); continue .* train --resume .* or resume=True"):
        fit(whole)
    assert contents(whole) == before


def test_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OSError, match="a file is in the way of the folder: move it"):
        fit(tmp_path / "file")
    with pytest.raises(OSError, match="a file is in the way of the folder: move it"):
        fit(tmp_path / "file" / "run")
    assert (tmp_path / "file").read_text() == "mine"


def test_nothing_to_resume_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected a run to resume in .* found none"):
        fit(tmp_path / "none", resume=True)
    assert not (tmp_path / "none").exists()


def fail(code: int) -> Any:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    return refuse


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("normfree.storage.writing.secrets.token_hex", "could not write the configuration"),
        ("filelock.FileLock.acquire", "could not write the lock"),
        ("normfree.train.run.checkpoint.temporary_folder", "could not write the checkpoint"),
        ("normfree.train.run.run_folder.FileIO", "could not write the metrics"),
    ],
)
@pytest.mark.faults
def test_read_only_folder_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, says: str
) -> None:
    monkeypatch.setattr(where, fail(errno.EROFS))
    with pytest.raises(OSError, match=rf"{says} .*Read-only file system; choose a folder that can be written"):
        fit(tmp_path, epochs=1)


@pytest.mark.parametrize("where", ["checkpoint", "metrics", "result", "picture"])
@pytest.mark.faults
def test_disk_that_fills_up_leaves_the_earlier_state_whole(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    with monkeypatch.context() as patch:
        if where == "checkpoint":
            original, calls = checkpoint.sync, 0

            def sync(path: Path) -> None:
                nonlocal calls
                calls += 1
                if calls > 6:
                    fail(errno.ENOSPC)()
                original(path)

            patch.setattr(checkpoint, "sync", sync)
        elif where == "metrics":
            append = RunFolder.append

            def limited(self: RunFolder, record: dict[str, Any]) -> None:
                if record["epoch"] == 3:
                    assert self._metrics
                    self._metrics.close()
                    self._metrics = FileIO("/dev/full", "a")
                append(self, record)

            patch.setattr(RunFolder, "append", limited)
        elif where == "result":
            patch.setattr("normfree.train.run.run_folder.write_sealed_json", fail(errno.ENOSPC))
        else:
            patch.setattr(engine, "write_curves", curves.write_curves)
            patch.setattr(curves, "write_plot", fail(errno.ENOSPC))
        with pytest.raises(OSError, match=rf"could not write the {where}.*No space left.*free some room") as caught:
            fit(tmp_path)
    assert "\n" not in str(caught.value)
    assert all(torch.isfinite(t).all() for t in tensors(tmp_path).values())
    fit(tmp_path, resume=True)
    assert differences(whole, tmp_path) == []


# Signals after the steps


@pytest.mark.parametrize(("part", "epochs"), [("validation", 1), ("validation", 4), ("test", 4)])
@pytest.mark.faults
def test_run_stopped_while_it_is_scored_equals_the_uninterrupted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, epochs: int
) -> None:
    original, scored = MemoryImages.inputs, []

    def stopping(*args: Any, **kwargs: Any) -> Any:
        inputs = original(*args, **kwargs)
        judged = getattr(inputs, part)

        def batches() -> Iterator[Any]:
            for number, batch in enumerate(judged()):
                if number == 1 and (part == "test" or len(RunFolder(tmp_path).read_metrics()) == epochs - 1):
                    os.kill(os.getpid(), signal.SIGTERM)
                scored.append(number)
                yield batch

        return replace(inputs, **{part: batches})

    with monkeypatch.context() as patch:
        patch.setattr(MemoryImages, "inputs", stopping)
        stopped = fit(tmp_path, eval_batch_size=2)
    assert (stopped.status, stopped.signal, stopped.test) == ("interrupted", signal.SIGTERM, None)
    assert (scored[-1], stopped.steps) == (1, epochs * STEPS)
    assert len(RunFolder(tmp_path).read_metrics()) == epochs - (part == "validation")
    assert fit(tmp_path, resume=True, eval_batch_size=2).status == "finished"
    reference = tmp_path / "reference"
    fit(reference, eval_batch_size=2)
    assert differences(reference, tmp_path) == []


def test_score_that_was_logged_and_not_saved_is_that_of_the_run(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped after the last step and before its score, then killed between the metrics and the checkpoint."""
    with monkeypatch.context() as patch:
        stop_at(patch, 4 * STEPS, signal.SIGTERM)
        assert fit(tmp_path).status == "interrupted"
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", fail(errno.EIO))
        with pytest.raises(OSError, match="Input/output error"):
            fit(tmp_path, resume=True)
    assert len(RunFolder(tmp_path).read_metrics()) == 4
    fit(tmp_path, resume=True)
    assert differences(whole, tmp_path) == []  # with the score of the last epoch, by which the best is found


def test_run_of_a_gpu_is_resumed_on_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        stop_at(patch, 2, signal.SIGTERM)
        fit(tmp_path)
    path = tmp_path / "config.toml"
    write_sealed_text(path, path.read_text().replace("graph = false", "graph = true"))
    with pytest.raises(
        ValueError, match=r"expected a GPU for graph=true, got device 'cpu'; resume the run on a machine"
    ):
        nf.fit(nf.train.read_config(tmp_path), data=tiny_images(), out=tmp_path, resume=True)


# Data


def interrupted(out: Path, monkeypatch: pytest.MonkeyPatch, data: ImageSet) -> None:
    with monkeypatch.context() as patch:
        stop_at(patch, 12, signal.SIGTERM)
        assert nf.fit(config(), data=data, out=out).status == "interrupted"


def test_other_images_are_refused_on_resuming(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tiny_images()
    interrupted(tmp_path, monkeypatch, data)
    before = contents(tmp_path)
    shifted = replace(data, train=Split(data.train.images, data.train.labels.roll(1)))
    brighter = replace(data, test=Split(data.test.images + 1, data.test.labels))
    renamed = replace(data, classes=tuple(f"{name}s" for name in data.classes))
    for other, says in (
        (tiny_images(160), "number of training and test images"),
        (tiny_images(20), "number of training and test images"),  # of which the run has seen 6 epochs, more than 4
        (renamed, "classes"),
        (shifted, "images"),
        (brighter, "images"),
    ):
        with pytest.raises(
            ValueError, match=rf"expected .* to have the same {says} as the run in .*, but it differs; use"
        ):
            nf.fit(config(), data=other, out=tmp_path, resume=True)
        assert contents(tmp_path) == before
    copied = replace(data, train=Split(data.train.images.clone(), data.train.labels.clone()))
    assert nf.fit(config(), data=copied, out=tmp_path, resume=True).status == "finished"


def test_checkpoint_that_tells_nothing_of_its_images_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(tmp_path, monkeypatch, tiny_images())
    tensors, state = checkpoint.load(tmp_path)
    older = {key: value for key, value in state.items() if key not in ("images", "images_sha256")}
    checkpoint.save(tmp_path, tensors, older)
    assert fit(tmp_path, resume=True).status == "finished"


# Divergence


@pytest.mark.parametrize("method", ["he_in", "batchnorm"])
@pytest.mark.parametrize("changes", [{"lr": 1e6, "epochs": 40}, {"loss_limit": 1e-3}])
def test_diverging_run_keeps_a_good_state(tmp_path: Path, method: str, changes: dict[str, Any]) -> None:
    changes = {"method": method, "warmup": 0.0, "loss_limit": 20.0} | changes
    result = fit(tmp_path, **changes)
    assert (result.status, result.test) == ("diverged", None)
    assert result.steps < 4 * STEPS
    record = json.loads((tmp_path / "result.json").read_text())
    assert (record["status"], record["steps"]) == ("diverged", result.steps)
    for name, tensor in tensors(tmp_path).items():
        assert name == "loss_sum" or torch.isfinite(tensor).all(), name
    model = nf.load(tmp_path)
    assert all(torch.isfinite(t).all() for t in [*model.parameters(), *model.buffers()])
    assert all(torch.isfinite(t).all() for t in [*result.model.parameters(), *result.model.buffers()])
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=r"diverged; start another one with a lower learning rate"):
        fit(tmp_path, resume=True, **changes)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("ema", [0.0, 0.9])
def test_diverged_run_goes_back_to_the_last_checkpoint_that_a_good_step_followed(tmp_path: Path, ema: float) -> None:
    """The control: a run of one step less, an epoch each, ends in the same state."""
    changes = {
        "lr": 0.3,
        "method": "he_in",
        "ema": ema,
        "warmup": 0.0,
        "schedule": "constant",
        "validation": 0.0,
        "batch_size": 80,
    }
    diverged = fit(tmp_path / "one", epochs=50, loss_limit=9.0, **changes)
    assert diverged.status == "diverged"
    assert diverged.steps > 1
    short = fit(tmp_path / "two", epochs=diverged.steps - 1, **changes)
    assert short.status == "finished"
    one, two = tensors(tmp_path / "one"), tensors(tmp_path / "two")
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert same_models(diverged.model, short.model)
    assert same_models(nf.load(tmp_path / "one"), short.model)
    again = fit(epochs=50, loss_limit=9.0, **changes)  # without a folder
    assert same_models(again.model, short.model)


def same_models(one: torch.nn.Module, two: torch.nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True))


@pytest.mark.parametrize("method", ["he_in", "batchnorm"])
def test_divergence_leaves_the_checkpoint_of_a_good_epoch_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    whole, changes = tmp_path / "whole", {"method": method, "lr": 1e-3, "warmup": 0.0, "schedule": "constant"}
    good = fit(whole, epochs=2, **changes)
    loss = image_loss

    def spoilt(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        value, hits = loss(*args)
        return (value * float("nan") if calls > 2 * STEPS + 3 else value), hits

    calls = 0
    original = MemoryImages.inputs
    monkeypatch.setattr(MemoryImages, "inputs", lambda *a, **k: replace(original(*a, **k), loss=spoilt))
    result = fit(tmp_path / "run", epochs=4, **changes)
    assert (result.status, result.steps) == ("diverged", 2 * STEPS + 3)
    assert result.validation == good.validation
    assert same_models(result.model, good.model)
    assert same_models(nf.load(tmp_path / "run"), good.model)
    assert checkpoint.load(tmp_path / "run")[1]["step"] == 2 * STEPS
    kept = {path.name for path in tmp_path.glob("run/checkpoint-*")}
    assert kept == {f"checkpoint-{STEPS}", f"checkpoint-{2 * STEPS}"}


@pytest.mark.parametrize("folder", [True, False])
def test_run_that_its_last_step_ruins_has_diverged(tmp_path: Path, folder: bool) -> None:
    changes = {"method": "he_in", "lr": 1e12, "warmup": 0.0, "epochs": 1, "batch_size": 80, "schedule": "constant"}
    result = fit(tmp_path if folder else None, **changes)
    start = fit(**{**changes, "epochs": 0})
    assert (result.status, result.test) == ("diverged", None)
    assert same_models(result.model, start.model)
    if folder:
        assert RunFolder(tmp_path).status == "diverged"
        assert same_models(nf.load(tmp_path), start.model)
