"""The data of a run: found by its name, and compared with that of a stored run."""

from pathlib import Path

import pytest
import torch

from normfree.data import load
from normfree.train import TrainConfig
from normfree.train.data import as_data, open_data, require_same_data, with_data_dir
from normfree.train.image_data import MemoryImages
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
    require_same_data(data, own, own, "runs/a")
    require_same_data(data, own, {}, "runs/a")  # an older checkpoint says less
    with pytest.raises(ValueError, match="to have the same number of training and test images as the run in 'runs/a'"):
        require_same_data(data, own, other.fingerprint(TrainConfig()), "runs/a")
