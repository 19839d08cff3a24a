"""The data flow of any model, recorded while it runs on meta tensors: shapes come out, nothing is computed.

Every call of a weight layer, activation or other leaf module is one node, and so is every function of tensors outside
them. No tracing or export is needed, so that whatever runs can be recorded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from normfree.nn.normalizers import ACTIVATION_TYPES
from normfree.nn.scalars import ScalarBias, ScalarMultiplier
from normfree.nn.weight import WEIGHT_LAYERS

NodeKind = Literal["input", "weight", "activation", "sum", "gate", "scaling", "other"]

ADDITIONS = frozenset({"add", "add_", "__add__", "__radd__", "__iadd__"})
_PRODUCTS = frozenset({"mul", "mul_", "__mul__", "__rmul__", "__imul__", "multiply"})
_SCALINGS = _PRODUCTS | {"div", "div_", "__truediv__", "__itruediv__", "to", "dropout", "contiguous", "clone"}
_ACTIVATIONS = frozenset(
    [
        "relu",
        "relu_",
        "sigmoid",
        "sigmoid_",
        "tanh",
        "tanh_",
        "selu",
        "gelu",
        "silu",
        "elu",
        "leaky_relu",
        "relu6",
        "hardswish",
        "hardsigmoid",
        "hardtanh",
        "softplus",
        "mish",
        "softmax",
    ]
)
_PASSING = (ScalarBias, ScalarMultiplier, nn.Identity, nn.Dropout, nn.AlphaDropout)


@dataclass(eq=False)
class Node:
    """One step of the signal: a leaf module's call or a function of tensors that depend on the input.

    `name` is the module's qualified name, or the function's; `home` is the module in whose forward pass it stands and
    `ordinal` the number of an addition among all that home's additions.
    """

    index: int
    kind: NodeKind
    name: str
    inputs: tuple[Node, ...]
    shape: tuple[int, ...]
    home: str = ""
    ordinal: int = -1
    first_operand: Node | None = None
    users: list[Node] = field(default_factory=list, repr=False)


class _Recorder(TorchFunctionMode):
    """Writes down every function call outside leaf modules; hooks write down the leaf modules themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes: list[Node] = []
        self.homes: list[str] = []
        self.inside_leaf = 0
        self._latest: dict[int, Node] = {}
        self._alive: list[Tensor] = []  # an id is only good as long as its tensor lives; meta tensors cost nothing
        self._additions: Counter[str] = Counter()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.inside_leaf:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        operands = self.nodes_of((args, kwargs))
        first = self.nodes_of(args[:1])
        home = self.homes[-1] if self.homes else ""
        ordinal = -1
        if name in ADDITIONS:
            ordinal = self._additions[home]
            self._additions[home] += 1
        out = func(*args, **kwargs)
        if operands:
            self.add(_function_kind(name, operands), name, operands, out, ordinal, first[0] if first else None)
        return out

    def nodes_of(self, tree: Any) -> tuple[Node, ...]:
        """The distinct nodes of the tensors in a tree of arguments."""
        found = (self._latest.get(id(leaf)) for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
        return tuple(dict.fromkeys(node for node in found if node is not None))

    def add(
        self,
        kind: NodeKind,
        name: str,
        inputs: tuple[Node, ...],
        out: Any,
        ordinal: int = -1,
        first: Node | None = None,
    ) -> None:
        """A node for each tensor that a call puts out."""
        for tensor in (leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)):
            home = self.homes[-1] if self.homes else ""
            node = Node(len(self.nodes), kind, name, inputs, tuple(tensor.shape), home, ordinal, first)
            for source in inputs:
                source.users.append(node)
            self.nodes.append(node)
            self._latest[id(tensor)] = node
            self._alive.append(tensor)

    def hooks(self, name: str, module: nn.Module) -> list[torch.utils.hooks.RemovableHandle]:
        """Follow the calls of one module."""
        leaf = _is_leaf(module)
        kind = _module_kind(module)

        def enter(_module: nn.Module, _args: Any) -> None:
            self.homes.append(name)
            self.inside_leaf += leaf

        def leave(_module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            self.homes.pop()
            self.inside_leaf -= leaf
            if leaf and not self.inside_leaf:
                inputs = self.nodes_of((args, kwargs))
                if inputs:
                    self.add(kind, name, inputs, out)

        return [module.register_forward_pre_hook(enter), module.register_forward_hook(leave, with_kwargs=True)]


def record(model: nn.Module, *args: Any, **kwargs: Any) -> list[Node]:
    """Run `model` on meta copies of its parameters and inputs and return the flow, in the order it ran.

    The model is left as it was: parameters, buffers, hooks, modes and the random state. Raises `ValueError` when its
    forward pass fails on tensors without values.
    """
    recorder = _Recorder()
    state = {name: t.to("meta") for name, t in [*model.named_parameters(), *model.named_buffers()]}
    args, kwargs = tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, (args, kwargs))
    for tensor in (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)):
        recorder.add("input", "input", (), tensor)
    with _hooked(recorder, model), torch.no_grad(), recorder:
        try:
            torch.func.functional_call(model, state, args, kwargs)
        except Exception as error:  # whatever the model's own code raises
            raise ValueError(
                f"expected a model that runs on tensors without values, but {type(model).__name__} stopped: {error}; "
                "check the example's shape, or pass a hand-written ResidualPlan"
            ) from error
    return recorder.nodes


@contextmanager
def _hooked(recorder: _Recorder, model: nn.Module) -> Iterator[None]:
    handles = [handle for name, module in model.named_modules() for handle in recorder.hooks(name, module)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _is_leaf(module: nn.Module) -> bool:
    """A module of torch or of ours without children: what happens inside it is its own affair."""
    known = type(module).__module__.startswith(("torch.nn.", "normfree.nn."))
    return isinstance(module, (*WEIGHT_LAYERS, *ACTIVATION_TYPES)) or (known and next(module.children(), None) is None)


def _module_kind(module: nn.Module) -> NodeKind:
    if isinstance(module, WEIGHT_LAYERS):
        return "weight"
    if isinstance(module, ACTIVATION_TYPES):
        return "activation"
    return "scaling" if isinstance(module, _PASSING) else "other"


def _function_kind(name: str, operands: tuple[Node, ...]) -> NodeKind:
    if name in _ACTIVATIONS:
        return "activation"
    if len(operands) == 2 and name in ADDITIONS and operands[0].shape == operands[1].shape:
        return "sum"
    if len(operands) == 2 and name in _PRODUCTS:
        return "gate"
    return "scaling" if len(operands) == 1 and name in _SCALINGS else "other"
