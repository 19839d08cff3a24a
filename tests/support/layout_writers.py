"""Tiny data sets in the published layouts, written without the code that reads them."""

from __future__ import annotations

import gzip
import pickle
import struct
from pathlib import Path

import numpy as np

TRAIN, TEST = 20, 8  # a split in one file; CIFAR-10 has five training files of 4


def arrays(count: int, classes: int, shape: tuple[int, ...], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Random images (N, C, H, W) and labels, with the first and last class among them."""
    g = np.random.default_rng(seed)
    labels = g.integers(0, classes, count)
    labels[:2] = 0, classes - 1
    return g.integers(0, 256, (count, *shape), dtype=np.uint8), labels


def binary(images: np.ndarray, labels: np.ndarray, coarse: bool = False) -> bytes:
    records = []
    for image, label in zip(images, labels, strict=True):
        records.append((bytes([label // 5]) if coarse else b"") + bytes([label]) + image.tobytes())
    return b"".join(records)


def pickled(images: np.ndarray, labels: np.ndarray, key: bytes = b"labels") -> bytes:
    """As Python 2 and an old numpy wrote it: the module of an array's constructor had another name."""
    content = {b"data": images.reshape(len(images), -1), key: labels.tolist(), b"batch_label": b"batch 1 of 5"}
    return pickle.dumps(content, protocol=2).replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n")


def idx_images(images: np.ndarray) -> bytes:
    return struct.pack(">BBBBIII", 0, 0, 8, 3, len(images), *images.shape[2:]) + images.tobytes()


def idx_labels(labels: np.ndarray) -> bytes:
    return struct.pack(">BBBBI", 0, 0, 8, 1, len(labels)) + bytes(labels.tolist())


def mat(path: Path, images: np.ndarray, labels: np.ndarray) -> None:
    from scipy.io import savemat

    y = np.where(labels == 0, 10, labels).astype(np.uint8).reshape(-1, 1)
    savemat(path, {"X": images.transpose(2, 3, 1, 0), "y": y}, do_compression=True)


def write(folder: Path, kind: str, suffix: str = "") -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    """Write a layout by the name of its folder; give the training and the test arrays."""
    folder.mkdir(parents=True, exist_ok=True)
    classes = 100 if "100" in kind else 10
    shape = (1, 28, 28) if "MNIST" in kind else (3, 32, 32)
    train, test = arrays(TRAIN, classes, shape, 1), arrays(TEST, classes, shape, 2)
    if kind.startswith("cifar-10-"):
        encode, ending = (binary, ".bin") if kind.endswith("bin") else (pickled, "")
        for number in range(5):
            part = slice(4 * number, 4 * number + 4)
            (folder / f"data_batch_{number + 1}{ending}").write_bytes(encode(train[0][part], train[1][part]))
        (folder / f"test_batch{ending}").write_bytes(encode(*test))
    for name, (images, labels) in (("train", train), ("test", test)):
        if kind == "cifar-100-binary":
            (folder / f"{name}.bin").write_bytes(binary(images, labels, coarse=True))
        elif kind == "cifar-100-python":
            (folder / name).write_bytes(pickled(images, labels, b"fine_labels"))
        elif kind == "SVHN":
            mat(folder / f"{name}_32x32.mat", images, labels)
        elif "MNIST" in kind:
            prefix, pack = "train" if name == "train" else "t10k", gzip.compress if suffix else bytes
            (folder / f"{prefix}-images-idx3-ubyte{suffix}").write_bytes(pack(idx_images(images)))
            (folder / f"{prefix}-labels-idx1-ubyte{suffix}").write_bytes(pack(idx_labels(labels)))
    return train, test
