"""RandAugment on a whole batch of bytes, in integers: every device, eager or compiled, gives the same bytes.

The magnitude is one for all samples, so every number of an operation is known beforehand but for its sign. Rates of
torchvision are fractions (0.9·m/30 = 3m/100) and are computed as such, which leaves nothing to round but the result.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from normfree.data.draws import Purpose, below, extend

BINS = 31  # magnitudes 0 … 30, as torchvision counts them
_BITS = 24  # after the point, of the coefficients of a map; off by 1e-5 of a pixel at 300 pixels


class Operation:
    """The numbers of the fourteen operations, in the order of torchvision.

    Plain numbers, because `torch.compile` takes the comparison of a tensor with a member of an enum for False.
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


_OPERATIONS = 14


def choices(keys: Tensor, operations: int) -> tuple[Tensor, Tensor]:
    """The operations of each sample, in the order in which they are done, and their signs ±1; both (n, operations)."""
    turn = torch.arange(operations, device=keys.device)
    operation = below(extend(keys[:, None], Purpose.OPERATION, turn), _OPERATIONS)
    return operation, 1 - 2 * below(extend(keys[:, None], Purpose.SIGN, turn), 2)


def randaugment(images: Tensor, operations: Tensor, signs: Tensor, magnitude: int) -> Tensor:
    """The images (n, C, H, W), bytes, after the operations that `choices` gave them, at a magnitude of 0 to 30.

    Reference: Cubuk et al., "RandAugment", 2019; ranges, nearest neighbour and black outside as
    `torchvision.transforms.RandAugment`.
    Differs: torchvision computes in float32 and cuts the fraction off, so where the exact result is a whole number it
    may be one grey level below; and where a pixel's source lies between two pixels, either may be taken.

    Raises `ValueError` unless the images are grey or of three colours.
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
    """One operation on each sample: `operation` and `sign` are (B,); the sign matters to those that have one.

    An operator of its own, which a compiler leaves as it is: fused with the one before it, the compiler of torch 2.11
    gave wrong pixels on a GPU.
    """
    operation, sign = operation[:, None, None, None], sign[:, None, None, None]
    moved = _moved(images, operation, sign, magnitude).to(torch.int32)
    changed = _blended(moved, operation, sign, magnitude)
    lost_bits = round(magnitude / 7.5)  # of eight, up to four; never a tie
    changed = torch.where(operation == Operation.POSTERIZE, moved & -(1 << lost_bits), changed)
    bright = 2 * moved >= 510 - 17 * magnitude  # a threshold from 255 down to 0
    changed = torch.where((operation == Operation.SOLARIZE) & bright, 255 - moved, changed)
    changed = torch.where(operation == Operation.AUTO_CONTRAST, _stretched(moved), changed)
    changed = torch.where(operation == Operation.EQUALIZE, _equalized(moved), changed)
    return changed.to(torch.uint8)


@apply.register_fake
def _(images: Tensor, operation: Tensor, sign: Tensor, magnitude: int) -> Tensor:
    return torch.empty_like(images, memory_format=torch.contiguous_format)


def _moved(images: Tensor, operation: Tensor, sign: Tensor, magnitude: int) -> Tensor:
    """Shears, translations and rotation as one map of pixels; the other operations have the identity's.

    In coordinates X = 2x + 1 - W, Y = 2y + 1 - H, twice the distance of a pixel's middle from the image's, the source
    is X' = a·X + b·Y + c and Y' = d·X + a·Y + e. Shears keep the upper left corner, as torchvision has it.
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
    """Brightness, colour, contrast and sharpness: (1 + r)·image - r·plain, r = ±3m/100, cut to 0 … 255.

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
    # Everything times the number of pixels, so that the mean stays a whole number.
    return ((((100 + percent) * size) * images - percent * plain) // (100 * size)).clamp(0, 255).to(torch.int32)


def _blurred(images: Tensor) -> Tensor:
    """The mean of 3×3 pixels with the middle one five times, rounded; the pixels of the border stay."""
    if min(images.shape[-2:]) < 3:
        return images
    rows = images[..., :-2, :] + images[..., 1:-1, :] + images[..., 2:, :]
    total = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:] + 4 * images[..., 1:-1, 1:-1]
    inner = F.pad((2 * total + 13) // 26, (1, 1, 1, 1), value=-1)
    return torch.where(inner < 0, images, inner)


def _stretched(images: Tensor) -> Tensor:
    """Each channel from its darkest and brightest value to 0 … 255; a flat one stays."""
    low, high = images.amin((2, 3), keepdim=True), images.amax((2, 3), keepdim=True)
    span = high - low
    return torch.where(span > 0, (images - low) * 255 // span.clamp(min=1), images)


def _equalized(images: Tensor) -> Tensor:
    """Each channel with its values spread evenly over 0 … 255: value v to ⌊(#(values < v) + ⌊s/2⌋) / s⌋.

    s is a 255th of the pixels that are not of the brightest value; a channel where it is 0 stays.
    """
    pixels = images.flatten(2).to(torch.int64)
    counts = torch.zeros((*pixels.shape[:2], 256), dtype=torch.int32, device=images.device)
    counts = counts.scatter_add(2, pixels, torch.ones_like(pixels, dtype=torch.int32))
    darker = counts.cumsum(2) - counts
    step = darker.gather(2, pixels.amax(2, keepdim=True)) // 255
    spread = ((darker + step // 2) // step.clamp(min=1)).clamp(max=255).gather(2, pixels)
    return torch.where(step > 0, spread, pixels).view_as(images).to(torch.int32)
