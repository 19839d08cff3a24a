"""An image folder in the layout of ImageNet, root/train/<class>/<image>.jpg: its files, and how one is decoded."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from normfree.data.download.formats import require_pillow
from normfree.data.draws import Purpose, below, extend, sample_keys, uniform
from normfree.data.images.augment import flips

_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".tif", ".tiff")
_ATTEMPTS = 10  # at a window that fits, as torchvision makes them
Request = tuple[int, int, int]  # epoch, slot, number of the file


@dataclass(frozen=True, kw_only=True)
class Folder:
    """The images of one part of an image folder: files in order of class and name, and their labels (N,) int64."""

    classes: tuple[str, ...]
    files: tuple[Path, ...]
    labels: Tensor

    def __len__(self) -> int:
        return len(self.files)


def read_folder(root: str | Path, part: str = "train", classes: Sequence[str] | None = None) -> Folder:
    """What lies in root/part/<class>/, classes and files by name; `classes` of the training part hold for the others.

    Hidden files, such as those that macOS leaves on other disks, are no images.

    Raises `ValueError` for a folder that is missing, has no classes or other ones, or a class without images, and
    where pillow is missing.
    """
    require_pillow("an image folder")
    place = Path(root) / part
    if not Path(root).is_dir():
        raise ValueError(f"expected a folder of images at '{root}', found none; give the path of one that is there")
    if not place.is_dir():
        raise ValueError(
            f"expected an image folder '{part}' of classes in '{root}', found none; "
            f"lay it out as {part}/<class>/<image>.jpg"
        )
    found = sorted(entry.name for entry in place.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if not found:
        raise ValueError(f"expected a folder for each class in '{part}', found none; use {part}/<class>/<image>.jpg")
    if classes is not None and found != sorted(classes):
        odd = sorted(set(found) ^ set(classes))[0]
        raise ValueError(
            f"expected the same classes in '{part}' as in training, got {len(found)} for {len(classes)}, "
            f"'{odd}' in only one of them; add or remove it"
        )
    names = tuple(found) if classes is None else tuple(classes)
    files: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(names):
        with os.scandir(place / name) as entries:  # knows what is a file without a look at each
            images = sorted(Path(entry.path) for entry in entries if _is_image(entry))
        if not images:
            raise ValueError(f"expected images in '{part}/{name}', found none; remove the folder or fill it")
        files += images
        labels += [label] * len(images)
    return Folder(classes=names, files=tuple(files), labels=torch.tensor(labels))


def _is_image(entry: os.DirEntry[str]) -> bool:
    return not entry.name.startswith(".") and entry.name.lower().endswith(_SUFFIXES) and entry.is_file()


def crop_window(draw: Tensor, width: int, height: int) -> tuple[int, int, int, int]:
    """The window (left, top, width, height) of a random resized crop: 8 to 100 % of the area, aspect ¾ to 4/3.

    The first of ten drawn windows that fits, else the largest in the middle, as torchvision's `RandomResizedCrop`.
    """
    for attempt in range(_ATTEMPTS):
        area = height * width * (0.08 + 0.92 * _fraction(draw, Purpose.AREA, attempt))
        aspect = (4 / 3) ** (2 * _fraction(draw, Purpose.ASPECT, attempt) - 1)
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            left = int(below(extend(draw, Purpose.CROP_COLUMN, attempt), width - w + 1))
            return left, int(below(extend(draw, Purpose.CROP_ROW, attempt), height - h + 1)), w, h
    w, h = min(width, round(height * 4 / 3)), min(height, round(width * 4 / 3))
    return (width - w) // 2, (height - h) // 2, w, h


def _fraction(draw: Tensor, purpose: int, attempt: int) -> float:
    return float(uniform(extend(draw, purpose, attempt)))


class Pictures(Dataset[Tensor | str]):
    """Decoded images (3, size, size) of bytes; a file that cannot be decoded comes back as the sentence that says so.

    Training (with a seed) draws a random resized crop and a flip; evaluation (without) takes the middle.
    A sentence and not an error, because an error of a worker arrives as the text of its traceback.
    """

    def __init__(self, files: tuple[Path, ...], size: int, seed: int | None, flip: bool) -> None:
        self.files, self.size, self.seed, self.flip = files, size, seed, flip

    def __getitem__(self, request: Request) -> Tensor | str:
        from PIL import Image

        epoch, slot, number = request
        path = self.files[number]
        try:
            with Image.open(path) as file:
                picture = file.convert("RGB")
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            reason = str(error).replace(str(path), path.name)
            place = f"{path.parent.name}/{path.name}"
            return f"expected an image in '{place}', which cannot be read: {reason}; replace or remove the file"
        if self.seed is None:
            picture = self._middle(picture)
        else:
            draw = sample_keys(self.seed, epoch, torch.tensor(slot))
            left, top, width, height = crop_window(draw, *picture.size)
            picture = picture.crop((left, top, left + width, top + height))
            picture = picture.resize((self.size, self.size), Image.Resampling.BILINEAR)
            if self.flip and int(flips(draw)):
                picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return torch.from_numpy(np.array(picture)).permute(2, 0, 1)

    def _middle(self, picture: Any) -> Any:
        """The shorter side resized to 256/224 of the size, then the square in the middle."""
        from PIL import Image

        short = self.size * 256 // 224
        width, height = picture.size
        if width <= height:
            width, height = short, short * height // width
        else:
            width, height = short * width // height, short
        picture = picture.resize((width, height), Image.Resampling.BILINEAR)
        left, top = round((width - self.size) / 2), round((height - self.size) / 2)
        return picture.crop((left, top, left + self.size, top + self.size))
