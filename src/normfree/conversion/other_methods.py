"""Advice after a refusal: which other methods convert the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from normfree.conversion.forward_passes import FoundBy
from normfree.methods import get

if TYPE_CHECKING:
    from normfree.conversion.pipeline import Conversion

_SUGGESTED_METHODS = ("fixup", "skipinit", "rezero", "nf", "wn", "dyt", "lsuv:by=layer")
_MOST_PARAMETERS_TO_TRY = 200_000_000  # of a model on which other methods are tried
_MOST_PARAMETERS_TO_CONFIRM = 50_000_000  # the same, for methods that are recommended even if they were not tried
_COSTS: dict[FoundBy, int] = {"forward": 2, "backward": 4, "zeros": 7}  # the cost of an attempt, in forward passes


def advise(conversion: Conversion, found_by: FoundBy) -> str:
    """Advice on a refused model: standardize the data, or use one of the methods that convert the model.

    Each method that the rules allow is tried, until the limit of passes is reached. An attempt repeats the passes that
    found the obstacle, or runs a forward pass only if the obstacle cannot occur with this method:
    - Rules found the obstacle, and they allow this method.
    - The obstacle is zeros that stay zero, and this method sets nothing to zero.
    - The refused method keeps the original weights, and this method draws new ones.
    In these cases a method is recommended even if the limit or the size of the model leaves no pass for it. There are
    two exceptions: rules do not know the scale of the original weights, so a method that keeps them must be tried; and
    data of an unusual size may be an obstacle to any method. Such a method is listed as not tried.
    """
    inspection = conversion.inspection
    if remedy := inspection.data_scale_remedy():
        return f"; {remedy}"
    passes, example = conversion.verification.passes, conversion.verification.passes.small
    attempts: dict[str, tuple[bool, int, Conversion]] = {}  # whether it needs no attempt, and the cost
    for name in _SUGGESTED_METHODS:
        method = get(name)
        from_data = not inspection.plan.branches and isinstance(example, Tensor)  # lsuv lets deep sums explode
        if method.name == conversion.method.name or (method.needs_example and not from_data):
            continue
        other = replace(conversion, method=method, example=example, records=[], notes=[])
        try:
            other.raise_if_impossible()
        except ValueError:
            continue
        avoids = conversion.keeps_layers or found_by == "rules" or (found_by == "zeros" and not other.starts_at_zero)
        other.attempt = "forward" if avoids else found_by
        trusted = avoids and not other.keeps_layers and inspection.has_usual_data
        attempts[name] = trusted, _COSTS[other.attempt] + method.needs_example, other
    usable: list[str] = []
    untried: list[str] = []
    for name, (trusted, cost, other) in sorted(attempts.items(), key=lambda item: item[1][:2]):
        limit = _MOST_PARAMETERS_TO_CONFIRM if trusted else _MOST_PARAMETERS_TO_TRY
        if inspection.parameters > limit or not passes.allows(cost):
            (usable if trusted else untried).append(name)
        elif other.try_and_undo():
            usable.append(name)
    usable, untried = ([name for name in _SUGGESTED_METHODS if name in found] for found in (usable, untried))
    if not usable and not untried:
        others = [name for name in _SUGGESTED_METHODS if get(name).name != conversion.method.name]
        return f"; none of the other methods converts it ({_join(others, 'and')})"
    remedy = f"; use {_join(usable, 'or')}" if usable else ""
    were = "was" if len(untried) == 1 else "were"
    return f"{remedy}; {_join(untried, 'and')} {were} not tried" if untried else remedy


def _join(names: Sequence[str], word: str) -> str:
    """Names in a sentence: `'a', 'b' or 'c'`."""
    *first, last = (f"'{name}'" for name in names)
    return f"{', '.join(first)} {word} {last}" if first else last
