"""Fixup: its weights by formula, its scalars in their places, and an update that does not grow with depth."""

import math
from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normfree.methods import get, initialize_
from normfree.models import Network, build
from normfree.nn.scalars import ScalarBias, ScalarMultiplier
from normfree.plan import Layer
from oracles import log_slope

SIZES = {"resnet20": 32, "wrn-16-1": 32, "resnet50": 64}  # two layers a branch after and before ReLU, three layers


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def weight(model: nn.Module, layer: Layer) -> Tensor:
    return model.get_submodule(layer.name).weight.detach()


def scalar_modules(model: nn.Module) -> list[ScalarBias | ScalarMultiplier]:
    return [m for m in model.modules() if isinstance(m, ScalarBias | ScalarMultiplier)]


def assert_std(w: Tensor, expected: float, *, flat: bool = False) -> None:
    """The weight's standard deviation is `expected` within 5 standard errors of a normal or uniform (`flat`) sample."""
    kurtosis = 1.8 if flat else 3.0
    error = math.sqrt((kurtosis - 1) / (4 * w.numel()))
    assert w.square().mean().sqrt().item() / expected == pytest.approx(1.0, abs=5 * error)


# Weights


@pytest.mark.parametrize(("name", "L", "m"), [("resnet20", 9, 2), ("wrn-16-1", 6, 2), ("resnet50", 16, 3)])
def test_fixup_weights_follow_the_formula(name, L, m):
    model = build(name, "fixup", generator=seeded(0))
    plan = model.plan
    assert len(plan.branches) == L
    assert {branch.degree for branch in plan.branches} == {m}
    for layer in plan.stem:
        w = weight(model, layer)
        assert_std(w, math.sqrt(1 / (3 * w[0].numel())), flat=True)
    for branch in plan.branches:
        for layer in branch.layers[:-1]:
            w = weight(model, layer)
            fan_out = w.shape[0] * w.shape[2] * w.shape[3]
            assert_std(w, math.sqrt((2 if layer.reads_activation else 1) / fan_out) * L ** (-1 / (2 * m - 2)))
        for layer in branch.shortcut_layers:
            w = weight(model, layer)
            assert_std(w, math.sqrt(2 / w.shape[0]))
        assert not weight(model, branch.last).any()
    assert not model.classifier.weight.any()
    assert not model.classifier.bias.any()


def test_fixup_weight_tolerance_tells_neighbouring_exponents_apart():
    L, w = 16, weight(build("resnet50", "fixup", generator=seeded(0)), Layer("body.1.1.branch.conv2"))
    he = math.sqrt(2 / (9 * 128))
    assert_std(w, he * L**-0.25)
    for wrong in (he * L**-0.5, he * L ** (-1 / 6), he * 15**-0.25, he):
        with pytest.raises(AssertionError):
            assert_std(w, wrong)


@pytest.mark.parametrize("name", SIZES)
def test_fixup_logits_are_exactly_zero_at_the_start(name):
    x = torch.randn(2, 3, SIZES[name], SIZES[name], generator=seeded(1))
    with torch.no_grad():
        assert not build(name, "fixup", generator=seeded(0))(x).any()
        assert build(name, "he_out", generator=seeded(0))(x).all()  # the control


@pytest.mark.parametrize("name", SIZES)
def test_fixup_scalars_start_neutral(name):
    scalars = scalar_modules(build(name, "fixup", generator=seeded(0)))
    assert all(m.learnable and m.value.item() == isinstance(m, ScalarMultiplier) for m in scalars)


# Scalars in their places, against a forward pass written out by hand


def subsample(x: Tensor, channels: int) -> Tensor:
    x = x[:, :, ::2, ::2]
    return torch.cat([x, x.new_zeros(len(x), channels - x.shape[1], *x.shape[2:])], dim=1)


def cifar_forward(p: dict[str, Tensor], x: Tensor, n: int) -> Tensor:
    """conv1(x + b1a) + b1b → ReLU → conv2(· + b2a)·scale + b2b, plus shortcut, ReLU."""
    x = F.relu(F.conv2d(x, p["stem.conv.weight"], padding=1) + p["stem.bias.value"])
    for stage in range(3):
        for i in range(n):
            at = f"body.{stage}.{i}."
            b1a, b1b, b2a = p[at + "entry.bias.value"], p[at + "branch.bias1.value"], p[at + "branch.bias2.value"]
            scale, b2b = p[at + "beta.value"], p[at + "delta.value"]
            changes = stage > 0 and i == 0
            out = F.conv2d(x + b1a, p[at + "branch.conv1.weight"], stride=2 if changes else 1, padding=1)
            out = F.conv2d(F.relu(out + b1b) + b2a, p[at + "branch.conv2.weight"], padding=1) * scale + b2b
            x = F.relu(out + (subsample(x + b1a, out.shape[1]) if changes else x))
    return F.linear(x.mean((2, 3)) + p["head.bias.value"], p["classifier.weight"], p["classifier.bias"])


def wide_forward(p: dict[str, Tensor], x: Tensor, n: int) -> Tensor:
    """x + b1 → ReLU → + b2 → conv1 → + b3 → ReLU → + b4 → conv2·scale + b5, plus shortcut."""
    x = F.conv2d(x, p["stem.conv.weight"], padding=1)
    for stage in range(3):
        for i in range(n):
            at = f"body.{stage}.{i}."
            stride = 2 if stage > 0 and i == 0 else 1
            entered = F.relu(x + p[at + "entry.bias1.value"]) + p[at + "entry.bias2.value"]
            out = F.conv2d(entered, p[at + "branch.conv1.weight"], stride=stride, padding=1)
            out = F.relu(out + p[at + "branch.bias1.value"]) + p[at + "branch.bias2.value"]
            out = F.conv2d(out, p[at + "branch.conv2.weight"], padding=1) * p[at + "beta.value"] + p[at + "delta.value"]
            x = out + (F.conv2d(entered, p[at + "shortcut.conv.weight"], stride=2) if stride == 2 else x)
    x = F.relu(x + p["head.bias1.value"]).mean((2, 3)) + p["head.bias2.value"]
    return F.linear(x, p["classifier.weight"], p["classifier.bias"])


def imagenet_forward(p: dict[str, Tensor], x: Tensor) -> Tensor:
    """Bottlenecks of three convolutions, the shortcut a 1×1 convolution of x + b1a."""
    x = F.relu(F.conv2d(x, p["stem.conv.weight"], stride=2, padding=3) + p["stem.bias.value"])
    x = F.max_pool2d(x, 3, 2, 1)
    for stage, count in enumerate((3, 4, 6, 3)):
        for i in range(count):
            at = f"body.{stage}.{i}."
            stride = 2 if stage > 0 and i == 0 else 1
            entered = x + p[at + "entry.bias.value"]
            out = F.relu(F.conv2d(entered, p[at + "branch.conv1.weight"]) + p[at + "branch.bias1.value"])
            out = F.conv2d(out + p[at + "branch.bias2.value"], p[at + "branch.conv2.weight"], stride=stride, padding=1)
            out = F.relu(out + p[at + "branch.bias3.value"]) + p[at + "branch.bias4.value"]
            out = F.conv2d(out, p[at + "branch.conv3.weight"]) * p[at + "beta.value"] + p[at + "delta.value"]
            x = F.relu(out + (F.conv2d(entered, p[at + "shortcut.conv.weight"], stride=stride) if i == 0 else x))
    return F.linear(x.mean((2, 3)) + p["head.bias.value"], p["classifier.weight"], p["classifier.bias"])


REFERENCES: dict[str, tuple[Callable[[dict[str, Tensor], Tensor], Tensor], int, int]] = {
    "resnet14": (lambda p, x: cifar_forward(p, x, 2), 6 * 5 + 2, 16),
    "wrn-16-1": (lambda p, x: wide_forward(p, x, 2), 6 * 6 + 2, 16),
    "resnet50": (imagenet_forward, 16 * 7 + 2, 32),
}


@pytest.mark.parametrize("name", REFERENCES)
def test_fixup_scalars_sit_where_the_authors_put_them(name):
    reference, scalars, size = REFERENCES[name]
    g = seeded(0)
    model = build(name, "fixup", generator=g, dtype=torch.float64)
    with torch.no_grad():
        for p in model.parameters():  # far from the start, where most places would look alike
            if p.numel() == 1:
                p.copy_(p + 0.3 * torch.randn((), generator=g))
            else:
                p.copy_(torch.randn(p.shape, generator=g) * (2 / p[0].numel()) ** 0.5)
    x = torch.randn(2, 3, size, size, generator=g, dtype=torch.float64)
    state = dict(model.named_parameters())
    expected = reference(state, x)
    torch.testing.assert_close(model(x), expected, rtol=1e-9, atol=1e-9)
    found = [p for p in state.values() if p.numel() == 1]
    assert len(found) == scalars
    # The control: every scalar moves the output, so one that stood elsewhere would have been noticed.
    slopes = torch.stack(torch.autograd.grad(expected.square().sum(), found)) / expected.square().sum()
    assert slopes.abs().min() > 1e-6


# Options


@pytest.mark.parametrize("name", ["resnet8", "wrn-10-1"])
def test_fixup_without_biases_keeps_only_the_multipliers(name):
    scalars = scalar_modules(build(name, "fixup:bias=false", generator=seeded(0)))
    assert [type(m) for m in scalars] == [ScalarMultiplier] * 3
    assert any(isinstance(m, ScalarBias) for m in scalar_modules(build(name, "fixup", generator=seeded(0))))


@pytest.mark.parametrize("scale", [0.1, 10.0])
def test_fixup_scale_multiplies_the_first_layers_only(scale):
    plain = build("resnet20", "fixup:bias=false", generator=seeded(0))
    scaled = build("resnet20", f"fixup:scale={scale},bias=false", generator=seeded(0))
    first = {branch.layers[0].name + ".weight" for branch in plain.plan.branches}
    for (key, p), q in zip(plain.named_parameters(), scaled.parameters(), strict=True):
        torch.testing.assert_close(q, p * scale if key in first else p, rtol=1e-5, atol=0)


def test_fixup_without_multipliers_keeps_only_the_biases():
    names = {type(m).__name__ for m in scalar_modules(build("resnet8", "fixup:multiplier=false"))}
    assert names == {"ScalarBias"}
    assert {type(m).__name__ for m in scalar_modules(build("resnet8", "fixup"))} == {"ScalarBias", "ScalarMultiplier"}


@pytest.mark.parametrize("L", [9, 18])
def test_fixup_can_scale_the_last_layers_instead_of_zeroing_them(L):
    plain = build(f"resnet{2 * L + 2}", "fixup", generator=seeded(0))
    scaled = build(f"resnet{2 * L + 2}", "fixup:zero_last=false", generator=seeded(0))
    for branch in scaled.plan.branches:
        w = weight(scaled, branch.last)
        assert_std(w, math.sqrt(2 / (9 * w.shape[0]) / L))
        assert not weight(plain, branch.last).any()
    assert not scaled.classifier.weight.any()


def test_fixup_can_leave_the_classifier_at_the_default():
    model = build("resnet20", "fixup:zero_classifier=false", generator=seeded(0))
    assert_std(model.classifier.weight.detach(), math.sqrt(1 / (3 * 64)), flat=True)
    assert not weight(model, model.plan.branches[0].last).any()


def test_fixup_without_branches_is_its_shortcuts():
    model = build("resnet14", "fixup:branches=false", generator=seeded(0))
    assert all(branch.layers == () for branch in model.plan.branches)
    with torch.no_grad():
        x = torch.randn(2, 3, 16, 16, generator=seeded(1))
        stream = F.relu(F.conv2d(x, model.stem.conv.weight, padding=1))
        expected = subsample(subsample(stream, 32), 64)
        torch.testing.assert_close(model.body(model.stem(x)), expected)


def test_fixup_scalar_rate_is_a_tenth_or_one_over_depth():
    assert get("fixup").scalar_rate.factor(1000) == pytest.approx(0.1)
    assert get("fixup:scalar_lr=0.02").scalar_rate.factor(1000) == pytest.approx(0.02)
    for L in (10, 1000):
        assert get("fixup:scalar_lr=1/L").scalar_rate.factor(L) == pytest.approx(1 / L)


# The size of the first update, Θ(η) at any depth

DEPTHS = [10, 100, 1000]
ETA = 1e-4
WIDTH = 16


@cache
def first_update(L: int, m: int) -> dict[str, float]:
    """‖Δf‖/η of one step on the branch weights with and without the depth scaling, on the scalars at the full rate, and
    on weights and scalars together as the method has it.

    Stem, classifier and data are the same for every L: the generator draws the stem first, and the rest is drawn apart.
    The classifier is N(0, 1/fan_in), because the zero one sends no gradient to the branches and any scaling would pass.
    """
    model = build(f"resmlp-{L}-{WIDTH}-{m}", "fixup", form="pre", size=4, dtype=torch.float64, generator=seeded(0))
    plan = model.plan
    weights = [model.get_submodule(layer.name).weight for branch in plan.branches for layer in branch.layers]
    scalars = [p for p in model.parameters() if p.numel() == 1]
    g = seeded(1)
    x, y = torch.randn(64, 48, generator=g, dtype=torch.float64), torch.randint(10, (64,), generator=g)
    classifier = torch.randn(10, WIDTH, generator=g, dtype=torch.float64) / WIDTH**0.5

    def updates(method: str, rates: dict[str, tuple[float, float]]) -> dict[str, float]:
        """‖Δf‖/η for each pair of rates, of weights and of scalars, as multiples of η."""
        initialize_(model, method, plan, generator=seeded(0))
        with torch.no_grad():
            model.classifier.weight.copy_(classifier)
        before = model(x)
        gradients = torch.autograd.grad(F.cross_entropy(before, y), weights + scalars)
        sizes = {}
        with torch.no_grad():
            for key, (weight_rate, scalar_rate) in rates.items():
                steps = [ETA * (scalar_rate if d.numel() == 1 else weight_rate) * d for d in gradients]
                for sign in (-1, 1):
                    torch._foreach_add_(weights + scalars, steps, alpha=sign)
                    if sign < 0:
                        sizes[key] = ((model(x) - before).norm() / ETA).item()
        return sizes

    tenth, over_depth = (get(spec).scalar_rate.factor(L) for spec in ("fixup", "fixup:scalar_lr=1/L"))
    rates = {"scaled": (1.0, 0.0), "scalars": (0.0, 1.0), "tenth": (1.0, tenth), "over depth": (1.0, over_depth)}
    unscaled = f"fixup:scale={L ** (1 / (2 * m - 2))!r}"
    return {**updates("fixup", rates), **updates(unscaled, {"unscaled": (1.0, 0.0)})}


@pytest.mark.parametrize("m", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_fixup_first_update_does_not_grow_with_depth(m):
    sizes = [first_update(L, m)["scaled"] for L in DEPTHS]
    assert max(sizes) / min(sizes) < 2
    assert min(sizes) > 1e-3  # branches that learn nothing would pass too
    unscaled = [first_update(L, m)["unscaled"] for L in DEPTHS]  # the control
    assert log_slope(DEPTHS, unscaled) == pytest.approx(1.0, abs=0.1)
    assert unscaled[-1] / unscaled[0] > 50


@pytest.mark.parametrize("m", [2, 3])
def test_fixup_scalars_move_the_output_in_proportion_to_depth(m):
    sizes = [first_update(L, m)["scalars"] for L in DEPTHS]
    assert log_slope(DEPTHS[1:], sizes[1:]) == pytest.approx(1.0, abs=0.1)
    over_depth = [
        get("fixup:scalar_lr=1/L").scalar_rate.factor(L) * size for L, size in zip(DEPTHS, sizes, strict=True)
    ]
    assert max(over_depth) / min(over_depth) < 2


@pytest.mark.parametrize("m", [2, 3])
def test_fixup_update_with_scalars_is_bounded_only_at_a_rate_over_depth(m):
    tenth, over_depth = ([first_update(L, m)[rate] for L in DEPTHS] for rate in ("tenth", "over depth"))
    assert max(over_depth) / min(over_depth) < 2
    assert log_slope(DEPTHS[1:], tenth[1:]) > 0.5
    assert tenth[-1] > 5 * tenth[0]


# Who gets a gradient when


def test_fixup_gradients_arrive_in_three_passes():
    model = build("resnet14", "fixup", generator=seeded(0), dtype=torch.float64)
    plan = model.plan
    g = seeded(1)
    x, y = torch.randn(8, 3, 16, 16, generator=g, dtype=torch.float64), torch.randint(10, (8,), generator=g)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    alive: list[set[str]] = []
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        alive.append({key for key, p in model.named_parameters() if p.grad is not None and p.grad.any()})
        optimizer.step()
    weights = {layer.name + ".weight" for layer in plan.layers()}
    lasts = {branch.last.name + ".weight" for branch in plan.branches}
    assert alive[0] == {"classifier.weight", "classifier.bias"}
    assert alive[1] & weights == {"classifier.weight", "stem.conv.weight"} | lasts
    assert alive[2] == {key for key, _ in model.named_parameters()}


def test_gradients_arrive_at_once_without_zero_layers():
    model: Network = build("resnet14", "he_out", generator=seeded(0))  # the control of the test above
    F.cross_entropy(model(torch.randn(8, 3, 16, 16, generator=seeded(1))), torch.arange(8)).backward()
    assert all(p.grad.any() for p in model.parameters())
