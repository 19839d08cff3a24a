"""`spirals`: points on five interleaved spirals, made by a formula; a task that needs depth."""

from __future__ import annotations

import numpy as np
import torch

from normfree.data.images.image_set import ImageSet, Split, image_set

NAME = "spirals"
CLASSES = ("red", "orange", "green", "blue", "violet")
LINEAR_ACCURACY = 0.258  # of softmax regression on the test points; a test measures it
_TRAIN, _TEST = 6_000, 2_000
_TURNS = 3.0
_NOISE = 0.005  # standard deviation, where the outer radius is 1 and neighbouring arms are 0.07 apart
_EDGE = 1.05  # coordinates from -_EDGE to _EDGE become bytes


def load() -> ImageSet:
    """Make the points: arm k has the angle 2π(3 r + k/5) at radius r, with a little noise, on the surface of a bowl.

    A point is an "image" of one pixel with three channels, its coordinates, so that it can be trained on like any other
    data. The third is the height on a hemisphere over the disc of the spirals. In the flat disc, a network without
    biases could not tell the radius: it gives x and 2x the same class. The radius is the square root of a uniform
    number, which spreads the points evenly over the disc. The numbers come from numpy's PCG64 with a fixed seed.

    >>> load().train.images.shape
    torch.Size([6000, 3, 1, 1])
    """
    generator = np.random.Generator(np.random.PCG64(5))
    count = _TRAIN + _TEST
    labels = np.arange(count) % len(CLASSES)
    radius = np.sqrt(generator.uniform(0.05**2, 1.0, count))
    angle = 2 * np.pi * (_TURNS * radius + labels / len(CLASSES))
    plane = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
    plane += generator.normal(0.0, _NOISE, plane.shape)
    height = np.sqrt(np.maximum(_EDGE**2 - np.square(plane).sum(axis=1), 0.0))
    points = np.column_stack([plane, height])
    pixels = np.clip(np.rint((points / _EDGE + 1) * 127.5), 0, 255).astype(np.uint8)
    both = Split(torch.from_numpy(pixels)[:, :, None, None], torch.from_numpy(labels))
    train, test = both.take(slice(_TRAIN)), both.take(slice(_TRAIN, None))
    return image_set(NAME, CLASSES, train, test, linear_accuracy=LINEAR_ACCURACY)
