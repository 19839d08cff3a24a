"""Derivatives that are not what they should be: not finite, of a draw that has none, or wrong in the user's code."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.utils._pytree import tree_leaves, tree_map

from normfree.diagnostics.measurement.graph_nodes import walk
from normfree.diagnostics.measurement.inputs_and_outputs import is_finite
from normfree.diagnostics.passes.tracing import rows_of, values_differ
from normfree.diagnostics.signals import Fact
from normfree.graph.observer import FunctionCall, Observer
from normfree.nn.model_state import ModelParts, hooked, preserve_model_state, substitute_tensors


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


class _Owners(Observer):
    """Remembers which module's forward pass made each node of the autograd graph."""

    def __init__(self) -> None:
        super().__init__()
        self.owner: dict[Any, str] = {}

    def on_function(self, call: FunctionCall) -> Any:
        """Remember the node of the result."""
        out = call.run()
        for t in out if isinstance(out, tuple | list) else (out,):
            if isinstance(t, Tensor) and t.grad_fn is not None:
                self.owner.setdefault(t.grad_fn, self.home)
        return out


def gradient_origin(
    model: nn.Module, parts: ModelParts, args: Any, kwargs: Any, start: Callable[[Any], Tensor]
) -> tuple[str, str]:
    """The module and the function whose derivative is not finite although the gradient that it gets is.

    Args:
        start: Returns the number at which the backward pass starts, from the model's output.

    Returns:
        Two empty strings if there is none.
    """
    found: list[Any] = []

    def hook(node: Any) -> Any:
        def look(inputs: Any, outputs: Any) -> None:
            if not found and all(map(_is_finite, outputs)) and not all(map(_is_finite, inputs)):
                found.append(node)

        return look

    owners = _Owners()
    with torch.enable_grad(), preserve_model_state(model, parts):
        with owners.following(parts.modules):
            value = start(model(*args, **kwargs))
        for node in walk([value.grad_fn], most=sys.maxsize):
            if node.next_functions:
                node.register_hook(hook(node))
        value.backward()
    if not found:
        return "", ""
    return owners.owner.get(found[0], ""), str(found[0].name()).partition("Backward")[0].lower()


def _is_finite(tensor: Any) -> bool:
    return not isinstance(tensor, Tensor) or is_finite(tensor)
