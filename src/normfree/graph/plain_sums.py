"""Sums of two signals that are not residual: those of a loss, of heads, and of parallel layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from itertools import chain, permutations

from normfree.graph.flow import Node
from normfree.graph.functions import DIVISIONS, PRODUCTS

_NORMALIZATIONS = frozenset({"normalize", "cosine_similarity"})


class PlainSums:
    """What follows each node of a flow, and the sums that are not residual because of it.

    - A sum that feeds nothing but numbers (`((prediction - x) ** 2).mean()`) is part of a loss.
    - Sums of parallel layers, conv3x3(x) + conv1x1(x) + x as in re-parametrizable blocks, form one layer.
    - A sum of heads, (h1(z) + h2(z)) / 2, is followed by no layer.

    Attributes:
        shares: For each of several parallel layers, the number of paths that are added to one another.
    """

    def __init__(self, flow: Sequence[Node], outputs: Set[Node]) -> None:
        self.shares: dict[Node, int] = {}
        self._members: set[Node] = set()
        self._outputs = outputs
        self._before_layers = _before_layers(flow)
        used = _beyond_a_loss(flow, outputs)
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

        Heads are alike, or score a few classes from many channels, as many as the network returns. A projection
        shortcut of the last block differs from its branch, and does not reduce the channels.
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


def normalizes_itself(node: Node) -> bool:
    """Whether a step divides a signal by its own norm: 0 would become 0/0."""
    if node.function in _NORMALIZATIONS:
        return True
    if node.function not in DIVISIONS or len(node.inputs) != 2:
        return False
    signal, norm = node.inputs
    while len(norm.inputs) == 1 and norm is not signal and norm.kind != "weight":
        norm = norm.inputs[0]
    return norm is signal or norm in signal.inputs


def divides_by_own_scale(node: Node) -> bool:
    """Whether a step normalizes a signal in the model's own code: x · rsqrt(mean(x²) + ε), or (x - mean) / std."""
    if normalizes_itself(node):
        return node.function in DIVISIONS
    for factor, other in permutations(node.factors, 2) if node.function in PRODUCTS else ():
        step, roots = factor, False
        while len(step.inputs) == 1 and step is not other and step.kind != "weight":
            roots = roots or step.function in ("rsqrt", "rsqrt_")
            step = step.inputs[0]
        if roots and (step is other or step in other.inputs):
            return True
    return False


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


def _before_layers(flow: Sequence[Node]) -> set[Node]:
    """The nodes that a weight layer depends on."""
    found: set[Node] = set()
    for node in reversed(flow):
        if any(user.kind == "weight" or user in found for user in node.users):
            found.add(node)
    return found


def _beyond_a_loss(flow: Sequence[Node], outputs: Set[Node]) -> set[Node]:
    """The nodes that a layer, or an output of more than one number, depends on."""
    found: set[Node] = set()
    for node in reversed(flow):
        result = node.shape not in ((), (1,)) and (node in outputs or not node.users)
        if result or any(user.kind == "weight" or user in found for user in node.users):
            found.add(node)
    return found


def _channels(node: Node) -> int:
    return node.shape[1] if len(node.shape) == 4 else node.shape[-1] if node.shape else 1
