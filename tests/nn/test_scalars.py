"""Scalars: values, no promotion of types, copies and state dicts."""

import copy
import doctest

import pytest
import torch
from torch import nn

from normfree.nn import scalars
from normfree.nn.normalizers import DynamicTanh
from normfree.nn.scalar_wrapping import add_scalar_
from normfree.nn.scalars import ScalarBias, ScalarMultiplier

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
