"""Which sums of a graph are residual: those whose two operands meet again at a latest common ancestor."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from torch import fx

from normfree.graph.flow import Flow, weights
from normfree.plan import ShortcutKind


@dataclass(frozen=True)
class Meeting:
    """A residual sum: where its operands part, the weight layers on the branch and on the shortcut, and its class."""

    node: fx.Node
    ancestor: fx.Node
    branch: tuple[fx.Node, ...]
    shortcut: tuple[fx.Node, ...]
    kind: ShortcutKind


def meetings(flow: Flow) -> list[Meeting]:
    """The residual sums of a graph, in topological order.

    An inner sum claims its layers first, so that an outer skip connection lists only what is left to it.
    """
    found: list[Meeting] = []
    claimed: set[fx.Node] = set()
    for node in flow.nodes:
        if not flow.is_sum(node):
            continue
        meeting = _meet(flow, node, claimed)
        if meeting:
            found.append(meeting)
            claimed.update(meeting.branch, meeting.shortcut)
    return found


def _meet(flow: Flow, node: fx.Node, claimed: set[fx.Node]) -> Meeting | None:
    left, right = flow.operands(node)
    ancestor, sides = _latest_common_ancestor(flow, left, right)
    if ancestor is None:
        return None
    layers = [[n for n in weights(flow, side) if n not in claimed] for side in sides]
    shortcut = 0 if len(layers[0]) < len(layers[1]) else 1
    if not layers[0] and not layers[1]:
        return None
    side, branch = sides[shortcut], layers[1 - shortcut]
    if any(flow.is_gate(n) for n in side):
        return None  # a gate on the shortcut: a highway, whose identity path depends on the data
    if len(layers[0]) == len(layers[1]):
        kind: ShortcutKind = "parallel"
    elif layers[shortcut]:
        kind = "projection"
    else:
        kind = "identity" if all(flow.passes(n) for n in side) else "subsample"
    return Meeting(node, ancestor, tuple(branch), tuple(layers[shortcut]), kind)


def _latest_common_ancestor(
    flow: Flow, left: fx.Node, right: fx.Node
) -> tuple[fx.Node | None, tuple[list[fx.Node], list[fx.Node]]]:
    """The last node that both operands depend on (or are), and the nodes between it and each operand.

    Walks back from both at once, always from the latest node; the first that both walks reach is the answer, so the
    cost is the size of the branch, not of the network.
    """
    marks: dict[fx.Node, int] = {}
    heap: list[tuple[int, fx.Node]] = []

    def reach(node: fx.Node, mark: int) -> None:
        if node not in marks:
            heapq.heappush(heap, (-flow.order[node], node))
        marks[node] = marks.get(node, 0) | mark

    reach(left, 1)
    reach(right, 2)
    sides: tuple[list[fx.Node], list[fx.Node]] = ([], [])
    while heap:
        _, node = heapq.heappop(heap)
        if marks[node] == 3:
            return node, sides
        sides[marks[node] - 1].append(node)
        for operand in flow.operands(node):
            reach(operand, marks[node])
    return None, sides
