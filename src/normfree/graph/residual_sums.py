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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain
from math import prod

from normfree.graph.flow import Node
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
        kind = "identity" if all(n.kind == "scaling" for n in straight) else "subsample"
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
    )


def reachable(starts: Iterable[Node], neighbours: Callable[[Node], Iterable[Node]]) -> set[Node]:
    """The nodes that can be reached from some nodes, these included."""
    found = set(starts)
    waiting = list(found)
    while waiting:
        new = set(neighbours(waiting.pop())) - found
        found |= new
        waiting += new
    return found


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


class NonResidualSums:
    """The sums that are not residual, though their operands have a common ancestor.

    - A sum that leads to single numbers only, as in `((prediction - x) ** 2).mean()`, is part of a loss.
    - Sums of parallel layers, conv3x3(x) + conv1x1(x) + x as in re-parametrizable blocks, form one layer.
    - A sum of heads, (h1(z) + h2(z)) / 2, adds outputs of the network; `adds_heads` recognizes it.

    Attributes:
        shares: For each of several parallel layers, the number of paths that are added to one another.
    """

    def __init__(self, flow: Sequence[Node], outputs: Set[Node]) -> None:
        self.shares: dict[Node, int] = {}
        self._members: set[Node] = set()
        self._outputs = outputs
        self._before_layers = _before(flow)
        several = {n for n in flow if n.shape not in ((), (1,)) and (n in outputs or not n.users)}
        used = _before(flow, several)
        seen: set[Node] = set()
        for node in reversed(flow):
            if node.kind == "sum" and node not in used:
                self._members.add(node)
            elif node.kind == "sum" and node not in seen:
                sums, leaves = _leaves(node)
                seen.update(sums)
                self._note_parallel_layers(sums, leaves)

    def __contains__(self, node: Node) -> bool:
        """Whether a sum is part of a loss or of a group of parallel layers."""
        return node in self._members

    def precedes_a_layer(self, node: Node) -> bool:
        """Whether a weight layer depends on a node."""
        return node in self._before_layers

    def adds_heads(self, node: Node, ancestor: Node, layers: Sequence[Sequence[Node]]) -> bool:
        """Whether a sum whose operands both have layers adds the outputs of heads.

        True if the sum has at most half of its ancestor's channels and as many as an output; or if no weight layer
        follows it and it has at most half of its ancestor's channels, or as many layers on one side as on the other. A
        projection shortcut of the last block has fewer layers than its branch, and does not reduce the channels.
        """
        scores = 2 * _channels(node) <= _channels(ancestor)
        if scores and any(_channels(node) == _channels(output) for output in self._outputs):
            return True
        return not self.precedes_a_layer(node) and (scores or len(layers[0]) == len(layers[1]))

    def _note_parallel_layers(self, sums: Sequence[Node], leaves: Sequence[Node]) -> None:
        """Note the layers of a tree of sums if each leaf is at most one layer on one common signal.

        A path without a layer is one of them only if the layers read the signal itself: x + W norm(x) + V norm(x) adds
        two branches to the stream x.
        """
        paths = [list(_straight_back(leaf)) for leaf in leaves]
        common = set(paths[0]).intersection(*paths[1:])
        start = next((n for n in paths[0] if n in common), None)
        if start is None:
            return
        paths = [path[: path.index(start)] for path in paths]
        layers = [[n for n in path if n.kind == "weight"] for path in paths]
        bare = any(not found for found in layers)
        read = [path[path.index(own[0]) + 1 :] for path, own in zip(paths, layers, strict=True) if own]
        direct = all(n.kind == "scaling" for n in chain(*read))
        if max(map(len, layers)) == 1 and sum(map(len, layers)) > 1 and (direct or not bare):
            self._members.update(sums)
            self.shares.update(dict.fromkeys(chain(*layers), len(leaves)))


def _leaves(top: Node) -> tuple[list[Node], list[Node]]:
    """The sums of a tree of sums, in which each but the top one is read by the next only, and its operands."""
    sums: list[Node] = []
    leaves: list[Node] = []
    stack = [top]
    while stack:
        node = stack.pop()
        sums.append(node)
        for operand in node.inputs:
            inner = operand
            while inner.kind == "scaling" and len(inner.inputs) == len(inner.users) == 1:
                inner = inner.inputs[0]
            (stack if inner.kind == "sum" and len(inner.users) == 1 else leaves).append(inner)
    return sums, leaves


def _straight_back(node: Node) -> Iterator[Node]:
    """The nodes before a node, itself first, as long as each reads one signal and is neither activation nor input."""
    yield node
    while len(node.inputs) == 1 and node.kind not in ("activation", "sum", "gate"):
        node = node.inputs[0]
        yield node


def _before(flow: Sequence[Node], results: Set[Node] = frozenset()) -> set[Node]:
    """The nodes that a weight layer or one of these results depends on, and the results."""
    found: set[Node] = set()
    for node in reversed(flow):
        if node in results or any(user.kind == "weight" or user in found for user in node.users):
            found.add(node)
    return found


def _channels(node: Node) -> int:
    return node.shape[1] if len(node.shape) == 4 else node.shape[-1] if node.shape else 1
