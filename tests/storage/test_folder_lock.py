"""The lock of a folder: who holds it can be asked without taking it, and the question keeps nobody from it."""

import os
import threading
import time
from pathlib import Path

import pytest

from normfree.storage import folder_lock
from normfree.storage.folder_lock import FolderLock, is_held


def test_lock_is_held_inside_and_free_outside(tmp_path: Path) -> None:
    assert is_held(tmp_path) is False
    with FolderLock(tmp_path).hold():
        assert is_held(tmp_path) is True
        assert is_held(tmp_path) is True  # the question changed nothing
    assert is_held(tmp_path) is False


def test_question_writes_nothing(tmp_path: Path) -> None:
    with FolderLock(tmp_path).hold():
        pass
    before = (tmp_path / "lock").stat(), (tmp_path / "lock").read_bytes()
    is_held(tmp_path)
    assert ((tmp_path / "lock").stat().st_mtime_ns, (tmp_path / "lock").read_bytes()) == (
        before[0].st_mtime_ns,
        before[1],
    )
    (tmp_path / "lock").unlink()
    is_held(tmp_path)
    assert not (tmp_path / "lock").exists()


def test_other_things_of_that_name_are_not_known(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "lock")
    assert is_held(tmp_path) in (False, None)  # and it does not wait for a writer
    (tmp_path / "lock").unlink()
    (tmp_path / "lock").symlink_to("/dev/zero")
    assert is_held(tmp_path) is None


def test_many_questions_keep_nobody_from_the_lock(tmp_path: Path) -> None:
    with FolderLock(tmp_path).hold():
        pass
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            is_held(tmp_path)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(50):
            with FolderLock(tmp_path).hold():
                assert is_held(tmp_path) is True
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_shared_lock_would_refuse_a_process_without_patience(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above: a question that lasts does keep a process from the lock."""
    import fcntl

    with FolderLock(tmp_path).hold():
        pass
    monkeypatch.setattr(folder_lock, "_PATIENCE", 0.0)
    with (tmp_path / "lock").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        with pytest.raises(ValueError, match="is held"), FolderLock(tmp_path).hold():
            pass


def test_folders_without_a_file_are_removed_with_the_lock(tmp_path: Path) -> None:
    with FolderLock(tmp_path / "a" / "b").hold(make=True):
        assert (tmp_path / "a" / "b" / "lock").exists()
    assert not (tmp_path / "a").exists()
    (tmp_path / "mine").mkdir()
    with FolderLock(tmp_path / "mine").hold(make=True):
        pass
    assert list((tmp_path / "mine").iterdir()) == []  # the folder was there
    with FolderLock(tmp_path / "runs" / "one").hold(make=True):
        (tmp_path / "runs" / "two").mkdir()
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["two"]
    with FolderLock(tmp_path / "written").hold(make=True):
        (tmp_path / "written" / "file").touch()
    assert sorted(path.name for path in (tmp_path / "written").iterdir()) == ["file", "lock"]
    with FolderLock(tmp_path / "written").hold(make=True):
        (tmp_path / "written" / "file").unlink()
    assert [path.name for path in (tmp_path / "written").iterdir()] == ["lock"]  # of an earlier process


def test_process_that_waits_for_a_lock_that_is_removed_gets_one_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("normfree.storage.folder_lock._PATIENCE", 10)
    (tmp_path / "shared").mkdir()
    first, second = FolderLock(tmp_path / "shared"), FolderLock(tmp_path / "shared")
    entered: list[bool] = []

    def wait() -> None:
        with second.hold(make=True):
            second.require_held()
            entered.append(is_held(tmp_path / "shared") is True)

    with first.hold(make=True):
        waiting = threading.Thread(target=wait)
        waiting.start()
        time.sleep(0.2)
        assert not entered
    waiting.join(20)
    assert entered == [True]
