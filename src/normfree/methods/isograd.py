"""`isograd`, our own method: fan-out corrected for stride and padding, so that the gradient's variance is flat.

In a convolution, the gradient of an input position sums over the kernel taps that reach it: k² inside, fewer at the
zero-padded border, k²/s² with stride s. Fan-out counts k² everywhere, so every strided or padded layer loses some
variance. Here the layer's count t follows from the map v of gradient variances at its output, which is propagated back
analytically from the output of the network:

    Var[W] = γ / (d · t),    t = mean(Tᵀ v T) / mean(v),    v ← Tᵀ v T / t

with T the layer's one-dimensional tap matrix (stride and padding included), d its output channels and γ = 2 where it
reads a ReLU. Where something else changes the resolution (pooling, upsampling), the map is taken as flat.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from normfree import theory
from normfree.methods.initialize import InitContext, gain, standardized
from normfree.methods.method import SQRT_HALF, Method, Rule, require_choice
from normfree.methods.method_registry import register
from normfree.nn.model_state import on_meta
from normfree.plan import Layer
from normfree.theory import FloatArray

_HALF = 0.5  # c² of the sum


class _Sizes(NamedTuple):
    """The resolution (H, W) at a layer's input and output; (1, 1) for vectors."""

    before: tuple[int, ...]
    after: tuple[int, ...]


def _isograd_(ctx: InitContext) -> None:
    """Propagate the map v back from the last sum to the stem, then draw every layer.

    A layer outside stem and branches gets plain fan-out, because the plan does not say where it is.
    """
    for layer, module in ctx.each(ctx.plan.layers()):
        if not isinstance(module, nn.Conv2d | nn.Linear):
            raise ValueError(
                "isograd is meant for ResNets, and follows the gradient through 2-D convolutions and linear layers, "
                f"got {type(module).__name__} at '{layer.name}'; use 'fixup' for this model"
            )
    sizes = _resolutions(ctx)
    variances = {layer.name: gain(layer) / ctx.fans(layer)[1] for layer in ctx.plan.body}

    def back(layers: Iterable[Layer], v: FloatArray) -> FloatArray:
        for layer in layers:
            after = sizes[layer.name].after
            variances[layer.name], v = _layer_back(layer, ctx.module(layer), sizes[layer.name], _resized(v, after))
        return v

    last = next(branch for branch in reversed(ctx.plan.branches) if branch.layers)  # a sum of whole blocks has none
    v = np.ones(sizes[last.last.name].after)
    for branch in reversed(ctx.plan.branches):
        inner = back(reversed(branch.layers), v)
        v = _HALF * (inner + _resized(back(reversed(branch.shortcut_layers), v), inner.shape))
    back(reversed(ctx.plan.stem), v)
    for layer in ctx.plan.hidden():
        ctx.set_(layer, standardized(ctx.normal(layer), variances[layer.name]))
    ctx.default_classifier_()


def _resized(v: FloatArray, shape: tuple[int, ...]) -> FloatArray:
    """Return the map, or a flat one of the same mean where it has another resolution."""
    return v if v.shape == shape else np.full(shape, v.mean())


def _layer_back(layer: Layer, module: nn.Conv2d | nn.Linear, sizes: _Sizes, v: FloatArray) -> tuple[float, FloatArray]:
    """Return a layer's weight variance and the map at its input, given the variance map v of its output's gradient."""
    if isinstance(module, nn.Linear):
        return gain(layer) / module.out_features, v
    circular = module.padding_mode == "circular"
    rows, cols = (
        theory.tap_matrix(size, kernel, stride, padding, dilation, circular=circular)
        for size, kernel, stride, padding, dilation in zip(
            sizes.before, module.kernel_size, module.stride, _padding(module), module.dilation, strict=True
        )
    )
    t = theory.effective_taps(v, rows, cols)
    per_group = module.out_channels // module.groups
    return gain(layer) / (per_group * t), theory.gradient_taps(v, rows, cols) / t


def _padding(module: nn.Conv2d) -> tuple[int, ...]:
    """Return the padding of each axis per side; for 'same' with an even kernel, the padding on the left."""
    if module.padding == "same":
        return tuple(d * (k - 1) // 2 for d, k in zip(module.dilation, module.kernel_size, strict=True))
    return (0, 0) if isinstance(module.padding, str) else module.padding


def _resolutions(ctx: InitContext) -> dict[str, _Sizes]:
    """Return the resolutions of every layer, from a forward pass on meta tensors."""
    if isinstance(ctx.example, torch.Tensor):
        shape: tuple[int, ...] = tuple(ctx.example.shape[1:])
        if not ctx.example.is_floating_point():
            raise ValueError(
                f"isograd is meant for ResNets, and expects a batch of images, got values of type {ctx.example.dtype}; "
                "use 'fixup' for this model"
            )
    else:
        shape = getattr(ctx.model, "input_shape", ())
        if not shape:
            raise ValueError(
                "isograd expects the input's resolution: pass one batch of images, as a tensor, as example"
            )
    sizes: dict[str, _Sizes] = {}

    def record(name: str, *shapes: torch.Size) -> None:
        sizes[name] = _Sizes(*(tuple(shape[2:]) if len(shape) == 4 else (1, 1) for shape in shapes))

    with on_meta(ctx.model):  # removes the hooks afterwards
        for layer, module in ctx.each(ctx.plan.layers()):
            module.register_forward_hook(lambda _m, args, out, name=layer.name: record(name, args[0].shape, out.shape))
        try:
            ctx.model(torch.empty((2, *shape), device="meta"))
        except Exception as error:  # whatever the model's own code raises
            raise ValueError(
                "isograd is meant for ResNets, and reads the resolution of each layer from a pass without values, but "
                f"{type(ctx.model).__name__} failed there ({type(error).__name__}); use 'fixup' for this model"
            ) from error
    for layer in ctx.plan.layers():
        if layer.name not in sizes:
            raise ValueError(
                f"isograd is meant for ResNets, and expects layers that are called, but '{layer.name}' is used without "
                "a call; use 'fixup' for this model"
            )
    return sizes


@register
def isograd(*, shortcut: str = "identity") -> Method:
    """x' = √½ · (h(x) + f(x)) with Var[W] = γ/(d·t); `shortcut=conv` adds a 1×1 convolution to every block.

    Meant for ResNets: networks of 2-D convolutions whose blocks are modules that return their sum, or its ReLU. Other
    models can only be converted if every residual sum has such a module of its own. A Transformer's blocks do not: each
    has two sums.

    Reference: none; it completes robust, section 2, equation 2, which counts taps without stride and padding.
    """
    require_choice("isograd", "shortcut", shortcut, ("identity", "conv"))
    return Method(
        name="isograd",
        summary="for ResNets: fan-out corrected for stride and zero padding, so that the gradient's variance is flat",
        reference="ours; docs/design.md",
        shortcut_text="identity, or as convshort",
        weights_text="plain; fan-out corrected for stride and padding, standardized after sampling",
        rule=Rule(c=SQRT_HALF),
        initializer=_isograd_,
        form="pre",
        forms=("pre",),
        shortcut="conv everywhere" if shortcut == "conv" else "conv",
    )
