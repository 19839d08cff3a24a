"""Crop, flip, normalization and Cutout equal loops over pixels, and mixup's share has its distribution."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations
from math import sqrt

import numpy as np
import pytest
import torch
from scipy import stats
from torchvision.transforms import RandAugment
from torchvision.transforms import functional as TF
from torchvision.transforms.autoaugment import _apply_op

from normfree.data.counter_rng import Purpose, key, uniform
from normfree.data.images.augment import (
    BINS,
    Augmentation,
    AugmentParams,
    Operation,
    apply,
    augment,
    cutout,
    draw_flips,
    draw_operations,
    draw_params,
    mixup,
    mixup_shares,
    mixup_shifts,
    mixup_table,
    normalize,
    per_channel,
    randaugment,
)

COUNT = 20_000
# Kolmogorov's limit at one false alarm in a million, and what reading a table of 4,096 cells may add.
LIMIT = stats.kstwobign.isf(1e-6) / sqrt(COUNT) + 1 / 4096


def batch(channels: int = 3, count: int = 24, height: int = 9, width: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(channels)
    images = torch.randint(1, 256, (count, channels, height, width), generator=generator).to(torch.uint8)
    return images, key(9, torch.arange(count))


def cropped_and_flipped(image: np.ndarray, padding: int, row: int, column: int, flip: bool) -> np.ndarray:
    _, height, width = image.shape
    padded = np.pad(image, ((0, 0), (padding, padding), (padding, padding)))
    window = padded[:, row : row + height, column : column + width]
    return window[:, :, ::-1] if flip else window


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("padding", [0, 1, 4, 12])
@pytest.mark.parametrize("flip", [False, True])
def test_crop_and_flip_equal_the_oracle(channels: int, padding: int, flip: bool) -> None:
    images, keys = batch(channels)
    augmentation = Augmentation(crop=padding, flip=flip)
    params = draw_params(keys, augmentation, 9, 7)
    ours = augment(images, params, augmentation)
    assert ours.dtype == torch.uint8
    for i, image in enumerate(images.numpy()):
        flipped = flip and bool(params.flip[i])
        want = cropped_and_flipped(image, padding, int(params.top[i]), int(params.left[i]), flipped)
        assert (ours[i].numpy() == want).all()


def test_augment_reads_rows_as_if_they_were_the_batch() -> None:
    images, keys = batch()
    rows = torch.tensor([3, 3, 0, 23])
    for augmentation in (Augmentation(), Augmentation(crop=2, flip=True), Augmentation(randaugment=(2, 9))):
        params = draw_params(keys[:4], augmentation, 9, 7)
        assert torch.equal(augment(images, params, augmentation, rows), augment(images[rows], params, augmentation))


def test_augment_does_randaugment_last() -> None:
    images, keys = batch()
    augmentation = Augmentation(crop=2, flip=True, randaugment=(2, 9))
    params = draw_params(keys, augmentation, 9, 7)
    window = augment(images, params, replace(augmentation, randaugment=None))
    both = augment(images, params, augmentation)
    assert torch.equal(both, randaugment(window, params.operations, params.signs, 9))
    assert not torch.equal(both, window)


def looks_even(values: torch.Tensor, kinds: int) -> bool:
    """Whether Pearson's statistic is below its one-in-a-million quantile."""
    counts, expected = torch.bincount(values, minlength=kinds), len(values) / kinds
    return len(counts) == kinds and bool(((counts - expected) ** 2 / expected).sum() < stats.chi2.isf(1e-6, kinds - 1))


def test_draws_are_even_and_independent_of_each_other() -> None:
    """Every pair of parameters of a sample is uniform over all pairs of values."""
    keys = key(1, torch.arange(8000))
    augmentation = Augmentation(crop=2, randaugment=(2, 9))
    drawn = draw_params(keys, augmentation, 9, 7)
    assert torch.equal(drawn.flip, draw_flips(keys))
    columns = [(drawn.top, 5), (drawn.left, 5), (drawn.flip, 2), (drawn.hole_y, 9), (drawn.hole_x, 7)]
    columns += [(drawn.operations[:, turn], 14) for turn in range(2)]
    columns += [((drawn.signs[:, turn] + 1) // 2, 2) for turn in range(2)]
    for (first, m), (second, n) in combinations(columns, 2):
        assert looks_even(first * n + second, m * n)
    assert not looks_even(drawn.top * 5 + drawn.top, 25)


def test_draws_of_one_augmentation_do_not_depend_on_another() -> None:
    keys = key(1, torch.arange(50))
    plain = draw_params(keys, Augmentation(crop=2), 9, 7)
    all_ = draw_params(keys, Augmentation(crop=2, randaugment=(3, 9)), 9, 7)
    for name in AugmentParams._fields[:5]:
        assert torch.equal(getattr(plain, name), getattr(all_, name))
    assert plain.operations.shape == (50, 0)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("side", [1, 2, 5, 30])
def test_cutout_equals_the_oracle(channels: int, side: int) -> None:
    images, keys = batch(channels)
    x = images.float() + 1  # nothing is 0 before
    params = draw_params(keys, Augmentation(cutout=side), 9, 7)
    ours = cutout(x, params, side)
    for i in range(len(x)):
        want = x[i].numpy().copy()
        top, left = int(params.hole_y[i]) - side // 2, int(params.hole_x[i]) - side // 2
        for y in range(max(top, 0), min(top + side, 9)):
            for z in range(max(left, 0), min(left + side, 7)):
                want[:, y, z] = 0
        assert (ours[i].numpy() == want).all()
    assert (ours == 0).any((1, 2, 3)).all()


def test_normalize_equals_the_oracle() -> None:
    images, _ = batch()
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    ours = normalize(images, per_channel(mean, 3, "mean", "cpu"), per_channel(std, 3, "std", "cpu"))
    assert ours.dtype == torch.float32
    want = (images.double() / 255 - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    # Three roundings, on numbers of at most 1 before the division: 3·2^-24 / std.
    assert (ours - want).abs().max() < 3 * 2**-24 / min(std)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"crop": -1}, "crop of at least 0"),
        ({"cutout": -2}, "cutout of at least 0"),
        ({"mixup": -0.1}, "mixup alpha of at least 0"),
        ({"mixup": float("nan")}, "mixup alpha of at least 0"),
        ({"randaugment": (0, 9)}, "randaugment of at least 1 operation"),
        ({"randaugment": (2, 31)}, "magnitude of 0 to 30"),
    ],
)
def test_augmentation_refuses_numbers_without_meaning(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Augmentation(**settings)  # type: ignore[arg-type]


def test_per_channel_refuses_another_count() -> None:
    with pytest.raises(ValueError, match="expected mean for 1 channels, got 3 numbers"):
        per_channel((0.5, 0.5, 0.5), 1, "mean", "cpu")


def mixup_distance(alpha: float, of: float) -> float:
    found = mixup_shares(2, 1, torch.arange(COUNT), mixup_table(alpha))
    assert found.min() >= 0
    assert found.max() <= 1
    # Kolmogorov's distance, each draw taken for anything that float32 rounds to it: near 1 that is much of the mass.
    drawn, cdf = np.sort(found.double().numpy()), stats.beta(of, of).cdf
    above = np.arange(1, COUNT + 1) / COUNT - cdf(np.minimum(drawn + 2**-24, 1))
    under = cdf(np.maximum(drawn - 2**-24, 0)) - np.arange(COUNT) / COUNT
    return float(max(above.max(), under.max()))


@pytest.mark.parametrize("alpha", [0.1, 0.2, 0.7, 1.0, 2.0, 40.0])
def test_mixup_share_follows_its_distribution(alpha: float) -> None:
    assert mixup_distance(alpha, alpha) < LIMIT


@pytest.mark.parametrize(("alpha", "other"), [(0.2, 0.25), (1.0, 0.8), (2.0, 1.7)])
def test_mixup_share_of_another_alpha_is_told_apart(alpha: float, other: float) -> None:
    assert mixup_distance(alpha, other) > LIMIT


@pytest.mark.parametrize("alpha", [0.05, 0.2, 0.7, 1.0, 1.5, 8.0, 1000.0])
def test_mixup_table_holds_the_quantiles(alpha: float) -> None:
    table = mixup_table(alpha).double()
    want = stats.beta(alpha, alpha).ppf(torch.arange(4097, dtype=torch.float64) / 4096)
    assert (table - torch.from_numpy(want)).abs().max() < 1e-6
    assert (table.diff() >= 0).all()


def test_mixup_share_at_one_is_exactly_the_uniform_draw() -> None:
    steps = torch.arange(COUNT)
    assert torch.equal(mixup_shares(3, 5, steps, mixup_table(1.0)), uniform(key(3, Purpose.SHARE, 5, steps)))


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("inf"), float("nan")])
def test_mixup_table_refuses_no_alpha(alpha: float) -> None:
    with pytest.raises(ValueError, match="expected a positive mixup alpha"):
        mixup_table(alpha)


@pytest.mark.parametrize("batch_size", [1, 2, 3, 128])
def test_mixup_shift_reaches_every_other_image_and_never_the_same(batch_size: int) -> None:
    found = mixup_shifts(0, 1, torch.arange(3000), batch_size)
    counts = torch.bincount(found, minlength=max(batch_size, 2))[1:]
    assert found.min() >= 1
    assert len(counts) == max(batch_size - 1, 1)
    expected = len(found) / len(counts)
    assert ((counts - expected) ** 2 / expected).sum() <= stats.chi2.isf(1e-6, max(len(counts) - 1, 1))


def test_mixup_share_differs_from_step_to_step_and_epoch_to_epoch() -> None:
    drawn = {float(x) for epoch in range(5) for x in mixup_shares(0, epoch, torch.arange(5), mixup_table(1.0))}
    assert len(drawn) == 25


def test_mixup_equals_the_formula() -> None:
    a, b = torch.rand(2, 3, generator=torch.Generator().manual_seed(0)).unbind()
    torch.testing.assert_close(mixup(a, b, torch.tensor(0.25)).double(), 0.25 * a.double() + 0.75 * b.double())


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
