"""The flow of a signal as nodes: one for every step, linked to what it reads."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from normfree.graph.functions import GATES, POINTWISE, TRANSPOSITIONS, NodeKind
from normfree.graph.weight_use import Weight, Weights


@dataclass(eq=False, kw_only=True)
class Node:
    """One step of the signal: a leaf module's call or a function of tensors that depend on the input.

    `name` is the module's qualified name, or the function's, and `function` the function's, or the module's class in
    small letters; `home` is the module in whose forward pass it stands and `ordinal` the number of an addition among
    all that home's additions. `factors` are the operands of a product, with repeats; `weights` the parameters of a
    weight layer.
    """

    index: int
    kind: NodeKind
    name: str
    inputs: tuple[Node, ...]
    shape: tuple[int, ...]
    home: str
    function: str
    ordinal: int = -1
    first_operand: Node | None = None
    factors: tuple[Node, ...] = ()
    weights: tuple[Weight, ...] = ()
    users: list[Node] = field(default_factory=list, repr=False)


@dataclass(frozen=True)
class Call:
    """A call of a module that holds others: the nodes of its arguments by place or name, and of what it puts out.

    Of a tuple that is the first tensor; `out` is None where something else is put out.
    """

    given: dict[int | str, Node]
    out: Node | None


def self_gated(factors: Sequence[Node]) -> list[Node]:
    """The steps of g where a product is y · g(y) with a bounded g: a handwritten SiLU, GELU or Mish.

    Both y and the argument of g may have a factor. Empty where the product is another one.
    """
    if len(factors) != 2:
        return []
    return _steps_between(*factors) or _steps_between(*reversed(factors))


def _steps_between(plain: Node, gate: Node) -> list[Node]:
    """What leads from a signal to its gate, if that is the signal's own and every way is bounded; else nothing."""
    source, left = _unscaled(plain), [(gate, False)]
    seen: dict[tuple[Node, bool], None] = {}
    while left:
        node, bounded = left.pop()
        if node is source and not bounded:
            return []  # y · (y + tanh y) grows as y²
        if node is source or (node, bounded) in seen:
            continue
        if node.function in TRANSPOSITIONS or not (node.kind == "scaling" or node.function in POINTWISE):
            return []
        seen[node, bounded] = None
        left += [(read, bounded or node.function in GATES) for read in node.inputs]
    return list(dict.fromkeys(node for node, _ in seen))


def _unscaled(node: Node) -> Node:
    """What a value was before it was multiplied by constants or changed its shape."""
    while node.kind == "scaling":
        node = node.inputs[0]
    return node


class Flow:
    """The nodes in the order they ran, the calls of modules, and how parameters of two or more dimensions were used."""

    def __init__(self, weights: Weights) -> None:
        self.nodes: list[Node] = []
        self.weights = weights
        self.homes: list[str] = []
        self.calls: defaultdict[str, list[Call]] = defaultdict(list)
        self._latest: dict[int, Node] = {}
        self._alive: list[Tensor] = []  # an id is only good as long as its tensor lives; meta tensors cost nothing

    @property
    def home(self) -> str:
        """The module whose forward pass is running."""
        return self.homes[-1] if self.homes else ""

    def read(self, tensors: Iterable[Any]) -> tuple[Node, ...]:
        """The nodes that these tensors came out of, with repeats; tensors that do not depend on the input have none."""
        found = (self._latest.get(id(tensor)) for tensor in tensors)
        return tuple(node for node in found if node is not None)

    def called(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """Note a call of a module that holds others, when it ends."""
        places: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        nodes = {place: self._latest.get(id(value)) for place, value in places}
        first = out[0] if isinstance(out, tuple) and out else out
        given = {place: node for place, node in nodes.items() if node is not None}
        self.calls[name].append(Call(given, self._latest.get(id(first))))

    def add(self, kind: NodeKind, name: str, inputs: Iterable[Node], out: Any, **details: Any) -> Node | None:
        """A node for each tensor that a call puts out; the first of them."""
        distinct = tuple(dict.fromkeys(inputs))
        first = None
        for tensor in tensors_of(out):
            node = self.step(kind, name, distinct, tuple(tensor.shape), **details)
            self._latest[id(tensor)] = node
            self._alive.append(tensor)
            first = first or node
        return first

    def step(self, kind: NodeKind, name: str, inputs: tuple[Node, ...], shape: tuple[int, ...], **details: Any) -> Node:
        """A node whose tensor nobody sees."""
        place = {"index": len(self.nodes), "home": self.home, "function": name}
        node = Node(kind=kind, name=name, inputs=inputs, shape=shape, **{**place, **details})
        for source in inputs:
            source.users.append(node)
        self.nodes.append(node)
        return node


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors in a tree of arguments or results."""
    if isinstance(tree, Tensor):
        return [tree]
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
