"""Which units every signal is best measured in, x = g · u + t, so that the scalars of a network vanish.

A multiplier is a change of units, and so is a bias: where both sides may have units of their own, nothing is left to
compute. Weight layers take any units. The residual stream has to agree with itself: the two sides of a sum have one g,
a ReLU wants t = 0. Factors are solved for first (every constraint is a ratio between two signals), then shifts, which
may be moved along a sum to the branch's last layer.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from normfree.conversion.folding.steps import Step

_RANGE = 2.0**20  # the stream's units stay within it, so that single precision does not run out of exponents
_ZERO = torch.zeros((), dtype=torch.float64)


class _Ratios:
    """Classes of signals whose factors are tied: g_i = ratio_i · g of the class."""

    def __init__(self, count: int) -> None:
        self._class = list(range(count))
        self._ratio = [1.0] * count
        self._members = [[i] for i in range(count)]
        self._range = [(1.0, 1.0)] * count
        self._earliest = list(range(count))

    def tie(self, a: int, b: int, ratio: float) -> str:
        """Demand g_b = ratio · g_a; why not, and no change, when that contradicts what is tied or leaves the range."""
        i, j = self._class[a], self._class[b]
        factor = ratio * self._ratio[a] / self._ratio[b]  # from one class to the other
        if i == j:
            return "" if math.isclose(factor, 1.0, rel_tol=1e-12) else "what it reads and what it gives meet again"
        if len(self._members[i]) < len(self._members[j]):  # the larger class takes the smaller
            i, j, factor = j, i, 1 / factor
        low = min(self._range[i][0], factor * self._range[j][0])
        high = max(self._range[i][1], factor * self._range[j][1])
        if high / low > _RANGE:
            return f"the stream's units would leave a range of {_RANGE:g}"
        for member in self._members[j]:
            self._class[member] = i
            self._ratio[member] *= factor
        self._members[i] += self._members[j]
        self._range[i] = low, high
        self._earliest[i] = min(self._earliest[i], self._earliest[j])
        return ""

    def factor(self, a: int) -> float:
        """g_a, when the earliest signal of its class has g = 1; the plain unit is number 0."""
        return self._ratio[a] / self._ratio[self._earliest[self._class[a]]]


def solve_factors_(steps: list[Step]) -> None:
    """Give every step its g, and mark the multipliers that have to stay."""
    place = {step: i + 1 for i, step in enumerate(steps)}  # 0 is the plain unit
    ratios = _Ratios(len(steps) + 1)
    for step in steps:
        if step.kind in ("rectify", "pass", "layout", "widen", "sum"):
            for source in step.inputs:
                ratios.tie(place[source], place[step], 1.0)
        elif step.kind == "barrier":
            for tied in (step, *step.inputs):
                ratios.tie(0, place[tied], 1.0)
        if not step.users:
            ratios.tie(0, place[step], 1.0)
    multipliers = [step for step in steps if step.kind == "affine"]
    for step in sorted(multipliers, key=lambda step: bool(step.scale != 1)):  # biases first: they tie by 1
        scale = step.scale.item()
        if not 0 < scale < math.inf:
            step.kept = f"its factor {scale:g} is not positive, and no layer stands in front"
        else:
            step.kept = ratios.tie(place[step.inputs[0]], place[step], scale)
    for step in steps:
        step.g = ratios.factor(place[step])


def solve_shifts_(steps: list[Step]) -> None:
    """Give every step its t; a bias has to stay where what it gives is not what it reads in other units."""
    pinned: set[Step] = set()
    while (stuck := _Shifts(steps, pinned).set_()) is not None:
        more = _sources(stuck) - pinned
        if not more:
            raise AssertionError(f"nothing is shifted, and '{stuck.name}' still cannot read it")
        pinned |= more


class _Shifts:
    """One attempt to set every t, with t = 0 at those `pinned`."""

    def __init__(self, steps: list[Step], pinned: set[Step]) -> None:
        self.steps = steps
        self.pinned = pinned

    def set_(self) -> Step | None:
        """Set every t; the step whose input cannot have the t that it needs, if any."""
        wishes = _wishes(self.steps, self.pinned)
        for step in self.steps:
            wish, hard = wishes[step]
            step.t = _ZERO
            if step.kind == "weight":
                if not _fits(step, step.inputs[0].t):
                    return step
                if wish is not None and step not in self.pinned:
                    step.t = wish
            elif step.kind == "affine":
                self._set_affine(step, wish if hard else None)
            elif step.kind == "sum":
                self._set_sum(step, wish)
            elif step.kind in ("pass", "layout", "widen"):
                step.t = _widened(step) if step.kind == "widen" else step.inputs[0].t
                if step.kind == "layout" and step.t.dim():
                    return step
            elif not all(self._push(source, -source.t) for source in step.inputs):
                return step
        return None

    def _set_affine(self, step: Step, needed: Tensor | None) -> None:
        moved = step.scale * step.inputs[0].t
        step.t = _near(moved + step.shift, _ZERO if needed is None else needed, moved, step.shift)
        if step in self.pinned:
            step.t = _ZERO
        elif needed is not None:
            step.t = needed

    def _set_sum(self, step: Step, wish: Tensor | None) -> None:
        shifts = [source.t for source in step.inputs]
        step.t = _near(shifts[0] + shifts[1], _ZERO if wish is None else wish, *shifts)
        if wish is not None and any(self._push(source, wish - step.t) for source in step.inputs):
            step.t = wish

    def _push(self, step: Step, change: Tensor) -> bool:
        """Change the t of a step that one other reads, at the weight layer it comes from; False if that cannot be.

        No change can always be.
        """
        if not change.any():
            return True
        if not step.only_user or step in self.pinned:
            return False
        if step.kind == "weight":
            done = _has_channels(step, change)
        elif step.kind == "sum":
            done = any(self._push(source, change) for source in step.inputs)
        elif step.kind in ("affine", "pass", "layout"):
            whole = step.kind == "pass" or not change.dim()
            done = whole and not step.kept and self._push(step.inputs[0], change / step.scale)
        else:
            done = False
        if done:
            step.t = step.t + change
        return done


def _wishes(steps: list[Step], pinned: set[Step]) -> dict[Step, tuple[Tensor | None, bool]]:
    """The t that the readers of each step would like it to have, and whether they need it."""
    wishes: dict[Step, tuple[Tensor | None, bool]] = {}
    for step in reversed(steps):
        found = [_wish(user, wishes[user], pinned) for user in step.users]
        needed = [wish for wish, hard in found if hard]
        liked = [wish for wish, _ in found if wish is not None]
        wishes[step] = (needed[0], True) if needed else (liked[0] if liked else None, False)
        if not step.users:
            wishes[step] = (_ZERO, True)
    return wishes


def _wish(user: Step, own: tuple[Tensor | None, bool], pinned: set[Step]) -> tuple[Tensor | None, bool]:
    """The t that one reader would like its input to have."""
    if user.kind in ("rectify", "barrier"):
        return _ZERO, True
    if user.kind == "weight":  # it takes any, but then needs a pad in place of its zeros
        return (_ZERO if user.numbers is not None and user.numbers.pads_zeros else None), False
    if user.kind == "affine" and user not in pinned and not user.kept and own[0] is not None:
        return (own[0] - user.shift) / user.scale, own[1]
    return own if user.kind in ("pass", "layout") else (None, False)


def _sources(step: Step) -> set[Step]:
    """The weight layers and affine steps that what a step reads got its t from."""
    found: set[Step] = set()
    ahead = list(step.inputs)
    seen: set[Step] = set()
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


def _near(value: Tensor, wish: Tensor, *parts: Tensor) -> Tensor:
    """`wish` where `value` misses it by rounding alone, else `value`."""
    size = max(part.abs().max().item() for part in (*parts, wish))
    return wish if (value - wish).abs().max().item() <= 1e-13 * size else value


def _fits(layer: Step, shift: Tensor) -> bool:
    """Whether a weight layer can take a shift of its input; zero padding needs one number for all channels."""
    if not shift.any():
        return True
    numbers = layer.numbers
    assert numbers is not None
    if not shift.dim():
        return type(numbers.layer).__name__ != "Conv2dSame"
    return shift.numel() == numbers.inputs and shift.dim() == numbers.weight.dim() - 1 and not numbers.pads_zeros


def _has_channels(layer: Step, change: Tensor) -> bool:
    """Whether a change is one number, or has one entry for each output of a weight layer."""
    numbers = layer.numbers
    assert numbers is not None
    return not change.dim() or (change.numel() == numbers.outputs and change.dim() == numbers.weight.dim() - 1)


def _widened(step: Step) -> Tensor:
    """The t after channels of zeros were added."""
    t = step.inputs[0].t
    added = step.channels - step.inputs[0].channels
    if not t.any() or not added:
        return t
    return torch.cat([t.expand(step.inputs[0].channels, 1, 1), t.new_zeros(added, 1, 1)])
