"""Networks without residual sums: plain (fully connected, convolutional), dense (concatenating) and highway (gated)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from normfree.models.base import (
    BlockBuilder,
    ModelConfig,
    NamedModules,
    Network,
    has_activation,
    named_sequential,
    sequence_layers,
    weight_layer_names,
)
from normfree.plan import Layer, ResidualPlan


class PlainNetwork(Network):
    """A network whose layers follow one another."""

    skip = "none"

    @property
    def plan(self) -> ResidualPlan:
        """The plan, without residual sums."""
        _, activated = sequence_layers("stem", self.stem, False)
        body, activated = sequence_layers("body", self.body, activated, after=has_activation(self.head))
        return self._outside(body, stem_feeds_activation=False, activated=activated)


def mlp(depth: int, width: int, config: ModelConfig) -> Network:
    """Return a network of `depth` linear layers with ReLU between them; the classifier counts.

    Reference: wninit, section 5.1 and Figures 1 and 2.
    """
    builder = BlockBuilder(config.method, "post", spatial=False)
    body: NamedModules = []
    for _ in range(depth - 2):
        body += [*builder.bias(), *builder.named_layer(width, width), *builder.norm(width), *builder.activation()]
    stem = builder.stem(config.input_shape[0], width)
    return PlainNetwork(stem, named_sequential(body), named_sequential(builder.bias()), width, config)


def cnn(depth: int, width: int, config: ModelConfig) -> Network:
    """Return a network of `depth` layers, 3×3 convolutions, the first two with stride 2; the classifier counts.

    Reference: wninit, section 5.1 (convolutional networks) and Figure 3, left.
    """
    builder = BlockBuilder(config.method, "post", padding_mode=config.padding_mode)
    body: NamedModules = []
    for i in range(depth - 2):
        layer = builder.named_layer(width, width, 3, 2 if i == 0 else 1)
        body += [*builder.bias(), *layer, *builder.norm(width), *builder.activation()]
    stem = builder.stem(config.input_shape[0], width, 3, 2)
    return PlainNetwork(stem, named_sequential(body), builder.head(width), width, config)


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
        """Mix the input with its transform by the gates."""
        gate = torch.sigmoid(self.gate(x) - 1.0)
        out: Tensor = gate * self.transform(x) + (1.0 - gate) * x
        return out


class DenseNetwork(Network):
    """A network that concatenates: an activation precedes and follows every layer but the stem."""

    skip = "dense"

    @property
    def plan(self) -> ResidualPlan:
        """The plan, without residual sums."""
        body = tuple(
            Layer(name, reads_activation=True, feeds_activation=True) for name in weight_layer_names("body", self.body)
        )
        return self._outside(body, stem_feeds_activation=True, activated=True)


class HighwayNetwork(Network):
    """A network with gates: only the first gate and transform read an activation, the others a gated mixture."""

    skip = "highway"

    @property
    def plan(self) -> ResidualPlan:
        """The plan, without residual sums: the shortcut of a gated sum depends on the data."""
        body = tuple(
            Layer(name, reads_activation=name.startswith("body.0."), feeds_activation=True, gate=name.endswith(".gate"))
            for name in weight_layer_names("body", self.body)
        )
        return self._outside(body, stem_feeds_activation=True, activated=False)


def dense(depth: int, growth: int, config: ModelConfig) -> Network:
    """Return DenseNet-(3n+4) for 32×32 images: three stages of n pre-activation 3×3 layers of `growth` channels.

    Reference: normdead, section 3.1; Huang 2017, section 4.2 (without bottlenecks).
    """
    builder = BlockBuilder(config.method, "pre", padding_mode=config.padding_mode)
    channels = 2 * growth
    body = nn.Sequential()
    for stage in range(3):
        parts: NamedModules = []
        for _ in range((depth - 4) // 3):
            layer = [*builder.norm(channels), *builder.activation(), *builder.named_layer(channels, growth, 3)]
            parts.append(("dense", Concatenate(named_sequential(layer))))
            channels += growth
        if stage < 2:
            layer = [*builder.norm(channels), *builder.activation(), *builder.named_layer(channels, channels)]
            parts += [("transition", named_sequential(layer)), ("pool", nn.AvgPool2d(2))]
        body.append(named_sequential(parts))
    stem = builder.stem(config.input_shape[0], 2 * growth, 3)
    return DenseNetwork(stem, body, builder.head(channels), channels, config)


def highway(depth: int, width: int, config: ModelConfig) -> Network:
    """Return a network of `depth` layers of vectors, all gated but stem and classifier.

    Reference: normdead, section 3.1; Srivastava 2015, section 3.
    """
    builder = BlockBuilder(config.method, "post", spatial=False)
    body = nn.Sequential()
    for _ in range(depth - 2):
        transform = [*builder.named_layer(width, width), *builder.norm(width), *builder.activation()]
        body.append(Highway(builder.layer(width, width), named_sequential(transform)))
    stem = builder.stem(config.input_shape[0], width)
    return HighwayNetwork(stem, body, named_sequential(builder.bias()), width, config)
