"""Any traceable model → its residual plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import Tensor, fx, nn

from normfree.graph.flow import Flow, activated, read_through_activation, trace, weights
from normfree.graph.residuals import Meeting, meetings
from normfree.plan import Branch, Layer, ResidualPlan, positions


def discover(model: nn.Module, example: Tensor) -> ResidualPlan:
    """Find the residual branches of a model nobody has described; `example` is a batch it accepts.

    A sum is residual when its operands meet again at a latest common ancestor; it is classed as identity, subsample,
    projection or parallel. A stage ends where the shape of the sums changes. The model is left as it was, and nothing
    is computed: shapes come from meta tensors.

    >>> from normfree.models import build
    >>> import torch
    >>> discover(build("resnet20"), torch.zeros(2, 3, 32, 32)).stage_sizes
    (3, 3, 3)

    Raises `ValueError` when the model cannot be traced.
    """
    flow = trace(model, example)
    before, after = activated(flow), read_through_activation(flow)

    def layers(nodes: Sequence[fx.Node]) -> tuple[Layer, ...]:
        return tuple(Layer(str(n.target), all(before[arg] for arg in flow.operands(n)), after[n]) for n in nodes)

    sums = [m for m in meetings(flow) if m.branch]
    names = _names(flow, sums)
    changes = [flow.shapes[m.ancestor] != flow.shapes[m.node] for m in sums]
    placed = positions(_stages(flow, sums), changes)
    branches = tuple(
        Branch(name, position, layers(m.branch), m.kind, layers(m.shortcut))
        for name, position, m in zip(names, placed, sums, strict=True)
    )
    inside = {node for m in sums for node in (*m.branch, *m.shortcut)}
    outside = [node for node in weights(flow, flow.nodes) if node not in inside]
    stem, body, classifier = _split(flow, outside, sums)
    return ResidualPlan(branches, layers(stem), layers(body), layers(classifier))


def _names(flow: Flow, sums: Sequence[Meeting]) -> list[str]:
    """A sum is called after the module it stands in, with a number where that holds several."""
    homes = [flow.home(m.node) for m in sums]
    totals, seen = Counter(homes), Counter[str]()
    names = []
    for home in homes:
        seen[home] += 1
        names.append(home if totals[home] == 1 else f"{home}#{seen[home]}")
    return names


def _stages(flow: Flow, sums: Sequence[Meeting]) -> list[int]:
    """The number of sums of each stage: neighbours of one shape."""
    sizes: list[int] = []
    previous = None
    for m in sums:
        shape = flow.shapes[m.node]
        if shape == previous:
            sizes[-1] += 1
        else:
            sizes.append(1)
        previous = shape
    return sizes


def _split(
    flow: Flow, outside: Sequence[fx.Node], sums: Sequence[Meeting]
) -> tuple[Sequence[fx.Node], Sequence[fx.Node], Sequence[fx.Node]]:
    """Stem, body and classifier among the layers outside the branches."""
    if not sums:
        return outside[:1], outside[1:-1], outside[1:][-1:]
    first, last = flow.order[sums[0].node], flow.order[sums[-1].node]
    stem = [n for n in outside if flow.order[n] < first]
    later = [n for n in outside if flow.order[n] > first]
    closing = later[-1:] if later and flow.order[later[-1]] > last else []
    return stem, later[: len(later) - len(closing)], closing
