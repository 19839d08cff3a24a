"""Any model with normalization becomes one without: look, refuse or change, initialize, check."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from normfree.conversion.changes import Added, Changes, Scaled
from normfree.conversion.levels import level_layers_, restart_layer_scales_, scale_embeddings_, start_tokens_
from normfree.conversion.norms import channels_of, norms, unknown_norms
from normfree.conversion.places import Places, Wanted
from normfree.conversion.replace import (
    add_scalars_,
    remove_norms_,
    reparametrize_layers_,
    undone_on_error,
)
from normfree.conversion.watching import Watched, trial, watch
from normfree.graph import discover, unaccounted
from normfree.graph.flow import tensors_of
from normfree.graph.record import record
from normfree.methods import Method, Site, get
from normfree.nn.borrowed import call_arguments
from normfree.nn.reparametrized import cannot_reparametrize
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
    plan = discover(model, example) if plan is None else plan
    found = _look(model, method, plan, args, kwargs)
    before = _count(model)
    with undone_on_error(model):
        removed = remove_norms_(model, method, found.watched)
        added: list[Added] = []
        scaled: list[Scaled] = []
        if found.norms:
            scaled, added = scale_embeddings_(model, plan, set(found.watched.called))
            scaled += start_tokens_(model, plan, generator)
        if method.norm is None:
            added += reparametrize_layers_(model, plan, method)
            scaled += restart_layer_scales_(model)
            added += add_scalars_(model, plan, found.wanted)
            _initialize_(model, method, plan, example, generator)
            if found.norms and plan.branches and not method.needs_example:
                with trial(model):
                    scaled += level_layers_(model, plan, lambda: model(*args, **kwargs))
        _check_result(model, args, kwargs)
    notes = [] if plan.branches else [_NO_SUMS]
    if bare := [f"'{branch.name}'" for branch in plan.branches if not branch.layers]:
        shown = ", ".join(bare[:_SHOWN]) + (f" and {len(bare) - _SHOWN} more" if len(bare) > _SHOWN else "")
        notes.append(f"the signal may still grow at sums of whole blocks, which have no layer to scale: {shown}")
    if found.unaccounted:
        notes.append(f"no part of the plan and left as they were: {', '.join(found.unaccounted)}")
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
    unaccounted: tuple[str, ...]


def _check_method(method: Method, example: Example) -> None:
    if method.kind == "normalized":
        raise ValueError(
            f"expected a method without normalization, got '{method.name}', which is one of the normalizers: there is "
            "nothing to convert to; use 'fixup', 'skipinit', 'rezero', 'nf', 'wn' or 'dyt'"
        )
    if method.remove_branches or method.shortcut == "conv everywhere":
        does = "takes the branches away" if method.remove_branches else "puts a new convolution into every shortcut"
        raise ValueError(
            f"method '{method.spec}' {does}, which cannot be done without rewriting the model's code; "
            "build one of our models with it instead"
        )
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
    normalizers = norms(model)
    watched = watch(model, normalizers, args, kwargs)
    refused = [f"'{name}': {type(module).__name__} is no normalizer we know" for name, module in unknown_norms(model)]
    refused += [f"'{home}': its own forward pass computes {function}" for home, function in watched.normalizing]
    wanted: Wanted = {}
    if is_root := [name for name in normalizers if not name]:
        refused += [f"'{name}': the model itself is a normalizer" for name in is_root]
    if in_place:
        refused += [f"'{n}': it does not say its channels" for n, m in normalizers.items() if channels_of(m) is None]
    else:
        scales_sums = any(law.text != "1" for law in (method.rule.c, method.rule.a))
        flow = record(model, *args, **kwargs).nodes if scales_sums else ()
        places = Places(model, plan, method, watched.called, flow)
        wanted = places.find()
        refused += places.refused + _rigid(model, plan, method, watched.called)
    if refused:
        reasons = list(dict.fromkeys(refused))
        more = f"; and {len(reasons) - _SHOWN} more" if len(reasons) > _SHOWN else ""
        raise ValueError(
            f"{type(model).__name__} cannot be converted by '{method.name}': {'; '.join(reasons[:_SHOWN])}{more}"
        )
    return _Findings(normalizers, watched, wanted, unaccounted(model, plan))


def _rigid(model: nn.Module, plan: ResidualPlan, method: Method, called: Counter[str]) -> list[str]:
    """The weight layers that cannot become what the method's are."""
    if method.weight == "plain":
        return []
    modules = dict(model.named_modules())
    refused = []
    for layer in dict.fromkeys(plan.hidden()):
        if layer.parameter != "weight" or not called[layer.name]:
            reason: str | None = "the weight is used without a call of the layer"
        else:
            reason = cannot_reparametrize(modules[layer.name], method.weight, transposed=layer.transposed)
        if reason is not None:
            refused.append(f"'{layer.path}' cannot become a {method.weight.replace('_', ' ')} layer: {reason}")
    return refused


@torch.no_grad()
def _initialize_(
    model: nn.Module, method: Method, plan: ResidualPlan, example: Example, generator: torch.Generator | None
) -> None:
    """Biases 0 and weights by the method; the scalars have their values already."""
    site = Site(model, plan, generator, example if isinstance(example, Tensor) else None)
    site.zero_biases_()
    method.initializer(site)


def _check_result(model: nn.Module, args: Any, kwargs: Any) -> None:
    """No normalizer is left, and one forward pass gives finite numbers."""
    left = [f"'{name}' ({type(module).__name__})" for name, module in norms(model).items()]
    if left:
        raise ValueError(f"expected a model without normalization, got {', '.join(left)} after the conversion")
    try:
        with trial(model):
            out = model(*args, **kwargs)
    except Exception as error:
        raise ValueError(
            f"expected the converted {type(model).__name__} to run on the example, but it stopped: {error}; "
            "its own code may rely on a normalizer"
        ) from error
    numbers = [t for t in tensors_of(out) if t.is_floating_point()]
    if not all(t.isfinite().all() for t in numbers):
        raise ValueError(
            f"expected finite outputs of the converted {type(model).__name__} on the example, got others; "
            "use a method with smaller branches, such as 'fixup' or 'skipinit'"
        )


def _count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())
