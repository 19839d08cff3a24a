"""Run a model forward and backward to look at it, and count what that costs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn

from normfree.graph.flow import tensors_of
from normfree.nn.model_state import preserve_model_state, run_on_copy, small_copy, substitute_tensors
from normfree.plan import ResidualPlan

_SMALL = 0.1  # the scale of the random values that take the place of zeros inside the network
BIASES = ("bias", "shift", "delta")


@dataclass(frozen=True)
class PassResult:
    """The result of one forward and backward pass.

    Attributes:
        outputs: The floating-point outputs.
        learning: The parameters in the graph of the outputs, and whether their gradient is not 0; None if no output
            has a graph.
    """

    outputs: tuple[Tensor, ...]
    learning: Mapping[str, bool] | None


@dataclass
class PassCount:
    """The cost of a conversion or refusal so far, in forward passes of the original; a backward pass costs two.

    Checks that would cost more than the limit are left out, and a note or the refusal says so.
    """

    limit: int = 15
    spent: int = 1  # to look at the model

    def add(self, *, backward: bool = False) -> None:
        """Note a pass."""
        self.spent += 3 if backward else 1

    def allows(self, cost: int) -> bool:
        """Whether as many more passes stay within the limit."""
        return self.spent + cost <= self.limit


def forward_and_backward(
    model: nn.Module,
    example: Any,
    plan: ResidualPlan,
    norms: Collection[str] = (),
    *,
    replaced: Collection[str] | None = None,
    watched: Collection[str] | None = None,
    graph: bool = True,
    proceed: Callable[[Sequence[Tensor]], bool] = lambda outputs: True,
) -> PassResult:
    """Run a model forward and backward on an example; it is left unchanged.

    Normalizers run as in training, dropout does not. Weights and scalars that are 0 get small random values for the
    pass, since nothing learns before a layer of zeros in the first step. A random gradient starts at every output.

    Args:
        model: The model.
        example: Its example; of a batch of images, two are used.
        plan: Its plan.
        norms: The names of its normalizers.
        replaced: The names of the zeros that are replaced. Default: all.
        watched: The names of the parameters to differentiate by, default all. If it is empty there is no backward pass,
            and every parameter in the graph counts as learning.
        graph: Whether to record the graph of the outputs, without which nothing is known of what learns.
        proceed: Returns, from the outputs, whether to go on with the backward pass.
    """
    example = small_copy(example)
    generator = torch.Generator().manual_seed(0)
    with preserve_model_state(model, attributes=True), torch.inference_mode(False), torch.set_grad_enabled(graph):
        model.eval()
        for name in norms:
            model.get_submodule(name).train()
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        drawn = {}
        for name, scale in zeros_of(model, plan, replaced):
            draw = torch.randn(parameters[name].shape, generator=generator) * scale
            drawn[name] = nn.Parameter(draw.to(parameters[name]))
        used = {name: p for name, p in (parameters | drawn).items() if watched is None or name in watched}
        # The backward pass runs inside, too: a checkpointed block runs again there.
        with substitute_tensors(model, {id(parameters[name]): p for name, p in drawn.items()}):
            try:
                out = run_on_copy(model, example)
            except ValueError:  # a batch norm of a single number per channel
                model.eval()
                out = run_on_copy(model, example)
            outputs = floats_of(out)
            starts = [t for t in outputs if t.requires_grad]
            if not starts or not proceed(outputs):
                return PassResult(tuple(t.detach() for t in outputs), None)
            directions = [torch.randn(t.shape, generator=generator).to(t) for t in starts]
            if used:
                found = torch.autograd.grad(starts, list(used.values()), directions, allow_unused=True)
                learning = {name: not _is_zero(g) for name, g in zip(used, found, strict=True) if g is not None}
            else:
                reached = _reached(starts)
                learning = {name: True for name, p in (parameters | drawn).items() if id(p) in reached}
    return PassResult(tuple(t.detach() for t in outputs), learning)


def _reached(starts: Sequence[Tensor]) -> set[int]:
    """The ids of the tensors at the ends of the graph of these outputs."""
    stack: list[Any] = [t.grad_fn or t for t in starts]
    seen = set(stack)
    while stack:
        for node, _ in getattr(stack.pop(), "next_functions", ()):
            if node is not None and node not in seen:
                seen.add(node)
                stack.append(node)
    return {id(getattr(node, "variable", node)) for node in seen}


def _is_zero(tensor: Tensor) -> bool:
    """Whether all entries are 0; most tensors show by their first entry that they are not."""
    return not tensor.reshape(-1)[:1].any() and not tensor.any()


def floats_of(out: Any) -> list[Tensor]:
    """The floating-point tensors among the outputs of a model."""
    return [leaf for leaf in tensors_of(out) if leaf.is_floating_point()]


def zeros_of(
    model: nn.Module, plan: ResidualPlan, replaced: Collection[str] | None = None
) -> Iterator[tuple[str, float]]:
    """The trainable weights and scalars that are 0, each with the scale of the values to draw for it."""
    heads = {layer.path for layer in plan.classifier}
    small = _SMALL * max(len(plan.branches), 1) ** -0.5
    for name, p in model.named_parameters():
        if p.requires_grad and p.is_floating_point() and not name.endswith(BIASES) and _is_zero(p):
            fan_in = p[0].numel() if p.dim() > 1 else 1
            if replaced is None or name in replaced:
                yield name, (1.0 if name in heads else small) * max(fan_in, 1) ** -0.5


def first_module(model: nn.Module, example: Any, wrong: Callable[[Tensor], bool], passes: PassCount) -> str:
    """The first module without children from which on all such modules return outputs that are `wrong`."""
    outputs: list[tuple[str, bool]] = []

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
            outputs.extend((name, wrong(t)) for t in floats_of(out)[:1] if t.dim() and t.shape[0] > 1)

        return hook

    if not passes.allows(1):
        return "an unknown module"
    passes.add()
    with preserve_model_state(model, attributes=True), torch.no_grad():
        model.eval()
        for name, module in model.named_modules():
            if next(module.children(), None) is None:
                module.register_forward_hook(keep(name))
        run_on_copy(model, small_copy(example))
    alike = list(takewhile(lambda found: found[1], reversed(outputs)))
    return f"'{alike[-1][0]}'" if alike else "the model's own code"
