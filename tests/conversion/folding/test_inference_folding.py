"""Folding for inference: the function is the same, of pads, convolutions, ReLUs and additions only."""

from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normfree.conversion import convert
from normfree.conversion.folding.inference_folding import fold_
from normfree.methods import get, names
from normfree.models import build
from normfree.models.builder import find_family
from normfree.models.third_party import create_model
from normfree.nn.residual import Residual
from normfree.nn.scalars import ScalarBias, ScalarMultiplier, ScaledModule, add_scalar_
from normfree.nn.weight_layers import WEIGHT_LAYERS, SpectralNormConv2d, WeightNormConv2d, weight_kind

PLAIN = {
    "Network", "PlainNetwork", "Residual", "Sequential", "Identity", "Conv2d", "Linear", "ReLU", "ConstantPad2d",
    "SubsamplePad", "MaxPool2d", "AdaptiveAvgPool2d", "Flatten", "OmittedActivation",
}  # fmt: skip
METHODS = (
    "fixup", "fixup:bias=false", "skipinit", "rezero", "nf", "wn", "small_branch", "hanin", "shao",
    "idshort", "learnscalar", "convshort", "convshort:reads=raw", "isograd", "spectralnorm",
    "normprop",
)  # fmt: skip


@torch.no_grad()
def trained(model: nn.Module, seed: int = 0) -> nn.Module:
    """The model at evaluation with parameters that a method would not start from: nothing zero, no scalar neutral."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.numel() == 1:
            parameter.add_(torch.rand((), generator=generator, dtype=parameter.dtype) * 0.3 + 0.1)
        elif parameter.dim() == 1:
            parameter.normal_(0, 0.2, generator=generator)
        elif not parameter.any():
            parameter.normal_(0, 0.05, generator=generator)
    return model.eval()


def batch(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def deviation(before: nn.Module, after: nn.Module, x: Tensor) -> float:
    """The largest difference of outputs, relative to the largest output."""
    with torch.no_grad():
        expected = before(x)
        assert expected.isfinite().all()
        return ((expected - after(x)).abs().max() / expected.abs().max()).item()


def kinds(model: nn.Module) -> set[str]:
    return {type(module).__name__ for module in model.modules()}


def cases() -> list[tuple[str, str, str]]:
    found = []
    for method in METHODS:
        for model in ("resnet8", "wrn-10-1", "resmlp-3-16"):
            record = get(method)
            if find_family(model)[0].spatial or not record.spatial_only:
                found += [(method, model, form) for form in record.forms]
    return found


@pytest.mark.parametrize(("method", "model", "form"), cases())
def test_folded_network_is_plain_and_computes_the_same(method: str, model: str, form: Any) -> None:
    x = batch(2, 3, 16, 16)
    before = trained(build(model, method, form=form, dtype=torch.float64, example=x))
    after = deepcopy(before)
    record = fold_(after)
    assert deviation(before, after, x) < 1e-10
    assert kinds(after) <= PLAIN
    assert not record.kept
    scalars = [name for name, m in before.named_modules() if isinstance(m, ScalarBias | ScalarMultiplier)]
    assert {fold.name for fold in record.folded} >= set(scalars)
    assert list(record.plain) == [name for name, m in before.named_modules() if weight_kind(m) != "plain"]
    assert not list(after.buffers())
    assert all(p.numel() > 1 for p in after.parameters())


@pytest.mark.parametrize(
    ("model", "method", "size"),
    [
        ("resnet20", "fixup", 32),
        ("resnet20", "shao", 32),
        ("wrn-16-1", "fixup", 32),
        ("wrn-16-1", "nf", 32),
        ("resnet18", "fixup", 32),
        ("resnet50", "fixup", 64),
        ("resnet50", "learnscalar", 64),
        ("cnn-4-8", "wn", 32),
        ("mlp-4-16", "normprop", 28),
    ],
)
def test_larger_network_computes_the_same(model: str, method: str, size: int) -> None:
    x = batch(1, 3, size, size)
    before = trained(build(model, method, dtype=torch.float64, size=size))
    after = deepcopy(before)
    fold_(after)
    assert deviation(before, after, x) < 1e-10
    assert kinds(after) <= PLAIN


NORMALIZED = [name for name in names() if get(name).norm is not None or name == "selu"]


@pytest.mark.parametrize("method", [name for name in NORMALIZED if "residual" in get(name).skips])
def test_network_with_normalizers_is_left_as_it_is(method: str) -> None:
    before = trained(build("resnet8", method, dtype=torch.float64))
    after = deepcopy(before)
    record = fold_(after)
    assert not record.folded
    assert all(isinstance(before.get_submodule(kept.name), nn.BatchNorm2d) for kept in record.kept)
    assert {kept.reason for kept in record.kept} <= {"it is a batch norm, which fold_batchnorm(model, example) folds"}
    assert bool(record.kept) is method.startswith("batchnorm")
    assert kinds(after) == kinds(before)
    assert deviation(before, after, batch(2, 3, 32, 32)) == 0


def test_network_at_initialization_folds() -> None:
    """Zero factors (SkipInit) and zero weights (Fixup) are no obstacle."""
    for method in ("skipinit", "fixup"):
        before = build("resnet8", method, dtype=torch.float64).eval()
        after = deepcopy(before)
        assert not fold_(after).kept
        torch.testing.assert_close(after(batch(2, 3, 32, 32)), before(batch(2, 3, 32, 32)), rtol=0, atol=1e-12)


def test_bias_before_zero_padding_becomes_padding() -> None:
    """conv(pad0(x + b)) = conv of x padded with -b, plus b·ΣW per channel."""
    conv = nn.Conv2d(2, 4, 3, padding=1, groups=2).double()
    after = nn.Sequential(nn.ReLU(), ScalarBias(0.75), deepcopy(conv)).eval()
    record = fold_(after, batch(1, 2, 5, 5))
    x = batch(1, 2, 5, 5)
    torch.testing.assert_close(after(x), conv(x.relu() + 0.75))
    assert record.padded == ("2",)
    assert after[2].pad.value == -0.75
    torch.testing.assert_close(after[2].conv.bias, conv.bias + 0.75 * conv.weight.sum((1, 2, 3)))
    assert torch.equal(after[2].conv.weight, conv.weight)


def test_padding_that_follows_the_signal_needs_no_constant() -> None:
    conv = nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular").double()
    after = nn.Sequential(nn.ReLU(), ScalarBias(0.5), ScalarMultiplier(3.0), deepcopy(conv)).eval()
    record = fold_(after, batch(1, 2, 5, 5))
    torch.testing.assert_close(after(batch(1, 2, 5, 5)), conv(3 * (batch(1, 2, 5, 5).relu() + 0.5)))
    assert not record.padded


def test_zero_padding_left_alone_would_be_seen() -> None:
    """The control: without the constant in the pad the border is wrong."""
    before = trained(build("resnet8", "fixup", dtype=torch.float64))
    after = deepcopy(before)
    fold_(after)
    for module in after.modules():
        if isinstance(module, nn.ConstantPad2d):
            module.value = 0.0
    assert deviation(before, after, batch(2, 3, 32, 32)) > 1e-3


class Wires(nn.Module):
    """x · s joined with x again, and a factor that is read by a ReLU with its sign."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 1)
        self.loop = ScalarMultiplier(0.5)
        self.negative = ScalarMultiplier(-2.0)
        self.bias = ScalarBias(0.3)
        self.last = nn.Conv2d(4, 2, 3, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.stem(x)
        y = x + self.loop(x)
        out = self.last(self.bias(F.relu(self.negative(y))))
        return out, y


def test_multiplier_that_cannot_vanish_stays_with_the_reason() -> None:
    before = Wires().double().eval()
    after = deepcopy(before)
    record = fold_(after, batch(1, 3, 4, 4))
    for ours, theirs in zip(after(batch(1, 3, 4, 4)), before(batch(1, 3, 4, 4)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    assert {kept.name: kept.reason for kept in record.kept} == {
        "loop": "another path fixes a different ratio between the scales of its input and output",
        "negative": "its factor -2 is not positive, and no layer is before it",
    }
    assert [fold.name for fold in record.folded] == ["bias"]
    assert isinstance(after.loop, ScalarMultiplier)
    assert not after.loop.learnable
    assert "kept loop (ScalarMultiplier)" in str(record)


def test_removed_branches_leave_their_biases() -> None:
    """Where nothing but the shortcut is left, no layer can take the bias before an activation."""
    before = trained(build("resnet8", "fixup:branches=false", dtype=torch.float64))
    after = deepcopy(before)
    record = fold_(after)
    assert deviation(before, after, batch(2, 3, 32, 32)) < 1e-10
    assert {kept.reason for kept in record.kept} == {"no layer before it can take it, and its readers need it"}


def test_deep_stream_keeps_a_multiplier_now_and_then() -> None:
    """√½ at every one of 150 sums would be 1e-23 at the end."""
    before = trained(build("resmlp-150-8", "sqrt_half", size=4, dtype=torch.float64))
    after = deepcopy(before)
    record = fold_(after)
    assert len(record.folded) > 10 * len(record.kept) > 0
    assert all("differ by more than 2^20" in kept.reason for kept in record.kept)
    assert deviation(before, after, batch(2, 3, 4, 4)) < 1e-10
    largest = max(m.weight.abs().max().item() for m in after.modules() if isinstance(m, nn.Linear))
    assert largest < 1e7


def test_shared_and_tied_layers_are_left_alone() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.bias = WeightNormConv2d(3, 3, 1), ScalarBias(0.5)
            self.one, self.two = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)
            self.two.weight = self.one.weight
            self.by_function = nn.Linear(5, 5)

        def forward(self, x: Tensor) -> Tensor:
            y = self.bias(self.norm(self.norm(self.bias(x))))
            y = self.two(self.bias(self.one(y)))
            return F.linear(self.by_function(y), self.by_function.weight)

    before = Shared().double().eval()
    after = deepcopy(before)
    record = fold_(after, batch(2, 3, 5, 5))
    assert deviation(before, after, batch(2, 3, 5, 5)) < 1e-12
    assert [kept.name for kept in record.kept] == ["bias"]
    assert type(after.norm) is nn.Conv2d
    assert after.two.weight is after.one.weight


def test_multiplier_held_by_the_weight_is_not_applied_twice() -> None:
    before = trained(build("resnet8", "fixup", dtype=torch.float64))
    after = deepcopy(before)
    with torch.no_grad():
        for module in after.modules():
            if isinstance(module, Residual) and isinstance(module.branch, nn.Sequential):
                module.beta_in_weight = True
                module.branch[-1].weight.mul_(module.beta.value)
    fold_(after)
    assert deviation(before, after, batch(2, 3, 32, 32)) < 1e-10
    assert kinds(after) <= PLAIN


def test_scalars_around_a_layer_fold() -> None:
    layers = [nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), SpectralNormConv2d(4, 2, 3, padding="same")]
    for layer in (layers[0], layers[2]):
        for name, value in (("alpha", 0.5), ("shift", 0.2), ("beta", -1.5), ("delta", 0.4)):
            add_scalar_(layer, name, value, learnable=True)  # type: ignore[arg-type]
    before = nn.Sequential(nn.Tanh(), *layers).double().eval()
    after = deepcopy(before)
    record = fold_(after, batch(1, 3, 6, 6))
    assert deviation(before, after, batch(1, 3, 6, 6)) < 1e-12
    assert not any(isinstance(module, ScaledModule) for module in after.modules())
    assert len(record.folded) == 4
    assert record.plain == ("3",)


class Difference(nn.Module):
    """A residual sum with a sign or a factor, and scalars on both of its sides."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.stem, self.layer, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.scalars = nn.ModuleList([ScalarMultiplier(), ScalarBias(), ScalarMultiplier(), ScalarBias()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.scalars[1](self.scalars[0](torch.relu(self.stem(x))))
        f = self.scalars[3](self.scalars[2](self.layer(x)))
        y = x - f if self.way == "sub" else torch.add(x, f, alpha=2) if self.way == "alpha" else x + f
        return self.last(torch.relu(y))


@pytest.mark.parametrize("way", ["add", "sub", "alpha"])
def test_sum_with_a_sign_or_a_factor_computes_the_same(way: str) -> None:
    before = trained(Difference(way).double())
    after = deepcopy(before)
    fold_(after, batch(3, 4))
    assert deviation(before, after, batch(3, 4)) < 1e-12


@pytest.mark.parametrize("method", ["fixup", "nf", "wn", "hanin"])
def test_converted_model_folds(method: str) -> None:
    x = batch(1, 3, 64, 64)
    model, _ = convert(create_model("torchvision:resnet18"), method=method, example=x.float())
    before = trained(model.double())
    after = deepcopy(before)
    record = fold_(after, x)
    assert deviation(before, after, x) < 1e-10
    assert not record.kept
    assert {type(m) for m in after.modules() if isinstance(m, WEIGHT_LAYERS)} == {nn.Conv2d, nn.Linear}


def test_training_mode_is_refused() -> None:
    model = build("resnet8", "fixup")
    with pytest.raises(ValueError, match=r"evaluation mode, got 'Network' in training mode.*model\.eval\(\)"):
        fold_(model)
    model.eval().stem.train()
    with pytest.raises(ValueError, match="got 'stem' in training mode"):
        fold_(model)


def test_foreign_model_without_an_example_is_refused() -> None:
    with pytest.raises(ValueError, match="expected an example, since Sequential has no attribute input_shape"):
        fold_(nn.Sequential(nn.Linear(2, 2)).eval())


def test_failed_fold_changes_nothing() -> None:
    model = build("resnet8", "fixup").eval()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match="failed"):
        fold_(model, torch.zeros(1, 5, 32, 32))
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_plan_of_a_folded_model_has_the_same_branches() -> None:
    model = build("resnet8", "fixup").eval()
    depths = [branch.degree for branch in model.plan.branches]
    fold_(model)
    assert [branch.degree for branch in model.plan.branches] == depths


class Scaled(nn.Module):
    """A multiplier that is used once, twice or never, or around a module without a weight layer."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times, self.first, self.factor = times, nn.Linear(4, 4), ScalarMultiplier(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(self.times):
            x = self.factor(x).tanh()
        return x


@pytest.mark.parametrize(("times", "reason"), [(0, "it is never called"), (2, "it is used more than once"), (1, None)])
def test_scalar_that_remains_says_why(times: int, reason: str | None) -> None:
    record = fold_(Scaled(times).eval(), torch.randn(2, 4))
    assert [kept.reason for kept in record.kept] == ([] if reason is None else [reason])


def test_model_in_torchscript_is_refused() -> None:
    traced = torch.jit.trace(Scaled(1).eval(), torch.randn(2, 4))
    with pytest.raises(ValueError, match=r"got TorchScript.* in the model; pass the original torch.nn.Module"):
        fold_(traced, torch.randn(2, 4))
