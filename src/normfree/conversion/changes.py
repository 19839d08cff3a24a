"""What a conversion did to a model: plain records, kept with its plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Removed:
    """A normalizer that is gone: its qualified name, its class, and what stands in its place."""

    name: str
    kind: str
    left: str = "nothing"


@dataclass(frozen=True)
class Added:
    """Something new at a module: a scalar with its initial value, or a reparametrized weight."""

    name: str
    kind: str
    value: float | None = None
    learnable: bool = False


@dataclass(frozen=True)
class Scaled:
    """A part that stayed and starts at another scale: `factor` times what it was, or anew where it was 0."""

    name: str
    factor: float  # 0 where it was 0


@dataclass(frozen=True, kw_only=True)
class Changes:
    """Everything that a conversion removed, added and scaled; parameters are counted before and after.

    `notes` say in a sentence each what a reader would not expect.
    """

    method: str
    removed: tuple[Removed, ...] = ()
    added: tuple[Added, ...] = ()
    scaled: tuple[Scaled, ...] = ()
    parameters_before: int = 0
    parameters_after: int = 0
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The changes as plain data."""
        return asdict(self)

    def __str__(self) -> str:
        """A few lines: kinds with their numbers, not names."""
        lines = [f"converted by {self.method}: {self.parameters_before:,} → {self.parameters_after:,} parameters"]
        lines += _line("removed", (record.kind for record in self.removed))
        lines += _line("added", (_added(record) for record in self.added))
        if self.scaled:
            names = ", ".join(
                f"{record.name} × {record.factor:.3g}" if record.factor else f"{record.name} anew (it was 0)"
                for record in self.scaled[:3]
            )
            more = f" and {len(self.scaled) - 3} more" if len(self.scaled) > 3 else ""
            lines.append(f"  scaled   {names}{more}")
        return "\n".join([*lines, *[f"  note     {note}" for note in self.notes]])


def _line(title: str, kinds: Iterable[str]) -> list[str]:
    counts = Counter(kinds)
    shown = ", ".join(f"{count} × {kind}" for kind, count in counts.items())
    return [f"  {title:<8} {shown}"] if counts else []


def _added(record: Added) -> str:
    return (
        f"{record.kind} ({'learnable' if record.learnable else 'fixed'})" if record.value is not None else record.kind
    )
