"""The residual plan: everything a method needs to know of a network, keyed by qualified names.

A plan is a frozen value. Our models state theirs (`Network.plan`); any other gets one from
`normfree.graph.discover`. Initializers read the plan and nothing else of a network's structure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

ShortcutKind = Literal["identity", "subsample", "projection", "parallel"]


@dataclass(frozen=True)
class Position:
    """Where a branch stands: l of L in the network, b of B_k in stage k, all counted from 1."""

    index: int
    total: int
    stage: int
    index_in_stage: int
    stage_size: int
    previous_stage_size: int = 0
    transition: bool = False


@dataclass(frozen=True)
class Layer:
    """One weight layer: its qualified name and whether an activation stands right before and right after it.

    `activated_in` is true when the layer's input comes out of an activation, whatever scalars, pooling or
    reshaping stand between; `activated_out` when everything that reads its output reads it through an activation
    before the next weight layer or sum.
    """

    name: str
    activated_in: bool = False
    activated_out: bool = False


@dataclass(frozen=True)
class Branch:
    """One residual sum: its branch's weight layers in order, and the shortcut that it is added to.

    The sum itself is addition number `addition` (from 0) in the forward pass of the module `home`; `branch_first` says
    whether the branch is the addition's first operand.
    """

    name: str
    position: Position
    layers: tuple[Layer, ...]
    shortcut: ShortcutKind = "identity"
    shortcut_layers: tuple[Layer, ...] = ()
    home: str = ""
    addition: int = 0
    branch_first: bool = False

    @property
    def place(self) -> str:
        """The module in whose forward pass the sum stands: `home`, or what the name says where none was given.

        A sum in the model's own forward pass has the home '' and a name that is '' or '#2'.
        """
        return self.home or self.name.partition("#")[0]

    @property
    def depth(self) -> int:
        """The number of weight layers, m in Fixup's exponent."""
        return len(self.layers)

    @property
    def last(self) -> Layer:
        """The weight layer whose output is added to the shortcut."""
        if not self.layers:
            raise ValueError(
                f"branch '{self.name}' has no weight layer: expected at least one, got a removed branch; "
                "use a method that does not touch branches here"
            )
        return self.layers[-1]


@dataclass(frozen=True)
class ResidualPlan:
    """The branches of a network in order of depth, and the weight layers outside them.

    `stem` comes before the first branch, `classifier` is the last layer, and `body` holds every other layer outside
    the branches (all hidden layers of a plain, dense or highway network).
    """

    branches: tuple[Branch, ...] = ()
    stem: tuple[Layer, ...] = ()
    body: tuple[Layer, ...] = ()
    classifier: tuple[Layer, ...] = ()

    @property
    def stage_sizes(self) -> tuple[int, ...]:
        """The number of branches of each stage, B_1, B_2, …"""
        return tuple(b.position.stage_size for b in self.branches if b.position.index_in_stage == 1)

    def layers(self) -> Iterator[Layer]:
        """Every weight layer in the order the signal meets it (a shortcut's before its branch's)."""
        yield from self.stem
        for branch in self.branches:
            yield from branch.shortcut_layers
            yield from branch.layers
        yield from self.body
        yield from self.classifier

    def hidden(self) -> Iterator[Layer]:
        """Every weight layer but the classifier."""
        last = set(self.classifier)
        return (layer for layer in self.layers() if layer not in last)

    def require_branches(self, method: str) -> None:
        """Raise `ValueError` when there is no residual branch for `method` to work on."""
        if not self.branches:
            raise ValueError(
                f"method '{method}' expects a network with residual branches, but the plan is empty: no residual sum "
                "was found; use a method that admits plain networks, such as 'he_in', 'wn' or 'batchnorm'"
            )

    def require_sums(self) -> None:
        """Raise `ValueError` when there is no residual sum to look at."""
        if not self.branches:
            raise ValueError(
                "expected a network with residual sums, got none: its layers follow one another, concatenate or are "
                "gated; pass a plan with the sums to look at"
            )

    def to_json(self) -> dict[str, Any]:
        """The plan as plain data."""
        return asdict(self)

    def __str__(self) -> str:
        """A tree of stages, with runs of alike branches on one line."""
        if not self.branches:
            return f"no residual branches, {sum(1 for _ in self.layers())} weight layers"
        lines = [f"{len(self.branches)} residual branches in {len(self.stage_sizes)} stages"]
        lines += [f"├─ stem        {layer.name}" for layer in self.stem]
        for run in _runs(self.branches):
            first, final = run[0], run[-1]
            names = first.name if len(run) == 1 else f"{first.name} … {final.name}"
            layers = ", ".join(layer.name.removeprefix(first.name + ".") for layer in first.layers) or "removed"
            lines.append(f"├─ stage {first.position.stage}: {len(run)} × [{layers}] + {first.shortcut}  ({names})")
        lines += [f"├─ body        {layer.name}" for layer in self.body]
        lines += [f"└─ classifier  {layer.name}" for layer in self.classifier]
        return "\n".join(lines)


def _runs(branches: Sequence[Branch]) -> list[list[Branch]]:
    """Neighbours of one stage, with one kind of shortcut and one depth, together."""
    runs: list[list[Branch]] = []
    for branch in branches:
        previous = runs[-1][-1] if runs else None
        if previous and (previous.position.stage, previous.shortcut, previous.depth) == (
            branch.position.stage,
            branch.shortcut,
            branch.depth,
        ):
            runs[-1].append(branch)
        else:
            runs.append([branch])
    return runs


def positions(stage_sizes: Sequence[int], transitions: Sequence[bool]) -> tuple[Position, ...]:
    """Number the branches of a network with the given stages; `transitions` says which change the shape.

    >>> [(p.index, p.stage, p.index_in_stage) for p in positions([1, 2], [False, True, False])]
    [(1, 1, 1), (2, 2, 1), (3, 2, 2)]
    """
    total = sum(stage_sizes)
    if len(transitions) != total:
        raise ValueError(
            f"expected one transition flag a branch ({total} for stages {list(stage_sizes)}), got {len(transitions)}; "
            "pass a flag for every branch, False where the shape stays"
        )
    flags = iter(transitions)
    out: list[Position] = []
    for stage, size in enumerate(stage_sizes, start=1):
        previous = stage_sizes[stage - 2] if stage > 1 else 0
        for within in range(1, size + 1):
            out.append(Position(len(out) + 1, total, stage, within, size, previous, next(flags)))
    return tuple(out)
