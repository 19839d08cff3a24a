"""What happens to the images of a training batch, each by its own draws: crop, flip, RandAugment, Cutout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from normfree.data.draws import Purpose, below, extend
from normfree.data.images.randaugment import BINS, choices, randaugment


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """What a training batch is put through, in this order; the default is nothing.

    `crop`: rows and columns of zeros put around an image before a window of the old size is cut out of it.
    `flip`: left and right exchanged, for every second image. `randaugment`: (operations, magnitude of 30).
    `cutout`: the side of a square set to the mean. `mixup`: the α of the share's Beta(α, α).

    Raises `ValueError` for a number that has no meaning there.
    """

    crop: int = 0
    flip: bool = False
    cutout: int = 0
    mixup: float = 0.0
    randaugment: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        for name, value in (("crop", self.crop), ("cutout", self.cutout)):
            if value < 0:
                raise ValueError(f"expected {name} of at least 0 pixels, got {value}; 0 leaves it out")
        if not 0 <= self.mixup < float("inf"):
            raise ValueError(f"expected a mixup alpha of at least 0, got {self.mixup}; 0 leaves it out")
        if self.randaugment is not None:
            operations, magnitude = self.randaugment
            if operations < 1 or not 0 <= magnitude < BINS:
                raise ValueError(
                    f"expected randaugment of at least 1 operation and a magnitude of 0 to {BINS - 1}, "
                    f"got {operations} and {magnitude}; None leaves it out"
                )


class Draws(NamedTuple):
    """What is drawn for each of n samples, int64: (n,), and (n, operations) for RandAugment's last two.

    `top`, `left`: where the window starts in the padded image, 0 … 2·crop. `flip`: 0 or 1. `hole_y`, `hole_x`: the
    pixel in the middle of Cutout's square. `operations`, `signs`: see `randaugment.choices`.
    """

    top: Tensor
    left: Tensor
    flip: Tensor
    hole_y: Tensor
    hole_x: Tensor
    operations: Tensor
    signs: Tensor


def draw(keys: Tensor, augmentation: Augmentation, height: int, width: int) -> Draws:
    """The draws of samples from their keys (n,), for images of a size; each takes bits of its own, wanted or not."""
    places = 2 * augmentation.crop + 1
    return Draws(
        below(extend(keys, Purpose.CROP_ROW), places),
        below(extend(keys, Purpose.CROP_COLUMN), places),
        flips(keys),
        below(extend(keys, Purpose.CUTOUT_ROW), height),
        below(extend(keys, Purpose.CUTOUT_COLUMN), width),
        *choices(keys, augmentation.randaugment[0] if augmentation.randaugment else 0),
    )


def flips(keys: Tensor) -> Tensor:
    """Whether each sample is flipped, as 0 or 1 (int64)."""
    return below(extend(keys, Purpose.FLIP), 2)


def augment(images: Tensor, draws: Draws, augmentation: Augmentation, rows: Tensor | None = None) -> Tensor:
    """The images (n, C, H, W) as bytes, cropped, flipped and RandAugmented, each sample by its own draws.

    With `rows` the batch is `images[rows]`, read together with crop and flip in one gather. What depends on the
    normalization or on the rest of the batch comes later: `cutout` and mixup.
    """
    if augmentation.crop or augmentation.flip:
        rows = torch.arange(len(images), device=images.device) if rows is None else rows
        batch = _window(images, rows, draws, augmentation)
    else:
        batch = images if rows is None else images[rows]
    if augmentation.randaugment is not None:
        batch = randaugment(batch, draws.operations, draws.signs, augmentation.randaugment[1])
    return batch


def _window(images: Tensor, rows: Tensor, draws: Draws, augmentation: Augmentation) -> Tensor:
    """Crop and flip as one gather: out[y, x] = in[y + top - p, x' + left - p], x' = W-1-x where flipped; 0 outside."""
    channels, height, width = images.shape[-3:]
    y = torch.arange(height, device=images.device)[:, None]
    x = torch.arange(width, device=images.device)
    channel = torch.arange(channels, device=images.device)[:, None, None]
    rows, top, left, flip = (n[:, None, None, None] for n in (rows, draws.top, draws.left, draws.flip))
    if augmentation.flip:
        x = x + flip * (width - 1 - 2 * x)
    if not augmentation.crop:
        return images[rows, channel, y, x]
    y, x = y + top - augmentation.crop, x + left - augmentation.crop
    near_y, near_x = y.clamp(0, height - 1), x.clamp(0, width - 1)
    return images[rows, channel, near_y, near_x].masked_fill((near_y != y) | (near_x != x), 0)


def normalize(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """(images / 255 - mean) / std per channel, in float32; `mean` and `std` are (C, 1, 1)."""
    return (images.to(torch.float32) / 255 - mean) / std


def per_channel(values: Sequence[float], channels: int, name: str, device: torch.device | str) -> Tensor:
    """The numbers of a channel as (C, 1, 1) float32.

    Raises `ValueError` when their count is not that of the channels.
    """
    if len(values) != channels:
        raise ValueError(f"expected {name} for {channels} channels, got {len(values)} numbers; give one a channel")
    return torch.tensor(tuple(values), dtype=torch.float32, device=device).view(-1, 1, 1)


def cutout(images: Tensor, draws: Draws, side: int) -> Tensor:
    """Normalized images with a square of `side` pixels set to 0, the mean, around a drawn pixel; it may hang over.

    Reference: DeVries and Taylor, "Improved regularization of convolutional neural networks with Cutout", 2017.
    Differs: an odd side is kept, where the authors' code rounds it down to an even one.
    """
    height, width = images.shape[-2:]
    y = torch.arange(height, device=images.device)[:, None] - draws.hole_y[:, None, None, None] + side // 2
    x = torch.arange(width, device=images.device) - draws.hole_x[:, None, None, None] + side // 2
    return images.masked_fill((y >= 0) & (y < side) & (x >= 0) & (x < side), 0.0)
