"""A few of the embedded images, so that an epoch takes a fraction of a second."""

from functools import cache

import torch

from normfree.data import ImageSet, load
from normfree.data.images.image_set import image_set


@cache
def tiny_images(train: int = 80, test: int = 40, name: str = "tiny", linear_accuracy: float | None = None) -> ImageSet:
    """The first images of each class as a set of its own."""
    whole = load("fashion14")
    shares = [
        split.take(torch.argsort(split.labels, stable=True).view(10, -1).T.reshape(-1)[:count])
        for split, count in ((whole.train, train), (whole.test, test))
    ]
    return image_set(name, whole.classes, *shares, linear_accuracy=linear_accuracy)
