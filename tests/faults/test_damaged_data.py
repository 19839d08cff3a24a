"""Damaged archives and files of data sets are refused by one sentence, or are other images; nothing takes a GiB.

With checksums, any damage is refused (test_flipped_bytes.py). Here there are none, as for files of your own.
"""

import gzip
import io
import lzma
import pickle
import resource
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from fault_kinds import DAMAGED, IMAGE_FORMATS
from normfree.data.download.file_formats import (
    gzipped_files,
    read_binary,
    read_idx,
    read_mat,
    read_members,
    read_pickled,
    write_idx,
)
from normfree.data.images.image_folder import folder_in_order, read_folder
from normfree.data.text.text_files import read_lines

pytestmark = pytest.mark.faults
GIB = 1 << 30
RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (3, 3, 32, 32), dtype=np.uint8)
MEMBERS = {"data/one": b"one" * 300, "data/two": b"two" * 200}


class DataFile(NamedTuple):
    """The content of a whole file, its name, and how it is read."""

    name: str
    content: bytes
    read: Callable[[Path], Any]


def _tar(mode: Any) -> bytes:
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode=mode) as tar:
        for name, content in MEMBERS.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return whole.getvalue()


def _zip() -> bytes:
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w") as file:
        for name, content in MEMBERS.items():
            file.writestr(name, content)
    return whole.getvalue()


def _mat() -> bytes:
    scipy = pytest.importorskip("scipy.io")
    whole = io.BytesIO()
    scipy.savemat(whole, {"X": IMAGES.transpose(2, 3, 1, 0), "y": np.array([[1], [10], [3]], np.uint8)})
    return whole.getvalue()


def _picture(form: str) -> bytes:
    image = pytest.importorskip("PIL.Image").fromarray(IMAGES[0].transpose(1, 2, 0))
    whole = io.BytesIO()
    image.save(whole, form)
    return whole.getvalue()


def _members(path: Path) -> dict[str, bytes]:
    return read_members(path.read_bytes(), MEMBERS, path.name)


def _labels(path: Path) -> Path:
    labels = path.with_name("labels")
    labels.write_bytes(write_idx(np.arange(3, dtype=np.uint8)))
    return labels


def _image(path: Path) -> Any:
    place = path.parent / "val" / "a" / path.name
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(path.read_bytes())
    try:
        return [x for x, _ in folder_in_order(read_folder(path.parent, "val"), batch_size=1, size=32)]
    finally:
        place.unlink()


TEXT = "a few words\nand a few more\n" * 20
FILES: dict[str, Callable[[], DataFile]] = {
    "tar archive": lambda: DataFile("a.tar", _tar("w"), _members),
    "tar archive (gz)": lambda: DataFile("a.tgz", _tar("w:gz"), _members),
    "tar archive (xz)": lambda: DataFile("a.txz", _tar("w:xz"), _members),
    "zip archive in place of a tar": lambda: DataFile("a.zip", _zip(), _members),
    "gz file": lambda: DataFile(
        "a.gz", gzip.compress(TEXT.encode()), lambda p: gzipped_files({"a.gz": p.read_bytes()})
    ),
    "idx": lambda: DataFile("images", write_idx(IMAGES[:, 0]), lambda p: read_idx(p, _labels(p))),
    "idx (gz)": lambda: DataFile("i.gz", gzip.compress(write_idx(IMAGES[:, 0])), lambda p: read_idx(p, _labels(p))),
    "pickled batch": lambda: DataFile(
        "batch", pickle.dumps({b"data": IMAGES.reshape(3, -1), b"labels": [1, 2, 3]}, 2), lambda p: read_pickled(p, 10)
    ),
    "binary batch": lambda: DataFile(
        "b.bin", b"".join(bytes([1]) + image.tobytes() for image in IMAGES), lambda p: read_binary(p, 10)
    ),
    "MATLAB file": lambda: DataFile("m.mat", _mat(), read_mat),
    "text (gz)": lambda: DataFile("t.gz", gzip.compress(TEXT.encode()), lambda p: list(read_lines(p))),
    "text (xz)": lambda: DataFile("t.xz", lzma.compress(TEXT.encode()), lambda p: list(read_lines(p))),
    **{
        f"image ({form})": lambda form=form: DataFile(f"1.{form}", _picture(form), _image)  # type: ignore[misc]
        for form in IMAGE_FORMATS
    },
}


def damaged(content: bytes, number: int) -> bytes:
    """Change some bytes, cut, repeat or leave out a part."""
    rng = np.random.default_rng(number)
    start, length = int(rng.integers(len(content))), int(rng.choice([1, 1, 4, 8, 64]))
    before, part, after = content[:start], content[start : start + length], content[start + length :]
    choices = [
        before + bytes([part[0] ^ 1 << number % 8]) + part[1:] + after,
        before + b"\xff" * len(part) + after,
        before + b"\0" * len(part) + after,
        before + rng.bytes(len(part)) + after,
        before,
        before + after,
        before + part + part + after,
        after + before,
    ]
    return choices[number % len(choices)]


@contextmanager
def memory_limit(more: int) -> Iterator[None]:
    """Let this process get no more than `more` bytes beyond those that it has."""
    if sys.platform != "linux":
        yield
        return
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("times", [16, pytest.param(1000, marks=pytest.mark.slow)], ids=["some", "all"])
@pytest.mark.parametrize("kind", DAMAGED)
def test_damaged_file_is_refused_or_other_images(kind: str, times: int, tmp_path: Path, count_data: Any) -> None:
    file, wrong = FILES[kind](), []
    path = tmp_path / file.name
    path.write_bytes(file.content)
    if "in place of" not in kind:
        file.read(path)  # the control: the whole file is read
    for number in range(times):
        path.write_bytes(damaged(file.content, number))
        try:
            with memory_limit(GIB):
                file.read(path)
            outcome = "read"
        except Exception as error:
            one_sentence = isinstance(error, ValueError | OSError) and "\n" not in str(error)
            outcome = "refused" if one_sentence else "traceback"
            if not one_sentence:
                wrong.append((number, repr(error)[:300]))
        count_data(kind, outcome)
    assert not wrong
