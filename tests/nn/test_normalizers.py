"""Normalizers of activations against numpy, and activations that keep mean and variance, beside ones that do not."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from normfree.methods import get
from normfree.nn.normalizers import (
    ACTIVATION_TYPES,
    NORM_TYPES,
    SELU,
    ChannelAffine,
    NormPropReLU,
    activation,
    normalizer,
)
from normfree.nn.weight_layers import CONVOLUTIONS

SAMPLES = 1_000_000
EPS = 1e-5  # torch's default in all four normalizers
EXPLAINS = r"expect.+, got .+; .+"


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(seed: int = 0) -> Tensor:
    return torch.randn(SAMPLES, generator=generator(seed), dtype=torch.float64)


def deviations(samples: Tensor) -> tuple[float, float]:
    """How many standard errors the mean lies from 0 and the variance from 1."""
    x = samples.double()
    centred = x - x.mean()
    variance = centred.square().mean().item()
    fourth = centred.pow(4).mean().item()
    mean_error = math.sqrt(variance / x.numel())
    variance_error = math.sqrt((fourth - variance**2) / x.numel())
    assert variance_error < 0.01, "too few samples to tell"
    return abs(x.mean().item()) / mean_error, abs(variance - 1) / variance_error


def standard(x: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """Mean 0 and variance 1 over `axes`."""
    return (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + EPS)


def by_hand(name: str, x: np.ndarray, groups: int) -> np.ndarray:
    rest = tuple(range(2, x.ndim))
    match name:
        case "batch":
            return standard(x, (0, *rest))
        case "layer":
            return standard(x, (1, *rest))
        case "instance":
            return standard(x, rest)
    parts = [standard(part, (1, *rest)) for part in np.split(x, groups, axis=1)]
    return np.concatenate(parts, axis=1)


CASES = [(name, True) for name in ("batch", "layer", "group", "instance")]
CASES += [(name, False) for name in ("batch", "layer", "group")]


@pytest.mark.parametrize(("name", "spatial"), CASES)
def test_normalizer_is_the_formula(name: str, spatial: bool) -> None:
    channels, groups = 12, 3
    layer = normalizer(name, channels, spatial=spatial).double()
    with torch.no_grad():
        layer.weight.normal_(generator=generator(1))
        layer.bias.normal_(generator=generator(2))
    shape = (3, channels, 4, 5) if spatial else (3, channels)
    x = 2.0 + 3.0 * torch.randn(shape, generator=generator(3), dtype=torch.float64)
    affine = (1, channels) + (1, 1) * spatial
    weight, bias = (p.detach().numpy().reshape(affine) for p in (layer.weight, layer.bias))
    out = layer(x).detach().numpy()
    np.testing.assert_allclose(out, weight * by_hand(name, x.numpy(), groups) + bias, rtol=1e-9, atol=1e-9)
    for other in {case for case, both in CASES if both == spatial} - {name}:  # the control: the others differ
        assert np.abs(out - weight * by_hand(other, x.numpy(), groups) - bias).max() > 0.01


def test_normalizer_of_batches_uses_running_statistics_in_evaluation() -> None:
    layer = normalizer("batch", 3).double()
    x = 2.0 + 3.0 * torch.randn(4, 3, 5, 5, generator=generator(0), dtype=torch.float64)
    layer(x)
    data = x.numpy()
    mean = 0.1 * data.mean((0, 2, 3), keepdims=True)
    var = 0.9 + 0.1 * data.var((0, 2, 3), keepdims=True, ddof=1)
    np.testing.assert_allclose(layer.eval()(x).detach().numpy(), (data - mean) / np.sqrt(var + EPS), rtol=1e-9)


@pytest.mark.parametrize(("name", "spatial"), CASES)
def test_normalizer_starts_neutral_and_is_a_known_type(name: str, spatial: bool) -> None:
    layer = normalizer(name, 8, spatial=spatial)
    assert isinstance(layer, NORM_TYPES)
    assert (layer.weight == 1).all()
    assert (layer.bias == 0).all()


@pytest.mark.parametrize(
    ("channels", "groups"),
    [
        (1, 1),
        (3, 1),
        (4, 1),
        (6, 1),
        (7, 1),
        (8, 2),
        (10, 2),
        (12, 3),
        (16, 4),
        (36, 9),
        (64, 16),
        (128, 32),
        (640, 32),
    ],
)
def test_normalizer_group_count_is_the_table(channels: int, groups: int) -> None:
    assert normalizer("group", channels).num_groups == groups


@settings(max_examples=60, deadline=None)
@given(channels=st.integers(1, 2048))
def test_normalizer_group_count_cannot_grow(channels: int) -> None:
    groups = normalizer("group", channels).num_groups
    assert channels % groups == 0
    assert groups == 1 or channels // groups >= 4
    assert not any(channels % g == 0 and channels // g >= 4 for g in range(groups + 1, 33))


def test_normalizer_refuses_unknown_names() -> None:
    with pytest.raises(ValueError, match=EXPLAINS) as caught:
        normalizer("bach", 4)
    assert "'bach'" in str(caught.value)
    assert "use one of batch, layer, group, tanh, instance" in str(caught.value)


def test_normalizer_refuses_instance_norm_of_vectors() -> None:
    with pytest.raises(ValueError, match=EXPLAINS) as caught:
        normalizer("instance", 4, spatial=False)
    for part in ("normalizer of vectors (N, C)", "got 'instance'", "use one of batch, layer, group, tanh"):
        assert part in str(caught.value)


def test_normalizer_of_tokens_names_the_kinds_that_it_has() -> None:
    with pytest.raises(ValueError, match=EXPLAINS) as caught:
        normalizer("lyer", 4, tokens=True)
    assert str(caught.value) == "expected a normalizer of tokens (N, T, C), got 'lyer'; use one of layer, rms, tanh"
    with pytest.raises(ValueError, match="normalizer of images"):
        normalizer("rms", 4)


def test_normprop_relu_is_standard_on_normal_input() -> None:
    mean, variance = deviations(NormPropReLU()(normal()))
    assert mean < 4
    assert variance < 4


def test_relu_is_not_standard_on_normal_input() -> None:
    mean, variance = deviations(F.relu(normal()))
    assert mean > 100
    assert variance > 100


def test_normprop_relu_is_not_standard_on_shifted_input() -> None:
    assert min(deviations(NormPropReLU()(normal() + 0.1))) > 20


@pytest.mark.parametrize("dropout", [0.0, 0.1, 0.5])
def test_selu_keeps_mean_and_variance_through_alpha_dropout(dropout: float) -> None:
    layer = SELU(dropout).train()
    with torch.random.fork_rng():
        torch.manual_seed(1)  # not the seed of the input: one stream would tie the mask to it
        out = layer(normal())
    mean, variance = deviations(out)
    assert mean < 4
    assert variance < 4


def test_selu_with_ordinary_dropout_loses_the_variance() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(1)  # not the seed of the input: one stream would tie the mask to it
        out = F.dropout(torch.selu(normal()), 0.1)
    assert deviations(out)[1] > 20  # E[y²] grows by 1/(1 - p)
    assert out.var().item() == pytest.approx(1 / 0.9, rel=0.02)


def test_selu_drops_in_training_only() -> None:
    layer, x = SELU(0.5), normal()[:1000]
    torch.testing.assert_close(layer.eval()(x), torch.selu(x), rtol=0, atol=0)
    with torch.random.fork_rng():
        torch.manual_seed(1)  # not the seed of the input: one stream would tie the mask to it
        assert (layer.train()(x) - torch.selu(x)).abs().max() > 0.1
    torch.testing.assert_close(SELU().train()(x), torch.selu(x), rtol=0, atol=0)
    assert repr(layer) == "SELU(dropout=0.5)"


@pytest.mark.parametrize("dropout", [-0.1, 1.0, 2.0, math.nan])
def test_selu_refuses_dropout_out_of_range(dropout: float) -> None:
    with pytest.raises(ValueError, match=EXPLAINS) as caught:
        SELU(dropout)
    assert "[0, 1)" in str(caught.value)
    assert f"got {dropout}" in str(caught.value)


@pytest.mark.parametrize(("name", "kind"), [("relu", nn.ReLU), ("selu", SELU), ("normprop", NormPropReLU)])
def test_activation_is_the_named_one(name: str, kind: type[nn.Module]) -> None:
    made = activation(name)
    assert type(made) is kind
    assert isinstance(made, ACTIVATION_TYPES)


def test_activation_passes_dropout_to_selu() -> None:
    assert activation("selu", dropout=0.3).dropout == 0.3


def test_activation_refuses_unknown_names() -> None:
    with pytest.raises(ValueError, match=EXPLAINS) as caught:
        activation("gelu")
    assert "'gelu'" in str(caught.value)
    assert "use one of relu, selu, normprop" in str(caught.value)


@pytest.mark.parametrize(
    "name", ["batchnorm", "layernorm", "groupnorm", "instancenorm", "spectralnorm", "normprop", "selu"]
)
def test_method_of_the_survey_can_be_built_and_normalizes_somewhere(name: str) -> None:
    method = get(name)
    parts = [CONVOLUTIONS[method.weight_kind](3, 8, 3), activation(method.activation)]
    if method.norm:
        parts.insert(1, normalizer(method.norm, 8))
    assert nn.Sequential(*parts)(torch.randn(2, 3, 5, 5, generator=generator(0))).shape == (2, 8, 3, 3)
    assert (method.norm, method.weight_kind, method.activation) != (None, "plain", "relu")


@pytest.mark.parametrize(("norm", "shape"), [(nn.BatchNorm1d, (4, 3)), (nn.BatchNorm2d, (2, 3, 5, 5))])
def test_channel_affine_is_batch_norm_at_evaluation(norm: type[nn.BatchNorm2d], shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    module = norm(3).eval()
    module.running_var.uniform_(0.5, 2.0, generator=generator)
    module.running_mean.normal_(generator=generator)
    scale = (module.running_var + module.eps).rsqrt()
    x = torch.randn(shape, generator=generator)
    torch.testing.assert_close(ChannelAffine(scale, -module.running_mean * scale)(x), module(x))


def test_channel_affine_keeps_the_type_of_its_input() -> None:
    assert ChannelAffine(torch.ones(2), torch.zeros(2))(torch.zeros(1, 2, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_channel_affine_refuses_vectors_of_two_lengths() -> None:
    with pytest.raises(ValueError, match=r"one factor and one summand per channel, got shapes \(2,\) and \(3,\)"):
        ChannelAffine(torch.ones(2), torch.zeros(3))
