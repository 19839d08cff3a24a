"""What a folding did: which modules vanished and into what, and which had to stay, with the reason."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Fold:
    """A module that is gone, and the layers that took what it did."""

    name: str
    kind: str
    into: tuple[str, ...] = ()


@dataclass(frozen=True)
class Kept:
    """A module that stayed, or left a fixed rest behind, and why."""

    name: str
    kind: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Folding:
    """What `fold_` or `fold_batchnorm` did to a model.

    `padded` names the layers whose zero padding became padding with another constant, `plain` the reparametrized layers
    that became plain ones with the same weight.
    """

    folded: tuple[Fold, ...] = ()
    kept: tuple[Kept, ...] = ()
    padded: tuple[str, ...] = ()
    plain: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The record as plain data."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"{len(self.folded)} of {len(self.folded) + len(self.kept)} folded"]
        if self.padded:
            lines.append(f"{len(self.padded)} layers padded with a constant")
        if self.plain:
            lines.append(f"{len(self.plain)} reparametrized layers made plain")
        lines += [f"kept {kept.name} ({kept.kind}): {kept.reason}" for kept in self.kept]
        return "\n".join(lines)
