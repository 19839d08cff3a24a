"""An image folder is read, decoded by workers, and batched with the draws of `ImageBatches`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import stats
from torchvision import transforms
from torchvision.transforms import functional as TF

from normfree.data.counter_rng import epoch_order, key, sample_keys
from normfree.data.images.augment import (
    Augmentation,
    cutout,
    draw_flips,
    draw_params,
    normalize,
    per_channel,
    randaugment,
)
from normfree.data.images.image_folder import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    FolderBatches,
    ImageFolder,
    crop_window,
    folder_in_order,
    read_folder,
)
from normfree.data.images.image_set import ImageBatch

EVERYTHING = Augmentation(flip=True, cutout=5, mixup=0.7, randaugment=(2, 9))
SIZE = 16


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eleven images of many sizes, kinds and shapes, in two classes."""
    place = tmp_path_factory.mktemp("pictures")
    draws = np.random.default_rng(0)
    for part in ("train", "val"):
        for number in range(11):
            folder = place / part / ("cat" if number < 6 else "dog")
            folder.mkdir(parents=True, exist_ok=True)
            height, width = draws.integers(10, 50, 2)
            pixels = draws.integers(0, 256, (height, width, 3), dtype=np.uint8)
            picture = Image.fromarray(pixels[..., 0] if number == 3 else pixels)
            picture.save(folder / f"{number:02}.{'png' if number % 2 else 'JPEG'}")
        (place / part / "cat" / "notes.txt").write_text("no image")
    return place


def stream(
    root: Path, batch_size: int = 4, augmentation: Augmentation = EVERYTHING, **settings: object
) -> FolderBatches:
    return FolderBatches(read_folder(root), batch_size=batch_size, size=SIZE, augmentation=augmentation, **settings)  # type: ignore[arg-type]


def assert_equal(a: ImageBatch, b: ImageBatch) -> None:
    for x, y in zip(a, b, strict=True):
        assert (x is None) == (y is None)
        assert x is None or y is None or torch.equal(x, y)


def test_read_folder_finds_classes_and_files_by_name(root: Path) -> None:
    folder = read_folder(root)
    assert folder.classes == ("cat", "dog")
    assert len(folder) == 11
    assert [path.stem for path in folder.files] == [f"{number:02}" for number in range(11)]
    assert folder.labels.tolist() == [0] * 6 + [1] * 5
    assert read_folder(root, "val", folder.classes).classes == folder.classes


def test_training_batch_equals_torchvision_image_by_image(root: Path) -> None:
    folder, seed, epoch, step, size = read_folder(root), 4, 2, 1, 4
    augmentation = Augmentation(flip=True, cutout=5, randaugment=(2, 9))
    made = stream(root, size, augmentation, seed=seed)
    made.start_epoch(epoch)
    got = made.batch(torch.tensor(step))
    mean, std = (per_channel(values, 3, "", "cpu") for values in (IMAGENET_MEAN, IMAGENET_STD))
    visits = epoch_order(seed, epoch, len(folder)).tolist()
    for position in range(size):
        slot = step * size + position
        key_ = sample_keys(seed, epoch, torch.tensor([slot]))
        picture = Image.open(folder.files[visits[slot]]).convert("RGB")
        left, top, width, height = crop_window(key_[0], *picture.size)
        picture = TF.resized_crop(picture, top, left, height, width, [SIZE, SIZE])
        picture = TF.hflip(picture) if draw_flips(key_).item() else picture
        params = draw_params(key_, augmentation, SIZE, SIZE)
        image = randaugment(TF.pil_to_tensor(picture)[None], params.operations, params.signs, 9)
        assert torch.equal(got.inputs[position], cutout(normalize(image, mean, std), params, 5)[0])
        assert got.labels[position] == folder.labels[visits[slot]]


def test_crop_window_fits_and_follows_its_distribution() -> None:
    """Area and aspect of windows small enough to fit at the first attempt are uniform and log-uniform."""
    windows = [crop_window(key(0, number), 1000, 1000) for number in range(1500)]
    for left, top, width, height in windows:
        assert 0 <= left <= 1000 - width
        assert 0 <= top <= 1000 - height
    area = np.array([w * h / 1e6 for _, _, w, h in windows])
    aspect = np.array([np.log(w / h) / np.log(4 / 3) for _, _, w, h in windows])
    small = area < 0.75  # up to here every aspect fits: the long side is √(¾·4/3) of the image's
    limit = stats.kstwobign.isf(1e-6)
    # 2/1000: what rounding the sides to pixels moves.
    assert stats.kstest((area[small] - 0.08) / 0.67, "uniform").statistic < limit / np.sqrt(small.sum()) + 0.002
    assert stats.kstest((aspect[small] + 1) / 2, "uniform").statistic < limit / np.sqrt(small.sum()) + 0.01
    places = np.array([left / (1000 - w) for left, _, w, _ in windows if w < 900])
    assert stats.kstest(places, "uniform").statistic < limit / np.sqrt(len(places)) + 0.01


@pytest.mark.parametrize(("width", "height"), [(1, 1), (4000, 3), (3, 4000)])
def test_crop_window_of_a_strange_image_is_in_it(width: int, height: int) -> None:
    for number in range(20):
        left, top, w, h = crop_window(key(1, number), width, height)
        assert w > 0
        assert h > 0
        assert 0 <= left <= left + w <= width
        assert 0 <= top <= top + h <= height


def test_batch_is_made_again_from_any_step(root: Path) -> None:
    first = stream(root, seed=1)
    assert first.steps == 3
    assert not first.capturable
    history: dict[tuple[int, int], ImageBatch] = {}
    for epoch in range(2):
        first.start_epoch(epoch)
        for step in range(first.steps):
            history[epoch, step] = first.batch(torch.tensor(step))
    again = stream(root, seed=1)
    for epoch, step in [(1, 1), (1, 2), (1, 0), (0, 2)]:
        if again._requests.epoch != epoch:
            again.start_epoch(epoch)
        assert_equal(again.batch(step), history[epoch, step])
    assert not torch.equal(history[0, 0].inputs, history[1, 0].inputs)


def test_epoch_visits_every_image(root: Path) -> None:
    made = stream(root, 4, Augmentation())
    labels = torch.cat([made.batch(step).labels for step in range(made.steps)])
    assert labels[:11].bincount().tolist() == [6, 5]
    assert labels[11:].tolist() == labels[:1].tolist()


def test_workers_make_the_same_batches(root: Path) -> None:
    alone, workers = stream(root, seed=2), stream(root, seed=2, workers=2)
    before = torch.get_rng_state()
    for epoch, steps in ((0, (0, 1)), (1, (0, 1, 2)), (2, (2,))):  # leaving an epoch early, and coming in late
        alone.start_epoch(epoch)
        workers.start_epoch(epoch)
        for step in steps:
            assert_equal(workers.batch(step), alone.batch(step))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_together_equal_one_process(root: Path, world: int) -> None:
    alone = stream(root, 8, seed=3)
    ranks = [stream(root, 8, seed=3, rank=rank, world=world) for rank in range(world)]
    for step in range(alone.steps):
        whole, parts = alone.batch(step), [made.batch(step) for made in ranks]
        for name in ("inputs", "labels", "other"):
            assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(whole, name))
        assert all(part.share == whole.share for part in parts)


@pytest.mark.parametrize("workers", [0, 2])
def test_folder_in_order_equals_torchvision_and_covers_all_once(root: Path, workers: int) -> None:
    folder = read_folder(root, "val")
    parts = list(folder_in_order(folder, batch_size=4, size=SIZE, workers=workers))
    assert [len(y) for _, y in parts] == [4, 4, 3]
    assert torch.cat([y for _, y in parts]).tolist() == folder.labels.tolist()
    prepare = transforms.Compose([transforms.Resize(SIZE * 256 // 224), transforms.CenterCrop(SIZE)])
    mean, std = (per_channel(values, 3, "", "cpu") for values in (IMAGENET_MEAN, IMAGENET_STD))
    for x, path in zip(torch.cat([x for x, _ in parts]), folder.files, strict=True):
        image = TF.pil_to_tensor(prepare(Image.open(path).convert("RGB")))
        assert torch.equal(x, normalize(image, mean, std))


def copied(root: Path, place: Path) -> Path:
    for path in (root / "train").rglob("*.*"):
        target = place / path.relative_to(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    return place


def test_workers_are_no_more_than_cores(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("normfree.data.images.image_folder.available_cores", lambda: 1)
    made = stream(root, workers=3)
    made.batch(0)
    assert made._loader is not None
    assert made._loader.num_workers == 1
    made.close()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("damage", [b"", b"no image at all", None], ids=["empty", "text", "truncated"])
def test_corrupt_image_is_refused_by_name(root: Path, tmp_path: Path, damage: bytes | None, workers: int) -> None:
    place = copied(root, tmp_path)
    victim = place / "train" / "dog" / "08.JPEG"
    victim.write_bytes(victim.read_bytes()[:200] if damage is None else damage)
    made = stream(place, 11, workers=workers)
    with pytest.raises(
        ValueError, match=r"^expected an image in 'dog/08.JPEG', which cannot be read: .*; replace or remove the file$"
    ) as refusal:
        made.batch(0)
    assert str(tmp_path) not in str(refusal.value)
    with pytest.raises(ValueError, match=r"'dog/08.JPEG'"):
        list(folder_in_order(read_folder(place), batch_size=11, size=SIZE, workers=workers))


def test_unreadable_image_is_refused_by_name(root: Path, tmp_path: Path) -> None:
    place = copied(root, tmp_path)
    made = stream(place, 11)
    os.remove(place / "train" / "cat" / "01.png")
    with pytest.raises(ValueError, match=r"expected an image in 'cat/01.png', which cannot be read: .*No such file"):
        made.batch(0)


def test_hidden_files_and_folders_are_no_images(root: Path, tmp_path: Path) -> None:
    place = copied(root, tmp_path)
    (place / "train" / "cat" / "._00.JPEG").write_bytes(b"what macOS leaves")
    (place / "train" / "cat" / "x.jpg").mkdir()
    (place / "train" / "cat" / "link.png").symlink_to(place / "train" / "cat" / "01.png")
    assert len(read_folder(place)) == 12  # a link to an image is one


def test_folder_without_pillow_is_refused_when_it_is_opened(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ValueError, match=r"^reading an image folder needs pillow, .*; .*run: pip install"):
        read_folder(root)


def spoiled(what: str) -> Callable[[Path], object]:
    def spoil(place: Path) -> object:
        train = place / "train"
        if what == "missing":
            return read_folder(place / "nowhere")
        if what == "no classes":
            (place / "test").mkdir()
            return read_folder(place, "test")
        if what == "empty class":
            (train / "emu").mkdir()
            return read_folder(place)
        return read_folder(place, "train", ("cat", "emu"))

    return spoil


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("missing", "expected a folder of images at '.*/nowhere', found none"),
        ("no classes", "expected a folder for each class in 'test', found none"),
        ("empty class", "expected images in 'train/emu', found none"),
        ("other classes", "'dog' in only one of them"),
    ],
)
def test_folder_that_is_none_is_refused(root: Path, tmp_path: Path, what: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        spoiled(what)(copied(root, tmp_path))


def test_missing_part_names_the_folder_as_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"of classes in '\.', found none"):
        read_folder(".")


def test_stream_refuses_what_makes_no_batch(root: Path) -> None:
    with pytest.raises(ValueError, match="expected crop=0 for an image folder, got 4"):
        stream(root, 4, Augmentation(crop=4))
    with pytest.raises(ValueError, match="share evenly, got 5"):
        stream(root, 5, world=2)
    with pytest.raises(ValueError, match="expected a step of 0 to 2, got 3"):
        stream(root, 4).batch(3)
    with pytest.raises(ValueError, match="at least one image"):
        FolderBatches(ImageFolder(classes=("a",), files=(), labels=torch.zeros(0, dtype=torch.int64)), batch_size=2)
