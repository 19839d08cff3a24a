"""Labelled images in memory: the training and the test split, and their batches, made on the device.

A batch is a pure function of seed, epoch and step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from normfree.data.counter_rng import epoch_order, sample_keys
from normfree.data.images.augment import (
    Augmentation,
    AugmentParams,
    augment_and_normalize,
    draw_params,
    mixup,
    mixup_shares,
    mixup_shifts,
    mixup_table,
    normalize,
    per_channel,
)


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
        linear_accuracy: the test accuracy of a linear classifier, if known.
    """

    name: str
    classes: tuple[str, ...]
    train: Split
    test: Split
    mean: tuple[float, ...]
    std: tuple[float, ...]
    linear_accuracy: float | None = None

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


def image_set(
    name: str, classes: Sequence[str], train: Split, test: Split, *, linear_accuracy: float | None = None
) -> ImageSet:
    """Make an `ImageSet`, with the mean and standard deviation of the training pixels from an exact count of all bytes.

    Args:
        name: the name of the data set.
        classes: the names of the classes, in the order of their labels.
        train: the training images.
        test: the test images.
        linear_accuracy: the test accuracy of a linear classifier, if known.
    """
    mean, std = [], []
    values = torch.arange(256, dtype=torch.float64) / 255
    for channel in range(train.images.shape[1]):
        counts = torch.bincount(train.images[:, channel].reshape(-1).cpu(), minlength=256).double()
        share = counts / counts.sum().clamp_min(1)
        centre = (share * values).sum()
        mean.append(float(centre))
        std.append(float((share * (values - centre).square()).sum().sqrt()) or 1.0)
    return ImageSet(name, tuple(classes), train, test, tuple(mean), tuple(std), linear_accuracy)


class ImageBatch(NamedTuple):
    """The batch of a training step; after mixup the loss is share·CE(labels) + (1 - share)·CE(other) for each sample.

    Attributes:
        inputs: images (b, C, H, W).
        labels: int64 (b,).
        other: the labels of the images mixed in, int64 (b,); None without mixup.
        share: the share of `labels`, a float32 scalar; None without mixup.
    """

    inputs: Tensor
    labels: Tensor
    other: Tensor | None
    share: Tensor | None


class ImageBatches:
    """The training batches of a split, made on the device.

    Each epoch shuffles the images. If the last batch is not full, it is filled with the first images of the same order;
    a batch may therefore be larger than the data. Every random number depends on the seed, the epoch and the slot, the
    position of the sample in the epoch. So all ranks together make the batch of a single process, bit for bit, and any
    step can be repeated.

    Args:
        split: the training images.
        batch_size: the batch size of all ranks together; each takes an equal part of every batch.
        mean: one number per channel, of pixels divided by 255.
        std: one number per channel.
        augmentation: the augmentation; none by default.
        seed: the seed of all draws.
        device: where the images lie and the batches are made.
        dtype: the type of the images of a batch.
        channels_last: the memory format of the images of a batch.
        rank: the rank of this process.
        world: the number of processes.

    Attributes:
        steps: the number of batches of an epoch.

    Raises:
        ValueError: for a split without images, a batch size that the ranks cannot share evenly, or a mean or std
            without one number per channel.
    """

    capturable = True

    def __init__(
        self,
        split: Split,
        *,
        batch_size: int,
        mean: Sequence[float],
        std: Sequence[float],
        augmentation: Augmentation | None = None,
        seed: int = 0,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        channels_last: bool = False,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        check_split(split)
        check_ranks(batch_size, rank, world)
        self.batch_size, self.rank, self.world, self.seed = batch_size, rank, world, seed
        self.augmentation = Augmentation() if augmentation is None else augmentation
        self.dtype, self.channels_last = dtype, channels_last
        self.steps = -(-len(split) // batch_size)
        self._images, self._labels = split.images.to(device).contiguous(), split.labels.to(device)
        channels = split.images.shape[1]
        self._mean, self._std = per_channel(mean, channels, "mean", device), per_channel(std, channels, "std", device)
        self._table = mixup_table(self.augmentation.mixup).to(device) if self.augmentation.mixup else None
        own = batch_size // world
        self._positions = torch.arange(rank * own, (rank + 1) * own, device=device)
        # `start_epoch` writes the draws of an epoch here for `batch` to read: hashing there takes minutes to compile.
        self._rows = torch.zeros(self.steps * batch_size, dtype=torch.int64, device=device)
        self._params = AugmentParams(*map(torch.zeros_like, self._draw(0)))
        self._shifts = torch.zeros(self.steps, dtype=torch.int64, device=device)
        self._shares = torch.zeros(self.steps, device=device)
        self.start_epoch(0)

    def start_epoch(self, epoch: int) -> None:
        """Draw an epoch into the tensors that `batch`, captured or not, reads."""
        count, device = len(self._images), self._images.device
        order, steps = epoch_order(self.seed, epoch, count, device), torch.arange(self.steps, device=device)
        self._rows.copy_(order[torch.arange(len(self._rows), device=device) % count])
        for place, drawn in zip(self._params, self._draw(epoch), strict=True):
            place.copy_(drawn)
        if self._table is not None:
            self._shifts.copy_(mixup_shifts(self.seed, epoch, steps, self.batch_size))
            self._shares.copy_(mixup_shares(self.seed, epoch, steps, self._table))

    def _draw(self, epoch: int) -> AugmentParams:
        """The augmentation of all slots of an epoch."""
        slots = torch.arange(len(self._rows), device=self._rows.device)
        return draw_params(sample_keys(self.seed, epoch, slots), self.augmentation, *self._images.shape[-2:])

    def batch(self, step: Tensor) -> ImageBatch:
        """This rank's part of the batch of a step of the epoch.

        It never waits for the host, so it compiles and a CUDA graph can capture it.

        Args:
            step: an int64 scalar on the device, below `steps`.
        """
        first = step * self.batch_size
        x, labels = self._samples(first + self._positions)
        other = share = None
        if self._table is not None:
            step = step.view(1)  # a scalar index would be read on the host
            partners = (self._positions + self._shifts[step]) % self.batch_size
            # One process has made the partners' images already; a rank makes those of other ranks again.
            others, other = (x[partners], labels[partners]) if self.world == 1 else self._samples(first + partners)
            share = self._shares[step].view(())
            x = mixup(x, others, share)
        return ImageBatch(to_format(x, self.dtype, self.channels_last), labels, other, share)

    def _samples(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """The normalized images, in float32, and the labels at slots of the epoch."""
        rows, params = self._rows[slots], AugmentParams(*(drawn[slots] for drawn in self._params))
        x = augment_and_normalize(self._images, params, self.augmentation, self._mean, self._std, rows)
        return x, self._labels[rows]


def in_order(
    split: Split,
    *,
    batch_size: int,
    mean: Sequence[float],
    std: Sequence[float],
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    channels_last: bool = False,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Every image of a split once, in order, normalized, with its label; the last batch may be short.

    The arguments are those of `ImageBatches`.

    Raises:
        ValueError: as `ImageBatches` does.
    """
    check_split(split)
    check_ranks(batch_size, 0, 1)
    channels = split.images.shape[1]
    means, stds = per_channel(mean, channels, "mean", device), per_channel(std, channels, "std", device)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, len(split), batch_size):
            part = slice(start, start + batch_size)
            x = normalize(split.images[part].to(device), means, stds)
            yield to_format(x, dtype, channels_last), split.labels[part].to(device)

    return batches()


def to_format(images: Tensor, dtype: torch.dtype, channels_last: bool) -> Tensor:
    """The images in a type and memory format."""
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    return images.to(dtype).contiguous(memory_format=memory_format)


def check_split(split: Sized) -> None:
    """Raise `ValueError` for a split without images."""
    if len(split) == 0:
        raise ValueError("expected at least one image to make batches of, got none; hold out fewer")


def check_ranks(batch_size: int, rank: int, world: int) -> None:
    """Raise `ValueError` for a rank outside the world, or a batch size that the ranks cannot share evenly."""
    if world < 1 or not 0 <= rank < world:
        raise ValueError(f"expected a rank of 0 to {world - 1} of {world}, got {rank}; check the launcher")
    if batch_size < 1 or batch_size % world:
        raise ValueError(f"expected a batch size that {world} ranks share evenly, got {batch_size}; change it")
