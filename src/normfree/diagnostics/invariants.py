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
from torch.autograd.function import BackwardCFunction
from torch.utils._pytree import tree_leaves, tree_map

from normfree.diagnostics.graph_nodes import walk
from normfree.diagnostics.signals import Fact, Signal
from normfree.diagnostics.tracing import Trace, TracedCall, first_difference, rows_of, trace, values_differ
from normfree.graph.observer import MATRIX_PRODUCTS, FunctionCall, Observer
from normfree.nn.model_state import ModelParts, hooked, preserve_model_state, substitute_tensors
from normfree.nn.normalizers import is_norm

LEAST_SAMPLES = 12  # two passes of two samples cost at most a ninth of a pass forward and backward


def check_model(
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
    if shifted := _next_element(main, targets):
        checks.append(partial(check_causality, model, parts, arguments, main, shifted))
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

    A sample goes through the model in evaluation mode behind another one, and then before a third. If its outputs
    differ, further calls look into the model: the sample between two others, then between two different ones, then
    before the first two, and the first call again, twice, since a state may return by chance. Where that differs too,
    the model keeps a state. Noise that the model draws also depends on the place, but on the seed as well. An output
    that compares all samples with each other, (N, N), is left out; `signal` has its width for the whole batch.
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
        whole = out.shape if isinstance(out, Tensor) and call.name in ("view", "reshape") else ()
        sizes = [-n if m == -1 else n for m, n in zip(written, whole, strict=False)]
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


def check_causality(model: nn.Module, parts: ModelParts, arguments: Any, main: Tensor, shifted: str) -> Iterator[Fact]:
    """Compare two passes that differ in the second half of the sequence: the first half must not change.

    If the targets equal the input, a model whose first half does not change reads what it has to predict.
    """
    half = main.shape[1] // 2
    first = tree_map(lambda t: rows_of(t, len(main), (0, 1)), arguments)
    changed = main[:2].detach().clone()
    changed[:, half:] = main[:2].flip(1)[:, : main.shape[1] - half].roll(1, 0)
    second = tree_map(lambda t: changed if isinstance(t, Tensor) and t.shape == changed.shape else t, first)

    def traces(*, inside: bool) -> list[Trace]:
        passes = partial(trace, model, parts, evaluate=True, inside=inside, positions=main.shape[1])
        return [passes(first), passes(second)]

    def leaks(a: list[Tensor], b: list[Tensor]) -> bool:
        return values_differ(*([h for t in tensors if (h := first_half(t)) is not None] for tensors in (a, b)))

    def first_half(tensor: Tensor) -> Tensor | None:
        axes = [axis for axis in (1, tensor.dim() - 1) if tensor.shape[axis] == main.shape[1]]
        return tensor.narrow(axes[0], 0, half) if axes else None

    (one,), (other,) = traces(inside=False)
    if not one.returned or first_half(one.returned[0]) is None:
        return
    seen = leaks(one.returned, other.returned)
    if seen and shifted == "next":
        calls = zip(*traces(inside=True), strict=False)
        place = next(a.name for a, b in calls if leaks(a.returned, b.returned) and not leaks(a.read, b.read))
        if not place or not is_norm(parts.modules[place]):  # statistics of all positions tell little of the next one
            yield Fact("later positions seen", place or "the output")
    elif not seen and shifted == "same":
        yield Fact("targets not shifted", "the targets")


def check_draws(model: nn.Module, parts: ModelParts, arguments: Any, main: Tensor) -> Iterator[Fact]:
    """Find an output that is made of a random draw whose distribution gets no gradient from it, but from another one.

    The weights that only another output has in its graph change this output all the same, and so does the seed.
    """
    few = tree_map(lambda t: rows_of(t, len(main), (0, 1)), arguments)

    def run(seed: int, scaled: Sequence[Tensor] = ()) -> list[Tensor]:
        with preserve_model_state(model, parts), torch.enable_grad():
            torch.manual_seed(seed)
            with substitute_tensors(model.eval(), {id(p): 1.5 * p.detach() for p in scaled}):
                found = tree_leaves(model(*few[0], **few[1]))
        return [t for t in found if isinstance(t, Tensor) and t.grad_fn is not None]

    outputs = run(0)
    names = {id(p): name for name, p in parts.parameters.items()}
    seen = [{id(getattr(node, "variable", None)) for node in walk([t.grad_fn])} & names.keys() for t in outputs]
    for i, reached in enumerate(seen):
        others = set().union(*seen) - reached
        changed = [p for p in parts.parameters.values() if id(p) in others]
        if reached and others and all(values_differ([outputs[i]], [run(*new)[i]]) for new in ((1,), (0, changed))):
            first = next(name for p, name in names.items() if p in reached).rpartition(".")[0]
            before = dict.fromkeys(name.rpartition(".")[0] for p, name in names.items() if p in others)
            yield Fact("draw without a gradient", first, ", ".join(before))
            return


SMOOTH = 0.1  # relative difference of the differences over two distances, below which a function is smooth
WRONG = 0.2  # relative error of a derivative of a smooth function
FAR_OFF = 10.0  # factor between a surrogate derivative, as of a rounding, and the mean slope of the function
MOST_MODULES = 4  # that are checked


def check_derivatives(
    model: nn.Module, parts: ModelParts, arguments: Any, main: Tensor, targets: Any, loss: Any
) -> Iterator[Fact]:
    """Compare the derivatives that the user wrote with central differences, at the modules that call them.

    A function that reverses the gradient on purpose is a fault only if a step of the layers before it raises the loss.
    """
    calls: dict[str, tuple[nn.Module, Any, Any]] = {}

    def hook(name: str) -> Any:
        def look(module: nn.Module, args: Any, out: Any) -> None:
            x = next((a for a in args if isinstance(a, Tensor) and a.is_floating_point()), None)
            inside = any(not name or inner.startswith(f"{name}.") for inner in calls)
            if x is not None and isinstance(out, Tensor) and not inside and _calls_custom(out, args):
                calls.setdefault(name, (module, args, x))

        return look

    few = tree_map(lambda t: rows_of(t, len(main), range(min(len(main), 8))), arguments)
    with (
        hooked({m: hook(name) for name, m in parts.modules.items()}),
        preserve_model_state(model, parts),
        torch.enable_grad(),
    ):
        model(*few[0], **few[1])
    for name, (module, args, x) in list(calls.items())[:MOST_MODULES]:
        with preserve_model_state(model, parts):
            ratio, smooth = _measure_derivative(module, args, x)
        reverses = smooth and ratio < 0
        wrong = abs(ratio - 1) > WRONG if smooth else not 1 / FAR_OFF < ratio < FAR_OFF
        if wrong and not reverses:
            yield Fact("wrong derivative", name or "the model", value=ratio)
        elif wrong and loss is not None:
            for before in _ascending(model, parts, arguments, lambda out: loss(out, targets)):
                yield Fact("gradient reversed", name or "the model", before, ratio)
                return


def _ascending(model: nn.Module, parts: ModelParts, arguments: Any, loss: Callable[[Any], Tensor]) -> Iterator[str]:
    """The children of the model whose own gradient, followed downhill, raises the loss."""

    def value() -> Tensor:
        torch.manual_seed(0)
        return loss(model(*arguments[0], **arguments[1]))

    with preserve_model_state(model, parts):
        with torch.enable_grad():
            learning = {name: p for name, p in parts.parameters.items() if p.requires_grad}
            found = torch.autograd.grad(value(), list(learning.values()), allow_unused=True)
        gradients = {name: g for name, g in zip(learning, found, strict=True) if g is not None}
        for child in dict.fromkeys(name.partition(".")[0] for name in gradients):
            own = {name: g for name, g in gradients.items() if name.partition(".")[0] == child}
            length = math.sqrt(sum(float(g.double().square().sum()) for g in own.values()))
            size = math.sqrt(sum(float(learning[name].detach().double().square().sum()) for name in own))
            values = []
            with torch.no_grad():
                for step in (1e-3, -2e-3, 1e-3):
                    for name, g in own.items():
                        learning[name].add_(g, alpha=step * size / max(length, 1e-30))
                    values.append(float(value()))
            if values[0] < values[1]:  # uphill by the gradient is downhill by the loss
                yield child


def _calls_custom(out: Tensor, args: Any) -> bool:
    """Whether a function with a derivative of the user stands between the arguments of a module and its output."""
    ends = [t.grad_fn for t in tree_leaves(args) if isinstance(t, Tensor)]
    return any(isinstance(node, BackwardCFunction) for node in walk([out.grad_fn], ends, most=1000))


def _measure_derivative(module: nn.Module, args: Any, x: Tensor) -> tuple[float, bool]:
    """The slope along the gradient by central differences over the slope by autograd, and whether it is smooth."""
    start = x.detach().clone()

    def run(value: Tensor) -> Tensor:
        torch.manual_seed(0)
        out: Tensor = module(*(value if a is x else a for a in args))
        return out

    with torch.enable_grad():
        point = start.clone().requires_grad_()
        out = run(point.clone())
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).to(out)
        (gradient,) = torch.autograd.grad(out, point, weights)
    length = float(gradient.double().norm())
    if not 0 < length < math.inf:
        return 1.0, False
    direction = gradient / gradient.abs().max()
    with torch.no_grad():
        slopes = []
        for distance in (1e-3, 1e-1):
            step = distance * float(start.double().square().mean().sqrt()) * direction
            change = (run(start + step).double() - run(start - step).double()) * weights
            slopes.append(float(change.sum() / (2 * step.double().norm())))
    near, far = slopes
    smooth = abs(near - far) < SMOOTH * abs(near)
    return (near if smooth else far) / length, smooth
