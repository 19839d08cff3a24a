"""Discover the residual plan of any model from its recorded flow."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Sequence, Set
from itertools import chain
from math import prod
from operator import attrgetter
from typing import Any, NamedTuple

from torch import nn

from normfree.arguments import check_arguments, model_inside
from normfree.graph.flow import Flow, Node, reachable
from normfree.graph.non_residual_sums import NonResidualSums
from normfree.graph.observer import RECTIFIERS, REDUCTIONS, SPLITS, SUBTRACTIONS, VIEWS
from normfree.graph.recorder import record
from normfree.graph.residual_sums import (
    ResidualSum,
    between,
    latest_common_ancestor,
    residual_sums,
    unbounded_inputs,
)
from normfree.nn.model_state import call_arguments
from normfree.nn.weight_layers import WEIGHT_LAYERS
from normfree.plan import Branch, Layer, Position, ResidualPlan, positions

Layers = Callable[..., tuple[Layer, ...]]

# A layer that starts at 0 inside a branch that starts at 0 learns a step later, by a gradient as small as that step.
# At more levels it would hardly learn.
_LEVELS = 2

# A branch with one of these must not be scaled: x + (q - x).detach() is q, with the gradient of x.
_EXACT = frozenset({"detach", "embedding"})


def discover(model: nn.Module, *args: Any, **kwargs: Any) -> ResidualPlan:
    """Find the residual branches of any model.

    A sum is residual if both operands depend on a common ancestor; the latest one is the start of the branch. Its
    shortcut is classed as identity, subsample, upsample, projection or parallel. A stage ends where the resolution or
    width of the sums changes, or where a new stream begins. The model is left as it was. Nothing is computed unless the
    model looks at values: shapes come from meta tensors.

    Args:
        model: Any model. A compiled one is run as plain Python; the names are those of the model in it.
        *args: An example input that the model accepts. One argument may be the whole example: a tensor, a tuple or
            list of positional arguments, or a mapping of keyword arguments.
        **kwargs: Keyword arguments of the example.

    Returns:
        The branches in order of depth, and the weight layers outside them.

    Raises:
        ValueError: If the model does not run on the example.

    >>> from normfree.models import build
    >>> import torch
    >>> discover(build("resnet20"), torch.zeros(2, 3, 32, 32)).stage_sizes
    (3, 3, 3)
    """
    check_arguments(model=model)
    model = model_inside(model)
    if len(args) == 1:
        check_arguments(example=args[0])
    positional, named = call_arguments(args[0]) if len(args) == 1 and not kwargs else (args, kwargs)
    return plan_from_flow(model, record(model, positional, named))


def plan_from_flow(model: nn.Module, flow: Flow, heads: Collection[str] = ()) -> ResidualPlan:
    """The residual plan of a model whose flow was recorded; `heads` names layers that are known to be output layers."""
    excluded = NonResidualSums(flow.nodes, flow.outputs)
    layers = _layer_reader(model, flow, excluded)
    known = [node for node in flow.nodes if any(weight.module in heads for weight in node.weights)]
    sums = residual_sums(flow.nodes, excluded, known)
    placed = positions(_stages(sums), [_changes_shape(s) for s in sums])
    names = _names(sums)
    outer, levels = _nesting(sums)
    branches = tuple(
        _branch(name, position, s, layers, names[outer[i]] if i in outer else None, level=levels[i])
        for i, (name, position, s) in enumerate(zip(names, placed, sums, strict=True))
    )
    inside = {node for s in sums for node in (*s.branch, *s.shortcut)}
    gates = _only_bounded_factors(flow.nodes)
    outside = [node for node in flow.nodes if node.kind == "weight" and node not in inside]
    closing = known or [n for n in outside if n not in gates and not excluded.precedes_a_layer(n)]
    stem, body = _split([n for n in outside if n not in closing], sums)
    if not stem and not sums:  # a network of one layer
        stem, closing = closing[:1], closing[1:]
    after = {n: reachable(n.users, attrgetter("users")) for n in closing}
    nonzero = {n for n in closing if any(node.function in RECTIFIERS or node.divides_itself for node in after[n])}
    aside = tuple(path for path, uses in flow.weights.uses.items() if not uses & {"weight", "unknown"})
    # Each output layer once: a detector's runs at every resolution.
    heads_once = {layer.path: layer for layer in layers(closing, gates, nonzero)}
    return ResidualPlan(branches, layers(stem, gates), layers(body, gates), tuple(heads_once.values()), aside)


def unaccounted(model: nn.Module, plan: ResidualPlan) -> tuple[str, ...]:
    """The parameters of two or more dimensions that a plan lists neither as weight layers nor in `aside`.

    The example did not reach them (an unused head, an expert that was not chosen), or the model uses them in a way that
    discovery does not understand (a recurrent layer).

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(4, 4), nn.GRU(4, 4))
    >>> unaccounted(model, discover(model, torch.zeros(2, 4)))
    ('1.weight_ih_l0', '1.weight_hh_l0')
    """
    model = model_inside(model)
    modules = dict(model.named_modules())
    known: set[int] = set()
    for layer in plan.layers():
        module = modules.get(layer.name)
        if isinstance(module, WEIGHT_LAYERS):
            known.update(id(p) for p in module.parameters())  # its gains and whatever its weight is made of
        elif module is not None:
            known.add(id(getattr(module, layer.parameter, None)))
    return tuple(
        name
        for name, parameter in model.named_parameters()
        if parameter.dim() >= 2 and id(parameter) not in known and name not in plan.other_parameters
    )


class WeightlessBranch(NamedTuple):
    """A branch f without parameters, such as pooling, that is added to the residual stream: x + f(x).

    `end` is the operand f(x) of the addition. `steps` are the steps on every path to f(x), the last first. `holder` is
    the module whose multiplier scales f(x) alone, if a conversion has found one.
    """

    addition: Node
    end: Node
    steps: Sequence[Node]
    holder: str | None = None


def weightless_branches(flow: Flow, plan: ResidualPlan) -> list[WeightlessBranch]:
    """The weightless branches of a network with residual branches.

    A sum inside another branch is left out, since the scalars of that branch act on it.
    """
    places = {(branch.home, branch.addition) for branch in plan.branches}
    residual = {node for node in flow.nodes if (node.home, node.ordinal) in places}
    inside: set[Node] = set()
    for node in residual:
        _, sides = latest_common_ancestor(node, {})
        inside.update(*(side for side in sides if any(n.kind == "weight" for n in side)))
    last = max((node.index for node in residual), default=-1)
    found = []
    for node in reversed(flow.nodes):  # a sum comes before those inside its branch
        if node.ordinal < 0 or len(node.inputs) != 2 or node in residual or node in inside or node.index > last:
            continue
        ancestor, sides = latest_common_ancestor(node, {})
        if ancestor is None or any(n.kind == "weight" or n.discrete or n.function in _EXACT for n in chain(*sides)):
            continue
        straight = [all(n.kind == "scaling" for n in side) for side in sides]
        end = node.inputs[1 if straight[0] else 0]
        centres = end.function in REDUCTIONS and node.function in SUBTRACTIONS  # x - x.mean() does not grow
        if straight[0] != straight[1] and not centres:
            found.append(WeightlessBranch(node, end, _dominators(end, ancestor)))
            inside.update(*sides)
    return found[::-1]


def _dominators(end: Node, start: Node) -> list[Node]:
    """The nodes on every path from `start` to `end`, the last first, `end` included."""
    found, seen, heap = [], {end}, [(-end.index, end)]
    while heap:
        _, node = heapq.heappop(heap)
        if not heap:
            found.append(node)
        for source in node.inputs:
            if source.index > start.index and source not in seen:
                seen.add(source)
                heapq.heappush(heap, (-source.index, source))
    return found


def _layer_reader(model: nn.Module, flow: Flow, excluded: NonResidualSums) -> Layers:
    """Returns a function from nodes to layers of a plan; a node that multiplies by several parameters gives several."""
    before, after = _activated(flow.nodes), _read_through_activation(flow.nodes)
    modules = dict(model.named_modules())
    paths = {id(p): path for path, p in model.named_parameters()}

    def is_tied(module: str, parameter: str) -> bool:
        path = paths.get(id(getattr(modules[module], parameter, None)), "")
        return "embedding" in flow.weights.uses.get(path, ())

    def layers(nodes: Sequence[Node], gates: Set[Node], nonzero: Set[Node] = frozenset()) -> tuple[Layer, ...]:
        return tuple(
            Layer(
                weight.module,
                reads_activation=all(before[source] for source in node.inputs),
                feeds_activation=after[node],
                parameter=weight.parameter,
                parts=weight.parts if weight.parts > 1 or len(node.weights) > 1 else _fused_parts(node),
                transposed=weight.transposed,
                gate=node in gates,
                tied=is_tied(weight.module, weight.parameter),
                must_be_nonzero=node in nonzero,
                parallel_paths=excluded.shares.get(node, 1),
                modulates=_modulates(node),
            )
            for node in nodes
            for weight in node.weights
        )

    return layers


def _fused_parts(layer: Node) -> int:
    """The number of equal matrices stacked in a layer's weight, read from how its output is split.

    It is 3 for a fused query, key and value, 2 for a fused gate and value, 1 for a layer whose output stays whole. The
    output is followed through changes of its shape to the call that splits it. Pieces of different sizes (fewer keys
    than queries) count as one part, and so does a split along another dimension than the outputs.
    """
    node = layer
    while len(node.users) == 1 and node.users[0].function in VIEWS:
        node = node.users[0]
    pieces = node.users
    if len(pieces) < 2 or not _are_split(pieces) or prod(pieces[0].shape) * len(pieces) != prod(node.shape):
        return 1
    if any(piece.shape != pieces[0].shape for piece in pieces):
        return 1
    if node is not layer:
        return 1 if pieces[0].function == "__getitem__" else len(pieces)  # halves of each head, for rotary embeddings
    outputs = 1 if layer.weights[0].convolution else len(node.shape) - 1
    by_step = len(pieces[0].shape) < len(node.shape)  # y[:, t] for each t, as a recurrence by hand reads it
    return 1 if by_step or node.shape[outputs] == pieces[0].shape[outputs] else len(pieces)


def _are_split(pieces: list[Node]) -> bool:
    """Whether one call, or one index for each, splits a tensor into these pieces."""
    names = {piece.function for piece in pieces}
    return len(names) == 1 and (names <= SPLITS or names <= {"select", "__getitem__"})


def _modulates(layer: Node) -> bool:
    """Whether one vector per sample, the layer's output, multiplies all positions of a signal.

    Such a layer conditions a network on a time or a class. Without another layer between, its output is a factor of a
    product that has more entries than itself. Other layers may read it, too: in some networks the time embedding is
    such a factor in the last block, and the input of further layers of this kind in all other blocks.
    """
    alone = [layer]
    for node in alone:
        for user in node.users:
            if user.kind == "gate" and prod(user.shape) > prod(node.shape):
                return True
            if len(user.inputs) == 1 and user.kind in ("scaling", "other") and user not in alone:
                alone.append(user)
    return False


def _branch(
    name: str, position: Position, s: ResidualSum, layers: Layers, outer_branch: str | None, *, level: int
) -> Branch:
    own = layers(s.branch, s.gates, s.covered)
    return Branch(
        name,
        position,
        own,
        s.kind,
        layers(s.shortcut, frozenset()),
        home=s.node.home,
        addition=s.node.ordinal,
        branch_first=s.node.first_operand is s.end,
        degree=s.degree,
        first_layers=layers([n for n in s.branch if n in s.first_layers], s.gates, s.covered),
        last_layers=layers([n for n in s.branch if n in s.last_layers], s.gates, s.covered),
        outer_branch=outer_branch,
        layer_scales=s.layer_scales,
        merges_signals=level > _LEVELS or s.read_elsewhere,
    )


def _nesting(sums: Sequence[ResidualSum]) -> tuple[dict[int, int], list[int]]:
    """For each sum that a later sum's branch contains, by index, the first such later sum; and the level of each sum.

    The level is 1 if the sum's branch contains no sum, else 1 more than the largest level of the sums in it.
    """
    found: dict[int, int] = {}
    levels = [1] * len(sums)
    for i, outer in enumerate(sums):
        inside: set[Node] | None = None
        for j in range(i - 1, -1, -1):
            if sums[j].node.index <= outer.ancestor.index:
                break  # sums are in the order they ran: those before the start of the branch are not in it
            inside = between(outer.ancestor, outer.end) if inside is None else inside
            if sums[j].node in inside:
                found.setdefault(j, i)
                levels[i] = max(levels[i], levels[j] + 1)
    return found, levels


def _activated(flow: Sequence[Node]) -> dict[Node, bool]:
    """For each node, whether its value comes out of an activation, with nothing but pooling or scalars since."""
    out: dict[Node, bool] = {}
    for node in flow:
        if node.kind == "activation":
            out[node] = True
        else:
            cut = node.kind in ("weight", "sum", "gate", "input")
            out[node] = not cut and all(out[source] for source in node.inputs)
    return out


def _read_through_activation(flow: Sequence[Node]) -> dict[Node, bool]:
    """For each node, whether every reader meets an activation before the next weight layer, sum or the output."""
    out: dict[Node, bool] = {}

    def by(user: Node) -> bool:
        return user.kind == "activation" or (user.kind not in ("weight", "sum", "gate") and out[user])

    for node in reversed(flow):
        out[node] = bool(node.users) and all(by(user) for user in node.users)
    return out


def _only_bounded_factors(flow: Sequence[Node]) -> set[Node]:
    """The nodes that reach the network's output only as bounded factors: gates, also outside of branches."""
    found: set[Node] = set()
    for node in reversed(flow):
        if node.users and all(user in found or node not in unbounded_inputs(user) for user in node.users):
            found.add(node)
    return found


def _names(sums: Sequence[ResidualSum]) -> list[str]:
    """Name each sum after the module whose forward pass adds it, with a number if that module adds several."""
    totals, seen = Counter(s.node.home for s in sums), Counter[str]()
    names = []
    for s in sums:
        home = s.node.home
        seen[home] += 1
        names.append(home if totals[home] == 1 else f"{home}#{seen[home]}")
    return names


def _stages(sums: Sequence[ResidualSum]) -> list[int]:
    """The number of sums of each stage: neighbours of one stream, resolution and width.

    The length of a sequence does not count as resolution. A decoder starts a new stream, and so a new stage.
    """
    sizes: list[int] = []
    previous: ResidualSum | None = None
    for s in sums:
        alike = previous is not None and _resolution(previous, s) == _resolution(s, previous)
        if previous and alike and any(previous.node in n.inputs for n in between(previous.node, s.node)):
            sizes[-1] += 1
        else:
            sizes.append(1)
        previous = s
    return sizes


def _resolution(s: ResidualSum, other: ResidualSum) -> tuple[int, ...]:
    """The part of a sum's shape that can be compared with another's: just the width if either is a sequence."""
    return s.node.shape[-1:] if _is_sequence(s) or _is_sequence(other) else s.node.shape


def _is_sequence(s: ResidualSum) -> bool:
    """Whether a sum has the shape (batch, length, width)."""
    return len(s.node.shape) == 3 and not any(w.convolution for end in s.last_layers for w in end.weights)


def _changes_shape(s: ResidualSum) -> bool:
    """Whether resolution or width change between the start of a branch and the sum; a reshape alone does not count."""
    start, end = s.ancestor.shape, s.node.shape
    return start != end if len(start) == len(end) else prod(start) != prod(end)


def _split(hidden: Sequence[Node], sums: Sequence[ResidualSum]) -> tuple[Sequence[Node], Sequence[Node]]:
    """Stem and body among the hidden layers outside the branches."""
    if not sums:
        return hidden[:1], hidden[1:]
    first = sums[0].node.index
    return [n for n in hidden if n.index < first], [n for n in hidden if n.index > first]
