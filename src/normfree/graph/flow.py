"""The flow of a signal through a model: one node for every step, linked to the nodes it reads."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from torch import Tensor

from normfree.graph.observer import (
    BOUNDED,
    DIVISIONS,
    GATES,
    JOINS,
    POINTWISE,
    REDUCTIONS,
    SPLITS,
    TRANSPOSITIONS,
    VIEWS,
    NodeKind,
    tensors_of,
)
from normfree.graph.weight_uses import Weight, WeightUses

_REDUCTIONS = REDUCTIONS | {"logsumexp", "prod", "norm", "vector_norm", "linalg_norm", "einsum"}
_NORMALIZATIONS = frozenset({"normalize", "cosine_similarity"})
_SAME_VALUES = VIEWS | SPLITS | JOINS | {"identity", "__getitem__"}


@dataclass(eq=False, kw_only=True)
class Node:
    """One step of the signal: the call of a leaf module, or of a function of tensors that depend on the input.

    Attributes:
        index: Its place in the order of execution.
        kind: The kind of step.
        name: The module's qualified name, or the function's name.
        inputs: The nodes it reads, each once.
        shape: The shape of its output.
        home: The module in whose forward pass it runs.
        function: The function's name, or the module's class in lower case.
        ordinal: The number of an addition among all additions of its home, -1 for anything else.
        first_operand: The first operand of a function.
        factors: The operands of a product, with repeats.
        weights: The parameters of a weight layer.
        scale: The learnable vector or number that multiplies the signal here, by its qualified name; '' if none does.
        is_module: Whether the step is the call of a module.
        bounded: Whether it is a bounded function of the signal, such as a sigmoid, up to constants and its shape.
        divides_itself: Whether it divides a signal by the signal's own norm: 0 would become 0/0.
        discrete: Whether its output is an index or a mask, which has no gradient.
        reduces_features: Whether it reduces the features to one number, as a sum, mean or norm, as the shapes show.
        users: The nodes that read it.
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
    scale: str = ""
    is_module: bool = False
    bounded: bool = False
    divides_itself: bool = False
    discrete: bool = False
    reduces_features: bool = False
    users: list[Node] = field(default_factory=list, repr=False)


@dataclass(frozen=True)
class ModuleCall:
    """A call of a module with children: the nodes of its arguments by position or name, and of its output.

    If the module returns a tuple, `out` is the node of its first element; None if that is not a tensor that depends on
    the input.
    """

    given: dict[int | str, Node]
    out: Node | None


class Flow:
    """The nodes in the order they ran, the calls of modules, and the uses of parameters.

    Args:
        parameters: The parameters to follow, by qualified name.

    Attributes:
        nodes: The steps in the order they ran.
        weights: How the parameters of two or more dimensions were used.
        home: The module whose forward pass is running.
        calls: The calls of each module with children.
        call_counts: The number of calls of every module.
        outputs: The nodes of the tensors that the model returned.
        overwritten: The nodes whose value is written into, other than by a module with an option `inplace`.
        several_inputs: The modules that are called with more than one tensor.
        norm_tensors_read: The normalizers whose parameter or buffer other code reads, each with the tensor's name. If
            the code reads several, the name is not `weight`.
        normalizing: The calls of functions that normalize, by module and function.
        lost: Where values of the signal left torch, by module and function.
        output_is_lost: Whether the model returned tensors, and none of them depends on the input.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self.nodes: list[Node] = []
        self.weights = WeightUses(parameters)
        self.home = ""
        self.calls: defaultdict[str, list[ModuleCall]] = defaultdict(list)
        self.call_counts: Counter[str] = Counter()
        self.outputs: set[Node] = set()
        self.overwritten: set[Node] = set()
        self.several_inputs: set[str] = set()
        self.norm_tensors_read: dict[str, str] = {}
        self.normalizing: dict[tuple[str, str], None] = {}
        self.lost: dict[tuple[str, str], None] = {}
        self.output_is_lost = False
        self._latest: dict[int, Node] = {}
        self._alive: list[Tensor] = []  # an id is only good as long as its tensor lives; meta tensors cost nothing

    def read(self, tensors: Iterable[Any]) -> tuple[Node, ...]:
        """The nodes that returned these tensors, with repeats; tensors that do not depend on the input have none."""
        found = (self._latest.get(id(tensor)) for tensor in tensors)
        return tuple(node for node in found if node is not None)

    def add_call(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """Note a call of a module with children when it ends."""
        values: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        nodes = {key: self._latest.get(id(value)) for key, value in values}
        first = out[0] if isinstance(out, tuple) and out else out
        given = {key: node for key, node in nodes.items() if node is not None}
        self.calls[name].append(ModuleCall(given, self._latest.get(id(first))))

    def add(self, kind: NodeKind, name: str, inputs: Iterable[Node], out: Any, **details: Any) -> Node | None:
        """Add a node for each tensor that a call returned. Returns the first of them."""
        distinct = tuple(dict.fromkeys(inputs))
        first = None
        for tensor in tensors_of(out):
            node = self.step(kind, name, distinct, tuple(tensor.shape), **details)
            node.discrete = not (tensor.is_floating_point() or tensor.is_complex())
            self._latest[id(tensor)] = node
            self._alive.append(tensor)
            first = first or node
        return first

    def start_at_token(self, args: Sequence[Any]) -> tuple[Node, ...]:
        """Add an input to the flow if a layer reads a learned token: a parameter, or a tensor made from parameters."""
        if not args or not self.weights.is_made_from_parameters(args[0]):
            return ()
        self.weights.use(args[:1], "joined")
        node = self.add("input", "token", (), args[0])
        return (node,) if node else ()

    def write_through(self, view: Tensor, node: Node) -> None:
        """Note that a write into a view, as in `b[i].copy_(x)`, is a write into the tensor that it views."""
        base = view._base
        if base is not None and base is not view:
            self.add("other", "write", (*self.read([base]), node), base)

    def finish(self, out: Any) -> None:
        """Note the tensors that the model returned."""
        tensors = [t for t in tensors_of(out) if t.is_floating_point()]
        self.outputs = set(self.read(tensors))
        self.output_is_lost = bool(tensors) and not self.outputs

    def step(self, kind: NodeKind, name: str, inputs: tuple[Node, ...], shape: tuple[int, ...], **details: Any) -> Node:
        """Add a node whose tensor is not visible from outside."""
        place = {"index": len(self.nodes), "home": self.home, "function": name}
        node = Node(kind=kind, name=name, inputs=inputs, shape=shape, **{**place, **details})
        passes = len(inputs) == 1 and kind in ("scaling", "other") and len(node.factors) < 2
        node.bounded = node.function in BOUNDED or (passes and inputs[0].bounded)
        node.divides_itself = node.function in _NORMALIZATIONS or (
            node.function in DIVISIONS and len(inputs) == 2 and _depends_on(inputs[1], inputs[0])
        )
        node.reduces_features = node.function in _REDUCTIONS and len(inputs) == 1 and _lacks_features(shape, inputs[0])
        for source in inputs:
            source.users.append(node)
        self.nodes.append(node)
        return node

    def chooses_by_values(self) -> bool:
        """Whether an index or a mask follows from the signal, by which the model may choose experts."""
        return any(node.discrete and any(not source.discrete for source in node.inputs) for node in self.nodes)

    def returns_unchanged(self, weight: str) -> bool:
        """Whether the model returns each product of a weight with the signal unchanged, up to its shape."""
        products = self._products([weight])
        for product in products:
            steps = [product]
            for step in steps:
                steps += [user for user in step.users if user.function in _SAME_VALUES]
            if self.outputs.isdisjoint(steps):
                return False
        return bool(products)

    def returns_only_scores(self, weights: Collection[str], shape: Sequence[int]) -> bool:
        """Whether an output of this shape, up to the batch, follows from the products of these weights alone.

        A normalizing flow returns its input, which its last layer scales and shifts: such an output holds no scores of
        classes. A mask or an index that selects scores may follow from the input.
        """
        alone = set(self._products(weights))
        for node in self.nodes:
            read = node.inputs
            if any(n in alone for n in read) and all(n in alone or n.discrete for n in read):
                alone.add(node)
        return any(node.shape[1:] == tuple(shape[1:]) for node in self.outputs & alone)

    def _products(self, weights: Collection[str]) -> list[Node]:
        """The steps that multiply the signal by one of these weights."""
        return [node for node in self.nodes if any(f"{w.module}.{w.parameter}" in weights for w in node.weights)]

    def release_tensors(self) -> None:
        """Drop the tensors once the recording is done."""
        self._latest.clear()
        self._alive.clear()
        self.weights.release_tensors()


def reachable(starts: Iterable[Node], neighbours: Callable[[Node], Iterable[Node]]) -> set[Node]:
    """The nodes that can be reached from some nodes, these included."""
    found = set(starts)
    waiting = list(found)
    while waiting:
        new = set(neighbours(waiting.pop())) - found
        found |= new
        waiting += new
    return found


def _depends_on(norm: Node, signal: Node) -> bool:
    """Whether a value is made from a signal, or from the signal's own input, by steps with one input."""
    while len(norm.inputs) == 1 and norm is not signal and norm.kind != "weight":
        norm = norm.inputs[0]
    return norm is signal or norm in signal.inputs


def self_gated(factors: Sequence[Node]) -> list[Node]:
    """The steps of g where a product is y · g(y) with a bounded g: a handwritten SiLU, GELU or Mish.

    Both y and the argument of g may have a factor. Empty for any other product.
    """
    if len(factors) != 2:
        return []
    return _steps_between(*factors) or _steps_between(*reversed(factors))


def _steps_between(plain: Node, gate: Node) -> list[Node]:
    """The steps from a signal to its gate, if the gate reads only that signal and every path is bounded; else empty."""
    source, ahead = _unscaled(plain), [(gate, False)]
    seen: dict[tuple[Node, bool], None] = {}
    while ahead:
        node, bounded = ahead.pop()
        if node is source and not bounded:
            return []  # y · (y + tanh y) grows as y²
        if node is source or (node, bounded) in seen:
            continue
        if node.function in TRANSPOSITIONS or not (node.kind == "scaling" or node.function in POINTWISE):
            return []
        seen[node, bounded] = None
        ahead += [(read, bounded or node.function in GATES) for read in node.inputs]
    return list(dict.fromkeys(node for node, _ in seen))


def _unscaled(node: Node) -> Node:
    """The value before it was multiplied by constants or reshaped."""
    while node.kind == "scaling":
        node = node.inputs[0]
    return node


def _lacks_features(shape: tuple[int, ...], source: Node) -> bool:
    """Whether a shape is that of a node without its features, or with one number for each sample."""
    axis = 1 if len(source.shape) == 4 else len(source.shape) - 1
    front, back = source.shape[:axis], source.shape[axis + 1 :]
    per_sample = shape[:1] in ((), source.shape[:1]) and prod(shape[1:]) == 1
    return per_sample or shape in ((*front, *back), (*front, 1, *back))
