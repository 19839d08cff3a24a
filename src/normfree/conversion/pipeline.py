"""Convert any model with normalization into one without: look, refuse, replace, initialize, check."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from normfree.conversion.changes import Changes
from normfree.conversion.conversion_stages import (
    Conversion,
    Example,
    MethodError,
    Test,
    UndoneError,
    refuse,
    run_stages_,
    starts_at_zero,
)
from normfree.conversion.inspection import USUAL, data_size, inspect_model, plain_base, probing, raw_data
from normfree.conversion.passes import PassCount, forward_and_backward
from normfree.conversion.scalar_placement import Placement
from normfree.graph.admission import check_request, require_signal
from normfree.methods import Method, get
from normfree.nn.model_state import small_copy
from normfree.nn.weight_layers import WEIGHT_LAYERS
from normfree.plan import ResidualPlan

_METHODS = ("fixup", "skipinit", "rezero", "nf", "wn", "dyt", "lsuv:by=layer")  # those that a refusal may name
_TRIED = 200_000_000  # parameters; with a larger model, other methods are not tried
_COSTS: dict[Test, int] = {"rules": 0, "forward": 2, "backward": 7, "zeros": 7}  # of a trial, in forward passes


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
    passes = PassCount()
    passes.add()
    conversion = Conversion(model, method, example, facts, heads, before, passes=passes)
    try:
        return run_stages_(conversion, generator)
    except MethodError as refusal:
        raise ValueError(f"{refusal}{_remedy(conversion, refusal.found_by)}") from refusal.__cause__


def repeat_conversion_(model: nn.Module, plan: ResidualPlan, changes: Changes, example: Example) -> None:
    """Repeat an earlier conversion for its structure, with the scalars that it added; the result is not compared."""
    facts = inspect_model(model, example, plan, ())
    layers = {record.name: model.get_submodule(record.name) for record in changes.removed}
    facts.standardized.update({n: plain_base(m) for n, m in layers.items() if isinstance(m, WEIGHT_LAYERS)})
    conversion = Conversion(model, get(changes.method), example, facts)
    added = {record.name for record in changes.added}
    scalars = {place: start for place, start in conversion.placed.scalars.items() if ".".join(place) in added}
    conversion.placed = Placement(scalars, conversion.placed.obstacles)  # all multipliers have their values already
    run_stages_(conversion, torch.Generator().manual_seed(0))


def _remedy(conversion: Conversion, found_by: Test) -> str:
    """A remedy: standardized data, or the methods that convert the model.

    Rules decide on most methods. A method that keeps the weights is also tried, since rules do not know their scale.
    If a pass through the model has shown the obstacle, the other methods are tried likewise, as far as the limit of
    passes allows, except those that cannot meet it: a method without zeros if zeros are the obstacle, and one that
    draws new weights if those of the original are. Data that are not standardized may be an obstacle to any method.
    """
    if remedy := raw_data(conversion.facts, conversion.example):
        return f"; {remedy}"
    usable, untried = [], []
    example = small_copy(conversion.example)
    for name in _METHODS:
        method = get(name)
        from_data = not conversion.facts.plan.branches and isinstance(example, Tensor)  # lsuv lets deep sums explode
        if method.name == conversion.method.name or (method.needs_example and not from_data):
            continue
        trial = replace(conversion, method=method, example=example, records=[], notes=[])
        try:
            refuse(trial)
        except ValueError:
            continue
        other = conversion.keeps_layers or (found_by == "zeros" and not starts_at_zero(trial))
        trial.trial = "rules" if other else found_by
        if trial.trial == "rules" and (trial.keeps_layers or data_size(conversion.facts, example) > USUAL):
            trial.trial = "forward"
        cost = _COSTS[trial.trial]
        if cost and (conversion.facts.parameters > _TRIED or not conversion.passes.allows(cost)):
            untried.append(name)
        elif not cost or _converts(trial):
            usable.append(name)
    if not usable and not untried:
        others = [name for name in _METHODS if get(name).name != conversion.method.name]
        return f"; none of the other methods converts it ({_list(others, 'and')})"
    remedy = f"; use {_list(usable, 'or')}" if usable else ""
    were = "was" if len(untried) == 1 else "were"
    return f"{remedy}; {_list(untried, 'and')} {were} not tried" if untried else remedy


def _list(names: Sequence[str], word: str) -> str:
    quoted = [f"'{name}'" for name in names]
    return f" {word} ".join(filter(None, [", ".join(quoted[:-1]), quoted[-1]]))


def _converts(trial: Conversion) -> bool:
    """Whether a trial succeeds; it leaves the model as it was."""
    try:
        run_stages_(trial, torch.Generator().manual_seed(0))
    except UndoneError:
        return True
    except Exception:  # whatever the model's own code raises
        pass
    return False
