"""The degree of a branch in its weights, m in Fixup's exponent, whether projections are fused or not.

One rule: a weight layer adds 1; a product of signals (matrix product, gate, attention) adds their degrees; a sum or
concatenation takes the largest; a factor that is bounded (a sigmoid, as in squeeze and excitation) adds nothing;
everything else, softmax among it, passes its degree on. So two layers in a row have 2, attention (query · key · value,
then the output) 4, a gated feed-forward 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from normfree.graph.flow import Node
from normfree.graph.functions import BOUNDED


def degree(end: Node, side: Iterable[Node], adds: Callable[[Node], bool], skips: Mapping[Node, Node]) -> int:
    """The degree of `end` in the weight layers of `side`, the nodes between a branch's entry and its end.

    `adds` says which layers count, and `skips` gives for an inner residual sum its shortcut, whose degree it has: its
    own branch is small against it.
    """
    degrees: dict[Node, int] = {}
    for node in sorted(side, key=lambda n: n.index):
        if node in skips:
            found = degrees.get(skips[node], 0)
        elif factors := growing_factors(node):
            found = sum(degrees.get(factor, 0) for factor in factors)
        else:
            found = max((degrees.get(source, 0) for source in node.inputs), default=0)
        degrees[node] = found + (node.kind == "weight" and adds(node))
    return degrees.get(end, 0)


def growing_factors(node: Node) -> tuple[Node, ...]:
    """The factors of a product that are not bounded; all of them where all are, none where the node is no product."""
    return tuple(factor for factor in node.factors if not is_bounded(factor)) or node.factors


def carried(node: Node) -> tuple[Node, ...]:
    """What a node depends on other than as a bounded factor, which changes its size by no more than that."""
    dropped = set(node.factors) - set(growing_factors(node))
    return tuple(source for source in node.inputs if source not in dropped)


def is_bounded(node: Node) -> bool:
    """Whether a value is a bounded function of the signal, such as a sigmoid, but for constants and its shape."""
    while node.function not in BOUNDED:
        if len(node.inputs) != 1 or node.kind not in ("scaling", "other") or node.factors[1:]:
            return False
        node = node.inputs[0]
    return True
