"""Scalars: values, no promotion of types, copies and state dicts, around any module, in a convolution's weight."""

from __future__ import annotations

import copy
import doctest
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

from normfree.nn import scalars
from normfree.nn.normalizers import DynamicTanh
from normfree.nn.scalars import ScalarBias, ScalarMultiplier, ScalarName, ScaledConvolution, add_scalar_, scalars_of
from normfree.nn.weight_layers import WeightKind, reparametrize_, weight_kind

KINDS = (ScalarBias, ScalarMultiplier)
HALVES = (torch.bfloat16, torch.float16)


def test_doctests_pass() -> None:
    result = doctest.testmod(scalars, optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    assert result.attempted >= 2
    assert result.failed == 0


def test_scalar_bias_adds_and_multiplier_multiplies() -> None:
    x = torch.tensor([-2.0, 0.0, 3.0])
    torch.testing.assert_close(ScalarBias(0.5)(x), torch.tensor([-1.5, 0.5, 3.5]), rtol=0, atol=0)
    torch.testing.assert_close(ScalarMultiplier(0.5)(x), torch.tensor([-1.0, 0.0, 1.5]), rtol=0, atol=0)


def test_scalar_defaults_are_neutral_and_learnable() -> None:
    x = torch.tensor([-2.0, 0.0, 3.0])
    for kind in KINDS:
        assert torch.equal(kind()(x), x)
        assert [name for name, _ in kind().named_parameters()] == ["value"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(), (7,), (64, 33), (4, 8, 5, 5)])
def test_scalar_computes_as_a_number_without_dimensions(
    kind: type[ScalarBias | ScalarMultiplier], shape: tuple[int, ...]
) -> None:
    """Sum, product and both gradients are the same bit for bit, and the shape is that of the input."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).requires_grad_()
    sent = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    module, number = kind(0.3), torch.tensor(0.3, requires_grad=True)
    expected = x + number if kind is ScalarBias else x * number
    out = module(x)
    assert out.shape == x.shape
    assert torch.equal(out, expected)
    of_x, of_value = torch.autograd.grad(out, (x, module.value), sent)
    for got, wanted in zip((of_x, of_value[0]), torch.autograd.grad(expected, (x, number), sent), strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("learnable", [True, False])
@pytest.mark.parametrize("dtype", HALVES)
def test_scalar_does_not_promote_half_precision(
    kind: type[ScalarBias | ScalarMultiplier], learnable: bool, dtype: torch.dtype
) -> None:
    module = kind(0.5, learnable=learnable)
    assert module.value.dtype == torch.float32
    assert module.value.shape == (1,)
    x = torch.ones(3, dtype=dtype, requires_grad=True)
    out = module(x)
    assert out.dtype == dtype
    out.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == dtype
    assert not learnable or module.value.grad.dtype == torch.float32


@pytest.mark.parametrize("dtype", HALVES)
def test_scalar_with_a_dimension_would_promote(dtype: torch.dtype) -> None:
    x = torch.ones(3, dtype=dtype)
    assert (x * nn.Parameter(torch.ones(1))).dtype == torch.float32
    assert (x * nn.Parameter(torch.ones(()))).dtype == dtype


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("learnable", [True, False])
def test_scalar_deepcopy_is_independent(kind: type[ScalarBias | ScalarMultiplier], learnable: bool) -> None:
    module = kind(0.25, learnable=learnable)
    module(torch.ones(2)).sum()
    twin = copy.deepcopy(module)
    assert (twin.value.item(), twin.learnable) == (0.25, learnable)
    twin.set_(4.0)
    assert (module.value.item(), twin.value.item()) == (0.25, 4.0)
    assert isinstance(twin.value, nn.Parameter) == learnable


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("saved", [True, False])
@pytest.mark.parametrize("loaded", [True, False])
def test_scalar_state_dict_loads_whether_it_learns_or_not(
    kind: type[ScalarBias | ScalarMultiplier], saved: bool, loaded: bool
) -> None:
    module, fresh = kind(0.25, learnable=saved), kind(learnable=loaded)
    assert list(module.state_dict()) == ["value"]
    assert fresh.value.item() != 0.25
    fresh.load_state_dict(module.state_dict())
    assert fresh.value.item() == 0.25


@pytest.mark.parametrize("kind", KINDS)
def test_scalar_set_keeps_the_tensor(kind: type[ScalarBias | ScalarMultiplier]) -> None:
    module = kind(0.25)
    before = module.value
    module.set_(0.75)
    assert module.value is before
    assert before.item() == 0.75
    assert before.requires_grad
    assert before.grad_fn is None


def test_scalar_repr_shows_the_number_or_meta() -> None:
    assert repr(ScalarBias(0.5)) == "ScalarBias(0.5, learnable=True)"
    assert repr(ScalarMultiplier(2, learnable=False).to("meta")) == "ScalarMultiplier(meta, learnable=False)"


def _scaled() -> nn.Module:
    layer = nn.Linear(2, 1)
    add_scalar_(layer, "beta", 0.5, learnable=True)
    add_scalar_(layer, "shift", 0.25, learnable=False)
    return layer


STORED = {
    "bias": lambda: ScalarBias(0.5),
    "fixed multiplier": lambda: ScalarMultiplier(0.5, learnable=False),
    "scaled layer": _scaled,
    "dynamic tanh": lambda: DynamicTanh(3),
    "inside another module": lambda: nn.Sequential(nn.Linear(2, 2), ScalarBias(0.5)),
}


@pytest.mark.parametrize("kind", STORED)
def test_scalars_have_one_dimension_and_load_without_one(kind: str) -> None:
    module, other = STORED[kind](), STORED[kind]()
    assert all(p.dim() > 0 for p in [*module.parameters(), *module.buffers()])
    numbers = {name for name, t in module.state_dict().items() if t.shape == (1,)}
    before = {n: t.reshape(()).clone() + 1 if n in numbers else t.clone() for n, t in module.state_dict().items()}
    other.load_state_dict(before)
    assert all(torch.equal(t, before[name].reshape(t.shape)) for name, t in other.state_dict().items())
    assert all(before[name].dim() == 0 for name in numbers)  # the caller's dictionary is unchanged
    before[next(iter(numbers))] = torch.zeros(2)
    with pytest.raises(RuntimeError, match="size mismatch"):
        other.load_state_dict(before)


class Found(NamedTuple):
    y: Tensor
    rest: int


class Named(nn.Linear):
    def forward(self, input: Tensor) -> Found:
        return Found(super().forward(input), 3)


class Pair(nn.Linear):
    def forward(self, input: Tensor) -> tuple[Tensor, int]:
        return super().forward(input), 3


@pytest.mark.parametrize(("kind", "out"), [(Named, Found), (Pair, tuple)])
def test_tuple_keeps_its_type(kind: type[nn.Linear], out: type) -> None:
    layer, x = kind(2, 2), torch.ones(1, 2)
    plain = layer(x)
    add_scalar_(layer, "beta", 0.5, learnable=True)
    assert type(layer(x)) is out
    torch.testing.assert_close(layer(x)[0], 0.5 * plain[0])
    assert layer(x)[1] == 3


CONVOLUTIONS: dict[str, Callable[[], nn.Module]] = {
    "point": lambda: nn.Conv2d(4, 6, 1, bias=False),
    "strided": lambda: nn.Conv2d(4, 6, 3, stride=2, groups=2),
    "zeros": lambda: nn.Conv2d(4, 6, 3, padding=1),
    "uneven": lambda: nn.Conv2d(4, 6, (1, 4), padding="same", bias=False),
    "valid": lambda: nn.Conv2d(4, 6, 3, padding="valid"),
    "circular": lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular", bias=False),
    "line": lambda: nn.Conv1d(4, 6, 3, dilation=2),
    "volume": lambda: nn.Conv3d(4, 6, 2, bias=False),
}
AXES = {"line": 1, "volume": 3}


def convolution(name: str, kind: WeightKind = "plain") -> nn.Module:
    """A convolution with random parameters in double precision."""
    torch.manual_seed(0)
    layer = CONVOLUTIONS[name]().double()
    if kind != "plain":
        reparametrize_(layer, kind)
        nn.init.uniform_(layer.gain, 0.5, 1.5)
    return layer


def gradients(layer: nn.Module, x: Tensor, run: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """The output of a layer, and the gradients of a random weighted sum of it: of the input and of all parameters."""
    torch.manual_seed(1)
    y = run(x)
    of = [x, *[p for p in layer.parameters() if p.requires_grad]]
    return [y, *torch.autograd.grad((y * torch.randn_like(y)).sum(), of)]


def written_out(layer: Any, x: Tensor) -> Tensor:
    """The equation of `ScaledModule`, around a forward pass of torch's own."""
    held: dict[str, Tensor] = scalars_of(layer)
    alpha, beta = (held[name].sum() if name in held else 1.0 for name in ("alpha", "beta"))
    shift, delta = (held[name].sum() if name in held else 0.0 for name in ("shift", "delta"))
    weight = layer.weight if weight_kind(layer) == "plain" else layer.effective_weight()
    return beta * layer._conv_forward(alpha * x + shift, weight, layer.bias) + delta


@pytest.mark.filterwarnings("ignore:Using padding=.same.")
@pytest.mark.parametrize("kind", ["plain", "standardized", "weight_norm"])
@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize(
    "scalars", [("alpha", "shift", "beta", "delta"), ("shift",), ("delta",), ("beta",), ("alpha", "shift")]
)
def test_scalars_of_a_convolution_compute_their_equation(
    name: str, kind: WeightKind, scalars: tuple[ScalarName, ...]
) -> None:
    """Output and all gradients, in double precision."""
    layer = convolution(name, kind)
    for i, scalar in enumerate(scalars):
        add_scalar_(layer, scalar, 0.7 - 0.4 * i, learnable=True)
    assert isinstance(layer, ScaledConvolution)
    x = torch.randn(3, 4, *(7,) * AXES.get(name, 2), dtype=torch.double, requires_grad=True)
    expected = gradients(layer, x, lambda x: written_out(layer, x))
    for found, value in zip(gradients(layer, x, layer), expected, strict=True):
        torch.testing.assert_close(found, value, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("name", ["zeros", "uneven"])
def test_bias_in_front_of_zeros_is_not_part_of_the_layers_bias(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above: a bias that the padding had as well changes the border."""
    layer = convolution(name)
    add_scalar_(layer, "shift", 0.5, learnable=True)
    x = torch.randn(3, 4, 7, 7, dtype=torch.double)
    right = layer(x)
    monkeypatch.setattr(ScaledConvolution, "_pads_with_zeros", lambda _: False)
    wrong = (layer(x) - right).abs().amax((0, 1)) > 1e-6
    assert wrong.any()
    assert not wrong[1:-2, 1:-2].any() if name == "zeros" else not wrong[:, 1:-2].any()


@pytest.mark.parametrize("kind", ["plain", "standardized"])
def test_scalars_of_a_convolution_keep_no_activation_but_the_input(kind: WeightKind) -> None:
    layer = convolution("point", kind)
    for scalar in ("alpha", "shift", "beta", "delta"):
        add_scalar_(layer, scalar, 0.5, learnable=True)
    x = torch.randn(16, 4, 9, 9, dtype=torch.double, requires_grad=True)

    def kept(run: Callable[[Tensor], Tensor]) -> int:
        found: dict[int, int] = {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: found.update({t.data_ptr(): t.numel()}) or t, lambda t: t
        ):
            y = run(x)
        assert y.shape == (16, 6, 9, 9)
        return sum(size for size in found.values() if size >= x.numel())

    assert kept(layer) == x.numel()
    assert kept(lambda x: written_out(layer, x)) == x.numel() * 2 + x.numel() * 6 // 4  # α · x too, and the output


@pytest.mark.parametrize("kind", ["plain", "standardized"])
@pytest.mark.parametrize("name", ["point", "zeros"])
def test_compiled_scaled_convolution_is_one_graph_with_the_same_gradients(name: str, kind: WeightKind) -> None:
    """Compiled training adds the constants as images; see `add_as_image`."""
    layer = convolution(name, kind)
    for scalar in ("shift", "beta", "delta"):
        add_scalar_(layer, scalar, 0.5, learnable=True)
    x = torch.randn(2, 4, 7, 7, dtype=torch.double, requires_grad=True)
    expected = gradients(layer, x, lambda x: written_out(layer, x))
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for found, value in zip(gradients(layer, x, compiled), expected, strict=True):
        torch.testing.assert_close(found, value, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("kind", ["plain", "standardized"])
def test_scaled_convolution_in_half_precision(kind: WeightKind) -> None:
    layer = convolution("zeros", kind).float()
    for scalar in ("alpha", "shift", "beta", "delta"):
        add_scalar_(layer, scalar, 0.5, learnable=True)
    x = torch.randn(2, 4, 7, 7).to(memory_format=torch.channels_last)
    with torch.autocast("cpu", torch.bfloat16):
        short = layer(x)
        again = layer(x.bfloat16())
    assert short.dtype == again.dtype == torch.bfloat16
    assert short.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(short.float(), layer(x), rtol=0.03, atol=0.03)
    torch.testing.assert_close(short, again, rtol=0.03, atol=0.03)


class Doubled(nn.Conv2d):
    """A convolution with a forward pass of its own."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def test_convolution_with_its_own_forward_pass_is_scaled_from_outside() -> None:
    layer, x = Doubled(2, 2, 1), torch.randn(1, 2, 3, 3)
    plain = layer(x + 0.25)
    add_scalar_(layer, "shift", 0.25, learnable=True)
    add_scalar_(layer, "beta", 3.0, learnable=True)
    assert not isinstance(layer, ScaledConvolution)
    torch.testing.assert_close(layer(x), 3 * plain)


def test_scaled_convolution_still_needs_an_input_of_its_own_type() -> None:
    layer = convolution("point")
    add_scalar_(layer, "beta", 3.0, learnable=True)
    with pytest.raises(RuntimeError, match=r"same|dtype|type"):
        layer(torch.randn(1, 4, 3, 3))


def test_weight_larger_than_the_input_is_not_scaled_in_eager_mode() -> None:
    layer = convolution("point")
    add_scalar_(layer, "shift", 0.5, learnable=True)
    add_scalar_(layer, "beta", 3.0, learnable=True)
    x = torch.randn(1, 4, 2, 2, dtype=torch.double, requires_grad=True)
    expected = gradients(layer, x, lambda x: written_out(layer, x))
    for found, value in zip(gradients(layer, x, layer), expected, strict=True):
        torch.testing.assert_close(found, value, rtol=1e-10, atol=1e-11)
    nodes = {type(node).__name__ for node, _ in layer(x).grad_fn.next_functions if node is not None}
    assert nodes & {"ConvolutionBackward0"}  # β multiplies the output


def test_compiled_gradient_of_a_bias_is_summed_over_the_batch_first() -> None:
    """Inductor fuses such a sum with the pass before it, and a sum over positions, too, would be another pass."""
    layer, graphs = convolution("point"), []
    add_scalar_(layer, "delta", 0.5, learnable=True)

    def keep(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    run = torch.compile(layer, backend=aot_autograd(fw_compiler=keep), fullgraph=True)
    run(torch.randn(3, 4, 5, 5, dtype=torch.double)).sum().backward()
    sums = [node.args[1] for node in graphs[1].graph.nodes if "sum.dim" in str(node.target)]
    assert sums
    assert sums[0] == [0]


@pytest.mark.parametrize("name", ["point", "zeros"])
def test_scaled_convolution_is_exported_for_any_batch(name: str) -> None:
    """Which side of the equation is computed must not depend on the size of the batch there."""
    layer = convolution(name).float().eval()
    for scalar in ("alpha", "shift", "beta", "delta"):
        add_scalar_(layer, scalar, 0.5, learnable=True)
    batch = {0: torch.export.Dim("batch", min=1, max=1000)}
    program = torch.export.export(layer, (torch.randn(2, 4, 2, 2),), dynamic_shapes=(batch,)).module()
    for count in (1, 7, 64):
        x = torch.randn(count, 4, 2, 2)
        torch.testing.assert_close(program(x), layer(x))
