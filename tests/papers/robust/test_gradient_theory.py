"""The gradient's variance by the rules of robust: closed forms, and autograd with drawn weights."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from normfree_papers.robust.gradient_theory import carried_back, expected_curve, weight_variance
from normfree_papers.robust.signal import derived_decades


@pytest.mark.parametrize(
    ("weights", "activated", "expected"),
    [
        ("fan-in", True, 2 / (4 * 9)),
        ("fan-out", True, 2 / (8 * 9)),
        ("fan-out", False, 1 / (8 * 9)),
        ("Brock", True, 2 / (1 - 1 / math.pi) / (4 * 9)),
    ],
)
def test_weight_variance_is_that_of_equations_1_to_3(weights, activated, expected):
    assert weight_variance(nn.Conv2d(4, 8, 3), weights, activated=activated) == pytest.approx(expected)


@pytest.mark.parametrize(("stride", "padding", "kernel"), [(1, 1, 3), (2, 1, 3), (2, 0, 1)])
def test_map_is_the_mean_square_gradient_over_draws_of_weights(stride, padding, kernel):
    g = torch.Generator().manual_seed(0)
    conv = nn.Conv2d(1, 64, kernel, stride, padding, bias=False).double()
    v = np.array([[1.0, 2.0], [3.0, 4.0]])
    size = (2, 2) if stride == 1 else (4, 4)
    total = torch.zeros(size, dtype=torch.float64)
    draws = 3_000
    for _ in range(draws):
        conv.weight.data.normal_(std=0.1, generator=g)
        x = torch.zeros(1, 1, *size, dtype=torch.float64, requires_grad=True)
        signs = torch.randn(1, 64, 2, 2, generator=g, dtype=torch.float64) * torch.from_numpy(v).sqrt()
        (gradient,) = torch.autograd.grad((conv(x) * signs).sum(), x)
        total += gradient[0, 0] ** 2 / draws
    # The square of a normal number varies by √2 of itself: five standard errors.
    expected = carried_back(v, conv, size, 0.01)
    np.testing.assert_allclose(total.numpy(), expected, rtol=5 * math.sqrt(2 / draws))


def test_stride_of_a_projection_costs_a_factor_of_four():
    v = carried_back(np.ones((4, 4)), nn.Conv2d(8, 16, 1, 2), (8, 8), 1 / 16)
    assert v.mean() == pytest.approx(1 / 4)


def test_fan_in_and_fan_out_agree_inside_a_stage_and_differ_by_the_channels_at_transitions():
    fan_in, fan_out = (expected_curve("preact_resnet18", "idshort", w, c=math.sqrt(0.5)) for w in ("fan-in", "fan-out"))
    assert fan_in[-1] == fan_out[-1] == 1
    for i in range(7):
        inside = i % 2 == 0  # two blocks per stage
        factors = [curve[i] / curve[i + 1] for curve in (fan_in, fan_out)]
        assert factors[0] / factors[1] == pytest.approx(1 if inside else 2)


def test_plain_sums_multiply_by_two_where_the_proposed_keep():
    plain = expected_curve("preact_resnet18", "idshort", "fan-out", c=1.0)
    kept = expected_curve("preact_resnet18", "idshort", "fan-out", c=math.sqrt(0.5))
    assert [a / b for a, b in zip(plain, kept, strict=True)] == pytest.approx([2.0**i for i in range(7, -1, -1)])


def test_fan_out_loses_more_than_fan_in_over_the_whole_network():
    # Three transitions double the channels: fan-in has a factor of 2 more at each.
    lost = derived_decades(18, "idshort"), derived_decades(18, "idshort_in")
    assert lost[1] - lost[0] == pytest.approx(3 * math.log10(2))
    assert lost[0] < -2
