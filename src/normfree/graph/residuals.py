"""Find the residual sums of a flow: the sums whose two operands meet again at a latest common ancestor.

Each comes with its degree m in the weights of its branch, which Fixup's exponent needs. One rule gives it, whether
projections are fused or not: a weight layer adds 1; a product of signals (matrix product, gate, attention) adds their
degrees; a sum or concatenation takes the largest; a bounded factor (a sigmoid, as in squeeze and excitation) adds
nothing; every other step, softmax included, passes its degree on. So two layers in a row have degree 2, attention
(query · key · value, then the output) 4, a gated feed-forward 3.

Some sums have two operands with a common ancestor and are not residual: those of a loss, of heads, and of parallel
layers (`graph/plain_sums.py`).
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from math import prod

from normfree.graph.flow import Node
from normfree.graph.functions import BOUNDED, OTHER_SUMS, RECURRENT, REDUCTIONS
from normfree.graph.plain_sums import PlainSums, normalizes_itself
from normfree.plan import ShortcutKind


@dataclass(frozen=True)
class ResidualSum:
    """A residual sum of a flow.

    Attributes:
        node: The addition.
        ancestor: The node where branch and shortcut part.
        branch: The weight layers of the branch.
        shortcut: The weight layers of the shortcut.
        kind: The class of the shortcut.
        end: The operand of the addition that is the branch.
        degree: The degree of the branch in its weights.
        entries: The layers of the branch that read its input.
        ends: The layers of the branch whose outputs are added to the shortcut; of the factors of a product, one.
        covered: The ends with an activation, or a division by their own norm, between them and the sum.
        gates: The layers of the branch that reach the sum only as bounded factors.
        scales: The names of the parameters that multiply the branch's output.
    """

    node: Node
    ancestor: Node
    branch: tuple[Node, ...]
    shortcut: tuple[Node, ...]
    kind: ShortcutKind
    end: Node
    degree: int
    entries: frozenset[Node]
    ends: frozenset[Node]
    covered: frozenset[Node]
    gates: frozenset[Node]
    scales: tuple[str, ...]


def residual_sums(flow: Sequence[Node], plain: PlainSums, heads: Collection[Node] = ()) -> list[ResidualSum]:
    """The residual sums of a flow, in the order they ran.

    An inner sum claims its layers first, so that an outer skip connection lists only the remaining ones. A skip
    connection around whole blocks, x + blocks(x), has no layers left, but the signal still grows there. Parallel layers
    that are added to one shortcut together form one branch.

    Args:
        flow: The nodes in the order they ran.
        plain: The sums that are not residual.
        heads: Layers that are known to be output layers; a sum of their outputs is not residual.
    """
    found: list[ResidualSum] = []
    claimed: set[Node] = set()
    shortcuts: dict[Node, Node] = {}
    for node in flow:
        residual = _residual_sum(node, claimed, shortcuts, plain) if node.kind == "sum" and node not in plain else None
        if residual and not any(head in (*residual.branch, *residual.shortcut) for head in heads):
            found.append(residual)
            claimed.update(residual.branch, residual.shortcut)
            shortcuts[node] = node.inputs[node.inputs[0] is residual.end]
    return found


def _residual_sum(
    node: Node, claimed: set[Node], shortcuts: Mapping[Node, Node], plain: PlainSums
) -> ResidualSum | None:
    ancestor, sides = _latest_common_ancestor(node, shortcuts)
    if ancestor is None:
        return None
    layers = [_layers(node, ancestor, side, claimed) for side in sides]
    sizes = [(len(own), sum(n in shortcuts for n in side)) for own, side in zip(layers, sides, strict=True)]
    shortcut = 0 if sizes[0] < sizes[1] else 1
    branch, side, end = layers[1 - shortcut], sides[1 - shortcut], node.inputs[1 - shortcut]
    # Up to an earlier sum: where several branches are added one by one, the shortcut of each is the sum before.
    straight = _walk_back(node.inputs[shortcut], set(sides[shortcut]), stops=shortcuts.keys()) - shortcuts.keys()
    if sizes[1 - shortcut] == (0, 0) or any(n.kind == "gate" for n in straight):
        return None  # nothing learnable is added, or the shortcut is gated: a highway
    if layers[shortcut] and (_is_part_of_a_branch(node, shortcuts) or plain.adds_heads(node, ancestor, layers)):
        return None
    if len(layers[0]) == len(layers[1]) and (branch or sizes[0] == sizes[1]):
        kind: ShortcutKind = "parallel"
    elif layers[shortcut]:
        kind = "projection"
    else:
        kind = "identity" if all(n.kind == "scaling" for n in straight) else "subsample"
    own, inside = set(branch), set(side)
    gates = own - _walk_back(end, inside)
    if own and own == gates:
        return None  # the signal is modulated, nothing is added to it
    ends = _ends(end, ancestor, side, own)
    behind = _walk_back(end, inside, stops=own) - own
    return ResidualSum(
        node,
        ancestor,
        tuple(branch),
        tuple(layers[shortcut]),
        kind,
        end=end,
        degree=_degree(end, side, own, shortcuts),
        entries=frozenset(_entries(ancestor, side, own)),
        ends=frozenset(ends),
        covered=frozenset(layer for layer, covered in ends.items() if covered),
        gates=frozenset(gates),
        # In x + a · (f(x) - x), a multiplies the shortcut, too; the branch of that sum has no layers of its own.
        scales=tuple(dict.fromkeys(n.scale for n in sorted(behind, key=lambda n: n.index) if n.scale and own)),
    )


def adds_otherwise(node: Node) -> bool:
    """Whether a node adds a branch with layers to its own input, by a function other than + and -."""
    if node.function in REDUCTIONS and len(node.inputs) == 1 and node.inputs[0].function == "stack":
        operands = node.inputs[0].inputs
    elif node.function in OTHER_SUMS and node.first_operand is not None:
        operands = (node.first_operand, *(n for n in node.inputs if n is not node.first_operand))
    else:
        return False
    if len(operands) != 2:
        return False
    ancestor, sides = _latest_common_ancestor(replace(node, inputs=operands), {})
    layers = [any(n.kind == "weight" for n in side) for side in sides]
    return ancestor is not None and layers[0] != layers[1]


def adds_recurrence(node: Node) -> bool:
    """Whether a node adds the output of a recurrent layer, which no method can scale, to the layer's input."""
    for operand in node.inputs if node.kind == "sum" else ():
        last = operand
        while last.kind in ("scaling", "other") and last.function not in RECURRENT and len(last.inputs) == 1:
            last = last.inputs[0]
        if last.function in RECURRENT:
            return _latest_common_ancestor(node, {})[0] is not None
    return False


def _layers(node: Node, ancestor: Node, side: Sequence[Node], claimed: set[Node]) -> list[Node]:
    """The weight layers of a side, in order.

    A layer that does not read the ancestor belongs to the side only if nothing else reads it. So the keys of a memory
    belong to their attention; a time embedding, which gates all blocks, belongs to none.
    """
    inside = {*side, node}
    reading = {ancestor}
    found = []
    for n in sorted(side, key=lambda n: n.index):
        if any(source in reading for source in n.inputs):
            reading.add(n)
        if n.kind == "weight" and n not in claimed and (n in reading or _stays_inside(n, inside)):
            found.append(n)
    return found


def _stays_inside(node: Node, inside: set[Node]) -> bool:
    """Whether everything computed from a node is in `inside`, up to the last node there; unused values do not count."""
    last = max(n.index for n in inside)
    seen, stack = {node}, [node]
    while stack:
        for user in stack.pop().users:
            if user not in inside and user.users:
                return False
            if user not in seen and user.index < last:
                seen.add(user)
                stack.append(user)
    return True


def _is_part_of_a_branch(node: Node, shortcuts: Mapping[Node, Node]) -> bool:
    """Whether a sum of layers feeds directly, and only, into another sum whose other operand has no layers."""
    while len(node.users) == 1 and node.users[0].kind == "scaling":
        node = node.users[0]
    if len(node.users) != 1 or node.users[0].kind != "sum":
        return False
    outer = node.users[0]
    ancestor, sides = _latest_common_ancestor(outer, shortcuts)
    other = sides[outer.inputs[0] is node]
    return ancestor is not None and not any(n.kind == "weight" for n in other)


def _entries(ancestor: Node, side: Sequence[Node], own: set[Node]) -> set[Node]:
    """The layers that read the ancestor with no other layer of the branch between."""
    reading = {ancestor}
    for node in sorted(side, key=lambda n: n.index):
        if any(source in reading and source not in own for source in node.inputs):
            reading.add(node)
    return reading & own


def _ends(end: Node, ancestor: Node, side: Sequence[Node], own: set[Node]) -> dict[Node, bool]:
    """The layers whose output `end` is, each with whether an activation or a division by its norm follows it.

    Of the factors of a product, one is followed. If two were set to 0, neither would get a gradient.
    """
    reading = {ancestor}
    ends: dict[Node, dict[Node, bool]] = {}
    for node in sorted(side, key=lambda n: n.index):
        if any(source in reading for source in node.inputs):
            reading.add(node)
        if node in own:
            ends[node] = {node: False}
            continue
        factors = [f for f in dict.fromkeys(_growing_factors(node)) if ends.get(f)]
        if len(factors) > 1:
            chosen = min(factors, key=lambda f: (any(ends[f].values()), f not in reading, -prod(f.shape), -f.index))
            others = {layer for f in factors if f is not chosen for layer in ends[f]}
            ends[node] = {layer: covered or layer in others for layer, covered in ends[chosen].items()}
            continue
        ends[node] = {}
        covers = node.kind == "activation" or normalizes_itself(node)
        for source in unbounded_inputs(node):
            for layer, covered in ends.get(source, {}).items():
                ends[node][layer] = covers or covered or ends[node].get(layer, False)
    return ends.get(end, {})


def _walk_back(end: Node, side: set[Node], stops: Set[Node] = frozenset()) -> set[Node]:
    """The nodes of `side` that `end` depends on other than through bounded factors, up to the first of `stops`."""
    seen: set[Node] = set()
    stack = [end]
    while stack:
        node = stack.pop()
        if node in seen or node not in side:
            continue
        seen.add(node)
        if node not in stops:
            stack += unbounded_inputs(node)
    return seen


def _latest_common_ancestor(
    addition: Node, shortcuts: Mapping[Node, Node]
) -> tuple[Node | None, tuple[list[Node], list[Node]]]:
    """The last node that both operands of a sum depend on (or are), and the nodes between it and each operand.

    Walks back from both at once, always from the latest node. The first node that both walks reach is the answer, so
    the cost is the size of the branch, not of the network. From an operand that is an earlier residual sum, up to a
    factor or its shape, the walk goes along that sum's `shortcuts`: in x + f(h(x)) + g(h(x)) both branches start at x.
    """
    marks: dict[Node, int] = {}
    stream = set(addition.inputs)
    heap: list[tuple[int, Node]] = []

    def reach(node: Node, mark: int) -> None:
        if node not in marks:
            heapq.heappush(heap, (-node.index, node))
        marks[node] = marks.get(node, 0) | mark

    for mark, operand in enumerate(addition.inputs, start=1):
        reach(operand, mark)
    sides: tuple[list[Node], list[Node]] = ([], [])
    while heap:
        _, node = heapq.heappop(heap)
        if marks[node] == 3:
            return node, sides
        sides[marks[node] - 1].append(node)
        sources = node.inputs
        if node in stream and node in shortcuts:
            sources = (shortcuts[node],)
        if node in stream and (node in shortcuts or node.kind == "scaling"):
            stream.update(sources)
        for source in sources:
            reach(source, marks[node])
    return None, sides


def _degree(end: Node, side: Iterable[Node], layers: set[Node], shortcuts: Mapping[Node, Node]) -> int:
    """The degree of `end` in `layers`; `side` holds the nodes between the start of a branch and its end.

    An inner residual sum has the degree of its shortcut: its own branch is small compared with its shortcut.
    """
    degrees: dict[Node, int] = {}
    for node in sorted(side, key=lambda n: n.index):
        if node in shortcuts:
            found = degrees.get(shortcuts[node], 0)
        elif factors := _growing_factors(node):
            found = sum(degrees.get(factor, 0) for factor in factors)
        else:
            found = max((degrees.get(source, 0) for source in node.inputs), default=0)
        degrees[node] = found + (node.kind == "weight" and node in layers)
    return degrees.get(end, 0)


def unbounded_inputs(node: Node) -> tuple[Node, ...]:
    """The inputs of a node without its bounded factors, which change its size by a bounded factor only."""
    dropped = set(node.factors) - set(_growing_factors(node))
    return tuple(source for source in node.inputs if source not in dropped)


def _growing_factors(node: Node) -> tuple[Node, ...]:
    """The unbounded factors of a product, or all factors if all are bounded; empty if the node is not a product."""
    return tuple(factor for factor in node.factors if not _is_bounded(factor)) or node.factors


def _is_bounded(node: Node) -> bool:
    """Whether a value is a bounded function of the signal, such as a sigmoid, up to constants and its shape."""
    while node.function not in BOUNDED:
        if len(node.inputs) != 1 or node.kind not in ("scaling", "other") or node.factors[1:]:
            return False
        node = node.inputs[0]
    return True
