"""What holds for every sound model, checked by short forward passes of a few samples.

- A sample does not change the output of another one.
- Two equal calls in evaluation mode return the same.
- A derivative that the user wrote agrees with finite differences.
- A model that predicts the next token does not see it.

A check returns spots: the finding, as `findings.py` names it, and the module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from normfree.diagnostics.input_output import first_tensor
from normfree.diagnostics.signals import Spot
from normfree.nn.model_state import ModelParts, call_arguments, is_sharded, parts_of, preserve_model_state

LEAST_SAMPLES = 12  # two passes of three samples cost at most a sixth of a pass forward and backward
SAME = 1e-4  # relative difference of one sample's output between two batches; rounding leaves 1e-6


class TracedCall(NamedTuple):
    """The first samples of what a module read and returned; the model is the last, with the name ''."""

    name: str
    read: list[Tensor]
    returned: list[Tensor]


Trace = list[TracedCall]


def check_samples(model: nn.Module, inputs: Any, classes: int = 0) -> tuple[Spot, ...]:
    """Find the module in which one sample changes another one, or in which two equal calls differ.

    A sample goes through the model in evaluation mode between two others, and then between two different ones. If its
    output differs, the first call is repeated: where that differs too, the model keeps a state. An output that compares
    all samples with each other, (N, N), is left out; `classes` is its width for the whole batch.
    """
    parts = parts_of(model)
    tensors = [t for t in tree_leaves(call_arguments(inputs)) if isinstance(t, Tensor)]
    main = max(tensors, key=lambda t: t.numel(), default=None)
    count = 0 if main is None or main.dim() < 2 else len(main)
    graphs = any(t.dim() > 1 and t.shape[:2] == (count, count) for t in tensors)
    if count < LEAST_SAMPLES or graphs or any(map(is_sharded, parts.parameters.values())):
        return ()

    def trace_of(chosen: Sequence[int]) -> Trace:
        some = tree_map(lambda t: _rows(t, count, chosen), call_arguments(inputs))
        return trace(model, parts, some, len(chosen), evaluate=True)

    try:
        one, other = trace_of((1, 0, 2)), trace_of((3, 0, 4))
        place = first_difference(one, other, standardized=False)
        shapes = [t.shape for t in one[-1].returned]
        pairs = classes == count and any(shape[:2] == (3, 3) for shape in shapes)
        if not place or pairs or (_positions_first(parts) and any(len(shape) == 3 for shape in shapes)):
            return ()
        again = first_difference(one, trace_of((1, 0, 2)))
    except Exception:  # the model is made for another size of batch
        return ()
    return (Spot("state between calls", again),) if again else (Spot("samples mixed", place),)


def _rows(value: Any, count: int, chosen: Sequence[int]) -> Any:
    """The chosen samples of a tensor that holds all of them; anything else as it is."""
    batched = isinstance(value, Tensor) and value.dim() > 0 and len(value) == count
    return value.detach()[list(chosen)] if batched else value


def _positions_first(parts: ModelParts) -> bool:
    """Whether a module takes the positions of a sequence as its first dimension, so that rows may not be samples."""
    return any(getattr(m, "batch_first", True) is False for m in parts.modules.values())


@torch.no_grad()
def trace(model: nn.Module, parts: ModelParts, arguments: Any, count: int, *, evaluate: bool, seed: int = 0) -> Trace:
    """Collect three samples of what all modules read and return, in the order in which they return."""
    found: Trace = []

    def samples(tree: Any) -> list[Tensor]:
        tensors = [t for t in tree_leaves(tree) if isinstance(t, Tensor) and t.is_floating_point()]
        return [t[:3].detach().clone() for t in tensors if t.dim() > 1 and len(t) == count]

    def hook(name: str) -> Any:
        return lambda _m, read, returned: found.append(TracedCall(name, samples(read), samples(returned)))

    with hooked({name: hook(name) for name in parts.modules if name}, parts), preserve_model_state(model, parts):
        torch.manual_seed(seed)
        model.train(model.training and not evaluate)
        output = first_tensor(model(*arguments[0], **arguments[1]))
    found.append(TracedCall("", [], samples(output)))
    return found


@contextmanager
def hooked(hooks: Mapping[str, Callable[..., Any]], parts: ModelParts) -> Iterator[None]:
    """Run forward hooks of modules inside, by their names."""
    handles = [parts.modules[name].register_forward_hook(hook) for name, hook in hooks.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def first_difference(one: Trace, other: Trace, *, standardized: bool = True) -> str:
    """The first module that returns something else, or 'before' the first that reads something else; '' if none.

    Args:
        standardized: Whether a difference counts that a batch norm, also one written by hand, makes.
    """

    def differ(a: list[Tensor], b: list[Tensor]) -> bool:
        """Whether the second sample differs."""
        return any(bool((x - y)[1].abs().max() > SAME * x[1].abs().max()) for x, y in zip(a, b, strict=False))

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


def _is_standardized(before: list[Tensor], after: list[Tensor]) -> bool:
    """Whether each number of all samples was shifted and scaled alike, as by a batch norm; a mere shift is none."""
    if not before or not after or before[0].shape != after[0].shape:
        return False
    (a, b, c), (x, y, z) = before[0].double(), after[0].double()
    tolerance = SAME * ((a - b) * (x - z)).abs().max()
    alike = ((a - b) * (x - z) - (a - c) * (x - y)).abs().max() <= tolerance
    shifted = ((a - b) - (x - y)).abs().max() <= SAME * (a - b).abs().max()
    return bool(alike & ~shifted)
