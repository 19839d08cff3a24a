"""The verdict on signals that are made up, where the answer is known, and on networks."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from normfree.diagnostics.moments import Stats
from normfree.diagnostics.propagation import Signal, SumSignal, propagate
from normfree.diagnostics.verdict import SEVERITY, Direction, Status, Verdict, judge
from normfree.methods import names
from normfree.models import admits, build

GROWTH = 1.3


def signal(
    forward: Sequence[float], backward: Sequence[float] | None = None, stages: Sequence[int] | None = None
) -> Signal:
    """A signal with these variances at its sums; `backward` is in the order of the blocks too."""
    backward = [1.0] * len(forward) if backward is None else backward
    stages = [1] * len(forward) if stages is None else stages

    def stats(variance: float) -> Stats:
        return Stats(0.0, variance, math.sqrt(variance) if variance >= 0 else math.nan)

    return Signal(
        tuple(
            SumSignal(f"block{i}", stage, False, stats(f), stats(0.5), stats(1.0), stats(b), stats(1.0), stats(1.0))
            for i, (f, b, stage) in enumerate(zip(forward, backward, stages, strict=True))
        ),
        (),
    )


def noisy(values: Sequence[float], seed: int, spread: float = 0.15) -> list[float]:
    return [float(v) for v in np.array(values) * np.exp(np.random.default_rng(seed).normal(0, spread, len(values)))]


def exponential(count: int, factor: float) -> list[float]:
    return [factor**i for i in range(count)]


def linear(sizes: Sequence[int], start: float = 1.36, step: float = 0.68) -> tuple[list[float], list[int]]:
    """The variance of a network with batch norm: it grows by 1 - 1/π a block and restarts at every stage."""
    values = [start + step * b for size in sizes for b in range(size)]
    return values, [k for k, size in enumerate(sizes, 1) for _ in range(size)]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("count", [1, 2, 3, 8, 50])
def test_flat_signal_is_preserved(count: int, seed: int) -> None:
    verdict = judge(signal(noisy([1.0] * count, seed), noisy([1e-6] * count, seed + 1)))
    assert verdict.status == "preserved"
    assert verdict.forward.total == pytest.approx(1, rel=2)
    assert verdict.recommendation == "nothing to do"


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("factor", "count"), [(GROWTH, 40), (2.0, 12), (1.1, 120)])
def test_exponential_growth_forward_explodes(factor: float, count: int, seed: int) -> None:
    verdict = judge(signal(noisy(exponential(count, factor), seed)))
    assert verdict.status == verdict.forward.status == "exploding"
    assert verdict.backward.status == "preserved"
    assert verdict.forward.factor == pytest.approx(factor, rel=0.1)
    assert math.log(verdict.forward.total) == pytest.approx((count - 1) * math.log(factor), rel=0.1)


@pytest.mark.parametrize("seed", range(5))
def test_exponential_growth_backward_is_counted_from_the_last_block(seed: int) -> None:
    rising = noisy(exponential(40, GROWTH), seed)
    explodes = judge(signal([1.0] * 40, rising[::-1]))
    assert explodes.status == explodes.backward.status == "exploding"
    assert explodes.backward.factor == pytest.approx(GROWTH, rel=0.1)
    vanishes = judge(signal([1.0] * 40, rising))
    assert vanishes.status == vanishes.backward.status == "vanishing"
    assert vanishes.backward.factor == pytest.approx(1 / GROWTH, rel=0.1)


@pytest.mark.parametrize("seed", range(5))
def test_exponential_decay_forward_vanishes(seed: int) -> None:
    verdict = judge(signal(noisy(exponential(40, 1 / GROWTH), seed)))
    assert verdict.status == verdict.forward.status == "vanishing"
    assert verdict.forward.total < 1e-3


@pytest.mark.parametrize("factor", [1.05, 1 / 1.05])
def test_slow_change_over_few_blocks_is_preserved(factor: float) -> None:
    assert judge(signal(exponential(30, factor), exponential(30, factor))).status == "preserved"
    deep = judge(signal(exponential(300, factor)))
    assert deep.status == ("exploding" if factor > 1 else "vanishing")


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("sizes", [(50,), (9, 9, 9), (6, 6, 6), (3, 4, 6, 3)])
def test_batch_norm_growth_is_growing(sizes: tuple[int, ...], seed: int) -> None:
    values, stages = linear(sizes)
    verdict = judge(signal(noisy(values, seed, 0.02), stages=stages))
    assert verdict.status == verdict.forward.status == "growing"
    assert "power of the depth" in verdict.sentence


def test_batch_norm_growth_that_begins_higher_is_growing() -> None:
    """torchvision's sums begin a stage with five blocks' worth of variance."""
    values, stages = linear((12, 12), start=1.7, step=0.34)
    backward = [float(v) ** -4 for v in values]
    verdict = judge(signal(values, backward, stages))
    assert verdict.forward.status == verdict.backward.status == "growing"


@pytest.mark.parametrize("exponent", [1.0, 2.0])
def test_power_law_backward_is_growing(exponent: float) -> None:
    values = [float(i) ** -exponent for i in range(1, 101)]
    verdict = judge(signal([1.0] * 100, values))
    assert verdict.status == verdict.backward.status == "growing"
    assert verdict.forward.status == "preserved"


@pytest.mark.parametrize("sizes", [(2, 2, 2, 2), (2, 2, 2)])
def test_stages_of_two_do_not_tell_a_law(sizes: tuple[int, ...]) -> None:
    """A step of 2 in every stage is batch norm's as well as He's; rounding must not decide which."""
    stages = [k for k, size in enumerate(sizes, 1) for _ in range(size)]
    values = [4.0 ** (k - 1) * 2.0 ** (i % 2) for i, k in enumerate(stages)]
    assert {judge(signal([scale * v for v in values], stages=stages)).status for scale in (1, 0.3, 7.1)} == {
        "preserved"
    }
    steep = [100.0 * v * v for v in values]  # a thousandfold is too much, whatever the law
    assert judge(signal([v * v for v in steep], stages=stages)).status == "exploding"


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_numbers_that_end_midway_explode_where_they_end(broken: float) -> None:
    forward = judge(signal([1.0] * 5 + [broken] * 5))
    assert forward.status == forward.forward.status == "exploding"
    assert forward.forward.broken_at == forward.forward.worst == "block5"
    assert "leaves the range of numbers at block5" in forward.sentence
    backward = judge(signal([1.0] * 10, [broken] * 5 + [1.0] * 5))
    assert backward.backward.broken_at == "block4"  # coming from the last block
    assert backward.status == "exploding"


def test_zeros_vanish_where_they_begin() -> None:
    forward = judge(signal([1.0] * 5 + [0.0] * 5))
    assert forward.status == "vanishing"
    assert forward.forward.broken_at == "block5"
    assert "is exactly 0 at block5" in forward.sentence
    backward = judge(signal([1.0] * 10, [0.0] * 5 + [1.0] * 5))
    assert backward.backward.broken_at == "block4"
    assert judge(signal([0.0] * 10, [0.0] * 10)).status == "vanishing"


@pytest.mark.parametrize("odd", [1e-9, 1e9])
@pytest.mark.parametrize("place", [0, 7, 20, 39])
def test_one_odd_block_does_not_change_the_verdict(place: int, odd: float) -> None:
    def with_odd(values: list[float]) -> list[float]:
        return [v * odd if i == place else v for i, v in enumerate(values)]

    assert judge(signal(with_odd(noisy([1.0] * 40, 0)))).status == "preserved"
    assert judge(signal(with_odd(noisy(exponential(40, GROWTH), 0)))).status == "exploding"
    assert judge(signal([1.0] * 40, with_odd(noisy(exponential(40, GROWTH), 0)))).status == "vanishing"


def test_one_odd_block_would_change_a_least_squares_fit() -> None:
    """The control: the slope of a flat signal with one odd block, by least squares and by the verdict."""
    values = [1.0] * 39 + [1e9]
    slope = np.polyfit(np.arange(40), np.log(values), 1)[0]
    assert 39 * slope > math.log(10)
    assert judge(signal(values)).forward.factor == pytest.approx(1, abs=1e-9)


def test_worst_place_is_named() -> None:
    forward = [1.0] * 10 + [1e4] * 10
    verdict = judge(signal(forward))
    assert verdict.status == "exploding"
    assert (verdict.forward.worst, verdict.forward.worst_factor) == ("block10", pytest.approx(1e4))
    assert "worst at block10" in verdict.sentence
    backward = judge(signal([1.0] * 20, [1e4] * 10 + [1.0] * 10)).backward
    assert (backward.worst, backward.worst_factor) == ("block10", pytest.approx(1e4))  # on the way back through it
    vanishing = judge(signal([1.0] * 10 + [1e-4] * 10)).forward
    assert (vanishing.status, vanishing.worst) == ("vanishing", "block10")


def test_method_of_the_network_is_not_recommended_to_it() -> None:
    values = noisy(exponential(40, GROWTH), 0, 0.01)
    rising = signal(values)
    assert "use 'fixup'" in judge(rising).recommendation
    assert judge(rising, method="he_in").recommendation == judge(rising).recommendation
    own = judge(rising, method="fixup")
    assert own.recommendation.startswith("it has 'fixup' already")
    assert own.recommendation.endswith(f"look at {own.forward.worst}")
    falling = judge(signal([1.0] * 40, values[::-1]), method="isograd")
    assert falling.recommendation.endswith(f"look at {falling.backward.worst}")
    assert judge(signal([1.0] * 9), method="fixup").recommendation == "nothing to do"


def test_restarts_at_stages_do_not_hide_growth() -> None:
    values = [2.0**b for _ in range(3) for b in range(9)]
    verdict = judge(signal(values, stages=[k for k in (1, 2, 3) for _ in range(9)]))
    assert verdict.status == "exploding"
    assert verdict.forward.factor == pytest.approx(2)


# Dead branches, in networks.


class Branched(nn.Module):
    """Three blocks."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.blocks = nn.ModuleList(TwoLayers(width) for _ in range(3))
        self.out = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)  # type: ignore[no-any-return]


class TwoLayers(nn.Module):
    """A branch of two layers with a ReLU between."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width, bias=False)
        self.last = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.last(self.first(x).relu())  # type: ignore[no-any-return]


def branched(*zero: str) -> Branched:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Branched()
    for name in zero:
        nn.init.zeros_(model.get_parameter(f"blocks.1.{name}.weight"))
    return model


def batch(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_two_zero_layers_are_a_dead_branch() -> None:
    verdict = judge(propagate(branched("first", "last"), batch(16, 8)))
    assert verdict.status == "dead branch"
    assert verdict.dead == ("blocks.1",)
    assert "1 branch is dead (blocks.1)" in verdict.sentence


def test_zero_last_layer_is_not_dead() -> None:
    signal = propagate(branched("last"), batch(16, 8))
    assert signal.sums[1].branch.norm == 0
    assert judge(signal).dead == ()


def test_dead_branch_never_moves() -> None:
    """The control: training leaves a dead branch where it is, and not one whose last layer alone is zero."""

    def moved(model: Branched) -> bool:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            model(batch(16, 8, seed=step)).square().mean().backward()
            optimizer.step()
        return any(p.abs().max() > 0 for n, p in model.named_parameters() if n == "blocks.1.last.weight")

    assert not moved(branched("first", "last"))
    assert moved(branched("last"))


def test_dead_branches_are_counted() -> None:
    found = propagate(branched("first", "last"), batch(16, 8))
    many = replace(found, sums=tuple(replace(found.sums[1], name=f"block{i}") for i in range(5)))
    assert "5 branches are dead (block0, block1, block2 and 2 more)" in judge(many).sentence


@pytest.mark.parametrize("method", ["fixup", "skipinit", "rezero"])
@pytest.mark.parametrize("name", ["resnet20", "wrn-16-1"])
def test_branch_that_begins_at_zero_is_not_dead(name: str, method: str) -> None:
    signal = network(name, method)
    assert all(value == 0 for value in signal.series("branch", "norm"))
    verdict = judge(signal)
    assert verdict.dead == ()
    assert verdict.status == "preserved"


class Enclosed(nn.Module):
    """Three residual blocks and a layer, with a skip connection around them all."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.last, self.out = nn.Linear(6, 6), nn.Linear(6, 6, bias=False), nn.Linear(6, 3)
        self.body = nn.ModuleList([TwoLayers(6) for _ in range(3)])

    def forward(self, x: Tensor, cut: bool = False) -> Tensor:
        y = x = self.stem(x)
        for block in self.body:
            y = block(y)
        y = self.last(y)
        return self.out(x + (y.detach() if cut else y))  # type: ignore[no-any-return]


def enclosed(*zero: str) -> Enclosed:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Enclosed()
    for name in zero:
        nn.init.zeros_(model.get_parameter(f"{name}.weight"))
    return model


def test_branches_inside_one_that_starts_at_zero_are_not_dead() -> None:
    """As Fixup leaves them: both the inner branches and the one around end in zeros, and learn one after the other."""
    model = enclosed("last", *(f"body.{i}.last" for i in range(3)))
    signal = propagate(model, batch(8, 6))
    assert [s.around for s in signal.sums] == ["(model)"] * 3 + [None]
    verdict = judge(signal)
    assert (verdict.status, verdict.dead, verdict.recommendation) == ("preserved", (), "nothing to do")
    says = "no gradient reaches body.0, body.1, body.2 yet: the branch around them starts at zero"
    assert says in verdict.sentence
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(batch(8, 6)).square().sum().backward()
        optimizer.step()
    assert all(model.get_parameter(f"body.{i}.last.weight").any() for i in range(3))
    assert "no gradient reaches" not in judge(propagate(model, batch(8, 6))).sentence


def test_gradient_that_is_cut_is_still_called_zero() -> None:
    verdict = judge(propagate(enclosed(), (batch(8, 6), True)))
    assert (verdict.backward.status, verdict.backward.broken_at) == ("vanishing", "body.2")
    assert "no gradient reaches" not in verdict.sentence


def network(name: str, method: str, images: int = 4, size: int = 32, seed: int = 0) -> Signal:
    x = batch(images, 3, size, size, seed=seed)
    return propagate(build(name, method, example=x, generator=torch.Generator().manual_seed(seed)), x)


# Networks whose verdict the papers and FACTS give.


@pytest.mark.parametrize(
    ("name", "method", "forward", "backward"),
    [
        ("resnet56", "he_in", "exploding", "exploding"),
        ("wrn-40-1", "he_in", "exploding", "exploding"),
        ("wrn-40-1", "batchnorm", "growing", "growing"),
        ("resnet56", "fixup", "preserved", "preserved"),
        ("resnet56", "wn", "preserved", "preserved"),
        ("resnet56", "nf", "preserved", "preserved"),
        ("preact_resnet50", "isograd", "preserved", "preserved"),
        ("preact_resnet50", "idshort", "preserved", "preserved"),
        ("preact_resnet50", "convshort_brock", "preserved", "exploding"),
        ("preact_resnet50", "batchnorm", "growing", "growing"),
    ],
)
def test_network_is_judged_as_the_papers_say(name: str, method: str, forward: Status, backward: Status) -> None:
    verdict = judge(network(name, method))
    assert (verdict.forward.status, verdict.backward.status) == (forward, backward)
    assert verdict.status == max(forward, backward, key=SEVERITY.index)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.parametrize(
    ("name", "method", "wanted"),
    [
        ("resnet20", "he_in", "exploding"),
        ("resnet56", "he_in", "exploding"),
        ("resnet56", "batchnorm", "growing"),
        ("wrn-40-1", "batchnorm", "growing"),
        ("resnet34", "batchnorm", "growing"),
        ("resnet56", "fixup", "preserved"),
        ("preact_resnet50", "isograd", "preserved"),
        ("preact_resnet50", "convshort_brock", "exploding"),
    ],
)
def test_network_is_judged_alike_with_other_seeds(name: str, method: str, wanted: Status, seed: int) -> None:
    assert judge(network(name, method, size=64, seed=seed)).status == wanted


@pytest.mark.parametrize("name", ["resnet18", "resnet34", "resnet50"])
def test_torchvision_with_batch_norm_is_not_alarming(name: str) -> None:
    from torchvision.models import get_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = get_model(name, weights=None)
    verdict = judge(propagate(model, batch(4, 3, 64, 64)))
    assert not verdict.at_least("vanishing")


# Words.


def quoted(text: str) -> list[str]:
    return re.findall(r"'([a-z_]+)'", text)


BAD: list[Callable[[], Signal]] = [
    lambda: signal(exponential(40, GROWTH)),
    lambda: signal(exponential(40, 1 / GROWTH)),
    lambda: signal([1.0] * 40, exponential(40, 1 / GROWTH)),
    lambda: signal([1.0] * 40, exponential(40, GROWTH)),
    lambda: signal([*exponential(40, 8.0), math.inf]),
    lambda: signal([*exponential(40, 1 / 8), 0.0]),
    lambda: propagate(branched("first", "last"), batch(16, 8)),
]


@pytest.mark.parametrize("make", BAD)
def test_recommendation_names_methods_of_the_registry(make: Callable[[], Signal]) -> None:
    verdict = judge(make())
    assert verdict.at_least("vanishing")
    assert quoted(verdict.recommendation)
    assert set(quoted(verdict.recommendation)) <= set(names())


def test_recommendations_differ_with_the_fault() -> None:
    assert len({judge(make()).recommendation for make in BAD}) == 5


@pytest.mark.parametrize("make", BAD)
def test_only_admitted_methods_are_recommended(make: Callable[[], Signal]) -> None:
    for admitted in (set(), {"fixup"}, {"fixup", "wn"}, {"fixup", "isograd"}):
        verdict = judge(make(), admits=admitted.__contains__)
        assert set(quoted(verdict.recommendation)) <= admitted | {"fixup"}
        assert quoted(verdict.recommendation)


def test_order_of_the_verdicts_is_that_of_harm() -> None:
    assert SEVERITY == ("preserved", "growing", "vanishing", "exploding", "dead branch")
    assert set(SEVERITY) == set(get_args(Status))
    direction = Direction("preserved", 1.0, 1.0, "block0", 1.0)
    for i, status in enumerate(SEVERITY):
        verdict = Verdict(status, direction, direction, (), "", "")
        assert [verdict.at_least(other) for other in SEVERITY] == [j <= i for j in range(len(SEVERITY))]


def test_network_verdict_is_the_worse_of_the_two() -> None:
    both = judge(signal(exponential(40, 1 / GROWTH), exponential(40, 1 / GROWTH)))
    assert (both.forward.status, both.backward.status, both.status) == ("vanishing", "exploding", "exploding")


def test_verdict_is_plain_data() -> None:
    data = judge(signal([1.0] * 5)).to_json()
    assert data["status"] == "preserved"
    assert data["forward"]["worst"].startswith("block")


# Single blocks that stand out.


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
def test_single_broken_block_is_told(place: int) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Scaled()
    sound = judge(propagate(model, batch(8, 3, 12, 12)))
    assert (sound.status, sound.odd, sound.word) == ("preserved", (), "preserved")
    with torch.no_grad():
        model.get_parameter(f"blocks.{place}.last.weight").mul_(50)
    verdict = judge(propagate(model, batch(8, 3, 12, 12)))
    assert verdict.status == "preserved"
    assert [odd.name for odd in verdict.odd] == [f"blocks.{place}"]
    assert verdict.word == f"preserved, but for blocks.{place}"
    (odd,) = verdict.odd
    assert min(odd.forward, odd.backward) > 30
    assert max(odd.usual_forward, odd.usual_backward) < 1.2
    assert f"blocks.{place} stands out: ×{odd.forward:.3g} forward and ×{odd.backward:.3g} backward" in verdict.sentence
    assert verdict.recommendation.startswith(f"look at blocks.{place}: compare its weights")
    assert verdict.at_least("vanishing")
    assert not verdict.at_least("exploding")


def test_forgotten_normalizer_is_told() -> None:
    x = batch(8, 3, 16, 16)
    model = build("resnet56", "batchnorm", generator=torch.Generator().manual_seed(0))
    assert judge(propagate(model, x)).odd == ()
    for name in ("norm1", "norm2"):
        model.set_submodule(f"body.1.6.branch.{name}", nn.Identity())
    verdict = judge(propagate(model, x))
    assert verdict.status in ("preserved", "growing")
    assert [odd.name for odd in verdict.odd] == ["body.1.6"]
    assert verdict.at_least("growing")
    assert not verdict.at_least("vanishing")  # twice what its neighbours do


def test_gradient_that_leaps_alone_is_told() -> None:
    exploding = judge(signal(noisy([1.0] * 40, 0, 0.02), [1e4] * 20 + [1.0] * 20))
    assert (exploding.word, [odd.name for odd in exploding.odd]) == ("exploding, by block20", ["block20"])
    leap = judge(signal(noisy([1.0] * 40, 0, 0.02), [50.0 if i < 20 else 1.0 for i in range(40)]))
    assert (leap.status, [odd.name for odd in leap.odd]) == ("preserved", ["block20"])


def test_block_that_is_taken_back_is_told_once() -> None:
    spike = judge(signal([1e4 if i == 7 else v for i, v in enumerate(noisy([1.0] * 40, 0, 0.02))]))
    assert [odd.name for odd in spike.odd] == ["block7"]


@pytest.mark.parametrize("seed", range(5))
def test_noise_does_not_stand_out(seed: int) -> None:
    for spread in (0.0, 0.02, 0.3, 1.0):
        values = noisy([1.0] * 40, seed, spread)
        assert judge(signal(values, noisy([1.0] * 40, seed + 50, spread))).odd == ()


@pytest.mark.parametrize("name", ["resnet20", "resmlp-16-16", "wrn-16-1", "transformer-2-2-16-32-2"])
def test_no_block_of_a_sound_network_stands_out(name: str) -> None:
    words = torch.randint(4, 50, (4, 6), generator=torch.Generator().manual_seed(0))
    x = (words, words) if name.startswith("transformer") else batch(4, 3, 16, 16)
    for method in filter(lambda method: admits(name, method), names()):
        model = build(name, method, example=x, generator=torch.Generator().manual_seed(0))
        assert judge(propagate(model, x)).odd == (), method


@pytest.mark.parametrize("place", [0, 1, 3])
def test_forgotten_normalizer_in_a_short_stage_is_told(place: int) -> None:
    """Two blocks a stage leave nothing to compare a block's factors with; what its branch puts out does."""
    x = batch(8, 3, 16, 16)
    model = build("resnet20", "batchnorm", generator=torch.Generator().manual_seed(0))
    sums = propagate(model, x).sums
    short = tuple(replace(s, name=f"b{i}", stage=i // 2) for i, s in enumerate(sums[:8]))
    sound = Signal(short, ())
    assert judge(sound).odd == ()
    forgotten = replace(short[place], branch=Stats(0.0, 0.3, 1.0))
    odd = judge(replace(sound, sums=(*short[:place], forgotten, *short[place + 1 :]))).odd
    assert [o.name for o in odd] == [f"b{place}"]
    assert str(odd[0]) == f"b{place} stands out: its branch puts out a variance of 0.3, where others have 1"


def test_forgotten_normalizer_of_a_resnet18_is_told() -> None:
    from normfree.models.foreign import create_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = create_model("torchvision:resnet18")
    x = batch(4, 3, 64, 64)
    assert judge(propagate(model, x)).odd == ()
    model.set_submodule("layer3.1.bn2", nn.Identity())
    verdict = judge(propagate(model, x))
    assert [odd.name for odd in verdict.odd] == ["layer3.1"]
    assert "look at layer3.1" in verdict.recommendation


def test_branches_that_differ_are_not_compared_with_one_another() -> None:
    """The control: where most do not put out the same, or few are alike, no branch is told."""
    flat = signal([1.0] * 8)
    varied = tuple(replace(s, branch=Stats(0.0, 1.3**i, 1.0)) for i, s in enumerate(flat.sums))
    assert judge(replace(flat, sums=varied)).odd == ()
    elsewhere = replace(flat.sums[-1], name="head", branch=Stats(0.0, 9.0, 1.0))
    assert judge(replace(flat, sums=(*flat.sums[:-1], elsewhere))).odd == ()
    assert len(judge(replace(flat, sums=(*flat.sums[:-1], replace(elsewhere, name="block7")))).odd) == 1


def test_one_branch_that_does_not_start_at_zero_is_told() -> None:
    model = build("resnet20", "fixup", generator=torch.Generator().manual_seed(0))
    assert judge(propagate(model, batch(4, 3, 16, 16))).odd == ()
    nn.init.normal_(model.get_parameter("body.1.1.branch.conv2.weight"), std=0.1)
    assert [odd.name for odd in judge(propagate(model, batch(4, 3, 16, 16))).odd] == ["body.1.1"]


# Bugs of single blocks, as people make them.


class Bugs(nn.Module):
    """Six residual blocks with biases; `bug` happens in the fourth."""

    def __init__(self, bug: str = "") -> None:
        super().__init__()
        self.stem, self.out = nn.Linear(16, 16), nn.Linear(16, 3)
        self.blocks = nn.ModuleList(BugBlock(bug if i == 3 else "") for i in range(6))
        self.bug = bug

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i == 3 and self.bug == "cut off":
                x = x.detach()
        return self.out(x)  # type: ignore[no-any-return]


class BugBlock(nn.Module):
    """Two layers with biases and a scale."""

    def __init__(self, bug: str) -> None:
        super().__init__()
        self.first, self.last, self.bug = nn.Linear(16, 16), nn.Linear(16, 16), bug
        if bug == "zeros":
            for p in self.parameters():
                nn.init.zeros_(p)
        if bug == "dead relu":
            nn.init.constant_(self.first.bias, -100.0)
        if bug == "large":
            nn.init.normal_(self.last.weight, std=20.0)

    def forward(self, x: Tensor) -> Tensor:
        f = self.last(self.first(x).relu())
        match self.bug:
            case "no sum":
                return f  # type: ignore[no-any-return]
            case "left out":
                return x
            case "detached":
                f = f.detach()
            case "nan":
                f = f / (f - f)
            case "silent":
                return 0 * (x + f)  # type: ignore[no-any-return]
        return x + 0.3 * f  # type: ignore[no-any-return]


def bugged(bug: str) -> Verdict:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Bugs(bug)
    if bug == "large output":
        nn.init.normal_(model.out.weight, std=1e6)
    return judge(propagate(model, batch(32, 16)))


@pytest.mark.parametrize(
    ("bug", "word", "advice"),
    [
        ("", "preserved", "nothing to do"),
        ("zeros", "dead branch", "look at the branch of blocks.3: two zero layers"),
        ("dead relu", "dead branch", "a ReLU that is never positive"),
        ("detached", "dead branch", "look at the branch of blocks.3: it puts out a signal, but detach()"),
        ("cut off", "vanishing", "look between blocks.3 and the next sum: detach()"),
        ("nan", "exploding", "look at blocks.3: a weight is not finite, or something divides by zero"),
        ("silent", "vanishing", "look between blocks.3 and the next sum"),
        ("large", "exploding, by blocks.3", "look at blocks.3: compare its weights"),
        ("large output", "exploding", "look at the layers between the last block and the output"),
        ("no sum", "vanishing", "look at blocks.3: the forward pass has no sum"),
        ("left out", "preserved", "look at blocks.3: the forward pass has no sum"),
    ],
)
def test_bug_is_told_with_its_place(bug: str, word: str, advice: str) -> None:
    verdict = bugged(bug)
    assert verdict.word == word
    assert advice in verdict.recommendation


def test_branch_whose_bias_alone_learns_stays_dead() -> None:
    """The control of what is called dead: steps move the bias of its last layer, and no weight."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Bugs("zeros")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(batch(16, 16, seed=step)).square().mean().backward()
        optimizer.step()
    block = model.blocks[3]
    assert block.get_parameter("last.bias").any()
    assert not any(block.get_parameter(f"{name}.weight").any() for name in ("first", "last"))


# Gradients behind numbers that are not finite.


@pytest.mark.parametrize("targets", [None, torch.zeros(8, dtype=torch.long)])
def test_gradient_behind_an_overflow_is_not_measured(targets: Tensor | None) -> None:
    """Where the forward signal is not a number some gradients are, but they are those of another network."""
    model = branched()
    with torch.no_grad():
        model.get_parameter("blocks.1.last.weight").fill_(math.inf)
    found = propagate(model, batch(8, 8), targets)
    assert [math.isfinite(v) for v in found.series("sum")] == [True, False, False]
    assert found.unmeasured == "blocks.1"
    for part in ("sum_gradient", "branch_gradient", "shortcut_gradient"):
        assert all(math.isnan(v) for v in found.series(part))
    assert all(math.isnan(layer.gradient_norm) for layer in found.layers)
    verdict = judge(found)
    assert (verdict.status, verdict.forward.status, verdict.forward.broken_at) == ("exploding", "exploding", "blocks.1")
    assert verdict.backward.status == "not measured"
    assert "the gradient is not measured: the forward signal is not a number from blocks.1 on" in verdict.sentence
    assert verdict.dead == ()


def test_output_that_is_not_finite_is_told() -> None:
    model = branched()
    with torch.no_grad():
        model.out.weight.fill_(math.inf)
    verdict = judge(propagate(model, batch(8, 8)))
    assert (verdict.status, verdict.forward.status, verdict.backward.status) == (
        "exploding",
        "preserved",
        "not measured",
    )
    assert "not a number from the output on" in verdict.sentence
    assert "between the last block and the output" in verdict.recommendation


# What 'in all' means.


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("kind", ["preserved", "growing", "exploding", "vanishing"])
def test_total_is_from_end_to_end(kind: str, backward: bool) -> None:
    """Also where stages begin anew, inside which the change is another."""
    stages = [k for k in (1, 2, 3) for _ in range(9)]
    values = {
        "preserved": [1.0 + 0.1 * k for k in stages],
        "growing": linear((9, 9, 9))[0],
        "exploding": [3.0**b for _ in range(3) for b in range(9)],
        "vanishing": [3.0**-b for _ in range(3) for b in range(9)],
    }[kind]
    gradients = [1 / v for v in values] if kind == "growing" else values[::-1]  # growth slows down with depth
    found = judge(signal([1.0] * 27, gradients, stages) if backward else signal(values, stages=stages))
    direction = found.backward if backward else found.forward
    assert direction.status == kind
    travelled = gradients[::-1] if backward else values
    ends = np.median(travelled[-3:]) / np.median(travelled[:3])
    assert direction.total == pytest.approx(ends)
    if kind != "preserved":
        assert abs(math.log(direction.inside)) > 2 * abs(math.log(direction.total))
        assert f"×{direction.inside:.1e} inside stages" in found.sentence or kind == "growing"
