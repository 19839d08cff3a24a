"""Batch norm and centred weight norm on a single layer: scales, biases and gradients, for section 5.2 of `normdead`.

Reference: Hoedt, Hochreiter, Klambauer 2022, section 5.2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from normfree_papers.normdead.float64_draws import apart, batch_norm, generator, he, normal
from normfree_papers.normdead.nf_signal import centred

_FACTOR = 3.0
_INPUTS, _OUTPUTS, _BATCH = 64, 32, 128
Layer = Callable[[Tensor], Tensor]


def input_gradient(layer: Layer, x: Tensor, target: Tensor) -> Tensor:
    """Gradient at the input of ½‖ReLU(layer(x)) - target‖²."""
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(0.5 * (torch.relu(layer(x)) - target).square().sum(), x)
    return gradient


def share(gradient: Tensor, dim: int) -> float:
    """RMS of the mean over a dimension, relative to the RMS of all numbers."""
    return float(gradient.mean(dim).square().mean().sqrt() / gradient.square().mean().sqrt())


def layer_values(seed: int) -> dict[str, float]:
    """The effect of batch norm and of centred weight norm on scales, biases and gradients of one layer."""
    g = generator(seed)
    x = normal((_BATCH, _INPUTS), g) + normal((1, _INPUTS), g)
    target = normal((_BATCH, _OUTPUTS), g)
    plain, weights = he(_INPUTS, _OUTPUTS, 1.0, g), centred(_INPUTS, _OUTPUTS, 1.0, g)
    for parameter in (*plain.parameters(), *weights.parameters()):
        parameter.requires_grad_(False)
    shift, gain = normal((_OUTPUTS,), g), 0.5 + normal((_OUTPUTS,), g).abs()

    def normed(t: Tensor) -> Tensor:
        return batch_norm(plain(t))

    before = {"batch norm": normed(x), "centred weight norm": weights(x), "neither": plain(x)}
    values = {
        "input scale, batch norm": apart(normed(_FACTOR * x), before["batch norm"]),
        "input scale, centred weight norm": apart(weights(_FACTOR * x), before["centred weight norm"]),
        "output over 3 at 3 times the input, centred weight norm": apart(
            weights(_FACTOR * x) / _FACTOR, before["centred weight norm"]
        ),
        "bias before batch norm": apart(batch_norm(plain(x) + shift), before["batch norm"]),
        "affine scale, centred weight norm": _with_gain(weights, gain, x, before["centred weight norm"]),
        "bias, centred weight norm": _with_bias(weights, shift, x, before["centred weight norm"]),
        "gradient's mean over the batch, batch norm": share(
            # At the input of the normalizer, as in equation 3.
            input_gradient(batch_norm, plain(x), target),
            0,
        ),
        "gradient's mean over the batch, centred weight norm": share(input_gradient(weights, x, target), 0),
        "gradient's mean over inputs, centred weight norm": share(input_gradient(weights, x, target), 1),
        "gradient's mean over inputs, neither": share(input_gradient(plain, x, target), 1),
    }
    factors = normal((_OUTPUTS, 1), g).exp()
    plain.weight.mul_(factors)
    weights.weight.mul_(factors)
    values |= {
        "weight scale, batch norm": apart(normed(x), before["batch norm"]),
        "weight scale, centred weight norm": apart(weights(x), before["centred weight norm"]),
        "weight scale, neither": apart(plain(x), before["neither"]),
    }
    return values


def _with_gain(layer: Any, gain: Tensor, x: Tensor, before: Tensor) -> float:
    """The difference between the layer with gains and its output times the gains."""
    layer.gain.copy_(gain.unsqueeze(1))
    found = apart(layer(x), gain * before)
    layer.gain.fill_(1.0)
    return found


def _with_bias(layer: Any, shift: Tensor, x: Tensor, before: Tensor) -> float:
    """The difference between the layer with a bias and its output plus the bias."""
    layer.bias = nn.Parameter(shift.clone(), requires_grad=False)
    found = apart(layer(x), before + shift)
    layer.bias = None
    return found
