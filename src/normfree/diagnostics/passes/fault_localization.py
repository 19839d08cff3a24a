"""Further passes through a model whose signal is faulty: they find the module behind the fault."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_leaves, tree_map, tree_map_with_path

from normfree.diagnostics.measurement.graph_nodes import place_of, sources_of
from normfree.diagnostics.measurement.inputs_and_outputs import (
    IgnoredInput,
    injected_outputs,
    is_finite,
    is_mask,
    loss_of,
    main_tensor,
)
from normfree.diagnostics.passes.derivative_checks import gradient_origin
from normfree.diagnostics.passes.tracing import Trace, first_difference, trace
from normfree.diagnostics.signals import CONSTANT, Fact, Gain, Signal
from normfree.graph.observer import FunctionCall, Observer
from normfree.nn.model_state import (
    ModelParts,
    call_arguments,
    full_tensor,
    hooked,
    is_sharded,
    parts_of,
    preserve_model_state,
    substitute_tensors,
)
from normfree.nn.normalizers import is_norm
from normfree.nn.weight_layers import WEIGHT_LAYERS

ROUNDED = 1e-3  # relative difference between gradients that only rounding tells apart
LOST = 1e-7  # beside numbers of about 1, float32 rounds what is smaller off
MOST_CANDIDATES = 4  # modules for which a forward pass is made


class OpenQuestions(NamedTuple):
    """What the pass leaves open: it takes further passes to tell a fault from a design.

    Attributes:
        ended: The first sum or layer whose signal is zero or the same for all samples, '' if there is none.
        silence_is_fault: Whether a signal that ends there is a fault.
        layers: The last layers outside of branches with weights, but without a gradient.
        modules: The outermost modules of which no weight got a gradient.
        ignored: The parts of the input that got no gradient.
        heads: Those of the modules that may be other heads of the model, which the output may do without.
    """

    ended: str
    silence_is_fault: bool
    layers: list[str]
    modules: list[str]
    ignored: list[IgnoredInput]
    heads: Set[str] = frozenset()


def locate_faults(
    signal: Signal, model: nn.Module, parts: ModelParts, inputs: Any, asked: OpenQuestions, loss: Callable[[Any], Any]
) -> Signal:
    """Name the weights, modules and functions behind a signal that ends, by further forward passes.

    Args:
        loss: Returns the loss of an output, or None.
    """
    broken = broken_parameters(parts) if signal.unmeasured else ()
    origin: list[str] = []
    failures = _Failures({id(p): name.rpartition(".")[0] for name, p in parts.parameters.items()})
    args, kwargs = _copied(inputs)
    if not broken and signal.inputs.finite and (asked.silence_is_fault or signal.unmeasured):
        with (
            torch.enable_grad(),  # the model may take derivatives
            preserve_model_state(model, parts),
            find_origin(parts.modules, varies if asked.silence_is_fault else is_finite) as origin,
            failures.following(parts.modules) if signal.unmeasured else nullcontext(),
        ):
            output = model(*args, **kwargs)
            failures.ended = True
            if signal.unmeasured:
                loss(output)
    silent_modules = asked.modules
    cut = [
        name
        for name in (*asked.layers, *silent_modules[-MOST_CANDIDATES:])
        if influences(model, parts, name, args, kwargs)
    ]
    # A branch that starts at 0, as in Fixup, hides what it reads, but only until the first step.
    with _without_zeros(model, parts):
        hidden = [
            n for n in silent_modules[-MOST_CANDIDATES:] if n not in cut and influences(model, parts, n, args, kwargs)
        ]
        unread = [i for i in asked.ignored if not _is_read(model, parts, i, args, kwargs)]
    used = (*cut, *hidden)
    unused = (
        [name for name in silent_modules if name not in {*used, *asked.heads}]
        if len(silent_modules) <= MOST_CANDIDATES or not used
        else []
    )
    facts = (*signal.facts, *(Fact("input ignored", "the input", i.part) for i in unread))
    inside = [name for name in origin if asked.ended and name.startswith(f"{asked.ended}.")]
    failure = failures.found[0] if failures.found else _Failure()
    first = next(iter(inside or origin), failure.place)
    return replace(
        signal,
        broken=broken,
        origin=first,
        origin_kind=type(parts.modules[first]).__name__ if first in parts.modules else "",
        origin_function=failure.function,
        origin_reads=failure.reads,
        facts=facts,
        cut_layers=tuple(cut),
        unused=tuple(unused),
    )


def measure_causes(signal: Signal, model: nn.Module, inputs: Any, targets: Any = None, loss: Any = None) -> Signal:
    """Measure the innermost modules of a model with a fault, and find a derivative that is not finite."""
    parts, (args, kwargs) = parts_of(model), _copied(inputs)
    if signal.unmeasured:
        return signal
    facts = (*signal.facts, *noise_facts(model, parts, (args, kwargs)))
    failures = _Failures({})  # the graph does not show overflows before the first weight
    with torch.enable_grad(), preserve_model_state(model, parts), failures.following(parts.modules):
        model(*tree_map(_copy, args), **tree_map(_copy, kwargs))
    facts = (*[Fact("overflow", failure.place) for failure in failures.found if failure.half][:1], *facts)
    if signal.head.variation <= CONSTANT:
        facts = (*facts, *end_of_variation(trace(model, parts, (args, kwargs), evaluate=False)))

    def start(output: Any) -> Tensor:
        value = loss_of(output, targets, loss)
        return random_start(output) if value is None else value

    for names in dict.fromkeys(fact.detail for fact in signal.by_kind["copies of one module"]):
        if not equal_gradients(model, parts, args, kwargs, start, names.split(", ")):
            facts = tuple(f for f in facts if f.kind != "copies of one module" or f.detail != names)
    found = replace(signal, gains=leaf_gains(model, parts, args, kwargs), facts=facts)
    if all(math.isfinite(s.gradient_level) for s in signal.sums):
        return found
    module, function = gradient_origin(model, parts, *_copied(inputs), start)
    return replace(found, gradient_origin=module, gradient_function=function)


def equal_gradients(
    model: nn.Module, parts: ModelParts, args: Any, kwargs: Any, start: Callable[[Any], Tensor], names: list[str]
) -> bool:
    """Whether some parameters get the same gradient, not only one of the same size."""
    weights = [parts.parameters[name] for name in names]
    with torch.enable_grad(), preserve_model_state(model, parts):
        value = start(model(*tree_map(_copy, args), **tree_map(_copy, kwargs)))
        first, *others = torch.autograd.grad(value, weights, allow_unused=True)
    if first is None or any(g is None for g in others):
        return False
    return all(bool((g - first).norm() <= ROUNDED * first.norm()) for g in others)


def _copied(inputs: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """The arguments of a model, of which tensors are copied, because the model may write into them."""
    args, kwargs = tree_map(_copy, call_arguments(inputs))
    return args, kwargs


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def leaf_gains(model: nn.Module, parts: ModelParts, args: Any, kwargs: Any) -> tuple[Gain, ...]:
    """Measure the innermost modules in one forward pass, in the order of their calls."""
    found: list[Gain] = []

    def hook(name: str) -> Any:
        def measure(module: nn.Module, args: Any, out: Any) -> None:
            out = out[0] if isinstance(out, tuple) and out else out
            if not isinstance(out, Tensor) or not out.is_floating_point() or not out.numel():
                return
            bias = module._parameters.get("bias") if isinstance(module, nn.Linear | nn.modules.conv._ConvNd) else None
            if bias is not None and not is_sharded(bias):
                out = (out if isinstance(module, nn.Linear) else out.movedim(1, -1)) - bias
            if found and is_norm(module):
                found[-1] = replace(found[-1], normalized=True)
            x = args[0] if args and isinstance(args[0], Tensor) and args[0].is_floating_point() else None
            before = 1.0 if x is None or is_norm(module) else _moment(x)
            factor = _moment(out) / before if before > 0 else math.nan
            found.append(Gain(name, type(module).__name__, factor))

        return measure

    hooks = {
        m: hook(name)
        for name, m in parts.modules.items()
        if name and (isinstance(m, WEIGHT_LAYERS) or is_norm(m) or not any(True for _ in m.children()))
    }
    with hooked(hooks), torch.enable_grad(), preserve_model_state(model, parts):
        model(*args, **kwargs)
    return tuple(found)


def _moment(tensor: Tensor) -> float:
    return float(tensor.detach().double().square().mean())


def influences(model: nn.Module, parts: ModelParts, name: str, args: Any, kwargs: Any) -> bool:
    """Whether the result of a module, or of the modules in a list, changes the main output of the model."""
    inside = {n: m for n, m in parts.modules.items() if n == name or n.startswith(f"{name}.")}
    called = [
        n for n, m in inside.items() if type(m).forward is not nn.Module.forward and not isinstance(m, CONTAINERS)
    ]

    def other(_m: nn.Module, _a: Any, out: Any) -> Any:
        # Not only the size is another one, but also the largest number, which an argmax would choose.
        return tree_map(lambda t: 0.5 - 1.7 * t if isinstance(t, Tensor) and t.is_floating_point() else t, out)

    changed = called[:1] if name in called else called
    before = _run(model, parts, args, kwargs)[0]
    with hooked({inside[n]: other for n in changed}):
        if not torch.equal(before, _run(model, parts, args, kwargs)[0]):
            return True
    weights = [p for m in inside.values() for p in m.parameters(recurse=False) if not is_sharded(p)]
    with substitute_tensors(model, {id(p): 0.5 - 1.7 * p.detach() for p in weights}):  # used by a function
        return not torch.equal(before, _run(model, parts, args, kwargs)[0])


CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


@contextmanager
def _without_zeros(model: nn.Module, parts: ModelParts) -> Iterator[None]:
    """Let the model compute with small random numbers in place of trainable weights and scalars that are 0."""
    generator = torch.Generator().manual_seed(0)
    weights = [p for name, p in parts.parameters.items() if p.requires_grad and not name.endswith("bias")]
    zeros = [p for p in weights if not is_sharded(p) and not p.any()]
    drawn = {id(p): 0.1 * torch.randn(p.shape, generator=generator).to(p) for p in zeros}
    with substitute_tensors(model, drawn):
        yield


def _run(model: nn.Module, parts: ModelParts, args: Any, kwargs: Any, seed: int = 0) -> list[Tensor]:
    """The outputs of a model, the main one first; two calls with the same seed draw the same random numbers."""
    with torch.enable_grad(), preserve_model_state(model, parts):
        torch.manual_seed(seed)
        output = model(*tree_map(_copy, args), **tree_map(_copy, kwargs))
    return [t.detach().clone() for t in (main_tensor(output), *tree_leaves(output)) if isinstance(t, Tensor)]


def _is_read(model: nn.Module, parts: ModelParts, ignored: IgnoredInput, args: Any, kwargs: Any) -> bool:
    """Whether a part of the input without a gradient changes the output all the same."""

    def swap(path: Any, value: Any) -> Any:
        return ignored.changed if keystr(path) == ignored.name else value

    other = tree_map_with_path(swap, (args, kwargs))
    return not all(map(torch.equal, _run(model, parts, args, kwargs), _run(model, parts, *other)))


def broken_parameters(parts: ModelParts) -> tuple[str, ...]:
    """The names of parameters and buffers that hold NaN or infinity."""
    named: dict[str, Tensor] = dict(parts.parameters)
    for prefix, module in parts.modules.items():
        named |= {f"{prefix}.{n}" if prefix else n: b for n, b in module._buffers.items() if b is not None}
    with torch.no_grad():
        return tuple(
            name
            for name, t in ((name, full_tensor(t)) for name, t in named.items() if t.is_floating_point())
            if not bool(torch.isfinite(t).all()) and not is_mask(t)
        )


@contextmanager
def find_origin(modules: Mapping[str, nn.Module], good: Callable[[Tensor], bool]) -> Iterator[list[str]]:
    """Collect the innermost modules that get good tensors and return one that is not, while a model runs."""
    found: list[str] = []

    def all_good(tree: Any) -> bool:
        return all(good(t) for t in tree_leaves(tree) if isinstance(t, Tensor) and t.is_floating_point())

    def hook(name: str) -> Any:
        def look(_m: nn.Module, args: Any, out: Any) -> None:
            if not all_good(out) and all_good(args) and not any(n.startswith(f"{name}.") for n in found):
                found.append(name)

        return look

    with hooked({m: hook(name) for name, m in modules.items() if name}):
        yield found


def varies(tensor: Tensor) -> bool:
    """Whether a tensor is not zero, but for rounding, nor the same for all samples."""
    t = tensor.masked_fill(tensor.abs() < LOST, 0)
    return bool((t != t[:1]).any() if t.dim() > 1 and len(t) > 1 else t.any())


class _Failure(NamedTuple):
    """A function that makes numbers infinite or NaN: its place, its name, what it read, and whether in float16."""

    place: str = ""
    function: str = ""
    reads: str = ""
    half: bool = False


class _Failures(Observer):
    """Collects the functions that make NaN out of numbers, or infinity out of finite ones, with their modules.

    A function that is given -inf to write, as for a mask, is none. Set `ended` when the model has returned. In the code
    of the model itself, the place is the layer that the function reads from.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self.names = names
        self.found: list[_Failure] = []
        self.ended = False

    def on_function(self, call: FunctionCall) -> Any:
        """Compare the numbers before and after."""
        given = [t for t in tree_leaves((call.args, call.kwargs)) if isinstance(t, Tensor | float)]
        tensors = [t for t in given if isinstance(t, Tensor) and t.is_floating_point()]
        numbers = not any(bool(t.isnan().any()) for t in tensors)
        finite = all(map(is_finite, tensors)) and all(math.isfinite(t) for t in given if isinstance(t, float))
        out = call.run()
        made = out if isinstance(out, Tensor) and out.is_floating_point() else torch.zeros(())
        if (numbers and bool(made.isnan().any())) or (finite and not is_finite(made)):
            nodes = [t.grad_fn for t in tensors if t.grad_fn is not None]
            read = list(dict.fromkeys(name for node in nodes for name in sources_of(node, self.names)))
            place = next(filter(None, (place_of(node, self.names) for node in nodes)), "")
            place = "the loss" if self.ended else self.home or place
            self.found.append(_Failure(place, call.name, " and ".join(read[:3]), made.dtype is torch.float16))
        return out


def random_start(output: Any) -> Tensor:
    """A number whose gradients at the outputs are random."""
    source = torch.Generator().manual_seed(0)
    first, *others = ((t * torch.randn(t.shape, generator=source).to(t)).sum() for t in injected_outputs(output))
    return sum(others, first)


def noise_facts(model: nn.Module, parts: ModelParts, arguments: Any) -> Iterator[Fact]:
    """The difference of the output between two passes over that between two samples, and where it begins."""
    args, kwargs = arguments
    outputs = (_run(model, parts, args, kwargs, seed)[0].float() for seed in (0, 1))
    one, other = (output if output.dim() else output[None] for output in outputs)  # a loss is one number
    between = ((one - one.roll(1, 0)) * (other - other.roll(1, 0))).mean()  # noise has no part in it, on average
    share = float(((one - other).square().mean() / between.clamp_min(1e-12)).sqrt())
    if share:
        first, second = (trace(model, parts, arguments, evaluate=False, seed=seed) for seed in (0, 1))
        yield from (Fact("noise", place, value=share) for place in [first_difference(first, second)] if place)


def end_of_variation(calls: Trace) -> Iterator[Fact]:
    """The first module from which on all outputs are the same for every sample, and the last one before it."""
    found = [(c.name, any(_differs(t) for t in c.returned)) for c in calls if c.returned]
    last = max((i for i, (_, some) in enumerate(found) if some), default=-1)
    if 0 <= last < len(found) - 1:
        yield Fact("variation ends", found[last + 1][0] or "the output", found[last][0])


def _differs(tensor: Tensor) -> bool:
    """Whether samples differ by more than rounding."""
    return bool((tensor - tensor[:1]).square().mean() > CONSTANT * tensor.square().mean())
