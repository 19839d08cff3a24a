"""A folder is written by the process that locked it, and by no other; files of the user are left alone."""

import os
import shutil
from pathlib import Path

import pytest
import torch

from normfree.storage.writing import write_sealed_text
from normfree.train.run import checkpoint
from normfree.train.run.run_folder import RunFolder

MOVED = "but it was moved, removed or replaced; this process writes nothing more"


def remove(folder: Path) -> None:
    shutil.rmtree(folder)


def move(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))


def replace(folder: Path) -> None:
    move(folder)
    with RunFolder(folder).hold():  # the run of another process
        RunFolder(folder).append({"step": 7})


def unlock(folder: Path) -> None:
    (folder / "lock").unlink()


def relock(folder: Path) -> None:
    unlock(folder)
    (folder / "lock").write_text(str(os.getpid()))


@pytest.mark.parametrize("change", [remove, move, replace, unlock, relock])
def test_nothing_is_written_into_a_folder_that_is_another(tmp_path: Path, change: object) -> None:
    run = RunFolder(tmp_path / "run")
    with run.hold():
        run.append({"step": 1})
        run.require_held()
        assert callable(change)
        change(run.path)
        before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
        writer = checkpoint.Writer(run.path, run.require_held)
        writer.start({"w": torch.zeros(2)}, {"step": 2})
        for write in (
            writer.wait,
            lambda: run.append({"step": 2}),
            lambda: run.write_result({"status": "finished"}),
            run.clear,
            run.resume,
            run.remove_result,
        ):
            with pytest.raises(ValueError, match=MOVED):
                write()
        assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before
    with RunFolder(tmp_path / "new").hold():
        pass


@pytest.mark.parametrize("content", ["my notes", "12 34", "-3", "1" * 40])
def test_file_of_the_user_is_no_lock(tmp_path: Path, content: str) -> None:
    (tmp_path / "lock").write_text(content)
    with pytest.raises(ValueError, match="to be the lock of a run, got another file"), RunFolder(tmp_path).hold():
        pass
    assert (tmp_path / "lock").read_text() == content


def test_target_of_a_link_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "diary").write_text("7")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "lock").symlink_to(tmp_path / "diary")
    with pytest.raises(ValueError, match="to be the lock of a run, got another file"), RunFolder(folder).hold():
        pass
    assert (tmp_path / "diary").read_text() == "7"


@pytest.mark.parametrize("content", [b"", b"123", b"\0\0\0"])
def test_lock_of_an_earlier_process_is_taken(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "lock").write_bytes(content)  # zeros after a power failure
    with RunFolder(tmp_path).hold():
        assert (tmp_path / "lock").read_text() == str(os.getpid())


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    "name", ["checkpoint-500/model.safetensors", "plan.json", "config.toml", "result.json", "tensorboard/events"]
)
def test_files_of_others_are_not_replaced(tmp_path: Path, name: str, overwrite: bool) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    run = RunFolder(tmp_path)
    with pytest.raises(ValueError, match="not of a run and would be replaced"), run.hold(overwrite=overwrite):
        run.clear()
    assert (tmp_path / name).read_text() == "mine"
    assert not (tmp_path / "lock").exists()
    write_sealed_text(tmp_path / "config.toml", "")  # the control: the same beside the configuration of a run
    with run.hold(overwrite=True):
        run.clear()
    assert (tmp_path / name).exists() == name.startswith("checkpoint")  # which is never one of ours


def test_checkpoints_of_others_are_never_pruned_nor_read(tmp_path: Path) -> None:
    """Beside the lock of a run, and with later steps than its own."""
    (tmp_path / "lock").write_text("1")
    other = tmp_path / "checkpoint-500"
    other.mkdir()
    for name in ("model.safetensors", "trainer_state.json"):
        (other / name).write_text(name)
    run = RunFolder(tmp_path)
    with run.hold():
        assert run.saved_step is None
        for step in (1, 2, 500, 501):
            saved = checkpoint.save(tmp_path, {"w": torch.full((2,), float(step))}, {"step": step})
            if step == 1:
                (saved / "notes.txt").write_text("mine")
    assert sorted(path.name for path in other.iterdir()) == ["model.safetensors", "trainer_state.json"]
    assert (tmp_path / "checkpoint-1" / "notes.txt").read_text() == "mine"
    assert not (tmp_path / "checkpoint-2").exists()  # the control: one of ours alone is pruned
    assert not (tmp_path / "checkpoint-500-1").exists()
    assert checkpoint.load(tmp_path)[1]["step"] == 501
    with run.hold(overwrite=True):
        run.clear()
    assert other.is_dir()
    assert not (tmp_path / "checkpoint-501").exists()


def test_lock_does_not_make_a_configuration_of_the_user_one_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("1")
    (tmp_path / "config.toml").write_text('title = "mine"\n')
    with (
        pytest.raises(ValueError, match=r"but '.*config.toml' is not of a run and would be replaced"),
        RunFolder(tmp_path).hold(overwrite=True),
    ):
        pass
    (tmp_path / "config.toml").write_text("lr = 0.1\n")  # the control: settings of a run
    with RunFolder(tmp_path).hold(overwrite=True):
        pass
