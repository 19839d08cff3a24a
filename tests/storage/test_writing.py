"""Files and folders are written whole or not at all, and a failed write is one sentence."""

import errno
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from normfree.storage import writing
from normfree.storage.reading import from_json_values
from normfree.storage.writing import (
    atomic_folder,
    atomic_path,
    explain_os_errors,
    made_folder,
    to_json_values,
    write_bytes,
    write_json,
)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.faults
def test_interrupted_write_leaves_what_was_there(error: type[BaseException], tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    path.write_text("before")

    def interrupted() -> None:
        with atomic_path(path) as temporary:
            temporary.write_text("half")
            raise error

    with pytest.raises(error):
        interrupted()
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["one.json"]


def test_write_replaces_the_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    path.write_text("a long text that was there before")
    with atomic_path(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "a long text that was there before"
    assert path.read_text() == "new"
    assert path.stat().st_mode & 0o777 == 0o644


def test_content_and_name_reach_the_disk_in_that_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def note_sync(handle: int) -> None:
        events.append("folder" if os.path.isdir(f"/proc/self/fd/{handle}") else "file")
        fsync(handle)

    def note_replace(self: Path, target: Path) -> Path:
        events.append("name")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(Path, "replace", note_replace)
    write_json(tmp_path / "one.json", {})
    assert events == ["file", "name", "folder"]


def test_folder_takes_the_place_of_an_earlier_one(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "one"
    for content, other in (("first", "a"), ("second", "b")):
        with atomic_folder(folder) as temporary:
            (temporary / "file").write_text(content)
            (temporary / other).touch()
        assert (folder / "file").read_text() == content
        assert sorted(os.listdir(folder)) == sorted(["file", other])
        assert os.listdir(folder.parent) == ["one"]
        assert folder.stat().st_mode & 0o777 == 0o755


@pytest.mark.faults
def test_interrupted_folder_leaves_the_earlier_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "one"
    with atomic_folder(folder) as temporary:
        (temporary / "file").write_text("before")

    def interrupted() -> None:
        with atomic_folder(folder) as temporary:
            (temporary / "file").write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    replace = Path.replace

    def refuse(self: Path, target: Path) -> Path:
        if target == folder and self.name.startswith(f"{writing.TEMPORARY}one-"):
            raise OSError(errno.EIO, "no renaming")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", refuse)
    monkeypatch.setattr(writing, "_exchange", lambda *_: False)  # a file system that cannot exchange names
    with pytest.raises(OSError, match="no renaming"), atomic_folder(folder) as temporary:
        (temporary / "file").write_text("after")
    assert (folder / "file").read_text() == "before"
    assert os.listdir(tmp_path) == ["one"]


def test_files_of_a_folder_reach_the_disk_before_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    replace = Path.replace

    def note_replace(self: Path, target: Path) -> Path:
        events.append("name")
        return replace(self, target)

    monkeypatch.setattr(writing, "sync", lambda path: events.append("folder" if path.is_dir() else "file"))
    monkeypatch.setattr(Path, "replace", note_replace)
    with atomic_folder(tmp_path / "one") as temporary:
        (temporary / "a").touch()
        (temporary / "b").touch()
    assert events == ["file", "file", "folder", "name", "folder"]


def test_values_that_cannot_be_written_leave_no_file(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        write_json(tmp_path / "one.json", {"one": object()})
    assert not list(tmp_path.iterdir())


def test_bytes_are_written_as_they_are(tmp_path: Path) -> None:
    write_bytes(tmp_path / "deep" / "one", b"\xff\r\n")
    assert (tmp_path / "deep" / "one").read_bytes() == b"\xff\r\n"


@pytest.mark.faults
def test_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_json(tmp_path / "one.json", 1)

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_json(tmp_path / "one.json", 2)
    assert (tmp_path / "one.json").read_text() == "1\n"
    assert os.listdir(tmp_path) == ["one.json"]


def test_file_is_json_for_any_reader(tmp_path: Path) -> None:
    value = {"three": (math.nan, math.inf, [-math.inf]), "text": "√"}
    write_json(tmp_path / "deep" / "one.json", value)

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    back = json.loads((tmp_path / "deep" / "one.json").read_text(encoding="utf-8"), parse_constant=refuse)
    assert back == to_json_values(value) == {"three": ["nan", "inf", ["-inf"]], "text": "√"}
    assert repr(from_json_values(back)) == "{'three': [nan, inf, [-inf]], 'text': '√'}"
    assert from_json_values({"name": "nan", "deep": {"name": "inf", "x": "inf"}}, ["name"]) == {
        "name": "nan",
        "deep": {"name": "inf", "x": math.inf},
    }


def test_path_that_is_no_text_can_be_written_down(tmp_path: Path) -> None:
    write_json(tmp_path / "one.json", {"out": os.fsdecode(b"a\xffb")})
    assert json.loads((tmp_path / "one.json").read_text(encoding="utf-8")) == {"out": "a?b"}


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.ENOENT, errno.EIO])
def test_obstacle_is_one_sentence_with_a_remedy(code: int) -> None:
    with (
        pytest.raises(OSError, match="could not write the table 'a/b'") as caught,
        explain_os_errors("the table", Path("a/b")),
    ):
        raise OSError(code, "some words of the system", "inner")
    assert caught.value.errno == code
    assert os.strerror(code) in str(caught.value)
    assert str(caught.value).count(";") == 1
    assert "inner" not in str(caught.value)


def test_folder_that_cannot_be_synced_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(handle: int) -> Any:
        raise OSError(errno.EINVAL, "no sync here")

    monkeypatch.setattr(os, "fsync", refuse)
    writing.sync(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux exchanges two names")
def test_folder_is_never_missing_while_it_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "one"
    folder.mkdir()
    (folder / "file").write_text("before")
    removed = []

    def remove(path: Path, **_: object) -> None:
        assert (folder / "file").read_text() == "after"
        removed.append((path / "file").read_text())

    monkeypatch.setattr(writing.shutil, "rmtree", remove)
    monkeypatch.setattr(Path, "replace", lambda *_: pytest.fail("two renames leave a moment without the folder"))
    with atomic_folder(folder) as temporary:
        (temporary / "file").write_text("after")
    assert removed == ["before"]


@pytest.mark.parametrize(("mask", "file", "directory"), [(0o077, 0o600, 0o700), (0o022, 0o644, 0o755)])
def test_files_are_as_private_as_the_umask_says(tmp_path: Path, mask: int, file: int, directory: int) -> None:
    before = os.umask(mask)
    try:
        writing.write_text(tmp_path / "one", "text")
        with atomic_folder(tmp_path / "folder") as temporary:
            (temporary / "two").write_text("text")
    finally:
        os.umask(before)
    assert (tmp_path / "one").stat().st_mode & 0o777 == file
    assert (tmp_path / "folder").stat().st_mode & 0o777 == directory


def test_folder_behind_a_link_is_replaced_and_the_link_stays(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "old").touch()
    (tmp_path / "link").symlink_to("far")
    with atomic_folder(tmp_path / "link") as new:
        (new / "new").touch()
    assert (tmp_path / "link").is_symlink()
    assert sorted(path.name for path in (tmp_path / "far").iterdir()) == ["new"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["far", "link"]


def test_made_folder_is_removed_after_an_error_if_it_is_empty(tmp_path: Path) -> None:
    def stop(*files: Path) -> None:
        with made_folder("the runs in", tmp_path / "a" / "b"):
            for file in files:
                file.touch()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        stop()
    assert not (tmp_path / "a").exists()
    with pytest.raises(ZeroDivisionError):
        stop(tmp_path / "a" / "file")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["file"]
    with made_folder("the runs in", tmp_path / "c"):
        pass
    assert (tmp_path / "c").is_dir()
    with (
        pytest.raises(OSError, match=r"could not write the runs in '.*file/d': "),
        made_folder("the runs in", tmp_path / "a" / "file" / "d"),
    ):
        pass
