"""Find the residual sums of a flow: the sums whose two operands have a latest common ancestor.

Fixup's exponent needs m, the degree of a branch in its weights. One rule gives it, whether projections are fused or
not: a weight layer adds 1; a product of signals (matrix product, gate, attention) has the sum of its factors' degrees;
a sum or concatenation takes the largest; a bounded factor (a sigmoid, as in squeeze and excitation) adds 0; every other
step, softmax included, keeps the degree. So two layers in a row have degree 2, attention (query · key · value, then the
output) 4, a gated feed-forward 3.

`NonResidualSums` knows the sums that have a common ancestor and are not residual all the same.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from math import prod

from normfree.graph.flow import Node, reachable
from normfree.graph.non_residual_sums import NonResidualSums
from normfree.graph.observer import ATTENTION, MATRIX_PRODUCTS, NONLINEAR
from normfree.plan import ShortcutKind


@dataclass(frozen=True)
class ResidualSum:
    """A residual sum of a flow.

    Attributes:
        node: The addition.
        ancestor: The node at which branch and shortcut start.
        branch: The weight layers of the branch.
        shortcut: The weight layers of the shortcut.
        kind: The class of the shortcut.
        end: The operand of the addition that is the branch.
        degree: The degree of the branch in its weights.
        first_layers: The layers of the branch that read its input.
        last_layers: The layers of the branch whose outputs are added to the shortcut; of a product, one factor's.
        covered: The last layers with an activation, or a division by their own norm, between them and the sum.
        gates: The layers of the branch that reach the sum only as bounded factors.
        layer_scales: The names of the parameters that multiply the branch's output.
        read_elsewhere: Whether the branch's output is also used outside of the sum, as a level of a feature pyramid is.
    """

    node: Node
    ancestor: Node
    branch: tuple[Node, ...]
    shortcut: tuple[Node, ...]
    kind: ShortcutKind
    end: Node
    degree: int
    first_layers: frozenset[Node]
    last_layers: frozenset[Node]
    covered: frozenset[Node]
    gates: frozenset[Node]
    layer_scales: tuple[str, ...]
    read_elsewhere: bool


def residual_sums(flow: Sequence[Node], excluded: NonResidualSums, heads: Collection[Node] = ()) -> list[ResidualSum]:
    """The residual sums of a flow, in the order they ran.

    An inner sum claims its layers first, so that a longer skip connection lists only the remaining ones. An outer skip,
    x + blocks(x), has no layers left, but the signal still grows there. Parallel layers that are added to one shortcut
    form one branch.

    Args:
        flow: The nodes in the order they ran.
        excluded: The sums that are not residual.
        heads: Layers that are known to be output layers; a sum of their outputs is not residual.
    """
    found: list[ResidualSum] = []
    claimed: set[Node] = set()
    shortcuts: dict[Node, Node] = {}
    for node in flow:
        if node.kind != "sum" or node in excluded:
            continue
        residual = _residual_sum(node, claimed, shortcuts, excluded)
        if residual and not any(head in (*residual.branch, *residual.shortcut) for head in heads):
            found.append(residual)
            claimed.update(residual.branch, residual.shortcut)
            shortcuts[node] = node.inputs[node.inputs[0] is residual.end]
    return found


def _residual_sum(
    node: Node, claimed: set[Node], shortcuts: Mapping[Node, Node], excluded: NonResidualSums
) -> ResidualSum | None:
    ancestor, sides = latest_common_ancestor(node, shortcuts)
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
    if not excluded.precedes_a_layer(node) and _is_reduced(end):
        return None  # a number of each sample is added up for the loss: a log-determinant, a penalty
    if layers[shortcut] and (_is_part_of_a_branch(node, shortcuts) or excluded.adds_heads(node, ancestor, layers)):
        return None
    if len(layers[0]) == len(layers[1]) and (branch or sizes[0] == sizes[1]):
        kind: ShortcutKind = "parallel"
    elif layers[shortcut]:
        kind = "projection"
    else:
        straightened = all(n.kind == "scaling" for n in straight)
        kind = "identity" if straightened else "upsample" if any(map(_enlarges, straight)) else "subsample"
    own, inside = set(branch), set(side)
    gates = own - _walk_back(end, inside)
    if own and own == gates:
        return None  # the signal is modulated, nothing is added to it
    ends = _last_layers(end, ancestor, side, own)
    # A factor before an activation or in the weights of an attention has a size of its own, such as a temperature.
    after = _walk_back(end, inside, stops={n for n in side if n in own or not _keeps_size(n)}) - own
    return ResidualSum(
        node,
        ancestor,
        tuple(branch),
        tuple(layers[shortcut]),
        kind,
        end=end,
        degree=_degree(end, side, own, shortcuts),
        first_layers=frozenset(_readers(ancestor, side, stops=own) & own),
        last_layers=frozenset(ends),
        covered=frozenset(layer for layer, covered in ends.items() if covered),
        gates=frozenset(gates),
        # In x + a · (f(x) - x), a multiplies the shortcut, too; the branch of that sum has no layers of its own.
        layer_scales=tuple(dict.fromkeys(n.scale for n in sorted(after, key=lambda n: n.index) if n.scale and own)),
        read_elsewhere=bool(ends)
        and excluded.are_read_outside(_made_from(end, inside, ends.keys()), between(ancestor, node)),
    )


def between(start: Node, end: Node) -> set[Node]:
    """The nodes after `start` that `end` depends on, `end` included; only these are visited."""
    return reachable([end], lambda node: [source for source in node.inputs if source.index > start.index])


def _layers(node: Node, ancestor: Node, side: Sequence[Node], claimed: set[Node]) -> list[Node]:
    """The weight layers of a side, in order.

    A layer that does not depend on the ancestor belongs to the side only if its output is used nowhere else. So the
    layer that makes keys from a memory belongs to its attention; a time embedding, which gates all blocks, belongs to
    no branch.
    """
    inside = {*side, node}
    reading = _readers(ancestor, side)
    free = [n for n in sorted(side, key=lambda n: n.index) if n.kind == "weight" and n not in claimed]
    return [n for n in free if n in reading or _stays_inside(n, inside)]


def _readers(ancestor: Node, side: Sequence[Node], stops: Set[Node] = frozenset()) -> set[Node]:
    """The ancestor, and the nodes of a side that depend on it without one of `stops` between."""
    reading = {ancestor}
    for node in sorted(side, key=lambda n: n.index):
        if any(source in reading and source not in stops for source in node.inputs):
            reading.add(node)
    return reading


def _stays_inside(node: Node, inside: set[Node]) -> bool:
    """Whether everything computed from a node is in `inside`, up to the last node there; unused values do not count."""
    last = max(n.index for n in inside)
    made = reachable([node], lambda n: [user for user in n.users if user.index < last])
    return all(user in inside or not user.users for n in made for user in n.users)


def _is_part_of_a_branch(node: Node, shortcuts: Mapping[Node, Node]) -> bool:
    """Whether a sum of layers is only read by another sum, directly, whose other operand has no layers."""
    while len(node.users) == 1 and node.users[0].kind == "scaling":
        node = node.users[0]
    if len(node.users) != 1 or node.users[0].kind != "sum":
        return False
    outer = node.users[0]
    ancestor, sides = latest_common_ancestor(outer, shortcuts)
    other = sides[outer.inputs[0] is node]
    return ancestor is not None and not any(n.kind == "weight" for n in other)


def _last_layers(end: Node, ancestor: Node, side: Sequence[Node], own: set[Node]) -> dict[Node, bool]:
    """The layers whose output `end` is, each with whether an activation or a division by its norm follows it.

    Of the factors of a product, one is followed. If two were set to 0, neither would get a gradient.
    """
    reading = _readers(ancestor, side)
    ends: dict[Node, dict[Node, bool]] = {}
    for node in sorted(side, key=lambda n: n.index):
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
        covers = node.kind == "activation" or node.divides_itself
        for source in unbounded_inputs(node):
            for layer, covered in ends.get(source, {}).items():
                ends[node][layer] = covers or covered or ends[node].get(layer, False)
    return ends.get(end, {})


def _walk_back(end: Node, side: set[Node], stops: Set[Node] = frozenset()) -> set[Node]:
    """The nodes of `side` that `end` depends on other than through bounded factors, up to the first of `stops`."""
    return reachable(side & {end}, lambda n: () if n in stops else side.intersection(unbounded_inputs(n)))


def _made_from(end: Node, inside: set[Node], layers: Collection[Node]) -> list[Node]:
    """The nodes from the last layers of a branch to its end, in order, that depend on these layers."""
    made: set[Node] = set()
    for node in sorted(_walk_back(end, inside), key=lambda n: n.index):
        if node in layers or not made.isdisjoint(node.inputs):
            made.add(node)
    return sorted(made, key=lambda n: n.index)


def _enlarges(node: Node) -> bool:
    """Whether a step returns an image or a sequence of channels with more positions than its input has."""
    return bool(node.inputs) and prod(node.shape[2:]) > prod(node.inputs[0].shape[2:])


def _keeps_size(node: Node) -> bool:
    """Whether a step returns k times as much for a signal k times as large, entry by entry."""
    mixes = len(node.factors) > 1 and (node.function in MATRIX_PRODUCTS or node.function == ATTENTION)
    return not (mixes or node.kind == "activation" or node.reduces_features or node.function in NONLINEAR)


def latest_common_ancestor(
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
    """The inputs of a node without its bounded factors, and without indices and masks beside a signal."""
    dropped = set(node.factors) - set(_growing_factors(node))
    unbounded = tuple(source for source in node.inputs if source not in dropped)
    return tuple(source for source in unbounded if not source.discrete) or unbounded


def _growing_factors(node: Node) -> tuple[Node, ...]:
    """The unbounded factors of a product, or all factors if all are bounded; empty if the node is not a product."""
    return tuple(factor for factor in node.factors if not factor.bounded) or node.factors


def _is_reduced(node: Node) -> bool:
    """Whether a node is a sum or mean over the features, a constant times one, or a sum of them."""
    if node.kind == "sum":
        return any(map(_is_reduced, reversed(node.inputs)))
    passes = node.kind in ("scaling", "other") and len(node.inputs) == 1
    return passes and (node.reduces_features or (node.inputs[0].shape == node.shape and _is_reduced(node.inputs[0])))
