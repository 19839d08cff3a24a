"""Nodes of an autograd graph: a walk through them, their names, the tensors that they keep, the module before one."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from normfree.graph.observer import ACTIVATIONS
from normfree.nn.model_state import is_sharded

MOST_NODES = 50_000  # that are walked through
CAMEL_CASE = re.compile(r"(?<=[a-z])(?=[A-Z])")  # torch writes leaky_relu, its graph LeakyRelu
NEAR = 64  # nodes in which the layer before a function is searched
VIEWS = (
    "View", "UnsafeView", "Reshape", "Squeeze", "Unsqueeze", "Transpose", "Permute", "Clone", "Select", "Slice", "T",
    "ToCopy", "Alias", "AsStrided", "Flatten", "ReshapeAlias",
)  # fmt: skip


PARTS = ("Split", "SplitWithSizes", "Unbind")  # which return parts of a tensor


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


def nodes_read(points: Mapping[str, Any], output: Any) -> dict[str, tuple[str, ...]]:
    """For each place, given by the node that made what is measured there, the other places that it reads directly.

    The name of the output is ''.
    """
    names = {node: name for name, node in points.items() if node is not None}
    found = {}
    for name, node in [*points.items(), ("", output)]:
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


def sources_of(node: Any, names: Mapping[int, str]) -> list[str]:
    """What a function read, behind views and concatenations: the names of layers, and of functions behind them."""
    found: dict[str, None] = {}
    waiting, seen = deque([node]), 0
    while waiting and seen < NEAR:
        current = first_function(waiting.popleft(), (*VIEWS, *PARTS, "Expand"))
        seen += 1
        if function_name(current) in ("Cat", "Stack"):
            waiting.extend(f for f, _ in current.next_functions if f is not None)
        elif place := place_of(current, names):
            function = CAMEL_CASE.sub("_", function_name(current)).lower()
            found[f"the {function} behind {place}" if function in ACTIVATIONS else place] = None
    return list(found)


def dimension(saved: int) -> int:
    """A dimension that a node keeps: torch saves negative ones as unsigned numbers."""
    return saved - 2**64 if saved >= 2**63 else saved


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


def group_size(node: Any) -> int:
    """The number of values that a group or layer norm normalizes together; 0 for others."""
    if function_name(node) == "NativeGroupNorm":
        return int(node._saved_C * node._saved_HxW // node._saved_group)
    return math.prod(getattr(node, "_saved_normalized_shape", (0,)))


def normalized_variance(node: Any) -> float:
    """The variance that a normalizer divides by, in float64."""
    x = saved_tensor(node, "input")
    if x is None or x.dim() < 2:
        return math.nan
    kind = function_name(node)
    values = x[:64].double()
    if kind == "NativeBatchNorm":
        return float(x.double().movedim(1, 0).flatten(1).var(1, correction=0).median())
    if kind == "NativeGroupNorm":
        return float(values.reshape(len(values), node._saved_group, -1).var(-1, correction=0).median())
    dims = len(tuple(getattr(node, "_saved_normalized_shape", (1,))))
    return float(values.flatten(values.dim() - dims).var(-1, correction=0).median())
