"""Inputs that fit models, and the models, by name."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from normfree.models.example_inputs import build_by_name, random_inputs, read_batch, reads_tokens, to_device


@pytest.mark.parametrize(
    ("model", "shape", "expected"),
    [
        ("resnet20", "", (4, 3, 32, 32)),
        ("resnet18", "", (4, 3, 224, 224)),
        ("resnet20", "1x28x28", (4, 1, 28, 28)),
        ("torchvision:resnet18", "", (4, 3, 224, 224)),
        ("torchvision:resnet18", "3x64x64", (4, 3, 64, 64)),
    ],
)
def test_random_images_have_the_shape_of_the_model(model: str, shape: str, expected: tuple[int, ...]) -> None:
    inputs = random_inputs(model, shape, batch=4)
    assert isinstance(inputs, Tensor)
    assert inputs.shape == expected
    assert torch.equal(inputs, random_inputs(model, shape, batch=4))  # type: ignore[arg-type]


def test_random_tokens_have_the_given_length() -> None:
    name = "transformer-2-2-16-32-2"
    assert reads_tokens(name)
    assert not reads_tokens("resnet20")
    source, target = random_inputs(name, "7", batch=4)
    assert (source.shape, source.dtype) == ((4, 7), torch.int64)
    assert len(target) == 4


def test_wrong_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="expected --input such as 3x224x224, got '3x-1'"):
        random_inputs("resnet20", "3x-1")
    with pytest.raises(ValueError, match="expected --input to be the length of a sequence, such as 32, got '3x4'"):
        random_inputs("transformer-2-2-16-32-2", "3x4")


@pytest.mark.parametrize("model", ["resnet20", "torchvision:resnet18", "transformer-2-2-16-32-2"])
def test_inputs_larger_than_the_memory_are_refused(model: str) -> None:
    with pytest.raises(ValueError, match=r"expected 1,000,000,000,000 inputs of .* to fit into the memory, got .* GiB"):
        random_inputs(model, batch=10**12)


def test_model_depends_on_the_seed_alone() -> None:
    before = torch.random.get_rng_state()
    first, again, other = (build_by_name("torchvision:resnet18", seed=seed) for seed in (0, 0, 1))
    assert torch.equal(torch.random.get_rng_state(), before)
    weights = [model.get_parameter("conv1.weight") for model in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_batch_is_read_and_moved(tmp_path: Path) -> None:
    images = np.random.default_rng(0).normal(size=(2, 3, 8, 8)).astype(np.float32)
    np.save(tmp_path / "images.npy", images)
    inputs, targets = read_batch(tmp_path / "images.npy", "resnet20")
    assert targets is None
    moved = to_device({"x": (inputs, 3)}, torch.device("meta"))
    assert (moved["x"][0].shape, moved["x"][0].device.type, moved["x"][1]) == ((2, 3, 8, 8), "meta", 3)
