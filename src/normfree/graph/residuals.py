"""Which sums of a flow are residual: those whose two operands meet again at a latest common ancestor."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from normfree.graph.record import Node
from normfree.plan import ShortcutKind


@dataclass(frozen=True)
class Meeting:
    """A residual sum: where its operands part, the weight layers on the branch and on the shortcut, and its class.

    `branch_first` says whether the first operand of the addition is the branch.
    """

    node: Node
    ancestor: Node
    branch: tuple[Node, ...]
    shortcut: tuple[Node, ...]
    kind: ShortcutKind
    branch_first: bool


def meetings(flow: Sequence[Node]) -> list[Meeting]:
    """The residual sums of a flow, in the order they ran.

    An inner sum claims its layers first, so that an outer skip connection lists only what is left to it.
    """
    found: list[Meeting] = []
    claimed: set[Node] = set()
    for node in flow:
        meeting = _meet(node, claimed) if node.kind == "sum" else None
        if meeting:
            found.append(meeting)
            claimed.update(meeting.branch, meeting.shortcut)
    return found


def _meet(node: Node, claimed: set[Node]) -> Meeting | None:
    ancestor, sides = _latest_common_ancestor(*node.inputs)
    if ancestor is None:
        return None
    layers = [
        sorted((n for n in side if n.kind == "weight" and n not in claimed), key=lambda n: n.index) for side in sides
    ]
    shortcut = 0 if len(layers[0]) < len(layers[1]) else 1
    branch = layers[1 - shortcut]
    if not branch or any(n.kind == "gate" for n in sides[shortcut]):
        return None  # nothing learnable is added, or the shortcut is gated: a highway
    if len(layers[0]) == len(layers[1]):
        kind: ShortcutKind = "parallel"
    elif layers[shortcut]:
        kind = "projection"
    else:
        kind = "identity" if all(n.kind == "scaling" for n in sides[shortcut]) else "subsample"
    branch_first = node.first_operand is node.inputs[1 - shortcut]
    return Meeting(node, ancestor, tuple(branch), tuple(layers[shortcut]), kind, branch_first)


def _latest_common_ancestor(left: Node, right: Node) -> tuple[Node | None, tuple[list[Node], list[Node]]]:
    """The last node that both operands depend on (or are), and the nodes between it and each operand.

    Walks back from both at once, always from the latest node; the first that both walks reach is the answer, so the
    cost is the size of the branch, not of the network.
    """
    marks: dict[Node, int] = {}
    heap: list[tuple[int, Node]] = []

    def reach(node: Node, mark: int) -> None:
        if node not in marks:
            heapq.heappush(heap, (-node.index, node))
        marks[node] = marks.get(node, 0) | mark

    reach(left, 1)
    reach(right, 2)
    sides: tuple[list[Node], list[Node]] = ([], [])
    while heap:
        _, node = heapq.heappop(heap)
        if marks[node] == 3:
            return node, sides
        sides[marks[node] - 1].append(node)
        for source in node.inputs:
            reach(source, marks[node])
    return None, sides
