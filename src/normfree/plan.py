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
    """One weight layer: where its weight is held, and whether an activation stands right before and right after it.

    `activated_in` is true when the layer's input comes out of an activation, whatever scalars, pooling or
    reshaping stand between; `activated_out` when everything that reads its output reads it through an activation
    before the next weight layer or sum.

    The weight is the attribute `parameter` of the module `name`. It holds `parts` equal matrices, stacked along the
    outputs (3 for a fused query, key and value), and is stored as (in, out) when `transposed`. A `gate` reaches the sum
    only as a bounded factor (squeeze and excitation), or the output where it is in no branch. The weight of a `tied`
    layer is an embedding's too.
    """

    name: str
    activated_in: bool = False
    activated_out: bool = False
    parameter: str = "weight"
    parts: int = 1
    transposed: bool = False
    gate: bool = False
    tied: bool = False

    @property
    def path(self) -> str:
        """The qualified name of the weight itself, a key of the model's parameters."""
        return f"{self.name}.{self.parameter}" if self.name else self.parameter


@dataclass(frozen=True)
class Branch:
    """One residual sum: its branch's weight layers in order, and the shortcut that it is added to.

    A branch has no layers where it was removed, and where all of them belong to sums inside it, as in x + blocks(x).
    It counts as any other, in positions and in L: what a method does to the sums inside is then rather too small.

    The sum itself is addition number `addition` (from 0) in the forward pass of the module `home`; `branch_first` says
    whether the branch is the addition's first operand.

    `m` is the branch's degree in its weights where that is not the number of its layers without gates. `entries` are
    the layers that read the branch's input (query, key and value), `ends` those whose output is added to the shortcut;
    where they are not given, the first layer and the last that is no gate. `around` is the name of the branch that this
    sum is part of, where a longer skip connection goes around it.
    """

    name: str
    position: Position
    layers: tuple[Layer, ...]
    shortcut: ShortcutKind = "identity"
    shortcut_layers: tuple[Layer, ...] = ()
    home: str = ""
    addition: int = 0
    branch_first: bool = False
    m: int | None = None
    entries: tuple[Layer, ...] = ()
    ends: tuple[Layer, ...] = ()
    around: str | None = None

    def __post_init__(self) -> None:
        if not self.entries:
            object.__setattr__(self, "entries", self.layers[:1])
        if not self.ends:
            straight = [layer for layer in self.layers if not layer.gate]
            object.__setattr__(self, "ends", tuple(straight[-1:]) or self.layers[-1:])

    @property
    def place(self) -> str:
        """The module in whose forward pass the sum stands: `home`, or what the name says where none was given.

        A sum in the model's own forward pass has the home '' and a name that is '' or '#2'.
        """
        return self.home or self.name.partition("#")[0]

    @property
    def depth(self) -> int:
        """The branch's degree in its weights, m in Fixup's exponent: 4 for attention, 2 for two layers in a row."""
        return sum(not layer.gate for layer in self.layers) if self.m is None else self.m

    @property
    def last(self) -> Layer:
        """The weight layer whose output is added to the shortcut, the last one where there are several."""
        if not self.layers:
            raise ValueError(
                f"branch '{self.name}' has no weight layer of its own: expected at least one, got a removed branch or "
                "one of whole blocks; use a method that does not touch branches here"
            )
        return self.ends[-1]


@dataclass(frozen=True)
class ResidualPlan:
    """The branches of a network in order of depth, and the weight layers outside them.

    `stem` comes before the first branch, `classifier` is the last layer, and `body` holds every other layer outside
    the branches (all hidden layers of a plain, dense or highway network). `aside` names the parameters of two or more
    dimensions that multiply nothing: embeddings, tokens, position biases. `changes` is what a conversion has done.
    """

    branches: tuple[Branch, ...] = ()
    stem: tuple[Layer, ...] = ()
    body: tuple[Layer, ...] = ()
    classifier: tuple[Layer, ...] = ()
    aside: tuple[str, ...] = ()
    changes: Any = None

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
                "expected a network with residual sums, got none: its layers follow one another, concatenate, are "
                "gated, or meet in another way than by + and - (lerp, addcmul, a stack); write the sums as x + f(x)"
            )

    def to_json(self) -> dict[str, Any]:
        """The plan as plain data."""
        return asdict(self)

    def __str__(self) -> str:
        """A tree of stages, with runs of alike branches on one line."""
        done = [] if self.changes is None else [str(self.changes)]
        if not self.branches:
            return "\n".join([f"no residual branches, {sum(1 for _ in self.layers())} weight layers", *done])
        stages = len(self.stage_sizes)
        lines = [f"{len(self.branches)} residual branches in {stages} stage{'s' if stages > 1 else ''}"]
        lines += [f"├─ stem        {_label(layer)}" for layer in self.stem]
        for group in _groups(self.branches):
            lines += group.lines()
        lines += [f"├─ body        {_label(layer)}" for layer in self.body]
        lines += [f"└─ classifier  {_label(layer)}" for layer in self.classifier]
        return "\n".join([*lines, *done])


@dataclass(frozen=True)
class _Group:
    """Neighbouring branches that repeat a pattern (attention, feed-forward) a number of times."""

    pattern: Sequence[Branch]
    times: int
    last: Branch

    def lines(self) -> list[str]:
        """One line for a pattern of one branch; a line a branch under a heading for a longer one."""
        first = self.pattern[0]
        names = first.name if first is self.last else f"{first.name} … {self.last.name}"
        head = f"├─ stage {first.position.stage}: {self.times} ×"
        if len(self.pattern) == 1:
            return [f"{head} {_describe(first)}  ({names})"]
        return [f"{head} {len(self.pattern)} branches  ({names})", *[f"│     {_describe(b)}" for b in self.pattern]]


def _describe(branch: Branch) -> str:
    """The layers of a branch, m where it is not their number, and the shortcut."""
    layers = ", ".join(_label(layer, branch.place) for layer in branch.layers) or "no layers of its own"
    m = f" m = {branch.depth}" if branch.depth != len(branch.layers) else ""
    return f"[{layers}]{m} + {branch.shortcut}"


def _label(layer: Layer, place: str = "") -> str:
    """A layer's name inside `place`, with what is unusual about its weight."""
    path = layer.name if layer.parameter == "weight" else layer.path
    marks = [f" ×{layer.parts}"] * (layer.parts > 1) + [" (gate)"] * layer.gate + [" (tied)"] * layer.tied
    return path.removeprefix(f"{place}." if place else "") + "".join(marks)


def _groups(branches: Sequence[Branch], longest: int = 4) -> list[_Group]:
    """Split the branches into repeated patterns, at each place the one of at most `longest` that covers most."""
    keys = [(b.position.stage, b.shortcut, b.depth, len(b.layers)) for b in branches]
    groups: list[_Group] = []
    start = 0
    while start < len(keys):
        covered = {period: _covered(keys, start, period) for period in range(1, longest + 1)}
        period = max(covered, key=lambda p: (covered[p] if covered[p] > p else 1 / p, -p))
        stop = start + max(covered[period], 1)
        groups.append(_Group(branches[start : start + period], (stop - start) // period, branches[stop - 1]))
        start = stop
    return groups


def _covered(keys: Sequence[object], start: int, period: int) -> int:
    """How many places from `start` on repeat the first `period` of them, in whole periods."""
    stop = start + period
    while stop < len(keys) and keys[stop] == keys[stop - period]:
        stop += 1
    return (min(stop, len(keys)) - start) // period * period


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
