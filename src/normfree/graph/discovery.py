"""Any model → its residual plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence, Set
from math import prod
from typing import Any

from torch import nn

from normfree.graph.degree import carried
from normfree.graph.flow import Flow, Node
from normfree.graph.fused import parts
from normfree.graph.recorder import record
from normfree.graph.residuals import Meeting, meetings
from normfree.nn.model_state import call_arguments
from normfree.plan import Branch, Layer, Position, ResidualPlan, positions

Layers = Callable[[Sequence[Node], Set[Node]], tuple[Layer, ...]]


def discover(model: nn.Module, *args: Any, **kwargs: Any) -> ResidualPlan:
    """Find the residual branches of a model nobody has described; the arguments are an example input it accepts.

    One argument may be the whole example: a tensor, a tuple or list of positional arguments, or a mapping of keyword
    arguments.

    A sum is residual when its operands meet again at a latest common ancestor; it is classed as identity, subsample,
    projection or parallel. A stage ends where the resolution or width of the sums changes, or another stream begins.
    The model is left as it was, and nothing is computed, unless it looks at values: shapes come from meta tensors.

    >>> from normfree.models import build
    >>> import torch
    >>> discover(build("resnet20"), torch.zeros(2, 3, 32, 32)).stage_sizes
    (3, 3, 3)

    Raises `ValueError` when the model does not run on such an input.
    """
    by_place, by_name = call_arguments(args[0]) if len(args) == 1 and not kwargs else (args, kwargs)
    flow = record(model, *by_place, **by_name)
    layers = _layer_reader(model, flow)
    sums = meetings(flow.nodes)
    placed = positions(_stages(sums), [_changes_shape(m) for m in sums])
    names = _names(sums)
    outer = _around(sums)
    branches = tuple(
        _branch(name, position, m, layers, names[outer[i]] if i in outer else None)
        for i, (name, position, m) in enumerate(zip(names, placed, sums, strict=True))
    )
    inside = {node for m in sums for node in (*m.branch, *m.shortcut)}
    outside = [node for node in flow.nodes if node.kind == "weight" and node not in inside]
    gates = only_as_bounded_factors(flow.nodes)
    stem, body, classifier = (layers(nodes, gates) for nodes in _split(outside, sums))
    aside = tuple(path for path, uses in flow.weights.uses.items() if not uses & {"weight", "unknown"})
    return ResidualPlan(branches, stem, body, classifier, aside)


def _layer_reader(model: nn.Module, flow: Flow) -> Layers:
    """Turns nodes into the layers of a plan; a node that multiplies by several parameters at once gives several."""
    before, after = activated(flow.nodes), read_through_activation(flow.nodes)
    modules = dict(model.named_modules())
    paths = {id(p): path for path, p in model.named_parameters()}

    def is_tied(module: str, parameter: str) -> bool:
        path = paths.get(id(getattr(modules[module], parameter, None)), "")
        return "embedding" in flow.weights.uses.get(path, ())

    def layers(nodes: Sequence[Node], gates: Set[Node]) -> tuple[Layer, ...]:
        return tuple(
            Layer(
                weight.module,
                activated_in=all(before[source] for source in node.inputs),
                activated_out=after[node],
                parameter=weight.parameter,
                parts=weight.parts if weight.parts > 1 or len(node.weights) > 1 else parts(node),
                transposed=weight.transposed,
                gate=node in gates,
                tied=is_tied(weight.module, weight.parameter),
            )
            for node in nodes
            for weight in node.weights
        )

    return layers


def _branch(name: str, position: Position, m: Meeting, layers: Layers, around: str | None) -> Branch:
    own = layers(m.branch, m.gates)
    return Branch(
        name,
        position,
        own,
        m.kind,
        layers(m.shortcut, frozenset()),
        home=m.node.home,
        addition=m.node.ordinal,
        branch_first=m.node.first_operand is m.end,
        m=m.degree if m.degree != sum(not layer.gate for layer in own) else None,
        entries=layers([n for n in m.branch if n in m.entries], m.gates),
        ends=layers([n for n in m.branch if n in m.ends], m.gates),
        around=around,
    )


def _around(sums: Sequence[Meeting]) -> dict[int, int]:
    """For each sum that is part of a later one's branch, by their numbers, the first such sum."""
    found: dict[int, int] = {}
    for i, outer in enumerate(sums):
        inside: set[Node] | None = None
        for j in range(i - 1, -1, -1):
            if sums[j].node.index <= outer.ancestor.index:
                break  # sums are in the order they ran: what comes before the branch is not in it
            inside = _between(outer.ancestor, outer.end) if inside is None else inside
            if sums[j].node in inside:
                found.setdefault(j, i)
    return found


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


def only_as_bounded_factors(flow: Sequence[Node]) -> set[Node]:
    """The nodes that reach what the network puts out only as bounded factors: gates, outside of branches, too."""
    found: set[Node] = set()
    for node in reversed(flow):
        if node.users and all(user in found or node not in carried(user) for user in node.users):
            found.add(node)
    return found


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
    """The number of sums of each stage: neighbours of one stream, resolution and width.

    The length of a sequence is no resolution; but a decoder, whose stream starts anew, is another stage than its
    encoder.
    """
    sizes: list[int] = []
    previous: Meeting | None = None
    for m in sums:
        if previous and _resolution(previous, m) == _resolution(m, previous) and _follows(m.node, previous.node):
            sizes[-1] += 1
        else:
            sizes.append(1)
        previous = m
    return sizes


def _follows(node: Node, earlier: Node) -> bool:
    """Whether a node depends on an earlier one."""
    return any(earlier in between.inputs for between in _between(earlier, node))


def _between(start: Node, end: Node) -> set[Node]:
    """The nodes that came after `start` and that `end` depends on, itself included; the cost is what lies between."""
    seen, stack = {end}, [end]
    while stack:
        for source in stack.pop().inputs:
            if source.index > start.index and source not in seen:
                seen.add(source)
                stack.append(source)
    return seen


def _resolution(m: Meeting, other: Meeting) -> tuple[int, ...]:
    """The shape of a sum as far as it can be compared with another's: the width only where either is a sequence."""
    return m.node.shape[-1:] if _is_sequence(m) or _is_sequence(other) else m.node.shape


def _is_sequence(m: Meeting) -> bool:
    """Whether a sum has the shape (batch, length, width)."""
    return len(m.node.shape) == 3 and not any(w.convolution for end in m.ends for w in end.weights)


def _changes_shape(m: Meeting) -> bool:
    """Whether resolution or width change between the start of a branch and the sum; another view is no change."""
    start, end = m.ancestor.shape, m.node.shape
    return start != end if len(start) == len(end) else prod(start) != prod(end)


def _split(outside: Sequence[Node], sums: Sequence[Meeting]) -> tuple[Sequence[Node], Sequence[Node], Sequence[Node]]:
    """Stem, body and classifier among the layers outside the branches."""
    if not sums:
        return outside[:1], outside[1:-1], outside[1:][-1:]
    first, last = sums[0].node.index, sums[-1].node.index
    stem = [n for n in outside if n.index < first]
    later = [n for n in outside if n.index > first]
    closing = later[-1:] if later and later[-1].index > last else []
    return stem, later[: len(later) - len(closing)], closing
