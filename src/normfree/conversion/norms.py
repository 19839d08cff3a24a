"""Find the normalizers of any model, and remove them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from normfree.conversion.changes import Removed
from normfree.conversion.inspection import Inspection
from normfree.nn.normalizers import FUSED, DynamicTanh, is_norm
from normfree.nn.weight_layers import WEIGHT_LAYERS

_UNKNOWN = re.compile(r"(Norm(Act)?|LRN)(\d?d)?$")


class RemovedNorm(nn.Module):
    """Identity that keeps the removed normalizer's weight, for code that reads it (usually only its dtype)."""

    weight: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        """Return the signal."""
        return x


class Copied(nn.Module):
    """Returns a copy of its input, where the model's own code writes into the output of a normalizer."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the same values in new memory."""
        return x.clone()


def find_norms(model: nn.Module) -> dict[str, nn.Module]:
    """The normalizers of a model by name, a shared one under its first name."""
    return {name: module for name, module in model.named_modules() if is_norm(module)}


def unknown_norms(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules whose class is named like a normalizer but is not one that can be removed.

    Torch's parametrizations of weights (`_WeightNorm`) do not normalize the signal.
    """
    for name, module in model.named_modules():
        named_so = _UNKNOWN.search(type(module).__name__) and ".parametrizations." not in f".{name}"
        leaf = next(module.children(), None) is None
        if named_so and leaf and not is_norm(module) and not isinstance(module, (*WEIGHT_LAYERS, RemovedNorm)):
            yield name, module


def channels_of(norm: nn.Module) -> tuple[int, int] | None:
    """The number of channels of a normalizer and their dimension in its input; None if the number is unknown."""
    weight = getattr(norm, "weight", None)
    sizes = [getattr(norm, name, None) for name in ("num_features", "num_channels", "normalized_shape")]
    size: Any = weight.numel() if isinstance(weight, Tensor) else next((s for s in sizes if s is not None), None)
    if isinstance(size, tuple | list):
        size = size[0] if len(size) == 1 else None
    if not isinstance(size, int) or (isinstance(weight, Tensor) and weight.dim() != 1):
        return None
    batched = nn.modules.batchnorm._BatchNorm | nn.modules.instancenorm._InstanceNorm | nn.GroupNorm
    by_channel = isinstance(norm, batched) or re.search(r"2d|BatchNorm|GroupNorm", type(norm).__name__)
    return size, 1 if by_channel else -1


def remove_norms_(model: nn.Module, inspection: Inspection, *, tanh: float | None) -> list[Removed]:
    """Remove every normalizer, or replace it with dynamic tanh of initial α = `tanh` if given.

    Also sets `inplace=False` on every module: its input is now the residual stream.
    """
    names = {id(norm): name for name, norm in find_norms(model).items()}
    replacements: dict[int, nn.Module] = {}
    removed: dict[int, Removed] = {}
    for parent in list(model.modules()):
        for key, child in list(parent._modules.items()):
            if child is None or not is_norm(child):
                continue
            if id(child) not in replacements:
                name = names[id(child)]
                new = _replacement(
                    child,
                    tanh=tanh,
                    keep_weight=name in inspection.weight_read,
                    copied=name in inspection.overwritten,
                )
                replacements[id(child)] = new
                removed[id(child)] = Removed(name, type(child).__name__, _classes(new))
            parent._modules[key] = replacements[id(child)]
    for module in model.modules():
        if getattr(module, "inplace", False) is True:
            setattr(module, "inplace", False)  # noqa: B010  (no type declares the attribute)
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0  # else inference would run one kernel with layer norm inside
    return [removed[key] for key in names if key in removed]


def plain_base(layer: nn.Module, shapes: tuple[Tensor, Tensor]) -> type[nn.Module] | None:
    """The class of torch that a weight layer extends, if that maps this input to an output of the same shape."""
    x, out = shapes
    base: Any = next(c for c in type(layer).__mro__ if c in WEIGHT_LAYERS)
    with torch.no_grad():
        return base if base.forward(layer, x).shape == out.shape else None


def make_plain_(model: nn.Module, inspection: Inspection) -> list[Removed]:
    """Make the layers that standardize their own weight plain: the method sets the scale, or standardizes, itself."""
    removed = []
    for name in sorted(inspection.standardized):
        layer = model.get_submodule(name)
        base = plain_base(layer, inspection.shapes[name])
        if base is not None:
            removed.append(Removed(name, type(layer).__name__, base.__name__))
            layer.__class__ = base
            for extra in set(layer._parameters) - {"weight", "bias"}:
                delattr(layer, extra)
    return removed


def _replacement(norm: nn.Module, *, tanh: float | None, keep_weight: bool, copied: bool) -> nn.Module:
    """The module that takes the place of a normalizer: dynamic tanh or nothing, then its fused activation.

    `keep_weight` leaves an attribute `weight` to read; `copied` returns a copy that may be written to.
    """
    parts: list[nn.Module] = []
    if tanh is not None:
        size, dim = channels_of(norm) or (1, -1)
        parts.append(DynamicTanh(size, alpha=tanh, dim=dim).to(_tensor_of(norm)))
    elif keep_weight:
        parts.append(RemovedNorm(norm.weight))  # type: ignore[arg-type]
    elif copied:
        parts.append(Copied())
    fused = [getattr(norm, name, None) for name in FUSED]
    parts += [part for part in fused if isinstance(part, nn.Module) and not isinstance(part, nn.Identity)]
    out = nn.Sequential(*parts) if len(parts) > 1 else parts[0] if parts else nn.Identity()
    return out.train(norm.training)


def _tensor_of(norm: nn.Module) -> Tensor:
    """A tensor whose device and type the replacement takes."""
    return next((t for t in [*norm.parameters(), *norm.buffers()] if t.is_floating_point()), torch.empty(0))


def _classes(module: nn.Module) -> str:
    """The classes of a replacement, in words."""
    if isinstance(module, nn.Identity):
        return "nothing"
    return ", ".join(type(m).__name__ for m in (module if isinstance(module, nn.Sequential) else [module]))
