"""The blocks of a model: their names in reports, and the blocks without the residual sum that similar blocks have."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from normfree.plan import Branch, ResidualPlan


def name_pattern(name: str) -> str:
    """The name of a module or sum without its numbers: equal for repeated blocks.

    >>> name_pattern("layer3.1")
    'layer.'
    """
    return re.sub(r"\d+", "", name)


def place_names(plan: ResidualPlan) -> dict[str, str]:
    """Name each branch of a plan after a module that the user wrote, by the branch's name in the plan.

    A module with one sum gives its name. If the sum stands in a loop over blocks, or a module has several sums, the
    name is that of the outermost module that holds the branch and no other branch, or that of the branch's layers.
    A branch that is called several times is named by its module and the number of the call, and a branch without
    layers by the number of its addition.

    >>> from normfree.plan import Layer, Position
    >>> place = Position(1, 2, 1, 1, 2)
    >>> plan = ResidualPlan(tuple(Branch(f"#{i + 1}", place, (Layer(f"blocks.{i}.mlp.1"),)) for i in range(2)))
    >>> place_names(plan)
    {'#1': 'blocks.0', '#2': 'blocks.1'}
    """
    homes = Counter(b.home for b in plan.branches)
    inside: Counter[str] = Counter()
    for b in plan.branches:
        inside.update({prefix for layer in b.layers for prefix in _prefixes(layer.name)})
    names: dict[str, str] = {}
    for b in plan.branches:
        plain = b.name if b.name.partition("#")[0] else f"(model){b.name}"
        alone = homes[b.home] == 1 and b.home
        names[b.name] = plain if alone else _name_by_layers(b, inside) or plain
    counts = Counter(names.values())
    return {
        key: name if counts[name] == 1 or key == name else f"{name}#{key.partition('#')[2]}"
        for key, name in names.items()
    }


def _prefixes(name: str) -> list[str]:
    """The module names from the outermost to the module itself."""
    parts = name.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def _name_by_layers(branch: Branch, inside: Mapping[str, int]) -> str:
    """The outermost module below the sum's home that holds all layers of this branch and of no other; '' if none."""
    layers = list(dict.fromkeys(layer.name for layer in branch.layers))
    if not layers:
        return ""
    shared = [p for p in _prefixes(layers[0]) if all(f"{name}.".startswith(f"{p}.") for name in layers)]
    own = [p for p in shared if inside[p] == 1 and len(p) > len(branch.home)]
    if own:
        return own[0]
    if any(inside[name] > 1 for name in layers):  # the block is called several times
        times = inside[layers[0]]
        same = [p for p in shared if inside[p] == times]
        return same[0] if same and same[0] != branch.home else ""
    names = ", ".join(name.removeprefix(f"{shared[-1]}." if shared else "") for name in layers)
    return f"{shared[-1]} ({names})" if shared and len(layers) > 1 else names


_LEAF = nn.Identity()


class MissingSums(NamedTuple):
    """The modules without a residual sum although most modules like them have one, by what they return.

    `skipped` return f(x) or x alone, `constant` return x plus a constant.
    """

    skipped: list[str]
    constant: list[str]


FIRSTS = 3  # blocks that begin a list and have no sum: a design, as in networks with a skip from the second block on


@contextmanager
def find_missing_sums(modules: Mapping[str, nn.Module], plan: ResidualPlan) -> Iterator[MissingSums]:
    """Collect the modules that have no residual sum although most modules like them have one, while the model runs.

    Modules are alike if they have the same class, and the same name but for numbers. A module is collected if it
    returns the shape that it gets, so that it could add its input, and is not one of several first blocks without one.
    """
    named = {name for name in place_names(plan).values() if any(True for _ in modules.get(name, _LEAF).children())}
    homes = {branch.home for branch in plan.branches} | named  # named: in a loop of another module's forward pass
    inside = {p for b in plan.branches for layer in b.layers for p in _prefixes(layer.name) if len(p) > len(b.home)}
    kinds = {name: (name_pattern(name), type(module)) for name, module in modules.items() if name}
    with_sum = Counter(kinds[home] for home in homes if home in kinds)
    same_shape: dict[str, bool] = {}
    found = MissingSums([], [])

    def hook(name: str) -> Callable[..., None]:
        def compare(_m: nn.Module, args: Any, out: Any) -> None:
            if args and isinstance(args[0], Tensor) and isinstance(out, Tensor) and args[0].shape == out.shape:
                same_shape[name] = _adds_constant(args[0].detach(), out.detach())

        return compare

    handles = [
        modules[name].register_forward_hook(hook(name))
        for name, kind in kinds.items()
        if name not in homes | inside and with_sum[kind]
    ]
    try:
        yield found
        without = Counter(kinds[name] for name in same_shape)
        firsts = Counter(kind for name, kind in kinds.items() if name.endswith(".0") and name not in homes)
        for name, constant in same_shape.items():
            by_design = name.endswith(".0") and firsts[kinds[name]] >= FIRSTS
            if with_sum[kinds[name]] > without[kinds[name]] and not by_design:
                (found.constant if constant else found.skipped).append(name)
    finally:
        for handle in handles:
            handle.remove()


def _adds_constant(x: Tensor, out: Tensor) -> bool:
    """Whether a module adds the same to every sample of its input, and not zero."""
    with torch._C.DisableTorchFunction():  # an observer counts the model's additions, not these
        added = (out - x).float()
        spread = (added - added[:1]).abs().max()
        return bool((spread <= 1e-5 * x.abs().max()) & (added.abs().max() > spread))
