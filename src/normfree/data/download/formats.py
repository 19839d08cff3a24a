"""Read the file formats of the data sets: CIFAR's binary and pickled batches, MNIST's idx, SVHN's MATLAB files."""

from __future__ import annotations

import gzip
import io
import math
import pickle
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from normfree.data.images.image_set import Split
from normfree.errors import missing_package

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


def read_binary(path: Path, classes: int, *, label_bytes: int = 1, shape: tuple[int, int, int] = (3, 32, 32)) -> Split:
    """Read records of label bytes and the planes of an image; the last label byte counts (CIFAR-100: coarse, fine).

    Raises:
        ValueError: if the file does not hold whole records, or a label is outside the classes.
    """
    record = label_bytes + math.prod(shape)
    data = np.fromfile(path, dtype=np.uint8)
    if len(data) == 0 or len(data) % record:
        raise ValueError(f"expected records of {record} bytes in '{path.name}', got {len(data)} bytes; {_REMEDY}")
    records = data.reshape(-1, record)
    return _split(records[:, label_bytes:].reshape(-1, *shape), records[:, label_bytes - 1], classes, path)


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
