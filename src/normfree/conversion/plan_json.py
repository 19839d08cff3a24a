"""Read a plan, and the record of its changes, from plain data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from normfree.conversion.changes import Added, Changes, FoldedModule, Folding, RemainingModule, Removed, Rescaled
from normfree.models.third_party import describe_error
from normfree.plan import Branch, Layer, Position, ResidualPlan

_NESTED: dict[type, dict[str, type]] = {  # the fields of a record that hold records themselves
    Branch: {"position": Position, "layers": Layer, "shortcut_layers": Layer, "entries": Layer, "ends": Layer},
    ResidualPlan: {"branches": Branch, "stem": Layer, "body": Layer, "classifier": Layer},
    Changes: {"removed": Removed, "added": Added, "scaled": Rescaled},
    Folding: {"folded": FoldedModule, "kept": RemainingModule},
}


def plan_from_json(data: Mapping[str, Any]) -> ResidualPlan:
    """Read a plan and its changes from the plain data that `ResidualPlan.to_json` returned.

    Raises:
        ValueError: If the data is not a plan.
    """
    try:
        rest = dict(data)
        changes = rest.pop("changes", None)
        if changes is not None:
            rest["changes"] = _record(Changes if "method" in changes else Folding, changes)
        plan: ResidualPlan = _record(ResidualPlan, rest)
    except (TypeError, AttributeError) as error:
        raise ValueError(f"expected a plan as plain data, got something else ({error})") from error
    return plan


def _record(kind: type, data: Mapping[str, Any]) -> Any:
    """Build a record, and the records inside it, from plain data; lists become tuples again."""
    nested = _NESTED.get(kind, {})
    unknown = set(data) - {field.name for field in fields(kind)}
    if unknown:
        raise TypeError(f"{kind.__name__} has no {', '.join(sorted(unknown))}")
    values = {}
    for name, value in data.items():
        if isinstance(value, list):
            values[name] = tuple(_record(nested[name], item) if name in nested else item for item in value)
        else:
            values[name] = _record(nested[name], value) if name in nested else value
    return kind(**values)


@contextmanager
def explained_plan_errors() -> Iterator[None]:
    """Replace the errors that a plan with wrong names or values causes by one sentence.

    Raises:
        ValueError: In place of such an error.
    """
    try:
        yield
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError(
            f"expected a stored plan that fits the model, got one that cannot be repeated ({describe_error(error)}); "
            "save the model again"
        ) from error
