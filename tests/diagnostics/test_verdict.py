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

from normfree.diagnostics.propagation import propagate
from normfree.diagnostics.rules.findings import SEVERITY, SignalStatus
from normfree.diagnostics.rules.growth import Direction
from normfree.diagnostics.signals import Signal
from normfree.diagnostics.verdict import Verdict, judge
from normfree.methods import names
from normfree.models import build
from normfree.report.tables import compact
from signal_oracles import batch, made_up_signal, noisy

GROWTH = 1.3


def exponential(count: int, factor: float) -> list[float]:
    return [factor**i for i in range(count)]


def linear(sizes: Sequence[int], start: float = 1.36, step: float = 0.68) -> tuple[list[float], list[int]]:
    """The variance of a network with batch norm: it grows by 1 - 1/π per block and restarts at every stage."""
    values = [start + step * b for size in sizes for b in range(size)]
    return values, [k for k, size in enumerate(sizes, 1) for _ in range(size)]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("count", [1, 2, 3, 8, 50])
def test_flat_signal_is_preserved(count: int, seed: int) -> None:
    verdict = judge(made_up_signal(noisy([1.0] * count, seed), noisy([1e-6] * count, seed + 1)))
    assert verdict.status == "preserved"
    assert verdict.forward.total == pytest.approx(1, rel=2)
    assert verdict.recommendation == "nothing to do"


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("factor", "count"), [(GROWTH, 40), (2.0, 12), (1.1, 120)])
def test_exponential_growth_forward_explodes(factor: float, count: int, seed: int) -> None:
    verdict = judge(made_up_signal(noisy(exponential(count, factor), seed)))
    assert verdict.status == verdict.forward.status == "exploding"
    assert verdict.backward.status == "preserved"
    assert verdict.forward.factor == pytest.approx(factor, rel=0.1)
    assert math.log(verdict.forward.total) == pytest.approx((count - 1) * math.log(factor), rel=0.1)


@pytest.mark.parametrize("seed", range(5))
def test_exponential_growth_backward_is_counted_from_the_last_block(seed: int) -> None:
    rising = noisy(exponential(40, GROWTH), seed)
    explodes = judge(made_up_signal([1.0] * 40, rising[::-1]))
    assert explodes.status == explodes.backward.status == "exploding"
    assert explodes.backward.factor == pytest.approx(GROWTH, rel=0.1)
    vanishes = judge(made_up_signal([1.0] * 40, rising))
    assert vanishes.status == vanishes.backward.status == "vanishing"
    assert vanishes.backward.factor == pytest.approx(1 / GROWTH, rel=0.1)


@pytest.mark.parametrize("seed", range(5))
def test_exponential_decay_forward_vanishes(seed: int) -> None:
    verdict = judge(made_up_signal(noisy(exponential(40, 1 / GROWTH), seed)))
    assert verdict.status == verdict.forward.status == "vanishing"
    assert verdict.forward.total < 1e-3


@pytest.mark.parametrize("factor", [1.05, 1 / 1.05])
def test_slow_change_over_few_blocks_is_preserved(factor: float) -> None:
    assert judge(made_up_signal(exponential(30, factor), exponential(30, factor))).status == "preserved"
    deep = judge(made_up_signal(exponential(300, factor)))
    assert deep.status == ("exploding" if factor > 1 else "vanishing")


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("sizes", [(50,), (9, 9, 9), (6, 6, 6), (3, 4, 6, 3)])
def test_batch_norm_growth_is_growing(sizes: tuple[int, ...], seed: int) -> None:
    values, stages = linear(sizes)
    verdict = judge(made_up_signal(noisy(values, seed, 0.02), stages=stages))
    assert verdict.status == verdict.forward.status == "growing"
    assert "power of the depth" in verdict.sentence


def test_batch_norm_growth_that_begins_higher_is_growing() -> None:
    """torchvision's sums begin a stage with five blocks' worth of variance."""
    values, stages = linear((12, 12), start=1.7, step=0.34)
    backward = [float(v) ** -4 for v in values]
    verdict = judge(made_up_signal(values, backward, stages))
    assert verdict.forward.status == verdict.backward.status == "growing"


@pytest.mark.parametrize("exponent", [1.0, 2.0])
def test_power_law_backward_is_growing(exponent: float) -> None:
    values = [float(i) ** -exponent for i in range(1, 101)]
    verdict = judge(made_up_signal([1.0] * 100, values))
    assert verdict.status == verdict.backward.status == "growing"
    assert verdict.forward.status == "preserved"


@pytest.mark.parametrize("sizes", [(2, 2, 2, 2), (2, 2, 2)])
def test_stages_of_two_do_not_tell_a_law(sizes: tuple[int, ...]) -> None:
    """A step of 2 in every stage is batch norm's as well as He's; rounding must not decide which."""
    stages = [k for k, size in enumerate(sizes, 1) for _ in range(size)]
    values = [4.0 ** (k - 1) * 2.0 ** (i % 2) for i, k in enumerate(stages)]
    assert {judge(made_up_signal([scale * v for v in values], stages=stages)).status for scale in (1, 0.3, 7.1)} == {
        "preserved"
    }
    steep = [100.0 * v * v for v in values]  # a thousandfold is too much, whatever the law
    assert judge(made_up_signal([v * v for v in steep], stages=stages)).status == "exploding"


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_numbers_that_end_midway_explode_where_they_end(broken: float) -> None:
    forward = judge(made_up_signal([1.0] * 5 + [broken] * 5))
    assert forward.status == forward.forward.status == "exploding"
    assert forward.forward.broken_at == forward.forward.worst == "block5"
    assert "overflows at block5" in forward.sentence
    backward = judge(made_up_signal([1.0] * 10, [broken] * 5 + [1.0] * 5))
    assert backward.backward.broken_at == "block4"  # coming from the last block
    assert backward.status == "exploding"


def test_zeros_vanish_where_they_begin() -> None:
    forward = judge(made_up_signal([1.0] * 5 + [0.0] * 5))
    assert forward.status == "vanishing"
    assert forward.forward.broken_at == "block5"
    assert "is exactly 0 at block5" in forward.sentence
    backward = judge(made_up_signal([1.0] * 10, [0.0] * 5 + [1.0] * 5))
    assert backward.backward.broken_at == "block4"
    assert judge(made_up_signal([0.0] * 10, [0.0] * 10)).status == "vanishing"


@pytest.mark.parametrize("odd", [1e-9, 1e9])
@pytest.mark.parametrize("place", [0, 7, 20, 39])
def test_one_odd_block_does_not_change_a_direction(place: int, odd: float) -> None:
    def with_odd(values: list[float]) -> list[float]:
        return [v * odd if i == place else v for i, v in enumerate(values)]

    assert judge(made_up_signal(with_odd(noisy([1.0] * 40, 0)))).forward.status == "preserved"
    assert judge(made_up_signal(with_odd(noisy(exponential(40, GROWTH), 0)))).forward.status == "exploding"
    odd_gradient = judge(made_up_signal([1.0] * 40, with_odd(noisy(exponential(40, GROWTH), 0))))
    assert odd_gradient.backward.status == "vanishing"


def test_one_odd_block_would_change_a_least_squares_fit() -> None:
    """The control: the slope of a flat signal with one odd block, by least squares and by the verdict."""
    values = [1.0] * 39 + [1e9]
    slope = np.polyfit(np.arange(40), np.log(values), 1)[0]
    assert 39 * slope > math.log(10)
    assert judge(made_up_signal(values)).forward.factor == pytest.approx(1, abs=1e-9)


def test_worst_place_is_named() -> None:
    forward = [1.0] * 10 + [1e4] * 10
    verdict = judge(made_up_signal(forward))
    assert verdict.status == "exploding"
    assert (verdict.forward.worst, verdict.forward.worst_factor) == ("block10", pytest.approx(1e4))
    assert "worst at block10" in verdict.sentence
    backward = judge(made_up_signal([1.0] * 20, [1e4] * 10 + [1.0] * 10)).backward
    assert (backward.worst, backward.worst_factor) == ("block10", pytest.approx(1e4))  # on the way back through it
    vanishing = judge(made_up_signal([1.0] * 10 + [1e-4] * 10)).forward
    assert (vanishing.status, vanishing.worst) == ("vanishing", "block10")


def test_method_of_the_network_is_not_recommended_to_it() -> None:
    values = noisy(exponential(40, GROWTH), 0, 0.01)
    rising = made_up_signal(values)
    assert "use 'fixup'" in judge(rising).recommendation
    assert judge(rising, method="he_in").recommendation == judge(rising).recommendation
    own = judge(rising, method="fixup")
    assert own.recommendation.startswith("it has 'fixup' already")
    assert own.recommendation.endswith(f"look at {own.forward.worst}")
    falling = judge(made_up_signal([1.0] * 40, values[::-1]), method="isograd")
    assert falling.recommendation.endswith(f"look at {falling.backward.worst}")
    assert judge(made_up_signal([1.0] * 9), method="fixup").recommendation == "nothing to do"


def test_restarts_at_stages_do_not_hide_growth() -> None:
    values = [2.0**b for _ in range(3) for b in range(9)]
    verdict = judge(made_up_signal(values, stages=[k for k in (1, 2, 3) for _ in range(9)]))
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
    assert [s.around for s in signal.sums] == ["last"] * 3 + [None]
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
def test_network_is_judged_as_the_papers_say(
    name: str, method: str, forward: SignalStatus, backward: SignalStatus
) -> None:
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
def test_network_is_judged_alike_with_other_seeds(name: str, method: str, wanted: SignalStatus, seed: int) -> None:
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
    lambda: made_up_signal(exponential(40, GROWTH)),
    lambda: made_up_signal(exponential(40, 1 / GROWTH)),
    lambda: made_up_signal([1.0] * 40, exponential(40, 1 / GROWTH)),
    lambda: made_up_signal([1.0] * 40, exponential(40, GROWTH)),
    lambda: made_up_signal([*exponential(40, 8.0), math.inf]),
    lambda: made_up_signal([*exponential(40, 1 / 8), 0.0]),
    lambda: propagate(branched("first", "last"), batch(16, 8)),
]


@pytest.mark.parametrize("make", BAD)
def test_recommendation_names_methods_of_the_registry(make: Callable[[], Signal]) -> None:
    verdict = judge(make())
    assert verdict.at_least("vanishing")
    assert quoted(verdict.recommendation)
    assert set(quoted(verdict.recommendation)) <= set(names())


def test_recommendations_differ_with_the_fault() -> None:
    advice = {judge(make()).recommendation.partition("; the largest change is at ")[0] for make in BAD}
    assert len(advice) == 5


@pytest.mark.parametrize("make", BAD)
def test_only_admitted_methods_are_recommended(make: Callable[[], Signal]) -> None:
    for admitted in (set(), {"fixup"}, {"fixup", "wn"}, {"fixup", "isograd"}):
        verdict = judge(make(), supports=admitted.__contains__)
        assert set(quoted(verdict.recommendation)) <= admitted | {"fixup"}
        assert quoted(verdict.recommendation)


def test_order_of_the_verdicts_is_that_of_harm() -> None:
    assert SEVERITY == ("preserved", "growing", "drifting", "vanishing", "exploding", "faulty", "dead branch")
    assert set(SEVERITY) == set(get_args(SignalStatus))
    direction = Direction("preserved", 1.0, 1.0, "block0", 1.0)
    for i, status in enumerate(SEVERITY):
        verdict = Verdict(status, direction, direction, (), "", "")
        assert [verdict.at_least(other) for other in SEVERITY] == [j <= i for j in range(len(SEVERITY))]


def test_network_verdict_is_the_worse_of_the_two() -> None:
    both = judge(made_up_signal(exponential(40, 1 / GROWTH), exponential(40, 1 / GROWTH)))
    assert (both.forward.status, both.backward.status, both.status) == ("vanishing", "exploding", "exploding")


def test_verdict_is_plain_data() -> None:
    data = judge(made_up_signal([1.0] * 5)).to_json()
    assert data["status"] == "preserved"
    assert data["forward"]["worst"].startswith("block")


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
        ("zeros", "dead branch at blocks.3", "look at the branch of blocks.3: two zero layers"),
        ("dead relu", "dead branch at blocks.3", "a ReLU that is never positive"),
        (
            "detached",
            "dead branch: detached branch at blocks.3",
            "look at the branch of blocks.3: it returns a signal, but detach()",
        ),
        ("cut off", "vanishing: gradient cut at blocks.3", "look between blocks.3 and the next sum: detach()"),
        (
            "nan",
            "exploding: not finite at blocks.3",
            "look at blocks.3; div returns infinity or NaN there: it divides by zero",
        ),
        ("silent", "vanishing: gradient cut at blocks.3", "look between blocks.3 and the next sum"),
        ("large", "exploding: block too large at blocks.3", "look at blocks.3: compare its weights"),
        (
            "large output",
            "exploding: classifier scale at out",
            "look at the layers between the last block and the output",
        ),
        ("no sum", "faulty: forgotten skip at blocks.3", "look at blocks.3: the forward pass has no sum"),
        ("left out", "faulty: forgotten skip at blocks.3", "look at blocks.3: the forward pass has no sum"),
    ],
)
def test_bug_is_reported_with_its_place(bug: str, word: str, advice: str) -> None:
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
    assert "the gradient is not measured: the forward signal is not finite from blocks.1 on" in verdict.sentence
    assert verdict.dead == ()


def test_output_that_is_not_finite_is_reported() -> None:
    model = branched()
    with torch.no_grad():
        model.out.weight.fill_(math.inf)
    verdict = judge(propagate(model, batch(8, 8)))
    assert (verdict.status, verdict.forward.status, verdict.backward.status) == (
        "exploding",
        "preserved",
        "not measured",
    )
    assert "not finite from the output on" in verdict.sentence
    assert "look at out.weight: the weight is not finite" in verdict.recommendation
    with torch.no_grad():
        model.out.weight.fill_(3e38)  # finite, but its products are not
    advice = judge(propagate(model, batch(8, 8))).recommendation
    assert "look at out; linear returns infinity or NaN there: its numbers leave the range" in advice


# What 'in all' means.


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("kind", ["preserved", "growing", "exploding", "vanishing"])
def test_total_is_from_end_to_end(kind: str, backward: bool) -> None:
    """Also if stages restart, so that the change inside them differs."""
    stages = [k for k in (1, 2, 3) for _ in range(9)]
    values = {
        "preserved": [1.0 + 0.1 * k for k in stages],
        "growing": linear((9, 9, 9))[0],
        "exploding": [3.0**b for _ in range(3) for b in range(9)],
        "vanishing": [3.0**-b for _ in range(3) for b in range(9)],
    }[kind]
    gradients = [1 / v for v in values] if kind == "growing" else values[::-1]  # growth slows down with depth
    found = judge(made_up_signal([1.0] * 27, gradients, stages) if backward else made_up_signal(values, stages=stages))
    direction = found.backward if backward else found.forward
    assert direction.status == kind
    travelled = gradients[::-1] if backward else values
    ends = np.median(travelled[-3:]) / np.median(travelled[:3])
    assert direction.total == pytest.approx(ends)
    if kind != "preserved":
        assert abs(math.log(direction.inside)) > 2 * abs(math.log(direction.total))
        assert f"×{compact(direction.inside)} inside stages" in found.sentence or kind == "growing"
