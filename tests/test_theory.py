"""Fans, taps, gains and depth rules against autograd, quadrature and simulation, with controls that must fail."""

import doctest
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate
from torch.nn import functional as F

import depth_rules
from normfree import theory

CONVOLUTIONS = [  # size, kernel, stride, padding, dilation
    (8, 3, 1, 1, 1),
    (8, 3, 2, 1, 1),
    (9, 3, 2, 1, 1),
    (8, 1, 2, 0, 1),
    (11, 7, 2, 3, 1),
    (9, 3, 1, 2, 2),
    (7, 3, 3, 0, 1),
    (5, 5, 1, 4, 1),
]


EXPLAINS = r"expected .+, got .+; .+"  # every refusal says what was expected, what came and what to do


def assert_mean_is(samples: np.ndarray, expected: float, spread: float) -> None:
    """Their mean lies within 4 standard errors of `expected`, and one such error is below the fraction `spread`."""
    error = samples.std(ddof=1) / math.sqrt(len(samples))
    assert error < spread * expected, f"too few samples: standard error {error}"
    assert abs(samples.mean() - expected) < 4 * error, f"{samples.mean()} ± {error}, expected {expected}"


@pytest.mark.parametrize("groups", [1, 4])
def test_fans_count_the_entries_of_an_all_ones_convolution(groups):
    conv = torch.nn.Conv2d(8, 12, (3, 5), padding=(1, 2), groups=groups, bias=False)
    torch.nn.init.ones_(conv.weight)
    x = torch.ones(1, 8, 9, 9, requires_grad=True)
    y = conv(x)
    assert theory.fan_in(8, (3, 5), groups) == y[0, 0, 4, 4].item()
    assert theory.fan_out(12, (3, 5), groups) == torch.autograd.grad(y.sum(), x)[0][0, 0, 4, 4].item()
    assert (theory.fan_in(10), theory.fan_out(7, ())) == (10, 7)


@pytest.mark.parametrize(("size", "kernel", "stride", "padding", "dilation"), CONVOLUTIONS)
@pytest.mark.parametrize("circular", [False, True])
def test_gradient_taps_match_autograd_of_an_all_ones_convolution(size, kernel, stride, padding, dilation, circular):
    conv = torch.nn.Conv2d(
        1,
        1,
        (kernel, 3),
        (stride, 1),
        (padding, 1),
        (dilation, 1),
        bias=False,
        padding_mode="circular" if circular else "zeros",
        dtype=torch.float64,
    )
    torch.nn.init.ones_(conv.weight)
    x = torch.zeros(1, 1, size, 6, dtype=torch.float64, requires_grad=True)
    y = conv(x)
    assert theory.conv_output_size(size, kernel, stride, padding, dilation) == y.shape[2]
    v = torch.rand(y.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    (carried,) = torch.autograd.grad(y, x, v)
    rows = theory.tap_matrix(size, kernel, stride, padding, dilation, circular=circular)
    cols = theory.tap_matrix(6, 3, 1, 1, circular=circular)
    v_map, expected = v[0, 0].numpy(), carried[0, 0].numpy()
    np.testing.assert_allclose(theory.gradient_taps(v_map, rows, cols), expected, rtol=1e-13, atol=1e-14)
    assert theory.effective_taps(v_map, rows, cols) == pytest.approx(expected.mean() / v_map.mean(), rel=1e-13)
    (uniform,) = torch.autograd.grad(conv(x), x, torch.ones_like(y))
    sizes = (kernel, 3), (stride, 1), (size, 6), (padding, 1), (dilation, 1)
    assert depth_rules.effective_fan_out(5, *sizes, circular=circular) == pytest.approx(
        5 * uniform.mean().item(), rel=1e-13
    )


def test_gradient_taps_with_stride_ignored_are_wrong():
    conv = torch.nn.Conv2d(1, 1, 3, 2, 1, bias=False)
    torch.nn.init.ones_(conv.weight)
    x = torch.zeros(1, 1, 8, 8, requires_grad=True)
    carried = torch.autograd.grad(conv(x).sum(), x)[0][0, 0].numpy()
    strided, dense = theory.tap_matrix(8, 3, 2, 1), theory.tap_matrix(8, 3, 1, 1)
    np.testing.assert_allclose(theory.gradient_taps(np.ones((4, 4)), strided, strided), carried)
    assert not np.allclose(theory.gradient_taps(np.ones((8, 8)), dense, dense), carried)


def test_tap_matrix_counts_twice_what_a_circular_kernel_reaches_twice():
    assert theory.tap_matrix(2, 3, padding=1, circular=True).tolist() == [[1, 2], [2, 1]]


def test_effective_fan_out_of_a_circular_convolution_is_fan_out_over_stride():
    assert depth_rules.effective_fan_out(16, (3, 3), 1, 8, 1, circular=True) == theory.fan_out(16, (3, 3))
    assert depth_rules.effective_fan_out(16, (3, 3), 2, 8, 1, circular=True) == theory.fan_out(16, (3, 3)) / 4
    assert depth_rules.effective_fan_out(16, (3, 3), 1, 8, 1) < theory.fan_out(
        16, (3, 3)
    )  # zero padding starves the border
    assert depth_rules.effective_fan_out(16, (), 1, 1, 0, groups=2) == 8


def backward_maps(taps_of_layer: Callable[[float, int], float], seeds: int) -> tuple[np.ndarray, np.ndarray]:
    """Mean squared gradient at the input of three random convolutions for one of 1 at their output, measured and
    predicted: shapes (seeds, 16, 16) and (16, 16)."""
    layers = [(16, 3, 2, 1), (8, 3, 1, 1), (8, 3, 2, 1)]  # size, kernel, stride, padding
    width, v, variances = 24, np.ones((4, 4)), []
    for size, kernel, stride, padding in reversed(layers):
        taps = theory.tap_matrix(size, kernel, stride, padding)
        variances.insert(0, 1 / (width * taps_of_layer(theory.effective_taps(v, taps, taps), kernel)))
        v = theory.gradient_taps(v, taps, taps) * width * variances[0]
    maps = []
    for seed in range(seeds):
        generator = torch.Generator().manual_seed(seed)
        g = torch.randn(8, width, 4, 4, generator=generator)
        for (size, kernel, stride, padding), variance in reversed(list(zip(layers, variances, strict=True))):
            weight = math.sqrt(variance) * torch.randn(width, width, kernel, kernel, generator=generator)
            g = torch.nn.grad.conv2d_input((8, width, size, size), weight, g, stride, padding)
        maps.append((g**2).mean((0, 1)).numpy())
    return np.array(maps), v


def test_effective_taps_keep_the_gradient_variance_of_random_convolutions():
    measured, predicted = backward_maps(lambda taps, kernel: taps, seeds=60)
    assert_mean_is(measured.mean((1, 2)), 1.0, spread=0.02)
    tolerance = 6 * math.sqrt(2 / (60 * 24))  # a position is a mean of at least 60·24 independent squares
    assert np.abs(measured.mean(0) / predicted - 1).max() < tolerance
    assert np.abs(measured.mean(0) - 1).max() > 2 * tolerance  # the control: the map is not uniform
    ignored, _ = backward_maps(lambda taps, kernel: kernel**2, seeds=5)
    assert ignored.mean((1, 2)).max() < 1 / 16  # the control: plain fan-out loses a factor 4 at each of the two strides


@pytest.mark.parametrize(
    "call",
    [
        lambda: theory.fan_in(10, (3,), groups=3),
        lambda: theory.fan_out(0),
        lambda: theory.fan_out(4, (3, 0)),
        lambda: theory.conv_output_size(2, 5),
        lambda: theory.conv_output_size(8, 3, stride=0),
        lambda: theory.conv_output_size(8, 3, padding=-1),
        lambda: theory.gradient_taps(np.ones((8, 8)), theory.tap_matrix(8, 3), theory.tap_matrix(8, 3)),
        lambda: theory.effective_taps(np.zeros((6, 6)), theory.tap_matrix(8, 3), theory.tap_matrix(8, 3)),
        lambda: depth_rules.effective_fan_out(4, (3, 3), (1,), 8, 1),
    ],
)
def test_fans_and_taps_refuse_impossible_layers(call):
    with pytest.raises(ValueError, match=EXPLAINS):
        call()


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


def flat(stages: list[list[float]]) -> list[float]:
    return [value for stage in stages for value in stage]


def test_doctests_pass():
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    results = [doctest.testmod(room, optionflags=flags) for room in (theory, depth_rules)]
    assert sum(result.attempted for result in results) > 15
    assert sum(result.failed for result in results) == 0


def first_step(a: list[float], x: float, eta: float = 1e-7) -> float:
    """|ΔF|/η of one gradient step on the scalars, with ∂ℓ/∂F = 1."""
    scalars = torch.tensor(a, dtype=torch.float64, requires_grad=True)
    output = scalars.prod() * x
    (gradient,) = torch.autograd.grad(output, scalars)
    return abs(((scalars - eta * gradient).prod() * x - output).item()) / eta


@given(a=st.lists(st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.5]), min_size=1, max_size=4), x=st.floats(0.5, 2))
@settings(max_examples=50, deadline=None)
def test_scalar_branch_update_matches_a_gradient_step(a, x):
    assert theory.scalar_branch_update(a, x) == pytest.approx(first_step(a, x), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("m", [2, 3, 4])
@pytest.mark.parametrize("last_is_zero", [False, True])
def test_fixup_scale_makes_every_branch_update_of_order_one_over_depth(m, last_is_zero):
    def times_depth(exponent: float) -> list[float]:
        a = [[L**exponent] * (m - 1) + [0.0 if last_is_zero else L**exponent] for L in (10, 100, 1000, 10_000)]
        return [L * theory.scalar_branch_update(row) for L, row in zip((10, 100, 1000, 10_000), a, strict=True)]

    expected = 1 if last_is_zero else m
    assert theory.fixup_scale(100, m) == pytest.approx(100 ** (-1 / (2 * m - 2)))
    assert times_depth(-1 / (2 * m - 2)) == pytest.approx([expected] * 4)
    unscaled = times_depth(0.0)  # the control: without the scale the network's update grows as L
    assert unscaled[-1] / unscaled[0] == pytest.approx(1000)


@pytest.mark.parametrize(
    "call",
    [
        lambda: theory.fixup_scale(10, 1),
        lambda: theory.fixup_scale(0, 2),
        lambda: theory.scalar_branch_update([]),
        lambda: theory.k_n(1),
        lambda: theory.weightnorm_norm_ratio(0),
    ],
)
def test_fixup_and_weightnorm_refuse_what_is_undefined(call):
    with pytest.raises(ValueError, match=EXPLAINS):
        call()


def printed_k_n(n: int, area: Callable[[int], float]) -> float:
    """Equation 3 of wninit read off the page, with S_n as given."""
    product = math.prod(j / (j + 1) for j in range(2 if n % 2 == 0 else 1, n - 1, 2))
    return 2 * area(n - 1) / area(n) * product * (1 if n % 2 == 0 else math.pi / 2)


def test_k_n_is_one_with_the_area_of_the_sphere_in_one_more_dimension():
    def area(n: int) -> float:
        return 2 * math.pi ** ((n + 1) / 2) / math.gamma((n + 1) / 2)

    for n in range(2, 201):
        assert abs(theory.k_n(n) - 1) < 1e-12
        assert theory.k_n(n) == pytest.approx(printed_k_n(n, area), abs=1e-12)
    other = printed_k_n(2, lambda n: 2 * math.pi ** (n / 2) / math.gamma(n / 2))
    assert other == pytest.approx(2 / math.pi) != pytest.approx(1)  # the control: 0.64


@pytest.mark.parametrize("n", [2, 3, 8])
def test_k_n_is_the_norm_ratio_of_a_weight_normalized_relu_layer(n):
    rng, m = np.random.default_rng(n), 200_000
    rows = rng.standard_normal((m, n))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    u = rng.standard_normal(n)
    squares = 2 * n * np.maximum(rows @ (u / np.linalg.norm(u)), 0) ** 2  # m times each row's share of ‖v‖²/‖u‖²
    assert_mean_is(squares, theory.k_n(n), spread=0.01)


RULES = {
    "plain": depth_rules.plain_rule,
    "sqrt_half": depth_rules.sqrt_half_rule,
    "small_branch": depth_rules.small_branch_rule(0.2),
    "hanin": depth_rules.hanin_rule(0.9),
    "shao": depth_rules.shao_rule,
    "skipinit": depth_rules.skipinit_rule,
    "weightnorm": depth_rules.weightnorm_rule,
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("gain", [1.0, 0.5])
def test_variance_by_depth_matches_random_residual_networks(name, gain):
    L, width, finals = 6, 64, []
    rng = np.random.default_rng(0)
    for _ in range(200):
        x = rng.standard_normal((width, 4))
        start = np.mean(x**2)
        for l in range(1, L + 1):
            c, a, beta = RULES[name](l, L)
            weight = rng.standard_normal((width, width)) * math.sqrt(gain / width)
            x = c * (a * x + beta * weight @ x)
        finals.append(np.mean(x**2) / start)
    expected = depth_rules.variance_by_depth(RULES[name], L, branch_gain=gain)
    assert expected.shape == (L + 1,)
    if name == "skipinit":
        assert finals == pytest.approx([1.0] * 200)
    else:
        assert_mean_is(np.array(finals), expected[-1], spread=0.03)


@pytest.mark.parametrize("L", [1, 2, 10, 200])
def test_variance_by_depth_has_the_closed_forms(L):
    def last(name: str) -> float:
        return float(depth_rules.variance_by_depth(RULES[name], L, start=3.0)[-1]) / 3

    assert last("plain") == pytest.approx(2.0**L)
    assert last("small_branch") == pytest.approx(1.04**L)
    assert [last("sqrt_half"), last("shao"), last("skipinit")] == pytest.approx([1, 1, 1])
    assert last("weightnorm") == pytest.approx((1 + 1 / L) ** L) == theory.weightnorm_norm_ratio(L) ** 2
    assert math.sqrt(2) <= theory.weightnorm_norm_ratio(L) < math.sqrt(math.e)
    assert 1 < last("hanin") < depth_rules.hanin_bound(0.9)


def test_hanin_bound_holds_at_any_depth_and_fails_for_constant_branches():
    for r in (0.1, 0.5, 0.9, 0.99):
        assert depth_rules.variance_by_depth(depth_rules.hanin_rule(r), 5000)[-1] < depth_rules.hanin_bound(r)
    assert depth_rules.variance_by_depth(depth_rules.small_branch_rule(0.9), 100)[-1] > depth_rules.hanin_bound(0.9)


def test_shao_rule_gives_every_branch_the_same_weight_at_the_end():
    L = 20
    scalars = [depth_rules.shao_rule(l, L) for l in range(1, L + 1)]
    weights = [beta**2 * math.prod(a**2 for _, a, _ in scalars[l:]) for l, (_, _, beta) in enumerate(scalars, 1)]
    assert weights == pytest.approx([1 / (2 * L)] * L)
    assert scalars[0][1:] == pytest.approx((math.sqrt(20 / 21), math.sqrt(1 / 21)))
    assert depth_rules.shao_rule(1, 1)[1:] == pytest.approx((math.sqrt(0.5), math.sqrt(0.5)))


def appendix_a3(stage_sizes: list[int], beta: float) -> list[list[float]]:
    """The running variable of normdead's appendix A.3, read where α is made of it."""
    expected, seen = 1.0, []
    for size in stage_sizes:
        stage = [expected]
        expected = 1 + beta**2
        for _ in range(1, size):
            stage.append(expected)
            expected += beta**2
        seen.append(stage)
    return seen


@pytest.mark.parametrize("beta", [1.0, 0.2])
def test_nf_expected_variance_follows_the_code_of_the_paper(beta):
    sizes = [3, 4, 6, 3]
    inputs, outputs = depth_rules.nf_expected_variance(sizes, beta), theory.nf_output_variance(sizes, beta)
    assert flat(inputs) == pytest.approx(flat(appendix_a3(sizes, beta)))
    assert flat(inputs)[1:] == flat(outputs)[:-1]  # a block's input is the output of the one before
    assert [len(stage) for stage in outputs] == sizes


def simulate_stages(stage_sizes: list[int], branch: Callable[..., np.ndarray], beta: float) -> np.ndarray:
    """Mean channel variance after each block of 16 random networks with a projection at every stage's first block."""
    seen = []
    for seed in range(16):
        rng = np.random.default_rng(seed)
        x = rng.standard_normal((256, 1024))
        seen.append([])
        for k, size in enumerate(stage_sizes):
            for b in range(size):
                shortcut = branch(rng, x, k, b) if b == 0 else x
                x = shortcut + beta * branch(rng, x, k, b)
                seen[-1].append(x.var(axis=1).mean())
    return np.array(seen)


def test_normalized_variance_matches_a_batch_normalized_network():
    def branch(rng, x, k, b):
        z = (x - x.mean(1, keepdims=True)) / x.std(1, keepdims=True)
        return rng.standard_normal((256, 256)) * math.sqrt(2 / 256) @ np.maximum(z, 0)

    expected = theory.normalized_variance([4, 3])
    for measured, value in zip(simulate_stages([4, 3], branch, 1.0).T, flat(expected), strict=True):
        assert_mean_is(measured, value, spread=0.01)
    assert expected[0][:2] == pytest.approx([2 * (1 - 1 / math.pi), 3 * (1 - 1 / math.pi)])
    assert theory.normalized_variance([4, 3], first_projects=False)[0][0] == pytest.approx(2 - 1 / math.pi)


@pytest.mark.parametrize("beta", [1.0, 0.2])
def test_nf_output_variance_matches_a_network_with_standardized_weights(beta):
    expected_inputs = depth_rules.nf_expected_variance([4, 3], beta)

    def branch(rng, x, k, b, scaled=True):
        weight = rng.standard_normal((256, 256))
        weight -= weight.mean(1, keepdims=True)
        weight *= math.sqrt(theory.variance_gain("relu") / 256) / weight.std(1, keepdims=True)
        return weight @ np.maximum(x / math.sqrt(expected_inputs[k][b] if scaled else 1), 0)

    measured = simulate_stages([4, 3], branch, beta)
    for block, value in zip(measured.T, flat(theory.nf_output_variance([4, 3], beta)), strict=True):
        assert_mean_is(block, value, spread=0.01)
    unscaled = simulate_stages([4, 3], lambda *args: branch(*args, scaled=False), beta)
    assert np.all(unscaled[:, -1] > 1.1 * measured[:, -1])  # the control: without α the branches grow with their input


@pytest.mark.parametrize(
    "call",
    [
        lambda: depth_rules.variance_by_depth(depth_rules.plain_rule, 0),
        lambda: depth_rules.hanin_rule(1.0),
        lambda: depth_rules.hanin_bound(0.0),
        lambda: depth_rules.nf_expected_variance([3, 0], 1.0),
        lambda: theory.normalized_variance([0]),
    ],
)
def test_variance_recursions_refuse_impossible_input(call):
    with pytest.raises(ValueError, match=EXPLAINS):
        call()
