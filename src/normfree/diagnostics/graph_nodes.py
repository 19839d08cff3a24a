"""Nodes of an autograd graph: a walk through them, their names, the tensors that they keep, the module before one."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from normfree.nn.model_state import is_sharded

MOST_NODES = 50_000  # that are walked through
NEAR = 64  # nodes in which the layer before a function is searched
VIEWS = (
    "View", "UnsafeView", "Reshape", "Squeeze", "Unsqueeze", "Transpose", "Permute", "Clone", "Select", "Slice", "T",
    "ToCopy", "Alias", "AsStrided", "Flatten", "ReshapeAlias",
)  # fmt: skip


def walk(roots: Iterable[Any], ends: Iterable[Any] = (), most: int = MOST_NODES) -> Iterable[Any]:
    """The nodes between some nodes and the input, or the `ends`, from the output on; `most` limits their number."""
    seen: dict[Any, None] = dict.fromkeys(ends)
    waiting = [r for r in dict.fromkeys(roots) if r is not None and r not in seen]
    seen |= dict.fromkeys(waiting)
    while waiting and len(seen) < most:
        node = waiting.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen[following] = None
                waiting.append(following)


def nodes_read(points: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """For each place, given by the node that made what is measured there, the other places that it reads directly."""
    names = {node: name for name, node in points.items() if node is not None}
    found = {}
    for name, node in points.items():
        inner = walk([node], names.keys() - {node})
        found[name] = tuple({names[f]: 0 for n in inner for f, _ in n.next_functions if f in names and f is not node})
    return found


def function_name(node: Any) -> str:
    """The function of a node: 'Tanh' for 'TanhBackward0'."""
    return "" if node is None else str(node.name()).rpartition("::")[2].partition("Backward")[0]


def first_function(node: Any, views: tuple[str, ...] = VIEWS) -> Any:
    """The first node on the way to the input that is more than a view."""
    while node is not None and function_name(node) in views and node.next_functions:
        node = node.next_functions[0][0]
    return node


def saved_tensor(node: Any, name: str) -> Tensor | None:
    """A tensor that a node keeps; None if it keeps none, an empty one, or one that was changed in place since."""
    try:
        value = getattr(node, f"_saved_{name}", None)
    except RuntimeError:
        return None
    return value.detach() if isinstance(value, Tensor) and value.numel() and not is_sharded(value) else None


def place_of(node: Any, names: Mapping[int, str], near: int = NEAR) -> str:
    """The module of the nearest parameter before a node, '' if there is none nearby; an embedding only if no other."""
    waiting, seen, table = deque([node]), 0, ""
    while waiting and seen < near:
        current = waiting.popleft()
        seen += 1
        if function_name(current) == "Embedding":
            table = table or place_of(current.next_functions[0][0], names, 1)
            continue
        variable = getattr(current, "variable", None)
        if variable is not None and id(variable) in names:
            return names[id(variable)]
        waiting.extend(f for f, _ in getattr(current, "next_functions", ()) if f is not None)
    return table
