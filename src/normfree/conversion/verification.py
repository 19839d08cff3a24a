"""Compare a converted model with its original: every parameter learns, outputs differ and keep their scale."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from normfree.conversion.passes import (
    BIASES,
    PassCount,
    PassResult,
    first_module,
    floats_of,
    forward_and_backward,
    zeros_of,
)
from normfree.graph.experts import same_in_others
from normfree.graph.flow import tensors_of
from normfree.plan import ResidualPlan
from normfree.report.tables import compact

# Outputs k times as large as the targets have a squared error of k² + 1, where an output of 0 has 1.
_LARGE_NOTED, _LARGE = 3.0, 10.0
# Gradients shrink with the output. One of a usual 1e-3 times 1e-5 is as small as the ε of Adam, and learns no more.
_SMALL_NOTED, _SMALLEST = 1e-3, 1e-5
_ALIKE = 1e-3  # of the size of an output: samples that differ by less, compared with the original, are the same
_FEW_CLASSES = 2.0  # of two classes, a softmax is as sure as that of many only at about this loss above the guess
_BEHIND = 3  # a step moves a weight by about 1e-3, so the gradient behind three zeros is about 1e-9 of a usual one


class Verification:
    """Compares a converted model with the behaviour of its original.

    Attributes:
        reasons: The reasons to refuse the model.
        notes: Notes on what needs care.
    """

    def __init__(
        self,
        model: nn.Module,
        example: Any,
        plan: ResidualPlan,
        before: PassResult,
        passes: PassCount,
    ) -> None:
        self.reasons: list[str] = []
        self.notes: list[str] = []
        self._model, self._example, self._plan, self._before, self._passes = model, example, plan, before, passes
        self._locate = False

    def compare_outputs(
        self,
        out: Any,
        growth: float,
        heads: Collection[str],
        *,
        backward: bool = True,
        may_stop: bool = True,
        locate: bool = True,
    ) -> bool:
        """Compare the scale of the outputs, how much they differ between samples, and the first loss.

        The converted model runs forward and, if nothing is wrong so far, backward. Its zeros get small random values.

        Args:
            out: The output of the converted model on the example, at its initial values. Default: that of the pass
                with small values in place of zeros.
            growth: The factor by which the method lets the variance grow.
            heads: The names of the output layers that return class scores; of a single output layer it need not be
                given.
            backward: Whether to run backward, too.
            may_stop: Whether not to run backward if something is wrong already.
            locate: Whether reasons name the first module that shows them, which costs another pass.

        Returns:
            Whether what learns can be compared, too.
        """

        def is_sound(outputs: Sequence[Tensor]) -> bool:
            self._compare(tuple(t.detach() for t in outputs), out, growth, heads)
            wrong = bool(self.reasons)
            self.reasons, self.notes = [], []
            return not (wrong and may_stop)

        self._after = forward_and_backward(self._model, self._example, self._plan, graph=backward, proceed=is_sound)
        backward = backward and self._after.learning is not None
        self._passes.add(backward=backward)
        self._locate = locate
        self._compare(self._after.outputs, out, growth, heads)
        return backward or not self.reasons

    def _compare(self, after: tuple[Tensor, ...], out: Any, growth: float, heads: Collection[str]) -> None:
        before = self._before.outputs
        self.reasons += self._scale(before, after, growth)
        self.reasons += self._alike_samples(before, after)
        shown = after if out is None else out
        self.reasons += _first_loss(self._model, self._plan, shown, self._before, heads, self.notes, growth)
        if _holds_one_value(self._example):
            self.notes.append(
                "all values of the example are the same, so the checks say little; pass a batch of the data"
            )

    def compare_learning(
        self, learned: Callable[[Collection[str]], Collection[str]], experts: Sequence[Sequence[str]] = ()
    ) -> bool:
        """Check that every parameter that learns in the original learns.

        Args:
            learned: Returns those of the named parameters that have a gradient in the original.
            experts: The groups of experts. One that gets no samples has no gradient, though another one learns.

        Returns:
            Whether zeros stay zeros.
        """
        before, after = self._before.learning, self._after.learning
        if before is None or after is None:
            self.notes.append(
                "whether every parameter learns was not checked, because no output of the model has a gradient"
            )
            return False
        held = {name for name, p in self._model.named_parameters() if p.requires_grad}
        stuck = [name for name in before if name in held and not after.get(name)]
        with_gradient = learned(stuck) if stuck else ()
        stuck = [name for name in stuck if name in with_gradient]
        why = "it had a gradient in the original and has none"
        if stuck and all(name.endswith(BIASES) for name in stuck):
            self.notes.append(
                f"'{stuck[0]}' does nothing any more: without the normalizer, the bias cancels or is not used"
            )
            stuck = []
        idle = [name for name in stuck if any(after.get(other) for other in same_in_others(name, experts))]
        if unreached := [name for name in stuck if name not in after or name in idle]:
            self.notes.append(
                f"the example does not reach '{unreached[0]}'{_more(unreached)} any more, so whether it learns was not "
                "checked; a model that chooses its experts by values chooses others now"
            )
            stuck = [name for name in stuck if name not in unreached]
        zeros = [] if stuck else self._stuck_zeros(after)
        if zeros:
            stuck = zeros
            why = "it starts at zero, and so does every way from it to the output, one layer behind another"
        owners = {layer.path: branch.name for branch in self._plan.branches for layer in branch.layers}
        for name in stuck[:1]:
            where = f"the branch '{owners[name]}'" if name in owners else "the model"
            self.reasons.append(f"in {where}, '{name}'{_more(stuck)} would never learn: {why}")
        return bool(zeros)

    def _stuck_zeros(self, learning: Mapping[str, bool]) -> list[str]:
        """The zeros that stay 0: none of their factors gets a gradient before another one does.

        A zero behind another zero learns one step later, and its gradient is smaller by the size of a step. Behind
        `_BEHIND` other zeros it is lost in rounding, so that it counts as stuck.
        """
        heads = {layer.path for layer in self._plan.classifier}
        waiting = [name for name, _ in zeros_of(self._model, self._plan) if learning.get(name)]
        moved = [name for name in waiting if name in heads]
        if len(moved) == len(waiting):
            return []
        rounds = 0
        while waiting and rounds < _BEHIND:
            if not self._passes.allows(3):
                self.notes.append(f"whether '{waiting[0]}'{_more(waiting)} learns was not checked, to limit the cost")
                return []
            self._passes.add(backward=True)
            run = forward_and_backward(self._model, self._example, self._plan, replaced=moved, watched=waiting)
            found = run.learning or {}
            # Output layers learn in the first step, and so does a zero before one of them, except where they read 0.
            still = [name for name in moved if name in waiting and not found.get(name)]
            if still:
                moved = [name for name in moved if name not in still]
                continue
            new = [name for name in waiting if found.get(name)]
            waiting = [name for name in waiting if name not in new]
            moved += [name for name in new if name not in moved]
            rounds += 1
            if not new:
                break
        return waiting

    def _scale(self, before: tuple[Tensor, ...], after: tuple[Tensor, ...], growth: float) -> Iterator[str]:
        """Compare the root mean squares of outputs of the same shape.

        A converted model may repair the scale of an original that explodes or vanishes, so the scale 1 is near, too. A
        method that lets the variance grow may do so.
        """
        pairs = [(a, b) for a, b in zip(before, after, strict=False) if a.shape == b.shape and a.numel() > 1]
        for i, (old, new) in enumerate(pairs):
            was, now = _rms(old), _rms(new)
            large, small = now / max(was, 1.0), now / min(was or 1.0, 1.0)
            if not was or (large <= _LARGE_NOTED and small >= _SMALL_NOTED):
                continue
            text = f"output {i} is {compact(now / was)} times as large as the original's"
            if not (large < _LARGE * growth**0.5 and small > _SMALLEST):
                yield f"{text}, {self._from(_is_large if large > 1 else _is_small)}"
            elif large > _LARGE_NOTED:
                self.notes.append(
                    f"{text}; a smaller learning rate or adaptive clipping (clip_grad_agc_) may be needed"
                )
            else:
                self.notes.append(f"{text}; plain SGD may learn slowly at first")

    def _alike_samples(self, before: tuple[Tensor, ...], after: tuple[Tensor, ...]) -> Iterator[str]:
        """Compare how much outputs of the same shape differ between samples, as a part of their size."""
        for i, (old, new) in enumerate(zip(before, after, strict=False)):
            if old.shape == new.shape and old.dim() and old.shape[0] > 1 and new.any():
                was, now = _spread(old), _spread(new)
                if was > _ALIKE and now < _ALIKE * was:
                    place = self._from(partial(_differs_less, _ALIKE * was))
                    yield (
                        f"output {i} is the same for all samples, {place} (they differ by {compact(now)} of its "
                        f"size, in the original by {compact(was)})"
                    )

    def _from(self, wrong: Callable[[Tensor], bool]) -> str:
        if not self._locate:
            return "in a trial"
        return f"from {first_module(self._model, self._example, wrong, self._passes)} on"


def _more(names: Sequence[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def require_usable(model: nn.Module, example: Any, before: PassResult | None) -> None:
    """Refuse an example on which the original fails, too, or whose values are all the same.

    Raises:
        ValueError: With the reason and a remedy.
    """
    name = type(model).__name__
    if before is not None and not all(t.isfinite().all() for t in before.outputs):
        raise ValueError(
            f"expected finite outputs of {name} on the example, got NaN or infinity before anything was changed; check "
            "the example and the model's weights"
        )
    if _holds_one_value(example):
        raise ValueError(
            f"expected an example with different values, got one value everywhere, on which {name} cannot be judged; "
            "pass a batch of the data, or torch.randn"
        )


def _holds_one_value(example: Any) -> bool:
    """Whether each tensor of an example holds a single value, such as 0."""
    given = [t.flatten() for t in tensors_of(example) if t.numel() > 1]
    return bool(given) and all(bool((t == t[0]).all()) for t in given)


def expected_growth(plan: ResidualPlan, values: Sequence[Mapping[str, float]]) -> float:
    """The factor by which a method lets the variance grow: c²(a² + β²) over all branches, e^4.3 at most for 'hanin'.

    `values` are the method's scalars at each branch. A β of 1 counts 0: methods that have it make the weights of the
    branch small. A sum of whole blocks, x + blocks(x), doubles the signal. However much that is, an output may grow by
    `_LARGE` only.
    """
    growth = 1.0
    for branch, present in zip(plan.branches, values, strict=True):
        scalars = {"c": 1.0, "a": 1.0, "beta": 1.0, **present}
        beta = scalars["beta"] if scalars["beta"] != 1.0 else 0.0
        growth *= scalars["c"] ** 2 * (scalars["a"] ** 2 + beta**2) if branch.layers else 4.0
    return min(max(growth, 1.0), _LARGE**2)


def _spread(tensor: Tensor) -> float:
    """The standard deviation between samples, as a part of the root mean square."""
    tensor = tensor.double()
    return _rms(tensor - tensor.mean(0)) / (_rms(tensor) or 1.0)


def _differs_less(limit: float, tensor: Tensor) -> bool:
    return _spread(tensor) < limit


def _is_large(tensor: Tensor) -> bool:
    return not _rms(tensor) < _LARGE


def _is_small(tensor: Tensor) -> bool:
    return not _rms(tensor) > _SMALL_NOTED


def _rms(tensor: Tensor) -> float:
    return float(tensor.double().square().mean().sqrt())


def _first_loss(
    model: nn.Module,
    plan: ResidualPlan,
    out: Any,
    before: PassResult,
    heads: Collection[str],
    notes: list[str],
    growth: float,
) -> Iterator[str]:
    """Compare the cross-entropy of random classes with that of a uniform guess, log C.

    Normal scores of variance σ² have the loss log C + σ²/2. At twice log C a softmax freezes: it gives nearly all
    weight to a few classes, at random. An original that starts high may do so again, and so may a method that lets the
    signal grow. A new classifier turns features of variance `growth` into scores of a third of it.
    """
    known = [layer for layer in plan.classifier if layer.name in heads or (not heads and len(plan.classifier) == 1)]
    outputs = floats_of(out)
    for layer in known:
        weight = getattr(model.get_submodule(layer.name), layer.parameter)
        classes = weight.shape[1 if layer.transposed else 0]
        for i, scores in enumerate(outputs):
            axis = 1 if weight.dim() > 2 else -1
            if classes < 2 or scores.dim() < 2 or scores.shape[axis] != classes:
                continue
            loss, guess = _uniform_loss(scores, axis), math.log(classes)
            same = i < len(before.outputs) and before.outputs[i].shape[axis] == classes
            old = _uniform_loss(before.outputs[i], axis) if same else guess
            frozen = max(guess, _FEW_CLASSES)
            grown = min(growth / 6, (2 * guess * growth / 3) ** 0.5)
            above = loss - guess - 3 * max(old - guess, 0.0)
            if above <= frozen / 4:  # half the spread
                continue
            text = f"the first loss at '{layer.name}' is {compact(loss)}, where a uniform guess has {compact(guess)}"
            if above > grown + frozen:
                yield text
            else:
                notes.append(f"{text}; a smaller learning rate at the start may be needed")


def _uniform_loss(scores: Tensor, axis: int) -> float:
    """The mean cross-entropy of scores over targets that are uniform over the classes."""
    scores = scores.double()
    return float((scores.logsumexp(axis) - scores.mean(axis)).mean())
