"""Every operation of RandAugment against torchvision, image by image.

Both cut a real number down to a grey level, and torchvision holds it in float32. So they agree but for one level where
the real number is whole, and for pixels whose source lies midway between two; `exact` says where that is, in float64.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torchvision.transforms import RandAugment
from torchvision.transforms import functional as TF
from torchvision.transforms.autoaugment import _apply_op

from normfree.data.counter_rng import key
from normfree.data.images.augment import draw_operations
from normfree.data.images.randaugment import BINS, Operation, apply, randaugment

CODES = {name: code for name, code in vars(Operation).items() if name.isupper()}
NAMES = {code: name.title().replace("_", "") for name, code in CODES.items()}
SIGNED = range(1, 10)
MOVES = range(1, 6)
BLENDS = range(6, 10)


def test_operations_are_those_of_torchvision_in_its_order() -> None:
    assert list(NAMES.values()) == list(RandAugment()._augmentation_space(BINS, (8, 8)))
    assert list(NAMES) == list(range(14))


def pictures(channels: int) -> torch.Tensor:
    """Noise, narrow noise, a ramp, a flat image, and two values only: 24×21 pixels, enough to equalize."""
    generator = torch.Generator().manual_seed(channels)
    shape = (channels, 24, 21)
    noise = torch.randint(0, 256, shape, generator=generator)
    narrow = torch.randint(90, 140, shape, generator=generator)
    ramp = torch.linspace(3, 250, 24 * 21).view(24, 21).expand(shape).clone()
    ramp[0] += 5
    two = torch.where(noise > 99, 200, 31)
    return torch.stack([noise, narrow, ramp.long(), torch.full(shape, 77), two]).to(torch.uint8)


def strength(operation: int, magnitude: int, sign: int, size: tuple[int, int]) -> float:
    """The number that torchvision passes to the operation."""
    levels, signed = RandAugment()._augmentation_space(BINS, size)[NAMES[operation]]
    assert signed == (operation in SIGNED)
    value = float(levels[magnitude]) if levels.ndim else 0.0
    return value * sign if signed else value


def torchvision(image: torch.Tensor, operation: int, magnitude: int, sign: int) -> torch.Tensor:
    value = strength(operation, magnitude, sign, (image.shape[1], image.shape[2]))
    return _apply_op(image, NAMES[operation], value, TF.InterpolationMode.NEAREST, None)


def midway(shape: torch.Size, operation: int, magnitude: int, sign: int) -> np.ndarray:
    """The pixels whose source is equally near to two pixels, up to 1e-4."""
    _, height, width = shape
    value = strength(operation, magnitude, sign, (height, width))
    unclear = np.zeros((height, width), dtype=bool)
    for row in range(height):
        for column in range(width):
            x, y = column + 0.5, row + 0.5
            if operation == Operation.SHEAR_X:
                source = (x + value * y, y)
            elif operation == Operation.SHEAR_Y:
                source = (x, y + value * x)
            elif operation == Operation.ROTATE:
                a, dx, dy = math.radians(value), x - width / 2, y - height / 2
                source = (
                    math.cos(a) * dx - math.sin(a) * dy + width / 2,
                    math.sin(a) * dx + math.cos(a) * dy + height / 2,
                )
            else:
                source = (x, y)
            unclear[row, column] = any(abs(s - round(s)) < 1e-4 for s in source)
    return unclear


def exact(image: torch.Tensor, operation: int, magnitude: int, sign: int) -> np.ndarray:
    """The real number behind each grey level, in float64."""
    pixels = image.numpy().astype(np.float64)
    channels, height, width = pixels.shape
    if operation == Operation.AUTO_CONTRAST:
        low, high = pixels.min((1, 2), keepdims=True), pixels.max((1, 2), keepdims=True)
        return np.where(high > low, (pixels - low) * 255 / np.maximum(high - low, 1), pixels)
    grey = pixels[0] if channels == 1 else np.tensordot([0.2989, 0.587, 0.114], pixels, 1)
    if operation == Operation.BRIGHTNESS:
        plain = np.zeros_like(pixels)
    elif operation == Operation.COLOR:
        plain = pixels if channels == 1 else np.broadcast_to(np.floor(grey + 1e-9), pixels.shape)
    elif operation == Operation.CONTRAST:
        plain = np.full_like(pixels, np.floor(grey + 1e-9).mean())
    else:
        plain = pixels.copy()
        for row in range(1, height - 1):
            for column in range(1, width - 1):
                square = pixels[:, row - 1 : row + 2, column - 1 : column + 2]
                plain[:, row, column] = np.round((square.sum((1, 2)) + 4 * pixels[:, row, column]) / 13)
    rate = sign * 3 * magnitude / 100
    return (1 + rate) * pixels - rate * plain


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("operation", CODES.values(), ids=[name.lower() for name in CODES])
def test_operation_equals_torchvision(operation: int, channels: int) -> None:
    batch = pictures(channels)
    differing = 0
    for magnitude in (0, 1, 9, 14, 20, 30):
        for sign in (1, -1) if operation in SIGNED else (1,):
            code = torch.full((len(batch),), operation)
            ours = apply(batch, code, torch.full_like(code, sign), magnitude)
            assert ours.dtype == torch.uint8
            for image, got in zip(batch, ours, strict=True):
                want = torchvision(image, operation, magnitude, sign)
                apart = (got.int() - want.int()).numpy()
                if operation in MOVES:
                    assert not (apart * ~midway(image.shape, operation, magnitude, sign)).any(), magnitude
                elif operation in BLENDS or operation == Operation.AUTO_CONTRAST:
                    value = exact(image, operation, magnitude, sign)
                    whole = np.abs(value - np.round(value)) < 1e-3
                    assert np.abs(apart).max() <= 1
                    assert not apart[~whole].any(), magnitude
                    assert (got.numpy() == np.clip(np.floor(value + 1e-6), 0, 255)).all()
                else:
                    assert not apart.any(), magnitude
                differing += int((got != image).sum())
    grey = operation == Operation.COLOR and channels == 1
    assert (differing == 0) == (operation == Operation.IDENTITY or grey)


def test_shear_moves_a_tie_to_one_of_its_neighbours() -> None:
    """At magnitude 20 the third row's source lies exactly between two pixels."""
    batch = pictures(3)[:1]
    code = torch.tensor([Operation.SHEAR_X])
    ours = apply(batch, code, torch.ones_like(code), 20)[0, :, 2]
    row = batch[0, :, 2].int()
    right = torch.cat([row[:, 1:], row.new_zeros(3, 1)], 1)
    assert ((ours == row) | (ours == right)).all()


@pytest.mark.parametrize("shape", [(1, 1), (2, 5), (3, 3)])
def test_operations_take_tiny_images(shape: tuple[int, int]) -> None:
    image = torch.randint(0, 256, (3, *shape), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    for operation in NAMES:
        got = apply(image[None], torch.tensor([operation]), torch.tensor([1]), 14)[0].int()
        want = torchvision(image, operation, 14, 1).int()
        if operation not in MOVES:
            assert (got - want).abs().max() <= 1


def test_batch_equals_its_images_one_by_one() -> None:
    batch = pictures(3).repeat(12, 1, 1, 1)
    keys = key(4, torch.arange(len(batch)))
    drawn, signs = draw_operations(keys, 3)
    assert set(drawn.flatten().tolist()) == set(range(len(CODES)))
    ours = randaugment(batch, drawn, signs, 11)
    for number, image in enumerate(batch):
        for turn in range(3):
            image = apply(image[None], drawn[number, turn, None], signs[number, turn, None], 11)[0]
        assert torch.equal(ours[number], image)


def test_randaugment_refuses_channels_without_colours() -> None:
    with pytest.raises(ValueError, match="1 or 3 channels for RandAugment, got 4"):
        randaugment(torch.zeros(2, 4, 8, 8, dtype=torch.uint8), *draw_operations(key(0, torch.arange(2)), 1), 9)
