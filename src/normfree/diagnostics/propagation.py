"""How the signal travels: one forward and one backward pass, a few numbers at every residual sum and weight layer.

Statistics are those of the signal propagation plots: with the mean and variance of each channel taken over the batch
and all positions, `mean_square` is the channel average of the squared means and `variance` that of the variances;
`norm` is the root of the summed squares a sample, averaged over the batch in the square.

Reference: normdead, section 4.2 and Listing 1; robust, section 4 (the same of the gradients).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from normfree.diagnostics.untouched import untouched
from normfree.graph import discover
from normfree.graph.record import ADDITIONS
from normfree.nn.residual import Residual
from normfree.plan import Branch, ResidualPlan

Loss = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class Stats:
    """Squared mean, variance and norm of one tensor."""

    mean_square: float
    variance: float
    norm: float


MISSING = Stats(math.nan, math.nan, math.nan)
ZERO = Stats(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class SumSignal:
    """The signal at one residual sum: forward and backward, at the sum, the branch's end and the shortcut.

    `learns` says whether any parameter of the branch, a scalar included, got a gradient other than zero.
    """

    name: str
    stage: int
    transition: bool
    sum: Stats
    branch: Stats
    shortcut: Stats
    sum_gradient: Stats
    branch_gradient: Stats
    shortcut_gradient: Stats
    learns: bool = True


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
    if any(p.is_meta for p in model.parameters()):
        raise ValueError("expected a model with values, got parameters on the meta device; initialize the model first")
    args, kwargs = tree_map(_recordable, call_arguments(inputs))
    if plan is None:
        stated = getattr(model, "plan", None)
        plan = stated if isinstance(stated, ResidualPlan) else discover(model, *args, **kwargs)
    plan.require_sums()
    taps = _Taps(model, plan)
    features: list[Tensor] = []
    zero = _zero_classifier(model, plan)
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(untouched(model))
        stack.enter_context(_unfrozen(model))
        stack.enter_context(taps.hooked())
        if zero is not None:
            handle = zero.register_forward_pre_hook(lambda _m, a: features.extend(a[:1]))
            stack.callback(handle.remove)
        norms = stack.enter_context(_gradient_norms(model))
        with taps:
            output = model(*args, **kwargs)
        starts, injected, value = _start(output, features, targets, loss, generator)
        torch.autograd.backward(list(starts), list(starts.values()))
    pairs = torch.stack([torch.stack(pair).double() for pair in norms.values()]).tolist() if norms else []
    numbers = dict(zip(norms, pairs, strict=True))
    layers = tuple(_layer_signals(model, plan, numbers))
    alive = _learning(plan, {name: gradient for name, (_, gradient) in numbers.items()})
    return Signal(taps.result(alive), layers, injected, value, plan)


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


def _zero_classifier(model: nn.Module, plan: ResidualPlan) -> nn.Module | None:
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
        result = (loss or _cross_entropy)(output, targets)
        value = float(result.detach())
        starts[result] = None  # reaches at least a classifier of zeros
        if not features:
            return starts, "", value
    start = features[-1] if features else first_tensor(output)
    source = generator or torch.Generator().manual_seed(0)
    draw = torch.randn(start.shape, generator=source, device=source.device)
    starts[start] = draw.to(start)
    return starts, "features" if features else "output", value


def _cross_entropy(output: Any, targets: Any) -> Tensor:
    return nn.functional.cross_entropy(first_tensor(output), targets)


@contextmanager
def _gradient_norms(model: nn.Module) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """Note the norm of each parameter and of its gradient as it arrives, and throw the gradient away."""
    norms: dict[str, tuple[Tensor, Tensor]] = {}
    handles = []

    def follow(name: str, parameter: nn.Parameter) -> None:
        size = _norm(parameter.detach())
        norms[name] = (size, torch.zeros_like(size))

        def note(p: Tensor) -> None:
            if p.grad is not None:
                norms[name] = (size, _norm(p.grad))
            p.grad = None

        handles.append(parameter.register_post_accumulate_grad_hook(note))

    try:
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                follow(name, parameter)
        yield norms
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _unfrozen(model: nn.Module) -> Iterator[None]:
    """Let every parameter have a gradient."""
    frozen = [p for p in model.parameters() if not p.requires_grad and (p.is_floating_point() or p.is_complex())]
    try:
        for p in frozen:
            p.requires_grad_(True)
        yield
    finally:
        for p in frozen:
            p.requires_grad_(False)


def _norm(tensor: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=_wide(tensor))
    return norm


def _wide(tensor: Tensor) -> torch.dtype:
    """The type to sum squares in: those of float32 leave its range long before the numbers do."""
    return torch.float32 if tensor.device.type == "mps" else torch.float64


def _layer_signals(
    model: nn.Module, plan: ResidualPlan, numbers: Mapping[str, Sequence[float]]
) -> Iterator[LayerSignal]:
    """The weight layers in the order of the plan, each once; tied weights stand under the name they have first."""
    first = {id(p): name for name, p in model.named_parameters()}
    for name in dict.fromkeys(layer.name for layer in plan.layers()):
        parameters = dict(model.get_submodule(name).named_parameters())
        plain = parameters.get("weight")
        parts = [p for n, p in parameters.items() if n != "bias"] if plain is None else [plain]
        found = [numbers[first[id(p)]] for p in parts if first[id(p)] in numbers]
        if found:
            yield LayerSignal(name, *(math.hypot(*column) for column in zip(*found, strict=True)))


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


class _Taps(TorchFunctionMode):
    """Watches the additions that the plan names, and takes statistics of their operands and results."""

    def __init__(self, model: nn.Module, plan: ResidualPlan) -> None:
        super().__init__()
        self.plan = plan
        self._modules = dict(model.named_modules())
        self._sums = {(b.place, b.addition): b for b in plan.branches}
        if strange := next((home for home, _ in self._sums if home not in self._modules), None):
            raise ValueError(
                f"expected a plan of this model, got one with a sum in '{strange}', which the model does not have; "
                "leave the plan out to have it discovered"
            )
        self._homes: list[str] = []
        self._additions: Counter[str] = Counter()
        self._moments: dict[tuple[str, str], Tensor] = {}
        self._awaited: set[tuple[str, str]] = set()
        self._last: tuple[object, Tensor, Tensor] | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") not in ADDITIONS or not self._homes:
            return func(*args, **(kwargs or {}))
        home = self._homes[-1]
        branch = self._sums.get((home, self._additions[home]))
        self._additions[home] += 1
        if branch is None or len(args) < 2:
            return func(*args, **(kwargs or {}))
        # Before the addition, which may be in place: a hook that is set now sees the gradient of the old value.
        first, second = (args[0], args[1]) if branch.branch_first else (args[1], args[0])
        self._tap(branch, "branch", first)
        self._tap(branch, "shortcut", second)
        out = func(*args, **(kwargs or {}))
        if not isinstance(self._modules.get(home), Residual):
            self._tap(branch, "sum", out)
        return out

    def _once(self, tensor: Tensor) -> Tensor:
        """The moments of a tensor; a sum hands its gradient on unchanged, so the last are often asked for again."""
        key = (tensor.data_ptr(), tensor.shape, tensor._version)
        if self._last is None or self._last[0] != key:
            self._last = (key, tensor, moments(tensor))  # holding the tensor keeps its address its own
        return self._last[2]

    def _tap(self, branch: Branch, part: str, tensor: Any) -> None:
        if not isinstance(tensor, Tensor):
            return
        if tensor.dim() > 1 and tensor.numel() == tensor.shape[_channel(tensor)]:
            raise ValueError(
                f"expected at least two values a channel at {_label(branch)}, got one (shape {tuple(tensor.shape)}), "
                "which has no variance; use a larger batch"
            )
        self._moments[branch.name, part] = self._once(tensor.detach())

        def backward(gradient: Tensor) -> None:
            self._moments[branch.name, f"{part}_gradient"] = self._once(gradient)

        if tensor.requires_grad:
            tensor.register_hook(backward)
        if tensor.requires_grad or part == "sum":
            self._awaited.add((branch.name, f"{part}_gradient"))  # one that never comes is zero

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Know which module's forward pass an addition stands in; children hide their own additions."""
        handles = []
        by_home: dict[str, list[Branch]] = {}
        for b in self.plan.branches:
            by_home.setdefault(b.place, []).append(b)
        calls: Counter[str] = Counter()

        def follow(name: str, module: nn.Module) -> None:
            def enter(_m: nn.Module, _a: Any) -> None:
                self._homes.append(name)

            def leave(_m: nn.Module, _a: Any, out: Any) -> None:
                self._homes.pop()
                if isinstance(module, Residual) and calls[name] < len(by_home.get(name, ())):
                    self._tap(by_home[name][calls[name]], "sum", out)
                    calls[name] += 1

            handles.append(module.register_forward_pre_hook(enter))
            handles.append(module.register_forward_hook(leave))

        names = {id(m): name for name, m in self._modules.items()}  # a shared module has one name, as in the plan
        followed: dict[str, nn.Module] = {}
        for home in by_home:
            module = self._modules[home]
            # A residual module of ours calls its children only; others may reach further down.
            inside = module.children() if isinstance(module, Residual) else module.modules()
            followed.update({names[id(m)]: m for m in (module, *inside)})
        for name, module in followed.items():
            follow(name, module)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def result(self, alive: set[str]) -> tuple[SumSignal, ...]:
        """What was seen at every sum of the plan, and which branches learn."""
        self._last = None
        unseen = [_label(b) for b in self.plan.branches if (b.name, "sum") not in self._moments]
        if unseen:
            raise ValueError(
                f"expected a forward pass through every residual sum of the plan, got none through {unseen[0]} "
                f"({len(unseen)} of {len(self.plan.branches)}); pass the plan of what runs, or use evaluation mode "
                "where blocks are dropped at random"
            )
        # One transfer for all numbers: a transfer each would stall a GPU at every block.
        rows = torch.stack(list(self._moments.values())).tolist() if self._moments else []
        seen = {key: Stats(*row) for key, row in zip(self._moments, rows, strict=True)}

        def stats(branch: Branch, part: str) -> Stats:
            return seen.get((branch.name, part), ZERO if (branch.name, part) in self._awaited else MISSING)

        parts = ("sum", "branch", "shortcut")
        names = [part + kind for kind in ("", "_gradient") for part in parts]
        return tuple(
            SumSignal(
                name=_label(b),
                stage=b.position.stage,
                transition=b.position.transition,
                learns=b.name in alive,
                **{name: stats(b, name) for name in names},
            )
            for b in self.plan.branches
        )


def _label(branch: Branch) -> str:
    """What a sum is called; one in the model's own forward pass has no module to be named after."""
    return branch.name if branch.name.partition("#")[0] else f"(model){branch.name}"


def _channel(tensor: Tensor) -> int:
    return 2 if tensor.dim() == 3 else 1


def moments(tensor: Tensor) -> Tensor:
    """Channel-averaged squared mean and variance, and the root mean square norm of a sample, in float64.

    Channels are dimension 1 of images and vectors (N, C, …) and the last of sequences (N, T, C).

    >>> moments(torch.ones(4, 2, 3, 3)).tolist()
    [1.0, 0.0, 4.242640687119285]
    """
    values = tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
    values = values.reshape(-1, 1) if values.dim() < 2 else values
    dims = [d for d in range(values.dim()) if d != _channel(values)]
    count = math.prod(values.shape[d] for d in dims)
    # Two passes of plain reductions: as exact as torch.var_mean, and many times faster on the CPU.
    mean = values.mean(dims, keepdim=True)
    wide = _wide(values)
    spread = torch.linalg.vector_norm(values - mean, dim=dims, dtype=wide)
    squared_means, variances = mean.flatten().to(wide).square(), spread.square() / count
    norm = ((squared_means + variances).sum() * (count / values.shape[0])).sqrt()
    return torch.stack([squared_means.mean(), variances.mean(), norm])
