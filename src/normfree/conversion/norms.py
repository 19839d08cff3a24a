"""Which modules are normalizers, whoever wrote them, and what stands in their place when they are gone."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from normfree.nn.normalizers import FUSED, DynamicTanh, is_norm
from normfree.nn.weight_layers import WEIGHT_LAYERS

_UNKNOWN = re.compile(r"(Norm(Act)?|LRN)(\d?d)?$")


class RemovedNorm(nn.Module):
    """Passes the signal on, and holds the weight that the model's own code reads of a normalizer (its type, mostly)."""

    weight: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        """Nothing happens to the signal."""
        return x


class Copied(nn.Module):
    """Passes a copy of the signal on, where the model's own code writes into what a normalizer put out."""

    def forward(self, x: Tensor) -> Tensor:
        """The same numbers in memory of their own."""
        return x.clone()


def norms(model: nn.Module) -> dict[str, nn.Module]:
    """The normalizers of a model by name, a shared one under its first."""
    return {name: module for name, module in model.named_modules() if is_norm(module)}


def unknown_norms(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules that their class's name calls a normalizer, but that are none we know how to remove.

    Torch's parametrizations of weights (`_WeightNorm`) are none of the signal.
    """
    for name, module in model.named_modules():
        called = _UNKNOWN.search(type(module).__name__) and ".parametrizations." not in f".{name}"
        leaf = next(module.children(), None) is None
        if called and leaf and not is_norm(module) and not isinstance(module, (*WEIGHT_LAYERS, RemovedNorm)):
            yield name, module


def may_normalize(module: nn.Module) -> bool:
    """Whether a module is somebody's own, without weights or children, and no normalizer by its class."""
    own = not type(module).__module__.startswith(("torch.", "normfree."))
    leaf = next(module.children(), None) is None and all(p.dim() <= 1 for p in module.parameters(recurse=False))
    return own and leaf and not is_norm(module)


def normalizes(module: nn.Module, x: Tensor) -> bool:
    """Whether a module puts out the same when its input is four times as large, but not when its sign is turned."""
    module.train()  # statistics of the batch, where it has any
    try:
        out, large, turned = (module(factor * x) for factor in (1.0, 4.0, -1.0))
    except Exception:  # whatever its own code raises, on input that the model did not give it
        return False
    if not isinstance(out, Tensor) or out.shape != x.shape or not out.isfinite().all():
        return False
    near = 0.02 * out.std(unbiased=False)
    return bool((large - out).abs().mean() <= near < (turned - out).abs().mean())


def channels_of(norm: nn.Module) -> tuple[int, int] | None:
    """The number of channels of a normalizer and their dimension in its input; None when it does not say."""
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


def replacement(norm: nn.Module, *, tanh: float | None, keep_weight: bool, copied: bool) -> nn.Module:
    """What stands where `norm` stood: dynamic tanh with that α when `tanh` is given, else nothing; then what was fused.

    `keep_weight` leaves an attribute `weight` to read; `copied` hands on a copy that may be written to.
    """
    parts: list[nn.Module] = []
    if tanh is not None:
        size, dim = channels_of(norm) or (1, -1)
        parts.append(DynamicTanh(size, alpha=tanh, dim=dim).to(_like(norm)))
    elif keep_weight:
        parts.append(RemovedNorm(norm.weight))  # type: ignore[arg-type]
    elif copied:
        parts.append(Copied())
    fused = [getattr(norm, name, None) for name in FUSED]
    parts += [part for part in fused if isinstance(part, nn.Module) and not isinstance(part, nn.Identity)]
    out = nn.Sequential(*parts) if len(parts) > 1 else parts[0] if parts else nn.Identity()
    return out.train(norm.training)


def _like(norm: nn.Module) -> Tensor:
    """A tensor whose device and type the replacement takes."""
    return next((t for t in [*norm.parameters(), *norm.buffers()] if t.is_floating_point()), torch.empty(0))


@contextmanager
def weight_readers(found: Mapping[str, nn.Module]) -> Iterator[set[str]]:
    """Collect the normalizers whose weight somebody reads while none of them runs: the model's own code."""
    read: set[str] = set()
    plain = {name: type(norm) for name, norm in found.items()}
    for name, norm in found.items():
        norm.__class__ = _watched(plain[name], name, read)
    try:
        yield read
    finally:
        for name, norm in found.items():
            norm.__class__ = plain[name]


def _watched(plain: type[nn.Module], name: str, read: set[str]) -> type[nn.Module]:
    inside = [0]

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        inside[0] += 1
        try:
            return plain.__call__(self, *args, **kwargs)
        finally:
            inside[0] -= 1

    def attribute(self: nn.Module, key: str) -> Any:
        if key == "weight" and not inside[0]:
            read.add(name)
        return plain.__getattr__(self, key)

    return type(plain.__name__, (plain,), {"__call__": call, "__getattr__": attribute, "__module__": plain.__module__})
