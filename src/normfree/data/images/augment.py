"""Augmentation of a training batch: crop, flip, RandAugment, Cutout and mixup, each sample with its own parameters.

RandAugment works on a whole batch of bytes, in integers: every device, eager or compiled, gives the same bytes. All
samples share the magnitude, so every number of an operation except its sign is known in advance. The rates of
torchvision are fractions (0.9·m/30 = 3m/100) and are computed as such, so only the result is rounded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from normfree.data.counter_rng import Purpose, below, extend, key, uniform

_TABLE_CELLS = 4096  # of the table of mixup's shares; a power of two, so that finding the cell of a draw is exact
_INTEGRAL_STEPS = 1 << 18  # of the integral behind the table


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """The augmentation of a training batch; the default is none. The order is crop, flip, RandAugment, Cutout, mixup.

    Args:
        crop: pad an image with this many pixels of zeros on each side, then cut out a window of the original size.
        flip: flip an image left to right with probability ½.
        cutout: the side of a square that is set to the mean.
        mixup: the α of the Beta(α, α) from which the share of the first image is drawn.
        randaugment: the number of operations and their magnitude, 0 to 30.

    Raises:
        ValueError: for a number outside its range.
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


class AugmentParams(NamedTuple):
    """The random parameters of n samples, int64 of shape (n,), or (n, operations) for the last two.

    Attributes:
        top: the row of the padded image where the window starts, 0 … 2·crop.
        left: its column.
        flip: 0 or 1.
        hole_y: the row of the pixel in the middle of Cutout's square.
        hole_x: its column.
        operations: see `draw_operations`.
        signs: see `draw_operations`.
    """

    top: Tensor
    left: Tensor
    flip: Tensor
    hole_y: Tensor
    hole_x: Tensor
    operations: Tensor
    signs: Tensor


def draw_params(keys: Tensor, augmentation: Augmentation, height: int, width: int) -> AugmentParams:
    """Draw the parameters of samples from their keys (n,), for images of height × width.

    Each parameter has bits of its own, so that switching one augmentation off does not change the others.
    """
    places = 2 * augmentation.crop + 1
    return AugmentParams(
        below(extend(keys, Purpose.CROP_ROW), places),
        below(extend(keys, Purpose.CROP_COLUMN), places),
        draw_flips(keys),
        below(extend(keys, Purpose.CUTOUT_ROW), height),
        below(extend(keys, Purpose.CUTOUT_COLUMN), width),
        *draw_operations(keys, augmentation.randaugment[0] if augmentation.randaugment else 0),
    )


def draw_flips(keys: Tensor) -> Tensor:
    """Draw whether each sample is flipped, 0 or 1 (int64)."""
    return below(extend(keys, Purpose.FLIP), 2)


def draw_operations(keys: Tensor, operations: int) -> tuple[Tensor, Tensor]:
    """Draw the operations of each sample, in the order of application, and their signs ±1; both (n, operations)."""
    turn = torch.arange(operations, device=keys.device)
    operation = below(extend(keys[:, None], Purpose.OPERATION, turn), OPERATIONS)
    return operation, 1 - 2 * below(extend(keys[:, None], Purpose.SIGN, turn), 2)


def augment(images: Tensor, params: AugmentParams, augmentation: Augmentation, rows: Tensor | None = None) -> Tensor:
    """Crop, flip and RandAugment the images (n, C, H, W), bytes, each sample with its own parameters.

    With `rows` the batch is `images[rows]`, read together with crop and flip in one gather. `cutout` needs normalized
    images and `mixup` the whole batch, so they come later.
    """
    if augmentation.crop or augmentation.flip:
        rows = torch.arange(len(images), device=images.device) if rows is None else rows
        batch = _window(images, rows, params, augmentation)
    else:
        batch = images if rows is None else images[rows]
    if augmentation.randaugment is not None:
        batch = randaugment(batch, params.operations, params.signs, augmentation.randaugment[1])
    return batch


def _window(images: Tensor, rows: Tensor, params: AugmentParams, augmentation: Augmentation) -> Tensor:
    """Crop and flip as one gather: out[y, x] = in[y + top - p, x' + left - p], x' = W-1-x where flipped; 0 outside."""
    channels, height, width = images.shape[-3:]
    y = torch.arange(height, device=images.device)[:, None]
    x = torch.arange(width, device=images.device)
    channel = torch.arange(channels, device=images.device)[:, None, None]
    rows, top, left, flip = (n[:, None, None, None] for n in (rows, params.top, params.left, params.flip))
    if augmentation.flip:
        x = x + flip * (width - 1 - 2 * x)
    if not augmentation.crop:
        return images[rows, channel, y, x]
    y, x = y + top - augmentation.crop, x + left - augmentation.crop
    near_y, near_x = y.clamp(0, height - 1), x.clamp(0, width - 1)
    return images[rows, channel, near_y, near_x].masked_fill((near_y != y) | (near_x != x), 0)


def augment_and_normalize(
    images: Tensor,
    params: AugmentParams,
    augmentation: Augmentation,
    mean: Tensor,
    std: Tensor,
    rows: Tensor | None = None,
) -> Tensor:
    """All of the augmentation except mixup: `augment`, `normalize`, then `cutout`; float32."""
    x = normalize(augment(images, params, augmentation, rows), mean, std)
    return cutout(x, params, augmentation.cutout) if augmentation.cutout else x


def normalize(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """(images / 255 - mean) / std per channel, in float32; `mean` and `std` are (C, 1, 1)."""
    return (images.to(torch.float32) / 255 - mean) / std


def per_channel(values: Sequence[float], channels: int, name: str, device: torch.device | str) -> Tensor:
    """One number per channel as a float32 tensor of shape (C, 1, 1).

    Raises:
        ValueError: if there are more or fewer numbers than channels.
    """
    if len(values) != channels:
        raise ValueError(f"expected {name} for {channels} channels, got {len(values)} numbers; give one per channel")
    return torch.tensor(tuple(values), dtype=torch.float32, device=device).view(-1, 1, 1)


def cutout(images: Tensor, params: AugmentParams, side: int) -> Tensor:
    """Set a square of `side` pixels around a random pixel to 0, the mean of normalized images; it may cross the border.

    Reference: DeVries and Taylor, "Improved regularization of convolutional neural networks with Cutout", 2017.
    Differs: an odd side is kept, where the authors' code rounds it down to an even one.
    """
    height, width = images.shape[-2:]
    y = torch.arange(height, device=images.device)[:, None] - params.hole_y[:, None, None, None] + side // 2
    x = torch.arange(width, device=images.device) - params.hole_x[:, None, None, None] + side // 2
    return images.masked_fill((y >= 0) & (y < side) & (x >= 0) & (x < side), 0.0)


def mixup_table(alpha: float) -> Tensor:
    """The quantiles of Beta(α, α) at 0, 1/4096, …, 1, as float32; `mixup_shares` draws from them.

    With u = x^e, e = min(α, 1), the density has no poles, and by symmetry the lower half is enough:

        F(x) ∝ ∫_0^{x^e} v^{α-e} (1-v)^{α-1} du,   v = u^{1/e},   x ≤ ½

    The midpoint rule in float64 gives F, and its inverse is interpolated between the nodes. Draws are exact at every
    quantile of the table, so their distribution function is off by less than 1/4096; α = 1 is exactly uniform.

    Reference: Zhang et al., "mixup: beyond empirical risk minimization", ICLR 2018.

    Raises:
        ValueError: unless α is positive and finite.
    """
    if not 0 < alpha < float("inf"):
        raise ValueError(f"expected a positive mixup alpha, got {alpha}; 0 in the augmentation leaves mixup out")
    power = min(alpha, 1.0)
    edges = torch.linspace(0, 0.5**power, _INTEGRAL_STEPS + 1, dtype=torch.float64)
    v = ((edges[1:] + edges[:-1]) / 2) ** (1 / power)
    density = ((alpha - power) * (2 * v).log() + (alpha - 1) * (2 - 2 * v).log()).exp()
    mass = torch.cat([density.new_zeros(1), density.cumsum(0)])
    mass = mass / (2 * mass[-1])
    levels = torch.arange(_TABLE_CELLS // 2 + 1, dtype=torch.float64) / _TABLE_CELLS
    above = torch.searchsorted(mass, levels).clamp(1, _INTEGRAL_STEPS)
    part = (levels - mass[above - 1]) / (mass[above] - mass[above - 1])
    lower = (edges[above - 1] + part * (edges[above] - edges[above - 1])) ** (1 / power)
    lower[0] = 0.0  # a density below the smallest float leaves 0/0
    return torch.cat([lower, 1 - lower.flip(0)[1:]]).to(torch.float32)


def mixup_shares(seed: int, epoch: int, steps: Tensor, table: Tensor) -> Tensor:
    """The share λ of the first image of each pair, one per batch of `steps` (n,), float32 in [0, 1].

    It is the quantile at a uniform draw, interpolated linearly in the table.
    """
    place = uniform(key(seed, Purpose.SHARE, epoch, steps)) * _TABLE_CELLS
    cell = place.to(torch.int64)
    low, high = table[cell], table[cell + 1]
    return low + (place - cell) * (high - low)


def mixup_shifts(seed: int, epoch: int, steps: Tensor, batch_size: int) -> Tensor:
    """The distance from an image to its partner, one per global batch of `steps` (n,): 1 … batch_size - 1.

    The order of an epoch is random, so a shift pairs images as randomly as a permutation. A batch of one image is
    mixed with itself.
    """
    return 1 + below(key(seed, Purpose.SHIFT, epoch, steps), max(batch_size - 1, 1))


def mixup(images: Tensor, others: Tensor, share: Tensor) -> Tensor:
    """Blend images: share·images + (1 - share)·others, in the type of the images."""
    return share * images + (1 - share) * others


BINS = 31  # magnitudes 0 … 30, as torchvision counts them
_BITS = 24  # of the fixed-point coefficients of a map; the error is 1e-5 of a pixel at 300 pixels


class Operation:
    """The numbers of the fourteen operations, in the order of torchvision.

    They are plain numbers, because under `torch.compile` comparing a tensor with a member of an enum gives False.
    """

    IDENTITY = 0
    SHEAR_X = 1
    SHEAR_Y = 2
    TRANSLATE_X = 3
    TRANSLATE_Y = 4
    ROTATE = 5
    BRIGHTNESS = 6
    COLOR = 7
    CONTRAST = 8
    SHARPNESS = 9
    POSTERIZE = 10
    SOLARIZE = 11
    AUTO_CONTRAST = 12
    EQUALIZE = 13


OPERATIONS = 14


def randaugment(images: Tensor, operations: Tensor, signs: Tensor, magnitude: int) -> Tensor:
    """Apply the operations of `draw_operations` to images (n, C, H, W), bytes, at a magnitude of 0 to 30.

    Reference: Cubuk et al., "RandAugment", 2019; ranges, nearest neighbour and black outside as
    `torchvision.transforms.RandAugment`.
    Differs: torchvision computes in float32 and truncates, so it may be one grey level lower where the exact result is
    a whole number; and it may take either pixel where a source lies exactly between two.

    Raises:
        ValueError: unless the images have 1 or 3 channels.
    """
    if images.shape[1] not in (1, 3):
        raise ValueError(
            f"expected images of 1 or 3 channels for RandAugment, got {images.shape[1]}; leave randaugment out"
        )
    for turn in range(operations.shape[1]):
        images = apply(images, operations[:, turn], signs[:, turn], magnitude)
    return images


@torch.library.custom_op(
    "normfree::randaugment",
    mutates_args=(),
    schema="(Tensor images, Tensor operation, Tensor sign, int magnitude) -> Tensor",
)
def apply(images: Tensor, operation: Tensor, sign: Tensor, magnitude: int) -> Tensor:
    """Apply one operation to each sample; `operation` and `sign` are (B,), and some operations ignore the sign.

    This is a custom operator so that the compiler does not fuse it: fused with the previous one, torch 2.11 gave wrong
    pixels on a GPU.
    """
    operation, sign = operation[:, None, None, None], sign[:, None, None, None]
    moved = _moved(images, operation, sign, magnitude).to(torch.int32)
    changed = _blended(moved, operation, sign, magnitude)
    lost_bits = round(magnitude / 7.5)  # 0 to 4 of 8 bits; never a tie
    changed = torch.where(operation == Operation.POSTERIZE, moved & -(1 << lost_bits), changed)
    bright = 2 * moved >= 510 - 17 * magnitude  # the threshold falls from 255 to 0
    changed = torch.where((operation == Operation.SOLARIZE) & bright, 255 - moved, changed)
    changed = torch.where(operation == Operation.AUTO_CONTRAST, _stretched(moved), changed)
    changed = torch.where(operation == Operation.EQUALIZE, _equalized(moved), changed)
    return changed.to(torch.uint8)


@apply.register_fake
def _(images: Tensor, operation: Tensor, sign: Tensor, magnitude: int) -> Tensor:
    return torch.empty_like(images, memory_format=torch.contiguous_format)


def _moved(images: Tensor, operation: Tensor, sign: Tensor, magnitude: int) -> Tensor:
    """Shear, translate or rotate by one map of pixels, which is the identity for the other operations.

    In the coordinates X = 2x + 1 - W, Y = 2y + 1 - H, twice the distance of a pixel's centre from the image's centre,
    the source is X' = a·X + b·Y + c and Y' = d·X + a·Y + e. Shears fix the upper left corner, as in torchvision.
    """
    height, width = images.shape[-2:]
    one = 1 << _BITS
    angle = math.radians(magnitude)
    shear = round(0.01 * magnitude * one)
    x = 2 * torch.arange(width, device=images.device) + 1 - width
    y = (2 * torch.arange(height, device=images.device) + 1 - height)[:, None]
    rotated = operation == Operation.ROTATE
    sine = rotated * sign * round(math.sin(angle) * one)
    shear_x = (operation == Operation.SHEAR_X) * sign * shear
    shear_y = (operation == Operation.SHEAR_Y) * sign * shear
    across = (operation == Operation.TRANSLATE_X) * sign * (2 * one * (5 * width * magnitude // 331))
    down = (operation == Operation.TRANSLATE_Y) * sign * (2 * one * (5 * height * magnitude // 331))
    along = one + rotated * (round(math.cos(angle) * one) - one)
    source_x = along * x + (shear_x - sine) * y + shear_x * height - across
    source_y = (shear_y + sine) * x + along * y + shear_y * width - down
    source_x = (source_x + width * one) >> (_BITS + 1)
    source_y = (source_y + height * one) >> (_BITS + 1)
    near_x, near_y = source_x.clamp(0, width - 1), source_y.clamp(0, height - 1)
    outside = (near_x != source_x) | (near_y != source_y)
    place = (near_y * width + near_x).flatten(1)
    channels = images.shape[1]
    moved = images.flatten(2).gather(2, place[:, None].expand(-1, channels, -1))
    return moved.view_as(images).masked_fill(outside, 0)


def _blended(images: Tensor, operation: Tensor, sign: Tensor, magnitude: int) -> Tensor:
    """Change brightness, colour, contrast or sharpness: (1 + r)·image - r·plain, r = ±3m/100, clamped to 0 … 255.

    The plain image is black, the grey image, its mean, or the blurred image.
    """
    size = images.shape[-2] * images.shape[-1]
    grey = images.to(torch.int64)
    rate = (operation == Operation.BRIGHTNESS) | (operation == Operation.CONTRAST) | (operation == Operation.SHARPNESS)
    plain = (operation == Operation.SHARPNESS) * size * _blurred(images)
    if images.shape[1] == 3:
        grey = (2989 * grey[:, :1] + 5870 * grey[:, 1:2] + 1140 * grey[:, 2:]) // 10_000
        rate = rate | (operation == Operation.COLOR)
        plain = plain + (operation == Operation.COLOR) * size * grey
    plain = plain + (operation == Operation.CONTRAST) * grey.sum((1, 2, 3), keepdim=True)
    percent = rate * sign * (3 * magnitude)
    # Everything is multiplied by the number of pixels, so that the mean stays a whole number.
    return ((((100 + percent) * size) * images - percent * plain) // (100 * size)).clamp(0, 255).to(torch.int32)


def _blurred(images: Tensor) -> Tensor:
    """The rounded mean of 3×3 pixels, with the middle one counted five times; the border is unchanged."""
    if min(images.shape[-2:]) < 3:
        return images
    rows = images[..., :-2, :] + images[..., 1:-1, :] + images[..., 2:, :]
    total = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:] + 4 * images[..., 1:-1, 1:-1]
    inner = F.pad((2 * total + 13) // 26, (1, 1, 1, 1), value=-1)
    return torch.where(inner < 0, images, inner)


def _stretched(images: Tensor) -> Tensor:
    """Stretch each channel from its darkest and brightest value to 0 … 255; a constant channel is unchanged."""
    low, high = images.amin((2, 3), keepdim=True), images.amax((2, 3), keepdim=True)
    span = high - low
    return torch.where(span > 0, (images - low) * 255 // span.clamp(min=1), images)


def _equalized(images: Tensor) -> Tensor:
    """Equalize the histogram of each channel: value v becomes ⌊(#(values < v) + ⌊s/2⌋) / s⌋.

    s is a 255th of the pixels below the brightest value; a channel where s is 0 is unchanged.
    """
    pixels = images.flatten(2).to(torch.int64)
    counts = torch.zeros((*pixels.shape[:2], 256), dtype=torch.int32, device=images.device)
    counts = counts.scatter_add(2, pixels, torch.ones_like(pixels, dtype=torch.int32))
    darker = counts.cumsum(2) - counts
    step = darker.gather(2, pixels.amax(2, keepdim=True)) // 255
    spread = ((darker + step // 2) // step.clamp(min=1)).clamp(max=255).gather(2, pixels)
    return torch.where(step > 0, spread, pixels).view_as(images).to(torch.int32)
