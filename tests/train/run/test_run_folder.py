"""A run's folder: one writer, nothing twice, nothing of the machine but its hardware."""

import errno
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
import torch

import normfree
from normfree.storage.folder_lock import FolderLock
from normfree.storage.writing import atomic_path, temporary_folder
from normfree.train import TrainConfig
from normfree.train.run import checkpoint
from normfree.train.run import run_folder as runs
from normfree.train.run.run_folder import RunFolder

HOLDS = """
import os, sys, time
from normfree.train.run.run_folder import RunFolder
with RunFolder(sys.argv[1]).hold(resume="resume" in sys.argv):
    if "fork" in sys.argv and os.fork() == 0:
        os.setsid()
        print("ready", flush=True)
        time.sleep(60)
    if "fork" not in sys.argv:
        print("ready", flush=True)
    time.sleep(60)
"""


@contextmanager
def holder(path: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that holds a run, killed at the end."""
    environment = {**os.environ, "PYTHONPATH": str(Path(normfree.__file__).parents[1])}
    command = [sys.executable, "-c", HOLDS, str(path), *words]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as child:
        assert child.stdout
        try:
            assert child.stdout.readline() == b"ready\n"
            yield child
        finally:
            child.kill()


def begin(path: Path, steps: int = 4) -> RunFolder:
    """A run that logged some steps, saved after two of them, and was killed."""
    run = RunFolder(path)
    with run.hold():
        run.config_path.write_text("lr = 0.1\n")
        for step in range(1, steps + 1):
            run.append({"step": step, "train_loss": 1 / step})
            if step == 2:
                checkpoint.save(run.path, {"w": torch.tensor(float(step))}, {"step": step})
    return run


# Holding


def test_new_run_makes_its_folder(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "deep" / "one")
    assert (run.exists, run.status) == (False, None)
    with run.hold() as held:
        assert held is run
        assert not run.exists
        assert os.listdir(run.path) == ["lock"]
    assert not (tmp_path / "deep").exists()  # a run that ended before it began is none
    with run.hold():
        run.append({"step": 0})
    assert (run.exists, run.status) == (True, "unfinished")


def test_second_start_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    run = begin(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with (
        pytest.raises(
            ValueError, match=r"holds one \(unfinished\); continue .* train --resume .* or resume=True"
        ) as caught,
        run.hold(),
    ):
        pass
    assert "\n" not in str(caught.value)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    with run.hold(resume=True):
        run.write_result({"status": "finished"})
    with pytest.raises(ValueError, match=r"holds one \(finished\)"), run.hold():
        pass


def test_resume_without_a_run_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with (
            pytest.raises(ValueError, match=r"expected a run to resume .* found none"),
            RunFolder(path).hold(resume=True),
        ):
            pass
    assert not list(tmp_path.iterdir())


def test_folder_of_another_process_is_refused_until_its_death(tmp_path: Path) -> None:
    run = begin(tmp_path)
    with holder(tmp_path, "resume") as child:
        says = rf"no other process trains in, but '.*' is held by process {child.pid}; wait for it"
        for resume in (True, False):
            with pytest.raises(ValueError, match=says), run.hold(resume=resume):
                pass
        assert run.read_metrics()  # anyone may read
    assert child.returncode == -signal.SIGKILL
    with run.hold(resume=True):
        pass


def test_folder_is_held_once_in_a_process_too(tmp_path: Path) -> None:
    with RunFolder(tmp_path).hold():
        says = f"held by process {os.getpid()}"
        with pytest.raises(ValueError, match=says), RunFolder(tmp_path).hold():
            pass
    with RunFolder(tmp_path).hold():
        pass


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_forked_worker_does_not_keep_the_lock(tmp_path: Path) -> None:
    run = begin(tmp_path)
    with holder(tmp_path, "resume", "fork") as child:
        with pytest.raises(ValueError, match="is held"), run.hold(resume=True):
            pass
        workers = Path(f"/proc/{child.pid}/task/{child.pid}/children")
        if not workers.exists():
            pytest.skip("needs the list of children of /proc")
        (worker,) = map(int, workers.read_text().split())
        child.kill()
        child.wait()
        try:
            os.kill(worker, 0)  # it lives
            with run.hold(resume=True):
                pass
        finally:
            os.kill(worker, signal.SIGKILL)


def test_file_system_without_locks_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(handle: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(ValueError, match="expected a file system with locks"), RunFolder(tmp_path).hold():
        pass


def test_file_in_the_way_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with (
            pytest.raises(OSError, match=r"could not write the run's folder .* in the way of the folder: move it"),
            RunFolder(path).hold(),
        ):
            pass


@pytest.mark.faults
def test_read_only_folder_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("filelock.FileLock.acquire", refuse)
    with pytest.raises(OSError, match="Read-only file system; choose a folder"), RunFolder(tmp_path).hold():
        pass


@pytest.mark.faults
def test_leftovers_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    run = begin(tmp_path)
    with atomic_path(tmp_path / "result.json") as unfinished:
        pass
    unfinished.write_text("half")
    (tmp_path / ".tmp-ab_cde12.json").write_text("half")  # of an earlier release
    (tmp_path / ".tmp-checkpoint-ab_cde12").mkdir()
    temporary_folder(tmp_path, "checkpoint")  # of the last save, after which no other comes
    (tmp_path / "result.json").unlink()
    own = [tmp_path / name for name in ("notes.txt", ".tmp-notes", ".tmp-abc.json", ".tmp-notes123.csv")]
    for path in own:
        path.write_text("mine")
    with run.hold(resume=True):
        pass
    assert {path for path in tmp_path.iterdir() if path.name.startswith(".tmp-")} == {*own[1:]}
    assert own[0].exists()


# A folder that is moved


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has paths of folders that are open")
def test_folder_that_is_moved_between_the_check_and_the_write_gets_what_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run begins in its place within the milliseconds before each write; nothing goes there."""
    original, checks = FolderLock.require_held, iter(range(99))
    run, begun, other = RunFolder(tmp_path / "run"), tmp_path / "begun", tmp_path / "other"

    def move_after_the_check(lock: FolderLock) -> None:
        original(lock)
        if next(checks) == 0:  # the one of the lock itself
            return
        run.path.rename(begun)
        other.rename(run.path)

    def put_back() -> None:
        assert os.listdir(run.path) == ["another"]
        run.path.rename(other)
        begun.rename(run.path)

    other.mkdir()
    (other / "another").write_text("another run")
    monkeypatch.setattr(FolderLock, "require_held", move_after_the_check)
    with run.hold():
        writer = run.open_writer(keep=1)
        for write in (
            lambda: run.write_config("lr = 0.1\n"),
            lambda: run.append({"step": 1}),
            lambda: (writer.start({"w": torch.ones(1)}, {"step": 1}), writer.wait()),
            lambda: run.write_result({"status": "finished"}),
            run.remove_result,
            run.clear,
            lambda: run.append({"step": 2}),
        ):
            write()
            put_back()
    assert set(os.listdir(run.path)) == {"lock", "metrics.jsonl"}


def test_run_that_is_moved_before_it_is_locked_is_not_begun_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, original = begin(tmp_path / "run"), FolderLock.hold

    def move_before(lock: FolderLock, **options: Any) -> Any:
        (tmp_path / "run").rename(tmp_path / "moved")
        return original(lock, **options)

    monkeypatch.setattr(FolderLock, "hold", move_before)
    with pytest.raises(ValueError, match=r"expected a run to resume in '.*run', found none"), run.hold(resume=True):
        pass
    assert set(os.listdir(tmp_path / "run")) <= {"lock"}


def test_error_in_a_held_folder_names_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = begin(tmp_path / "run")
    monkeypatch.setattr("normfree.train.run.checkpoint.temporary_folder", lambda *_: os.mkdir(tmp_path / "run"))
    with run.hold(resume=True):
        writer = run.open_writer()
        writer.start({}, {"step": 1})
        with pytest.raises(OSError, match=rf"could not write the checkpoint in '{tmp_path}/run': File exists"):
            writer.wait()


# Going on


def test_resume_gives_the_checkpoint_and_cuts_later_metrics(tmp_path: Path) -> None:
    run = begin(tmp_path)
    assert [record["step"] for record in run.read_metrics()] == [1, 2, 3, 4]
    with run.hold(resume=True):
        found = run.resume()
        assert found is not None
        assert (found[0]["w"].item(), found[1]["step"]) == (2.0, 2)
        assert [record["step"] for record in run.read_metrics()] == [1, 2]
        run.append({"step": 3, "train_loss": 0.5})
    assert [record["step"] for record in run.read_metrics()] == [1, 2, 3]


def test_resume_after_more_lines_in_the_same_process_loses_none(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    with run.hold():
        run.append({"step": 1})
        checkpoint.save(run.path, {}, {"step": 1})
        run.append({"step": 2})
        run.resume()  # its open file is replaced
        run.append({"step": 5})
    assert [record["step"] for record in run.read_metrics()] == [1, 5]


def test_resume_before_the_first_checkpoint_starts_over(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    with run.hold():
        run.append({"step": 0})
        run.append({"step": 1})
    with run.hold(resume=True):
        assert run.resume() is None
    assert run.read_metrics() == []


def test_resume_refuses_a_damaged_checkpoint_and_cuts_nothing(tmp_path: Path) -> None:
    run = begin(tmp_path)
    (tmp_path / "checkpoint-2" / "state.json").write_text("{}")
    with run.hold(resume=True), pytest.raises(ValueError, match=r"checkpoint-2/state.json' is damaged"):
        run.resume()
    assert len(run.read_metrics()) == 4


@pytest.mark.parametrize(
    "end", [b'{"step": 5, "train_lo', b"{", b"\0\0\0", b'{"step": 5}', b'{"step": 5, "tr\n', b"\0\n\0\n"]
)
def test_torn_end_of_the_metrics_is_dropped(end: bytes, tmp_path: Path) -> None:
    run = begin(tmp_path)
    with run.metrics_path.open("ab") as file:
        file.write(end)
    assert [record["step"] for record in run.read_metrics()] == [1, 2, 3, 4]
    with run.hold(resume=True):
        run.resume()
        run.append({"step": 3})
    assert [record["step"] for record in run.read_metrics()] == [1, 2, 3]
    assert run.metrics_path.read_bytes().count(b"\n") == 3


def test_damaged_line_amid_the_metrics_is_refused_by_number(tmp_path: Path) -> None:
    run = begin(tmp_path)
    lines = run.metrics_path.read_bytes().split(b"\n")
    run.metrics_path.write_bytes(b"\n".join([lines[0], b'{"ste', *lines[1:]]))
    with pytest.raises(ValueError, match=r"line 2 of '.*metrics.jsonl', but it is damaged; delete the line"):
        run.read_metrics()


def test_metrics_are_json_lines_and_come_back(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert run.read_metrics() == []
    record = {"step": 1, "loss": 0.1 + 0.2, "inf": math.inf, "nan": math.nan, "text": "ä\nb", "list": [1]}
    with run.hold():
        run.append(record)
        assert json.loads(run.metrics_path.read_text(encoding="utf-8"))["inf"] == "inf"  # there at once
        assert repr(run.read_metrics()) == repr([record])
        with pytest.raises(ValueError, match="expected the number of the step"):
            run.append({"loss": 1.0})


@pytest.mark.faults
def test_full_disk_leaves_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(FileIO):
        """A disk with room for three more bytes."""

        room = 3

        def write(self, content: bytes) -> int:  # type: ignore[override]
            if not self.room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            done = super().write(content[: self.room])
            self.room -= done
            return done

    run = begin(tmp_path)
    before = run.metrics_path.read_bytes()
    with run.hold(resume=True):
        with monkeypatch.context() as patch:
            patch.setattr(runs, "FileIO", Full)
            with pytest.raises(OSError, match=r"could not write the metrics .* No space left on device; free"):
                run.append({"step": 5})
        assert run.metrics_path.read_bytes() == before


def test_metrics_are_on_the_disk_before_their_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    monkeypatch.setattr(checkpoint, "sync", lambda path: events.append(path.name))
    with RunFolder(tmp_path).hold() as run:
        run.append({"step": 1})
        checkpoint.save(run.path, {}, {"step": 1})
    assert events[:3] == ["metrics.jsonl", checkpoint.WEIGHTS, checkpoint.STATE]


# The result


def test_result_comes_back_with_its_origin(tmp_path: Path) -> None:
    run = begin(tmp_path)
    with run.hold(resume=True):
        run.write_result({"status": "diverged", "test_accuracy": math.nan, "seeds": (1, 2)})
    assert run.status == "diverged"
    result = run.read_result()
    assert (result["test_accuracy"], result["seeds"]) == ("nan", [1, 2])
    assert set(result) >= {"commit", "versions", "hardware", "date"}


def test_result_names_no_folder_user_or_host(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    with run.hold():
        run.write_result(
            {
                "status": "interrupted",
                "config": {"data": str(Path.home() / "my data" / "cifar"), "out": tmp_path, "relative": "runs/one"},
                "reason": f"could not write '{tmp_path}/metrics.jsonl': full; see https://example.org/a/b",
                "command": ["normfree", "train", "--out", str(tmp_path)],
                "speed": "12 images/s",
            }
        )
    text = run.result_path.read_text()
    for secret in (str(Path.cwd()), str(Path.home()) + "/", os.uname().nodename, str(tmp_path), "my data"):
        assert secret not in text
    result = run.read_result()
    assert result["config"] == {"data": "cifar", "out": tmp_path.name, "relative": "runs/one"}
    assert result["reason"] == "could not write 'metrics.jsonl': full; see https://example.org/a/b"
    assert result["speed"] == "12 images/s"


def test_wrong_results_are_refused(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    with pytest.raises(ValueError, match="found none"):
        run.read_result()
    with (
        run.hold(),
        pytest.raises(ValueError, match="expected a status, one of finished, interrupted, "),
    ):
        run.write_result({"status": "fine"})
    for content in ("", "[]", '{"status": "fine"}', "\0"):
        run.result_path.write_text(content)
        with pytest.raises(ValueError, match=r"result.json'.* is damaged.*; delete it"):
            _ = run.status


@pytest.mark.faults
def test_full_disk_leaves_the_earlier_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFolder(tmp_path)

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with run.hold():
        run.write_result({"status": "interrupted"})
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            with pytest.raises(OSError, match="could not write the result"):
                run.write_result({"status": "finished"})
    assert run.status == "interrupted"


# The configuration


def held(folder: Path) -> RunFolder:
    """A run that has just written its configuration."""
    run = RunFolder(folder)
    run.config_path.write_text(TrainConfig(crop=4, flip=True).to_toml())
    return run


def test_same_configuration_is_accepted(tmp_path: Path) -> None:
    run, config = held(tmp_path), TrainConfig(crop=4, flip=True)
    run.require_resumable(config, ())
    run.require_resumable(config.with_changes(device="cuda", lr=0.2), ("device", "lr"))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"lr": 0.2}, "has lr=0.1, but this command gives lr=0.2;"),
        ({"crop": 0}, "has crop=4, but this command gives crop=0;"),
        ({"flip": False}, "has flip=True, but this command gives flip=False;"),
        ({"form": "pre"}, "has form=None, but this command gives form=pre;"),
        ({"betas": (0.9, 0.98)}, r"has betas=\(0.9, 0.999\), but this command gives betas=\(0.9, 0.98\);"),
        (
            dict.fromkeys(("crop", "cutout", "epochs", "block", "beam", "region", "seed", "workers"), 7),
            "has crop=4, cutout=0, epochs=10, block=128, beam=5, region=1, seed=0, workers=4, but this command gives "
            "crop=7, cutout=7, epochs=7, block=7, beam=7, region=7, seed=7, workers=7;",
        ),
    ],
)
def test_other_configuration_is_refused_by_setting(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        held(tmp_path).require_resumable(TrainConfig(crop=4, flip=True).with_changes(**change), ())
    assert f"in '{tmp_path}'" in str(caught.value)
    assert "choose another folder" in str(caught.value)


# Death at any moment

TRAINS = """
import sys, torch
from normfree.train.run import checkpoint
from normfree.train.run.run_folder import RunFolder
run = RunFolder(sys.argv[1])
with run.hold(resume=run.exists):
    found = run.resume() if run.exists else None
    step = found[1]["step"] if found else 0
    total = found[0]["total"] if found else torch.zeros((), dtype=torch.int64)
    print("ready", flush=True)
    while step < 10**6:
        step += 1
        total += step
        run.append({"step": step, "total": int(total)})
        if step % 5 == 0:
            checkpoint.save(run.path, {"total": total}, {"step": step})
"""


@pytest.mark.faults
def test_killed_runs_together_equal_one_run(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(normfree.__file__).parents[1])}
    run, command = RunFolder(tmp_path), [sys.executable, "-c", TRAINS, str(tmp_path)]
    seen = 0
    for more in (7, 23):
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as child:
            assert child.stdout
            try:
                assert child.stdout.readline() == b"ready\n"
                deadline = time.monotonic() + 30
                while len(run.read_metrics()) < seen + more and time.monotonic() < deadline:
                    time.sleep(0.001)
            finally:
                child.kill()
        seen = len(run.read_metrics())
    records = run.read_metrics()
    assert len(records) >= 30
    assert records == [{"step": n, "total": n * (n + 1) // 2} for n in range(1, len(records) + 1)]
