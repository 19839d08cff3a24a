"""The stages of a conversion: refuse, replace, initialize, check."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from normfree.conversion.changes import SHOWN, Added, Changes, Record, Removed, Rescaled, grouped, listed, quoted
from normfree.conversion.inspection import (
    NO_SUMS,
    Inspection,
    find_norms,
    frozen_layers,
    raw_data,
    whole_blocks,
)
from normfree.conversion.passes import PassCount, PassResult, first_module, floats_of, forward_and_backward
from normfree.conversion.replacement import (
    channels_of,
    draw_tokens_,
    fixed_weights,
    learned_tokens,
    make_plain_,
    remove_norms_,
    reset_layer_scales_,
    scale_embeddings_,
)
from normfree.conversion.rescaling import divide_shared_ends_, rescaling_
from normfree.conversion.scalar_placement import Placement, add_scalars_, place_scalars, reparametrize_layers_
from normfree.conversion.verification import Verification, expected_growth, require_usable
from normfree.graph.admission import rigid_layers
from normfree.methods import InitContext, Method
from normfree.methods.initialize import check_example
from normfree.nn.model_state import restored_on_error, run_on_copy, small_copy, trial_run
from normfree.nn.scalars import scalars_of
from normfree.plan import ResidualPlan, remember_plan_

Example = Tensor | Sequence[Any] | Mapping[str, Any]
Test = Literal["rules", "forward", "backward", "zeros"]
"""How an obstacle is found: by rules, by a forward pass, by a forward and backward pass, or by more of them, which show
that zeros stay zeros."""


class UndoneError(Exception):
    """The end of a trial: the conversion was possible."""


class MethodError(ValueError):
    """This method cannot convert the model; another method might.

    Attributes:
        found_by: How the obstacle was found. Whether it stands in the way of another method is found likewise.
    """

    def __init__(self, message: str, found_by: Test = "rules") -> None:
        super().__init__(message)
        self.found_by = found_by


@dataclass
class Conversion:
    """A conversion in progress.

    Attributes:
        model: The model that is converted in place.
        method: The method.
        example: The example input.
        facts: What is known of the original.
        heads: The names of layers that return class scores.
        before: The behaviour of the original; None if the result is not compared with it.
        records: The changes so far.
        notes: The notes on them.
        keeps_layers: Whether the method only replaces the normalizers, and leaves weights and sums as they are.
        values: The initial values of the method's scalars at each branch.
        placed: The scalars to add, and the reasons why others cannot be added.
        trial: How to find out if the conversion is possible, in a trial that changes nothing; None in a conversion.
        passes: The passes so far.
    """

    model: nn.Module
    method: Method
    example: Example
    facts: Inspection
    heads: Sequence[str] = ()
    before: PassResult | None = None
    records: list[Record] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    keeps_layers: bool = False
    values: Sequence[Mapping[str, float]] = ()
    placed: Placement = field(default_factory=lambda: Placement({}, {}))
    trial: Test | None = None
    passes: PassCount = field(default_factory=PassCount)

    def __post_init__(self) -> None:
        plan = self.facts.plan
        self.keeps_layers = self.method.norm is not None
        self.values = [self.method.rule.at(branch.position) for branch in plan.branches]
        if not self.keeps_layers:
            self.placed = place_scalars(
                self.model, plan, self.method, self.values, self.facts.flow, self.facts.weightless
            )


def run_stages_(conversion: Conversion, generator: torch.Generator | None) -> ResidualPlan:
    """Stages 2 to 5. An error leaves the model as it was, and so does a trial, which ends in `UndoneError`."""
    refuse(conversion)
    with restored_on_error(conversion.model) as as_before:
        _replace_(conversion, generator)
        _initialize_(conversion, generator)
        _check_(conversion, as_before)
        if conversion.trial is not None:
            raise UndoneError
    changes = Changes(
        method=conversion.method.spec,
        removed=tuple(record for record in conversion.records if isinstance(record, Removed)),
        added=tuple(record for record in conversion.records if isinstance(record, Added)),
        scaled=tuple(record for record in conversion.records if isinstance(record, Rescaled)),
        parameters_before=conversion.facts.parameters,
        parameters_after=sum(p.numel() for p in conversion.model.parameters()),
        notes=(*conversion.facts.notes(keeps_layers=conversion.keeps_layers), *conversion.notes),
    )
    plan = replace(conversion.facts.plan, changes=changes)
    remember_plan_(conversion.model, plan, small_copy(conversion.example))
    return plan


def refuse(conversion: Conversion) -> None:
    """Raise an error with every reason why the model cannot be converted, as far as rules tell."""
    model, method, facts = conversion.model, conversion.method, conversion.facts
    for name, module in model.named_modules():
        if scalars_of(module):
            raise ValueError(
                f"expected a model that was not converted yet, got one with scalars at {quoted(name)}; convert the "
                "original, or write new weights by initialize_"
            )
    needs_sums = method.weight == "plain" and not {"none", "dense"} & set(method.skips)
    if not facts.plan.branches and not conversion.keeps_layers and needs_sums:
        raise MethodError(f"method '{method.name}' works on residual branches, but {NO_SUMS}")
    obstacles = facts.obstacles(model)
    error = ValueError if obstacles else MethodError  # these obstacles are the same for all methods
    if conversion.keeps_layers:
        unclear = [name for name in facts.norms if channels_of(model.get_submodule(name)) is None]
        obstacles |= {f"{quoted(name)}: its number of channels is unknown": "" for name in unclear}
    else:
        obstacles |= conversion.placed.obstacles
        kind = f"a {method.weight.replace('_', ' ')} layer"
        obstacles |= {
            f"'{path}' cannot become {kind}: {reason}": ""
            for path, reason in rigid_layers(model, facts.plan, method, facts.flow).items()
            if path.removesuffix(".weight") not in facts.standardized and conversion.before is not None
        }
        if conversion.before is not None:
            obstacles |= {**frozen_layers(model, facts.plan), **fixed_weights(model, facts.plan)}
    if obstacles:
        reasons = grouped(obstacles)
        more = f"; and {len(reasons) - SHOWN} more" if len(reasons) > SHOWN else ""
        remedies = ", or ".join(filter(None, dict.fromkeys(obstacles.values())))
        raise error(
            f"{type(model).__name__} cannot be converted by '{method.name}': {'; '.join(reasons[:SHOWN])}{more}"
            f"{'; ' if remedies else ''}{remedies}"
        )
    _require_measurable(conversion)


def _require_measurable(conversion: Conversion) -> None:
    """Refuse a method that sets its weights from data, and cannot measure a layer or use the example."""
    try:
        check_example(_init_context(conversion, None), conversion.method)
    except ValueError as error:
        raise MethodError(str(error)) from error


def _init_context(conversion: Conversion, generator: torch.Generator | None) -> InitContext:
    example = conversion.example if isinstance(conversion.example, Tensor) else None
    return InitContext(conversion.model, conversion.facts.plan, generator, example)


def starts_at_zero(conversion: Conversion) -> bool:
    """Whether the method sets the multipliers or weights of branches to 0."""
    zeros = any(scalars.get("beta") == 0 for scalars in conversion.values)
    return zeros or getattr(conversion.method.initializer, "zero_last", False)


def _replace_(conversion: Conversion, generator: torch.Generator | None) -> None:
    """Remove the normalizers and give the model the method's layers and scalars."""
    model, facts, method = conversion.model, conversion.facts, conversion.method
    layers, hidden = list(facts.plan.layers()), list(facts.plan.hidden())
    alpha = method.options.get("alpha") if method.norm == "tanh" else None
    conversion.records += remove_norms_(model, facts, tanh=float(alpha) if isinstance(alpha, float | int) else None)
    if facts.norms:
        conversion.records += scale_embeddings_(model, facts.plan, layers, facts.flow.call_counts)
        conversion.records += draw_tokens_(model, learned_tokens(model, facts.plan, facts.flow), generator)
    if not conversion.keeps_layers:
        conversion.records += make_plain_(model, facts.standardized)
        conversion.records += reparametrize_layers_(model, hidden, method)
        conversion.records += reset_layer_scales_(model, facts.plan)
        conversion.records += add_scalars_(model, conversion.placed.scalars)


@torch.no_grad()
def _initialize_(conversion: Conversion, generator: torch.Generator | None) -> None:
    """Set biases to 0 and weights by the method; the scalars have their values already."""
    if conversion.keeps_layers:
        return
    ctx = _init_context(conversion, generator)
    try:
        ctx.zero_biases_()
        if conversion.method.needs_example:
            conversion.passes.add()
        conversion.method.initializer(ctx)
        if shared := [] if starts_at_zero(conversion) else divide_shared_ends_(conversion.model, conversion.facts.plan):
            conversion.records += shared
            names = [record.name for record in shared]
            conversion.notes.append(f"divided by the root of the number of sums that use it: {listed(names)}")
    except ValueError as error:  # the method's own message
        raise MethodError(str(error)) from error
    except Exception as error:
        raise _stopped(conversion.model, error) from error


def _check_(conversion: Conversion, as_before: Callable[[], AbstractContextManager[None]]) -> None:
    """Run the converted model, rescale the layers outside the branches on the way, and compare it with the original.

    Inside `as_before()` the model is the original.
    """
    model, plan = conversion.model, conversion.facts.plan
    remaining = [f"'{name}' ({type(module).__name__})" for name, module in find_norms(model).items()]
    if remaining:
        raise ValueError(f"expected a model without normalization, got {', '.join(remaining)} after the conversion")
    if conversion.trial == "forward" and conversion.keeps_layers:  # nothing is rescaled
        _verify(conversion, as_before, None)
        return
    layers = bool(conversion.facts.norms) and not conversion.keeps_layers and not conversion.method.needs_example
    experts = conversion.facts.experts
    with rescaling_(model, plan, conversion.placed.weightless, layers=layers, experts=experts) as scales:
        out = _run(conversion)
    conversion.passes.add()
    conversion.records = [*map(scales.with_value, conversion.records), *scales.rescaled]
    conversion.notes += scales.notes()
    # The run used rescaled outputs, not the rescaled weights, so these are checked, too.
    if not all(t.isfinite().all() for t in floats_of((out, scales.parameters(model)))):
        require_usable(model, conversion.example, conversion.before)
        place = first_module(model, conversion.example, lambda t: not t.isfinite().all(), conversion.passes)
        raise MethodError(
            f"expected finite outputs of the converted {type(model).__name__} on the example, got NaN or infinity, "
            f"from {place} on",
            found_by="forward",
        )
    if conversion.before is None:
        return
    changed = {record.name for record in conversion.records if isinstance(record, Rescaled)}
    changed |= {f"{layer.name}.bias" for layer in plan.layers() if not conversion.keeps_layers}
    if frozen := [name for name, p in model.named_parameters() if name in changed and not p.requires_grad]:
        conversion.notes.append(f"frozen, but scaled, drawn or set to zero: {listed(frozen)}")
    halves = {p.dtype for p in model.parameters() if p.requires_grad} & {torch.bfloat16, torch.float16}
    for kind in sorted(halves, key=str):
        conversion.notes.append(
            f"parameters are of type {kind}, in which numbers near 1, such as multipliers and gains, do not move by "
            f"less than {torch.finfo(kind).eps / 2:.1g}; train float32 parameters under torch.autocast"
        )
    _verify(conversion, as_before, out, scales.growth())


def _verify(
    conversion: Conversion,
    as_before: Callable[[], AbstractContextManager[None]],
    out: Any,
    growing: Sequence[str] = (),
) -> None:
    """Compare the converted model with the original.

    `out` is its output on the example at its initial values; None in a trial that leaves out this pass. `growing` holds
    notes on sums that enlarge the signal.
    """
    model, plan = conversion.model, conversion.facts.plan
    assert conversion.before is not None

    def learned(names: Collection[str]) -> Collection[str]:
        conversion.passes.add(backward=True)
        with as_before():
            result = forward_and_backward(model, conversion.example, plan, conversion.facts.norms, watched=names)
        return [name for name, learns in (result.learning or {}).items() if learns]

    backward = conversion.trial != "forward"
    may_stop = conversion.method.kind == "norm-free"  # a baseline is not refused
    found = Verification(model, conversion.example, plan, conversion.before, conversion.passes)
    growth = expected_growth(plan, conversion.values)
    locate = conversion.trial is None
    goes_on = found.compare_outputs(out, growth, conversion.heads, backward=backward, locate=locate, may_stop=may_stop)
    found_by: Test = "forward" if found.reasons else "backward"
    if backward and goes_on and found.compare_learning(learned, conversion.facts.experts) and not found.reasons[1:]:
        found_by = "zeros"
    reasons = found.reasons
    conversion.notes += found.notes
    conversion.notes += filter(None, [raw_data(conversion.facts, conversion.example)])
    if conversion.method.kind != "norm-free":  # a baseline may explode
        conversion.notes += reasons
    elif reasons:
        require_usable(model, conversion.example, conversion.before)
        heads = "; name the output layers by heads=" if len(plan.classifier) > 1 and not conversion.heads else ""
        text = (
            f"{type(model).__name__} cannot be converted by '{conversion.method.name}': "
            f"{'; '.join((*reasons, *whole_blocks(plan), *growing))}{heads}"
        )
        raise ValueError(text) if whole_blocks(plan) else MethodError(text, found_by)


def _run(conversion: Conversion) -> Any:
    """Run the converted model on the example."""
    try:
        with trial_run(conversion.model):
            return run_on_copy(conversion.model, conversion.example)
    except Exception as error:  # whatever the model's own code raises
        raise _stopped(conversion.model, error) from error


def _stopped(model: nn.Module, error: Exception) -> MethodError:
    """The refusal if the code of the model fails; it names the innermost module of the model that was running."""
    names = {id(module): name for name, module in model.named_modules()}
    running = [id(frame.f_locals.get("self")) for frame, _ in traceback.walk_tb(error.__traceback__)]
    place = next((names[key] for key in reversed(running) if key in names), "")
    return MethodError(
        f"expected the converted {type(model).__name__} to run on the example, but {quoted(place)} failed: {error}; "
        "its own code may rely on a normalizer, or on the class of a layer",
        found_by="forward",
    )
