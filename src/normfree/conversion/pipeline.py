"""Convert any model with normalization into one without: look, refuse, replace, initialize, check."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from normfree.conversion.changes import Changes
from normfree.conversion.inspection import inspect_model, run, trial_run
from normfree.conversion.norms import channels_of, find_norms, make_plain_, plain_base, remove_norms_, unknown_norms
from normfree.conversion.rescaling import (
    draw_tokens_,
    learned_tokens,
    rescaling_layers_,
    reset_layer_scales_,
    scale_embeddings_,
)
from normfree.conversion.scalar_placement import (
    Obstacles,
    Scalars,
    add_scalars_,
    place_scalars,
    quoted,
    reparametrize_layers_,
)
from normfree.conversion.verification import behave, verify
from normfree.conversion.work import NO_SUMS, SHOWN, ConversionWork, Example, count_parameters, whole_blocks
from normfree.graph.admission import cannot_convert_by, cannot_convert_model, rigid_layers, scales_sums
from normfree.graph.discovery import plan_from_flow, require_signal, unaccounted
from normfree.graph.flow import Flow, tensors_of
from normfree.graph.plain_sums import divides_by_own_scale
from normfree.graph.recorder import record
from normfree.methods import InitContext, Method, get
from normfree.methods.initialize import check_example
from normfree.nn.model_state import call_arguments, restored_on_error, small_copy
from normfree.nn.scalars import scalars_of
from normfree.plan import ResidualPlan, remember_plan_

_METHODS = ("fixup", "nf", "skipinit", "wn", "lsuv:by=layer", "dyt")  # those that a refusal tries, in this order
_TRIED = 200_000_000  # parameters; a larger model is not copied to try other methods


class MethodError(ValueError):
    """A method cannot convert a model; others may."""


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
        ValueError: If the model cannot be copied or converted; the message names each module in the way.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 2))
    >>> converted, plan = convert(model, "wn", torch.randn(2, 3, 8, 8))
    >>> type(converted[0]).__name__, type(converted[1]).__name__
    ('WeightNormConv2d', 'Identity')
    """
    _check_request(model, get(method), example)
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
       original: every parameter still has a gradient, outputs and first loss keep their scale.

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
        ValueError: If the model cannot be converted; the message names each module in the way.
    """
    method = get(method)
    _check_request(model, method, example)
    work = _look(model, method, example, plan, heads)
    return _change_(work, generator)


def repeat_conversion_(model: nn.Module, plan: ResidualPlan, changes: Changes, example: Example) -> None:
    """Repeat an earlier conversion for its structure, with the scalars that it added; the result is not compared."""
    work = _look(model, get(changes.method), example, plan, verify=False)
    added, removed = {record.name for record in changes.added}, {record.name for record in changes.removed}
    work.scalars = {(name, scalar): v for (name, scalar), v in work.scalars.items() if f"{name}.{scalar}" in added}
    work.inspection.standardized.intersection_update(removed)
    _change_(work, torch.Generator().manual_seed(0))


def _change_(work: ConversionWork, generator: torch.Generator | None) -> ResidualPlan:
    """Stages 2 to 5. An error leaves the model as it was."""
    try:
        _refuse(work)
        with restored_on_error(work.model):
            _replace_(work, generator)
            _initialize_(work, generator)
            _check_(work)
    except MethodError as refusal:
        raise ValueError(f"{refusal}{_other_methods(work)}") from refusal.__cause__
    plan = replace(work.plan, changes=work.changes())
    remember_plan_(work.model, plan, small_copy(work.example))
    return plan


def _other_methods(work: ConversionWork) -> str:
    """Which methods convert the model, at most two: each is tried on a copy. Nothing for a large model."""
    if work.before is None or not work.advise or work.parameters_before > _TRIED:
        return ""
    found: list[str] = []
    for name in _METHODS:
        try:
            trial = _look(copy.deepcopy(work.model), get(name), small_copy(work.example), None, work.heads)
            trial.advise = False
            _check_request(trial.model, trial.method, trial.example)
            _change_(trial, torch.Generator().manual_seed(0))
        except Exception:  # whatever copying the model raises
            continue
        if name != work.method.name:
            found.append(f"'{name}'")
        if len(found) == 2:
            break
    if not found:
        return "; no other method of those tried converts it, either"
    return f"; {' and '.join(found)} {'converts' if len(found) == 1 else 'convert'} it"


def _check_request(model: nn.Module, method: Method, example: Example) -> None:
    """Refuse a model that cannot be changed, a method that converts none, and an example that it cannot use."""
    reason = cannot_convert_model(model) or cannot_convert_by(method)
    if reason is not None:
        raise ValueError(reason)
    if method.needs_example and not isinstance(example, Tensor):
        raise ValueError(
            f"method '{method.name}' sets its weights from data: expected a tensor as example, got "
            f"{type(example).__name__}; use a method that needs none, such as 'fixup'"
        )


def _look(
    model: nn.Module,
    method: Method,
    example: Example,
    plan: ResidualPlan | None,
    heads: Sequence[str] = (),
    *,
    verify: bool = True,
) -> ConversionWork:
    """Collect everything that the conversion needs to know."""
    args, kwargs = call_arguments(example)

    @functools.cache
    def flow() -> Flow:
        with trial_run(model):  # in training mode a model may skip blocks at random
            return record(model, *args, **kwargs)

    inline: list[str] = []
    if plan is None:
        plan = plan_from_flow(model, flow(), heads)
        require_signal(model, flow(), plan, heads)
        inline = list(dict.fromkeys(node.home for node in flow().nodes if divides_by_own_scale(node)))
    norms = find_norms(model)
    inspection = inspect_model(model, norms, args, kwargs)
    scalars, obstacles = Scalars(), Obstacles()
    if method.norm is None:
        activated = any(end.nonzero for branch in plan.branches for end in branch.ends)
        used_flow = flow() if scales_sums(method) or activated else None
        scalars, obstacles = place_scalars(model, plan, method, inspection.calls, used_flow)
    return ConversionWork(
        model=model,
        method=method,
        example=example,
        plan=plan,
        flow=flow,
        norms=norms,
        inspection=inspection,
        scalars=scalars,
        obstacles=obstacles,
        unaccounted=unaccounted(model, plan),
        parameters_before=count_parameters(model),
        before=behave(model, example, plan) if verify else None,
        heads=heads,
        inline_norms=[home for home in inline if home not in norms],
    )


def _refuse(work: ConversionWork) -> None:
    """Raise an error with every reason why the model cannot be converted."""
    model, method = work.model, work.method
    for name, module in model.named_modules():
        if scalars_of(module):
            raise ValueError(
                f"expected a model that was not converted yet, got one with scalars at {quoted(name)}; convert the "
                "original, or write new weights by initialize_"
            )
    needs_sums = method.weight == "plain" and not {"none", "dense"} & set(method.skips)
    if not work.plan.branches and not work.keeps_layers and needs_sums:
        raise MethodError(f"method '{method.name}' works on residual branches, but {NO_SUMS}")
    obstacles: Obstacles = {
        f"{quoted(name)}: {type(module).__name__} is not a known normalizer": "replace it with one of torch.nn"
        for name, module in unknown_norms(model)
    }
    # L2 normalization (`normalize`) is intended in cosine attention and in heads that compare images.
    obstacles |= {
        f"{quoted(home)}: its own forward pass computes {function}": "make it a module, which can be removed"
        for home, function in work.inspection.functional_norms
        if function != "normalize"
    }
    obstacles |= {
        f"{quoted(name)}: {type(work.norms[name]).__name__} is called with several tensors": "give what it does "
        "besides normalizing, such as gating, a module of its own"
        for name in work.inspection.several_inputs
    }
    obstacles |= {
        f"{quoted(name)}: {type(model.get_submodule(name)).__name__} standardizes its weight, and does more than its "
        "base class": "replace it with a layer of torch.nn"
        for name in work.inspection.standardized
        if not plain_base(model.get_submodule(name), work.inspection.shapes[name])
    }
    if "" in work.norms:
        obstacles[f"{quoted('')}: the model itself is a normalizer"] = "convert the model that holds it"
    error = ValueError if obstacles else MethodError  # these obstacles are the same for all methods
    if work.keeps_layers:
        unclear = [name for name, module in work.norms.items() if channels_of(module) is None]
        obstacles |= {f"{quoted(name)}: its number of channels is unknown": "" for name in unclear}
    else:
        obstacles |= work.obstacles
        kind = f"a {method.weight.replace('_', ' ')} layer"
        obstacles |= {
            f"'{path}' cannot become {kind}: {reason}": ""
            for path, reason in rigid_layers(model, work.plan, method, work.inspection.calls).items()
            if path.removesuffix(".weight") not in work.inspection.standardized
        }
    if obstacles:
        more = f"; and {len(obstacles) - SHOWN} more" if len(obstacles) > SHOWN else ""
        remedies = ", or ".join(filter(None, dict.fromkeys(list(obstacles.values())[:SHOWN])))
        raise error(
            f"{type(model).__name__} cannot be converted by '{method.name}': {'; '.join(list(obstacles)[:SHOWN])}{more}"
            f"{'; ' if remedies else ''}{remedies}"
        )


def _replace_(work: ConversionWork, generator: torch.Generator | None) -> None:
    """Remove the normalizers and give the model the method's layers and scalars."""
    model, plan, method = work.model, work.plan, work.method
    tokens = learned_tokens(model, plan, work.flow) if work.norms else []
    alpha = method.options.get("alpha") if method.norm == "tanh" else None
    tanh = float(alpha) if isinstance(alpha, float | int) else None
    work.removed = remove_norms_(model, work.inspection, tanh=tanh)
    if work.norms:
        rescaled, added = scale_embeddings_(model, plan, work.inspection.calls)
        work.added += added
        work.rescaled += [*rescaled, *draw_tokens_(model, tokens, generator)]
    if not work.keeps_layers:
        work.removed += make_plain_(model, work.inspection)
        work.added += reparametrize_layers_(model, plan, method)
        work.rescaled += reset_layer_scales_(model, plan)
        work.added += add_scalars_(model, plan, work.scalars)


@torch.no_grad()
def _initialize_(work: ConversionWork, generator: torch.Generator | None) -> None:
    """Set biases to 0 and weights by the method; the scalars have their values already."""
    if work.keeps_layers:
        return
    example = work.example if isinstance(work.example, Tensor) else None
    ctx = InitContext(work.model, work.plan, generator, example)
    try:
        check_example(ctx, work.method)
        ctx.zero_biases_()
        work.method.initializer(ctx)
    except ValueError as error:  # the method's own message
        raise MethodError(str(error)) from error
    except Exception as error:
        raise _stopped(work.model, error) from error


def _check_(work: ConversionWork) -> None:
    """Run the converted model once, rescale the layers outside the branches on the way, and require finite numbers."""
    model = work.model
    remaining = [f"'{name}' ({type(module).__name__})" for name, module in find_norms(model).items()]
    if remaining:
        raise ValueError(f"expected a model without normalization, got {', '.join(remaining)} after the conversion")
    written: list[Tensor] = []
    if work.norms and not work.keeps_layers and not work.method.needs_example:
        with rescaling_layers_(model, work.plan) as layers:
            out = _run(work)
        work.rescaled += layers.rescaled
        work.not_rescaled = layers.skipped
        # The run used rescaled outputs, not the rescaled weights, so these are checked below, too.
        names = {record.name.rpartition(".")[0] for record in layers.rescaled}
        written = [p for name in names for p in model.get_submodule(name).parameters()]
    else:
        out = _run(work)
    numbers = [t for t in (*tensors_of(out), *written) if t.is_floating_point()]
    if not all(t.isfinite().all() for t in numbers):
        raise MethodError(
            f"expected finite outputs of the converted {type(model).__name__} on the example, got NaN or infinity"
        )
    if work.before is None:
        return
    reasons, work.cautions = verify(model, work.example, work.plan, work.method, work.before, out, work.heads)
    if reasons and work.method.kind != "norm-free":  # a baseline may explode
        work.cautions += reasons
    elif reasons:
        heads = "; name the output layers by heads=" if len(work.plan.classifier) > 1 and not work.heads else ""
        growing = whole_blocks(work.plan)  # the same for all methods
        raise (ValueError if growing else MethodError)(
            f"{type(model).__name__} cannot be converted by '{work.method.name}': "
            f"{'; '.join((*reasons, *growing))}{heads}"
        )


def _run(work: ConversionWork) -> Any:
    """Run the converted model on the example."""
    args, kwargs = call_arguments(work.example)
    try:
        with trial_run(work.model):
            return run(work.model, args, kwargs)
    except Exception as error:  # whatever the model's own code raises
        raise _stopped(work.model, error) from error


def _stopped(model: nn.Module, error: Exception) -> MethodError:
    return MethodError(
        f"expected the converted {type(model).__name__} to run on the example, but it failed: {error}; its own code "
        "may rely on a normalizer, or on the class of a layer"
    )
