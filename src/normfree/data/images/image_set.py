"""A labelled set of images in memory, and the held-out part of it for validation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)  # compared by identity: the equality of tensors is not one truth value
class Split:
    """Images and their labels.

    Args:
        images: uint8 of shape (N, C, H, W).
        labels: int64 of shape (N,).

    Raises:
        ValueError: if the shapes or types differ, or there are more or fewer labels than images.
    """

    images: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        if self.images.ndim != 4 or self.images.dtype != torch.uint8:
            raise ValueError(
                f"expected images as bytes of shape (N, C, H, W), got {self.images.dtype} of shape "
                f"{tuple(self.images.shape)}; convert them with .to(torch.uint8)"
            )
        if self.labels.shape != self.images.shape[:1] or self.labels.dtype != torch.int64:
            raise ValueError(
                f"expected {len(self.images)} labels of type int64, got {self.labels.dtype} of shape "
                f"{tuple(self.labels.shape)}; give one number per image"
            )

    def __len__(self) -> int:
        return len(self.images)

    def take(self, which: Tensor | slice) -> Split:
        """The images and labels at an index, a mask or a slice."""
        return Split(self.images[which], self.labels[which])


@dataclass(frozen=True, eq=False)
class ImageSet:
    """A training and a test split; `image_set` makes one and computes `mean` and `std`.

    Args:
        name: the name of the data set.
        classes: the names of the classes, in the order of their labels.
        train: the training images.
        test: the test images.
        mean: the mean of the training pixels divided by 255, one number per channel.
        std: their standard deviation, 1 for a constant channel, so that you can divide by it.
    """

    name: str
    classes: tuple[str, ...]
    train: Split
    test: Split
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def hold_out(self, count: int, seed: int) -> tuple[Split, Split]:
        """Split `count` images off the training split for validation, balanced over the classes.

        Class k with n_k of the n images gives count · n_k / n images, rounded down or up.

        Args:
            count: the number of images to hold out.
            seed: the seed; it alone determines which images are held out.

        Returns:
            The training split and the validation split, both in the order of the data.

        Raises:
            ValueError: if no training image would be left, or the count or the seed is negative.
        """
        total = len(self.train)
        if not 0 <= count < max(total, 1):
            raise ValueError(
                f"expected to hold out 0 to {max(total - 1, 0)} of the {total} training images of '{self.name}', got "
                f"{count}; leave at least one to train on"
            )
        if seed < 0:
            raise ValueError(f"expected a seed of 0 or more for the held-out images, got {seed}")
        generator = np.random.Generator(np.random.PCG64(seed))
        labels = self.train.labels.cpu().numpy()
        sizes = np.bincount(labels, minlength=len(self.classes))
        quotas = _proportional(count, sizes, generator.random(len(sizes)))
        order = np.argsort(generator.random(total), kind="stable")
        held_out = np.zeros(total, dtype=bool)
        for label, quota in enumerate(quotas):
            held_out[order[labels[order] == label][:quota]] = True
        mask = torch.from_numpy(held_out).to(self.train.labels.device)
        return self.train.take(~mask), self.train.take(mask)


def _proportional(count: int, sizes: np.ndarray, ties: np.ndarray) -> list[int]:
    """Divide `count` in proportion to `sizes`: round down, then add one to those with the largest remainders."""
    total = max(int(sizes.sum()), 1)
    quotas, remainders = np.divmod(count * sizes.astype(np.int64), total)
    for label in np.lexsort((ties, -remainders))[: count - int(quotas.sum())]:
        quotas[label] += 1
    return [int(quota) for quota in quotas]


def image_set(name: str, classes: Sequence[str], train: Split, test: Split) -> ImageSet:
    """Make an `ImageSet`, with the mean and standard deviation of the training pixels from an exact count of all bytes.

    Args:
        name: the name of the data set.
        classes: the names of the classes, in the order of their labels.
        train: the training images.
        test: the test images.
    """
    mean, std = [], []
    values = torch.arange(256, dtype=torch.float64) / 255
    for channel in range(train.images.shape[1]):
        counts = torch.bincount(train.images[:, channel].reshape(-1).cpu(), minlength=256).double()
        share = counts / counts.sum().clamp_min(1)
        centre = (share * values).sum()
        mean.append(float(centre))
        std.append(float((share * (values - centre).square()).sum().sqrt()) or 1.0)
    return ImageSet(name, tuple(classes), train, test, tuple(mean), tuple(std))
