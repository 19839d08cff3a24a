"""Held-out images are balanced and depend on the seed alone.

Mean and std are those of the pixels; batches are a pure function of seed, epoch and step, on every rank and device.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from normfree.data import ImageSet, Split, image_set
from normfree.data.counter_rng import epoch_order, sample_keys
from normfree.data.images.augment import (
    Augmentation,
    AugmentParams,
    augment,
    cutout,
    draw_params,
    mixup_shares,
    mixup_shifts,
    mixup_table,
    normalize,
    per_channel,
)
from normfree.data.images.image_set import ImageBatch, ImageBatches, in_order


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


EVERYTHING = Augmentation(crop=2, flip=True, cutout=5, mixup=0.7, randaugment=(2, 9))
SETTINGS = [Augmentation(), Augmentation(crop=4, flip=True), EVERYTHING]


def split(count: int = 50, channels: int = 3, side: int = 12) -> Split:
    """Random images, each labelled with its index."""
    generator = torch.Generator().manual_seed(count)
    images = torch.randint(0, 256, (count, channels, side, side), generator=generator).to(torch.uint8)
    return Split(images=images, labels=torch.arange(count))


def batches(data: Split, batch_size: int, augmentation: Augmentation = EVERYTHING, **settings: object) -> ImageBatches:
    channels = data.images.shape[1]
    statistics = {"mean": (0.5, 0.4, 0.3)[:channels], "std": (0.2, 0.3, 0.25)[:channels]}
    return ImageBatches(data, batch_size=batch_size, augmentation=augmentation, **statistics, **settings)  # type: ignore[arg-type]


def at(step: int, device: str = "cpu") -> torch.Tensor:
    return torch.tensor(step, device=device)


def assert_equal(a: ImageBatch, b: ImageBatch) -> None:
    for x, y in zip(a, b, strict=True):
        assert (x is None) == (y is None)
        assert x is None or y is None or torch.equal(x, y)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("augmentation", SETTINGS)
def test_batch_equals_its_samples_made_one_by_one(augmentation: Augmentation, channels: int) -> None:
    data, seed, epoch, step, size = split(channels=channels), 5, 2, 3, 14
    made = batches(data, size, augmentation, seed=seed)
    made.start_epoch(epoch)
    got = made.batch(at(step))
    mean = per_channel((0.5, 0.4, 0.3)[:channels], channels, "mean", "cpu")
    std = per_channel((0.2, 0.3, 0.25)[:channels], channels, "std", "cpu")
    visits = epoch_order(seed, epoch, len(data)).tolist()

    def sample(position: int) -> tuple[torch.Tensor, int]:
        slot = step * size + position
        image = visits[slot % len(data)]
        key = sample_keys(seed, epoch, torch.tensor([slot]))
        params = draw_params(key, augmentation, 12, 12)
        x = normalize(augment(data.images[image : image + 1], params, augmentation), mean, std)
        return (cutout(x, params, augmentation.cutout) if augmentation.cutout else x)[0], image

    for position in range(size):
        x, label = sample(position)
        assert got.labels[position] == label
        if augmentation.mixup:
            assert got.other is not None
            assert got.share is not None
            (weight,) = mixup_shares(seed, epoch, torch.tensor([step]), mixup_table(augmentation.mixup))
            shift = int(mixup_shifts(seed, epoch, torch.tensor([step]), size))
            other, other_label = sample((position + shift) % size)
            assert got.other[position] == other_label
            assert got.share == weight
            x = weight * x + (1 - weight) * other
        else:
            assert got.other is None
            assert got.share is None
        assert torch.equal(got.inputs[position], x)


@pytest.mark.parametrize("augmentation", SETTINGS)
def test_batch_is_made_again_from_any_step(augmentation: Augmentation) -> None:
    data = split()
    first = batches(data, 16, augmentation, seed=1)
    history: dict[tuple[int, int], ImageBatch] = {}
    for epoch in range(3):
        first.start_epoch(epoch)
        for step in range(first.steps):
            history[epoch, step] = first.batch(at(step))
    again = batches(data, 16, augmentation, seed=1)
    for epoch, step in [(2, 3), (0, 0), (1, 2), (1, 1)]:
        again.start_epoch(epoch)
        assert_equal(again.batch(at(step)), history[epoch, step])
    other = batches(data, 16, augmentation, seed=2)
    assert not torch.equal(other.batch(at(0)).inputs, history[0, 0].inputs)
    assert not torch.equal(history[0, 0].inputs, history[1, 0].inputs)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("augmentation", SETTINGS)
def test_ranks_together_equal_one_process(augmentation: Augmentation, world: int) -> None:
    data = split(30)
    alone = batches(data, 16, augmentation, seed=3)
    ranks = [batches(data, 16, augmentation, seed=3, rank=rank, world=world) for rank in range(world)]
    for epoch in (0, 4):
        for made in (alone, *ranks):
            made.start_epoch(epoch)
        for step in range(alone.steps):
            whole, parts = alone.batch(at(step)), [made.batch(at(step)) for made in ranks]
            for name in ("inputs", "labels", "other"):
                if getattr(whole, name) is not None:
                    assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(whole, name))
            assert all(part.share == whole.share for part in parts)


@pytest.mark.parametrize(("count", "batch_size"), [(50, 16), (48, 16), (1, 1), (1, 4), (5, 12), (7, 7)])
def test_epoch_visits_every_image(count: int, batch_size: int) -> None:
    data = split(count)
    made = batches(data, batch_size)
    assert made.steps == -(-count // batch_size)
    for epoch in range(2):
        made.start_epoch(epoch)
        visited = torch.cat([made.batch(at(step)).labels for step in range(made.steps)]).tolist()
        assert sorted(visited[:count]) == list(range(count))
        assert visited[count:] == [visited[i % count] for i in range(count, len(visited))]


def test_repeated_image_is_augmented_again() -> None:
    inputs = batches(split(1), 8, Augmentation(crop=4, flip=True)).batch(at(0)).inputs
    assert len({tuple(x.flatten().tolist()) for x in inputs}) > 4


def test_draws_of_an_epoch_stay_in_place() -> None:
    """A captured graph reads the same memory in every epoch."""
    made = batches(split(), 16)
    drawn = (made._rows, *made._params, made._shifts, made._shares)
    places, before = [x.data_ptr() for x in drawn], [x.clone() for x in drawn]
    made.start_epoch(7)
    after = (made._rows, *made._params, made._shifts, made._shares)
    assert [x.data_ptr() for x in after] == places
    assert not any(torch.equal(x, y) for x, y in zip(before, after, strict=True))


def test_batch_comes_in_the_type_and_layout_asked_for() -> None:
    data = split()
    plain = batches(data, 8, seed=1).batch(at(1))
    other = batches(data, 8, seed=1, dtype=torch.bfloat16, channels_last=True).batch(at(1))
    assert plain.inputs.is_contiguous()
    assert other.inputs.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(other.inputs, plain.inputs.to(torch.bfloat16))


def test_batch_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    batches(split(), 8).batch(at(0))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("batch_size", [1, 16, 50, 64])
@pytest.mark.parametrize("channels", [1, 3])
def test_in_order_gives_every_image_once(batch_size: int, channels: int) -> None:
    data = split(channels=channels)
    mean, std = (0.5,) * channels, (0.25,) * channels
    parts = list(in_order(data, batch_size=batch_size, mean=mean, std=std))
    assert [len(y) for _, y in parts] == [batch_size] * (50 // batch_size) + [50 % batch_size] * (50 % batch_size > 0)
    assert torch.cat([y for _, y in parts]).tolist() == list(range(50))
    assert torch.equal(torch.cat([x for x, _ in parts]), (data.images.float() / 255 - 0.5) / 0.25)


def test_in_order_takes_type_and_layout() -> None:
    ((x, _),) = in_order(
        split(4), batch_size=8, mean=(0.5,) * 3, std=(1.0,) * 3, dtype=torch.bfloat16, channels_last=True
    )
    assert x.dtype == torch.bfloat16
    assert x.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: batches(split(8), 0), "batch size that 1 ranks share evenly, got 0"),
        (lambda: batches(split(8), 6, world=4), "batch size that 4 ranks share evenly, got 6"),
        (lambda: batches(split(8), 8, world=2, rank=2), "rank of 0 to 1 of 2, got 2"),
        (lambda: batches(split(0), 8), "at least one image"),
        (lambda: ImageBatches(split(8), batch_size=2, mean=(0.5,), std=(0.5,) * 3), "mean for 3 channels, got 1"),
        (lambda: in_order(split(0), batch_size=2, mean=(0.5,), std=(0.5,)), "at least one image"),
        (lambda: in_order(split(8), batch_size=0, mean=(0.5,) * 3, std=(0.5,) * 3), "share evenly, got 0"),
    ],
)
def test_batches_refuse_what_makes_no_batch(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def assert_close(a: ImageBatch, b: ImageBatch) -> None:
    """Compare labels exactly, and inputs up to the last bit, which a fused multiply-add may round differently."""
    torch.testing.assert_close(a.inputs.cpu(), b.inputs.cpu(), rtol=1e-6, atol=2e-6)
    assert torch.equal(a.labels.cpu(), b.labels.cpu())
    if a.other is not None and b.other is not None and a.share is not None and b.share is not None:
        assert torch.equal(a.other.cpu(), b.other.cpu())
        torch.testing.assert_close(a.share.cpu(), b.share.cpu(), rtol=1e-6, atol=0)


@pytest.mark.slow
def test_compiled_batch_equals_eager() -> None:
    torch._dynamo.reset()
    made = batches(split(), 16, seed=1)
    compiled = torch.compile(made.batch, dynamic=False, fullgraph=True)
    for epoch in (0, 3):
        made.start_epoch(epoch)
        for step in range(made.steps):
            assert_close(compiled(at(step)), made.batch(at(step)))


@pytest.mark.gpu
@pytest.mark.parametrize("augmentation", SETTINGS)
def test_batch_on_gpu_equals_cpu(augmentation: Augmentation) -> None:
    data = split()
    cpu = batches(data, 16, augmentation, seed=1)
    gpu = batches(data, 16, augmentation, seed=1, device="cuda")
    for epoch in (0, 3):
        cpu.start_epoch(epoch)
        gpu.start_epoch(epoch)
        assert torch.equal(gpu._rows.cpu(), cpu._rows)
        assert all(torch.equal(x.cpu(), y) for x, y in zip(gpu._params, cpu._params, strict=True))
        for step in range(cpu.steps):
            assert_close(gpu.batch(at(step, "cuda")), cpu.batch(at(step)))


@pytest.mark.gpu
@pytest.mark.parametrize("magnitude", [9, 30])
def test_augmented_bytes_on_gpu_equal_cpu(magnitude: int) -> None:
    """Many images and repetitions, because a race between threads shows only by chance."""
    torch._dynamo.reset()
    data, keys = split(2000), sample_keys(0, 0, torch.arange(2000))
    augmentation = Augmentation(crop=2, flip=True, randaugment=(3, magnitude))
    params = draw_params(keys, augmentation, 12, 12)
    expected = augment(data.images, params, augmentation)
    images, on_device = data.images.cuda(), AugmentParams(*(drawn.cuda() for drawn in params))
    assert torch.equal(augment(images, on_device, augmentation).cpu(), expected)
    compiled = torch.compile(augment, dynamic=False, fullgraph=True)
    for _ in range(5):
        assert torch.equal(compiled(images, on_device, augmentation).cpu(), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("augmentation", SETTINGS)
def test_captured_batch_follows_step_and_epoch(augmentation: Augmentation, compiled: bool) -> None:
    torch._dynamo.reset()
    data = split()
    cpu = batches(data, 16, augmentation, seed=1)
    gpu = batches(data, 16, augmentation, seed=1, device="cuda")
    make = torch.compile(gpu.batch, dynamic=False, fullgraph=True) if compiled else gpu.batch
    step = at(0, "cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            make(step)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = make(step)
    for epoch in (0, 2, 1):
        cpu.start_epoch(epoch)
        gpu.start_epoch(epoch)
        for number in (3, 0, 1):
            step.fill_(number)
            graph.replay()
            assert_close(made, cpu.batch(at(number)))
