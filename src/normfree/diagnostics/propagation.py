"""How the signal travels: one forward and one backward pass, a few numbers at every residual sum and weight layer.

Statistics are those of `diagnostics/moments.py`.

Reference: normdead, section 4.2 and Listing 1; robust, section 4 (the same of the gradients).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from normfree.diagnostics.batched import norms, numbers
from normfree.diagnostics.taps import SumSignal, Taps
from normfree.diagnostics.untouched import untouched
from normfree.graph import discover
from normfree.plan import Branch, ResidualPlan

Loss = Callable[[Any, Any], Tensor]
BYTES_AT_ONCE = 64 * 2**20  # of gradients that wait to be reduced together


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
    classifier whose weight is zero, behind which no gradient would be left).
    """

    sums: tuple[SumSignal, ...]
    layers: tuple[LayerSignal, ...]
    injected: str = ""
    loss: float = math.nan
    plan: ResidualPlan = field(default_factory=ResidualPlan, repr=False)

    def series(self, part: str, statistic: str = "variance") -> list[float]:
        """One number a sum: `part` is sum, branch, shortcut, or one of them with '_gradient'."""
        return [getattr(getattr(s, part), statistic) for s in self.sums]

    def to_json(self) -> dict[str, Any]:
        """The signal as plain data."""
        layers = [{**asdict(layer), "ratio": layer.ratio} for layer in self.layers]
        return {
            "injected": self.injected,
            "loss": self.loss,
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

    `inputs` is a tensor, a tuple of positional arguments or a mapping of keyword arguments. With `targets` the backward
    pass starts from `loss(output, targets)` (cross-entropy unless given); without, from a random unit gradient at the
    output, drawn from `generator` (default: seed 0). Where the classifier's weight is zero, as at the start of Fixup,
    the random gradient is put on its input instead, and `injected` says so. Frozen parameters get gradients too: the
    signal is that of the network, whatever is trained.

    Hooks, modes, gradients, buffers, random state and memory are as before, also when the model raises. Only numbers
    are kept, so memory does not grow beyond one plain pass.

    Raises `ValueError` when the model has no residual sums, is on the meta device, or puts out no tensor, when the plan
    is not the model's, and when the batch is too small for a variance.
    """
    modules = dict(model.named_modules())  # walked once: at thousands of modules a walk takes as long as some layers
    parameters = _parameters(modules)
    if any(p.is_meta for p in parameters.values()):
        raise ValueError("expected a model with values, got parameters on the meta device; initialize the model first")
    args, kwargs = tree_map(_recordable, call_arguments(inputs))
    if plan is None:
        stated = getattr(model, "plan", None)
        plan = stated if isinstance(stated, ResidualPlan) else discover(model, *args, **kwargs)
    plan.require_sums()
    taps = Taps(modules, plan)
    features: list[Tensor] = []
    zero = zero_classifier(model, plan)
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(untouched(model, modules.values()))
        stack.enter_context(_unfrozen(parameters.values()))
        stack.enter_context(taps.hooked())
        if zero is not None:
            handle = zero.register_forward_pre_hook(lambda _m, a: features.extend(a[:1]))
            stack.callback(handle.remove)
        sizes = stack.enter_context(_gradient_norms(parameters))
        output = model(*args, **kwargs)
        starts, injected, value = _start(output, features, targets, loss, generator)
        torch.autograd.backward(list(starts), list(starts.values()))
    gradients = numbers(sizes)
    layers = tuple(_layer_signals(modules, parameters, plan, gradients))
    alive = _learning(plan, gradients)
    return Signal(taps.result(alive), layers, injected, value, plan)


def _parameters(modules: Mapping[str, nn.Module]) -> dict[str, nn.Parameter]:
    """The parameters of modules by name, a shared one under its first."""
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for prefix, module in modules.items():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                found.setdefault(id(parameter), (f"{prefix}.{name}" if prefix else name, parameter))
    return dict(found.values())


def call_arguments(inputs: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """How `inputs` is handed to a model: a mapping by name, a tuple or list by position, anything else alone."""
    if isinstance(inputs, Mapping):
        return (), inputs
    return (tuple(inputs), {}) if isinstance(inputs, tuple | list) else ((inputs,), {})


def first_tensor(output: Any) -> Tensor:
    """The tensor that a model puts out: itself, `.logits`, or the first of numbers in a tuple, list or mapping."""
    values = list(output.values()) if isinstance(output, Mapping) else output
    held = values if isinstance(values, list | tuple) else ()
    for value in (output, getattr(output, "logits", None), *held):
        if isinstance(value, Tensor) and value.is_floating_point():
            return value
    raise ValueError(
        f"expected an output that is or holds a tensor of floating-point numbers, got {type(output).__name__}; "
        "pass loss= and targets= that turn it into a number"
    )


def _recordable(value: Any) -> Any:
    """A tensor made in inference mode cannot take part in a backward pass, but a copy can."""
    if not isinstance(value, Tensor) or not value.is_inference():
        return value
    with torch.inference_mode(False):
        return value.clone()


def zero_classifier(model: nn.Module, plan: ResidualPlan) -> nn.Module | None:
    """The classifier when all its weights are zero: nothing would flow back through it."""
    for layer in plan.classifier:
        module = model.get_submodule(layer.name)
        if not torch.any(module.weight != 0):  # type: ignore[arg-type]
            return module
    return None


def _start(
    output: Any, features: Sequence[Tensor], targets: Any, loss: Loss | None, generator: torch.Generator | None
) -> tuple[dict[Tensor, Tensor | None], str, float]:
    """Where the backward pass starts and with which gradients, and what the loss was."""
    value = math.nan
    starts: dict[Tensor, Tensor | None] = {}
    if targets is not None:
        result = (loss or cross_entropy)(output, targets)
        value = float(result.detach())
        starts[result] = None  # reaches at least a classifier of zeros
        if not features:
            return starts, "", value
    start = features[-1] if features else first_tensor(output)
    source = generator or torch.Generator().manual_seed(0)
    draw = torch.randn(start.shape, generator=source, device=source.device)
    starts[start] = draw.to(start)
    return starts, "features" if features else "output", value


def cross_entropy(output: Any, targets: Any) -> Tensor:
    """The loss unless another is given."""
    return nn.functional.cross_entropy(first_tensor(output), targets)


@contextmanager
def _gradient_norms(parameters: Mapping[str, nn.Parameter]) -> Iterator[dict[str, Tensor]]:
    """Note the norm of each parameter's gradient as it arrives, and throw the gradient away."""
    found: dict[str, Tensor] = {}
    waiting: dict[str, Tensor] = {}
    handles = []

    def reduce_waiting() -> None:
        found.update(norms(waiting))
        waiting.clear()

    def follow(name: str, parameter: nn.Parameter) -> None:
        def note(p: Tensor) -> None:
            if p.grad is not None:
                waiting[name] = p.grad
            p.grad = None
            if sum(g.nbytes for g in waiting.values()) > BYTES_AT_ONCE or len(waiting) >= 32:
                reduce_waiting()

        handles.append(parameter.register_post_accumulate_grad_hook(note))

    try:
        for name, parameter in parameters.items():
            if parameter.requires_grad:
                follow(name, parameter)
        yield found
        reduce_waiting()
    finally:
        for handle in handles:
            handle.remove()


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
    modules: Mapping[str, nn.Module],
    parameters: Mapping[str, nn.Parameter],
    plan: ResidualPlan,
    gradients: Mapping[str, float],
) -> Iterator[LayerSignal]:
    """The weight layers in the order of the plan, each once; tied weights stand under the name they have first."""
    first = {id(p): name for name, p in parameters.items()}
    parts: dict[str, list[nn.Parameter]] = {}
    for name in dict.fromkeys(layer.name for layer in plan.layers()):
        own = dict(modules[name].named_parameters())
        plain = own.get("weight")
        parts[name] = [p for n, p in own.items() if n != "bias"] if plain is None else [plain]
    sizes = numbers(norms({first[id(p)]: p.detach() for found in parts.values() for p in found}))
    for name, found in parts.items():
        if found:
            names = [first[id(p)] for p in found]
            weight = math.hypot(*(sizes[n] for n in names))
            yield LayerSignal(name, weight, math.hypot(*(gradients.get(n, 0.0) for n in names)))


def _learning(plan: ResidualPlan, gradients: Mapping[str, float]) -> set[str]:
    """The branches in which some parameter, a scalar of the block included, has a gradient other than zero."""
    owners: dict[str, list[str]] = {}
    homes: dict[str, list[Branch]] = {}
    for branch in plan.branches:
        homes.setdefault(branch.place, []).append(branch)
        for layer in branch.layers:
            owners.setdefault(layer.name, []).append(branch.name)  # several where a block is called several times
    alive: set[str] = set()
    others = {layer.name for layer in (*plan.stem, *plan.body, *plan.classifier)}
    others |= {layer.name for branch in plan.branches for layer in branch.shortcut_layers}
    for name, gradient in gradients.items():
        if gradient == 0.0:
            continue
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
