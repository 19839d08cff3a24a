"""Every layout of every known data set is read from tiny files of `layout_writers`; damaged files are refused."""

from __future__ import annotations

import gzip
import hashlib
import os
import pickle
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import layout_writers
from normfree.checksums import Checksum
from normfree.data import load
from normfree.data.download.catalog import DATA_SETS, DataSet, Layout
from normfree.data.download.formats import read_binary, read_idx, read_mat, read_pickled

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
