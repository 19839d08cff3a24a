"""A run that cannot fit into the memory is refused before it takes the memory."""

import resource
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

import normfree as nf
from normfree.nn import devices
from normfree.train.data_sources import MemoryImages
from normfree.train.engine.setup import require_room_for_micro_batch
from tiny_images import tiny_images

CONFIG = nf.TrainConfig(model="resmlp-4-32", batch_size=1024, precision="float32", compile=False)
CPU = torch.device("cpu")


def refused(config: nf.TrainConfig, model: nn.Module, images: int, free: int, patch: pytest.MonkeyPatch) -> bool:
    patch.setattr(devices, "free_memory", lambda _: free)
    try:
        require_room_for_micro_batch(model, config, MemoryImages(tiny_images()), CPU, images)
    except ValueError as error:
        return "use a smaller batch_size" in str(error)
    return False


class Chain(nn.Module):
    """A chain of linear layers, whose inputs are all that its backward pass needs."""

    def __init__(self, inputs: int, width: int, layers: int) -> None:
        super().__init__()
        sizes = [inputs, *[width] * layers]
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in pairwise(sizes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1)
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize(
    ("changes", "share"), [({}, 1.0), ({"precision": "bf16"}, 0.5), ({"compile": True}, 0.5)], ids=str
)
def test_activations_are_counted(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], share: float) -> None:
    data = MemoryImages(tiny_images())
    inputs = data.example(CONFIG, 1)[0].numel()
    model = Chain(inputs, 50, 3)
    # The first layer reads the images, and the other two read 50 numbers each; weights are not counted.
    exact = share * 1024 * 4 * (inputs + 2 * 50)
    config = CONFIG.with_changes(**changes)
    assert not refused(config, model, 1024, int(1.01 * exact), monkeypatch)
    assert refused(config, model, 1024, int(0.99 * exact), monkeypatch)


def test_small_batches_and_recomputation_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Chain(1, 1, 1)  # a forward pass would fail
    assert not refused(CONFIG, model, 100, 0, monkeypatch)
    assert not refused(CONFIG.with_changes(recompute=1), model, 1024, 0, monkeypatch)


def test_measuring_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    data = MemoryImages(tiny_images())
    config = CONFIG.with_changes(model="cnn-4-8", method="batchnorm")
    model, _ = data.build_model(config)
    before, state = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    assert not refused(config, model, 1024, 1 << 50, monkeypatch)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("batch", [1_000_000, 99_999_999])
def test_huge_batch_is_refused_and_takes_no_memory(monkeypatch: pytest.MonkeyPatch, batch: int) -> None:
    monkeypatch.setattr(devices, "free_memory", lambda _: 4 << 30)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=r"to fit into the memory, got .* GiB or more, where 4.0 GiB are free"):
        nf.fit(nf.recipe("fashion", batch_size=batch, device="cpu"))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # kB
