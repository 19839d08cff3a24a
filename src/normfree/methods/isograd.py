"""`isograd`, which no paper has: fan-out corrected for stride and padding, so that the gradient's variance is flat.

A convolution gives each input position as many gradients as kernel taps reach it: k² inside, fewer at the zero-padded
border, k²/s² with stride s. Fan-out counts k² everywhere, so every strided or padded layer loses a little. Here the
layer's count t is computed from the map v of gradient variances at its output, which is carried back analytically from
the output of the network:

    Var[W] = γ / (d · t),    t = mean(Tᵀ v T) / mean(v),    v ← Tᵀ v T / t

with T the layer's one-dimensional tap matrix (stride and padding in it), d its output channels and γ = 2 where it reads
a ReLU.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import nn

from normfree import theory
from normfree.methods.record import SQRT_HALF, Method, Rule
from normfree.methods.registry import register
from normfree.methods.site import Site, gain, standardized
from normfree.nn.borrowed import on_meta
from normfree.plan import Layer


def _isograd_(site: Site) -> None:
    for layer, module in site.each(site.plan.layers()):
        if not isinstance(module, nn.Conv2d | nn.Linear):
            raise ValueError(
                f"isograd follows the gradient through convolutions and linear layers, got {type(module).__name__} at "
                f"'{layer.name}'; use 'fixup' for this model"
            )
    sizes = _spatial_sizes(site)
    half = 0.5  # c² of the sum
    variances: dict[str, float] = {}

    def back(layers: Iterable[Layer], v: np.ndarray) -> np.ndarray:
        for layer in layers:
            variances[layer.name], v = _layer_back(layer, site.module(layer), sizes[layer.name], v)
        return v

    last = next(branch for branch in reversed(site.plan.branches) if branch.layers)  # a sum of whole blocks has none
    v = np.ones(sizes[last.last.name][1])
    for branch in reversed(site.plan.branches):
        through_branch = back(reversed(branch.layers), v)
        through_shortcut = back(reversed(branch.shortcut_layers), v)
        v = half * (through_branch + through_shortcut)
    for layer in reversed(site.plan.stem):
        # Pooling may stand between the stem and the first block; then its map is not known and taken as flat.
        v = v if v.shape == sizes[layer.name][1] else np.ones(sizes[layer.name][1])
        v = back([layer], v)
    for layer in site.plan.hidden():
        site.set_(layer, standardized(site.normal(layer), variances[layer.name]))
    site.default_classifier_()


def _layer_back(
    layer: Layer, module: nn.Conv2d | nn.Linear, sizes: tuple[tuple[int, int], tuple[int, int]], v: np.ndarray
) -> tuple[float, np.ndarray]:
    """The weight variance of a layer whose output gradients have the variance map v, and the map at its input."""
    if isinstance(module, nn.Linear):
        return gain(layer) / module.out_features, v
    if v.shape != sizes[1]:
        raise ValueError(
            f"isograd expects a gradient map of shape {sizes[1]} at '{layer.name}', got {v.shape}: something between "
            "this layer and the next changes the resolution; use 'idshort' or 'fixup' for this model"
        )
    taps = [
        theory.tap_matrix(
            sizes[0][axis],
            module.kernel_size[axis],
            module.stride[axis],
            int(module.padding[axis]),
            module.dilation[axis],
            circular=module.padding_mode == "circular",
        )
        for axis in (0, 1)
    ]
    t = theory.effective_taps(v, taps[0], taps[1])
    per_group = module.out_channels // module.groups
    return gain(layer) / (per_group * t), theory.gradient_taps(v, taps[0], taps[1]) / t


def _spatial_sizes(site: Site) -> dict[str, tuple[tuple[int, int], tuple[int, int]]]:
    """Input and output resolution of every layer, from a forward pass of shapes only (meta tensors)."""
    sizes: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {}

    def record(name: str, shape_in: torch.Size, shape_out: torch.Size) -> None:
        spatial = (shape_in[2:], shape_out[2:]) if len(shape_in) == 4 else ((1, 1), (1, 1))
        sizes[name] = ((spatial[0][0], spatial[0][1]), (spatial[1][0], spatial[1][1]))

    if isinstance(site.example, torch.Tensor):
        shape: tuple[int, ...] = tuple(site.example.shape[1:])
    else:
        shape = getattr(site.model, "input_shape", ())
        if not shape:
            raise ValueError("isograd expects the input's resolution, got a model without it; pass example=a batch")
    hooks = [
        site.module(layer).register_forward_hook(
            lambda _m, args, out, name=layer.name: record(name, args[0].shape, out.shape)
        )
        for layer in site.plan.layers()
    ]
    try:
        with on_meta(site.model):
            site.model(torch.empty((2, *shape), device="meta"))
    finally:
        for hook in hooks:
            hook.remove()
    return sizes


@register
def isograd(*, shortcut: str = "identity") -> Method:
    """x' = √½ · (h(x) + f(x)) with Var[W] = γ/(d·t); `shortcut=conv` puts a 1×1 convolution in every block.

    Reference: none; it completes robust, section 3.2, where equation 2 counts taps without stride and padding.
    """
    if shortcut not in ("identity", "conv"):
        raise ValueError(f"expected option 'shortcut' of method 'isograd' to be identity or conv, got '{shortcut}'")
    return Method(
        name="isograd",
        summary="fan-out corrected for stride and zero padding: the gradient's variance is flat through the network",
        paper="none",
        reference="ours; docs/design.md",
        h="identity, or as convshort",
        weights="plain; fan-out corrected for stride and padding, standardized after sampling",
        rule=Rule(c=SQRT_HALF),
        initializer=_isograd_,
        form="pre",
        forms=("pre",),
        shortcut="conv everywhere" if shortcut == "conv" else "conv",
    )
