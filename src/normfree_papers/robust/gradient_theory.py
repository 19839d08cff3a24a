"""The gradient's variance over depth that the rules of `robust` give, strides and zero-padded borders included.

Equation 2 of the paper, on which its equation 6 rests, counts k² outputs for every input of a convolution. An input at
a zero-padded border has fewer, and one of a strided convolution k²/s² on average. Here the map of variances is
propagated back from the last sum with the taps that each position has. So the loss over a whole network is computed
and not estimated.

Reference: "A robust initialization of residual blocks", ICLR 2022 submission, section 2, equation 2; section 3.2,
equation 6.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import numpy as np
import torch
from torch import nn

from normfree import theory
from normfree.models import build
from normfree.plan import Layer
from normfree.theory import FloatArray

Weights = Literal["fan-in", "fan-out", "Brock"]
_BROCK = 2 / (1 - 1 / np.pi)  # equation 3


def weight_variance(module: nn.Conv2d, weights: Weights, *, activated: bool) -> float:
    """Equations 1 to 3: γ over fan-in or fan-out, with γ = 1 in place of 2 (or Brock's) where no ReLU comes before."""
    out, inputs, *kernel = module.weight.shape
    gamma = (_BROCK if weights == "Brock" else 2.0) if activated else 1.0
    return float(gamma / ((out if weights == "fan-out" else inputs) * np.prod(kernel)))


def carried_back(v: FloatArray, module: nn.Conv2d, size: tuple[int, ...], variance: float) -> FloatArray:
    """The map of variances at the input of a convolution, given that at its output: d·Var[W]·Tᵀ v T."""
    assert not isinstance(module.padding, str)
    rows, cols = (
        theory.tap_matrix(length, kernel, stride, padding)
        for length, kernel, stride, padding in zip(size, module.kernel_size, module.stride, module.padding, strict=True)
    )
    return module.out_channels * variance * theory.gradient_taps(v, rows, cols)


def expected_curve(model: str, method: str, weights: Weights, *, c: float, size: int = 32) -> list[float]:
    """The mean variance of the gradient at every sum, from the first to the last, which has 1.

    A ReLU lets half of a gradient through, and branch and shortcut are uncorrelated, as section 3.2 assumes; c is the
    factor of the sum.
    """
    network = build(model, method, device="meta")
    modules = dict(network.named_modules())
    sizes: dict[str, tuple[int, ...]] = {}
    for name, module in modules.items():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(lambda _m, args, _o, name=name: sizes.update({name: args[0].shape[2:]}))
    network(torch.empty(2, 3, size, size, device="meta"))

    def back(layers: Iterable[Layer], v: FloatArray) -> FloatArray:
        for layer in layers:
            conv = modules[layer.name]
            assert isinstance(conv, nn.Conv2d)
            variance = weight_variance(conv, weights, activated=layer.reads_activation)
            v = carried_back(v, conv, sizes[layer.name], (0.5 if layer.reads_activation else 1.0) * variance)
        return v

    last = network.plan.branches[-1].last.name
    v = np.ones(tuple(sizes[last]))  # the last layer of a branch is a 1×1 or 3×3 convolution that keeps the size
    found = [1.0]
    for branch in reversed(network.plan.branches[1:]):
        v = c**2 * (back(reversed(branch.layers), v) + back(reversed(branch.shortcut_layers), v))
        found.append(float(v.mean()))
    return found[::-1]
