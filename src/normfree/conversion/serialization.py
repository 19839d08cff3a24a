"""Plans and examples as plain data: what a folder keeps, so that a conversion can be done again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from torch import Tensor

from normfree.conversion.changes import Added, Changes, Removed, Scaled
from normfree.conversion.folding.summary import Fold, Folding, Kept
from normfree.plan import Branch, Layer, Position, ResidualPlan

_RECORDS: dict[type, dict[str, type]] = {  # the fields of a record that hold records themselves
    Branch: {"position": Position, "layers": Layer, "shortcut_layers": Layer, "entries": Layer, "ends": Layer},
    ResidualPlan: {"branches": Branch, "stem": Layer, "body": Layer, "classifier": Layer},
    Changes: {"removed": Removed, "added": Added, "scaled": Scaled},
    Folding: {"folded": Fold, "kept": Kept},
}


def plan_from_json(data: Mapping[str, Any]) -> ResidualPlan:
    """The plan that `ResidualPlan.to_json` gave, with its changes.

    Raises `ValueError` for data that is none.
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
    """A record from its fields, those with records inside too; lists become tuples, as they were."""
    inner = _RECORDS.get(kind, {})
    unknown = set(data) - {field.name for field in fields(kind)}
    if unknown:
        raise TypeError(f"{kind.__name__} has no {', '.join(sorted(unknown))}")
    values = {}
    for name, value in data.items():
        if isinstance(value, list):
            values[name] = tuple(_record(inner[name], item) if name in inner else item for item in value)
        else:
            values[name] = _record(inner[name], value) if name in inner else value
    return kind(**values)


def pack_example(example: Any) -> tuple[dict[str, Tensor], Any]:
    """The tensors of an example under names, and the rest as plain data that says where each of them stands.

    >>> import torch
    >>> pack_example({"ids": torch.zeros(1), "cached": False})[1]
    {'dict': {'ids': {'tensor': 'ids'}, 'cached': {'value': False}}}

    Raises `ValueError` for anything but tensors, plain values, and tuples, lists and dicts of them.
    """
    tensors: dict[str, Tensor] = {}

    def pack(value: Any, name: str) -> dict[str, Any]:
        if isinstance(value, Tensor):
            tensors[name] = value.detach()
            return {"tensor": name}
        if isinstance(value, Mapping):
            return {"dict": {str(key): pack(item, f"{name}.{key}".lstrip(".")) for key, item in value.items()}}
        if isinstance(value, tuple | list):
            packed = [pack(item, f"{name}.{i}".lstrip(".")) for i, item in enumerate(value)]
            return {"tuple" if isinstance(value, tuple) else "list": packed}
        if isinstance(value, str | int | float | bool | None):
            return {"value": value}
        raise ValueError(
            f"expected an example of tensors and plain values, got {type(value).__name__}"
            f"{f' at {name!r}' if name else ''}; leave it out or turn it into tensors"
        )

    packed = pack(example, "")
    if "" in tensors:
        return {"input": tensors[""]}, {"tensor": "input"}
    return tensors, packed


def unpack_example(tensors: Mapping[str, Tensor], packed: Any) -> Any:
    """The example that `pack_example` took apart.

    Raises `ValueError` where the two do not belong together.
    """
    try:
        ((kind, value),) = packed.items()
        if kind == "tensor":
            return tensors[value]
        if kind == "dict":
            return {key: unpack_example(tensors, item) for key, item in value.items()}
        if kind in ("tuple", "list"):
            items = [unpack_example(tensors, item) for item in value]
            return tuple(items) if kind == "tuple" else items
        if kind == "value":
            return value
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"expected an example as it was stored, got another ({error})") from error
    raise ValueError(f"expected an example as it was stored, got '{kind}' in it")
