"""Weight-normalized networks whose widths change from layer to layer, and the norms in them.

Reference: wninit, Figure 1, whose widths are drawn anew for every layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from normfree.nn.weight_layers import WeightNormLinear, set_weight_


@dataclass(frozen=True)
class Norms:
    """Norms of activations and of gradients, layer by layer, relative to where they start."""

    activations: list[float]
    gradients: list[float]


def _layer(n: int, m: int, g: torch.Generator, device: str) -> WeightNormLinear:
    """A layer with orthogonal directions."""
    layer = WeightNormLinear(n, m, bias=False)
    set_weight_(layer, nn.init.orthogonal_(torch.empty(m, n), generator=g))
    return layer.requires_grad_(False).to(device)


def _lengths_(layer: WeightNormLinear, gamma: float | None) -> WeightNormLinear:
    """Set g = √(γ·n/m), or 1 where γ is None."""
    length = 1.0 if gamma is None else (gamma * layer.in_features / layer.out_features) ** 0.5
    with torch.no_grad():
        layer.gain.fill_(length)
    return layer


def _size(values: Tensor) -> float:
    """Root mean square of the norms of a batch."""
    return float(values.detach().square().sum(1).mean().sqrt())


def _norms(x: Tensor, hidden: Sequence[Tensor], states: Sequence[Tensor], noise: Tensor) -> Norms:
    """Norms of `hidden` over that of the input x, and of the gradients at `states` over the last one's."""
    gradients = [_size(gradient) for gradient in torch.autograd.grad(states[-1], states, noise)]
    return Norms([_size(h) / _size(x) for h in hidden], [g / gradients[-1] for g in gradients])


def feed_forward(widths: Sequence[int], g: torch.Generator, device: str = "cpu") -> Callable[[bool], Norms]:
    """Layers of these widths with ReLU after each; the pre-activations carry the gradient."""
    layers = [_layer(n, m, g, device) for n, m in pairwise(widths)]
    x = torch.randn(64, widths[0], generator=g).to(device).requires_grad_()
    noise = torch.randn(64, widths[-1], generator=g).to(device)

    def measure(proposed: bool) -> Norms:
        states, h = [], x
        for layer in layers:
            states.append(_lengths_(layer, 2.0 if proposed else None)(h))
            h = torch.relu(states[-1])
        return _norms(x, [torch.relu(a) for a in states], states, noise)

    return measure


def residual(widths: Sequence[int], g: torch.Generator, device: str = "cpu") -> Callable[[bool], Norms]:
    """Blocks h + W₂ ReLU(W₁ h), the stream of the first width and the branches of the others."""
    width, *inner = widths
    blocks = [(_layer(width, size, g, device), _layer(size, width, g, device)) for size in inner]
    x = torch.randn(64, width, generator=g).to(device).requires_grad_()
    noise = torch.randn(64, width, generator=g).to(device)

    def measure(proposed: bool) -> Norms:
        states, h = [], x
        for first, last in blocks:
            inside = torch.relu(_lengths_(first, 2.0 if proposed else None)(h))
            h = h + _lengths_(last, 1 / len(blocks) if proposed else None)(inside)
            states.append(h)
        return _norms(x, states, states, noise)

    return measure
