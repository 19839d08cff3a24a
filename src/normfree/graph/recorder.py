"""The data flow of any model, recorded while it runs on meta tensors: shapes come out, nothing is computed.

Every call of a weight layer, activation or other leaf module is one node, and so is every function of tensors outside
them. No tracing or export is needed, so that whatever runs can be recorded. A model that looks at values is recorded
on a copy that has them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from normfree.graph.attention_flow import attend
from normfree.graph.flow import Flow, self_gated, tensors_of
from normfree.graph.flow import Node as Node
from normfree.graph.functions import (
    ADDITIONS,
    ATTENTION,
    CLAMPS,
    LIKE_ANOTHER,
    MATRIX_PRODUCTS,
    MAXIMA,
    MULTIHEAD_ATTENTION,
    PRODUCTS,
    SUMS,
    VALUELESS,
    ZEROS,
    NodeKind,
    clamps_at_zero,
    kind_of,
    name_of,
    operands_of,
)
from normfree.graph.weight_use import Weight, Weights
from normfree.nn.model_state import on_meta, same_draws
from normfree.nn.normalizers import ACTIVATION_TYPES, NORM_TYPES
from normfree.nn.scalars import ScalarBias, ScalarMultiplier
from normfree.nn.weight_layers import WEIGHT_LAYERS

_PASSING = (ScalarBias, ScalarMultiplier, nn.Identity, nn.Dropout, nn.AlphaDropout)
_LOOKUPS = (nn.Embedding, nn.EmbeddingBag)


class _Recorder(TorchFunctionMode):
    """Writes down every function call outside leaf modules; hooks write down the leaf modules themselves."""

    def __init__(self, flow: Flow) -> None:
        super().__init__()
        self.flow = flow
        self._inside_leaf = 0
        self._additions: Counter[str] = Counter()
        self._zeros: list[Tensor] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._inside_leaf:
            return func(*args, **kwargs)
        flow, name = self.flow, name_of(func)
        tensors = tensors_of((args, kwargs))
        if name in LIKE_ANOTHER:
            tensors = tensors[:1]
        operands = flow.read(tensors)
        first = next(iter(flow.read(operands_of(args, kwargs)[:1])), None)
        ordinal = -1
        if name in SUMS:
            ordinal = self._additions[flow.home]
            self._additions[flow.home] += 1
        out = func(*args, **kwargs)
        if name in ZEROS:
            self._zeros.append(out)
        if name in VALUELESS:
            return out
        if not operands:
            flow.weights.derive(name, tensors, out)
        elif name == MULTIHEAD_ATTENTION:
            attend(flow, args, kwargs, out)
        elif weights := flow.weights.meet(name, args, tensors):
            flow.add("weight", name, operands, out, weights=weights)
        else:
            flow.add(
                self._kind(name, args, kwargs, operands),
                _shown(name, args, kwargs),
                operands,
                args[0] if name == "__setitem__" else out,  # which writes in place and returns nothing
                ordinal=ordinal,
                first_operand=first,
                factors=self._factors(name, tensors),
            )
        return out

    def _kind(self, name: str, args: Any, kwargs: Any, operands: Sequence[Node]) -> NodeKind:
        """What a function does, seen from its operands in the flow and from the numbers that it is given."""
        if name in ADDITIONS and any(type(value) in (int, float) and not value for value in operands_of(args, kwargs)):
            return "scaling"  # 0 + x, as the first of what `sum` adds
        if name in CLAMPS and clamps_at_zero(args, kwargs):
            return "activation"
        if name in MAXIMA and any(value is zero for value in operands_of(args, kwargs) for zero in self._zeros):
            return "activation"
        if name in PRODUCTS and (steps := self_gated(operands)):
            for step in steps:  # no sum in there is a residual one
                step.kind = "other" if step.kind in ("sum", "gate") else step.kind
            return "activation"
        return kind_of(name, [node.shape for node in dict.fromkeys(operands)])

    def _factors(self, name: str, tensors: list[Tensor]) -> tuple[Any, ...]:
        """The operands that a function multiplies with one another; the mask of an attention is only added."""
        if name in PRODUCTS or name in MATRIX_PRODUCTS:
            return self.flow.read(tensors)
        return self.flow.read(tensors[:3]) if name == ATTENTION else ()

    def hooks(self, name: str, module: nn.Module) -> list[torch.utils.hooks.RemovableHandle]:
        """Follow the calls of one module."""
        leaf = is_leaf(module)
        kind = _module_kind(module)
        flow = self.flow

        def enter(_module: nn.Module, _args: Any) -> None:
            flow.homes.append(name)
            self._inside_leaf += leaf

        def leave(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            flow.homes.pop()
            self._inside_leaf -= leaf
            if self._inside_leaf:
                return
            if not leaf:
                flow.called(name, args, kwargs, out)
                return
            inputs = flow.read(tensors_of((args, kwargs)))
            weighted = kind == "weight" and bool(inputs)
            flow.weights.use(
                module.parameters(), "weight" if weighted else "embedding" if isinstance(module, _LOOKUPS) else "beside"
            )
            if inputs:
                weights = (Weight(name, convolution=not isinstance(module, nn.Linear)),) if weighted else ()
                flow.add(kind, name, inputs, out, function=type(module).__name__.lower(), weights=weights)

        return [module.register_forward_pre_hook(enter), module.register_forward_hook(leave, with_kwargs=True)]


def record(model: nn.Module, *args: Any, **kwargs: Any) -> Flow:
    """Run `model` on meta copies of its parameters and inputs and return the flow, in the order it ran.

    Where that fails, because the model looks at values, a copy of it runs on the example itself. The model is left as
    it was, attributes, hooks and modes included, and so are the random states. Raises `ValueError` when both fail.
    """
    try:
        return _record_meta(model, args, kwargs)
    except Exception as without_values:  # whatever the model's own code raises
        try:
            return _record_values(model, args, kwargs)
        except Exception as error:
            # On an example without values the second run says nothing new.
            shapes = "".join(f", {tuple(t.shape)}" for t in tensors_of((args, kwargs)))
            cause = without_values if any(t.is_meta for t in tensors_of((args, kwargs))) else error
            raise ValueError(
                f"expected a model that runs on the example, but {type(model).__name__} stopped: {cause}; check the "
                f"example's shape{shapes} (--input gives another), or in Python pass a hand-written ResidualPlan"
            ) from cause


def _record_meta(model: nn.Module, args: Any, kwargs: Any) -> Flow:
    args, kwargs = tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, (args, kwargs))
    with on_meta(model), _recording(model, (args, kwargs)) as flow:
        model(*args, **kwargs)
    return flow


def _record_values(model: nn.Module, args: Any, kwargs: Any) -> Flow:
    if any(t.is_meta for t in (*model.parameters(), *tensors_of((args, kwargs)))):
        raise ValueError("a model or example without values")
    twin = deepcopy(model)
    args, kwargs = deepcopy((args, kwargs))  # a model may write into its input
    with same_draws((*twin.parameters(), *tensors_of((args, kwargs)))), _recording(twin, (args, kwargs)) as flow:
        twin(*args, **kwargs)
    return flow


@contextmanager
def _recording(model: nn.Module, inputs: Any) -> Iterator[Flow]:
    """The flow that fills while the model runs on these inputs."""
    flow = Flow(Weights(dict(model.named_parameters())))
    flow.add("input", "input", (), inputs)
    recorder = _Recorder(flow)
    handles = [handle for name, module in model.named_modules() for handle in recorder.hooks(name, module)]
    try:
        with torch.no_grad(), recorder:
            yield flow
    finally:
        for handle in handles:
            handle.remove()


def is_leaf(module: nn.Module) -> bool:
    """Whether what happens inside a module is its own affair: weight layers, activations, normalizers, parts of torch.

    A part of torch that holds matrices and is none of these (a transposed convolution, a recurrent layer) is looked
    into, so that its weights are found or named as unaccounted for.
    """
    if isinstance(module, (*WEIGHT_LAYERS, *ACTIVATION_TYPES)):
        return True
    if next(module.children(), None) is not None:
        return False
    if isinstance(module, (*NORM_TYPES, *_LOOKUPS)) or _is_activation(module):
        return True
    matrices = any(p.dim() >= 2 for p in module.parameters())
    known = type(module).__module__.startswith(("torch.nn.", "normfree.nn."))
    return not matrices and (known or "norm" in type(module).__name__.lower())


def _is_activation(module: nn.Module) -> bool:
    """An activation of torch, or of a library that keeps its own in a file named so."""
    library = type(module).__module__.rpartition(".")[2].startswith("activation")
    return isinstance(module, ACTIVATION_TYPES) or (library and next(module.children(), None) is None)


def _shown(name: str, args: Any, kwargs: Any) -> str:
    """A function's name in the flow, another one where its arguments make it another function."""
    if name == "__getitem__" and _has_number(args[1]):
        return "select"
    return "weighted_add" if name in SUMS and kwargs.get("alpha", 1) != 1 else name  # x + alpha · f


def _has_number(index: Any) -> bool:
    """Whether an index takes one place of a dimension, and so the dimension away."""
    return any(isinstance(part, int) for part in (index if isinstance(index, tuple) else (index,)))


def _module_kind(module: nn.Module) -> NodeKind:
    if isinstance(module, WEIGHT_LAYERS):
        return "weight"
    if _is_activation(module):
        return "activation"
    return "scaling" if isinstance(module, _PASSING) else "other"
