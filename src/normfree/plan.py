"""The residual plan: the structure of a network as methods need it, keyed by qualified names.

A plan is immutable. The models of normfree have one (`model.plan`); for any other, `normfree.discover` makes one.
Initializers know the structure of a network from its plan alone. A converted model remembers its plan
(`remember_plan_`), so that parameter groups, clipping, diagnosis and saving need only the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Literal

from normfree.report.tables import notebook_html

ShortcutKind = Literal["identity", "subsample", "upsample", "projection", "parallel"]
_PLAN, _EXAMPLE = "_normfree_plan", "_normfree_example"  # the attributes of a model that remembers its plan


@dataclass(frozen=True)
class Position:
    """The position of a branch: l of L in the network, b of B_k in stage k, all counted from 1.

    Attributes:
        index: l.
        total: L.
        stage: k.
        index_in_stage: b.
        stage_size: B_k.
        previous_stage_size: B_{k-1}, or 0 in the first stage.
        transition: Whether the block changes the shape.
    """

    index: int
    total: int
    stage: int
    index_in_stage: int
    stage_size: int
    previous_stage_size: int = 0
    transition: bool = False


@dataclass(frozen=True)
class Layer:
    """One weight layer, and whether activations precede and follow it.

    Attributes:
        name: The qualified name of the module that holds the weight.
        reads_activation: Whether the layer's input comes out of an activation, perhaps through scalars, pooling or a
            change of shape.
        feeds_activation: Whether every path from the layer's output passes an activation before the next weight layer
            or sum.
        parameter: The name of the weight in the module.
        parts: The number of equal matrices in the weight, stacked along the outputs; 3 for a fused query, key and
            value.
        transposed: Whether the weight is stored as (in, out).
        gate: Whether the layer's output acts on the sum (outside of branches: on the network's output) only as a
            bounded factor, as in squeeze and excitation.
        tied: Whether an embedding shares the weight.
        must_be_nonzero: Whether the layer would never learn, or divide 0 by 0, if its weight were 0: an activation or a
            division by its own norm lies between it and the sum or the network's output.
        parallel_paths: The number of paths, its own included, that are added up and form one layer.
        modulates: Whether its output, one vector per sample, multiplies all positions of a signal, as in adaptive layer
            norm.
    """

    name: str
    reads_activation: bool = False
    feeds_activation: bool = False
    parameter: str = "weight"
    parts: int = 1
    transposed: bool = False
    gate: bool = False
    tied: bool = False
    must_be_nonzero: bool = False
    parallel_paths: int = 1
    modulates: bool = False

    @property
    def path(self) -> str:
        """The qualified name of the weight, a key of the model's parameters."""
        return f"{self.name}.{self.parameter}" if self.name else self.parameter


@dataclass(frozen=True)
class Branch:
    """One residual sum: the weight layers of its branch, in order, and its shortcut.

    A branch has no layers if it was removed, or if it is an outer skip, x + blocks(x): all its layers then belong to
    sums inside it. It counts in positions and in L like any other, so methods scale the inner sums slightly too small.

    Attributes:
        name: The qualified name of the sum.
        position: The position in the network.
        layers: The weight layers of the branch.
        shortcut: The kind of shortcut.
        shortcut_layers: The weight layers of the shortcut.
        home: The module whose forward pass contains the sum; by default the module in the name.
        addition: The number of the addition in that forward pass, from 0.
        branch_first: Whether the branch is the addition's first operand.
        degree: The branch's degree in its weights, m in Fixup's exponent: 2 for two layers in a row, 4 for attention.
            By default the number of its layers without the gates.
        first_layers: The layers that read the branch's input (query, key and value); by default the first.
        last_layers: The layers whose output is added to the shortcut; by default the last that is not a gate.
        outer_branch: The name of the branch that contains this sum, if a longer skip connection goes around it.
        layer_scales: The names of its layer scales: learnable vectors or numbers that multiply the branch's output.
        merges_signals: Whether branch and shortcut both carry the signal, because the branch contains sums that contain
            sums (the long skip of a U-Net that adds), or because its output is also used outside of the sum (a level of
            a feature pyramid). Such a branch starts at unit variance, not at 0.
    """

    name: str
    position: Position
    layers: tuple[Layer, ...]
    shortcut: ShortcutKind = "identity"
    shortcut_layers: tuple[Layer, ...] = ()
    home: str = ""
    addition: int = 0
    branch_first: bool = False
    degree: int = -1
    first_layers: tuple[Layer, ...] = ()
    last_layers: tuple[Layer, ...] = ()
    outer_branch: str | None = None
    layer_scales: tuple[str, ...] = ()
    merges_signals: bool = False

    def __post_init__(self) -> None:
        straight = tuple(layer for layer in self.layers if not layer.gate)
        defaults = {
            "home": self.home or self.name.partition("#")[0],  # '' for a sum in the model's own forward pass
            "degree": len(straight) if self.degree < 0 else self.degree,
            "first_layers": self.first_layers or self.layers[:1],
            "last_layers": self.last_layers or straight[-1:] or self.layers[-1:],
        }
        for name, value in defaults.items():
            object.__setattr__(self, name, value)

    @property
    def depth(self) -> int:
        """The name of `degree` in release 0.1."""
        return self.degree

    @property
    def last(self) -> Layer:
        """The weight layer whose output is added to the shortcut, the last one of several.

        Raises:
            ValueError: If the branch has no layers of its own.
        """
        if not self.layers:
            raise ValueError(
                f"branch '{self.name}' has no weight layer of its own: expected at least one, got a removed branch or "
                "an outer skip, x + blocks(x); use a method that does not initialize branches"
            )
        return self.last_layers[-1]


@dataclass(frozen=True, repr=False)
class ResidualPlan:
    """The residual branches of a network, in order of depth, and the weight layers outside them.

    `print(plan)` shows it as a tree. `normfree.discover` makes one for any model.

    Attributes:
        branches: The residual branches.
        stem: The weight layers before the first branch.
        body: The other layers outside the branches: all hidden layers of a plain, dense or highway network.
        classifier: The output layers: the classifier, or every head.
        other_parameters: The names of parameters with two or more dimensions that are no weights of layers: embeddings,
            tokens, position biases.
        changes: The changes that a conversion made, or None.
    """

    branches: tuple[Branch, ...] = ()
    stem: tuple[Layer, ...] = ()
    body: tuple[Layer, ...] = ()
    classifier: tuple[Layer, ...] = ()
    other_parameters: tuple[str, ...] = ()
    changes: Any = None

    @property
    def stage_sizes(self) -> tuple[int, ...]:
        """The number of branches in each stage, B_1, B_2, …"""
        return tuple(b.position.stage_size for b in self.branches if b.position.index_in_stage == 1)

    def layers(self) -> Iterator[Layer]:
        """Iterate over all weight layers in the order of the signal; a shortcut's come before its branch's.

        Returns:
            An iterator over layers.
        """
        yield from self.stem
        for branch in self.branches:
            yield from branch.shortcut_layers
            yield from branch.layers
        yield from self.body
        yield from self.classifier

    def hidden(self) -> Iterator[Layer]:
        """Iterate over all weight layers but the classifier.

        Returns:
            An iterator over layers.
        """
        last = set(self.classifier)
        return (layer for layer in self.layers() if layer not in last)

    def require_branches(self, method: str) -> None:
        """Check that there are residual branches, for a method that needs them.

        Args:
            method: The method's name, for the message.

        Raises:
            ValueError: If there are none.
        """
        if not self.branches:
            raise ValueError(
                f"method '{method}' expects a network with residual branches, but the plan is empty: no residual sum "
                "was found; use a method for plain networks, such as 'he_in', 'wn' or 'batchnorm'"
            )

    def require_sums(self) -> None:
        """Check that there are residual sums, for a measurement of them.

        Raises:
            ValueError: If there are none.
        """
        if not self.branches:
            raise ValueError(
                "expected a network with residual sums, got none: its layers follow one another, concatenate, are "
                "gated, or are added by operations other than + and - (lerp, stack); write sums as x + f(x)"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> ResidualPlan:
        """Return the plan itself, because it is immutable."""
        return self

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain data.

        Returns:
            A dictionary of lists, dictionaries, texts and numbers.
        """
        return asdict(self)

    def __repr__(self) -> str:
        method = f", converted by {self.changes.short_method!r}" if hasattr(self.changes, "short_method") else ""
        return f"ResidualPlan({len(self.branches)} branches, {sum(1 for _ in self.layers())} weight layers{method})"

    def _repr_html_(self) -> str:
        return notebook_html(repr(self), text=str(self))

    def __str__(self) -> str:
        """Return a tree of stages in which repeated branches share a line."""
        changes = [] if self.changes is None else [str(self.changes)]
        if not self.branches:
            return "\n".join([f"no residual branches, {sum(1 for _ in self.layers())} weight layers", *changes])
        stages = len(self.stage_sizes)
        lines = [f"{len(self.branches)} residual branches in {stages} stage{'s' if stages > 1 else ''}"]
        lines += [f"├─ stem        {_label(layer)}" for layer in self.stem]
        for repetition in _repetitions(self.branches):
            lines += repetition.lines()
        lines += [f"├─ body        {_label(layer)}" for layer in self.body]
        lines += [f"└─ classifier  {_label(layer)}" for layer in self.classifier]
        return "\n".join([*lines, *changes])


@dataclass(frozen=True)
class _Repetition:
    """Consecutive branches that repeat a pattern, such as attention and feed-forward."""

    pattern: Sequence[Branch]
    times: int
    last: Branch

    def lines(self) -> list[str]:
        """Return one line for a pattern of one branch; for a longer pattern, a heading and one line per branch."""
        first = self.pattern[0]
        names = first.name if first is self.last else f"{first.name} … {self.last.name}"
        head = f"├─ stage {first.position.stage}: {self.times} ×"
        if len(self.pattern) == 1:
            return [f"{head} {_describe(first)}  ({names})"]
        return [f"{head} {len(self.pattern)} branches  ({names})", *[f"│     {_describe(b)}" for b in self.pattern]]


def _describe(branch: Branch) -> str:
    """Return a branch's layers, m if it differs from their number, and the shortcut."""
    layers = ", ".join(_label(layer, branch.home) for layer in branch.layers) or "no layers of its own"
    m = f" m = {branch.degree}" if branch.degree != len(branch.layers) else ""
    return f"[{layers}]{m} + {branch.shortcut}"


def _label(layer: Layer, place: str = "") -> str:
    """Return a layer's name relative to `place`, with marks for a fused, gating or tied weight."""
    path = layer.name if layer.parameter == "weight" else layer.path
    marks = [f" ×{layer.parts}"] * (layer.parts > 1) + [" (gate)"] * layer.gate + [" (tied)"] * layer.tied
    return path.removeprefix(f"{place}." if place else "") + "".join(marks)


def _repetitions(branches: Sequence[Branch], longest: int = 4) -> list[_Repetition]:
    """Split the branches into repeated patterns: at each place, the pattern of at most `longest` that covers most."""
    keys = [(b.position.stage, b.shortcut, b.degree, len(b.layers)) for b in branches]
    found: list[_Repetition] = []
    start = 0
    while start < len(keys):
        covered = {period: _covered(keys, start, period) for period in range(1, longest + 1)}
        period = max(covered, key=lambda p: (covered[p] if covered[p] > p else 1 / p, -p))
        stop = start + max(covered[period], 1)
        found.append(_Repetition(branches[start : start + period], (stop - start) // period, branches[stop - 1]))
        start = stop
    return found


def _covered(keys: Sequence[object], start: int, period: int) -> int:
    """Return how many keys from `start` on repeat the first `period` of them, in whole periods."""
    stop = start + period
    while stop < len(keys) and keys[stop] == keys[stop - period]:
        stop += 1
    return (min(stop, len(keys)) - start) // period * period


def positions(stage_sizes: Sequence[int], transitions: Sequence[bool]) -> tuple[Position, ...]:
    """Return the positions of the branches of a network.

    >>> [(p.index, p.stage, p.index_in_stage) for p in positions([1, 2], [False, True, False])]
    [(1, 1, 1), (2, 2, 1), (3, 2, 2)]

    Args:
        stage_sizes: The number of branches in each stage.
        transitions: For each branch, whether it changes the shape.

    Raises:
        ValueError: If the numbers of branches and transitions differ.
    """
    total = sum(stage_sizes)
    if len(transitions) != total:
        raise ValueError(
            f"expected one transition flag per branch ({total} for stages {list(stage_sizes)}), got {len(transitions)}"
            "; pass a flag for every branch, False where the shape stays"
        )
    flags = iter(transitions)
    out: list[Position] = []
    for stage, (previous, size) in enumerate(pairwise((0, *stage_sizes)), start=1):
        for within in range(1, size + 1):
            out.append(Position(len(out) + 1, total, stage, within, size, previous, next(flags)))
    return tuple(out)


def remember_plan_(model: Any, plan: ResidualPlan, example: Any = None) -> None:
    """Keep a plan on a model, as a plain attribute that copies, pickles and `fully_shard` keep.

    Args:
        model: The model that the plan belongs to.
        plan: The plan, which replaces an earlier one.
        example: The example input of its conversion, for saving and folding.
    """
    setattr(model, _PLAN, plan)
    setattr(model, _EXAMPLE, example)


def remembered_plan(model: Any) -> ResidualPlan | None:
    """Return the plan that a model was converted, loaded or built with, or None; its names are those of `unwrapped`.

    Args:
        model: A model, also one inside `DistributedDataParallel`, `torch.compile` or another wrapper.
    """
    stated = getattr(unwrapped(model), "plan", None)  # of a built model
    return kept_plan(model) or (stated if isinstance(stated, ResidualPlan) else None)


def kept_plan(model: Any) -> ResidualPlan | None:
    """Return the plan that `remember_plan_` kept on a model, or None."""
    return getattr(unwrapped(model), _PLAN, None)


def remembered_example(model: Any) -> Any:
    """Return the example input that a model was converted with, or None."""
    return getattr(unwrapped(model), _EXAMPLE, None)


def remembered_method(model: Any) -> str | None:
    """Return the method, with its options, that a model was converted or built with; None if it is unknown."""
    converted_by = getattr(getattr(kept_plan(model), "changes", None), "method", None)
    spec = converted_by or getattr(getattr(unwrapped(model), "method", None), "spec", None)
    return spec if isinstance(spec, str) else None


def unwrapped(model: Any) -> Any:
    """Return the model inside wrappers: `_orig_mod` of `torch.compile`, or an only child `module`, as DDP has."""
    while _PLAN not in vars(model):  # a compiled model answers for its attributes
        children = dict(model.named_children()) if hasattr(model, "named_children") else {}
        inner = next((children[name] for name in ("_orig_mod", "module") if list(children) == [name]), None)
        if inner is None:
            break
        model = inner
    return model
