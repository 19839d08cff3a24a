"""Probe the modules of other libraries: which of them normalize, and which layers standardize their weight."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from normfree.conversion.inspection import Inspection
from normfree.nn.model_state import preserve_model_state, substitute_tensors
from normfree.nn.normalizers import is_norm
from normfree.nn.weight_layers import WEIGHT_LAYERS


@contextmanager
def probing(model: nn.Module, inspection: Inspection) -> Iterator[None]:
    """Find the modules that normalize, and the layers that standardize their weight, from a pass of the model inside.

    Inputs of modules of other libraries are kept on the way. At the end these modules run on scaled copies of them. A
    module that is named like a normalizer but only scales and shifts, such as MobileBERT's `NoNorm`, is no obstacle.
    """
    inputs: dict[str, Tensor] = {}
    layers: dict[str, tuple[Tensor, Tensor]] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
            if len(args) != 1 or not isinstance(args[0], Tensor) or not isinstance(out, Tensor):
                return
            if isinstance(module, WEIGHT_LAYERS):
                layers.setdefault(name, (args[0].detach().clone(), out.detach().clone()))
            elif args[0].is_floating_point():
                inputs.setdefault(name, args[0].detach().clone())

        return hook

    probed = {name: m for name, m in model.named_modules() if isinstance(m, WEIGHT_LAYERS) or _may_normalize(m)}
    foreign = {n: m for n, m in probed.items() if not type(m).__module__.startswith(("torch.", "normfree."))}
    foreign = {n: m for n, m in foreign.items() if ".parametrizations." not in f".{n}"}  # they compute weights
    handles = [module.register_forward_hook(keep(name)) for name, module in foreign.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    if not handles:
        return
    with preserve_model_state(model, attributes=True), torch.no_grad():
        model.eval()
        like = [name for name, x in inputs.items() if _normalizes(foreign[name], x)]
        kinds = {type(foreign[name]) for name, xy in layers.items() if _ignores_scale(foreign[name], *xy)}
        inspection.norm_like.update((name, type(foreign[name]).__name__) for name in like)
        for name in inputs.keys() & inspection.unknown_norms.keys() - set(like):
            if _scales_and_shifts(foreign[name], inputs[name]):
                del inspection.unknown_norms[name]
        for name, (x, out) in layers.items():
            if type(foreign[name]) in kinds:
                base = plain_base(foreign[name])
                same = base.forward(foreign[name], x).shape == out.shape
                inspection.standardized[name] = base if same else None


def plain_base(layer: nn.Module) -> Any:
    """The class of torch that a weight layer extends."""
    return next(kind for kind in type(layer).__mro__ if kind in WEIGHT_LAYERS)


def _may_normalize(module: nn.Module) -> bool:
    """Whether a module has no matrices or children, and is not a known normalizer."""
    leaf = next(module.children(), None) is None and all(p.dim() <= 1 for p in module.parameters(recurse=False))
    return leaf and not is_norm(module)


def _normalizes(module: nn.Module, x: Tensor) -> bool:
    """Whether a module returns the same for an input four times as large, but not for one of opposite sign.

    The second test excludes a module whose output does not depend on its input.
    """
    module.train()  # to use the statistics of the batch
    try:
        out, large, turned = (module(factor * x) for factor in (1.0, 4.0, -1.0))
    except Exception:  # whatever its own code raises, on input that the model did not give it
        return False
    if not isinstance(out, Tensor) or out.shape != x.shape or not out.isfinite().all():
        return False
    near = 0.02 * out.std(unbiased=False)
    return bool((large - out).abs().mean() <= near < (turned - out).abs().mean())


def _scales_and_shifts(module: nn.Module, x: Tensor) -> bool:
    """Whether a module in evaluation mode returns k · f(x) + b for k · x."""
    module.eval()
    try:
        shift, out, large = (module(factor * x) for factor in (0.0, 1.0, 4.0))
        return bool((large - shift - 4 * (out - shift)).abs().max() <= 1e-3 * (large - shift).abs().max())
    except Exception:  # whatever its own code raises, on input that the model did not give it
        return False


def _ignores_scale(layer: nn.Module, x: Tensor, out: Tensor) -> bool:
    """Whether a layer returns the same with a weight four times as large: it standardizes its weight."""
    weight = layer._parameters.get("weight")
    if weight is None or not weight.any():
        return False
    with substitute_tensors(layer, {id(weight): 4 * weight}):
        large = layer(x)
    return bool((large - out).abs().mean() < 0.25 * out.std(unbiased=False))  # it would be 3 times for a plain one
