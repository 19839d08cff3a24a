"""Convert any model with normalization into one without: look, refuse, replace, initialize, check."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from normfree.conversion.changes import Added, Changes, Removed, Rescaled
from normfree.conversion.inspection import Inspection, inspect_model, run, trial_run
from normfree.conversion.norms import channels_of, find_norms, remove_norms_, unknown_norms
from normfree.conversion.rescaling import (
    class_tokens,
    draw_tokens_,
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
from normfree.graph.admission import cannot_convert_by, rigid_layers, scales_sums
from normfree.graph.discovery import plan_from_flow, unaccounted
from normfree.graph.flow import Flow, tensors_of
from normfree.graph.recorder import record
from normfree.methods import InitContext, Method, get
from normfree.methods.initialize import check_example
from normfree.nn.model_state import call_arguments, restored_on_error, small_copy
from normfree.nn.scalar_wrapping import scalars_of
from normfree.plan import ResidualPlan, remember_plan_

_NO_SUMS = (
    "no residual sum was found: the model is sequential, concatenates or gates its layers, or adds them by functions "
    "other than + and - (lerp, addcmul, stack); weights can still be standardized ('nf') or normalized ('wn'), "
    "or set from data ('lsuv')"
)

_SHOWN = 6  # at most this many reasons in an error or names in a note; a deep network has one per block

Example = Tensor | Sequence[Any] | Mapping[str, Any]


def convert(
    model: nn.Module,
    method: str | Method,
    example: Example,
    *,
    plan: ResidualPlan | None = None,
    generator: torch.Generator | None = None,
) -> tuple[nn.Module, ResidualPlan]:
    """Return a copy of a model without normalization, initialized by a method. The model itself stays as it is.

    Args:
        model: Any model. Its own code is not changed.
        method: A method, or its name with options, such as 'fixup' or 'nf:beta=1'.
        example: An input that the model accepts: a tensor, a tuple or list of positional arguments, or a dict of
            keyword arguments.
        plan: The residual plan. Default: the one that `discover` finds.
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
    try:
        twin = copy.deepcopy(model)
    except Exception as error:  # whatever a model's own attributes raise
        raise ValueError(
            f"expected a model that can be copied, but copying {type(model).__name__} failed: {error}; "
            "use convert_, which works in place"
        ) from error
    return twin, convert_(twin, method, example, plan=plan, generator=generator)


def convert_(
    model: nn.Module,
    method: str | Method,
    example: Example,
    *,
    plan: ResidualPlan | None = None,
    generator: torch.Generator | None = None,
) -> ResidualPlan:
    """Convert a model in place, in five stages.

    1. Look: find the residual branches and the normalizers, and how the model uses them.
    2. Refuse: raise one error that lists every obstacle, before anything is changed.
    3. Replace: remove the normalizers, reparametrize weights, add scalars.
    4. Initialize: write the weights by the method.
    5. Check: run the converted model, and rescale the layers outside the branches on the way.

    Args:
        model: Any model. It is unchanged if an error is raised.
        method: As for `convert`.
        example: As for `convert`.
        plan: As for `convert`.
        generator: As for `convert`.

    Returns:
        The plan of the model, with a record of all changes in `plan.changes`.

    Raises:
        ValueError: If the model cannot be converted; the message names each module in the way.
    """
    # Usually three forward passes of the whole model: `_look` records the flow on tensors without values and inspects
    # one pass on the example, and `_check_` runs the converted model. Methods that set weights from data run it too.
    method = get(method)
    _check_request(method, example)
    work = _look(model, method, example, plan)
    _refuse(work)
    with restored_on_error(model):
        _replace_(work, generator)
        _initialize_(work, generator)
        _check_(work)
    plan = replace(work.plan, changes=_changes(work))
    remember_plan_(model, plan, small_copy(example))
    return plan


@dataclass
class _Conversion:
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

    @property
    def keeps_layers(self) -> bool:
        """Whether the method only replaces the normalizers, and leaves weights and sums as they are."""
        return self.method.norm is not None


def _check_request(method: Method, example: Example) -> None:
    """Refuse a method that converts no model, and an example that it cannot use."""
    reason = cannot_convert_by(method)
    if reason is not None:
        raise ValueError(reason)
    if method.needs_example and not isinstance(example, Tensor):
        raise ValueError(
            f"method '{method.name}' sets its weights from data: expected a tensor as example, got "
            f"{type(example).__name__}; use a method that needs none, such as 'fixup'"
        )


def _look(model: nn.Module, method: Method, example: Example, plan: ResidualPlan | None) -> _Conversion:
    """Collect everything that the conversion needs to know."""
    args, kwargs = call_arguments(example)

    @functools.cache
    def flow() -> Flow:
        with trial_run(model):  # in training mode a model may skip blocks at random
            return record(model, *args, **kwargs)

    if plan is None:
        plan = plan_from_flow(model, flow())
    norms = find_norms(model)
    inspection = inspect_model(model, norms, args, kwargs)
    scalars, obstacles = Scalars(), Obstacles()
    if method.norm is None:
        used_flow = flow() if scales_sums(method) else None
        scalars, obstacles = place_scalars(model, plan, method, inspection.calls, used_flow)
    return _Conversion(
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
        parameters_before=_count(model),
    )


def _refuse(work: _Conversion) -> None:
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
        raise ValueError(f"method '{method.name}' works on residual branches, but {_NO_SUMS}")
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
    if "" in work.norms:
        obstacles[f"{quoted('')}: the model itself is a normalizer"] = "convert the model that holds it"
    if work.keeps_layers:
        unclear = [name for name, module in work.norms.items() if channels_of(module) is None]
        obstacles |= {
            f"{quoted(name)}: its number of channels is unknown": "use another method, such as 'fixup'"
            for name in unclear
        }
    else:
        obstacles |= work.obstacles
        kind = f"a {method.weight.replace('_', ' ')} layer"
        obstacles |= {
            f"'{path}' cannot become {kind}: {reason}": "use a method of plain weights, such as 'fixup'"
            for path, reason in rigid_layers(model, work.plan, method, work.inspection.calls).items()
        }
    if obstacles:
        more = f"; and {len(obstacles) - _SHOWN} more" if len(obstacles) > _SHOWN else ""
        reasons, remedies = list(obstacles)[:_SHOWN], dict.fromkeys(list(obstacles.values())[:_SHOWN])
        raise ValueError(
            f"{type(model).__name__} cannot be converted by '{method.name}': {'; '.join(reasons)}{more}; "
            f"{', or '.join(remedies)}"
        )


def _replace_(work: _Conversion, generator: torch.Generator | None) -> None:
    """Remove the normalizers and give the model the method's layers and scalars."""
    model, plan, method = work.model, work.plan, work.method
    tokens = class_tokens(model, plan, work.flow) if work.norms else []
    alpha = method.options.get("alpha") if method.norm == "tanh" else None
    tanh = float(alpha) if isinstance(alpha, float | int) else None
    work.removed = remove_norms_(model, work.inspection, tanh=tanh)
    if work.norms:
        rescaled, added = scale_embeddings_(model, plan, work.inspection.calls)
        work.added += added
        work.rescaled += [*rescaled, *draw_tokens_(model, tokens, generator)]
    if not work.keeps_layers:
        work.added += reparametrize_layers_(model, plan, method)
        work.rescaled += reset_layer_scales_(model)
        work.added += add_scalars_(model, plan, work.scalars)


@torch.no_grad()
def _initialize_(work: _Conversion, generator: torch.Generator | None) -> None:
    """Set biases to 0 and weights by the method; the scalars have their values already."""
    if work.keeps_layers:
        return
    example = work.example if isinstance(work.example, Tensor) else None
    ctx = InitContext(work.model, work.plan, generator, example)
    check_example(ctx, work.method)
    ctx.zero_biases_()
    try:
        work.method.initializer(ctx)
    except ValueError:  # the method's own message
        raise
    except Exception as error:
        raise _stopped(work.model, error) from error


def _check_(work: _Conversion) -> None:
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
        raise ValueError(
            f"expected finite outputs of the converted {type(model).__name__} on the example, got NaN or infinity; "
            "use a method with smaller branches, such as 'fixup' or 'skipinit'"
        )


def _run(work: _Conversion) -> Any:
    """Run the converted model on the example."""
    args, kwargs = call_arguments(work.example)
    try:
        with trial_run(work.model):
            return run(work.model, args, kwargs)
    except Exception as error:  # whatever the model's own code raises
        raise _stopped(work.model, error) from error


def _stopped(model: nn.Module, error: Exception) -> ValueError:
    return ValueError(
        f"expected the converted {type(model).__name__} to run on the example, but it failed: {error}; its own code "
        "may rely on a normalizer, or on the class of a layer; try 'dyt', which keeps all layers"
    )


def _changes(work: _Conversion) -> Changes:
    return Changes(
        method=work.method.spec,
        removed=tuple(work.removed),
        added=tuple(work.added),
        scaled=tuple(work.rescaled),
        parameters_before=work.parameters_before,
        parameters_after=_count(work.model),
        notes=tuple(_notes(work)),
    )


def _notes(work: _Conversion) -> list[str]:
    """Notes on unexpected effects, one sentence each."""
    plan, inspection = work.plan, work.inspection
    notes = [] if plan.branches else [_NO_SUMS]
    if bare := [branch.name for branch in plan.branches if not branch.layers]:
        notes.append(
            f"the signal may still grow at sums of whole blocks, which have no layer to scale: {_listed(bare)}"
        )
    if work.unaccounted:
        notes.append(f"not part of the plan and left as they were: {', '.join(work.unaccounted)}")
    if work.not_rescaled:
        notes.append(
            f"not rescaled to unit variance, as no single module returns their output: {_listed(work.not_rescaled)}"
        )
    if units := [home for home, function in inspection.functional_norms if function == "normalize"]:
        notes.append(f"the signal is still divided by its length (normalize) in {_listed(units)}")
    if inspection.norm_like:
        classes = {name: type(work.model.get_submodule(name)).__name__ for name in inspection.norm_like}
        notes.append(
            f"left in place, though it behaves like a normalizer: {_listed(inspection.norm_like, classes)}; to have it "
            "removed, give its class the name of one, such as MyLayerNorm"
        )
    if not work.norms:
        notes.append("no normalizer was found: none was removed, and any normalization in the model's own code remains")
    return notes


def _listed(names: Sequence[str], classes: Mapping[str, str] | None = None) -> str:
    """The first names, with their classes if given, and the number of the others."""
    shown = [quoted(name) + (f" ({classes[name]})" if classes else "") for name in names[:_SHOWN]]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(shown) + more


def _count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())
