"""Compare a converted model with its original: every parameter learns, outputs differ and keep their scale."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from normfree.conversion.forward_passes import (
    BIASES,
    FoundBy,
    MethodError,
    Passes,
    floats_of,
    holds_one_value,
    root_mean_square,
)
from normfree.conversion.inspection import Inspection, outer_skip_notes
from normfree.conversion.output_comparison import (
    ALIKE,
    LARGE,
    LARGE_NOTED,
    SMALL_NOTED,
    SMALLEST,
    OutputComparison,
    compare_start,
    differs_less,
    is_extreme,
    note_constant_start,
    output_names,
    spread,
    uniform_loss,
)
from normfree.graph.experts import same_in_others
from normfree.methods import Method
from normfree.nn.model_state import ModelSnapshot
from normfree.plan import ResidualPlan
from normfree.report.tables import compact

_FEW_CLASSES = 2.0  # a softmax over two classes is frozen at about this loss above the guess, not at twice log C
_ZEROS = 3  # a step moves a weight by about 1e-3, so after three zeros a gradient is about 1e-9 of a usual one


class Verification:
    """Runs an original, and compares the converted model with it.

    Attributes:
        passes: The passes through the model.
        original_ran: Whether the original ran. If not, there is nothing to compare with.
    """

    def __init__(self, model: nn.Module, example: Any, inspection: Inspection, heads: Collection[str] = ()) -> None:
        self.passes = Passes(model, example, inspection.plan)
        self.original_ran = False
        self._model, self._example, self._inspection, self._heads = model, example, inspection, heads
        self._outputs: tuple[Tensor, ...] = ()
        self._names: list[str] = []  # of the outputs
        self._zero_heads = False  # output layers that start at 0 learn in the first step
        self._learning: list[str] | None = None
        self._returns_loss = False
        self._learned: dict[str, bool] | None = None  # known once it is needed

    def run_original(self) -> None:
        """Run the model before it is converted; on the whole example if it does not take two images of it."""
        try:
            self._run_original()
        except Exception:  # whatever the model's own code raises
            if not self.passes.take_whole_example():
                raise
            self._run_original()

    def _run_original(self) -> None:
        with self.passes.forward(self._inspection.norms) as run:
            self._outputs, self._learning = run.outputs, run.reached()
            self._returns_loss, self._names = run.returns_loss, output_names(run.out)
        self.original_ran = True

    def compare(
        self,
        out: Any,
        method: Method,
        values: Sequence[Mapping[str, float]],
        original: ModelSnapshot,
        *,
        attempt: FoundBy | None = None,
        growing: Sequence[str] = (),
    ) -> list[str]:
        """Compare the scale of the outputs, how much they differ between samples, the first loss, and what learns.

        If the model has code for training mode only, that code is run. The model then runs forward and, if nothing is
        wrong so far, backward. Its zeros get small random values. A baseline, such as 'xavier', is not refused.

        Args:
            out: The output of the converted model on the example, at its initial values. None: the output of the pass
                with small values in place of zeros.
            method: The method.
            values: The initial values of its scalars at each branch.
            original: The model before the conversion.
            attempt: The check that decides an attempt; with 'forward' nothing runs backward. None: a conversion, whose
                reasons name the first module that shows them, which costs another pass.
            growing: Notes on sums that enlarge the signal.

        Returns:
            Notes on what needs care.

        Raises:
            MethodError: With the reasons, if the converted model differs too much.
        """
        if self._inspection.has_training_code:
            self.passes.require_training()
        plan, growth = self._inspection.plan, expected_growth(self._inspection.plan, values)
        norm_free = method.kind == "norm-free"
        goes_on = attempt != "forward"
        self._zero_heads = not self.passes.heads.isdisjoint(self.passes.zeros())
        with self.passes.forward(graph=goes_on) as run:
            found = self._compare_outputs(run.outputs, out, growth, locate=False)
            goes_on = goes_on and not (found.reasons and norm_free)
            learning = run.learning() if goes_on else None
        if found.reasons and attempt is None:
            found = self._compare_outputs(run.outputs, out, growth, locate=True)
        if goes_on:
            self._compare_learning(learning, found, original)
        if not found.reasons or not norm_free:
            return [*found.notes, *found.reasons]
        self.require_usable()
        unnamed = len(plan.classifier) > 1 and not self._heads and method.norm is None  # dyt has no use for heads
        heads = "; name the output layers by heads=" if unnamed else ""
        skips = outer_skip_notes(plan)
        text = (
            f"{type(self._model).__name__} cannot be converted by '{method.name}': "
            f"{'; '.join((*found.reasons, *skips, *growing))}{heads}"
        )
        raise MethodError(text, found.found_by)

    def require_usable(self) -> None:
        """Refuse an example on which the original fails, too, or whose values are all the same.

        Raises:
            ValueError: With the reason and a remedy.
        """
        name = type(self._model).__name__
        if not all(t.isfinite().all() for t in self._outputs):
            raise ValueError(
                f"expected finite outputs of {name} on the example, got NaN or infinity before anything was changed; "
                "check the example and the model's weights"
            )
        if holds_one_value(self._example):
            raise ValueError(
                f"expected an example with different values, got one value everywhere, on which {name} cannot be "
                "judged; pass a batch of the data, or torch.randn"
            )

    def _compare_outputs(self, after: tuple[Tensor, ...], out: Any, growth: float, *, locate: bool) -> OutputComparison:
        found = OutputComparison()
        pairs = zip(self._names, self._outputs, after, strict=False)
        same = [(i, *pair) for i, pair in enumerate(pairs) if pair[1].shape == pair[2].shape]
        starts = floats_of(after if out is None else out)
        self._compare_scales([pair[1:] for pair in same], growth, found, locate=locate)
        for i, name, old, _ in same:
            if i < len(starts):
                compare_start(name, old, starts[i], growth, found)
                if not self._zero_heads:
                    note_constant_start(name, old, starts[i], found)
        self._compare_first_loss(starts, growth, found)
        if holds_one_value(self._example):
            found.notes.append(
                "all values of the example are the same, so the checks say little; pass a batch of the data"
            )
        return found

    def _compare_scales(
        self, pairs: Sequence[tuple[str, Tensor, Tensor]], growth: float, found: OutputComparison, *, locate: bool
    ) -> None:
        """Compare outputs by their root mean squares, and by how much they differ between samples.

        An output is compared with the original's or with 1, the nearer of the two, since the conversion may repair an
        original that explodes or vanishes. It is refused if it is 10 · √growth times as large or more, or 1e-5 times as
        large or less; it gets a note beyond 3 times and 1e-3 times. Samples must not become alike: the part of the
        output by which they differ may not shrink below 1e-3 of the original's.
        """

        def place(wrong: Callable[[Tensor], bool]) -> str:
            return f"from {self.passes.first_module(wrong)} on" if locate else "in an attempt"

        for name, old, new in pairs:
            was, now = root_mean_square(old), root_mean_square(new)
            large, small = now / max(was, 1.0), now / min(was or 1.0, 1.0)
            if old.numel() < 2 or not was or (large <= LARGE_NOTED and small >= SMALL_NOTED):
                continue
            text = f"output {name} is {compact(now / was)} times as large as the original's"
            if not (large < LARGE * growth**0.5 and small > SMALLEST):
                found.reasons.append(f"{text}, {place(partial(is_extreme, large > 1))}")
            elif large > LARGE_NOTED:
                found.notes.append(
                    f"{text}; a smaller learning rate or adaptive clipping (clip_grad_agc_) may be needed"
                )
            else:
                found.notes.append(f"{text}; plain SGD may learn slowly at first")
        for name, old, new in pairs:
            if old.dim() and old.shape[0] > 1 and new.any():
                was, now = spread(old), spread(new)
                if was > ALIKE and now < ALIKE * was:
                    where = place(partial(differs_less, ALIKE * was))
                    found.reasons.append(
                        f"output {name} is the same for all samples, {where} (they differ by {compact(now)} of its "
                        f"size, in the original by {compact(was)})"
                    )

    def _compare_first_loss(self, outputs: Sequence[Tensor], growth: float, found: OutputComparison) -> None:
        """Compare the cross-entropy of random classes with that of a uniform guess, log C.

        Normal scores of variance σ² have the loss log C + σ²/2. At 2·log C a softmax freezes: it gives nearly all
        weight to a few classes, at random. So an excess over log C of more than log C (of 2 for few classes) is
        refused, and of more than a quarter of that is noted. Two things are allowed on top: three times the excess of
        the original, and, before a refusal, the excess due to `growth`: a new classifier turns features of that
        variance into scores of σ² = growth/3, whose excess is σ²/2, or σ·√(2·log C) if that is less.
        """
        layers = self._inspection.plan.classifier
        known = [layer for layer in layers if layer.name in self._heads or (not self._heads and len(layers) == 1)]
        for layer in known:
            weight = getattr(self._model.get_submodule(layer.name), layer.parameter)
            classes = weight.shape[1 if layer.transposed else 0]
            for i, scores in enumerate(outputs):
                axis = 1 if weight.dim() > 2 else -1
                if classes < 2 or scores.dim() < 2 or scores.shape[axis] != classes:
                    continue
                if not self._heads and not self._inspection.flow.returns_only_scores(self.passes.heads, scores.shape):
                    continue
                loss, guess = uniform_loss(scores, axis), math.log(classes)
                same = i < len(self._outputs) and self._outputs[i].shape[axis] == classes
                old = uniform_loss(self._outputs[i], axis) if same else guess
                frozen = max(guess, _FEW_CLASSES)
                grown = min(growth / 6, (2 * guess * growth / 3) ** 0.5)
                above = loss - guess - 3 * max(old - guess, 0.0)
                if above <= frozen / 4:  # half the σ of scores that freeze
                    continue
                text = (
                    f"the first loss at '{layer.name}' is {compact(loss)}, where a uniform guess has {compact(guess)}"
                )
                if above > grown + frozen:
                    found.reasons.append(text)
                else:
                    found.notes.append(f"{text}; a smaller learning rate at the start may be needed")

    def _compare_learning(
        self,
        after: Mapping[str, bool] | None,
        found: OutputComparison,
        original: ModelSnapshot,
    ) -> None:
        """Check that every parameter that learns in the original learns.

        An expert that gets no samples has no gradient, though another one learns.
        """
        before = self._learning
        if before is None or after is None:
            found.notes.append(
                "whether every parameter learns was not checked, because no output of the model has a gradient"
            )
            return
        sound = not found.reasons
        held = {name for name, p in self._model.named_parameters() if p.requires_grad}
        stuck = [name for name in before if name in held and not after.get(name)]
        if stuck and self._learned is None:  # a parameter in the graph of the original may have had no gradient
            with original.restored(), self.passes.forward(self._inspection.norms) as run:
                self._learned = run.learning() or {}
        stuck = [name for name in stuck if (self._learned or {}).get(name)]
        if stuck and self.passes.zeros() and self.passes.allows(3):
            # A ReLU after a zero may be off for values of one sign only, and the sign is not known before training.
            with self.passes.forward(sign=-1.0) as run:
                learned = run.learning(stuck) or {}
            stuck = [name for name in stuck if not learned.get(name)]
        why = "it had a gradient in the original and has none"
        if stuck and all(name.endswith(BIASES) for name in stuck):
            found.notes.append(
                f"'{stuck[0]}' does nothing any more: without the normalizer, the bias cancels or is not used"
            )
            stuck = []
        idle = [
            name for name in stuck if any(after.get(other) for other in same_in_others(name, self._inspection.experts))
        ]
        if unreached := [name for name in stuck if name not in after or name in idle]:
            found.notes.append(
                f"the example does not reach '{unreached[0]}'{_more(unreached)} any more, so whether it learns was not "
                "checked; a model that chooses its experts by values chooses others now"
            )
            stuck = [name for name in stuck if name not in unreached]
        zeros = [] if stuck else self._stuck_zeros(after, found)
        if zeros:
            stuck = zeros
            why = "it starts at zero, and so do several layers, one after another, on every path from it to the output"
            if not self.passes.heads.isdisjoint(zeros):
                why = (
                    "it starts at zero, and the output layer, which also starts at zero, gets no gradient: its input "
                    "is zero, or its output is squared"
                )
        if stuck:
            owners = {layer.path: branch.name for branch in self._inspection.plan.branches for layer in branch.layers}
            where = f"the branch '{owners[stuck[0]]}'" if stuck[0] in owners else "the model"
            found.reasons.append(f"in {where}, '{stuck[0]}'{_more(stuck)} would never learn: {why}")
        if sound:
            found.found_by = "zeros" if zeros else "backward"

    def _stuck_zeros(self, learning: Mapping[str, bool], found: OutputComparison) -> list[str]:
        """The parameters that start at 0 and stay 0, because others that multiply them are 0 as well.

        A zero that is multiplied by another zero starts to learn one step later, and its gradient is smaller by the
        size of a step. If it must wait for `_ZEROS` others, the gradient is lost in rounding, so it counts as stuck.
        Output layers move first if the model returns their outputs. A model may instead return the square of an output,
        which has no gradient at 0, or a loss of some outputs only.
        """
        waiting = [name for name in self.passes.zeros() if learning.get(name)]
        heads = [name for name in waiting if name in self.passes.heads]
        direct = not self._returns_loss and all(map(self._inspection.flow.returns_unchanged, heads))
        moved = heads if direct else []
        if len(moved) == len(waiting):
            return []
        rounds = 0 if direct else -1
        while waiting and rounds < _ZEROS:
            if not self.passes.allows(3):
                found.notes.append(f"whether '{waiting[0]}'{_more(waiting)} learns was not checked, to limit the cost")
                return []
            with self.passes.forward(replaced=moved) as run:
                learned = run.learning(waiting) or {}
            # Output layers learn in the first step, and so does a zero before one of them, except where they read 0.
            still = [name for name in moved if name in waiting and not learned.get(name)]
            if still:
                moved = [name for name in moved if name not in still]
                continue
            new = [name for name in waiting if learned.get(name)]
            waiting = [name for name in waiting if name not in new]
            moved += [name for name in new if name not in moved]
            rounds += 1
            if not new:
                break
        return waiting


def _more(names: Sequence[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def expected_growth(plan: ResidualPlan, values: Sequence[Mapping[str, float]]) -> float:
    """The factor by which a method lets the variance grow: the product of c²(a² + β²) over all branches, at most 100.

    `values` are the method's scalars at each branch. A β of 1 counts as 0, because such a method makes the branch
    small by its initial weights. An outer skip, x + blocks(x), counts as 4, because it doubles the signal. The limit is
    `LARGE`² = 100: an output may be `LARGE` · √growth times as large as the original's, so at most 100 times.
    """
    growth = 1.0
    for branch, present in zip(plan.branches, values, strict=True):
        scalars = {"c": 1.0, "a": 1.0, "beta": 1.0, **present}
        beta = scalars["beta"] if scalars["beta"] != 1.0 else 0.0
        growth *= scalars["c"] ** 2 * (scalars["a"] ** 2 + beta**2) if branch.layers else 4.0
    return min(max(growth, 1.0), LARGE**2)
