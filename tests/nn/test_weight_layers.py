"""Reparametrized weight layers against numpy and torch, and through copies, autocast, export and compilation."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from normfree.nn.residual import lower_precision_
from normfree.nn.scalars import add_scalar_
from normfree.nn.weight_layers import (
    CONVOLUTIONS,
    LINEARS,
    WeightKind,
    cannot_reparametrize,
    reparametrize_,
    set_weight_,
    stacked_weight,
    weight_kind,
)

KINDS: tuple[WeightKind, ...] = ("plain", "weight_norm", "standardized", "spectral")
SHAPES = ("conv", "linear")
BF16_ROUNDOFF = 2.0**-9
EXPLAINS = r"expected .+, got .+; .+"

every_layer = pytest.mark.parametrize("shape", SHAPES)
every_kind = pytest.mark.parametrize("kind", KINDS)
every_reparametrization = pytest.mark.parametrize("kind", KINDS[1:])


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make(kind: WeightKind, shape: str, *, seed: int = 0, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    """A layer whose every parameter is random: 6 → 5 channels, 3×3, or 6 → 5 features."""
    layer = CONVOLUTIONS[kind](6, 5, 3, **options) if shape == "conv" else LINEARS[kind](6, 5, **options)
    rng = generator(seed)
    layer = layer.to(dtype)
    set_weight_(layer, torch.randn(layer.weight.shape, generator=rng, dtype=dtype))
    with torch.no_grad():
        for name in ("gain", "bias"):
            if getattr(layer, name, None) is not None:
                getattr(layer, name).normal_(generator=rng)
    return layer


def batch(shape: str, *, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn((2, 6, 7, 7) if shape == "conv" else (4, 6), generator=generator(seed), dtype=dtype)


def effective(layer: nn.Module) -> Tensor:
    """The weight that the layer multiplies by, read off its outputs: the responses to unit inputs."""
    units = torch.eye(layer.weight[0].numel(), dtype=layer.weight.dtype)
    if isinstance(layer, nn.Conv2d):
        units = units.view(-1, *layer.weight.shape[1:])
    out = layer(units) - (0 if layer.bias is None else layer(torch.zeros_like(units)))
    return out.flatten(1).mT.reshape(layer.weight.shape)


def by_hand(kind: WeightKind, weight: Tensor, gain: Tensor | None) -> np.ndarray:
    """The formula of each kind in numpy, on the (rows, rest) matrix."""
    v = weight.detach().double().flatten(1).numpy()
    g = None if gain is None else gain.detach().double().flatten(1).numpy()
    match kind:
        case "weight_norm":
            return g * v / np.sqrt((v**2).sum(1, keepdims=True))
        case "standardized":
            return g * (v - v.mean(1, keepdims=True)) / (v.std(1, keepdims=True) * np.sqrt(v.shape[1]))
        case "spectral":
            return v / np.linalg.norm(v, ord=2)
        case _:
            return v


def relative(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


@every_kind
@every_layer
def test_effective_weight_is_the_formula(kind: WeightKind, shape: str) -> None:
    layer = make(kind, shape).eval()
    expected = by_hand(kind, layer.weight, getattr(layer, "gain", None))
    np.testing.assert_allclose(effective(layer).detach().flatten(1).numpy(), expected, rtol=1e-9, atol=1e-10)
    if kind != "plain":
        torch.testing.assert_close(layer.effective_weight(), effective(layer))
        assert relative(layer.weight, effective(layer)) > 0.1  # the control: `weight` itself is something else


@every_kind
@every_layer
def test_kind_is_recognized(kind: WeightKind, shape: str) -> None:
    layer = make(kind, shape)
    assert weight_kind(layer) == kind
    assert isinstance(layer, nn.Conv2d if shape == "conv" else nn.Linear)


@every_reparametrization
@pytest.mark.parametrize(
    "options",
    [
        {"stride": 2, "padding": 1},
        {"padding": 1, "padding_mode": "circular"},
        {"padding": 2, "dilation": 2, "bias": False},
        {"padding": "same"},
    ],
    ids=str,
)
def test_convolution_options_are_those_of_conv2d(kind: WeightKind, options: dict[str, Any]) -> None:
    layer, plain = make(kind, "conv", **options).eval(), make("plain", "conv", **options)
    set_weight_(plain, layer.effective_weight())
    if layer.bias is not None:
        plain.bias.data.copy_(layer.bias)
    torch.testing.assert_close(layer(batch("conv")), plain(batch("conv")), rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["weight_norm", "standardized"])
def test_grouped_convolution_normalizes_the_rows_of_its_group(kind: WeightKind) -> None:
    layer = CONVOLUTIONS[kind](4, 6, 3, groups=2, bias=False).double()
    expected = torch.from_numpy(by_hand(kind, layer.weight, layer.gain)).view_as(layer.weight)
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64, generator=generator(0))
    torch.testing.assert_close(layer(x), F.conv2d(x, expected, groups=2))


# Against torch's own parametrizations


@every_layer
def test_weight_norm_matches_torch_with_gradients(shape: str) -> None:
    ours = make("weight_norm", shape)
    theirs = parametrizations.weight_norm(make("plain", shape))
    stored = theirs.parametrizations.weight
    with torch.no_grad():
        stored.original0.copy_(ours.gain)
        stored.original1.copy_(ours.weight)
        theirs.bias.copy_(ours.bias)
    outputs, inputs = [], []
    for layer in (ours, theirs):
        x = batch(shape).requires_grad_()
        outputs.append(layer(x))
        inputs.append(x)
        outputs[-1].sin().sum().backward()
    torch.testing.assert_close(outputs[0], outputs[1])
    pairs = [(ours.gain, stored.original0), (ours.weight, stored.original1), (ours.bias, theirs.bias), tuple(inputs)]
    for mine, other in pairs:
        assert mine.grad.abs().max() > 1e-3
        torch.testing.assert_close(mine.grad, other.grad)


@every_layer
def test_spectral_norm_matches_torch_with_gradients(shape: str) -> None:
    ours = make("spectral", shape).eval()
    theirs = parametrizations.spectral_norm(make("plain", shape)).eval()
    with torch.no_grad():
        # Unsettled vectors, so that agreement is of the formula and not only at its fixed point.
        ours.left.copy_(F.normalize(torch.randn(5, generator=generator(5)).double(), dim=0))
        ours.power_iteration_()
        theirs.parametrizations.weight.original.copy_(ours.weight)
        theirs.parametrizations.weight[0]._u.copy_(ours.left)
        theirs.parametrizations.weight[0]._v.copy_(ours.right)
        theirs.bias.copy_(ours.bias)
    outputs, inputs = [], []
    for layer in (ours, theirs):
        x = batch(shape).requires_grad_()
        outputs.append(layer(x))
        inputs.append(x)
        outputs[-1].sin().sum().backward()
    torch.testing.assert_close(outputs[0], outputs[1])
    for mine, other in [(ours.weight, theirs.parametrizations.weight.original), (ours.bias, theirs.bias), inputs]:
        torch.testing.assert_close(mine.grad, other.grad)
    # The control: a σ held constant in the backward pass gives another gradient.
    plain = make("plain", shape)
    set_weight_(plain, ours.effective_weight())
    plain.bias.data.copy_(ours.bias)
    plain(batch(shape)).sin().sum().backward()
    sigma = (ours.weight.flatten()[0] / ours.effective_weight().flatten()[0]).item()
    assert relative(plain.weight.grad / sigma, ours.weight.grad) > 1e-3


def test_spectral_power_iteration_is_one_step_a_training_pass() -> None:
    layer = make("spectral", "linear")
    layer.left.copy_(F.normalize(torch.arange(1.0, 6.0).double(), dim=0))
    v, left = layer.weight.detach().numpy(), layer.left.numpy().copy()
    right = v.T @ left / np.linalg.norm(v.T @ left)
    left = v @ right / np.linalg.norm(v @ right)
    out = layer.train()(torch.eye(6).double())
    np.testing.assert_allclose(layer.right.numpy(), right, rtol=1e-12)
    np.testing.assert_allclose(layer.left.numpy(), left, rtol=1e-12)
    np.testing.assert_allclose((out - layer.bias).detach().numpy(), (v / (left @ v @ right)).T, rtol=1e-10, atol=1e-12)
    layer.eval()(torch.eye(6).double())
    np.testing.assert_allclose(layer.left.numpy(), left, rtol=1e-12)  # evaluation leaves the vectors alone


def test_spectral_two_passes_before_one_backward() -> None:
    layer = make("spectral", "conv").train()
    layer.left.copy_(F.normalize(torch.arange(1.0, 6.0).double(), dim=0))
    (layer(batch("conv")) + layer(batch("conv"))).sin().sum().backward()
    assert layer.weight.grad.isfinite().all()


# What each kind promises


@every_layer
def test_standardized_rows_have_mean_zero_and_variance_gain_squared_over_fan_in(shape: str) -> None:
    layer = make("standardized", shape)
    rows = effective(layer).flatten(1)
    torch.testing.assert_close(rows.mean(1), torch.zeros(5).double(), rtol=0, atol=1e-12)
    torch.testing.assert_close(rows.var(1, correction=0), layer.gain.flatten().square() / rows.shape[1])
    for control in (make("plain", shape), make("weight_norm", shape)):
        assert effective(control).flatten(1).mean(1).abs().max() > 1e-2


@every_layer
@pytest.mark.parametrize("size", [(5, 6), (6, 5), (64, 64), (16, 1)])
def test_spectral_largest_singular_value_is_one_after_set_weight(shape: str, size: tuple[int, int]) -> None:
    layer = CONVOLUTIONS["spectral"](*size, 3) if shape == "conv" else LINEARS["spectral"](*size)
    weight = 7.0 * torch.randn(layer.weight.shape, generator=generator(3))
    assert torch.linalg.svdvals(weight.flatten(1))[0] > 2  # the control
    set_weight_(layer, weight)
    for mode in (True, False):
        largest = torch.linalg.svdvals(layer.train(mode).effective_weight().flatten(1))[0].item()
        assert largest == pytest.approx(1.0, abs=1e-5)


@every_layer
@pytest.mark.parametrize("seed", range(5))
def test_spectral_fresh_layer_is_settled_in_evaluation_mode(shape: str, seed: int) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layer = (CONVOLUTIONS["spectral"](6, 5, 3) if shape == "conv" else LINEARS["spectral"](6, 5)).eval()
    assert 0.999 < torch.linalg.svdvals(layer.effective_weight().flatten(1))[0].item() < 1.1


@every_layer
def test_set_weight_makes_the_effective_weight(shape: str) -> None:
    for kind in ("plain", "weight_norm"):
        layer = make(kind, shape)
        target = 3 * torch.randn(layer.weight.shape, generator=generator(9), dtype=torch.float64)
        set_weight_(layer, target)
        torch.testing.assert_close(effective(layer), target)


@every_layer
def test_writing_weight_alone_loses_the_scale_of_weight_norm(shape: str) -> None:
    layer = make("weight_norm", shape)
    target = 3 * torch.randn(layer.weight.shape, generator=generator(9), dtype=torch.float64)
    before = effective(layer).flatten(1).norm(dim=1)
    with torch.no_grad():
        layer.weight.copy_(target)
    assert relative(effective(layer), target) > 0.5
    torch.testing.assert_close(effective(layer).flatten(1).norm(dim=1), before)


@every_layer
def test_weight_norm_zero_rows_keep_a_direction_and_can_learn(shape: str) -> None:
    layer = make("weight_norm", shape)
    target = torch.randn(layer.weight.shape, generator=generator(9), dtype=torch.float64)
    target[1] = 0
    set_weight_(layer, target)
    torch.testing.assert_close(effective(layer), target)
    set_weight_(layer, torch.zeros_like(target))
    assert effective(layer).abs().max() == 0
    layer(batch(shape)).sin().sum().backward()
    assert (layer.gain.grad.flatten().abs() > 1e-6).all()


@every_kind
@every_layer
def test_set_weight_works_on_meta(kind: WeightKind, shape: str) -> None:
    with torch.device("meta"):
        layer = CONVOLUTIONS[kind](6, 5, 3) if shape == "conv" else LINEARS[kind](6, 5)
        set_weight_(layer, torch.empty(layer.weight.shape))
    assert layer(batch(shape, dtype=torch.float32).to("meta")).is_meta


def test_set_weight_refuses_a_layer_without_weight() -> None:
    with pytest.raises(ValueError, match=EXPLAINS) as caught:
        set_weight_(nn.ReLU(), torch.ones(1))
    assert "convolution or linear" in str(caught.value)
    assert "got ReLU; pass the layer itself" in str(caught.value)


@every_kind
@every_layer
def test_effective_weight_ignores_the_scale_of_the_stored_one(kind: WeightKind, shape: str) -> None:
    layer = make(kind, shape).eval()
    before = effective(layer).detach()
    with torch.no_grad():
        layer.weight.mul_(4.0)
    changed = relative(effective(layer), before)
    assert changed > 1 if kind == "plain" else changed < 1e-10


@every_kind
@every_layer
def test_effective_weight_ignores_scale_row_by_row_but_for_spectral(kind: WeightKind, shape: str) -> None:
    layer = make(kind, shape).eval()
    before = effective(layer).detach()
    factors = torch.linspace(1, 3, 5, dtype=torch.float64).view(-1, *[1] * (layer.weight.dim() - 1))
    with torch.no_grad():
        layer.weight.mul_(factors)
    if kind == "spectral":
        layer.power_iteration_(200)
    changed = relative(effective(layer), before)
    assert changed < 1e-10 if kind in ("weight_norm", "standardized") else changed > 0.1


@every_kind
@every_layer
def test_effective_weight_ignores_a_shift_of_the_rows_only_when_standardized(kind: WeightKind, shape: str) -> None:
    layer = make(kind, shape).eval()
    before = effective(layer).detach()
    with torch.no_grad():
        layer.weight.add_(torch.linspace(1, 3, 5).double().view(-1, *[1] * (layer.weight.dim() - 1)))
    changed = relative(effective(layer), before)
    assert changed < 1e-10 if kind == "standardized" else changed > 0.1


# What each kind survives


@every_reparametrization
@every_layer
def test_gradients_pass_gradcheck(kind: WeightKind, shape: str) -> None:
    layer = make(kind, shape).eval()
    names = [name for name, _ in layer.named_parameters()]
    values = [p.detach().clone().requires_grad_() for p in layer.parameters()]
    x = (batch(shape) if shape == "linear" else batch(shape)[:1, :, :4, :4]).clone().requires_grad_()

    def run(x: Tensor, *parameters: Tensor) -> Tensor:
        return functional_call(layer, dict(zip(names, parameters, strict=True)), (x,))

    assert torch.autograd.gradcheck(run, (x, *values), fast_mode=False)


@every_kind
@every_layer
def test_deepcopy_is_equal_and_independent(kind: WeightKind, shape: str) -> None:
    layer = make(kind, shape)
    layer(batch(shape)).sum().backward()  # a copy after use is where weights computed by hooks fail
    twin = copy.deepcopy(layer)
    layer.eval()
    twin.eval()
    before = layer(batch(shape))
    torch.testing.assert_close(twin(batch(shape)), before, rtol=0, atol=0)
    with torch.no_grad():
        for tensor in (*twin.parameters(), *twin.buffers()):
            tensor.add_(1.0)
    torch.testing.assert_close(layer(batch(shape)), before, rtol=0, atol=0)
    assert relative(twin(batch(shape)), before) > 0.05


@every_kind
@every_layer
def test_state_dict_round_trip_gives_the_same_layer(kind: WeightKind, shape: str) -> None:
    layer, fresh = make(kind, shape).eval(), make(kind, shape, seed=7).eval()
    assert relative(fresh(batch(shape)), layer(batch(shape))) > 0.05
    fresh.load_state_dict(layer.state_dict(), strict=True)
    torch.testing.assert_close(fresh(batch(shape)), layer(batch(shape)), rtol=0, atol=0)


@every_kind
@every_layer
@pytest.mark.parametrize("training", [True, False])
def test_autocast_gives_bf16_near_float32(kind: WeightKind, shape: str, training: bool) -> None:
    layer = make(kind, shape, dtype=torch.float32).train(training)
    x = batch(shape, dtype=torch.float32)
    exact = layer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x)
    assert out.dtype == torch.bfloat16
    # Input, weight and output are rounded once each; rounding errors add at worst.
    assert 0 < relative(out, exact) < 3 * BF16_ROUNDOFF
    out.float().square().sum().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in layer.parameters())


def test_autocast_keeps_the_singular_vectors_in_float32() -> None:
    layer = make("spectral", "linear", dtype=torch.float32).train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(5):
            layer(batch("linear", dtype=torch.float32))
    assert torch.linalg.svdvals(layer.eval().effective_weight())[0].item() == pytest.approx(1.0, abs=1e-6)


@every_kind
@every_layer
@pytest.mark.parametrize("training", [True, False])
def test_bf16_layer_is_near_float32(kind: WeightKind, shape: str, training: bool) -> None:
    layer = make(kind, shape, dtype=torch.float32).train(training)
    x = batch(shape, dtype=torch.float32)
    exact = layer(x)
    out = layer.to(torch.bfloat16)(x.to(torch.bfloat16))
    assert {t.dtype for t in (out, *layer.parameters(), *layer.buffers())} == {torch.bfloat16}
    # Besides input, weight and output: the stored weight, the gain or the two singular vectors, and the bias.
    assert 0 < relative(out, exact) < 6 * BF16_ROUNDOFF
    out.float().square().sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


@every_kind
@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("inputs", [True, False])
def test_channels_last_gives_the_same_output(kind: WeightKind, weights: bool, inputs: bool) -> None:
    layer = make(kind, "conv").eval()
    x = batch("conv")
    expected = layer(x)
    if weights:
        layer = layer.to(memory_format=torch.channels_last)
        assert layer.weight.is_contiguous(memory_format=torch.channels_last)
    if inputs:
        x = x.to(memory_format=torch.channels_last)
    torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-12)


@every_kind
@every_layer
@pytest.mark.parametrize("training", [False, True])
def test_export_equals_eager(kind: WeightKind, shape: str, training: bool) -> None:
    layer = make(kind, shape, dtype=torch.float32).train(training)
    if kind == "spectral":  # unsettled, so that a training pass has something to do
        layer.left.copy_(F.normalize(torch.arange(1.0, 6.0), dim=0))
    x = batch(shape, dtype=torch.float32)
    exported = torch.export.export(copy.deepcopy(layer), (x,)).module()
    for _ in range(2):  # a training pass of the spectral kind moves its vectors, in both
        torch.testing.assert_close(exported(x), layer(x), rtol=0, atol=0)
    for name, buffer in layer.named_buffers():
        torch.testing.assert_close(exported.get_buffer(name), buffer, rtol=0, atol=0)


@every_kind
@every_layer
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_lowered_layer_multiplies_by_its_rounded_weight(
    kind: WeightKind, shape: str, bias: bool, dtype: torch.dtype
) -> None:
    """The effective weight is computed in float32 and rounded once, so the layer equals a plain one that holds it."""
    layer = make(kind, shape, dtype=torch.float32, bias=bias).eval()
    if kind == "spectral":
        layer.weight.data *= 3.0
    weight = layer.effective_weight().detach() if kind != "plain" else layer.weight.detach().clone()
    plain = make("plain", shape, dtype=dtype, bias=bias)
    with torch.no_grad():
        plain.weight.copy_(weight)
        if bias:
            plain.bias.copy_(layer.bias)
    parameters = dict(layer.named_parameters())
    assert lower_precision_(layer, dtype) is layer
    assert all(parameters[name] is p for name, p in layer.named_parameters())
    for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
        assert tensor.dtype is (dtype if kind == "plain" or name == "bias" else torch.float32), name
    x = batch(shape, dtype=torch.float32).to(dtype)
    out = layer(x)
    assert out.dtype is dtype
    assert torch.equal(out, plain(x))
    out.float().square().sum().backward()
    assert all(p.grad.dtype is p.dtype and p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_compile_equals_eager_with_gradients() -> None:
    layers = [make(kind, "conv", dtype=torch.float32, padding=1) for kind in KINDS]
    for i, layer in enumerate(layers[1:], start=1):  # 6 → 5 channels each: pad back to 6 between them
        layers[i] = nn.Sequential(nn.ConstantPad3d((0, 0, 0, 0, 0, 1), 0.1), layer)
    dense = [nn.Linear(5 * 49, 6)]
    for kind in KINDS:
        dense += [make(kind, "linear", dtype=torch.float32), nn.ConstantPad1d((0, 1), 0.1)]
    model = nn.Sequential(*layers, nn.Flatten(), *dense)
    twin = copy.deepcopy(model)
    compiled = torch.compile(twin)
    x = batch("conv", dtype=torch.float32)
    for _ in range(2):
        expected, out = model(x), compiled(x)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
        for result in (expected, out):
            result.square().sum().backward()
    for (name, mine), other in zip(twin.named_parameters(), model.parameters(), strict=True):
        assert other.grad.abs().max() > 0, name
        assert relative(mine.grad, other.grad) < 1e-4, name
    for (name, mine), other in zip(twin.named_buffers(), model.buffers(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5, msg=name)


def test_set_weight_goes_through_a_parametrization_of_torch() -> None:
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(6, 5))
    target = torch.randn(5, 6, generator=generator(9))
    set_weight_(layer, target)
    torch.testing.assert_close(layer.weight, target)


class Triu(nn.Module):
    """Keeps the upper triangle; has no inverse."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu()


def computed_layers() -> list[nn.Module]:
    own = nn.Linear(6, 6)
    nn.utils.parametrize.register_parametrization(own, "weight", Triu())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hooked = nn.utils.weight_norm(nn.Linear(6, 6))
    return [own, hooked, nn.utils.parametrizations.orthogonal(nn.Linear(6, 6))]


@pytest.mark.parametrize("layer", computed_layers(), ids=["own", "hooked", "orthogonal"])
def test_set_weight_refuses_a_weight_that_does_not_become_what_is_set(layer: nn.Module) -> None:
    with pytest.raises(ValueError, match=r"at 'block.weight', got one that \w+ computes .*remove_parametrizations"):
        set_weight_(layer, torch.ones(6, 6), name="block.weight")


row_kinds = pytest.mark.parametrize("kind", ["weight_norm", "standardized"])


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Stored(nn.Module):
    """A linear layer whose weight lies as (in, out), as in GPT-2."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs, generator=seeded()))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class Narrow(nn.Linear):
    """Somebody's own class with the forward pass of a linear layer."""


@row_kinds
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_order_of_storage_changes_no_number(kind: WeightKind, dtype: torch.dtype) -> None:
    stored, plain = Stored(9, 4), nn.Linear(9, 4)
    plain.weight.data = stored.weight.detach().mT.clone()
    reparametrize_(stored, kind, transposed=True)
    reparametrize_(plain, kind)
    for layer in (stored, plain):
        layer.to(dtype)
    torch.testing.assert_close(stored.effective_weight().mT, plain.effective_weight(), rtol=0, atol=0)


@row_kinds
@pytest.mark.parametrize("transposed", [False, True])
def test_constant_row_is_no_division_by_zero_in_half_precision(kind: WeightKind, transposed: bool) -> None:
    layer: nn.Module = Stored(4, 3) if transposed else nn.Linear(4, 3)
    with torch.no_grad():
        (layer.weight.mT if transposed else layer.weight)[0].zero_()
    reparametrize_(layer, kind, transposed=transposed)
    layer.half()
    assert layer.effective_weight().isfinite().all()


@pytest.mark.parametrize("transposed", [False, True])
def test_single_weight_cannot_be_standardized(transposed: bool) -> None:
    layer: nn.Module = Stored(1, 3) if transposed else nn.Linear(1, 3)
    assert "no variance" in str(cannot_reparametrize(layer, "standardized", transposed=transposed))
    assert cannot_reparametrize(layer, "weight_norm", transposed=transposed) is None


@row_kinds
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.Conv1d(3, 4, 3), (2, 3, 7)),
        (lambda: nn.Conv2d(3, 4, 3), (2, 3, 7, 7)),
        (lambda: nn.Conv3d(3, 4, 3), (2, 3, 7, 7, 7)),
        (lambda: Narrow(3, 4), (2, 3)),
        (lambda: Stored(3, 4), (2, 3)),
    ],
    ids=["Conv1d", "Conv2d", "Conv3d", "Narrow", "Stored"],
)
def test_layer_is_copied_and_pickled(make, shape: tuple[int, ...], kind: WeightKind, scaled: bool) -> None:
    layer = make()
    reparametrize_(layer, kind, transposed=isinstance(layer, Stored))
    if scaled:
        add_scalar_(layer, "beta", 0.5, learnable=True)
    x = torch.randn(shape, generator=seeded(1))
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(other) is type(layer)
        assert torch.equal(other(x), layer(x))


@pytest.mark.parametrize("kind", ["plain", "spectral"])
def test_layers_without_a_gain_per_row_cannot_be_stacked(kind: WeightKind) -> None:
    with pytest.raises(ValueError, match=f"expected layers of the kind weight_norm or standardized.*got '{kind}'"):
        stacked_weight(kind, torch.ones(2, 3, 4), torch.ones(2, 3, 1))
