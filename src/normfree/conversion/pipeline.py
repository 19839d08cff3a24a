"""Convert any model with normalization into one without: look, refuse, replace, initialize, check."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from normfree.conversion.changes import Added, Changes, Record, Removed, Rescaled
from normfree.conversion.forward_passes import FoundBy, MethodError, floats_of, model_failed_error
from normfree.conversion.inspection import NO_SUMS, Inspection, inspect_model
from normfree.conversion.other_methods import advise
from normfree.conversion.output_priors import OutputPriors
from normfree.conversion.replacement import (
    channels_of,
    fixed_weights,
    frozen_layers,
    frozen_norms,
    frozen_part,
    replace_layers_,
)
from normfree.conversion.rescaling import divide_shared_ends_, rescaling_
from normfree.conversion.scalar_placement import ScalarPlacement
from normfree.conversion.verification import Verification
from normfree.errors import MOST_REASONS, grouped, listed, quoted
from normfree.graph.convertibility import (
    check_request,
    layers_not_reparametrizable,
    recurrent_layers,
    require_signal,
    scales_by_sums,
)
from normfree.methods import InitContext, Method, get
from normfree.methods.initialize import check_example
from normfree.nn.model_state import ModelSnapshot, restored_on_error
from normfree.nn.normalizers import find_norms, plain_base, probing
from normfree.nn.scalars import scalars_of
from normfree.nn.weight_layers import WEIGHT_LAYERS
from normfree.plan import ResidualPlan, remember_plan_

Example = Tensor | Sequence[Any] | Mapping[str, Any]


def convert(
    model: nn.Module,
    method: str | Method,
    example: Example,
    *,
    plan: ResidualPlan | None = None,
    heads: Sequence[str] = (),
    generator: torch.Generator | None = None,
) -> tuple[nn.Module, ResidualPlan]:
    """Return a copy of a model without normalization, initialized by a method. The model itself stays as it is.

    Args:
        model: Any model. Its own code is not changed.
        method: A method, or its name with options, such as 'fixup' or 'nf:beta=1'.
        example: An input that the model accepts: a tensor, a tuple or list of positional arguments, or a dict of
            keyword arguments.
        plan: The residual plan. Default: the one that `discover` finds.
        heads: The names of the layers that return class scores, where there are several outputs or `discover` finds
            others.
        generator: The source of every random draw. Default: torch's global generator.

    Returns:
        The converted model, and its plan with a record of all changes in `plan.changes`. The model remembers its plan,
        so `param_groups`, `clip_grad_agc_`, `diagnose` and `fold_` need only the model.

    Raises:
        ValueError: If the model cannot be copied or converted; the message names the modules in the way.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 2))
    >>> converted, plan = convert(model, "wn", torch.randn(2, 3, 8, 8))
    >>> type(converted[0]).__name__, type(converted[1]).__name__
    ('WeightNormConv2d', 'Identity')
    """
    check_request(model, get(method), example, plan, heads)
    try:
        twin = copy.deepcopy(model)
    except Exception as error:  # whatever a model's own attributes raise
        raise ValueError(
            f"expected a model that can be copied, but copying {type(model).__name__} failed: {error}; "
            "use convert_, which works in place"
        ) from error
    return twin, convert_(twin, method, example, plan=plan, heads=heads, generator=generator)


def convert_(
    model: nn.Module,
    method: str | Method,
    example: Example,
    *,
    plan: ResidualPlan | None = None,
    heads: Sequence[str] = (),
    generator: torch.Generator | None = None,
) -> ResidualPlan:
    """Convert a model in place, in five steps.

    1. Look: find the residual branches and the normalizers, and how the model uses them.
    2. Refuse: raise one error that lists every obstacle, before anything is changed.
    3. Replace: remove the normalizers, reparametrize weights, add scalars.
    4. Initialize: write the weights by the method, and 0 into the biases. A bias of an output layer that was set on
       purpose, such as the prior of a focal loss, stays.
    5. Check: run the converted model, and rescale the layers outside the branches on the way. Then compare it with the
       original: every parameter still has a gradient, outputs still differ between samples, outputs and first loss
       keep their scale.

    Args:
        model: Any model. It is unchanged if an error is raised.
        method: As for `convert`.
        example: As for `convert`.
        plan: As for `convert`.
        heads: As for `convert`.
        generator: As for `convert`.

    Returns:
        The plan of the model, with a record of all changes in `plan.changes`.

    Raises:
        ValueError: If the model cannot be converted; the message names the modules in the way.
    """
    method = get(method)
    check_request(model, method, example, plan, heads)
    conversion = _look(model, method, example, plan, heads)
    try:
        conversion.raise_if_impossible()
        return conversion.run_(generator)
    except MethodError as refusal:
        reason = str(refusal).removesuffix("; use 'fixup' for this model")  # attempts show which methods convert it
        raise ValueError(f"{reason}{advise(conversion, refusal.found_by)}") from refusal.__cause__


def repeat_conversion_(model: nn.Module, plan: ResidualPlan, changes: Changes, example: Example) -> None:
    """Give a model the structure of an earlier conversion, with the same scalars.

    Its weights are loaded later, so the result is not compared with the original.
    """
    layers = {record.name: model.get_submodule(record.name) for record in changes.removed}
    standardized = {name: plain_base(layer) for name, layer in layers.items() if isinstance(layer, WEIGHT_LAYERS)}
    norms = [name for name in layers if name not in standardized]
    inspection = replace(inspect_model(model, example, plan, (), norms), standardized=standardized)
    verification = Verification(model, example, inspection)
    conversion = Conversion(model, get(changes.method), example, inspection, verification)
    conversion.placement.repeat(changes.added)
    conversion.raise_if_impossible()
    conversion.run_(torch.Generator().manual_seed(0))


def _look(
    model: nn.Module, method: Method, example: Example, plan: ResidualPlan | None, heads: Sequence[str]
) -> Conversion:
    """Step 1: inspect the model, and run it once to see its outputs and the modules of other libraries at work."""
    inspection = inspect_model(model, example, plan, heads)
    if plan is None:
        require_signal(model, inspection.flow, inspection.plan, heads)
    verification = Verification(model, example, inspection, heads)
    try:
        with probing(model) as probed:
            verification.run_original()
    except Exception as error:  # whatever the model's own code raises
        raise ValueError(
            f"expected a model that runs on the example, but {type(model).__name__} failed: {error}; "
            "pass an example that it accepts"
        ) from error
    if probed.norms:  # look again, now that the normalizers of unknown classes are known
        inspection = inspect_model(model, example, plan, heads, probed.norms)
        verification = Verification(model, example, inspection, heads)
        verification.run_original()
    return Conversion(model, method, example, inspection.with_probed(probed), verification)


@dataclass
class Conversion:
    """Steps 2 to 5 of a conversion by one method.

    Attributes:
        model: The model that is converted in place.
        method: The method.
        example: The example input.
        inspection: What the inspection of the original found.
        verification: Compares the result with the original. If the original was not run, nothing is compared.
        attempt: The check that decides an attempt, which leaves the model as it was. None: a conversion.
        records: The changes so far.
        notes: Notes on the changes.
        keeps_layers: Whether the method only replaces the normalizers, and leaves weights and sums as they are.
        values: The initial values of the method's scalars at each branch.
        placement: The scalars to add, and the reasons why others have no place.
    """

    model: nn.Module
    method: Method
    example: Example
    inspection: Inspection
    verification: Verification
    attempt: FoundBy | None = None
    records: list[Record] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        inspection, method = self.inspection, self.method
        self.keeps_layers = method.norm is not None
        self.values = [method.rule.at(branch.position) for branch in inspection.plan.branches]
        self.placement = ScalarPlacement(self.model, inspection, method)
        if not self.keeps_layers:
            self.placement.place(self.values, inspection.weightless)

    @property
    def starts_at_zero(self) -> bool:
        """Whether the method sets the multipliers or weights of branches to 0."""
        zeros = any(scalars.get("beta") == 0 for scalars in self.values)
        return zeros or getattr(self.method.initializer, "zero_last", False)

    def run_(self, generator: torch.Generator | None) -> ResidualPlan:
        """Convert the model, and return its plan with the changes. Any error leaves the model as it was."""
        with restored_on_error(self.model) as before:
            self._replace_(generator)
            self._initialize_(generator)
            self._check_(before)
        changes = Changes(
            method=self.method.spec,
            removed=tuple(record for record in self.records if isinstance(record, Removed)),
            added=tuple(record for record in self.records if isinstance(record, Added)),
            scaled=tuple(record for record in self.records if isinstance(record, Rescaled)),
            parameters_before=self.inspection.parameters,
            parameters_after=sum(p.numel() for p in self.model.parameters()),
            notes=(*self.inspection.notes(keeps_layers=self.keeps_layers), *self.notes),
        )
        plan = replace(self.inspection.plan, changes=changes)
        remember_plan_(self.model, plan, self.verification.passes.small)
        return plan

    def try_and_undo(self) -> bool:
        """Whether the conversion succeeds; the model is as it was afterwards."""
        before = ModelSnapshot(self.model)
        generator = torch.Generator().manual_seed(0)
        try:
            self._replace_(generator)
            self._initialize_(generator)
            self._check_(before)
        except Exception:  # whatever the model's own code raises
            return False
        finally:
            before.restore_()
        return True

    def raise_if_impossible(self) -> None:
        """Step 2: raise an error with every reason that rules find against the conversion."""
        model, method, inspection = self.model, self.method, self.inspection
        for name, module in model.named_modules():
            if scalars_of(module):
                raise ValueError(
                    f"expected a model that was not converted yet, got one with scalars at {quoted(name)}; convert the "
                    "original, or write new weights by initialize_"
                )
        needs_sums = method.weight_kind == "plain" and scales_by_sums(method)
        if not inspection.plan.branches and needs_sums:
            raise MethodError(f"method '{method.name}' works on residual branches, but {NO_SUMS}")
        obstacles = inspection.obstacles(model)
        refusal = ValueError if obstacles else MethodError  # obstacles of the inspection are the same for all methods
        if obstacles := obstacles | self._obstacles():
            reasons = grouped(obstacles)
            more = f"; and {len(reasons) - MOST_REASONS} more" if len(reasons) > MOST_REASONS else ""
            remedies = ", or ".join(filter(None, dict.fromkeys(obstacles.values())))
            raise refusal(
                f"{type(model).__name__} cannot be converted by '{method.name}': "
                f"{'; '.join(reasons[:MOST_REASONS])}{more}{'; ' if remedies else ''}{remedies}"
            )
        try:
            check_example(self._init_context(None), method)
        except ValueError as error:  # the method sets its weights from data; the example or a layer does not suit it
            raise MethodError(str(error)) from error

    def _obstacles(self) -> dict[str, str]:
        """The reasons why this method cannot convert the model, each with a remedy."""
        model, method, inspection = self.model, self.method, self.inspection
        if self.keeps_layers:
            unclear = [name for name in inspection.norms if channels_of(model.get_submodule(name)) is None]
            frozen = frozen_part(model, inspection) if self.verification.original_ran else {}
            return {f"{quoted(name)}: its number of channels is unknown": "" for name in unclear} | frozen
        if not self.verification.original_ran:
            return self.placement.obstacles
        kind = f"a {method.weight_kind.replace('_', ' ')} layer"
        reparametrized = {
            f"'{path}' cannot become {kind}: {reason}": ""
            for path, reason in layers_not_reparametrizable(model, inspection.plan, method, inspection.flow).items()
            if path.removesuffix(".weight") not in inspection.standardized
        }
        unsettable = frozen_layers(model, inspection.plan) | fixed_weights(model, inspection.plan)
        return self._recurrences() | self._recurrent_branches() | self.placement.obstacles | reparametrized | unsettable

    def _recurrences(self) -> dict[str, str]:
        """The layers of recurrences, if the method scales branches by their number and place."""
        found = recurrent_layers(self.inspection.plan) if scales_by_sums(self.method) else []
        if not found:
            return {}
        names = listed(path.removesuffix(".weight") for path in found)
        return {f"{names}: used at every step of a recurrence, whose sums are not residual blocks": ""}

    def _recurrent_branches(self) -> dict[str, str]:
        """The branches that end in a recurrent layer, which a method that draws weights cannot scale."""
        return {
            f"{quoted(name)}: a recurrent layer, whose output {quoted(home)} adds, so that its end cannot be scaled": (
                "put a linear layer after it"
            )
            for name, home in self.inspection.recurrent.items()
        }

    def _init_context(self, generator: torch.Generator | None) -> InitContext:
        """The context of the method's initializer."""
        example = self.example if isinstance(self.example, Tensor) else None
        return InitContext(self.model, self.inspection.plan, generator, example)

    def _replace_(self, generator: torch.Generator | None) -> None:
        """Step 3: remove the normalizers, reparametrize weights, add scalars."""
        if self.keeps_layers and (thawed := frozen_norms(self.model, self.inspection)):
            self.notes.append(f"frozen until now, and trainable in its new form: {listed(thawed)}")
        self.records += replace_layers_(self.model, self.inspection, self.method, generator)
        self.records += self.placement.add_(self.model)

    @torch.no_grad()
    def _initialize_(self, generator: torch.Generator | None) -> None:
        """Step 4: set biases to 0, except priors of outputs, and weights by the method.

        The scalars have their values already.
        """
        if self.keeps_layers:
            return
        ctx = self._init_context(generator)
        priors = OutputPriors(ctx.model, ctx.plan, self.inspection.flow)
        try:
            ctx.zero_biases_()
            if self.method.needs_example:
                self.verification.passes.spent += 1
            self.method.initializer(ctx)
            self.notes += priors.restore_()
            if shared := [] if self.starts_at_zero else divide_shared_ends_(ctx.model, ctx.plan):
                self.records += shared
                names = [record.name for record in shared]
                self.notes.append(f"divided by the root of the number of sums that use it: {listed(names)}")
        except ValueError as error:  # the method's own message
            raise MethodError(str(error)) from error
        except Exception as error:
            raise model_failed_error(self.model, error) from error

    def _check_(self, before: ModelSnapshot) -> None:
        """Step 5: run the converted model, rescale the layers outside the branches on the way, and compare it."""
        model, inspection, verification = self.model, self.inspection, self.verification
        if remaining := [f"'{name}' ({type(module).__name__})" for name, module in find_norms(model).items()]:
            raise ValueError(f"expected a model without normalization, got {', '.join(remaining)} after the conversion")
        if self.attempt == "forward" and self.keeps_layers:  # such a method rescales nothing
            verification.compare(None, self.method, self.values, before, attempt="forward")
            return
        layers = bool(inspection.norms) and not self.keeps_layers and not self.method.needs_example
        with rescaling_(model, inspection, self.placement.weightless, layers=layers) as scales:
            out = verification.passes.run(self.example)
        self.records = [*map(scales.with_value, self.records), *scales.rescaled]
        self.notes += scales.notes()
        # In this run the outputs of layers were rescaled. The rescaled weights did not run yet, so check them, too.
        if not all(t.isfinite().all() for t in floats_of((out, scales.parameters(model)))):
            verification.require_usable()
            raise MethodError(
                f"expected finite outputs of the converted {type(model).__name__} on the example, got NaN or infinity, "
                f"from {verification.passes.first_module(lambda t: not t.isfinite().all())} on",
                found_by="forward",
            )
        if verification.original_ran:
            self._note_parameters()
            self.notes += verification.compare(
                out, self.method, self.values, before, attempt=self.attempt, growing=scales.growth()
            )

    def _note_parameters(self) -> None:
        """Note frozen parameters that were changed, and parameters of low precision."""
        parameters = dict(self.model.named_parameters())
        changed = {record.name for record in self.records if isinstance(record, Rescaled)}
        changed |= {f"{layer.name}.bias" for layer in self.inspection.plan.layers() if not self.keeps_layers}
        if frozen := [name for name, p in parameters.items() if name in changed and not p.requires_grad]:
            self.notes.append(f"frozen, but scaled, drawn or set to zero: {listed(frozen)}")
        halves = {p.dtype for p in parameters.values() if p.requires_grad} & {torch.bfloat16, torch.float16}
        for kind in sorted(halves, key=str):
            self.notes.append(
                f"parameters are of type {kind}, in which numbers near 1, such as multipliers and gains, do not move "
                f"by less than {torch.finfo(kind).eps / 2:.1g}; train float32 parameters under torch.autocast"
            )
