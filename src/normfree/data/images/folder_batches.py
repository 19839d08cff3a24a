"""An image folder too large for the device, streamed by worker processes; the draws are keyed as in `batches`."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from normfree.data.draws import order, sample_keys
from normfree.data.images.augment import Augmentation, augment, cutout, draw, normalize, per_channel
from normfree.data.images.image_batches import Batch, check_ranks, check_split, laid_out
from normfree.data.images.image_folder import Folder, Pictures, Request
from normfree.data.images.mixup import mix, share_table, shares, shifts
from normfree.provenance import available_cores

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def _stack(pictures: list[Tensor | str]) -> Tensor | str:
    for picture in pictures:
        if isinstance(picture, str):
            return picture
    return torch.stack([picture for picture in pictures if isinstance(picture, Tensor)])


def _ignore_signals(_worker: int) -> None:
    """A signal to the whole group of processes ends the run in order; workers end with it, not before."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _loader(pictures: Pictures, requests: Any, workers: int, device: torch.device) -> DataLoader[Tensor | str]:
    """What decodes the requests, with no more workers than cores, and none in a daemonic process.

    Such a process, one of many runs at once, may have no children, and the other runs keep the cores busy.
    """
    workers = 0 if multiprocessing.current_process().daemon else min(workers, available_cores())
    return DataLoader(
        pictures,
        batch_sampler=requests,
        num_workers=workers,
        collate_fn=_stack,
        pin_memory=device.type == "cuda",
        persistent_workers=workers > 0,
        worker_init_fn=_ignore_signals,
        generator=torch.Generator(),  # else the loader draws from the global one
    )


class _Plan:
    """Which slots and files a rank loads in an epoch, batch after batch from `next`.

    It knows nothing of the batches made of them: a circle of references would leave the workers to the garbage
    collector, which waits five seconds for each.
    """

    def __init__(self, count: int, batch_size: int, seed: int, positions: Tensor, with_others: bool) -> None:
        self.count, self.batch_size, self.seed = count, batch_size, seed
        self.positions, self.with_others = positions, with_others
        self.steps = -(-count // batch_size)
        self.start_epoch(0)

    def start_epoch(self, epoch: int) -> None:
        self.epoch, self.next, self.order = epoch, 0, order(self.seed, epoch, self.count)

    def partners(self, step: int) -> Tensor:
        """The positions in the global batch that those of this rank are mixed with."""
        shift = shifts(self.seed, self.epoch, torch.tensor([step]), self.batch_size)
        return (self.positions + shift) % self.batch_size

    def places(self, step: int) -> tuple[Tensor, Tensor]:
        """Slots and files of a step: this rank's, then, if asked for, those of their partners."""
        positions = torch.cat([self.positions, self.partners(step)]) if self.with_others else self.positions
        slots = step * self.batch_size + positions
        return slots, self.order[slots % self.count]

    def __iter__(self) -> Iterator[list[Request]]:
        for step in range(self.next, self.steps):
            slots, files = self.places(step)
            yield [(self.epoch, slot, file) for slot, file in zip(slots.tolist(), files.tolist(), strict=True)]


class FolderBatches:
    """The training batches of an image folder, with the members of `Batches`: random resized crop, then the rest.

    Workers decode ahead from the step last asked for; any other step starts them again there. RandAugment, Cutout and
    mixup happen on the device.

    Raises `ValueError` for a crop by padding, which images of many sizes do not have, and as `Batches` does.
    """

    capturable = False

    def __init__(
        self,
        folder: Folder,
        *,
        batch_size: int,
        size: int = 224,
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
        augmentation: Augmentation | None = None,
        seed: int = 0,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        channels_last: bool = False,
        rank: int = 0,
        world: int = 1,
        workers: int = 0,
    ) -> None:
        check_split(folder)
        check_ranks(batch_size, rank, world)
        self.augmentation = Augmentation(flip=True) if augmentation is None else augmentation
        if self.augmentation.crop:
            raise ValueError(f"expected crop=0 for an image folder, got {self.augmentation.crop}; it is cropped anyway")
        self.batch_size, self.rank, self.world, self.seed = batch_size, rank, world, seed
        self.device, self.dtype, self.channels_last = torch.device(device), dtype, channels_last
        self._labels = folder.labels
        self._mean, self._std = per_channel(mean, 3, "mean", device), per_channel(std, 3, "std", device)
        self._table = share_table(self.augmentation.mixup) if self.augmentation.mixup else None
        own = batch_size // world
        positions = torch.arange(rank * own, (rank + 1) * own)
        self._plan = _Plan(len(folder), batch_size, seed, positions, self._table is not None and world > 1)
        self.steps = self._plan.steps
        self._pictures, self._workers = Pictures(folder.files, size, seed, self.augmentation.flip), workers
        self._loader: DataLoader[Tensor | str] | None = None
        self._stream: Iterator[Tensor | str] | None = None

    def start_epoch(self, epoch: int) -> None:
        """Let the next batches be those of an epoch."""
        self._plan.start_epoch(epoch)
        self._stream = None

    def batch(self, step: Tensor | int) -> Batch:
        """The batch of a step of the epoch.

        Raises `ValueError` for a step outside the epoch, or an image that cannot be decoded, by the name of its file.
        """
        step, plan = int(step), self._plan
        if not 0 <= step < self.steps:
            raise ValueError(f"expected a step of 0 to {self.steps - 1}, got {step}; start the next epoch")
        images = self._loaded(step).to(self.device, non_blocking=True)
        slots, files = plan.places(step)
        x = self._finished(images, sample_keys(self.seed, plan.epoch, slots).to(self.device))
        labels = self._labels[files].to(self.device)
        other = share = None
        if self._table is not None:
            if self.world == 1:
                positions = plan.partners(step).to(self.device)
                others, other = x[positions], labels[positions]
            else:
                (x, others), (labels, other) = x.chunk(2), labels.chunk(2)
            share = shares(self.seed, plan.epoch, torch.tensor([step]), self._table).view(()).to(self.device)
            x = mix(x, others, share)
        return Batch(laid_out(x, self.dtype, self.channels_last), labels, other, share)

    def close(self) -> None:
        """End the workers; the next batch would start them again."""
        self._stream = self._loader = None

    def _loaded(self, step: int) -> Tensor:
        """The images of a step as the workers leave them."""
        if self._loader is None:
            self._loader = _loader(self._pictures, self._plan, self._workers, self.device)
        if self._stream is None or step != self._plan.next:
            self._plan.next = step
            self._stream = iter(self._loader)
        stack = next(self._stream)
        self._plan.next = step + 1
        if isinstance(stack, str):
            self.close()
            raise ValueError(stack)
        return stack

    def _finished(self, images: Tensor, keys: Tensor) -> Tensor:
        """What the workers leave to the device: RandAugment, normalization and Cutout."""
        draws = draw(keys, self.augmentation, *images.shape[-2:])
        x = normalize(augment(images, draws, replace(self.augmentation, flip=False)), self._mean, self._std)
        return cutout(x, draws, self.augmentation.cutout) if self.augmentation.cutout else x


def folder_in_order(
    folder: Folder,
    *,
    batch_size: int,
    size: int = 224,
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    channels_last: bool = False,
    workers: int = 0,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Every image of a folder once, in its order, resized, its middle cut out, normalized; the last batch may be short.

    Raises `ValueError` for an image that cannot be decoded, by the name of its file.
    """
    check_split(folder)
    check_ranks(batch_size, 0, 1)
    means, stds = per_channel(mean, 3, "mean", device), per_channel(std, 3, "std", device)
    rows = range(len(folder))
    parts = [rows[start : start + batch_size] for start in range(0, len(folder), batch_size)]
    requests = [[(0, 0, row) for row in part] for part in parts]
    pictures = Pictures(folder.files, size, None, False)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        # The loader has no name, so that its workers end with the loop, however it ends.
        for part, stack in zip(parts, _loader(pictures, requests, workers, torch.device(device)), strict=True):
            if isinstance(stack, str):
                raise ValueError(stack)
            x = normalize(stack.to(device, non_blocking=True), means, stds)
            yield laid_out(x, dtype, channels_last), folder.labels[part.start : part.stop].to(device)

    return batches()
