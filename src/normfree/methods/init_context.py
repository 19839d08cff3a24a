"""`InitContext`: the argument of every initializer, with the model, its plan, and functions to draw and set weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from normfree import theory
from normfree.nn.embedding import TokenEmbedding
from normfree.nn.model_state import eval_mode
from normfree.nn.normalizers import NORM_TYPES
from normfree.nn.weight_layers import set_weight_
from normfree.plan import Layer, ResidualPlan

Batch = Tensor | tuple[Tensor, ...]
"""A batch of inputs: one tensor, or a tuple of the model's arguments."""


@dataclass(frozen=True)
class InitContext:
    """The model, plan, generator and batch that an initializer works with.

    Every draw comes from `generator`, or from torch's global generator if that is None. Weights are handled with the
    outputs first, `(outputs, inputs, *kernel)`, whatever the layout in the module.
    """

    model: nn.Module
    plan: ResidualPlan
    generator: torch.Generator | None = None
    example: Batch | None = None
    modules: dict[str, nn.Module] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "modules", dict(self.model.named_modules()))

    def module(self, layer: Layer) -> nn.Conv2d | nn.Linear:
        """Return the module that holds a layer's weight; raise `ValueError` if the model has none."""
        module = self.modules.get(layer.name)
        weight = getattr(module, layer.parameter, None)
        if not isinstance(weight, Tensor) or weight.dim() < 2 or isinstance(module, NORM_TYPES):
            got = "nothing" if module is None else type(module).__name__
            raise ValueError(f"expected a weight layer at '{layer.name}', got {got}; the plan belongs to another model")
        return module  # type: ignore[return-value]  # Conv1d, Conv3d and other holders of weights have the same fields

    def each(self, layers: Iterable[Layer]) -> Iterator[tuple[Layer, nn.Conv2d | nn.Linear]]:
        """Iterate over pairs of layer and module."""
        return ((layer, self.module(layer)) for layer in layers)

    def shape(self, layer: Layer) -> tuple[int, ...]:
        """Return the shape of a layer's weight, outputs first."""
        first, *rest = getattr(self.module(layer), layer.parameter).shape
        if not layer.transposed:
            return (first, *rest)
        return (rest[0], first, *rest[1:]) if self._convolves(layer) else (math.prod(rest), first)

    def fans(self, layer: Layer) -> tuple[int, int]:
        """Return fan-in k²·c and fan-out k²·d of a layer, per group and, for a fused layer, per part."""
        out, inputs, *kernel = self.shape(layer)
        groups = getattr(self.module(layer), "groups", 1)
        if layer.transposed:
            out *= groups
        else:
            inputs *= groups
        return theory.fan_in(inputs, kernel, groups), theory.fan_out(out // layer.parts, kernel, groups)

    def normal(self, layer: Layer, variance: float = 1.0) -> Tensor:
        """Draw a weight with independent N(0, variance) entries, on the generator's device."""
        return self._empty(self.shape(layer)).normal_(generator=self.generator).mul_(variance**0.5)

    def uniform(self, layer: Layer, variance: float) -> Tensor:
        """Draw a weight with independent entries of a uniform distribution around 0, on the generator's device."""
        return self._empty(self.shape(layer)).uniform_(-1, 1, generator=self.generator).mul_((3 * variance) ** 0.5)

    def xavier(self, layer: Layer) -> Tensor:
        """Draw a weight with independent N(0, 2/(fan_in + fan_out)) entries."""
        return self.normal(layer, 2.0 / sum(self.fans(layer)))

    def orthogonal(self, layer: Layer) -> Tensor:
        """Draw a weight whose (outputs, rest) matrix is orthogonal, from the Haar measure (sign-corrected QR).

        Each part of a fused layer and each group of a grouped convolution is a matrix of its own. One matrix for all
        groups would give a depthwise layer of c channels rows of norm k/√c, so weight norm would update their
        directions c/k² times as fast.
        """
        out, *rest = self.shape(layer)
        groups = 1 if layer.transposed else getattr(self.module(layer), "groups", 1)
        pieces = math.lcm(layer.parts, groups)
        draws = [self._empty((out // pieces, *rest)) for _ in range(pieces)]
        return torch.cat([nn.init.orthogonal_(draw, generator=self.generator) for draw in draws])

    def set_(self, layer: Layer, weight: Tensor) -> None:
        """Set a layer's weight; a weight that is tied to an embedding stays unchanged.

        Parallel layers whose outputs are added share the variance.
        """
        if layer.tied:
            return
        module = self.module(layer)
        if layer.share > 1:
            weight = weight * layer.share**-0.5
        if layer.transposed:
            stored_shape = getattr(module, layer.parameter).shape
            weight = (weight.transpose(0, 1) if self._convolves(layer) else weight.mT).reshape(stored_shape)
        set_weight_(module, weight, layer.parameter, name=layer.path)

    def zero_(self, layer: Layer) -> None:
        """Set a layer's weight to 0."""
        self.set_(layer, torch.zeros(self.shape(layer), device=getattr(self.module(layer), layer.parameter).device))

    def default_(self, layer: Layer) -> None:
        """Set a layer's weight to torch's default, U(-1/√fan_in, 1/√fan_in), so that Var[W] = 1/(3·fan_in)."""
        draw = self._empty(self.shape(layer)).uniform_(-1, 1, generator=self.generator)
        self.set_(layer, draw.div_(self.fans(layer)[0] ** 0.5))

    def default_classifier_(self) -> None:
        """Set the classifier's weight to torch's default; its bias stays 0."""
        for layer in self.plan.classifier:
            self.default_(layer)

    def embed_(self, factor: float = 1.0) -> None:
        """Draw each `TokenEmbedding` from N(0, 1/width), times a factor; other embeddings stay unchanged."""
        for module in self.modules.values():
            if isinstance(module, TokenEmbedding):
                draw = self._empty(tuple(module.weight.shape)).normal_(generator=self.generator)
                module.weight.copy_(draw.mul_(factor * module.embedding_dim**-0.5))

    def run(self) -> None:
        """Run the model on the batch, in evaluation mode, so that dropout draws nothing from the global generator."""
        if self.example is None:
            raise ValueError("expected a batch to calibrate on, got none; pass example=a batch of inputs")
        like = next(self.model.parameters())
        given = (self.example,) if isinstance(self.example, Tensor) else self.example
        # Copies, because a model may write into its input.
        args = [t.to(like.device, like.dtype if t.is_floating_point() else t.dtype, copy=True) for t in given]
        with eval_mode(self.model):
            self.model(*args)

    def zero_biases_(self) -> None:
        """Set the bias of every weight layer to 0."""
        for layer, module in self.each(self.plan.layers()):
            for name in {layer.parameter.replace("weight", "bias"), "in_proj_bias"}:
                bias = getattr(module, name, None)
                if isinstance(bias, nn.Parameter) and name != layer.parameter:
                    bias.zero_()

    def _empty(self, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, device=self.generator.device if self.generator else "cpu")

    def _convolves(self, layer: Layer) -> bool:
        return isinstance(self.module(layer), nn.modules.conv._ConvNd)


def fans(module: nn.Conv2d | nn.Linear) -> tuple[int, int]:
    """Return fan-in k²·c and fan-out k²·d of a plain weight layer, per group."""
    out, per_group, *kernel = module.weight.shape
    groups = getattr(module, "groups", 1)
    return theory.fan_in(per_group * groups, tuple(kernel), groups), theory.fan_out(out, tuple(kernel), groups)


def gain(layer: Layer) -> float:
    """Return γ of He's rule: 2 if the layer's input is a ReLU's output, else 1."""
    return theory.forward_gain("relu") if layer.activated_in else 1.0


def standardized(weight: Tensor, variance: float, *, per_channel: bool = False) -> Tensor:
    """Shift and scale a sampled weight to mean 0 and exactly this variance, overall or per output channel.

    Reference: robust, section 4 ("we perform the empirical standardization"); per channel as equation 3.
    """
    rows = weight.flatten(1) if per_channel else weight.flatten().unsqueeze(0)
    centred = rows - rows.mean(1, keepdim=True)
    # A row of one weight has no variance of its own and keeps its drawn value.
    std = centred.square().mean(1, keepdim=True).sqrt()
    centred = torch.where(std > 0, centred / std.clamp_min(1e-12), rows)
    scaled: Tensor = centred * variance**0.5
    return scaled.view_as(weight)
