"""RandAugment on a whole batch of bytes, in integers: every device, eager or compiled, gives the same bytes.

All samples share the magnitude, so every number of an operation except its sign is known in advance. The rates of
torchvision are fractions (0.9·m/30 = 3m/100) and are computed as such, so only the result is rounded.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

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
