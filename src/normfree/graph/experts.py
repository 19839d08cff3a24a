"""Experts: parallel modules of which a model runs only some, chosen by values; the example may not reach the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torch import nn

from normfree.graph.flow import Flow
from normfree.plan import Branch, Layer, ResidualPlan

_Place = int | str
"""The part of a plan that holds a layer: the index of a branch, or the name of another part."""


def expert_groups(model: nn.Module, plan: ResidualPlan) -> list[list[str]]:
    """The modules of each list of experts, by name.

    Experts are modules of one list that have the same structure, and belong to one branch whose sum is outside of them,
    or to one other part of the network. Blocks of a network are no experts: each has a sum of its own. The parallel
    paths of a network that chooses nothing look like experts, so call this only if `Flow.chooses_by_values`.
    """
    places = _places(plan)
    groups = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            alike: dict[object, list[str]] = {}
            for key, child in module.named_children():
                alike.setdefault(_structure(child), []).append(f"{name}.{key}" if name else key)
            groups += [group for group in alike.values() if _is_in_one_place(group, plan, places)]
    return groups


def same_in_others(name: str, groups: Sequence[Sequence[str]]) -> Iterator[str]:
    """The names of the same parameter in the other experts of its group."""
    for group in groups:
        for own in group:
            if name.startswith(f"{own}."):
                yield from (other + name[len(own) :] for other in group if other != own)


def add_uncalled_experts(
    plan: ResidualPlan, flow: Flow, groups: Sequence[Sequence[str]]
) -> tuple[ResidualPlan, list[str]]:
    """Add the layers of experts that the example did not reach, in the places of a called expert's layers.

    The call counts of the flow are completed in the same way. Returns the plan and the names of these experts.
    """
    added: list[str] = []
    for group in groups:
        uncalled = [name for name in group if not _is_called(name, flow)]
        twin = next((name for name in group if name not in uncalled and _is_planned(name, plan)), None)
        if twin is None:
            continue
        for name in uncalled:
            for module, count in list(flow.call_counts.items()):
                if _is_inside(module, twin):
                    flow.call_counts[name + module[len(twin) :]] = count
        missing = [name for name in uncalled if not _is_planned(name, plan)]
        plan = _with_copies(plan, twin, missing)
        added += missing
    return plan, added


def _with_copies(plan: ResidualPlan, twin: str, names: Sequence[str]) -> ResidualPlan:
    def copied(layers: Sequence[Layer]) -> tuple[Layer, ...]:
        found: list[Layer] = []
        for layer in layers:
            if _is_inside(layer.name, twin):  # the copies come first: the last end of a branch keeps its place
                found += [replace(layer, name=name + layer.name[len(twin) :]) for name in names]
            found.append(layer)
        return tuple(found)

    def branch_with_copies(branch: Branch) -> Branch:
        if not any(_is_inside(layer.name, twin) for layer in branch.layers):
            return branch
        return replace(
            branch,
            layers=copied(branch.layers),
            first_layers=copied(branch.first_layers),
            last_layers=copied(branch.last_layers),
        )

    return replace(
        plan,
        branches=tuple(map(branch_with_copies, plan.branches)),
        stem=copied(plan.stem),
        body=copied(plan.body),
        classifier=copied(plan.classifier),
    )


def _places(plan: ResidualPlan) -> dict[str, set[_Place]]:
    """The parts of the plan that hold layers of each module."""
    found: dict[str, set[_Place]] = {}
    parts: list[tuple[_Place, Sequence[Layer]]] = [(i, branch.layers) for i, branch in enumerate(plan.branches)]
    parts += [("stem", plan.stem), ("body", plan.body), ("classifier", plan.classifier)]
    for place, layers in parts:
        for layer in layers:
            found.setdefault(layer.name, set()).add(place)
    return found


def _is_in_one_place(group: Sequence[str], plan: ResidualPlan, places: Mapping[str, set[_Place]]) -> bool:
    inside = [where for name, where in places.items() if any(_is_inside(name, expert) for expert in group)]
    found = set().union(*inside)
    if len(group) < 2 or len(found) != 1:
        return False
    place = next(iter(found))
    return isinstance(place, str) or not any(_is_inside(plan.branches[place].home, expert) for expert in group)


def _structure(module: nn.Module) -> object:
    """The classes and the shapes of the parameters of a module; modules that agree in them are alike."""
    kinds = tuple((name, type(child)) for name, child in module.named_modules())
    return kinds, tuple((name, p.shape) for name, p in module.named_parameters())


def _is_called(name: str, flow: Flow) -> bool:
    return any(count and _is_inside(module, name) for module, count in flow.call_counts.items())


def _is_planned(name: str, plan: ResidualPlan) -> bool:
    return any(_is_inside(layer.name, name) for layer in plan.layers())


def _is_inside(name: str, parent: str) -> bool:
    return name == parent or name.startswith(f"{parent}.")
