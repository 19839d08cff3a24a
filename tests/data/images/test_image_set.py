"""Held-out images are balanced and depend on the seed alone; mean and std are those of the pixels."""

import pytest
import torch

from normfree.data import ImageSet, Split, image_set


def make(counts: list[int], seed: int = 0) -> ImageSet:
    """Shuffled images with `counts` of each class; the first pixels of an image hold its number."""
    g = torch.Generator().manual_seed(seed)
    labels = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    labels = labels[torch.randperm(len(labels), generator=g)]
    images = torch.zeros(len(labels), 1, 2, 2, dtype=torch.uint8)
    images[:, 0, 0, 0], images[:, 0, 0, 1] = torch.arange(len(labels)) // 256, torch.arange(len(labels)) % 256
    split = Split(images, labels)
    return image_set("made", [str(i) for i in range(len(counts))], split, split.take(slice(3)))


def numbers(split: Split) -> list[int]:
    return (split.images[:, 0, 0, 0].int() * 256 + split.images[:, 0, 0, 1]).tolist()


@pytest.mark.parametrize("seed", [0, 1, 12345])
def test_hold_out_parts_the_training_images(seed: int) -> None:
    data = make([60] * 10)
    train, held = data.hold_out(100, seed)
    assert (len(train), len(held)) == (500, 100)
    assert sorted(numbers(train) + numbers(held)) == list(range(600))
    for part in (train, held):
        assert numbers(part) == sorted(numbers(part))  # the order of the data
        assert part.labels.tolist() == data.train.labels[numbers(part)].tolist()


def test_hold_out_is_balanced() -> None:
    _, held = make([60] * 10).hold_out(100, 3)
    assert held.labels.bincount().tolist() == [10] * 10
    _, odd = make([60] * 10).hold_out(105, 3)
    assert sorted(odd.labels.bincount().tolist()) == [10] * 5 + [11] * 5


def test_hold_out_keeps_the_shares_of_unequal_classes() -> None:
    counts = [7, 100, 33, 0, 60]
    _, held = make(counts).hold_out(50, 0)
    taken = held.labels.bincount(minlength=5).tolist()
    assert sum(taken) == 50
    assert all(abs(one - 50 * count / 200) < 1 for one, count in zip(taken, counts, strict=True))


def test_hold_out_depends_on_the_seed_alone() -> None:
    data = make([60] * 10)
    state = torch.get_rng_state()
    first = numbers(data.hold_out(100, 0)[1])
    assert numbers(data.hold_out(100, 0)[1]) == first
    assert torch.equal(torch.get_rng_state(), state)
    assert numbers(data.hold_out(100, 1)[1]) != first


@pytest.mark.parametrize("count", [0, 1, 5])
def test_hold_out_of_few_images(count: int) -> None:
    train, held = make([3, 3]).hold_out(count, 0)
    assert (len(train), len(held)) == (6 - count, count)


@pytest.mark.parametrize(("count", "seed"), [(6, 0), (7, 0), (-1, 0), (1, -1)])
def test_hold_out_refuses(count: int, seed: int) -> None:
    with pytest.raises(ValueError, match=r"^expected .*held-out|^expected to hold out 0 to 5 of the 6"):
        make([3, 3]).hold_out(count, seed)


def test_one_image_is_a_data_set() -> None:
    train, held = make([1]).hold_out(0, 0)
    assert (len(train), len(held)) == (1, 0)


def test_mean_and_std_are_those_of_the_pixels() -> None:
    images = torch.randint(0, 256, (50, 3, 5, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    images[:, 2] = 7  # a channel without variation
    split = Split(images, torch.zeros(50, dtype=torch.int64))
    data = image_set("made", ["a"], split, split)
    exact = images.double() / 255
    assert data.mean == pytest.approx(exact.mean((0, 2, 3)).tolist(), abs=1e-12)
    assert data.std[:2] == pytest.approx(exact.std((0, 2, 3), correction=0).tolist()[:2], abs=1e-12)
    assert data.std[2] == 1.0


@pytest.mark.parametrize(
    ("images", "labels", "says"),
    [
        (torch.zeros(2, 1, 2, 2), torch.zeros(2, dtype=torch.int64), "expected images as bytes"),
        (torch.zeros(2, 2, 2, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64), "expected images as bytes"),
        (torch.zeros(2, 1, 2, 2, dtype=torch.uint8), torch.zeros(3, dtype=torch.int64), "expected 2 labels"),
        (torch.zeros(2, 1, 2, 2, dtype=torch.uint8), torch.zeros(2, dtype=torch.int32), "of type int64"),
    ],
)
def test_split_refuses_what_does_not_fit(images: torch.Tensor, labels: torch.Tensor, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Split(images, labels)
