"""Convert any model with normalization into one without: look, refuse, replace, initialize, check."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from normfree.conversion.changes import Added, Changes, Record, Removed, Rescaled
from normfree.conversion.forward_passes import AttemptSucceeded, FoundBy, MethodError, floats_of, model_failed_error
from normfree.conversion.inspection import NO_SUMS, Inspection, find_norms, inspect_model
from normfree.conversion.message_text import MOST_REASONS, grouped, listed, quoted
from normfree.conversion.probing import plain_base, probing
from normfree.conversion.replacement import channels_of, fixed_weights, frozen_layers, replace_layers_
from normfree.conversion.rescaling import divide_shared_ends_, rescaling_
from normfree.conversion.scalar_placement import UNREACHED, Placement, ScalarStart, add_scalars_, place_scalars
from normfree.conversion.verification import Verification
from normfree.graph.convertibility import check_request, layers_not_reparametrizable, require_signal
from normfree.methods import InitContext, Method, get
from normfree.methods.initialize import check_example
from normfree.nn.model_state import restored_on_error
from normfree.nn.scalars import ScalarName, scalars_of
from normfree.nn.weight_layers import WEIGHT_LAYERS
from normfree.plan import ResidualPlan, remember_plan_

Example = Tensor | Sequence[Any] | Mapping[str, Any]

_SUGGESTED_METHODS = ("fixup", "skipinit", "rezero", "nf", "wn", "dyt", "lsuv:by=layer")  # in a refusal
_MOST_PARAMETERS_TO_TRY = 200_000_000  # of a model on which other methods are tried
_MOST_PARAMETERS_TO_CONFIRM = 50_000_000  # the same, for methods that are recommended even if they were not tried
_COSTS: dict[FoundBy, int] = {"forward": 2, "backward": 4, "zeros": 7}  # the cost of an attempt, in forward passes


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
    check_request(model, method, example, plan, heads)
    inspection = inspect_model(model, example, plan, heads)
    if plan is None:
        require_signal(model, inspection.flow, inspection.plan, heads)
    verification = Verification(model, example, inspection, heads)
    try:
        with probing(model, inspection):
            verification.run_original()
    except Exception as error:  # whatever the model's own code raises
        raise ValueError(
            f"expected a model that runs on the example, but {type(model).__name__} failed: {error}; "
            "pass an example that it accepts"
        ) from error
    conversion = _Conversion(model, method, example, inspection, verification)
    try:
        return _run_steps_(conversion, generator)
    except MethodError as refusal:
        reason = str(refusal).removesuffix("; use 'fixup' for this model")  # attempts show which methods convert it
        raise ValueError(f"{reason}{_remedy(conversion, refusal.found_by)}") from refusal.__cause__


def repeat_conversion_(model: nn.Module, plan: ResidualPlan, changes: Changes, example: Example) -> None:
    """Give a model the structure of an earlier conversion, with the same scalars.

    Its weights are loaded later, so the result is not compared with the original.
    """
    inspection = inspect_model(model, example, plan, ())
    layers = {record.name: model.get_submodule(record.name) for record in changes.removed}
    inspection.standardized.update({n: plain_base(m) for n, m in layers.items() if isinstance(m, WEIGHT_LAYERS)})
    verification = Verification(model, example, inspection)
    conversion = _Conversion(model, get(changes.method), example, inspection, verification)
    added = {record.name: record for record in changes.added}
    scalars = {place: start for place, start in conversion.placed.scalars.items() if ".".join(place) in added}
    # With other weights, the example may reach other experts; the record knows the scalars of all.
    calls, modules = inspection.flow.call_counts, dict(model.named_modules())
    for path, record in added.items():
        name, _, scalar = path.rpartition(".")
        if record.value is not None and name in modules and not calls[name]:
            scalars[name, cast(ScalarName, scalar)] = ScalarStart(record.value, record.learnable, record.kind)
    obstacles = {text: remedy for text, remedy in conversion.placed.obstacles.items() if UNREACHED not in text}
    conversion.placed = Placement(scalars, obstacles)  # all multipliers have their values already
    _run_steps_(conversion, torch.Generator().manual_seed(0))


@dataclass
class _Conversion:
    """A conversion in progress.

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
        placed: The scalars to add, and the reasons why others have no place.
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
        inspection, plan, method = self.inspection, self.inspection.plan, self.method
        self.keeps_layers = method.norm is not None
        self.values = [method.rule.at(branch.position) for branch in plan.branches]
        self.placed = Placement({}, {})
        if not self.keeps_layers:
            self.placed = place_scalars(self.model, plan, method, self.values, inspection.flow, inspection.weightless)

    def init_context(self, generator: torch.Generator | None) -> InitContext:
        """The context of the method's initializer."""
        example = self.example if isinstance(self.example, Tensor) else None
        return InitContext(self.model, self.inspection.plan, generator, example)

    @property
    def starts_at_zero(self) -> bool:
        """Whether the method sets the multipliers or weights of branches to 0."""
        zeros = any(scalars.get("beta") == 0 for scalars in self.values)
        return zeros or getattr(self.method.initializer, "zero_last", False)


def _run_steps_(conversion: _Conversion, generator: torch.Generator | None) -> ResidualPlan:
    """Run steps 2 to 5. Any error leaves the model as it was; an attempt that succeeds raises `AttemptSucceeded`."""
    _refuse(conversion)
    with restored_on_error(conversion.model) as as_before:
        conversion.records += replace_layers_(conversion.model, conversion.inspection, conversion.method, generator)
        conversion.records += add_scalars_(conversion.model, conversion.placed.scalars)
        _initialize_(conversion, generator)
        _check_(conversion, as_before)
        if conversion.attempt is not None:
            raise AttemptSucceeded
    changes = Changes(
        method=conversion.method.spec,
        removed=tuple(record for record in conversion.records if isinstance(record, Removed)),
        added=tuple(record for record in conversion.records if isinstance(record, Added)),
        scaled=tuple(record for record in conversion.records if isinstance(record, Rescaled)),
        parameters_before=conversion.inspection.parameters,
        parameters_after=sum(p.numel() for p in conversion.model.parameters()),
        notes=(*conversion.inspection.notes(keeps_layers=conversion.keeps_layers), *conversion.notes),
    )
    plan = replace(conversion.inspection.plan, changes=changes)
    remember_plan_(conversion.model, plan, conversion.verification.passes.small)
    return plan


def _refuse(conversion: _Conversion) -> None:
    """Raise an error with every reason that rules find against the conversion."""
    model, method, inspection = conversion.model, conversion.method, conversion.inspection
    compared = conversion.verification.original_ran
    for name, module in model.named_modules():
        if scalars_of(module):
            raise ValueError(
                f"expected a model that was not converted yet, got one with scalars at {quoted(name)}; convert the "
                "original, or write new weights by initialize_"
            )
    needs_sums = method.weight_kind == "plain" and not {"none", "dense"} & set(method.skips)
    if not inspection.plan.branches and not conversion.keeps_layers and needs_sums:
        raise MethodError(f"method '{method.name}' works on residual branches, but {NO_SUMS}")
    obstacles = inspection.obstacles(model)
    error = ValueError if obstacles else MethodError  # the obstacles of the inspection are the same for all methods
    if conversion.keeps_layers:
        unclear = [name for name in inspection.norms if channels_of(model.get_submodule(name)) is None]
        obstacles |= {f"{quoted(name)}: its number of channels is unknown": "" for name in unclear}
    else:
        obstacles |= conversion.placed.obstacles
        kind = f"a {method.weight_kind.replace('_', ' ')} layer"
        obstacles |= {
            f"'{path}' cannot become {kind}: {reason}": ""
            for path, reason in layers_not_reparametrizable(model, inspection.plan, method, inspection.flow).items()
            if path.removesuffix(".weight") not in inspection.standardized and compared
        }
        if compared:
            obstacles |= {**frozen_layers(model, inspection.plan), **fixed_weights(model, inspection.plan)}
    if obstacles:
        reasons = grouped(obstacles)
        more = f"; and {len(reasons) - MOST_REASONS} more" if len(reasons) > MOST_REASONS else ""
        remedies = ", or ".join(filter(None, dict.fromkeys(obstacles.values())))
        raise error(
            f"{type(model).__name__} cannot be converted by '{method.name}': {'; '.join(reasons[:MOST_REASONS])}{more}"
            f"{'; ' if remedies else ''}{remedies}"
        )
    try:
        check_example(conversion.init_context(None), method)
    except ValueError as error:  # the method sets its weights from data, and cannot use the example or measure a layer
        raise MethodError(str(error)) from error


@torch.no_grad()
def _initialize_(conversion: _Conversion, generator: torch.Generator | None) -> None:
    """Set biases to 0 and weights by the method; the scalars have their values already."""
    if conversion.keeps_layers:
        return
    ctx = conversion.init_context(generator)
    try:
        ctx.zero_biases_()
        if conversion.method.needs_example:
            conversion.verification.passes.spent += 1
        conversion.method.initializer(ctx)
        if shared := [] if conversion.starts_at_zero else divide_shared_ends_(ctx.model, ctx.plan):
            conversion.records += shared
            names = [record.name for record in shared]
            conversion.notes.append(f"divided by the root of the number of sums that use it: {listed(names)}")
    except ValueError as error:  # the method's own message
        raise MethodError(str(error)) from error
    except Exception as error:
        raise model_failed_error(conversion.model, error) from error


def _check_(conversion: _Conversion, as_before: Callable[[], AbstractContextManager[None]]) -> None:
    """Run the converted model, rescale the layers outside the branches on the way, and compare it with the original.

    Inside `as_before()` the model is the original.
    """
    model, inspection, verification = conversion.model, conversion.inspection, conversion.verification
    remaining = [f"'{name}' ({type(module).__name__})" for name, module in find_norms(model).items()]
    if remaining:
        raise ValueError(f"expected a model without normalization, got {', '.join(remaining)} after the conversion")
    if conversion.attempt == "forward" and conversion.keeps_layers:  # such a method rescales nothing
        verification.compare(None, conversion.method, conversion.values, as_before, attempt="forward")
        return
    layers = bool(inspection.norms) and not conversion.keeps_layers and not conversion.method.needs_example
    weightless = conversion.placed.weightless
    with rescaling_(
        model, inspection.plan, weightless, layers=layers, rectified=inspection.rectified, experts=inspection.experts
    ) as scales:
        out = verification.passes.run(conversion.example)
    conversion.records = [*map(scales.with_value, conversion.records), *scales.rescaled]
    conversion.notes += scales.notes()
    # In this run the outputs of layers were rescaled. The rescaled weights did not run yet, so check them, too.
    if not all(t.isfinite().all() for t in floats_of((out, scales.parameters(model)))):
        verification.require_usable()
        raise MethodError(
            f"expected finite outputs of the converted {type(model).__name__} on the example, got NaN or infinity, "
            f"from {verification.passes.first_module(lambda t: not t.isfinite().all())} on",
            found_by="forward",
        )
    if not verification.original_ran:
        return
    changed = {record.name for record in conversion.records if isinstance(record, Rescaled)}
    changed |= {f"{layer.name}.bias" for layer in inspection.plan.layers() if not conversion.keeps_layers}
    if frozen := [name for name, p in model.named_parameters() if name in changed and not p.requires_grad]:
        conversion.notes.append(f"frozen, but scaled, drawn or set to zero: {listed(frozen)}")
    halves = {p.dtype for p in model.parameters() if p.requires_grad} & {torch.bfloat16, torch.float16}
    for kind in sorted(halves, key=str):
        conversion.notes.append(
            f"parameters are of type {kind}, in which numbers near 1, such as multipliers and gains, do not move by "
            f"less than {torch.finfo(kind).eps / 2:.1g}; train float32 parameters under torch.autocast"
        )
    conversion.notes += verification.compare(
        out, conversion.method, conversion.values, as_before, attempt=conversion.attempt, growing=scales.growth()
    )


def _remedy(conversion: _Conversion, found_by: FoundBy) -> str:
    """Advice on a refused model: standardize the data, or use one of the methods that convert the model.

    Each method that the rules allow is tried, until the limit of passes is reached. An attempt repeats the passes that
    found the obstacle, or runs a forward pass only if the obstacle cannot occur with this method:
    - Rules found the obstacle, and they allow this method.
    - The obstacle is zeros that stay zero, and this method sets nothing to zero.
    - The refused method keeps the original weights, and this method draws new ones.
    In these cases a method is recommended even if the limit or the size of the model leaves no pass for it. There are
    two exceptions: rules do not know the scale of the original weights, so a method that keeps them must be tried; and
    data of an unusual size may be an obstacle to any method. Such a method is listed as not tried.
    """
    inspection = conversion.inspection
    if remedy := inspection.data_scale_remedy():
        return f"; {remedy}"
    passes, example = conversion.verification.passes, conversion.verification.passes.small
    attempts: dict[str, tuple[bool, int, _Conversion]] = {}  # whether it needs no attempt, and the cost
    for name in _SUGGESTED_METHODS:
        method = get(name)
        from_data = not inspection.plan.branches and isinstance(example, Tensor)  # lsuv lets deep sums explode
        if method.name == conversion.method.name or (method.needs_example and not from_data):
            continue
        other = replace(conversion, method=method, example=example, records=[], notes=[])
        try:
            _refuse(other)
        except ValueError:
            continue
        avoids = conversion.keeps_layers or found_by == "rules" or (found_by == "zeros" and not other.starts_at_zero)
        other.attempt = "forward" if avoids else found_by
        trusted = avoids and not other.keeps_layers and inspection.has_usual_data
        attempts[name] = trusted, _COSTS[other.attempt] + method.needs_example, other
    usable: list[str] = []
    untried: list[str] = []
    for name, (trusted, cost, other) in sorted(attempts.items(), key=lambda item: item[1][:2]):
        limit = _MOST_PARAMETERS_TO_CONFIRM if trusted else _MOST_PARAMETERS_TO_TRY
        if inspection.parameters > limit or not passes.allows(cost):
            (usable if trusted else untried).append(name)
        elif _converts(other):
            usable.append(name)
    usable, untried = ([name for name in _SUGGESTED_METHODS if name in found] for found in (usable, untried))
    if not usable and not untried:
        others = [name for name in _SUGGESTED_METHODS if get(name).name != conversion.method.name]
        return f"; none of the other methods converts it ({_join(others, 'and')})"
    remedy = f"; use {_join(usable, 'or')}" if usable else ""
    were = "was" if len(untried) == 1 else "were"
    return f"{remedy}; {_join(untried, 'and')} {were} not tried" if untried else remedy


def _join(names: Sequence[str], word: str) -> str:
    """Names in a sentence: `'a', 'b' or 'c'`."""
    *first, last = map(quoted, names)
    return f"{', '.join(first)} {word} {last}" if first else last


def _converts(attempt: _Conversion) -> bool:
    """Whether an attempt succeeds; it leaves the model as it was."""
    try:
        _run_steps_(attempt, torch.Generator().manual_seed(0))
    except Exception as end:  # or whatever the model's own code raises
        return isinstance(end, AttemptSucceeded)
    return False
