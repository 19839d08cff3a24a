"""Exponents and variance recursions of the residual rules against gradient steps and random networks."""

import doctest
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import depth_rules
from normfree import theory

EXPLAINS = r"expected .+, got .+; .+"  # every refusal says what was expected, what came and what to do


def assert_mean_is(samples: np.ndarray, expected: float, spread: float) -> None:
    """Their mean lies within 4 standard errors of `expected`, and one such error is below the fraction `spread`."""
    error = samples.std(ddof=1) / math.sqrt(len(samples))
    assert error < spread * expected, f"too few samples: standard error {error}"
    assert abs(samples.mean() - expected) < 4 * error, f"{samples.mean()} ± {error}, expected {expected}"


def flat(stages: list[list[float]]) -> list[float]:
    return [value for stage in stages for value in stage]


def test_doctests_pass():
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    results = [
        doctest.testmod(room, optionflags=flags) for room in (theory.depth, theory.fans, theory.gains, depth_rules)
    ]
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
