"""Networks without residual sums: plain (fully connected, convolutional), dense (concatenating) and highway (gated)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from normfree.models.base import ModelConfig, Network, has_activation, walk, weight_layer_names
from normfree.models.builder import BlockBuilder, Named, chain
from normfree.plan import Layer, ResidualPlan


class PlainNetwork(Network):
    """A network whose layers follow one another."""

    skip = "none"

    @property
    def plan(self) -> ResidualPlan:
        """The plan: no residual sums."""
        _, activated = walk("stem", self.stem, False)
        body, activated = walk("body", self.body, activated, after=has_activation(self.head))
        return self._outside(body, stem_activated_out=False, activated=activated)


def mlp(depth: int, width: int, config: ModelConfig) -> Network:
    """`depth` linear layers, the classifier counted, ReLU between them.

    Reference: wninit, section 5.1 and Figures 1 and 2.
    """
    kit = BlockBuilder(config.method, "post", spatial=False)
    body: Named = []
    for _ in range(depth - 2):
        body += [*kit.bias(), *kit.named_layer(width, width), *kit.norm(width), *kit.activation()]
    stem = kit.stem(config.input_shape[0], width)
    return PlainNetwork(stem, chain(body), chain(kit.bias()), width, config)


def cnn(depth: int, width: int, config: ModelConfig) -> Network:
    """`depth` layers, the classifier counted: 3×3 convolutions of one width, the first two with stride 2.

    Reference: wninit, section 5.1 (convolutional networks) and Figure 3, left.
    """
    kit = BlockBuilder(config.method, "post", padding_mode=config.padding_mode)
    body: Named = []
    for i in range(depth - 2):
        layer = kit.named_layer(width, width, 3, 2 if i == 0 else 1)
        body += [*kit.bias(), *layer, *kit.norm(width), *kit.activation()]
    stem = kit.stem(config.input_shape[0], width, 3, 2)
    return PlainNetwork(stem, chain(body), kit.head(width), width, config)


class Concatenate(nn.Module):
    """x ↦ [x, f(x)] along the channels.

    Reference: normdead, section 3.1; Huang 2017.
    """

    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.branch = branch

    def forward(self, x: Tensor) -> Tensor:
        """Append the branch's channels."""
        return torch.cat([x, self.branch(x)], dim=1)


class Highway(nn.Module):
    """x ↦ T(x) · H(x) + (1 - T(x)) · x with T = sigmoid(W_T x - 1), so that the gates start mostly closed.

    Reference: normdead, section 3.1; Srivastava 2015, equation 3.
    """

    def __init__(self, gate: nn.Module, transform: nn.Module) -> None:
        super().__init__()
        self.gate = gate
        self.transform = transform

    def forward(self, x: Tensor) -> Tensor:
        """Mix the input with its transform, gate by gate."""
        gate = torch.sigmoid(self.gate(x) - 1.0)
        out: Tensor = gate * self.transform(x) + (1.0 - gate) * x
        return out


class DenseNetwork(Network):
    """A network that concatenates: every layer but the stem reads an activation, and is read through one."""

    skip = "dense"

    @property
    def plan(self) -> ResidualPlan:
        """The plan: no residual sums."""
        body = tuple(
            Layer(name, activated_in=True, activated_out=True) for name in weight_layer_names("body", self.body)
        )
        return self._outside(body, stem_activated_out=True, activated=True)


class HighwayNetwork(Network):
    """A network that gates: only the first gate and transform read an activation, the others a gated mixture."""

    skip = "highway"

    @property
    def plan(self) -> ResidualPlan:
        """The plan: a gated sum is not a residual sum, since its shortcut depends on the data."""
        body = tuple(
            Layer(name, activated_in=name.startswith("body.0."), activated_out=True, gate=name.endswith(".gate"))
            for name in weight_layer_names("body", self.body)
        )
        return self._outside(body, stem_activated_out=True, activated=False)


def dense(depth: int, growth: int, config: ModelConfig) -> Network:
    """DenseNet-(3n+4) for 32×32 images: three stages of n pre-activation 3×3 layers that add `growth` channels each.

    Reference: normdead, section 3.1; Huang 2017, section 4.2 (without bottlenecks).
    """
    kit = BlockBuilder(config.method, "pre", padding_mode=config.padding_mode)
    channels = 2 * growth
    body = nn.Sequential()
    for stage in range(3):
        parts: Named = []
        for _ in range((depth - 4) // 3):
            layer = [*kit.norm(channels), *kit.activation(), *kit.named_layer(channels, growth, 3)]
            parts.append(("dense", Concatenate(chain(layer))))
            channels += growth
        if stage < 2:
            layer = [*kit.norm(channels), *kit.activation(), *kit.named_layer(channels, channels)]
            parts += [("transition", chain(layer)), ("pool", nn.AvgPool2d(2))]
        body.append(chain(parts))
    stem = kit.stem(config.input_shape[0], 2 * growth, 3)
    return DenseNetwork(stem, body, kit.head(channels), channels, config)


def highway(depth: int, width: int, config: ModelConfig) -> Network:
    """`depth` layers of vectors, stem and classifier counted, the others gated.

    Reference: normdead, section 3.1; Srivastava 2015, section 3.
    """
    kit = BlockBuilder(config.method, "post", spatial=False)
    body = nn.Sequential()
    for _ in range(depth - 2):
        transform = [*kit.named_layer(width, width), *kit.norm(width), *kit.activation()]
        body.append(Highway(kit.layer(width, width), chain(transform)))
    stem = kit.stem(config.input_shape[0], width)
    return HighwayNetwork(stem, body, chain(kit.bias()), width, config)
