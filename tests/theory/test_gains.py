"""Moments and gains of activations against quadrature, torch and simulation, with controls that must fail."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate
from torch.nn import functional as F

from normfree import theory

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "identity": lambda x: x,
    "relu": F.relu,
    "leaky_relu": F.leaky_relu,
    "selu": F.selu,
    "elu": F.elu,
    "gelu": F.gelu,
    "silu": F.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "softplus": lambda x: F.softplus(x, threshold=1e3),
}


EXPLAINS = r"expected .+, got .+; .+"  # every refusal says what was expected, what came and what to do


def as_tuple(m: theory.Moments) -> tuple[float, float, float, float]:
    return m.mean, m.second, m.variance, m.slope


def through_torch(name: str) -> Callable[[np.ndarray], np.ndarray]:
    return lambda x: ACTIVATIONS[name](torch.from_numpy(x)).numpy()


def normal_expectation(g: Callable[[torch.Tensor], torch.Tensor], std: float) -> float:
    def integrand(z: float) -> float:
        return g(torch.tensor(std * z, dtype=torch.float64)).item() * math.exp(-z * z / 2) / math.sqrt(2 * math.pi)

    return sum(integrate.quad(integrand, *ends, epsabs=1e-13, epsrel=1e-12)[0] for ends in ((-10, 0), (0, 10)))


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("std", [1.0, 0.3])
def test_moments_match_adaptive_quadrature(name, std):
    function = ACTIVATIONS[name]

    def squared_slope(x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        return torch.autograd.grad(function(x), x)[0] ** 2

    mean = normal_expectation(function, std)
    second = normal_expectation(lambda x: function(x) ** 2, std)
    variance = normal_expectation(lambda x: (function(x) - mean) ** 2, std)
    expected = (mean, second, variance, normal_expectation(squared_slope, std))
    assert as_tuple(theory.moments(name, std)) == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("std", [1e-2, 1.0, 50.0])
def test_moments_of_a_callable_match_the_name(name, std):
    by_name, by_callable = theory.moments(name, std), theory.moments(through_torch(name), std)
    assert as_tuple(by_callable) == pytest.approx(as_tuple(by_name), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_moments_match_monte_carlo(name):
    z = torch.randn(10**6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    value = ACTIVATIONS[name](z)
    slope = torch.autograd.grad(value.sum(), z)[0]
    m = theory.moments(name)
    for sample, expected in ((value, m.mean), (value**2, m.second), (slope**2, m.slope)):
        error = sample.std().item() / math.sqrt(len(z))
        assert abs(sample.mean().item() - expected) <= 4 * error + 1e-12


def test_moments_of_kinks_away_from_zero_are_exact_when_named():
    inside, density = math.erf(math.sqrt(0.5)), math.exp(-0.5) / math.sqrt(2 * math.pi)
    exact = (inside - 2 * density) + (1 - inside)  # ∫ z² over |z| < 1, and 1 outside
    m = theory.moments(lambda x: np.clip(x, -1, 1), kinks=(-1, 1))
    assert (m.second, m.slope) == pytest.approx((exact, inside), abs=1e-12)
    unnamed = theory.moments(lambda x: np.clip(x, -1, 1))
    assert abs(unnamed.slope - inside) > 1e-6  # the control: the kinks matter


@given(slope=st.floats(-2, 2), std=st.floats(0.05, 20))
@settings(max_examples=30, deadline=None)
def test_moments_of_leaky_relu_match_quadrature_for_any_slope(slope, std):
    closed = theory.moments("leaky_relu", std, negative_slope=slope)
    by_quadrature = theory.moments(lambda x: np.where(x > 0, x, slope * x), std)
    assert as_tuple(closed) == pytest.approx(as_tuple(by_quadrature), rel=1e-9, abs=1e-11)


def test_gains_of_relu_are_he_and_brock():
    assert theory.forward_gain("relu") == theory.backward_gain("relu") == 2
    assert theory.variance_gain("relu") == pytest.approx(2 / (1 - 1 / math.pi), rel=1e-14)
    assert math.sqrt(theory.variance_gain("relu")) != pytest.approx(1.71396, abs=1e-4)  # a table often copied
    assert theory.forward_gain("leaky_relu", negative_slope=0.2) == pytest.approx(2 / 1.04)


@pytest.mark.parametrize("gain", [theory.forward_gain, theory.variance_gain, theory.backward_gain])
def test_gains_are_one_for_the_identity(gain):
    assert gain("identity") == 1


def test_selu_constants_match_torch_and_fix_the_moments():
    assert theory.selu_constants() == pytest.approx((1.0507009873554805, 1.6732632423543772), rel=1e-14)
    m = theory.moments("selu")
    assert (m.mean, m.variance) == pytest.approx((0, 1), abs=1e-13)
    assert abs(theory.moments("elu").mean) > 0.1  # the control: ELU has no such fixed point


def test_normprop_constants_are_those_of_relu():
    assert theory.normprop_constants() == pytest.approx((math.sqrt(0.5 / math.pi), math.sqrt((1 - 1 / math.pi) / 2)))


def test_moments_refuse_an_unknown_name_with_the_closest():
    sentence = r"unknown activation 'rellu'; did you mean 'relu'.* identity, relu, .*softplus; pass any other function"
    with pytest.raises(ValueError, match=sentence):
        theory.moments("rellu")


@pytest.mark.parametrize(
    "call",
    [
        lambda: theory.moments("relu", 0.0),
        lambda: theory.moments("relu", math.inf),
        lambda: theory.moments(lambda x: x.sum()),
        lambda: theory.moments(lambda x: np.where(x > 3, np.nan, x)),
        lambda: theory.variance_gain(np.ones_like),
    ],
)
def test_moments_refuse_what_has_none(call):
    with pytest.raises(ValueError, match=EXPLAINS):
        call()
