"""Batches from a set that lies on the device as bytes: a pure function of seed, epoch and step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from typing import NamedTuple

import torch
from torch import Tensor

from normfree.data.draws import order, sample_keys
from normfree.data.images.augment import Augmentation, Draws, augment, cutout, draw, normalize, per_channel
from normfree.data.images.image_set import Split
from normfree.data.images.mixup import mix, share_table, shares, shifts


class Batch(NamedTuple):
    """What a training step takes; after mixup the loss is share·CE(labels) + (1 - share)·CE(other) of each sample.

    `inputs` (b, C, H, W), `labels` and `other` (b,) int64, `share` a float32 without dimensions; the last two are None
    without mixup.
    """

    inputs: Tensor
    labels: Tensor
    other: Tensor | None
    share: Tensor | None


class Batches:
    """The training batches of a split; `batch_size` counts all ranks together, and each takes its part of every batch.

    An epoch visits the images in an order of its own; its last batch goes on at the start of that order, so a batch
    may be larger than the data. Every draw is keyed by seed, epoch and the sample's slot, its place in the epoch, so
    ranks together make the batch that one process makes, bit for bit, and any step can be made again.

    Raises `ValueError` for a split without images, a batch that the ranks cannot share evenly, or a
    mean or std not of one number a channel.
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
        self._table = share_table(self.augmentation.mixup).to(device) if self.augmentation.mixup else None
        own = batch_size // world
        self._positions = torch.arange(rank * own, (rank + 1) * own, device=device)
        # What an epoch draws lies ready for `batch` to read: hashing there would cost a compiler minutes.
        self._rows = torch.zeros(self.steps * batch_size, dtype=torch.int64, device=device)
        self._draws = Draws(*map(torch.zeros_like, self._drawn(0)))
        self._shifts = torch.zeros(self.steps, dtype=torch.int64, device=device)
        self._shares = torch.zeros(self.steps, device=device)
        self.start_epoch(0)

    def start_epoch(self, epoch: int) -> None:
        """Write what the epoch draws where `batch`, captured or not, reads it."""
        count, device = len(self._images), self._images.device
        visits, steps = order(self.seed, epoch, count, device), torch.arange(self.steps, device=device)
        self._rows.copy_(visits[torch.arange(len(self._rows), device=device) % count])
        for place, drawn in zip(self._draws, self._drawn(epoch), strict=True):
            place.copy_(drawn)
        if self._table is not None:
            self._shifts.copy_(shifts(self.seed, epoch, steps, self.batch_size))
            self._shares.copy_(shares(self.seed, epoch, steps, self._table))

    def _drawn(self, epoch: int) -> Draws:
        """The draws of all slots of an epoch."""
        slots = torch.arange(len(self._rows), device=self._rows.device)
        return draw(sample_keys(self.seed, epoch, slots), self.augmentation, *self._images.shape[-2:])

    def batch(self, step: Tensor) -> Batch:
        """The batch of a step of the epoch; `step` is an int64 without dimensions on the device, below `steps`.

        Waits for nothing on the host, so it compiles and can be captured in a CUDA graph.
        """
        first = step * self.batch_size
        x, labels = self._samples(first + self._positions)
        other = share = None
        if self._table is not None:
            step = step.view(1)  # an index without dimensions would be read on the host
            partners = (self._positions + self._shifts[step]) % self.batch_size
            # One process has made the partners' images already; a rank makes those of other ranks again.
            others, other = (x[partners], labels[partners]) if self.world == 1 else self._samples(first + partners)
            share = self._shares[step].view(())
            x = mix(x, others, share)
        return Batch(laid_out(x, self.dtype, self.channels_last), labels, other, share)

    def _samples(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """The normalized images, in float32, and labels of slots of the epoch."""
        rows, draws = self._rows[slots], Draws(*(drawn[slots] for drawn in self._draws))
        x = normalize(augment(self._images, draws, self.augmentation, rows), self._mean, self._std)
        if self.augmentation.cutout:
            x = cutout(x, draws, self.augmentation.cutout)
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
    """Every image of a split once, in its order, normalized, with its label; the last batch may be short.

    Raises `ValueError` as `Batches` does.
    """
    check_split(split)
    check_ranks(batch_size, 0, 1)
    channels = split.images.shape[1]
    means, stds = per_channel(mean, channels, "mean", device), per_channel(std, channels, "std", device)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, len(split), batch_size):
            part = slice(start, start + batch_size)
            x = normalize(split.images[part].to(device), means, stds)
            yield laid_out(x, dtype, channels_last), split.labels[part].to(device)

    return batches()


def laid_out(images: Tensor, dtype: torch.dtype, channels_last: bool) -> Tensor:
    """The images in the type and memory format that the network takes."""
    layout = torch.channels_last if channels_last else torch.contiguous_format
    return images.to(dtype).contiguous(memory_format=layout)


def check_split(split: Sized) -> None:
    """Refuse what holds no images."""
    if len(split) == 0:
        raise ValueError("expected at least one image to make batches of, got none; hold out fewer")


def check_ranks(batch_size: int, rank: int, world: int) -> None:
    """Refuse a batch that the ranks cannot share evenly."""
    if world < 1 or not 0 <= rank < world:
        raise ValueError(f"expected a rank of 0 to {world - 1} of {world}, got {rank}; check the launcher")
    if batch_size < 1 or batch_size % world:
        raise ValueError(f"expected a batch size that {world} ranks share evenly, got {batch_size}; change it")
