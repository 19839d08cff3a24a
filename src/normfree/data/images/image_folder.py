"""An image folder in the layout of ImageNet, root/train/<class>/<image>.jpg: its files, their decoding, its batches.

Worker processes decode the images, because the folder may be too large for memory. Draws are as in `image_set`.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from normfree.data.counter_rng import Purpose, below, epoch_order, extend, sample_keys, uniform
from normfree.data.download.file_formats import require_pillow
from normfree.data.images.augment import (
    Augmentation,
    augment_and_normalize,
    draw_flips,
    draw_params,
    mixup,
    mixup_shares,
    mixup_shifts,
    mixup_table,
    normalize,
    per_channel,
)
from normfree.data.images.image_set import ImageBatch, check_ranks, check_split, to_format
from normfree.storage.provenance import available_cores
from normfree.storage.reading import require_regular

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".tif", ".tiff")
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "PPM", "TIFF")  # pillow runs a program to read some others
_MOST_PIXELS = 80_000_000  # of an image; decoding this many takes half a gigabyte
_WIDEST = 16  # long sides per short side; of a longer image, only the middle is scored
_ATTEMPTS = 10  # to draw a window that fits, as in torchvision
_Request = tuple[int, int, int]  # epoch, slot, index of the file


@dataclass(frozen=True, kw_only=True)
class ImageFolder:
    """The images of one part of an image folder, such as train or val.

    Attributes:
        classes: the names of the classes, in the order of their labels.
        files: sorted by class, then by name.
        labels: int64 (N,).
    """

    classes: tuple[str, ...]
    files: tuple[Path, ...]
    labels: Tensor

    def __len__(self) -> int:
        return len(self.files)

    def take(self, which: Tensor | slice) -> ImageFolder:
        """The files and labels at some indices, or in a slice."""
        rows = torch.arange(len(self))[which].tolist()
        return replace(self, files=tuple(self.files[row] for row in rows), labels=self.labels[which])


def read_folder(root: str | Path, part: str = "train", classes: Sequence[str] | None = None) -> ImageFolder:
    """List the images in root/part/<class>/; hidden files, such as those that macOS leaves behind, are skipped.

    Args:
        root: the image folder.
        part: its sub-folder.
        classes: the classes of the training part, which the other parts must have, too; by default those found.

    Raises:
        ValueError: if a folder is missing, the classes are missing or different, a class has no images, or pillow is
            not installed.
    """
    require_pillow("an image folder")
    place = Path(root) / part
    if not Path(root).is_dir():
        raise ValueError(f"expected a folder of images at '{root}', found none; check the path")
    if not place.is_dir():
        raise ValueError(
            f"expected an image folder '{part}' of classes in '{root}', found none; "
            f"lay it out as {part}/<class>/<image>.jpg"
        )
    found = sorted(entry.name for entry in place.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if not found:
        raise ValueError(f"expected a folder for each class in '{part}', found none; use {part}/<class>/<image>.jpg")
    if classes is not None and found != sorted(classes):
        different = sorted(set(found) ^ set(classes))[0]
        raise ValueError(
            f"expected the same classes in '{part}' as in training, got {len(found)} for {len(classes)}, "
            f"'{different}' in only one of them; add or remove it"
        )
    names = tuple(found) if classes is None else tuple(classes)
    files: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(names):
        with os.scandir(place / name) as entries:  # distinguishes files from folders without a stat of each
            images = sorted(Path(entry.path) for entry in entries if _is_image(entry))
        if not images:
            raise ValueError(f"expected images in '{part}/{name}', found none; remove the folder or fill it")
        files += images
        labels += [label] * len(images)
    return ImageFolder(classes=names, files=tuple(files), labels=torch.tensor(labels))


def _is_image(entry: os.DirEntry[str]) -> bool:
    return not entry.name.startswith(".") and entry.name.lower().endswith(_SUFFIXES) and entry.is_file()


def crop_window(key: Tensor, width: int, height: int) -> tuple[int, int, int, int]:
    """The window (left, top, width, height) of a random resized crop: 8 to 100 % of the area, aspect ¾ to 4/3.

    It is the first of ten random windows that fits, else the largest in the middle, as in torchvision's
    `RandomResizedCrop`.
    """
    for attempt in range(_ATTEMPTS):
        area = height * width * (0.08 + 0.92 * float(uniform(extend(key, Purpose.AREA, attempt))))
        aspect = (4 / 3) ** (2 * float(uniform(extend(key, Purpose.ASPECT, attempt))) - 1)
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            left = int(below(extend(key, Purpose.CROP_COLUMN, attempt), width - w + 1))
            return left, int(below(extend(key, Purpose.CROP_ROW, attempt), height - h + 1)), w, h
    w, h = min(width, round(height * 4 / 3)), min(height, round(width * 4 / 3))
    return (width - w) // 2, (height - h) // 2, w, h


class _DecodedImages(Dataset[Tensor | str]):
    """Decoded images (3, size, size), uint8; an error message for a file that cannot be decoded.

    Training (with a seed) draws a random resized crop and a flip; evaluation (without a seed) takes the centre.
    It returns a sentence because an error raised in a worker arrives as the text of its traceback.
    """

    def __init__(self, files: tuple[Path, ...], size: int, seed: int | None, flip: bool) -> None:
        self.files, self.size, self.seed, self.flip = files, size, seed, flip

    def __getitem__(self, request: _Request) -> Tensor | str:
        from PIL import Image

        epoch, slot, index = request
        path = self.files[index]
        try:
            require_regular(path)
            with Image.open(path, formats=_FORMATS) as file:
                if math.prod(file.size) > _MOST_PIXELS:
                    raise ValueError(f"it has {file.size[0]} × {file.size[1]} pixels, more than {_MOST_PIXELS:,}")
                picture = file.convert("RGB")
        except Exception as error:  # a damaged or forged image raises nearly anything
            reason = str(error).replace(str(path), path.name)
            place = f"{path.parent.name}/{path.name}"
            return f"expected an image in '{place}', which cannot be read: {reason}; replace or remove the file"
        if self.seed is None:
            picture = self._centre(picture)
        else:
            key = sample_keys(self.seed, epoch, torch.tensor(slot))
            left, top, width, height = crop_window(key, *picture.size)
            picture = picture.crop((left, top, left + width, top + height))
            picture = picture.resize((self.size, self.size), Image.Resampling.BILINEAR)
            if self.flip and int(draw_flips(key)):
                picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return torch.from_numpy(np.array(picture)).permute(2, 0, 1)

    def _centre(self, picture: Any) -> Any:
        """Resize the shorter side to 256/224 of the size, then cut out the square in the middle."""
        from PIL import Image

        short, longest = self.size * 256 // 224, _WIDEST * min(picture.size)
        # Resizing the whole of a very long image would fill the memory.
        left, top = (max(0, side - longest) // 2 for side in picture.size)
        picture = picture.crop((left, top, picture.width - left, picture.height - top)) if left or top else picture
        width, height = picture.size
        if width <= height:
            width, height = short, short * height // width
        else:
            width, height = short * width // height, short
        picture = picture.resize((width, height), Image.Resampling.BILINEAR)
        left, top = round((width - self.size) / 2), round((height - self.size) / 2)
        return picture.crop((left, top, left + self.size, top + self.size))


def _stack(images: list[Tensor | str]) -> Tensor | str:
    for image in images:
        if isinstance(image, str):
            return image
    return torch.stack([image for image in images if isinstance(image, Tensor)])


def _start_worker(_worker: int) -> None:
    """Leave signals, which may reach the whole process group, and errors of threads to the main process."""
    sys.excepthook = lambda *_: None
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _loader(images: _DecodedImages, requests: Any, workers: int, device: torch.device) -> DataLoader[Tensor | str]:
    """A loader that decodes the requests, with at most one worker per core, and none in a daemonic process.

    A daemonic process, one of many runs at once, may not have children, and the other runs keep the cores busy.
    """
    workers = 0 if multiprocessing.current_process().daemon else min(workers, available_cores())
    return DataLoader(
        images,
        batch_sampler=requests,
        num_workers=workers,
        collate_fn=_stack,
        pin_memory=device.type == "cuda",
        persistent_workers=workers > 0,
        worker_init_fn=_start_worker,
        generator=torch.Generator(),  # without one the loader draws from the global generator
    )


class _EpochRequests:
    """The slots and files that a rank loads in an epoch, batch after batch from `next`.

    It holds no reference to `FolderBatches`: in a cycle, the workers would wait seconds for the garbage collector.
    """

    def __init__(self, count: int, batch_size: int, seed: int, positions: Tensor, with_partners: bool) -> None:
        self.count, self.batch_size, self.seed = count, batch_size, seed
        self.positions, self.with_partners = positions, with_partners
        self.steps = -(-count // batch_size)
        self.start_epoch(0)

    def start_epoch(self, epoch: int) -> None:
        self.epoch, self.next, self.order = epoch, 0, epoch_order(self.seed, epoch, self.count)

    def partners(self, step: int) -> Tensor:
        """The positions in the global batch that mixup blends with those of this rank."""
        shift = mixup_shifts(self.seed, self.epoch, torch.tensor([step]), self.batch_size)
        return (self.positions + shift) % self.batch_size

    def slots_and_files(self, step: int) -> tuple[Tensor, Tensor]:
        """The slots and files of a step: those of this rank, then those of their partners if asked for."""
        positions = torch.cat([self.positions, self.partners(step)]) if self.with_partners else self.positions
        slots = step * self.batch_size + positions
        return slots, self.order[slots % self.count]

    def __iter__(self) -> Iterator[list[_Request]]:
        for step in range(self.next, self.steps):
            slots, files = self.slots_and_files(step)
            yield [(self.epoch, slot, file) for slot, file in zip(slots.tolist(), files.tolist(), strict=True)]


class FolderBatches:
    """The training batches of an image folder: a random resized crop, then the augmentation.

    It has the methods of `ImageBatches`. Workers decode ahead from the step last asked for; any other step restarts
    them there. RandAugment, Cutout and mixup run on the device.

    Args:
        folder: the training images.
        size: the side of the square images of a batch.
        augmentation: a flip by default; `crop` must be 0.
        workers: the number of worker processes.

    The other arguments are those of `ImageBatches`.

    Raises:
        ValueError: for an augmentation with a padded crop, which images of many sizes do not have, and as
            `ImageBatches` does.
    """

    capturable = False

    def __init__(
        self,
        folder: ImageFolder,
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
            raise ValueError(
                f"expected crop=0 for an image folder, got {self.augmentation.crop}; its crops are random resized ones"
            )
        self.batch_size, self.rank, self.world, self.seed = batch_size, rank, world, seed
        self.device, self.dtype, self.channels_last = torch.device(device), dtype, channels_last
        self._labels = folder.labels
        self._mean, self._std = per_channel(mean, 3, "mean", device), per_channel(std, 3, "std", device)
        self._table = mixup_table(self.augmentation.mixup) if self.augmentation.mixup else None
        own = batch_size // world
        positions = torch.arange(rank * own, (rank + 1) * own)
        with_partners = self._table is not None and world > 1
        self._requests = _EpochRequests(len(folder), batch_size, seed, positions, with_partners)
        self.steps = self._requests.steps
        self._images, self._workers = _DecodedImages(folder.files, size, seed, self.augmentation.flip), workers
        self._loader: DataLoader[Tensor | str] | None = None
        self._stream: Iterator[Tensor | str] | None = None

    def start_epoch(self, epoch: int) -> None:
        """Start an epoch."""
        self._requests.start_epoch(epoch)
        self._stream = None

    def batch(self, step: Tensor | int) -> ImageBatch:
        """This rank's part of the batch of a step of the epoch.

        Raises:
            ValueError: for a step outside the epoch, or an image that cannot be decoded, with the name of its file.
        """
        step, requests = int(step), self._requests
        if not 0 <= step < self.steps:
            raise ValueError(f"expected a step of 0 to {self.steps - 1}, got {step}; start the next epoch")
        images = self._load(step).to(self.device, non_blocking=True)
        slots, files = requests.slots_and_files(step)
        keys = sample_keys(self.seed, requests.epoch, slots).to(self.device)
        params = draw_params(keys, self.augmentation, *images.shape[-2:])
        on_device = replace(self.augmentation, flip=False)  # the workers have flipped the images
        x = augment_and_normalize(images, params, on_device, self._mean, self._std)
        labels = self._labels[files].to(self.device)
        other = share = None
        if self._table is not None:
            if self.world == 1:
                partners = requests.partners(step).to(self.device)
                others, other = x[partners], labels[partners]
            else:
                (x, others), (labels, other) = x.chunk(2), labels.chunk(2)
            share = mixup_shares(self.seed, requests.epoch, torch.tensor([step]), self._table).view(()).to(self.device)
            x = mixup(x, others, share)
        return ImageBatch(to_format(x, self.dtype, self.channels_last), labels, other, share)

    def close(self) -> None:
        """End the workers; the next batch starts them again."""
        self._stream = self._loader = None

    def _load(self, step: int) -> Tensor:
        """The decoded images of a step."""
        if self._loader is None:
            self._loader = _loader(self._images, self._requests, self._workers, self.device)
        if self._stream is None or step != self._requests.next:
            self._requests.next = step
            self._stream = iter(self._loader)
        stack = next(self._stream)
        self._requests.next = step + 1
        if isinstance(stack, str):
            self.close()
            raise ValueError(stack)
        return stack


def folder_in_order(
    folder: ImageFolder,
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
    """Every image of a folder once, in order, resized, centre-cropped and normalized; the last batch may be short.

    The arguments are those of `FolderBatches`.

    Raises:
        ValueError: for an image that cannot be decoded, with the name of its file.
    """
    check_split(folder)
    check_ranks(batch_size, 0, 1)
    means, stds = per_channel(mean, 3, "mean", device), per_channel(std, 3, "std", device)
    rows = range(len(folder))
    parts = [rows[start : start + batch_size] for start in range(0, len(folder), batch_size)]
    requests = [[(0, 0, row) for row in part] for part in parts]
    images = _DecodedImages(folder.files, size, None, False)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        # The loader has no name, so that its workers end with the loop, however it ends.
        for part, stack in zip(parts, _loader(images, requests, workers, torch.device(device)), strict=True):
            if isinstance(stack, str):
                raise ValueError(stack)
            x = normalize(stack.to(device, non_blocking=True), means, stds)
            yield to_format(x, dtype, channels_last), folder.labels[part.start : part.stop].to(device)

    return batches()
