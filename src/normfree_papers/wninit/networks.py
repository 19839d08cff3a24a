"""Weight-normalized networks whose width changes from layer to layer, and the norms in them.

The library discovers the layers of these networks and sets their directions and lengths.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from normfree import discover
from normfree.methods import initialize_
from normfree.nn.weight_layers import WeightNormLinear
from normfree_papers.claims.depth_curves import straight_line


@dataclass(frozen=True)
class Norms:
    """Norms of activations over the input's and of gradients over the last one's, layer by layer, and their widths."""

    activations: list[float]
    gradients: list[float]
    widths: tuple[int, ...]


class Block(nn.Module):
    """h + W₂ ReLU(W₁ h)."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.first = WeightNormLinear(width, inner, bias=False)
        self.last = WeightNormLinear(inner, width, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        """Add the branch to the stream."""
        out: Tensor = h + self.last(torch.relu(self.first(h)))
        return out


def feed_forward(widths: Sequence[int]) -> nn.Sequential:
    """Layers of these widths, each with a ReLU, and a classifier."""
    layers = [layer for n, m in pairwise(widths) for layer in (WeightNormLinear(n, m, bias=False), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(widths[-1], 2))


def residual(widths: Sequence[int]) -> nn.Sequential:
    """Residual blocks and a classifier: the stream has the first width, the branches have the others."""
    width, *inner = widths
    return nn.Sequential(*(Block(width, size) for size in inner), nn.Linear(width, 2))


def initialized(model: nn.Sequential, method: str, inputs: int, g: torch.Generator) -> nn.Sequential:
    """The model as the library initializes it by a method."""
    initialize_(model, method, discover(model, torch.zeros(2, inputs)), generator=g)
    return model.requires_grad_(False)


def with_unit_lengths(model: nn.Sequential) -> nn.Sequential:
    """Set g = 1 in every layer."""
    for module in model.modules():
        if isinstance(module, WeightNormLinear):
            module.gain.fill_(1.0)
    return model


def _size(values: Tensor) -> float:
    """Root mean square of the norms of a batch."""
    return float(values.detach().square().sum(1).mean().sqrt())


def measure_norms(model: nn.Sequential, x: Tensor, g: torch.Generator) -> Norms:
    """Norms of the outputs of all ReLUs or blocks, and of gradients at all pre-activations or block outputs."""
    hidden, states, h = [], [], x.detach().requires_grad_()
    for module in list(model)[:-1]:
        h = module(h)
        if not isinstance(module, nn.ReLU):
            states.append(h)
        if not isinstance(module, WeightNormLinear):
            hidden.append(h)
    noise = torch.randn(states[-1].shape, generator=g).to(x)
    gradients = [_size(gradient) for gradient in torch.autograd.grad(states[-1], states, noise)]
    widths = (x.shape[1], *(state.shape[1] for state in states))
    return Norms([_size(v) / _size(x) for v in hidden], [v / gradients[-1] for v in gradients], widths)


def width_slopes(norms: Norms) -> tuple[float, float]:
    """The powers of its ratio of widths by which a layer changes the norms of activations and of gradients.

    Each is the slope of a line through the layers' logarithms. Activations: ‖h_l‖/‖h_{l-1}‖ over n_l/n_{l-1}.
    Gradients: ‖δ_l‖/‖δ_{l+1}‖ over n_l/n_{l+1}.
    """
    forward = [math.log(b / a) for a, b in pairwise([1.0, *norms.activations])]
    backward = [math.log(a / b) for a, b in pairwise(norms.gradients)]
    growth = [math.log(b / a) for a, b in pairwise(norms.widths)]
    return straight_line(growth, forward)[0], straight_line([-v for v in growth[1:]], backward)[0]
