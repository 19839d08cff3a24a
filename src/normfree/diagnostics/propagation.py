"""How the signal travels: one forward and one backward pass, a few numbers at every residual sum and weight layer.

Statistics are those of `diagnostics/moments.py`.

Reference: normdead, section 4.2 and Listing 1; robust, section 4 (the same of the gradients).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from normfree.diagnostics.batched import norms, numbers
from normfree.diagnostics.missing_sums import without_sums
from normfree.diagnostics.plans import plan_of
from normfree.diagnostics.sum_hooks import MISSING, SumObserver, SumSignal
from normfree.nn.model_state import ModelParts, leave_no_trace, parts_of
from normfree.nn.model_state import call_arguments as call_arguments
from normfree.nn.scalars import ScalarBias
from normfree.plan import Branch, ResidualPlan

Loss = Callable[[Any, Any], Tensor]
BYTES_AT_ONCE = 2**28  # of gradients that wait to be reduced together; each time costs a GPU a third of a millisecond


@dataclass(frozen=True)
class LayerSignal:
    """The norms of a layer's weight and of its gradient; of all parts where the weight is composed."""

    name: str
    weight_norm: float
    gradient_norm: float

    @property
    def ratio(self) -> float:
        """Gradient norm over weight norm, the relative size of an SGD step with learning rate 1."""
        return self.gradient_norm / self.weight_norm if self.weight_norm else math.inf


@dataclass(frozen=True)
class Signal:
    """Everything one forward and one backward pass showed.

    `injected` says where the gradient came from when it was not a loss: 'output' or 'features' (the input of a
    classifier whose weight is zero, behind which no gradient would be left), and 'memory' where it was put on what a
    decoder reads of an encoder, too, because all that reads it puts out zero.

    `unmeasured` is the name of the first sum whose forward signal is not a finite number, or 'the output', where
    gradients behind it would mean nothing: they are NaN, at such sums, and everywhere if the output is not finite.

    `output` is the mean square of what the model puts out. `unsummed` names the modules without a residual sum although
    they give back the shape that they get and others of their class have one.
    """

    sums: tuple[SumSignal, ...]
    layers: tuple[LayerSignal, ...]
    injected: str = ""
    loss: float = math.nan
    plan: ResidualPlan = field(default_factory=ResidualPlan, repr=False)
    unmeasured: str = ""
    output: float = math.nan
    unsummed: tuple[str, ...] = ()

    def series(self, part: str, statistic: str = "variance") -> list[float]:
        """One number a sum: `part` is sum, branch, shortcut, or one of them with '_gradient'."""
        return [getattr(getattr(s, part), statistic) for s in self.sums]

    def to_json(self) -> dict[str, Any]:
        """The signal as plain data."""
        layers = [{**asdict(layer), "ratio": layer.ratio} for layer in self.layers]
        return {
            "injected": self.injected,
            "loss": self.loss,
            "unmeasured": self.unmeasured,
            "output": self.output,
            "unsummed": list(self.unsummed),
            "sums": [asdict(s) for s in self.sums],
            "layers": layers,
        }


def propagate(
    model: nn.Module,
    inputs: Any,
    targets: Any = None,
    *,
    plan: ResidualPlan | None = None,
    loss: Loss | None = None,
    generator: torch.Generator | None = None,
) -> Signal:
    """Measure the signal of any model in one forward and one backward pass, and leave no trace of it.

    `inputs` is a tensor, a tuple of positional arguments or a mapping of keyword arguments. With `targets` or `loss`
    the backward pass starts from `loss(output, targets)` (cross-entropy unless given); without, from a random unit
    gradient at the output, drawn from `generator` (default: seed 0). Where the classifier's weight is zero, as at the
    start of Fixup, the random gradient is put on its input instead, and `injected` says so; likewise on the memory that
    a decoder reads where every attention over it puts out zero, so that nothing would reach the encoder. Frozen
    parameters get gradients too: the signal is that of the network, whatever is trained. Behind a forward signal that
    is not finite no gradient is told (`Signal.unmeasured`).

    Hooks, modes, gradients, buffers, random state and memory are as before, also when the model raises. Only numbers
    are kept, so memory does not grow beyond one plain pass.

    Raises `ValueError` when the model has no residual sums, is on the meta device, or puts out no tensor, when the plan
    is not the model's, and when the batch is too small for a variance.
    """
    known = parts_of(model)
    if any(p.is_meta for p in known.parameters.values()):
        raise ValueError("expected a model with values, got parameters on the meta device; initialize the model first")
    args, kwargs = tree_map(_recordable, call_arguments(inputs))
    if plan is None:
        plan = plan_of(model, known.modules, args, kwargs)
    plan.require_sums()
    observer = SumObserver(known.modules, plan)
    features: list[Tensor] = []
    read: defaultdict[str, list[Tensor]] = defaultdict(list)
    readers = _memory_readers(plan)
    zero = zero_classifier(model, plan)
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(leave_no_trace(model, known))
        stack.enter_context(_unfrozen(known.parameters.values()))
        stack.enter_context(observer.observing())
        if zero is not None:
            handle = zero.register_forward_pre_hook(lambda _m, a: features.extend(a[:1]))
            stack.callback(handle.remove)
        for layer in {layer for both in readers.values() for layer in both}:
            handle = known.modules[layer].register_forward_pre_hook(lambda _m, a, seen=read[layer]: seen.extend(a[:1]))
            stack.callback(handle.remove)
        unsummed = stack.enter_context(without_sums(known.modules, plan))
        sizes = stack.enter_context(_gradient_norms(known.parameters))
        output = model(*args, **kwargs)
        source = generator or torch.Generator().manual_seed(0)
        starts, injected, value = _start(output, features, targets, loss, source)
        memories = {b: read[k][0] for b, (k, v) in readers.items() if read[k] and read[v] and read[k][0] is read[v][0]}
        memory = next(iter(memories.values()), None)
        if memory is not None and memory.requires_grad and observer.are_zero(memories):
            starts[memory] = _draw(memory, source)
            injected = ", ".join(filter(None, [injected, "memory"]))
        size = _mean_square(output)
        ended = [torch.isfinite(start.detach()).all() for start in starts]
        torch.autograd.backward(list(starts), list(starts.values()))
    observer.settle()  # before the first wait for the device
    layers, gradients = _layer_signals(known, plan, sizes)
    sums = observer.result(_learning(plan, _moving(known, gradients)))
    found = Signal(
        sums,
        layers,
        injected,
        math.nan if value is None else float(value),
        plan,
        output=math.nan if size is None else float(size),
        unsummed=tuple(unsummed),
    )
    return _without_artefacts(found, output_is_finite=all(map(bool, ended)))


def _without_artefacts(signal: Signal, *, output_is_finite: bool) -> Signal:
    """The signal without gradients that came through numbers which are not finite."""
    lost = [s.name for s in signal.sums if not math.isfinite(s.sum.variance)]
    if output_is_finite and not lost:
        return signal
    some = set(lost)
    sums = tuple(
        replace(s, sum_gradient=MISSING, branch_gradient=MISSING, shortcut_gradient=MISSING)
        if not output_is_finite or s.name in some
        else s
        for s in signal.sums
    )
    layers = signal.layers
    if not output_is_finite:
        layers = tuple(replace(layer, gradient_norm=math.nan) for layer in layers)
    return replace(signal, sums=sums, layers=layers, unmeasured=lost[0] if lost else "the output")


def first_tensor(output: Any) -> Tensor:
    """The tensor that a model puts out: itself, its 'logits', or the first of numbers in a tuple, list or mapping."""
    values = list(output.values()) if isinstance(output, Mapping) else output
    held = values if isinstance(values, list | tuple) else ()
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    for value in (output, logits, *held):
        if isinstance(value, Tensor) and value.is_floating_point():
            return value
    raise ValueError(
        f"expected an output that is or holds a tensor of floating-point numbers, got {type(output).__name__}; "
        "pass a loss= that turns it into a number"
    )


def _mean_square(output: Any) -> Tensor | None:
    """The mean square of a model's output, still on its device; none where only its own loss can read it."""
    try:
        return first_tensor(output).detach().float().square().mean()
    except ValueError:
        return None


def _recordable(value: Any) -> Any:
    """A copy of an input: a model may write into it, the caller's graph would get a gradient, and what was made in
    inference mode cannot take part in a backward pass.
    """
    if not isinstance(value, Tensor):
        return value
    with torch.inference_mode(False):
        return value.detach().clone().requires_grad_(value.requires_grad)


def zero_classifier(model: nn.Module, plan: ResidualPlan) -> nn.Module | None:
    """The classifier when all its weights are zero: nothing would flow back through it.

    Only a layer that is called, whose input can be seen; a parameter that a model multiplies by itself is none.
    """
    for layer in plan.classifier:
        module = model.get_submodule(layer.name)
        if isinstance(module, nn.Linear | nn.modules.conv._ConvNd) and not torch.any(module.weight != 0):
            return module
    return None


def _start(
    output: Any, features: Sequence[Tensor], targets: Any, loss: Loss | None, source: torch.Generator
) -> tuple[dict[Tensor, Tensor | None], str, Tensor | None]:
    """Where the backward pass starts and with which gradients, and the loss, still on its device."""
    value = None
    starts: dict[Tensor, Tensor | None] = {}
    if targets is not None or loss is not None:
        result = (loss or cross_entropy)(output, targets)
        value = result.detach()
        starts[result] = None  # reaches at least a classifier of zeros
        if not features:
            return starts, "", value
    start = features[-1] if features else first_tensor(output)
    starts[start] = _draw(start, source)
    return starts, "features" if features else "output", value


def _draw(start: Tensor, source: torch.Generator) -> Tensor:
    """A random gradient with unit variance."""
    return torch.randn(start.shape, generator=source, device=source.device).to(start)


def _memory_readers(plan: ResidualPlan) -> dict[str, tuple[str, str]]:
    """The branches that may attend over another sequence, each with the layers that would make its keys and values.

    Of such an attention only the query reads the branch's input. So may the first of four layers in a row; but of those
    no two read the same tensor, while keys and values do.
    """
    found: dict[str, tuple[str, str]] = {}
    for b in plan.branches:
        inner = [layer.name for layer in b.layers if layer not in b.entries and layer not in b.ends]
        if b.depth == 4 and len(b.layers) == 4 and len(inner) == 2:
            found[b.name] = inner[0], inner[1]
    return found


def cross_entropy(output: Any, targets: Any) -> Tensor:
    """The loss unless another is given; of a sequence (N, T, V) with targets (N, T), over all its positions."""
    logits = first_tensor(output)
    if isinstance(targets, Tensor) and logits.dim() == 3 and targets.shape == logits.shape[:2]:
        logits, targets = logits.flatten(0, 1), targets.flatten()
    return nn.functional.cross_entropy(logits, targets)


@contextmanager
def _gradient_norms(parameters: Mapping[str, nn.Parameter]) -> Iterator[dict[str, Tensor]]:
    """The norm of each parameter's gradient, once the context is left; the gradients are thrown away.

    They are reduced together at the end, or where there are many also on the way: gradients arrive roughly in the
    reverse order of the parameters, so that a hook every so many bytes holds their number down.
    """
    found: dict[str, Tensor] = {}
    handles = []

    def sweep(names: Iterable[str]) -> None:
        arrived = {name: g for name in names if (g := parameters[name].grad) is not None}
        found.update(norms(arrived))
        for name in arrived:
            parameters[name].grad = None

    try:
        for names, last in _portions(parameters):
            handles.append(last.register_post_accumulate_grad_hook(lambda _p, names=names: sweep(names)))
        yield found
        sweep(parameters)
    finally:
        for handle in handles:
            handle.remove()


def _portions(parameters: Mapping[str, nn.Parameter]) -> Iterator[tuple[list[str], nn.Parameter]]:
    """From the last backwards, all parameters of a device up to one with which the next `BYTES_AT_ONCE` are full."""
    names: dict[torch.device, list[str]] = {}
    waiting: dict[torch.device, int] = {}
    for name, parameter in reversed(list(parameters.items())):
        device = parameter.device
        names.setdefault(device, []).append(name)
        waiting[device] = waiting.get(device, 0) + parameter.nbytes
        if waiting[device] > BYTES_AT_ONCE and parameter.requires_grad:
            yield names[device].copy(), parameter
            waiting[device] = 0


@contextmanager
def _unfrozen(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Let every parameter have a gradient."""
    frozen = [p for p in parameters if not p.requires_grad and (p.is_floating_point() or p.is_complex())]
    try:
        for p in frozen:
            p.requires_grad_(True)
        yield
    finally:
        for p in frozen:
            p.requires_grad_(False)


def _layer_signals(
    known: ModelParts, plan: ResidualPlan, gradients: Mapping[str, Tensor]
) -> tuple[tuple[LayerSignal, ...], dict[str, float]]:
    """The weight layers in the order of the plan, each once, and the norm of every gradient as a number.

    Tied weights stand under the name they have first.
    """
    first = {id(p): name for name, p in known.parameters.items()}
    weights: dict[str, list[str]] = {}
    for layer in plan.layers():
        name = layer.name if layer.parameter == "weight" else layer.path
        if name not in weights:
            module = known.modules[layer.name]
            plain = module._parameters.get(layer.parameter)
            parts = [plain] if plain is not None else [p for n, p in module.named_parameters() if n != "bias"]
            weights[name] = [first[id(p)] for p in parts]
    own = norms({name: known.parameters[name] for names in weights.values() for name in names})
    both = {("weight", name): size for name, size in own.items()}
    both |= {("gradient", name): size for name, size in gradients.items()}
    found = numbers(both)  # one wait for the device
    sizes = {name: found["weight", name] for name in own}
    slopes = {name: found["gradient", name] for name in gradients}
    layers = tuple(
        LayerSignal(layer, math.hypot(*(sizes[n] for n in names)), math.hypot(*(slopes.get(n, 0.0) for n in names)))
        for layer, names in weights.items()
        if names
    )
    return layers, slopes


def _moving(known: ModelParts, gradients: Mapping[str, float]) -> list[str]:
    """The parameters with a gradient other than zero that multiply; a bias behind dead layers wakes none of them."""
    return [
        name
        for name, gradient in gradients.items()
        if gradient != 0.0
        and not name.endswith(("bias", ".shift", ".delta"))
        and not isinstance(known.modules[name.rpartition(".")[0]], ScalarBias)
    ]


def _learning(plan: ResidualPlan, moving: Iterable[str]) -> set[str]:
    """The branches in which some of these parameters stand, a scalar of the block included."""
    owners: dict[str, list[str]] = {}
    homes: dict[str, list[Branch]] = {}
    for branch in plan.branches:
        homes.setdefault(branch.place, []).append(branch)
        for layer in branch.layers:
            owners.setdefault(layer.name, []).append(branch.name)  # several where a block is called several times
    alive: set[str] = set()
    others = {layer.name for layer in (*plan.stem, *plan.body, *plan.classifier)}
    others |= {layer.name for branch in plan.branches for layer in branch.shortcut_layers}
    for name in moving:
        module = name.rpartition(".")[0]
        if module in owners:
            alive.update(owners[module])
        if module in owners or module in others:
            continue
        prefix = module
        while prefix and prefix not in homes:
            prefix = prefix.rpartition(".")[0]
        alive.update(branch.name for branch in homes.get(prefix, ()))
    return alive
