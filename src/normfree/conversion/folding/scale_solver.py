"""Solve for the units of every signal, x = g · u + t, in which the scalars of a network vanish.

The folded network computes u instead of each signal x = g · u + t. With g and t chosen well, every multiplier becomes 1
and every bias 0, and can be removed; the neighbouring weight layers absorb g and t. A weight layer takes any units. The
two sides of a sum need the same g, and a ReLU needs t = 0. The factors g are solved for first: every constraint is a
ratio between two signals. Then the shifts t are solved for; at a sum, they may move to the branch's last layer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from normfree.conversion.folding.module_flow import LayerArrays

StepKind = Literal["weight", "affine", "rectify", "pass", "layout", "widen", "sum", "barrier"]

_RANGE = 2.0**20  # the stream's units stay within it, so that single precision does not run out of exponents
_ZERO = torch.zeros((), dtype=torch.float64)


@dataclass(eq=False)
class FoldStep:
    """One step of the signal and the units of its output: the output is g · u + t, and the folded model has u.

        weight   any units in, any out: they go into its arrays
        affine   scale · x + shift, which a change of units alone can compute
        rectify  relu(g · u) = g · relu(u) for g > 0: no shift
        pass     the units of its input (pooling, dropout, a maximum)
        layout   the units of its input, if the shift is one number for all entries
        widen    the units of its input, and channels of zeros
        sum      the same g for all, shifts add
        barrier  plain units in and out

    A shift is a number, or has one entry per channel and a shape that broadcasts over the value.

    Attributes:
        kind: How the step treats units.
        name: The name of its module or function.
        module: Its module, if it is a module's call.
        channels: The number of channels of its output.
        inputs: The steps it reads.
        users: The steps that read it.
        arrays: Weight and bias of a weight layer.
        scale: The factor of an affine step.
        shift: The shift of an affine step.
        stays: Why an affine step has to stay in the model; empty if it can vanish.
        into: The layer that took an affine step.
        g: The factor of the output's units.
        t: The shift of the output's units.
    """

    kind: StepKind
    name: str
    module: nn.Module | None = None
    channels: int = 0
    inputs: list[FoldStep] = field(default_factory=list)
    users: list[FoldStep] = field(default_factory=list, repr=False)
    arrays: LayerArrays | None = None
    scale: Tensor = field(default_factory=lambda: torch.ones((), dtype=torch.float64))
    shift: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    stays: str = ""
    into: str = ""
    g: float = 1.0
    t: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))

    @property
    def has_one_user(self) -> bool:
        """Whether exactly one step reads this one."""
        return len(self.users) == 1


class _ScaleClasses:
    """Classes of signals whose factors are tied: g_i = ratio_i · (g of the class)."""

    def __init__(self, count: int) -> None:
        self._class = list(range(count))
        self._ratio = [1.0] * count
        self._members = [[i] for i in range(count)]
        self._range = [(1.0, 1.0)] * count
        self._earliest = list(range(count))

    def tie(self, a: int, b: int, ratio: float) -> str:
        """Demand g_b = ratio · g_a. Returns why that is impossible, without any change, or an empty string."""
        i, j = self._class[a], self._class[b]
        factor = ratio * self._ratio[a] / self._ratio[b]  # from one class to the other
        if i == j:
            return (
                ""
                if math.isclose(factor, 1.0, rel_tol=1e-12)
                else "another path fixes a different ratio between the scales of its input and output"
            )
        if len(self._members[i]) < len(self._members[j]):  # the larger class takes the smaller
            i, j, factor = j, i, 1 / factor
        low = min(self._range[i][0], factor * self._range[j][0])
        high = max(self._range[i][1], factor * self._range[j][1])
        if high / low > _RANGE:
            return f"the scales along the residual stream would differ by more than 2^{math.log2(_RANGE):g}"
        for member in self._members[j]:
            self._class[member] = i
            self._ratio[member] *= factor
        self._members[i] += self._members[j]
        self._range[i] = low, high
        self._earliest[i] = min(self._earliest[i], self._earliest[j])
        return ""

    def factor(self, a: int) -> float:
        """g_a, if the earliest signal of its class has g = 1; the plain unit is number 0."""
        return self._ratio[a] / self._ratio[self._earliest[self._class[a]]]


def solve_factors_(steps: list[FoldStep]) -> None:
    """Set g of every step, and mark the multipliers that have to stay."""
    place = {step: i + 1 for i, step in enumerate(steps)}  # 0 is the plain unit
    classes = _ScaleClasses(len(steps) + 1)
    for step in steps:
        if step.kind in ("rectify", "pass", "layout", "widen", "sum"):
            for source in step.inputs:
                classes.tie(place[source], place[step], 1.0)
        elif step.kind == "barrier":
            for tied in (step, *step.inputs):
                classes.tie(0, place[tied], 1.0)
        if not step.users:
            classes.tie(0, place[step], 1.0)
    multipliers = [step for step in steps if step.kind == "affine"]
    for step in sorted(multipliers, key=lambda step: bool(step.scale != 1)):  # biases first: they tie by 1
        scale = step.scale.item()
        if not 0 < scale < math.inf:
            step.stays = f"its factor {scale:g} is not positive, and no layer is before it"
        else:
            step.stays = classes.tie(place[step.inputs[0]], place[step], scale)
    for step in steps:
        step.g = classes.factor(place[step])


def solve_shifts_(steps: list[FoldStep]) -> None:
    """Set t of every step; a bias stays in the model if no choice of t removes it."""
    pinned: set[FoldStep] = set()
    while (stuck := _Shifts(steps, pinned).set_()) is not None:
        more = _sources(stuck) - pinned
        if not more:
            raise AssertionError(f"no input of '{stuck.name}' is shifted, and still it cannot read it")
        pinned |= more


class _Shifts:
    """One attempt to set every t, with t = 0 at the `pinned` steps."""

    def __init__(self, steps: list[FoldStep], pinned: set[FoldStep]) -> None:
        self.steps = steps
        self.pinned = pinned

    def set_(self) -> FoldStep | None:
        """Set every t. Returns the step whose input cannot have the t that it needs, if any."""
        preferred = _preferred_shifts(self.steps, self.pinned)
        for step in self.steps:
            preference, hard = preferred[step]
            step.t = _ZERO
            if step.kind == "weight":
                if not _fits(step, step.inputs[0].t):
                    return step
                if preference is not None and step not in self.pinned:
                    step.t = preference
            elif step.kind == "affine":
                self._set_affine(step, preference if hard else None)
            elif step.kind == "sum":
                self._set_sum(step, preference)
            elif step.kind in ("pass", "layout", "widen"):
                step.t = _widened(step) if step.kind == "widen" else step.inputs[0].t
                if step.kind == "layout" and step.t.dim():
                    return step
            elif not all(self._shift_upstream(source, -source.t) for source in step.inputs):
                return step
        return None

    def _set_affine(self, step: FoldStep, needed: Tensor | None) -> None:
        moved = step.scale * step.inputs[0].t
        step.t = _snap(moved + step.shift, _ZERO if needed is None else needed, moved, step.shift)
        if step in self.pinned:
            step.t = _ZERO
        elif needed is not None:
            step.t = needed

    def _set_sum(self, step: FoldStep, preference: Tensor | None) -> None:
        shifts = [source.t for source in step.inputs]
        step.t = _snap(shifts[0] + shifts[1], _ZERO if preference is None else preference, *shifts)
        if preference is not None and any(self._shift_upstream(source, preference - step.t) for source in step.inputs):
            step.t = preference

    def _shift_upstream(self, step: FoldStep, change: Tensor) -> bool:
        """Change the t of a step with one reader, at the weight layer it comes from. Returns whether that is possible.

        A change of 0 is always possible.
        """
        if not change.any():
            return True
        if not step.has_one_user or step in self.pinned:
            return False
        if step.kind == "weight":
            done = _has_channels(step, change)
        elif step.kind == "sum":
            done = any(self._shift_upstream(source, change) for source in step.inputs)
        elif step.kind in ("affine", "pass", "layout"):
            whole = step.kind == "pass" or not change.dim()
            done = whole and not step.stays and self._shift_upstream(step.inputs[0], change / step.scale)
        else:
            done = False
        if done:
            step.t = step.t + change
        return done


def _preferred_shifts(steps: list[FoldStep], pinned: set[FoldStep]) -> dict[FoldStep, tuple[Tensor | None, bool]]:
    """The t that the readers of each step prefer, and whether they need it."""
    preferred: dict[FoldStep, tuple[Tensor | None, bool]] = {}
    for step in reversed(steps):
        found = [_preferred_shift(user, preferred[user], pinned) for user in step.users]
        needed = [preference for preference, hard in found if hard]
        liked = [preference for preference, _ in found if preference is not None]
        preferred[step] = (needed[0], True) if needed else (liked[0] if liked else None, False)
        if not step.users:
            preferred[step] = (_ZERO, True)
    return preferred


def _preferred_shift(
    user: FoldStep, own: tuple[Tensor | None, bool], pinned: set[FoldStep]
) -> tuple[Tensor | None, bool]:
    """The t that one reader prefers for its input."""
    if user.kind in ("rectify", "barrier"):
        return _ZERO, True
    if user.kind == "weight":  # it takes any t, but then needs a pad in place of its zeros
        return (_ZERO if user.arrays is not None and user.arrays.pads_zeros else None), False
    if user.kind == "affine" and user not in pinned and not user.stays and own[0] is not None:
        return (own[0] - user.shift) / user.scale, own[1]
    return own if user.kind in ("pass", "layout") else (None, False)


def _sources(step: FoldStep) -> set[FoldStep]:
    """The steps that determine the shift of this step's inputs."""
    found: set[FoldStep] = set()
    ahead = list(step.inputs)
    seen: set[FoldStep] = set()
    while ahead:
        source = ahead.pop()
        if source in seen:
            continue
        seen.add(source)
        if source.kind in ("weight", "affine"):
            found.add(source)
        if source.kind in ("affine", "sum", "pass", "layout", "widen"):
            ahead += source.inputs
    return found


def _snap(value: Tensor, preference: Tensor, *parts: Tensor) -> Tensor:
    """`preference` if `value` differs from it by rounding alone, else `value`."""
    size = max(part.abs().max().item() for part in (*parts, preference))
    return preference if (value - preference).abs().max().item() <= 1e-13 * size else value


def _fits(layer: FoldStep, shift: Tensor) -> bool:
    """Whether a weight layer can take a shift of its input; with zero padding, only one number for all channels."""
    if not shift.any():
        return True
    arrays = layer.arrays
    assert arrays is not None
    if not shift.dim():
        return type(arrays.layer).__name__ != "Conv2dSame"
    return shift.numel() == arrays.inputs and shift.dim() == arrays.weight.dim() - 1 and not arrays.pads_zeros


def _has_channels(layer: FoldStep, change: Tensor) -> bool:
    """Whether a change is one number, or has one entry for each output of a weight layer."""
    arrays = layer.arrays
    assert arrays is not None
    return not change.dim() or (change.numel() == arrays.outputs and change.dim() == arrays.weight.dim() - 1)


def _widened(step: FoldStep) -> Tensor:
    """The t after channels of zeros were added."""
    t = step.inputs[0].t
    added = step.channels - step.inputs[0].channels
    if not t.any() or not added:
        return t
    return torch.cat([t.expand(step.inputs[0].channels, 1, 1), t.new_zeros(added, 1, 1)])
