"""The data sets that need no download: `fashion14` is a file of the package, and `spirals` are made by a formula."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from normfree.data.download.catalog import FASHION_CLASSES
from normfree.data.images.image_set import ImageSet, Split, image_set
from normfree.storage.reading import Checksum

LINEAR_ACCURACY = {"fashion14": 0.835, "spirals": 0.258}  # of softmax regression on the test split; a test measures it


ASSET = Path(__file__).parent / "images" / "assets" / "fashion14.bin"  # made by tests/support/embedded_images.py


_ASSET_CHECKSUM = Checksum(sha256="9d2dedfd079e5603eab96591746a3ab759595eb3d517106c8a525b108ba3b947", size=7_000 * 197)


_ASSET_TRAIN = 6_000  # images; the other 1,000 are the test split


_ARMS = ("red", "orange", "green", "blue", "violet")  # the classes of the spirals


_POINTS = 6_000, 2_000  # of the spirals, for training and test


_TURNS = 3.0


_NOISE = 0.005  # standard deviation, where the outer radius is 1 and neighbouring arms are 0.07 apart


_EDGE = 1.05  # coordinates from -_EDGE to _EDGE become bytes


def _load_fashion14() -> ImageSet:
    """Read Fashion-MNIST at 14×14 pixels, with 600 training and 100 test images per class.

    Raises:
        ValueError: if the file in the package is damaged.
    """
    _ASSET_CHECKSUM.check(ASSET, ASSET.name, "install normfree again")
    records = torch.frombuffer(bytearray(ASSET.read_bytes()), dtype=torch.uint8).view(-1, 1 + 14 * 14)
    both = Split(records[:, 1:].reshape(-1, 1, 14, 14), records[:, 0].long())
    train, test = both.take(slice(_ASSET_TRAIN)), both.take(slice(_ASSET_TRAIN, None))
    return image_set("fashion14", FASHION_CLASSES, train, test, linear_accuracy=LINEAR_ACCURACY["fashion14"])


def _load_spirals() -> ImageSet:
    """Make the points: arm k has the angle 2π(3 r + k/5) at radius r, with a little noise, on the surface of a bowl.

    A point is an "image" of one pixel with three channels, its coordinates, so that it can be trained on like any other
    data. The third is the height on a hemisphere over the disc of the spirals. In the flat disc, a network without
    biases could not tell the radius: it gives x and 2x the same class. The radius is the square root of a uniform
    number, which spreads the points evenly over the disc. The numbers come from numpy's PCG64 with a fixed seed.

    >>> _load_spirals().train.images.shape
    torch.Size([6000, 3, 1, 1])
    """
    generator = np.random.Generator(np.random.PCG64(5))
    count = _POINTS[0] + _POINTS[1]
    labels = np.arange(count) % len(_ARMS)
    radius = np.sqrt(generator.uniform(0.05**2, 1.0, count))
    angle = 2 * np.pi * (_TURNS * radius + labels / len(_ARMS))
    plane = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
    plane += generator.normal(0.0, _NOISE, plane.shape)
    height = np.sqrt(np.maximum(_EDGE**2 - np.square(plane).sum(axis=1), 0.0))
    points = np.column_stack([plane, height])
    pixels = np.clip(np.rint((points / _EDGE + 1) * 127.5), 0, 255).astype(np.uint8)
    both = Split(torch.from_numpy(pixels)[:, :, None, None], torch.from_numpy(labels))
    train, test = both.take(slice(_POINTS[0])), both.take(slice(_POINTS[0], None))
    return image_set("spirals", _ARMS, train, test, linear_accuracy=LINEAR_ACCURACY["spirals"])


class BuiltIn(NamedTuple):
    """A data set that needs no files beside the package."""

    about: str
    load: Callable[[], ImageSet]
    size: int  # in bytes


BUILT_IN = {
    "fashion14": BuiltIn(
        "6,000 + 1,000 pieces of clothing, 14×14, grey, 10 classes; part of the package",
        _load_fashion14,
        _ASSET_CHECKSUM.size,
    ),
    "spirals": BuiltIn("6,000 + 2,000 points on five interleaved spirals; made by a formula", _load_spirals, 0),
}
