"""He and Xavier: variances by formula in every layer, and the signal that they keep in a plain network."""

import math

import pytest
import torch
from torch import Tensor

from normfree.models import Network, build
from normfree.plan import Layer

MODELS = ["resnet20", "wrn-16-2", "preact_resnet50", "mlp-5-100", "cnn-6-32", "dense-10-12", "highway-6-64"]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def weight(model: Network, layer: Layer) -> Tensor:
    return model.get_submodule(layer.name).weight.detach()


def fans(w: Tensor) -> tuple[int, int]:
    taps = w[0, 0].numel()
    return w.shape[1] * taps, w.shape[0] * taps


def assert_variance(w: Tensor, expected: float, kurtosis: float = 3.0) -> None:
    """The mean square of the weights is `expected` within 5 standard errors."""
    error = math.sqrt((kurtosis - 1) / w.numel())
    assert w.square().mean().item() / expected == pytest.approx(1.0, abs=5 * error)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("method", "which"), [("he_in", 0), ("he_out", 1)])
def test_he_variance_is_two_over_the_fan_after_a_relu(name, method, which):
    model = build(name, method, generator=seeded(0))
    plan = model.plan
    assert not any(layer.reads_activation for layer in plan.stem)
    for layer in plan.hidden():
        w = weight(model, layer)
        assert_variance(w, (2 if layer.reads_activation else 1) / fans(w)[which])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("method", ["he_in", "he_out"])
def test_he_leaves_the_classifier_at_the_default(name, method):
    classifier = build(name, method, generator=seeded(0)).classifier
    assert_variance(classifier.weight.detach(), 1 / (3 * classifier.in_features), kurtosis=1.8)
    assert not classifier.bias.any()


@pytest.mark.parametrize("name", MODELS)
def test_xavier_variance_is_two_over_both_fans(name):
    model = build(name, "xavier", generator=seeded(0))
    for layer in model.plan.layers():
        w = weight(model, layer)
        assert_variance(w, 2 / sum(fans(w)))


def test_variance_tolerance_tells_the_fans_apart():
    w = weight(build("wrn-16-2", "he_in", generator=seeded(0)), Layer("body.1.0.branch.conv1"))
    fan_in, fan_out = fans(w)
    assert fan_in != fan_out
    assert_variance(w, 2 / fan_in)
    for wrong in (2 / fan_out, 1 / fan_in, 2 / (fan_in + fan_out)):
        with pytest.raises(AssertionError):
            assert_variance(w, wrong)


def forward_and_backward_ratio(method: str) -> tuple[float, float]:
    """Mean over 10 seeds of the last layer's mean square over the first's, and of the same for gradients."""
    forward, backward = [], []
    for seed in range(10):
        g = seeded(seed)
        model = build("mlp-12-200", method, generator=g)
        first = model.stem(torch.randn(32, 28 * 28 * 3, generator=g)).detach().requires_grad_()
        last = model.body(first)
        noise = torch.randn(last.shape, generator=g)
        (gradient,) = torch.autograd.grad(last, first, noise)
        forward.append(last.square().mean().item() / first.square().mean().item())
        backward.append(gradient.square().mean().item() / noise.square().mean().item())
    return sum(forward) / 10, sum(backward) / 10


def test_he_keeps_signal_and_gradient_of_a_plain_network():
    # Ten layers of width 200 spread the mean square by about √(10·5/200) = 50 % a seed, 16 % over ten.
    assert forward_and_backward_ratio("he_in") == pytest.approx((1.0, 1.0), abs=0.5)
    assert max(forward_and_backward_ratio("xavier")) < 0.01  # the control: 2^-10
