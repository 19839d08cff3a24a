"""A conversion in progress: the facts about the original, the changes so far, and the notes on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from normfree.conversion.changes import Added, Changes, Removed, Rescaled
from normfree.conversion.inspection import Inspection
from normfree.conversion.scalar_placement import Obstacles, Scalars, quoted
from normfree.conversion.verification import Behaviour
from normfree.graph.flow import Flow
from normfree.methods import Method
from normfree.plan import ResidualPlan

Example = Tensor | Sequence[Any] | Mapping[str, Any]

NO_SUMS = (
    "no residual sum was found: the model is sequential, concatenates or gates its layers, adds parallel layers that "
    "form one (re-parametrizable blocks), or adds by functions other than + and - (lerp, addcmul, stack); weights can "
    "still be standardized ('nf') or normalized ('wn'), or set from data ('lsuv')"
)

SHOWN = 6  # at most this many reasons in an error or names in a note; a deep network has one per block


@dataclass
class ConversionWork:
    """A conversion in progress: the facts about the original, then the changes.

    Attributes:
        model: The model that is converted in place.
        method: The method.
        example: The example input.
        plan: The residual plan.
        flow: Returns the recorded flow of the original.
        norms: The normalizers of the original.
        inspection: How the original behaves.
        scalars: The scalars to add.
        obstacles: The reasons why scalars cannot be added.
        unaccounted: The weights that the plan does not list.
        parameters_before: The number of parameters of the original.
        removed: The normalizers that were removed.
        added: The scalars and reparametrized weights that were added.
        rescaled: The parameters that were rescaled.
        not_rescaled: The weights outside of branches that could not be rescaled.
        before: The behaviour of the original; None if the result is not compared with it.
        heads: The names of layers that return class scores.
        cautions: Notes of the last check.
        advise: Whether a refusal tries other methods.
        inline_norms: The modules whose own code divides the signal by its scale.
    """

    model: nn.Module
    method: Method
    example: Example
    plan: ResidualPlan
    flow: Callable[[], Flow]
    norms: dict[str, nn.Module]
    inspection: Inspection
    scalars: Scalars
    obstacles: Obstacles
    unaccounted: tuple[str, ...]
    parameters_before: int
    removed: list[Removed] = field(default_factory=list)
    added: list[Added] = field(default_factory=list)
    rescaled: list[Rescaled] = field(default_factory=list)
    not_rescaled: list[str] = field(default_factory=list)
    before: Behaviour | None = None
    heads: Sequence[str] = ()
    cautions: list[str] = field(default_factory=list)
    advise: bool = True
    inline_norms: Sequence[str] = ()

    @property
    def keeps_layers(self) -> bool:
        """Whether the method only replaces the normalizers, and leaves weights and sums as they are."""
        return self.method.norm is not None

    def changes(self) -> Changes:
        """The record of all changes."""
        return Changes(
            method=self.method.spec,
            removed=tuple(self.removed),
            added=tuple(self.added),
            scaled=tuple(self.rescaled),
            parameters_before=self.parameters_before,
            parameters_after=count_parameters(self.model),
            notes=tuple(_notes(self)),
        )


def _notes(work: ConversionWork) -> list[str]:
    """Notes on unexpected effects, one sentence each."""
    plan, inspection = work.plan, work.inspection
    notes = [] if plan.branches else [NO_SUMS]
    notes += whole_blocks(plan)
    if work.unaccounted:
        notes.append(f"not part of the plan and left as they were: {', '.join(work.unaccounted)}")
    if work.not_rescaled:
        notes.append(
            f"not rescaled to unit variance, as no single module returns their output: {listed(work.not_rescaled)}"
        )
    if units := [home for home, function in inspection.functional_norms if function == "normalize"]:
        notes.append(f"the signal is still divided by its length (normalize) in {listed(units)}")
    if work.inline_norms:
        notes.append(
            f"the signal is still divided by its own scale in the code of {listed(work.inline_norms)}; make that a "
            "module, such as nn.RMSNorm, to have it removed"
        )
    if inspection.norm_like:
        classes = {name: type(work.model.get_submodule(name)).__name__ for name in inspection.norm_like}
        notes.append(
            f"left in place, though it behaves like a normalizer: {listed(inspection.norm_like, classes)}; to have it "
            "removed, give its class the name of one, such as MyLayerNorm"
        )
    if scales := [name for branch in plan.branches for name in branch.scales if not work.keeps_layers]:
        notes.append(f"layer scales were set to 1, because the method scales the branches: {listed(scales)}")
    notes += work.cautions
    if not work.norms:
        notes.append("no normalizer was found: none was removed, and any normalization in the model's own code remains")
    return notes


def whole_blocks(plan: ResidualPlan) -> list[str]:
    """A note on branches without layers of their own, if there are any."""
    if bare := [branch.name for branch in plan.branches if not branch.layers]:
        return [f"the signal may still grow at sums of whole blocks, which have no layer to scale: {listed(bare)}"]
    return []


def listed(names: Sequence[str], classes: Mapping[str, str] | None = None) -> str:
    """The first names, with their classes if given, and the number of the others."""
    shown = [quoted(name) + (f" ({classes[name]})" if classes else "") for name in names[:SHOWN]]
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(shown) + more


def count_parameters(model: nn.Module) -> int:
    """The number of parameters of a model."""
    return sum(p.numel() for p in model.parameters())
