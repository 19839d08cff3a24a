"""What holds for every sound model, checked by short forward passes of a few samples.

- A sample does not change the output of another one, and its own does not depend on its place in the batch.
- Two equal calls in evaluation mode return the same, and drop nothing at random.
- A reshape splits dimensions and joins neighbours, but exchanges none.
- A model that predicts the next element of a sequence does not see it.
- A derivative of the user's agrees with finite differences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import suppress
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from normfree.diagnostics.measurement.inputs_and_outputs import IMAGES
from normfree.diagnostics.passes.derivative_checks import check_derivatives, check_draws
from normfree.diagnostics.passes.tracing import Trace, TracedCall, first_difference, rows_of, trace, values_differ
from normfree.diagnostics.signals import Fact, Signal
from normfree.graph.observer import MATRIX_PRODUCTS, FunctionCall, Observer
from normfree.nn.model_state import ModelParts, hooked, preserve_model_state
from normfree.nn.normalizers import is_norm

LEAST_SAMPLES = 12  # two passes of two samples cost at most a ninth of a pass forward and backward


def check_behaviour(
    model: nn.Module,
    parts: ModelParts,
    arguments: Any,
    targets: Any,
    loss: Callable[[Any, Any], Tensor] | None,
    signal: Signal,
) -> tuple[Fact, ...]:
    """Run all checks that the batch and the graph of the model call for."""
    tensors = [t for t in tree_leaves(arguments) if isinstance(t, Tensor)]
    if not tensors:
        return ()
    main = max(tensors, key=lambda t: t.numel())
    found: list[Fact] = []
    checks: list[Callable[[], Iterable[Fact]]] = [partial(check_samples, model, parts, arguments, main, signal)]
    sequence = next((t for t in tensors if _next_element(t, targets)), main)  # a decoder may read the targets
    shifted, mixing = _next_element(sequence, targets), _mixing_place(signal, sequence)
    if shifted or mixing:
        checks.append(partial(check_positions, model, parts, arguments, sequence, shifted, mixing))
    if signal.outputs > 1:
        checks.append(partial(check_draws, model, parts, arguments, main))
    if signal.inputs.is_unusual:
        checks.append(partial(measure_reads, model, parts, arguments, {layer.name for layer in signal.plan.layers()}))
    if signal.graph.custom:
        checks.append(partial(check_derivatives, model, parts, arguments, main, targets, loss))
    for check in checks:
        with suppress(Exception):  # the model is made for another batch: the check says nothing about it
            found += check()
    return tuple(found)


def measure_reads(model: nn.Module, parts: ModelParts, arguments: Any, layers: Set[str]) -> list[Fact]:
    """The root mean square of what each weight layer reads, and its mean over its deviation."""
    found: list[Fact] = []

    def hook(name: str) -> Any:
        def measure(_m: nn.Module, args: Any) -> None:
            if args and isinstance(args[0], Tensor) and args[0].is_floating_point():
                x = args[0].detach().double()
                size, offset = x.square().mean().sqrt(), x.mean().abs() / x.std(correction=0)
                found.append(Fact("read", name, value=float(size), mean=float(offset)))

        return measure

    hooks = {parts.modules[name]: hook(name) for name in layers & parts.modules.keys()}
    with hooked(hooks, before=True), torch.enable_grad(), preserve_model_state(model, parts):
        args, kwargs = tree_map(lambda t: t.detach().clone() if isinstance(t, Tensor) else t, arguments)
        model(*args, **kwargs)
    return found


def check_samples(model: nn.Module, parts: ModelParts, arguments: Any, main: Tensor, signal: Signal) -> Iterator[Fact]:
    """Find the module where samples mix, their places in the batch count, equal calls differ, or dropout never ends.

    In evaluation mode, a sample goes through the model as the second of two, and then as the first of two with a third
    sample. If its outputs differ, further calls look into the model: the sample between two others, then between two
    different ones, then before the first two, and the first call again, twice, since a state may return by chance.
    Where that differs too, the model keeps a state. Noise that the model draws also depends on the place, but on the
    seed as well. An output that compares all samples with each other, (N, N), is left out; `signal` has its width for
    the whole batch.
    """
    count = 0 if main.dim() < 2 else len(main)
    graphs = any(isinstance(t, Tensor) and t.shape[:2] == (count, count) for t in tree_leaves(arguments))
    if count < LEAST_SAMPLES or graphs:
        return

    def trace_of(*chosen: int, inside: bool = True, seed: int = 0) -> Trace:
        some = tree_map(lambda t: rows_of(t, count, chosen), arguments)
        return trace(model, parts, some, evaluate=True, inside=inside, seed=seed)

    known = set(map(id, parts.parameters.values()))
    with _Calls(known) as calls:
        behind = trace_of(1, 0, inside=False)[-1].returned
    if calls.dropouts or calls.reshapes or calls.strangers:
        with (named := _Calls(known)).following(parts.modules):
            trace_of(1, 0, inside=False)
        yield from (Fact("dropout in evaluation mode", place) for place in named.dropouts[:1])
        yield from (Fact("reshape of dimensions", *place) for place in list(named.reshapes.values())[:1])
        yield from (Fact("weights made in the forward pass", place) for place in named.strangers[:1])
    before = trace_of(0, 2, inside=False)[-1].returned
    if not values_differ([t[1] for t in behind], [t[0] for t in before]):
        return
    one = trace_of(1, 0, 2)
    place = first_difference(one, trace_of(3, 0, 4), standardized=False)
    shapes = [t.shape for t in one[-1].returned]
    pairs = signal.head.classes == count and any(shape[:2] == (3, 3) for shape in shapes)
    moved = "" if place else first_difference(one, _swapped(trace_of(0, 1, 2)))
    random = bool(moved) and bool(first_difference(one, trace_of(1, 0, 2, seed=1)))
    sequences = _positions_first(parts) and any(len(shape) == 3 for shape in shapes)
    if not (place or moved) or random or pairs or sequences:
        return
    again = first_difference(one, trace_of(1, 0, 2)) or first_difference(one, trace_of(1, 0, 2))
    found = Fact("samples mixed", place) if place else Fact("place in the batch", moved)
    yield Fact("state between calls", again) if again else found


def _swapped(found: Trace) -> Trace:
    """The trace with its first two samples exchanged."""
    return [TracedCall(name, *([t[[1, 0, 2]] for t in ts] for ts in both)) for name, *both in found]


def _positions_first(parts: ModelParts) -> bool:
    """Whether a module takes the positions of a sequence as its first dimension, so that rows may not be samples."""
    return any(getattr(m, "batch_first", True) is False for m in parts.modules.values())


class _Calls(Observer):
    """Collects modules whose code drops values in evaluation mode, reshapes where it should permute, or makes layers.

    Their names need `following`. In the code of the model itself, the place is the module before, or the first one.
    """

    DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")

    def __init__(self, known: Set[int]) -> None:
        super().__init__()
        self.known = known  # the identities of the model's parameters
        self.dropouts: list[str] = []
        self.strangers: list[str] = []
        self.reshapes: dict[int, tuple[str, str]] = {}  # by the identity of the result, which is kept
        self._kept: list[Any] = []
        self._last = "the input"

    def on_enter(self, name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Name the module that follows a reshape."""
        self.reshapes = {key: (name if p == "the input" else p, d) for key, (p, d) in self.reshapes.items()}

    def on_leave(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Remember the innermost module before a reshape."""
        self._last = self._last if module._modules else name

    def on_function(self, call: FunctionCall) -> Any:
        """Look at the probability of a dropout, and whether it is on, and at the shapes of a reshape."""
        if call.name in self.DROPOUTS:
            given = dict(zip(("input", "p", "training"), call.args, strict=False)) | call.kwargs
            active = given.get("training", True) and given.get("p", 0.5) > 0
        else:
            active = call.name == "scaled_dot_product_attention" and call.kwargs.get("dropout_p", 0.0) > 0
        if active:
            self.dropouts.append(self.home or f"behind {self._last}")
        made = any(isinstance(t, nn.Parameter) and id(t) not in self.known for t in call.args)
        if made and call.name in MATRIX_PRODUCTS:
            self.strangers.append(self.home or self._last)
        out = call.run()
        written = [n for size in call.args[1:] for n in (size if isinstance(size, Sequence) else (size,))]
        shape = out.shape if isinstance(out, Tensor) and call.name in ("view", "reshape") else ()
        sizes = [-n if m == -1 else n for m, n in zip(written, shape, strict=False)]
        if sizes and exchanges(call.args[0].shape, sizes):
            change = f"{_sizes(call.args[0])} into {_sizes(out)} behind {self._last}"
            self.reshapes[id(out)] = (self.home or self._last, change)
            self._kept.append(out)
        elif call.name == "__getitem__":  # of relative positions a row is cut off, which shifts the others
            self.reshapes.pop(id(call.args[0]), None)
        return out


def _sizes(tensor: Tensor) -> str:
    return f"({', '.join([*('N' if len(tensor) == 2 else '…',), *map(str, tensor.shape[1:])])})"


LEAST_MOVED = 4  # size of a dimension that was exchanged; smaller ones may be equal by chance


def exchanges(before: Sequence[int], after: Sequence[int]) -> bool:
    """Whether a reshape between two shapes exchanges dimensions, as only a permute can, and so scrambles the numbers.

    A size below zero was left open by the code, and may be equal to another one by chance.

    >>> exchanges((2, 16, 16, 3), (2, 3, 16, 16)), exchanges((2, 12, 32), (2, 4, 12, 8))
    (True, True)
    >>> exchanges((2, 12, 32), (2, 12, 4, 8)), exchanges((2, 32, 8, 8), (2, 8, 256))
    (False, False)
    """
    old, written = ([d for d in shape if abs(d) > 1] for shape in (before, after))
    new = [abs(d) for d in written]
    while old and new:
        i = j = 1
        while (left := math.prod(old[:i])) != (right := math.prod(new[:j])):
            i, j = (i + 1, j) if left < right else (i, j + 1)
        a, b, named, old, new, written = old[:i], new[:j], written[:j], old[i:], new[j:], written[j:]
        starts, new_starts = ([math.prod(part[:k]) for k in range(len(part))] for part in (a, b))
        kept = set(zip(starts, a, strict=True)) & set(zip(new_starts, b, strict=True))
        moved = [d for at, d in zip(starts, a, strict=True) if d >= LEAST_MOVED and d in named and (at, d) not in kept]
        inner = sorted({*starts, *new_starts})
        split = any(y % x for x, y in pairwise(inner))  # no finer shape has the dimensions of both
        if min(i, j) > 1 and moved and (split or j >= i or a[0] in moved or any(a[0] % d for d in moved)):
            return True
    return False


def _next_element(main: Tensor, targets: Any) -> str:
    """How the targets repeat the input: 'next' if they are its next elements, 'same' if they equal it, else ''."""
    if not isinstance(targets, Tensor) or targets.dtype != main.dtype or targets.numel() != main.numel():
        return ""
    targets = targets.reshape(main.shape)  # samples and positions may be one dimension, as a loss takes them
    if main.dim() not in (2, 3) or main.shape[1] < 4 or (main.dim() == 2 and main.is_floating_point()):
        return ""
    if bool((targets == main).all()):
        return "" if main.is_floating_point() else "same"
    return "next" if float((targets[:, :-1] == main[:, 1:]).float().mean()) > MOSTLY else ""


MOSTLY = 0.9  # of the targets that are the next elements of the input; padding and the end of a text differ


LEAST_BRANCH = 1e-10  # of a branch beside its shortcut, which may start at zero
LEAST_POSITIONS = 4
LEAST_SUMS = 4  # of a sequence of patches or words, which have the purpose to mix them; half as many with attention


def _mixing_place(signal: Signal, main: Tensor) -> str:
    """The first place of a network that attends, or has residual blocks over patches or words; '' for others.

    A set of vectors or points may also go through each block one by one.
    """
    attends = [f.place for f in signal.by_kind["openness"] if f.detail == "attention"]
    sums = [s.name for s in signal.sums if not s.layer and len(s.shape) == 3 and s.shape[1] >= LEAST_POSITIONS]
    patches = main.dim() == IMAGES or not main.is_floating_point()
    shut = [s for s in signal.sums if not s.layer and s.branch.power <= LEAST_BRANCH * s.shortcut.power]
    if shut or len(main) < LEAST_SAMPLES or main.dim() < 2 or main.shape[1] < 2 or not (attends or patches):
        return ""
    if len(sums) < (LEAST_SUMS // 2 if attends else LEAST_SUMS):
        return ""
    return attends[0] if attends else sums[0]


def check_positions(
    model: nn.Module, parts: ModelParts, arguments: Any, main: Tensor, shifted: str, mixing: str
) -> Iterator[Fact]:
    """Compare two passes that differ at one position of the input.

    If the model predicts the next element, no earlier position may change. If the targets equal the input, such a model
    reads what it has to predict. If the model should mix its positions, another one has to change.

    Args:
        shifted: How the targets repeat the input, by `_next_element`.
        mixing: The place that should mix the positions, by `_mixing_place`.
    """
    image = main.dim() == IMAGES
    at = 0 if image else _inner_position(main[:2])
    first = tree_map(lambda t: rows_of(t, len(main), (0, 1)), arguments)
    moved = main[:2].detach().clone()
    if image:
        moved[..., 0, 0] = main[1:3, ..., 0, 0]
    else:
        moved[:, at] = _other_element(main[:2].detach(), at)
    second = tree_map(lambda t: moved if isinstance(t, Tensor) and t.shape == moved.shape else t, first)

    def traces(*, inside: bool) -> list[Trace]:
        passes = partial(trace, model, parts, evaluate=True, inside=inside, positions=main.shape[1])
        return [passes(first), passes(second)]

    def earlier(tensors: list[Tensor]) -> list[Tensor]:
        axes = [next((axis for axis in (1, t.dim() - 1) if t.shape[axis] == main.shape[1]), 0) for t in tensors]
        return [t.narrow(axis, 0, at) for t, axis in zip(tensors, axes, strict=True) if axis]

    inside = traces(inside=not shifted)
    changes = [_changed_positions(*pair) for pair in zip(*inside, strict=False)]
    if mixing and any(changes) and max(map(len, changes)) == 1:
        yield Fact("positions apart", mixing)
    one, other = (found[-1].returned for found in inside)
    if not shifted or not earlier(one):
        return
    seen = values_differ(earlier(one), earlier(other))
    if seen and shifted == "next":
        calls = zip(*traces(inside=True), strict=False)
        place = next(
            a.name
            for a, b in calls
            if values_differ(earlier(a.returned), earlier(b.returned))
            and not values_differ(earlier(a.read), earlier(b.read))
        )
        if not place or not is_norm(parts.modules[place]):  # statistics of all positions tell little of the next one
            yield Fact("later positions seen", place or "the output")
    elif not seen and shifted == "same":
        yield Fact("targets not shifted", "the targets")


def _inner_position(few: Tensor) -> int:
    """The middle of a sequence, or an earlier position if padding, the last element, begins before it."""
    middle = few.shape[1] // 2
    differs = few[:, 1 : middle + 1] != few[:, -1:]
    words = differs.flatten(2).any(2) if few.dim() > 2 else differs
    inside = words.all(0).nonzero().flatten().tolist()
    return 1 + inside[-1] if inside else middle


def _other_element(few: Tensor, at: int) -> Tensor:
    """For each sample, an element of the sequence that differs from the one at a place, if there is any."""
    differs = (few != few[:, at : at + 1]).flatten(2).any(2) if few.dim() > 2 else few != few[:, at : at + 1]
    return few[torch.arange(len(few)), differs.int().argmax(1)]


def _changed_positions(one: TracedCall, other: TracedCall) -> set[int]:
    """The positions of sequences (N, T, C) that a module returns otherwise, by more than rounding."""
    found: set[int] = set()
    for x, y in zip(one.returned, other.returned, strict=False):
        if x.dim() == 3 and x.shape == y.shape and x.shape[1] >= LEAST_POSITIONS:
            change = (x - y).abs().amax((0, 2)) > LEAST_CHANGE * x.abs().max()
            found.update(change.nonzero().flatten().tolist())
    return found


LEAST_CHANGE = 1e-6  # relative, more than rounding: one of many positions has a small part in the others
