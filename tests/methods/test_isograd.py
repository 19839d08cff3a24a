"""`isograd`: the gradient's variance is flat from block to block, where plain fan-out loses or gains some."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from normfree import convert
from normfree.models import build
from oracles import factor_a_block, first_to_last, network_signals

DEEP = ["preact_resnet50", "preact_resnet101"]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def median_ratio(name: str, method: str) -> float:
    return float(np.median([first_to_last(network_signals(name, method, seed=seed, batch=8)) for seed in range(3)]))


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("preact_resnet18", "isograd"),
        ("preact_resnet50", "isograd"),
        pytest.param("preact_resnet101", "isograd", marks=pytest.mark.slow),
        pytest.param("preact_resnet152", "isograd", marks=pytest.mark.slow),
        pytest.param("preact_resnet50", "isograd:shortcut=conv", marks=pytest.mark.slow),
    ],
)
def test_isograd_gradient_is_flat(name, method):
    assert 0.5 < median_ratio(name, method) < 2


def test_isograd_range_excludes_plain_fan_out():
    assert not 0.5 < first_to_last(network_signals("preact_resnet101", "idshort")) < 2
    assert not 0.5 < first_to_last(network_signals("preact_resnet18", "idshort")) < 2


@pytest.mark.parametrize("name", DEEP)
def test_isograd_keeps_the_gradient_in_every_block(name):
    assert factor_a_block(network_signals(name, "isograd", batch=8), backward=True) == pytest.approx(1.0, abs=0.03)


def test_isograd_without_borders_only_counts_the_stride():
    models = [build("preact_resnet18", m, generator=seeded(0), padding_mode="circular") for m in ("isograd", "idshort")]
    for layer in models[0].plan.hidden():
        ours, theirs = (model.get_submodule(layer.name) for model in models)
        ratio = ours.weight.var().item() / theirs.weight.var().item()
        assert ratio == pytest.approx(ours.stride[0] ** 2, rel=1e-4), layer.name


def test_isograd_with_borders_gives_padded_layers_more():
    models = [build("preact_resnet18", m, generator=seeded(0)) for m in ("isograd", "idshort")]
    weights = [model.get_submodule("body.3.1.branch.conv2").weight for model in models]
    # The last 3×3 layer sees the uniform map of 4×4: it has (10/12)² of the taps that fan-out counts.
    assert weights[0].var().item() / weights[1].var().item() == pytest.approx((12 / 10) ** 2, rel=1e-4)


class Block(nn.Module):
    def __init__(self, padding: int | str) -> None:
        super().__init__()
        self.one = nn.Conv2d(8, 8, 3, padding=padding, bias=False)
        self.two = nn.Conv2d(8, 8, 3, padding=padding, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.two(self.one(x.relu()).relu())


def converted(*blocks: nn.Module, stem_padding: int | str = 0) -> nn.Module:
    layers = [nn.Conv2d(3, 8, 3, padding=stem_padding), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)]
    example = torch.randn(2, 3, 8, 8, generator=seeded(1))
    model, _ = convert(nn.Sequential(*layers), "isograd", example, generator=seeded(0))
    return model


def test_isograd_counts_padding_that_is_given_by_a_word():
    word, number = converted(Block("same"), stem_padding="valid"), converted(Block(1), stem_padding=0)
    for (name, ours), theirs in zip(word.named_parameters(), number.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def test_isograd_gives_layers_between_blocks_fan_out():
    model = converted(Block(1), nn.Conv2d(8, 64, 1), nn.Conv2d(64, 8, 1), Block(1))
    assert model[2].weight.var(unbiased=False).item() == pytest.approx(1 / 64, rel=1e-4)
