"""Fans and taps against autograd of convolutions, with controls that must fail."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

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
    assert theory.effective_fan_out(5, *sizes, circular=circular) == pytest.approx(5 * uniform.mean().item(), rel=1e-13)


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
    assert theory.effective_fan_out(16, (3, 3), 1, 8, 1, circular=True) == theory.fan_out(16, (3, 3))
    assert theory.effective_fan_out(16, (3, 3), 2, 8, 1, circular=True) == theory.fan_out(16, (3, 3)) / 4
    assert theory.effective_fan_out(16, (3, 3), 1, 8, 1) < theory.fan_out(16, (3, 3))  # zero padding starves the border
    assert theory.effective_fan_out(16, (), 1, 1, 0, groups=2) == 8


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
        lambda: theory.effective_fan_out(4, (3, 3), (1,), 8, 1),
    ],
)
def test_fans_and_taps_refuse_impossible_layers(call):
    with pytest.raises(ValueError, match=EXPLAINS):
        call()
