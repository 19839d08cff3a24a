"""What the modules of a model read and return in a pass of a few samples, and where two passes begin to differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from normfree.diagnostics.measurement.inputs_and_outputs import main_tensor
from normfree.nn.model_state import ModelParts, hooked, preserve_model_state

SAME = 1e-4  # relative difference of one sample's output between two batches; rounding leaves 1e-6


class TracedCall(NamedTuple):
    """The first samples of what a module read and returned; the model is the last, with the name ''."""

    name: str
    read: list[Tensor]
    returned: list[Tensor]


Trace = list[TracedCall]


def rows_of(value: Any, count: int, chosen: Sequence[int]) -> Any:
    """The chosen samples of a tensor that holds all of them; anything else as it is."""
    batched = isinstance(value, Tensor) and value.dim() > 0 and len(value) == count
    return value.detach()[list(chosen)] if batched else value


@torch.enable_grad()  # the model may take derivatives
def trace(
    model: nn.Module,
    parts: ModelParts,
    arguments: Any,
    *,
    evaluate: bool,
    seed: int = 0,
    inside: bool = True,
    positions: int = 1,
) -> Trace:
    """Collect three samples of what all modules read and return, in the order in which they return.

    Args:
        inside: Whether to look into the model; else the trace has only the model itself, and costs a plain pass.
        positions: The positions of a sample, if samples and positions may be one dimension, the positions last.
    """
    found: Trace = []
    tensors = [t for t in tree_leaves(arguments) if isinstance(t, Tensor)]
    count = len(max(tensors, key=lambda t: t.numel()))

    def samples(tree: Any) -> list[Tensor]:
        tensors = [t for t in tree_leaves(tree) if isinstance(t, Tensor) and t.is_floating_point()]
        tensors = [t.detach() for t in tensors if t.dim() > 1]
        flat = [len(t) == count * positions > count for t in tensors]
        tensors = [t.unflatten(0, (count, positions)) if f else t for t, f in zip(tensors, flat, strict=True)]
        return [t[:3].clone() for t in tensors if len(t) == count]

    def hook(name: str) -> Any:
        return lambda _m, read, returned: found.append(TracedCall(name, samples(read), samples(returned)))

    hooks = {m: hook(name) for name, m in parts.modules.items() if name and inside}
    with hooked(hooks), preserve_model_state(model, parts):
        torch.manual_seed(seed)
        model.train(model.training and not evaluate)
        output = main_tensor(model(*arguments[0], **arguments[1]))
    found.append(TracedCall("", [], samples(output)))
    return found


def first_difference(one: Trace, other: Trace, *, standardized: bool = True) -> str:
    """The first module that returns something else, or 'before' the first that reads something else; '' if none.

    Args:
        standardized: Whether a difference counts that a batch norm, also one written by hand, makes.
    """

    def differ(a: list[Tensor], b: list[Tensor]) -> bool:
        """Whether the second sample differs."""
        return values_differ([x[1] for x in a], [y[1] for y in b])

    def counts(before: list[Tensor], after: list[Tensor]) -> bool:
        return standardized or not _is_standardized(before, after)

    ends = one[-1].returned, other[-1].returned
    if not ends[0] or not all(bool(torch.isfinite(t).all()) for end in ends for t in end) or not differ(*ends):
        return ""
    latest: list[Tensor] = []
    for (name, read, returned), (_, read_too, returned_too) in zip(one, other, strict=False):
        if differ(read, read_too):
            return f"before {name}" if counts(latest, read) else ""
        if differ(returned, returned_too):
            return (name or "the output") if counts(read or latest, returned) else ""
        latest = returned
    return "the output"


def values_differ(a: list[Tensor], b: list[Tensor]) -> bool:
    """Whether two lists of tensors differ by more than rounding."""
    return any(bool((x - y).abs().max() > SAME * x.abs().max()) for x, y in zip(a, b, strict=False))


def _is_standardized(before: list[Tensor], after: list[Tensor]) -> bool:
    """Whether each number of all samples was shifted and scaled alike, as by a batch norm; a mere shift is none."""
    if not before or not after or before[0].shape != after[0].shape:
        return False
    (a, b, c), (x, y, z) = before[0].double(), after[0].double()
    tolerance = SAME * ((a - b) * (x - z)).abs().max()
    alike = ((a - b) * (x - z) - (a - c) * (x - y)).abs().max() <= tolerance
    shifted = ((a - b) - (x - y)).abs().max() <= SAME * (a - b).abs().max()
    return bool(alike & ~shifted)
