"""Any model with normalization becomes one without: look, refuse or change, initialize, check."""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from normfree.conversion.changes import Added, Changes, Scaled
from normfree.conversion.inspection import Watched, run, trial, watch
from normfree.conversion.norms import channels_of, norms, unknown_norms
from normfree.conversion.replacement import (
    add_scalars_,
    remove_norms_,
    reparametrize_layers_,
)
from normfree.conversion.rescaling import (
    class_tokens,
    level_layers_,
    restart_layer_scales_,
    scale_embeddings_,
    start_tokens_,
)
from normfree.conversion.scalar_placement import Places, Refused, Wanted, named
from normfree.graph import discover, unaccounted
from normfree.graph.admission import cannot_convert_by, rigid_layers, scales_sums
from normfree.graph.flow import Flow, tensors_of
from normfree.graph.recorder import record
from normfree.methods import InitContext, Method, get
from normfree.methods.initialize import check_example
from normfree.nn.model_state import call_arguments, restored_on_error
from normfree.nn.scalar_wrapping import scalars_of
from normfree.plan import ResidualPlan

_NO_SUMS = (
    "no residual sum was found: the layers follow one another, are concatenated or gated, or meet in another way than "
    "by + and - (lerp, addcmul, a stack); weights can still be standardized ('nf') or normalized ('wn'), "
    "or set from data ('lsuv')"
)

_SHOWN = 6  # reasons of a refusal; a deep network gives the same one for every block

Example = Tensor | Sequence[Any] | Mapping[str, Any]


def convert(
    model: nn.Module,
    method: str | Method,
    example: Example,
    *,
    plan: ResidualPlan | None = None,
    generator: torch.Generator | None = None,
) -> tuple[nn.Module, ResidualPlan]:
    """A copy of `model` without normalization, initialized by `method`, and its plan with what was changed.

    `example` is an input that the model accepts: a tensor, a tuple or list of arguments or a dict of keyword arguments.
    `plan` overrules discovery. Every draw comes from `generator`. The model itself is left as it is.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 2))
    >>> converted, plan = convert(model, "wn", torch.randn(2, 3, 8, 8))
    >>> type(converted[0]).__name__, type(converted[1]).__name__
    ('WeightNormConv2d', 'Identity')

    Raises `ValueError`, which names every module that stands in the way and says why, before anything is changed.
    """
    try:
        twin = copy.deepcopy(model)
    except Exception as error:  # whatever a model's own attributes raise
        raise ValueError(
            f"expected a model that can be copied, but copying {type(model).__name__} stopped: {error}; "
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
    """As `convert`, in place: only the plan is returned. After an error the model is as it was."""
    method = get(method)
    args, kwargs = call_arguments(example)
    _check_method(method, example)
    for name, module in model.named_modules():
        if scalars_of(module):
            raise ValueError(
                f"expected a model that was not converted yet, got one with scalars at {named(name)}; convert the "
                "original, or write the weights anew by initialize_"
            )
    if plan is None:
        with trial(model):  # in training mode a model may skip blocks at random
            plan = discover(model, example)
    found = _look(model, method, plan, args, kwargs)
    before = _count(model)
    with restored_on_error(model):
        removed = remove_norms_(model, method, found.watched)
        added: list[Added] = []
        scaled: list[Scaled] = []
        left: list[str] = []
        if found.norms:
            scaled, added = scale_embeddings_(model, plan, set(found.watched.called))
            scaled += start_tokens_(model, found.tokens, generator)
        if method.norm is None:
            added += reparametrize_layers_(model, plan, method)
            scaled += restart_layer_scales_(model)
            added += add_scalars_(model, plan, found.wanted)
            _initialize_(model, method, plan, example, generator)
            if found.norms and not method.needs_example:
                levelled, left = level_layers_(model, plan, lambda: _run(model, args, kwargs))
                scaled += levelled
        _check_result(model, args, kwargs)
    notes = [] if plan.branches else [_NO_SUMS]
    if bare := [branch.name for branch in plan.branches if not branch.layers]:
        notes.append(f"the signal may still grow at sums of whole blocks, which have no layer to scale: {_few(bare)}")
    if found.unaccounted:
        notes.append(f"no part of the plan and left as they were: {', '.join(found.unaccounted)}")
    if left:
        notes.append(f"not brought to unit variance, because no layer of its own puts out what it gives: {_few(left)}")
    if units := [home for home, function in found.watched.normalizing if function == "normalize"]:
        notes.append(f"still divided by its length (normalize) is the signal in {_few(units)}")
    if like := [f"{named(name)} ({type(model.get_submodule(name)).__name__})" for name in found.watched.like_norms]:
        more = f" and {len(like) - _SHOWN} more" if len(like) > _SHOWN else ""
        notes.append(
            f"left in place, though it does what a normalizer does: {', '.join(like[:_SHOWN])}{more}; to have it taken "
            "out, call its class one, such as MyLayerNorm"
        )
    if not found.norms:
        notes.append("no normalizer was found: none was removed, and what the model's own code normalizes still is")
    changes = Changes(
        method=method.spec,
        removed=tuple(removed),
        added=tuple(added),
        scaled=tuple(scaled),
        parameters_before=before,
        parameters_after=_count(model),
        notes=tuple(notes),
    )
    return replace(plan, changes=changes)


@dataclass(frozen=True)
class _Findings:
    """What was seen in the model before anything is changed."""

    norms: dict[str, nn.Module]
    watched: Watched
    wanted: Wanted
    tokens: list[str]
    unaccounted: tuple[str, ...]


def _check_method(method: Method, example: Example) -> None:
    reason = cannot_convert_by(method)
    if reason is not None:
        raise ValueError(reason)
    if method.needs_example and not isinstance(example, Tensor):
        raise ValueError(
            f"method '{method.name}' sets its weights from data: expected a tensor as example, got "
            f"{type(example).__name__}; use a method that needs none, such as 'fixup'"
        )


def _look(model: nn.Module, method: Method, plan: ResidualPlan, args: Any, kwargs: Any) -> _Findings:
    """Everything that conversion needs to know; raises `ValueError` with all that stands in its way."""
    in_place = method.norm is not None
    if not plan.branches and not in_place and not {"none", "dense"} & set(method.skips) and method.weight == "plain":
        raise ValueError(f"method '{method.name}' works on residual branches, but {_NO_SUMS}")

    @functools.cache
    def flow() -> Flow:
        with trial(model):
            return record(model, *args, **kwargs)

    normalizers = norms(model)
    watched = watch(model, normalizers, args, kwargs)
    refused: Refused = {
        f"{named(name)}: {type(module).__name__} is no normalizer we know": "replace it by one of torch's"
        for name, module in unknown_norms(model)
    }
    # Vectors of length 1 are wanted in attention by angles and at the end of a model that compares pictures.
    refused |= {
        f"{named(home)}: its own forward pass computes {function}": "make it a module, which can be taken out"
        for home, function in watched.normalizing
        if function != "normalize"
    }
    wanted: Wanted = {}
    if "" in normalizers:
        refused[f"{named('')}: the model itself is a normalizer"] = "convert the model that holds it"
    if in_place:
        unclear = [name for name, module in normalizers.items() if channels_of(module) is None]
        refused |= {f"{named(n)}: it does not say its channels": "use another method, such as 'fixup'" for n in unclear}
    else:
        places = Places(model, plan, method, watched.called, flow() if scales_sums(method) else None)
        wanted = places.find()
        refused |= places.refused | _rigid(model, plan, method, watched.called)
    if refused:
        more = f"; and {len(refused) - _SHOWN} more" if len(refused) > _SHOWN else ""
        reasons, remedies = list(refused)[:_SHOWN], dict.fromkeys(list(refused.values())[:_SHOWN])
        raise ValueError(
            f"{type(model).__name__} cannot be converted by '{method.name}': {'; '.join(reasons)}{more}; "
            f"{', or '.join(remedies)}"
        )
    return _Findings(normalizers, watched, wanted, class_tokens(model, plan, flow), unaccounted(model, plan))


def _rigid(model: nn.Module, plan: ResidualPlan, method: Method, called: Counter[str]) -> Refused:
    """The weight layers that cannot become what the method's are."""
    become = f"a {method.weight.replace('_', ' ')} layer"
    return {
        f"'{path}' cannot become {become}: {reason}": "use a method of plain weights, such as 'fixup'"
        for path, reason in rigid_layers(model, plan, method, called).items()
    }


@torch.no_grad()
def _initialize_(
    model: nn.Module, method: Method, plan: ResidualPlan, example: Example, generator: torch.Generator | None
) -> None:
    """Biases 0 and weights by the method; the scalars have their values already."""
    ctx = InitContext(model, plan, generator, example if isinstance(example, Tensor) else None)
    check_example(ctx, method)
    ctx.zero_biases_()
    try:
        method.initializer(ctx)
    except ValueError:  # the method's own word
        raise
    except Exception as error:
        raise _stopped(model, error) from error


def _check_result(model: nn.Module, args: Any, kwargs: Any) -> None:
    """No normalizer is left, and one forward pass gives finite numbers."""
    left = [f"'{name}' ({type(module).__name__})" for name, module in norms(model).items()]
    if left:
        raise ValueError(f"expected a model without normalization, got {', '.join(left)} after the conversion")
    numbers = [t for t in tensors_of(_run(model, args, kwargs)) if t.is_floating_point()]
    if not all(t.isfinite().all() for t in numbers):
        raise ValueError(
            f"expected finite outputs of the converted {type(model).__name__} on the example, got others; "
            "use a method with smaller branches, such as 'fixup' or 'skipinit'"
        )


def _run(model: nn.Module, args: Any, kwargs: Any) -> Any:
    """What the converted model puts out on the example."""
    try:
        with trial(model):
            return run(model, args, kwargs)
    except Exception as error:  # whatever the model's own code raises
        raise _stopped(model, error) from error


def _stopped(model: nn.Module, error: Exception) -> ValueError:
    return ValueError(
        f"expected the converted {type(model).__name__} to run on the example, but it stopped: {error}; its own code "
        "may rely on a normalizer, or on what a layer is; try 'dyt', which keeps all layers"
    )


def _few(names: Sequence[str]) -> str:
    """Some names, and how many there are beside."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(named, names[:_SHOWN])) + more


def _count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())
