"""Forward and backward passes of a model: what it returns, which parameters learn, and what the passes cost."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import takewhile
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from normfree.errors import quoted
from normfree.graph.observer import tensors_of
from normfree.graph.recorder import DIFFERENTIATES, differentiates
from normfree.nn.model_state import (
    eval_pass,
    on_meta,
    preserve_model_state,
    preserve_random_state,
    run_on_copy,
    small_copy,
    substitute_tensors,
)
from normfree.plan import ResidualPlan

_SMALL = 0.1  # the scale of the random values that take the place of zeros inside the network
BIASES = ("bias", "shift", "delta")


FoundBy = Literal["rules", "forward", "backward", "zeros"]
"""How an obstacle was found: by rules, by a forward pass, by a forward and a backward pass, or by several of both,
which show that a parameter that starts at zero stays zero."""


class MethodError(ValueError):
    """This method cannot convert the model; another method might.

    Attributes:
        found_by: How the obstacle was found. An attempt with another method looks for it in the same way.
    """

    def __init__(self, message: str, found_by: FoundBy = "rules") -> None:
        super().__init__(message)
        self.found_by = found_by


class ForwardPass:
    """A forward pass of a model, from which a backward pass may start.

    Attributes:
        out: The model's output.
        outputs: The floating-point outputs, without their graph.
        returns_loss: Whether one of several outputs is a loss: a single number that depends on every parameter that
            any output depends on. Gradients then start at the loss alone, because it may not use all other outputs.
    """

    def __init__(self, passes: Passes, out: Any, parameters: Mapping[str, Tensor], generator: torch.Generator) -> None:
        self.out = out
        outputs = floats_of(out)
        self.outputs = tuple(t.detach() for t in outputs)
        self._passes, self._parameters, self._generator = passes, parameters, generator
        self._starts = [t for t in outputs if t.requires_grad]
        ends = self._ends(self._starts)
        losses = [t for t in self._starts if t.numel() == 1 and self._ends([t]) == ends]
        self.returns_loss = bool(losses) and len(self._starts) > 1
        self._starts = losses[:1] or self._starts

    def learning(self, watched: Collection[str] | None = None) -> dict[str, bool] | None:
        """Run backward from a random gradient at every output.

        `watched` are the names of the parameters to differentiate by, default all. Returns those in the graph of the
        outputs, each with whether its gradient is not 0; None if no output has a graph.
        """
        if not self._starts:
            return None
        self._passes.spent += 2
        used = {name: p for name, p in self._parameters.items() if watched is None or name in watched}
        directions = [torch.randn(t.shape, generator=self._generator).to(t) for t in self._starts]
        found: Sequence[Tensor | None]
        if _runs_again(_graph(self._starts)):  # gradients are only accumulated; the context of the pass sets them aside
            torch.autograd.backward(self._starts, directions)
            found = [p.grad for p in used.values()]
        else:
            found = torch.autograd.grad(self._starts, list(used.values()), directions, allow_unused=True)
        return {name: not _is_zero(g) for name, g in zip(used, found, strict=True) if g is not None}

    def reached(self) -> list[str] | None:
        """The parameters in the graph of the outputs, without a backward pass; None if no output has a graph.

        The graph does not show the parameters of checkpointed blocks that run again: then these are all parameters.
        """
        if not self._starts:
            return None
        ends = self._ends(self._starts)
        hidden = _runs_again(_graph(self._starts))
        return [name for name, p in self._parameters.items() if hidden or id(p) in ends]

    def _ends(self, starts: Sequence[Tensor]) -> set[int]:
        """The ids of the parameters in the graph of these tensors."""
        ends = {id(getattr(node, "variable", node)) for node in _graph(starts)}
        return {id(p) for p in self._parameters.values()} & ends


class Passes:
    """Runs a model on its example, and counts the cost in forward passes; a backward pass costs two.

    A check that would exceed `limit` is left out, and a note or the error says so.

    Attributes:
        small: The example; of a batch of images, the first two.
        heads: The names of the weights of output layers.
        spent: The cost so far.
    """

    limit = 15

    def __init__(self, model: nn.Module, example: Any, plan: ResidualPlan) -> None:
        self.small = small_copy(example)
        self.heads = {layer.path for layer in plan.classifier}
        self.spent = 1  # the recording of the flow
        self._model = model
        self._example = example
        self._small_scale = _SMALL * max(len(plan.branches), 1) ** -0.5

    def allows(self, cost: int) -> bool:
        """Whether further passes of this cost stay within the limit."""
        return self.spent + cost <= self.limit

    def take_whole_example(self) -> bool:
        """Run on the whole example from now on. Returns False if it was whole already."""
        if not isinstance(self._example, Tensor) or len(self.small) == len(self._example):
            return False
        self.small = self._example.detach().clone()
        return True

    def run(self, example: Any) -> Any:
        """Run the converted model forward.

        Raises:
            MethodError: If its code fails.
        """
        self.spent += 1
        try:
            with eval_pass(self._model):
                return run_on_copy(self._model, example)
        except Exception as error:  # whatever the model's own code raises
            raise model_failed_error(self._model, error) from error

    def require_training(self) -> None:
        """Check that the converted model runs in training mode; without values, so that nothing is computed.

        Raises:
            MethodError: If its code fails.
        """
        try:
            with on_meta(self._model), preserve_random_state(()), torch.no_grad():
                self._model.train()
                run_on_copy(self._model, tree_map(lambda t: t.to("meta") if isinstance(t, Tensor) else t, self.small))
        except Exception as error:  # whatever the model's own code raises
            raise model_failed_error(self._model, error, " in training mode") from error

    @contextmanager
    def forward(
        self,
        norms: Collection[str] = (),
        *,
        replaced: Collection[str] | None = None,
        graph: bool = True,
        sign: float = 1.0,
    ) -> Iterator[ForwardPass]:
        """Run the model forward on the small example. The model is restored at the end of the context.

        Normalizers run as in training, dropout does not. Weights and scalars that are 0 get small random values for the
        pass, since nothing learns before a layer of zeros in the first step.

        Args:
            norms: The names of the model's normalizers.
            replaced: The names of the zeros that are replaced. Default: all.
            graph: Whether to record the graph of the outputs, which `ForwardPass.learning` and `reached` need.
            sign: The sign of the values that take the place of zeros.
        """
        model = self._model
        generator = torch.Generator().manual_seed(0)
        self.spent += 1
        with preserve_model_state(model, attributes=True), torch.inference_mode(False), torch.set_grad_enabled(graph):
            model.eval()
            for name in norms:
                model.get_submodule(name).train()
            parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
            drawn = {}
            for name in self.zeros():
                if replaced is None or name in replaced:
                    p = parameters[name]
                    scale = sign * (1.0 if name in self.heads else self._small_scale) * _fan_in(p) ** -0.5
                    drawn[name] = nn.Parameter((torch.randn(p.shape, generator=generator) * scale).to(p))
            # The backward pass runs inside, too: a checkpointed block runs again there.
            with substitute_tensors(model, {id(parameters[name]): p for name, p in drawn.items()}):
                try:
                    out = run_on_copy(model, self.small)
                except ValueError:  # a batch norm of a single number per channel
                    self.spent += 1
                    model.eval()
                    out = run_on_copy(model, self.small)
                yield ForwardPass(self, out, parameters | drawn, generator)

    def zeros(self) -> list[str]:
        """The names of the trainable weights and scalars that are 0."""
        return [
            name
            for name, p in self._model.named_parameters()
            if p.requires_grad and p.is_floating_point() and not name.endswith(BIASES) and _is_zero(p)
        ]

    def first_module(self, wrong: Callable[[Tensor], bool]) -> str:
        """The first module without children such that it and all later ones return outputs that are `wrong`."""
        outputs: list[tuple[str, bool]] = []

        def keep(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
                outputs.extend((name, wrong(t)) for t in floats_of(out)[:1] if t.dim() and t.shape[0] > 1)

            return hook

        if not self.allows(1):
            return "an unknown module"
        self.spent += 1
        with preserve_model_state(self._model, attributes=True), torch.no_grad():
            self._model.eval()
            for name, module in self._model.named_modules():
                if next(module.children(), None) is None:
                    module.register_forward_hook(keep(name))
            run_on_copy(self._model, self.small)
        alike = list(takewhile(lambda found: found[1], reversed(outputs)))
        return f"'{alike[-1][0]}'" if alike else "the model's own code"


def model_failed_error(model: nn.Module, error: Exception, mode: str = "") -> MethodError:
    """The error for a converted model whose code fails; it names the innermost module that was running.

    `mode` is added to the name, such as ' in training mode'.
    """
    names = {id(module): name for name, module in model.named_modules()}
    running = [id(frame.f_locals.get("self")) for frame, _ in traceback.walk_tb(error.__traceback__)]
    place = next((names[key] for key in reversed(running) if key in names), "")
    name = type(model).__name__
    relies = "its own code may rely on a normalizer, or on the class of a layer"
    return MethodError(
        f"expected the converted {name} to run on the example{mode}, but {quoted(place)} failed: {error}; "
        f"{DIFFERENTIATES if differentiates(error) else relies}",
        found_by="forward",
    )


def _graph(starts: Sequence[Tensor]) -> set[Any]:
    """The nodes of the graph of these tensors."""
    stack: list[Any] = [t.grad_fn or t for t in starts]
    seen = set(stack)
    while stack:
        for node, _ in getattr(stack.pop(), "next_functions", ()):
            if node is not None and node not in seen:
                seen.add(node)
                stack.append(node)
    return seen


def _runs_again(graph: Collection[Any]) -> bool:
    """Whether a graph has blocks that run again in the backward pass, as torch's reentrant checkpoints do."""
    return any("CheckpointFunction" in type(node).__name__ for node in graph)


def _is_zero(tensor: Tensor) -> bool:
    """Whether all entries are 0; most tensors show by their first entry that they are not."""
    return not tensor.reshape(-1)[:1].any() and not tensor.any()


def floats_of(out: Any) -> list[Tensor]:
    """The floating-point tensors among the outputs of a model."""
    return [leaf for leaf in tensors_of(out) if leaf.is_floating_point()]


def _fan_in(parameter: Tensor) -> int:
    return max(parameter[0].numel(), 1) if parameter.dim() > 1 else 1


def holds_one_value(example: Any) -> bool:
    """Whether each tensor of an example holds a single value, such as 0."""
    given = [t.flatten() for t in tensors_of(example) if t.numel() > 1]
    return bool(given) and all(bool((t == t[0]).all()) for t in given)


def root_mean_square(tensor: Tensor) -> float:
    """The root of the mean of |x|², in float64."""
    return float(tensor.detach().abs().double().square().mean().sqrt())
