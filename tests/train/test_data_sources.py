"""The data of a run: found by its name, and compared with that of a stored run.

Images as the data of a run: the parts for training, validation and test, and their share per process.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from normfree.data import ImageSet, load
from normfree.train import TrainConfig
from normfree.train.data_sources import FolderImages, MemoryImages, as_data, open_data
from normfree.train.engine.data_interface import Data, EvalBatches, Inputs
from normfree.train.engine.distributed import Processes
from normfree.train.run.evaluation import with_data_dir
from tiny_images import tiny_images


def test_data_is_found_by_its_name(tmp_path: Path) -> None:
    moved = [with_data_dir(TrainConfig(data=name), "y") for name in ("folder:x", "cifar10", "folder")]
    assert [(config.data, config.data_dir) for config in moved] == [
        ("folder:y", ".data"),
        ("cifar10", "y"),
        ("folder", "y"),
    ]
    found = open_data(TrainConfig())
    assert isinstance(found, MemoryImages)
    assert torch.equal(found.images.test.images, load("fashion14").test.images)
    with pytest.raises(ValueError, match="normfree data get cifar10 --data-dir"):
        open_data(TrainConfig(data="cifar10", data_dir=str(tmp_path)))
    with pytest.raises(ValueError, match="expected an image folder 'train'"):
        open_data(TrainConfig(data=f"folder:{tmp_path}"))


def test_other_data_than_that_of_a_run_is_refused() -> None:
    data, other = as_data(tiny_images()), as_data(tiny_images(40))
    own = data.fingerprint(TrainConfig())
    data.require_same(own, "runs/a", own)
    data.require_same(own, "runs/a", {})  # an older checkpoint says less
    with pytest.raises(ValueError, match="to have the same number of training and test images as the run in 'runs/a'"):
        data.require_same(own, "runs/a", other.fingerprint(TrainConfig()))


def inputs(data: ImageSet | Data, rank: int = 0, world: int = 1, **changes: Any) -> Inputs:
    config = TrainConfig(batch_size=16, workers=0).with_changes(**changes)
    layout: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32}
    opened = as_data(data) if isinstance(data, ImageSet) else data
    return opened.inputs(config, **layout, processes=Processes(rank, world))


def pictures(images: EvalBatches | None) -> list[bytes]:
    assert images is not None
    return [image.numpy().tobytes() for batch, _ in images() for image in batch]


@pytest.fixture
def folder(tmp_path: Path) -> FolderImages:
    from PIL import Image

    for part, count in (("train", 5), ("val", 2)):
        for label in ("a", "b"):
            (tmp_path / part / label).mkdir(parents=True)
            for number in range(count):
                colour = (40 * number, 200 if label == "a" else 0, 100 if part == "val" else 0)
                Image.new("RGB", (9, 8), colour).save(tmp_path / part / label / f"{number}.png")
    found = open_data(TrainConfig(data=f"folder:{tmp_path}"))
    assert isinstance(found, FolderImages)
    return found


def test_validation_is_no_part_of_training() -> None:
    data = tiny_images()
    found = inputs(data, validation=0.25, batch_size=60)
    assert found.feed.steps == 1
    held = pictures(found.validation)
    trained = [image.numpy().tobytes() for image in found.feed.batch(torch.tensor(0)).inputs]
    everything = pictures(inputs(ImageSet("x", data.classes, data.train, data.train, data.mean, data.std)).test)
    assert sorted(held + trained) == sorted(everything)
    assert inputs(data, validation=0.0).validation is None


def test_processes_share_the_images_that_are_scored() -> None:
    data = tiny_images(80, 5)
    whole = pictures(inputs(data).test)
    parts = [pictures(inputs(data, rank, 8).test) for rank in range(8)]
    assert sorted(picture for part in parts for picture in part) == sorted(whole)
    assert [len(part) for part in parts] == [1, 1, 1, 1, 1, 0, 0, 0]


def test_folder_is_parted_like_a_set(folder: FolderImages) -> None:
    found = inputs(folder, validation=0.2, batch_size=8)
    assert (found.items_per_step, found.feed.steps) == (8, 1)
    assert len(pictures(found.validation)) == 2
    assert len(pictures(found.test)) == 4
    assert [len(pictures(inputs(folder, rank, 8).test)) for rank in range(8)] == [1, 1, 1, 1, 0, 0, 0, 0]
    with pytest.raises(ValueError, match="hold out fewer"):
        inputs(folder, validation=0.99)


def test_held_out_files_depend_on_the_seed_alone(folder: FolderImages) -> None:
    def held(**changes: Any) -> list[bytes]:
        return pictures(inputs(folder, validation=0.4, **changes).validation)

    assert held(batch_size=4) == held()
    assert any(held(seed=seed) != held() for seed in range(1, 5))


def test_example_is_what_the_network_sees(folder: FolderImages) -> None:
    config, data = TrainConfig(), tiny_images()
    pixels = data.train.images[:3].double() / 255
    expected = (pixels - torch.tensor(data.mean).view(-1, 1, 1)) / torch.tensor(data.std).view(-1, 1, 1)
    found: Tensor = as_data(data).example(config, 3)[0]
    torch.testing.assert_close(found, expected.float())
    assert as_data(tiny_images(1, 1)).example(config)[0].shape == (1, 1, 14, 14)
    assert folder.example(config)[0].shape == (10, 3, 224, 224)
