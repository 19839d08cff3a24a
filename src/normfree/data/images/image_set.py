"""A labelled set of images as bytes in memory, and the part of it that is held out for validation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)  # compared as objects: tensors have no single truth value
class Split:
    """Images (N, C, H, W) as bytes, and their labels (N,) as int64.

    Raises:
        ValueError: if shapes, types or numbers do not fit.
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
                f"{tuple(self.labels.shape)}; give one number an image"
            )

    def __len__(self) -> int:
        return len(self.images)

    def take(self, which: Tensor | slice) -> Split:
        """The images of an index or a slice."""
        return Split(self.images[which], self.labels[which])


@dataclass(frozen=True, eq=False)
class ImageSet:
    """A training and a test split with the names of the classes.

    `mean` and `std` are those of the training pixels divided by 255, a number a channel; a channel without any
    variation has std 1, so that dividing by it is safe.
    """

    name: str
    classes: tuple[str, ...]
    train: Split
    test: Split
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def hold_out(self, count: int, seed: int) -> tuple[Split, Split]:
        """The training images without `count` of them, and these as a validation split.

        Class k with n_k of n images gives count · n_k / n of its own, rounded down or up, so that a balanced set is
        parted into balanced sets. Which ones is drawn from `seed` alone; both splits keep the order of the data.

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
        draws = np.random.Generator(np.random.PCG64(seed))
        labels = self.train.labels.cpu().numpy()
        sizes = np.bincount(labels, minlength=len(self.classes))
        quotas = _shares(count, sizes, draws.random(len(sizes)))
        order = np.argsort(draws.random(total), kind="stable")
        held = np.zeros(total, dtype=bool)
        for label, quota in enumerate(quotas):
            held[order[labels[order] == label][:quota]] = True
        mask = torch.from_numpy(held).to(self.train.labels.device)
        return self.train.take(~mask), self.train.take(mask)


def _shares(count: int, sizes: np.ndarray, ties: np.ndarray) -> list[int]:
    """`count` parted in proportion to `sizes`: each share is rounded down, the largest remainders get one more."""
    total = max(int(sizes.sum()), 1)
    shares, remainders = np.divmod(count * sizes.astype(np.int64), total)
    for label in np.lexsort((ties, -remainders))[: count - int(shares.sum())]:
        shares[label] += 1
    return [int(share) for share in shares]


def image_set(name: str, classes: Sequence[str], train: Split, test: Split) -> ImageSet:
    """An `ImageSet` with the mean and standard deviation of its training pixels, from an exact count of every byte."""
    mean, std = [], []
    values = torch.arange(256, dtype=torch.float64) / 255
    for channel in range(train.images.shape[1]):
        counts = torch.bincount(train.images[:, channel].reshape(-1).cpu(), minlength=256).double()
        share = counts / counts.sum().clamp_min(1)
        centre = (share * values).sum()
        mean.append(float(centre))
        std.append(float((share * (values - centre).square()).sum().sqrt()) or 1.0)
    return ImageSet(name, tuple(classes), train, test, tuple(mean), tuple(std))
