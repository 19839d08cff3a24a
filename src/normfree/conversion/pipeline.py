"""Convert any model with normalization into one without: look, refuse, replace, initialize, check."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from normfree.conversion.changes import SHOWN, Added, Changes, Record, Removed, Rescaled, grouped, listed, quoted
from normfree.conversion.inspection import (
    NO_SUMS,
    Inspection,
    find_norms,
    frozen_layers,
    inspect_model,
    plain_base,
    probing,
    raw_data,
    whole_blocks,
)
from normfree.conversion.replacement import (
    channels_of,
    draw_tokens_,
    learned_tokens,
    make_plain_,
    remove_norms_,
    reset_layer_scales_,
    scale_embeddings_,
)
from normfree.conversion.rescaling import rescaling_
from normfree.conversion.scalar_placement import Placement, add_scalars_, place_scalars, reparametrize_layers_
from normfree.conversion.verification import (
    PassResult,
    expected_growth,
    floats_of,
    forward_and_backward,
    require_usable,
    verify,
)
from normfree.graph.admission import check_request, require_signal, rigid_layers
from normfree.methods import InitContext, Method, get
from normfree.methods.initialize import check_example
from normfree.nn.model_state import restored_on_error, run_on_copy, small_copy, trial_run
from normfree.nn.scalars import scalars_of
from normfree.nn.weight_layers import WEIGHT_LAYERS
from normfree.plan import ResidualPlan, remember_plan_

Example = Tensor | Sequence[Any] | Mapping[str, Any]

_METHODS = ("fixup", "nf", "skipinit", "wn", "dyt", "lsuv:by=layer")  # those that a refusal tries, in this order
_TRIED = 200_000_000  # parameters; with a larger model, other methods are not tried


class _UndoneError(Exception):
    """The end of a trial: the conversion was possible."""


class MethodError(ValueError):
    """This method cannot convert the model; another method might."""


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
    check_request(model, get(method), example)
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
    """Convert a model in place, in five stages.

    1. Look: find the residual branches and the normalizers, and how the model uses them.
    2. Refuse: raise one error that lists every obstacle, before anything is changed.
    3. Replace: remove the normalizers, reparametrize weights, add scalars.
    4. Initialize: write the weights by the method.
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
    check_request(model, method, example)
    facts = inspect_model(model, example, plan, heads)
    if plan is None:
        require_signal(model, facts.flow, facts.plan, heads)
    try:
        with probing(model, facts):
            before = forward_and_backward(model, example, facts.plan, facts.norms, watched=())
    except Exception as error:  # whatever the model's own code raises
        raise ValueError(
            f"expected a model that runs on the example, but {type(model).__name__} failed: {error}; "
            "pass an example that it accepts"
        ) from error
    conversion = _Conversion(model, method, example, facts, heads, before)
    try:
        return _run_stages_(conversion, generator)
    except MethodError as refusal:
        raise ValueError(f"{refusal}{_remedy(conversion)}") from refusal.__cause__


def repeat_conversion_(model: nn.Module, plan: ResidualPlan, changes: Changes, example: Example) -> None:
    """Repeat an earlier conversion for its structure, with the scalars that it added; the result is not compared."""
    facts = inspect_model(model, example, plan, ())
    layers = {record.name: model.get_submodule(record.name) for record in changes.removed}
    facts.standardized.update({n: plain_base(m) for n, m in layers.items() if isinstance(m, WEIGHT_LAYERS)})
    conversion = _Conversion(model, get(changes.method), example, facts)
    added = {record.name for record in changes.added}
    scalars = {place: start for place, start in conversion.placed.scalars.items() if ".".join(place) in added}
    conversion.placed = Placement(scalars, conversion.placed.obstacles)  # all multipliers have their values already
    _run_stages_(conversion, torch.Generator().manual_seed(0))


@dataclass
class _Conversion:
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
        trial: Whether only to find out if the conversion is possible.
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
    trial: bool = False

    def __post_init__(self) -> None:
        plan = self.facts.plan
        self.keeps_layers = self.method.norm is not None
        self.values = [self.method.rule.at(branch.position) for branch in plan.branches]
        if not self.keeps_layers:
            self.placed = place_scalars(
                self.model, plan, self.method, self.values, self.facts.flow, self.facts.weightless
            )


def _run_stages_(conversion: _Conversion, generator: torch.Generator | None) -> ResidualPlan:
    """Stages 2 to 5. An error leaves the model as it was, and so does a trial, which ends in `_UndoneError`."""
    _refuse(conversion)
    with restored_on_error(conversion.model) as as_before:
        _replace_(conversion, generator)
        _initialize_(conversion, generator)
        _check_(conversion, as_before)
        if conversion.trial:
            raise _UndoneError
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


def _remedy(conversion: _Conversion) -> str:
    """A remedy: standardized data, or a method that converts the model. Nothing for a large model."""
    if remedy := raw_data(conversion.facts, conversion.example):
        return f"; {remedy}"
    if conversion.facts.parameters > _TRIED:
        return ""
    for name in _METHODS:
        method = get(name)
        unusable = method.needs_example and not isinstance(conversion.example, Tensor)
        if method.spec == conversion.method.spec or unusable:
            continue
        example = small_copy(conversion.example)
        trial = replace(conversion, method=method, example=example, records=[], notes=[], trial=True)
        try:
            _run_stages_(trial, torch.Generator().manual_seed(0))
        except _UndoneError:
            return f"; '{name}' converts it"
        except Exception:  # whatever the model's own code raises
            continue
    return "; none of the other methods that were tried converts it"


def _refuse(conversion: _Conversion) -> None:
    """Raise an error with every reason why the model cannot be converted."""
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
            for path, reason in rigid_layers(model, facts.plan, method, facts.flow.call_counts).items()
            if path.removesuffix(".weight") not in facts.standardized and conversion.before is not None
        }
        obstacles |= frozen_layers(model, facts.plan) if conversion.before is not None else {}
    if obstacles:
        reasons = grouped(obstacles)
        more = f"; and {len(reasons) - SHOWN} more" if len(reasons) > SHOWN else ""
        remedies = ", or ".join(filter(None, dict.fromkeys(obstacles.values())))
        raise error(
            f"{type(model).__name__} cannot be converted by '{method.name}': {'; '.join(reasons[:SHOWN])}{more}"
            f"{'; ' if remedies else ''}{remedies}"
        )


def _replace_(conversion: _Conversion, generator: torch.Generator | None) -> None:
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
def _initialize_(conversion: _Conversion, generator: torch.Generator | None) -> None:
    """Set biases to 0 and weights by the method; the scalars have their values already."""
    if conversion.keeps_layers:
        return
    example = conversion.example if isinstance(conversion.example, Tensor) else None
    ctx = InitContext(conversion.model, conversion.facts.plan, generator, example)
    try:
        check_example(ctx, conversion.method)
        ctx.zero_biases_()
        conversion.method.initializer(ctx)
    except ValueError as error:  # the method's own message
        raise MethodError(str(error)) from error
    except Exception as error:
        raise _stopped(conversion.model, error) from error


def _check_(conversion: _Conversion, as_before: Callable[[], AbstractContextManager[None]]) -> None:
    """Run the converted model, rescale the layers outside the branches on the way, and compare it with the original.

    Inside `as_before()` the model is the original.
    """
    model, plan = conversion.model, conversion.facts.plan
    remaining = [f"'{name}' ({type(module).__name__})" for name, module in find_norms(model).items()]
    if remaining:
        raise ValueError(f"expected a model without normalization, got {', '.join(remaining)} after the conversion")
    layers = bool(conversion.facts.norms) and not conversion.keeps_layers and not conversion.method.needs_example
    with rescaling_(model, plan, conversion.placed.weightless, layers=layers) as scales:
        out = _run(conversion)
    conversion.records = [*map(scales.with_value, conversion.records), *scales.rescaled]
    conversion.notes += scales.notes()
    # The run used rescaled outputs, not the rescaled weights, so these are checked, too.
    if not all(t.isfinite().all() for t in floats_of((out, scales.parameters(model)))):
        require_usable(model, conversion.example, conversion.before)
        raise MethodError(
            f"expected finite outputs of the converted {type(model).__name__} on the example, got NaN or infinity"
        )
    if conversion.before is None:
        return
    changed = {record.name for record in conversion.records if isinstance(record, Rescaled)}
    changed |= {f"{layer.name}.bias" for layer in plan.layers() if not conversion.keeps_layers}
    if frozen := [name for name, p in model.named_parameters() if name in changed and not p.requires_grad]:
        conversion.notes.append(f"frozen, but scaled, drawn or set to zero: {listed(frozen)}")
    growth = expected_growth(plan, conversion.values)

    def learned(names: Collection[str]) -> Collection[str]:
        with as_before():
            result = forward_and_backward(model, conversion.example, plan, conversion.facts.norms, watched=names)
        return [name for name, learns in (result.learning or {}).items() if learns]

    reasons, cautions = verify(
        model, conversion.example, plan, growth, conversion.before, learned, out, conversion.heads
    )
    conversion.notes += cautions
    conversion.notes += filter(None, [raw_data(conversion.facts, conversion.example)])
    if conversion.method.kind != "norm-free":  # a baseline may explode
        conversion.notes += reasons
    elif reasons:
        require_usable(model, conversion.example, conversion.before)
        heads = "; name the output layers by heads=" if len(plan.classifier) > 1 and not conversion.heads else ""
        raise (ValueError if whole_blocks(plan) else MethodError)(
            f"{type(model).__name__} cannot be converted by '{conversion.method.name}': "
            f"{'; '.join((*reasons, *whole_blocks(plan), *scales.growth()))}{heads}"
        )


def _run(conversion: _Conversion) -> Any:
    """Run the converted model on the example."""
    try:
        with trial_run(conversion.model):
            return run_on_copy(conversion.model, conversion.example)
    except Exception as error:  # whatever the model's own code raises
        raise _stopped(conversion.model, error) from error


def _stopped(model: nn.Module, error: Exception) -> MethodError:
    return MethodError(
        f"expected the converted {type(model).__name__} to run on the example, but it failed: {error}; its own code "
        "may rely on a normalizer, or on the class of a layer"
    )
