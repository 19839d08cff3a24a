"""Blocks that differ from similar blocks are found, and no others."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from normfree.diagnostics.propagation import propagate
from normfree.diagnostics.rules.outliers import find_outliers
from normfree.diagnostics.signals import Signal, Stats
from normfree.diagnostics.verdict import judge
from normfree.methods import names
from normfree.models import build, supports
from signal_oracles import batch, made_up_signal, noisy


class Scaled(nn.Module):
    """24 residual blocks of two convolutions and a small scale."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.out = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 4)
        self.blocks = nn.Sequential(*(ScaledBlock() for _ in range(24)))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.blocks(self.stem(x)).mean((2, 3)))  # type: ignore[no-any-return]


class ScaledBlock(nn.Module):
    """Two convolutions by He."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = (nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(2))
        for layer in (self.first, self.last):
            nn.init.kaiming_normal_(layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.2 * self.last(self.first(x.relu()).relu())  # type: ignore[no-any-return]


@pytest.mark.parametrize("place", [0, 1, 7, 23])
def test_single_broken_block_is_reported(place: int) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Scaled()
    sound = judge(propagate(model, batch(8, 3, 12, 12)))
    assert (sound.status, sound.outliers, sound.word) == ("preserved", (), "preserved")
    with torch.no_grad():
        model.get_parameter(f"blocks.{place}.last.weight").mul_(50)
    verdict = judge(propagate(model, batch(8, 3, 12, 12)))
    assert verdict.forward.status == verdict.backward.status == "preserved"
    assert [outlier.name for outlier in verdict.outliers] == [f"blocks.{place}"]
    assert verdict.word == f"exploding: block too large at blocks.{place}"
    (outlier,) = verdict.outliers
    assert min(outlier.forward, outlier.backward) > 30
    assert max(outlier.usual_forward, outlier.usual_backward) < 1.2
    assert (
        f"blocks.{place} stands out: ×{outlier.forward:.3g} forward and ×{outlier.backward:.3g} backward"
        in verdict.sentence
    )
    assert verdict.recommendation.startswith(f"look at blocks.{place}: compare its weights")
    assert verdict.at_least("exploding")
    assert not verdict.at_least("faulty")


def test_forgotten_normalizer_is_reported() -> None:
    x = batch(8, 3, 16, 16)
    model = build("resnet56", "batchnorm", generator=torch.Generator().manual_seed(0))
    assert judge(propagate(model, x)).outliers == ()
    for name in ("norm1", "norm2"):
        model.set_submodule(f"body.1.6.branch.{name}", nn.Identity())
    verdict = judge(propagate(model, x))
    assert verdict.status in ("preserved", "growing")
    assert [outlier.name for outlier in verdict.outliers] == ["body.1.6"]
    assert verdict.at_least("growing")
    assert not verdict.at_least("vanishing")  # twice what its neighbours do


def test_gradient_that_leaps_alone_is_reported() -> None:
    exploding = judge(made_up_signal(noisy([1.0] * 40, 0, 0.02), [1e4] * 20 + [1.0] * 20))
    assert (exploding.word, [outlier.name for outlier in exploding.outliers]) == (
        "exploding: block too large at block20",
        ["block20"],
    )
    leap = judge(made_up_signal(noisy([1.0] * 40, 0, 0.02), [50.0 if i < 20 else 1.0 for i in range(40)]))
    assert (leap.backward.status, [outlier.name for outlier in leap.outliers]) == ("preserved", ["block20"])
    assert leap.status == "exploding"


def test_block_that_is_taken_back_is_reported_once() -> None:
    spike = judge(made_up_signal([1e4 if i == 7 else v for i, v in enumerate(noisy([1.0] * 40, 0, 0.02))]))
    assert [outlier.name for outlier in spike.outliers] == ["block7"]


@pytest.mark.parametrize("seed", range(5))
def test_noise_does_not_stand_out(seed: int) -> None:
    for spread in (0.0, 0.02, 0.3, 1.0):
        values = noisy([1.0] * 40, seed, spread)
        assert judge(made_up_signal(values, noisy([1.0] * 40, seed + 50, spread))).outliers == ()


@pytest.mark.parametrize("name", ["resnet20", "resmlp-16-16", "wrn-16-1", "transformer-2-2-16-32-2"])
def test_no_block_of_a_sound_network_stands_out(name: str) -> None:
    words = torch.randint(4, 50, (4, 6), generator=torch.Generator().manual_seed(0))
    x = (words, words) if name.startswith("transformer") else batch(4, 3, 16, 16)
    for method in filter(lambda method: supports(name, method), names()):
        model = build(name, method, example=x, generator=torch.Generator().manual_seed(0))
        assert judge(propagate(model, x)).outliers == (), method


@pytest.mark.parametrize("place", [0, 1, 3])
def test_forgotten_normalizer_in_a_short_stage_is_reported(place: int) -> None:
    """With two blocks per stage there are no factors to compare, only the variances of branches."""
    x = batch(8, 3, 16, 16)
    model = build("resnet20", "batchnorm", generator=torch.Generator().manual_seed(0))
    sums = propagate(model, x).sums
    short = tuple(replace(s, name=f"b{i}", stage=i // 2) for i, s in enumerate(sums[:8]))
    sound = Signal(short, ())
    assert judge(sound).outliers == ()
    forgotten = replace(short[place], branch=Stats(0.0, 0.3, 1.0))
    outliers = judge(replace(sound, sums=(*short[:place], forgotten, *short[place + 1 :]))).outliers
    assert [o.name for o in outliers] == [f"b{place}"]
    assert str(outliers[0]) == f"b{place} stands out: its branch has an output variance of 0.3, others have 1"


def test_forgotten_normalizer_of_a_resnet18_is_reported() -> None:
    from normfree.models.third_party import create_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = create_model("torchvision:resnet18")
    x = batch(4, 3, 64, 64)
    assert judge(propagate(model, x)).outliers == ()
    model.set_submodule("layer3.1.bn2", nn.Identity())
    verdict = judge(propagate(model, x))
    assert [outlier.name for outlier in verdict.outliers] == ["layer3.1"]
    assert "look at layer3.1" in verdict.recommendation


def test_branches_that_differ_are_not_compared_with_one_another() -> None:
    """The control: no branch stands out if most have different variances, or few are alike."""
    flat = made_up_signal([1.0] * 8)
    varied = tuple(replace(s, branch=Stats(0.0, 1.3**i, 1.0)) for i, s in enumerate(flat.sums))
    assert judge(replace(flat, sums=varied)).outliers == ()
    elsewhere = replace(flat.sums[-1], name="head", branch=Stats(0.0, 9.0, 1.0))
    assert judge(replace(flat, sums=(*flat.sums[:-1], elsewhere))).outliers == ()
    assert len(judge(replace(flat, sums=(*flat.sums[:-1], replace(elsewhere, name="block7")))).outliers) == 1


def test_one_branch_that_does_not_start_at_zero_is_reported() -> None:
    model = build("resnet20", "fixup", generator=torch.Generator().manual_seed(0))
    assert judge(propagate(model, batch(4, 3, 16, 16))).outliers == ()
    nn.init.normal_(model.get_parameter("body.1.1.branch.conv2.weight"), std=0.1)
    assert [outlier.name for outlier in judge(propagate(model, batch(4, 3, 16, 16))).outliers] == ["body.1.1"]


def test_outlier_without_a_gradient_has_no_backward_factor() -> None:
    forward = [1.0 if i < 20 else 1e3 for i in range(40)]
    found = find_outliers(made_up_signal(forward, [0.0 if 15 < i < 25 else 1.0 for i in range(40)]))
    assert [outlier.name for outlier in found] == ["block20"]
    assert math.isnan(found[0].backward)
    assert math.isnan(found[0].usual_backward)
    assert found[0].excess == pytest.approx(1e3, rel=1e-6)
    assert str(found[0]) == "block20 stands out: ×1,000 forward, where blocks like it have ×1"
