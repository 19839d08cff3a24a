"""The flow of a traced model: which nodes are weight layers, activations and sums, and what shapes they have."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from normfree.nn.normalizers import ACTIVATION_TYPES
from normfree.nn.scalars import ScalarBias, ScalarMultiplier
from normfree.nn.weight import WEIGHT_LAYERS

_ADDS = {operator.add, operator.iadd, torch.add, "add", "add_"}
_PRODUCTS = {operator.mul, operator.imul, torch.mul, "mul", "mul_"}
_SCALINGS = _PRODUCTS | {operator.truediv, operator.itruediv, torch.div, "div", "div_"}
_ACTIVATIONS = {
    getattr(owner, name)
    for owner in (torch, F)
    for name in ("relu", "relu_", "sigmoid", "tanh", "selu", "gelu", "silu", "elu", "leaky_relu", "relu6", "hardswish")
    if hasattr(owner, name)
} | {"relu", "relu_", "sigmoid", "tanh"}
_PASSING = (ScalarBias, ScalarMultiplier, nn.Identity, nn.Dropout, nn.AlphaDropout)


class _Tracer(fx.Tracer):
    """Tracing that keeps our scalars, weight layers and activations whole."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        ours = type(m).__module__.startswith("normfree.nn.") and next(m.children(), None) is None
        return ours or super().is_leaf_module(m, module_qualified_name)


class _Shapes(fx.Interpreter):
    """Runs a graph on meta tensors: shapes come out, nothing is computed, drawn or changed."""

    def __init__(self, model: nn.Module, graph: fx.Graph) -> None:
        super().__init__(model, graph=graph)
        self.shapes: dict[fx.Node, tuple[int, ...]] = {}

    def run_node(self, n: fx.Node) -> Any:
        out = super().run_node(n)
        if isinstance(out, Tensor):
            self.shapes[n] = tuple(out.shape)
        return out

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        module = self.fetch_attr(target)
        state = {name: t.to("meta") for name, t in [*module.named_parameters(), *module.named_buffers()]}
        return torch.func.functional_call(module, state, args, kwargs)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        return value.to("meta") if isinstance(value, Tensor) else value


@dataclass(frozen=True)
class Flow:
    """A traced model: its nodes in topological order and what each of them is."""

    nodes: tuple[fx.Node, ...]
    modules: dict[str, nn.Module]
    shapes: dict[fx.Node, tuple[int, ...]]
    order: dict[fx.Node, int]
    data: frozenset[fx.Node]

    def is_weight(self, node: fx.Node) -> bool:
        """A convolution or linear layer."""
        return node.op == "call_module" and isinstance(self.modules[str(node.target)], WEIGHT_LAYERS)

    def is_activation(self, node: fx.Node) -> bool:
        """An element-wise nonlinearity, as a module, function or method."""
        if node.op == "call_module":
            return isinstance(self.modules[str(node.target)], ACTIVATION_TYPES)
        return node.op in ("call_function", "call_method") and node.target in _ACTIVATIONS

    def operands(self, node: fx.Node) -> list[fx.Node]:
        """The inputs of a node that depend on the data."""
        return [arg for arg in node.all_input_nodes if arg in self.data]

    def is_sum(self, node: fx.Node) -> bool:
        """An addition of two tensors of one shape that both depend on the data."""
        operands = self.operands(node)
        return (
            node.op in ("call_function", "call_method")
            and node.target in _ADDS
            and len(operands) == 2
            and self.shapes.get(operands[0]) == self.shapes.get(operands[1])
        )

    def is_gate(self, node: fx.Node) -> bool:
        """A product of two tensors that both depend on the data."""
        return (
            node.op in ("call_function", "call_method") and node.target in _PRODUCTS and len(self.operands(node)) == 2
        )

    def passes(self, node: fx.Node) -> bool:
        """Whether a node leaves the signal as it is but for a scalar: what may stand on an identity shortcut."""
        if node.op == "call_module":
            return isinstance(self.modules[str(node.target)], _PASSING)
        return node.target in _SCALINGS and len(self.operands(node)) == 1

    def home(self, node: fx.Node) -> str:
        """The qualified name of the module in whose forward pass a node stands."""
        stack = node.meta.get("nn_module_stack") or {}
        return str(next(reversed(stack), ""))


def trace(model: nn.Module, example: Tensor) -> Flow:
    """Trace `model` and find the shapes that `example` gives; the model is left as it was.

    Raises `ValueError` when the model cannot be traced.
    """
    try:
        graph = _Tracer().trace(model)
    except Exception as error:  # whatever the model's own code raises when it meets a proxy
        raise ValueError(
            f"expected a model that torch.fx can trace, but {type(model).__name__} stopped it: {error}; "
            "pass a hand-written ResidualPlan instead"
        ) from error
    nodes = tuple(graph.nodes)
    shapes = _Shapes(model, graph)
    with torch.no_grad():
        shapes.run(example.to("meta"))
    data: set[fx.Node] = set()
    for node in nodes:
        if node.op == "placeholder" or any(arg in data for arg in node.all_input_nodes):
            data.add(node)
    order = {node: i for i, node in enumerate(nodes)}
    return Flow(nodes, dict(model.named_modules()), shapes.shapes, order, frozenset(data))


def activated(flow: Flow) -> dict[fx.Node, bool]:
    """For each node, whether its value comes out of an activation, whatever pooling or scalars came since."""
    out: dict[fx.Node, bool] = {}
    for node in flow.nodes:
        operands = flow.operands(node)
        if flow.is_activation(node):
            out[node] = True
        elif flow.is_weight(node) or flow.is_sum(node) or flow.is_gate(node) or not operands:
            out[node] = False
        else:
            out[node] = all(out[arg] for arg in operands)
    return out


def read_through_activation(flow: Flow) -> dict[fx.Node, bool]:
    """For each node, whether every reader meets an activation before the next weight layer, sum or the output."""
    out: dict[fx.Node, bool] = {}

    def by(user: fx.Node) -> bool:
        if flow.is_activation(user):
            return True
        if user.op == "output" or flow.is_weight(user) or flow.is_sum(user) or flow.is_gate(user):
            return False
        return out[user]

    for node in reversed(flow.nodes):
        out[node] = bool(node.users) and all(by(user) for user in node.users)
    return out


def weights(flow: Flow, nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """The weight layers among some nodes, in topological order."""
    return sorted((node for node in nodes if flow.is_weight(node)), key=flow.order.__getitem__)
