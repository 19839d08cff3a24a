"""The records of a conversion or a folding, which a plan has as `changes`; and a plan with its changes from JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import Any

from normfree.methods.method_registry import get, short_spec
from normfree.models.third_party import describe_error
from normfree.plan import Branch, Layer, Position, ResidualPlan
from normfree.report.tables import compact

_MOST_RESCALED = 3  # rescaled parameters that are printed by name


@dataclass(frozen=True)
class Removed:
    """A normalizer that was removed, or a layer that standardized its weight and became plain.

    Attributes:
        name: Its qualified name.
        kind: Its class.
        left: The classes of the modules in its place, 'nothing' if there are none.
    """

    name: str
    kind: str
    left: str = "nothing"


@dataclass(frozen=True)
class Added:
    """A scalar, bias or reparametrized weight that the conversion added.

    Attributes:
        name: The qualified name of the scalar's parameter, or of the layer.
        kind: A description, such as 'multiplier α'.
        value: The scalar's initial value, None for anything but a scalar.
        learnable: Whether the scalar is trained.
    """

    name: str
    kind: str
    value: float | None = None
    learnable: bool = False


@dataclass(frozen=True)
class Rescaled:
    """A parameter that the conversion rescaled or drew again.

    Attributes:
        name: Its qualified name.
        factor: The ratio of its new scale to its old one; 0 if the old scale was 0.
    """

    name: str
    factor: float


Record = Removed | Added | Rescaled


@dataclass(frozen=True, kw_only=True)
class Changes:
    """Everything that a conversion did to a model; `print` it for a summary.

    Attributes:
        method: The method with its options.
        removed: The normalizers that were removed, and the layers that standardized their weight and became plain.
        added: The scalars and reparametrized weights that were added.
        scaled: The parameters that were rescaled or drawn again.
        parameters_before: The number of parameters of the original.
        parameters_after: The number of parameters of the converted model.
        notes: Notes on unexpected effects, one sentence each.
    """

    method: str
    removed: tuple[Removed, ...] = ()
    added: tuple[Added, ...] = ()
    scaled: tuple[Rescaled, ...] = ()
    parameters_before: int = 0
    parameters_after: int = 0
    notes: tuple[str, ...] = ()

    @property
    def short_method(self) -> str:
        """The method with those options only that differ from their defaults, for texts."""
        return short_spec(self.method)

    def to_json(self) -> dict[str, Any]:
        """Convert the changes to plain data.

        Returns:
            The attributes by name; each record is a dictionary.
        """
        return asdict(self)

    @property
    def _keeps_weights(self) -> bool:
        """Whether the method puts a module in the place of each normalizer, and changes nothing else."""
        try:
            return get(self.method).norm is not None
        except ValueError:  # a method that is not registered here
            return False

    def __str__(self) -> str:
        """A few lines, with the number of changes of each kind."""
        lines = [f"converted by {self.short_method}: {self.parameters_before:,} → {self.parameters_after:,} parameters"]
        kept = self._keeps_weights
        lines += _line("replaced" if kept else "removed", (_removed(record, kept) for record in self.removed))
        lines += ["  kept     the weights of all other layers"] * kept
        lines += _line("added", (_added(record) for record in self.added))
        if self.scaled:
            names = ", ".join(
                f"{record.name} × {compact(record.factor)}" if record.factor else f"{record.name} (it was 0)"
                for record in self.scaled[:_MOST_RESCALED]
            )
            more = f" and {len(self.scaled) - _MOST_RESCALED} more" if len(self.scaled) > _MOST_RESCALED else ""
            lines.append(f"  scaled   {names}{more}")
        lines += [f"  note     {note}" for note in self.notes]
        if self.removed:
            lines.append("  next     the original's rate may be too high: normfree.find_lr(model, batches) finds one")
        return "\n".join(lines)


def _line(title: str, kinds: Iterable[str]) -> list[str]:
    counts = Counter(kinds)
    shown = ", ".join(f"{count} × {kind}" for kind, count in counts.items())
    return [f"  {title:<8} {shown}"] if counts else []


def _removed(record: Removed, replaced: bool) -> str:
    return f"{record.kind} by {record.left}" if replaced else record.kind


def _added(record: Added) -> str:
    if record.value is None:
        return record.kind
    return f"{record.kind} ({'learnable' if record.learnable else 'fixed'})"


@dataclass(frozen=True)
class FoldedModule:
    """A module that was folded away.

    Attributes:
        name: Its qualified name.
        kind: Its class.
        into: The layers that compute it now.
    """

    name: str
    kind: str
    into: tuple[str, ...] = ()


@dataclass(frozen=True)
class RemainingModule:
    """A module that could not be folded away, or not fully.

    Attributes:
        name: Its qualified name.
        kind: Its class.
        reason: Why it remains.
    """

    name: str
    kind: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Folding:
    """Everything that `fold_` or `fold_batchnorm` did to a model; `print` it for a summary.

    Attributes:
        folded: The modules that were folded away.
        kept: The modules that could not be folded, each with the reason; a batch norm among them became a
            `ChannelAffine`.
        padded: The layers whose zero padding became padding with a constant other than 0.
        plain: The reparametrized layers that became plain ones with the same weight.
    """

    folded: tuple[FoldedModule, ...] = ()
    kept: tuple[RemainingModule, ...] = ()
    padded: tuple[str, ...] = ()
    plain: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Convert the record to plain data.

        Returns:
            The attributes by name; each module is a dictionary.
        """
        return asdict(self)

    def __str__(self) -> str:
        """The number of folded modules, and each module that remains."""
        lines = [f"{len(self.folded)} of {len(self.folded) + len(self.kept)} folded"]
        if self.padded:
            lines.append(f"{len(self.padded)} layers padded with a constant")
        if self.plain:
            lines.append(f"{len(self.plain)} reparametrized layers made plain")
        lines += [f"kept {module.name} ({module.kind}): {module.reason}" for module in self.kept]
        return "\n".join(lines)


_NESTED: dict[type, dict[str, type]] = {  # the fields of a record that hold records themselves
    Branch: {
        "position": Position,
        **dict.fromkeys(("layers", "shortcut_layers", "first_layers", "last_layers"), Layer),
    },
    ResidualPlan: {"branches": Branch, **dict.fromkeys(("stem", "body", "classifier"), Layer)},
    Changes: {"removed": Removed, "added": Added, "scaled": Rescaled},
    Folding: {"folded": FoldedModule, "kept": RemainingModule},
}
_EARLIER_NAMES = {  # old names of fields, as in folders that earlier versions wrote
    "activated_in": "reads_activation",
    "activated_out": "feeds_activation",
    "around": "outer_branch",
    "aside": "other_parameters",
    "ends": "last_layers",
    "entries": "first_layers",
    "m": "degree",
    "merges": "merges_signals",
    "nonzero": "must_be_nonzero",
    "scales": "layer_scales",
    "share": "parallel_paths",
}


def plan_from_json(data: Mapping[str, Any]) -> ResidualPlan:
    """Read a plan and its changes from the plain data that `ResidualPlan.to_json` returned, now or in release 0.1.

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
    named = {_EARLIER_NAMES.get(name, name): value for name, value in data.items() if (name, value) != ("m", None)}
    if unknown := set(named) - {field.name for field in fields(kind)}:
        raise TypeError(f"{kind.__name__} has no {', '.join(sorted(unknown))}")
    values = {}
    for name, value in named.items():
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
