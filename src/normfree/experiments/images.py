"""CIFAR-10 from the files that its authors hand out, as one batch of normalized images."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

_RECORD = 1 + 3 * 32 * 32  # a label and the three planes of an image
_MEAN, _STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
_ARRAY = {("numpy._core.multiarray", "_reconstruct"), ("numpy.core.multiarray", "_reconstruct")}
_ARRAY |= {("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode")}


def cifar10(folder: Path | None, count: int) -> tuple[Tensor, Tensor]:
    """The first `count` training images, each channel with mean 0 and variance 1 over the whole set, and their labels.

    Reads `cifar-10-batches-bin` or `cifar-10-batches-py` in `folder` (default: .data), or the batches themselves.

    Raises `ValueError` when they are not there, or are something else.
    """
    folder = Path(".data") if folder is None else folder
    images, labels = [], []
    missing = count
    for number in range(1, 6):
        if missing <= 0:
            break
        pixels, classes = _batch(folder, number)
        images.append(pixels[:missing])
        labels.append(classes[:missing])
        missing -= len(pixels)
    if missing > 0:
        raise ValueError(f"expected {count} training images in '{folder.name}', got {count - missing}; ask for fewer")
    x = torch.from_numpy(np.concatenate(images)).float().div_(255).view(-1, 3, 32, 32)
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (_MEAN, _STD))
    return (x - mean) / std, torch.from_numpy(np.concatenate(labels)).long()


def _batch(folder: Path, number: int) -> tuple[np.ndarray, np.ndarray]:
    """The images, (N, 3072) bytes, and labels of one of the five files."""
    for place in (folder / "cifar-10-batches-bin", folder):
        path = place / f"data_batch_{number}.bin"
        if path.is_file():
            return _binary(path)
    for place in (folder / "cifar-10-batches-py", folder):
        path = place / f"data_batch_{number}"
        if path.is_file():
            return _pickled(path)
    raise ValueError(
        f"expected CIFAR-10 in the folder '{folder.name}', as cifar-10-batches-bin/data_batch_{number}.bin or "
        f"cifar-10-batches-py/data_batch_{number}, found neither; unpack it there, or pass --data DIR"
    )


def _binary(path: Path) -> tuple[np.ndarray, np.ndarray]:
    data = np.fromfile(path, dtype=np.uint8)
    if len(data) == 0 or len(data) % _RECORD:
        raise ValueError(
            f"expected records of {_RECORD} bytes in '{path.name}', got {len(data)} bytes; unpack CIFAR-10 again"
        )
    records = data.reshape(-1, _RECORD)
    return records[:, 1:], records[:, 0]


class _Arrays(pickle.Unpickler):
    """Reads arrays and plain containers only, because a pickle could otherwise run anything."""

    def find_class(self, module: str, name: str) -> Any:
        """Refuse everything but an array's parts."""
        if (module, name) not in _ARRAY:
            raise pickle.UnpicklingError(f"it holds {module}.{name}")
        return super().find_class(module, name)


def _pickled(path: Path) -> tuple[np.ndarray, np.ndarray]:
    try:
        batch = _Arrays(io.BytesIO(path.read_bytes()), encoding="bytes").load()
        pixels, labels = np.asarray(batch[b"data"]), np.asarray(batch[b"labels"])
        if pixels.dtype != np.uint8 or pixels.shape != (len(labels), _RECORD - 1):
            raise ValueError(f"images of shape {pixels.shape} and type {pixels.dtype}")
    except (pickle.UnpicklingError, EOFError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"expected a batch of CIFAR-10 in '{path.name}', got something else: {error}; unpack CIFAR-10 again"
        ) from error
    return pixels, labels
