"""Forward passes that compare two runs: whether samples influence each other, and where noise drowns the signal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from normfree.diagnostics.ends import first_tensor
from normfree.nn.model_state import ModelParts, call_arguments, is_sharded, parts_of, preserve_model_state

LEAST_SAMPLES = 12  # two passes of three samples cost at most a sixth of a pass forward and backward
SAME = 1e-4  # relative difference of one sample's output between two batches; rounding leaves 1e-6

Trace = list[tuple[str, list[Tensor], list[Tensor]]]


def mixing_place(model: nn.Module, inputs: Any) -> str:
    """The module in which one sample changes another one, or 'before' the module that reads the change; '' if none.

    A sample goes through the model in evaluation mode between two others, and then between two different ones. An
    output (N, T, C) is left out, because its first dimension may be the positions.
    """
    tensors = [t for t in tree_leaves(call_arguments(inputs)) if isinstance(t, Tensor)]
    parts = parts_of(model)
    main = max(tensors, key=lambda t: t.numel(), default=None)
    count = 0 if main is None or main.dim() < 2 else len(main)
    graphs = any(t.dim() > 1 and t.shape[:2] == (count, count) for t in tensors)
    if count < LEAST_SAMPLES or graphs or any(map(is_sharded, parts.parameters.values())):
        return ""

    def rows(value: Any, chosen: Sequence[int]) -> Any:
        batched = isinstance(value, Tensor) and value.dim() > 0 and len(value) == count
        return value.detach()[list(chosen)] if batched else value

    traces: list[Trace] = []
    try:
        for chosen in ((1, 0, 2), (3, 0, 4)):
            some = tree_map(lambda t, chosen=chosen: rows(t, chosen), call_arguments(inputs))
            traces.append(_trace(model, parts, some, 3, evaluate=True))
    except Exception:  # the model is made for another size of batch
        return ""
    return "" if any(t.dim() == 3 for t in traces[0][-1][2]) else _first_difference(traces[0], traces[1])


@torch.no_grad()
def _trace(model: nn.Module, parts: ModelParts, arguments: Any, count: int, *, evaluate: bool, seed: int = 0) -> Trace:
    """Three samples' inputs and outputs of all modules, in the order in which they return; the model is the last."""
    found: Trace = []

    def samples(tree: Any) -> list[Tensor]:
        tensors = [t for t in tree_leaves(tree) if isinstance(t, Tensor) and t.is_floating_point()]
        return [t[:3].detach().clone() for t in tensors if t.dim() > 1 and len(t) == count]

    def hook(name: str) -> Any:
        return lambda _m, read, returned: found.append((name, samples(read), samples(returned)))

    handles = [module.register_forward_hook(hook(name)) for name, module in parts.modules.items() if name]
    try:
        with preserve_model_state(model, parts):
            torch.manual_seed(seed)
            model.train(model.training and not evaluate)
            output = first_tensor(model(*arguments[0], **arguments[1]))
        found.append(("", [], samples(output)))
    finally:
        for handle in handles:
            handle.remove()
    return found


def _first_difference(one: Trace, other: Trace) -> str:
    """The first module that returns something else, or 'before' the first that reads something else; '' if none."""

    def differ(a: list[Tensor], b: list[Tensor]) -> bool:
        """Whether the second sample differs."""
        return any(bool((x - y)[1].abs().max() > SAME * x[1].abs().max()) for x, y in zip(a, b, strict=False))

    ends = one[-1][2], other[-1][2]
    if not ends[0] or not all(bool(torch.isfinite(t).all()) for end in ends for t in end) or not differ(*ends):
        return ""
    latest: list[Tensor] = []
    for (name, read, returned), (_, read_too, returned_too) in zip(one, other, strict=False):
        if differ(read, read_too):
            return "" if _is_standardized(latest, read) else f"before {name}"
        if differ(returned, returned_too):
            return "" if _is_standardized(read, returned) else name
        latest = returned
    return "the output"


def _is_standardized(before: list[Tensor], after: list[Tensor]) -> bool:
    """Whether each number of all samples was shifted and scaled alike, as by a batch norm written by hand."""
    if not before or not after or before[0].shape != after[0].shape:
        return False
    (a, b, c), (x, y, z) = before[0].double(), after[0].double()
    difference = ((a - b) * (x - z) - (a - c) * (x - y)).abs().max()
    return bool(difference <= SAME * ((a - b) * (x - z)).abs().max())


def noise_of(model: nn.Module, parts: ModelParts, arguments: Any) -> tuple[float, str]:
    """The squared difference of the output between two passes over that between two samples, and where it begins."""
    with torch.no_grad():
        outputs = []
        for seed in (0, 1):
            with preserve_model_state(model, parts):
                torch.manual_seed(seed)
                outputs.append(first_tensor(model(*arguments[0], **arguments[1])).float())
        one, other = outputs
        between = ((one - one.roll(1, 0)) * (other - other.roll(1, 0))).mean()  # noise has no part in it, on average
        share = float((one - other).square().mean() / between.clamp_min(1e-12))
    if not share:
        return 0.0, ""
    count = len(outputs[0])
    first, second = (_trace(model, parts, arguments, count, evaluate=False, seed=seed) for seed in (0, 1))
    return share, _first_difference(first, second)
