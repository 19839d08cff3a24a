"""The sums that are not residual, though their operands have a common ancestor."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence, Set
from itertools import chain
from operator import attrgetter

from normfree.graph.flow import Node, reachable


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
        self._used = {n for n in reachable(outputs, attrgetter("inputs")) if n in used or n.kind == "weight"}
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

    def are_read_outside(self, nodes: Collection[Node], inside: Set[Node]) -> bool:
        """Whether the network returns one of these nodes, or a step that is not `inside` reads it to make an output.

        A step that only adds the node to another signal does not count: that signal remains without the node. Neither
        does a step that leads to single numbers only, such as a penalty in the loss.
        """
        return any(
            node in self._outputs or any(user not in inside and self._uses(user) for user in node.users)
            for node in nodes
        )

    def _uses(self, user: Node) -> bool:
        """Whether a reader of a node makes an output from it, other than by adding it to another signal."""
        while user.kind in ("scaling", "other") and len(user.inputs) == len(user.users) == 1:
            user = user.users[0]
        return user in self._used and not (user.kind == "sum" and len(user.inputs) > 1)

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
