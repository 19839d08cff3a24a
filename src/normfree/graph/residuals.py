"""Which sums of a flow are residual: those whose two operands meet again at a latest common ancestor."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from normfree.graph.degree import carried, degree
from normfree.graph.flow import Node
from normfree.plan import ShortcutKind


@dataclass(frozen=True)
class Meeting:
    """A residual sum: where its operands part, the weight layers on the branch and on the shortcut, and its class.

    `end` is the operand of the addition that is the branch. Of the branch's layers, `entries` read what it starts from,
    `ends` are added to the shortcut, and `gates` reach the sum only as bounded factors.
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
    gates: frozenset[Node]


def meetings(flow: Sequence[Node]) -> list[Meeting]:
    """The residual sums of a flow, in the order they ran.

    An inner sum claims its layers first, so that an outer skip connection lists only what is left to it; that may be
    nothing, x + blocks(x), and still the signal grows there. But layers side by side that are added to one shortcut
    together are one branch of it.
    """
    found: list[Meeting] = []
    claimed: set[Node] = set()
    shortcuts: dict[Node, Node] = {}
    for node in flow:
        meeting = _meet(node, claimed, shortcuts) if node.kind == "sum" else None
        if meeting:
            found.append(meeting)
            claimed.update(meeting.branch, meeting.shortcut)
            shortcuts[node] = node.inputs[node.inputs[0] is meeting.end]
    return found


def _meet(node: Node, claimed: set[Node], shortcuts: Mapping[Node, Node]) -> Meeting | None:
    ancestor, sides = _latest_common_ancestor(node, shortcuts)
    if ancestor is None:
        return None
    layers = [_layers(side, claimed) for side in sides]
    sizes = [(len(own), sum(n in shortcuts for n in side)) for own, side in zip(layers, sides, strict=True)]
    shortcut = 0 if sizes[0] < sizes[1] else 1
    branch, side, end = layers[1 - shortcut], sides[1 - shortcut], node.inputs[1 - shortcut]
    # Up to an earlier sum: where several branches are added one by one, the shortcut of each is the sum before.
    straight = _walk_back(node.inputs[shortcut], set(sides[shortcut]), stops=shortcuts.keys()) - shortcuts.keys()
    if sizes[1 - shortcut] == (0, 0) or any(n.kind == "gate" for n in straight):
        return None  # nothing learnable is added, or the shortcut is gated: a highway
    if layers[shortcut] and _is_part_of_a_branch(node, shortcuts):
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
    return Meeting(
        node,
        ancestor,
        tuple(branch),
        tuple(layers[shortcut]),
        kind,
        end=end,
        degree=degree(end, side, lambda n: n in own, shortcuts),
        entries=frozenset(_entries(ancestor, side, own)),
        ends=frozenset(own & _walk_back(end, inside, stops=own)),
        gates=frozenset(gates),
    )


def _layers(side: Sequence[Node], claimed: set[Node]) -> list[Node]:
    return sorted((n for n in side if n.kind == "weight" and n not in claimed), key=lambda n: n.index)


def _is_part_of_a_branch(node: Node, shortcuts: Mapping[Node, Node]) -> bool:
    """Whether a sum of layers goes straight, and only, into a sum with a shortcut that has none."""
    while len(node.users) == 1 and node.users[0].kind == "scaling":
        node = node.users[0]
    if len(node.users) != 1 or node.users[0].kind != "sum":
        return False
    outer = node.users[0]
    ancestor, sides = _latest_common_ancestor(outer, shortcuts)
    other = sides[outer.inputs[0] is node]
    return ancestor is not None and not _layers(other, set())


def _entries(ancestor: Node, side: Sequence[Node], own: set[Node]) -> set[Node]:
    """The layers that read the ancestor with no other layer of the branch between."""
    reading = {ancestor}
    for node in sorted(side, key=lambda n: n.index):
        if any(source in reading and source not in own for source in node.inputs):
            reading.add(node)
    return reading & own


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
            stack += carried(node)
    return seen


def _latest_common_ancestor(
    addition: Node, shortcuts: Mapping[Node, Node]
) -> tuple[Node | None, tuple[list[Node], list[Node]]]:
    """The last node that both operands of a sum depend on (or are), and the nodes between it and each operand.

    Walks back from both at once, always from the latest node; the first that both walks reach is the answer, so the
    cost is the size of the branch, not of the network. From an operand that is an earlier residual sum, but for a
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
