"""Any model → its residual plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import nn

from normfree.graph.record import Node, record
from normfree.graph.residuals import Meeting, meetings
from normfree.plan import Branch, Layer, ResidualPlan, positions


def discover(model: nn.Module, *args: Any, **kwargs: Any) -> ResidualPlan:
    """Find the residual branches of a model nobody has described; the arguments are an example input it accepts.

    A sum is residual when its operands meet again at a latest common ancestor; it is classed as identity, subsample,
    projection or parallel. A stage ends where the shape of the sums changes. The model is left as it was, and nothing
    is computed: shapes come from meta tensors.

    >>> from normfree.models import build
    >>> import torch
    >>> discover(build("resnet20"), torch.zeros(2, 3, 32, 32)).stage_sizes
    (3, 3, 3)

    Raises `ValueError` when the model does not run on such an input.
    """
    flow = record(model, *args, **kwargs)
    before, after = activated(flow), read_through_activation(flow)

    def layers(nodes: Sequence[Node]) -> tuple[Layer, ...]:
        return tuple(Layer(n.name, all(before[source] for source in n.inputs), after[n]) for n in nodes)

    sums = meetings(flow)
    changes = [m.ancestor.shape != m.node.shape for m in sums]
    placed = positions(_stages(sums), changes)
    branches = tuple(
        Branch(
            name,
            position,
            layers(m.branch),
            m.kind,
            layers(m.shortcut),
            home=m.node.home,
            addition=m.node.ordinal,
            branch_first=m.branch_first,
        )
        for name, position, m in zip(_names(sums), placed, sums, strict=True)
    )
    inside = {node for m in sums for node in (*m.branch, *m.shortcut)}
    outside = [node for node in flow if node.kind == "weight" and node not in inside]
    stem, body, classifier = _split(outside, sums)
    return ResidualPlan(branches, layers(stem), layers(body), layers(classifier))


def activated(flow: Sequence[Node]) -> dict[Node, bool]:
    """For each node, whether its value comes out of an activation, whatever pooling or scalars came since."""
    out: dict[Node, bool] = {}
    for node in flow:
        if node.kind == "activation":
            out[node] = True
        else:
            cut = node.kind in ("weight", "sum", "gate", "input")
            out[node] = not cut and all(out[source] for source in node.inputs)
    return out


def read_through_activation(flow: Sequence[Node]) -> dict[Node, bool]:
    """For each node, whether every reader meets an activation before the next weight layer, sum or the output."""
    out: dict[Node, bool] = {}

    def by(user: Node) -> bool:
        return user.kind == "activation" or (user.kind not in ("weight", "sum", "gate") and out[user])

    for node in reversed(flow):
        out[node] = bool(node.users) and all(by(user) for user in node.users)
    return out


def _names(sums: Sequence[Meeting]) -> list[str]:
    """A sum is called after the module it stands in, with a number where that holds several."""
    totals, seen = Counter(m.node.home for m in sums), Counter[str]()
    names = []
    for m in sums:
        home = m.node.home
        seen[home] += 1
        names.append(home if totals[home] == 1 else f"{home}#{seen[home]}")
    return names


def _stages(sums: Sequence[Meeting]) -> list[int]:
    """The number of sums of each stage: neighbours of one shape."""
    sizes: list[int] = []
    previous = None
    for m in sums:
        if m.node.shape == previous:
            sizes[-1] += 1
        else:
            sizes.append(1)
        previous = m.node.shape
    return sizes


def _split(outside: Sequence[Node], sums: Sequence[Meeting]) -> tuple[Sequence[Node], Sequence[Node], Sequence[Node]]:
    """Stem, body and classifier among the layers outside the branches."""
    if not sums:
        return outside[:1], outside[1:-1], outside[1:][-1:]
    first, last = sums[0].node.index, sums[-1].node.index
    stem = [n for n in outside if n.index < first]
    later = [n for n in outside if n.index > first]
    closing = later[-1:] if later and later[-1].index > last else []
    return stem, later[: len(later) - len(closing)], closing
