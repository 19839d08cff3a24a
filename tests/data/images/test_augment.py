"""Crop, flip, normalization and Cutout equal loops over pixels, and mixup's share has its distribution."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from math import sqrt

import numpy as np
import pytest
import torch
from scipy import stats

from normfree.data.counter_rng import Purpose, key, uniform
from normfree.data.images.augment import (
    Augmentation,
    AugmentParams,
    augment,
    cutout,
    draw_flips,
    draw_params,
    mixup,
    mixup_shares,
    mixup_shifts,
    mixup_table,
    normalize,
    per_channel,
)
from normfree.data.images.randaugment import randaugment

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
