"""The change of the network's function in one step of gradient descent, and the share of each branch.

    Δf(x) = f(x; θ - η·∇ℓ) - f(x; θ),   ‖Δf‖² the mean over the batch of the squared norm

The aim of Fixup is ‖Δf‖ = Θ(η) at any depth, so Θ(η/L) per branch.

Reference: fixup, section 3, equation 5, and appendix B.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from normfree.diagnostics.measurement.inputs_and_outputs import cross_entropy, first_tensor
from normfree.diagnostics.propagation import Loss, plan_of, zero_classifier
from normfree.methods import Method
from normfree.methods.fixup import is_transformer
from normfree.methods.initialize import fans
from normfree.nn.model_state import call_arguments, preserve_model_state, substitute_tensors
from normfree.nn.residual import Residual
from normfree.nn.weight_layers import WEIGHT_LAYERS, set_weight_
from normfree.plan import ResidualPlan

Stepped = Literal["branch weights", "branches", "all"]
Parameters = dict[str, Tensor]

DOUBLE_RATES, SINGLE_RATES = (1e-6, 1e-5, 1e-4), (1e-3, 3e-3, 1e-2)
DOUBLE_LIMIT = 100_000_000
"""The largest number of parameters for which the measurement uses a copy in float64."""


@dataclass(frozen=True)
class BranchShare:
    """The contribution of one branch to the change of the function, at first order.

    `weights` and `scalars` are ⟨Δf_b, Δf⟩ / ‖Δf‖², where Δf_b is the change if only these are stepped. They are signed
    fractions that add up to 1 over all stepped parameters. `scalars` are the single numbers, biases and normalizers of
    the block, at their own rate; if they are not stepped, it is the fraction they would add. `alone` is ‖Δf_b‖/η of
    the weights, NaN for branches that were not sampled.
    """

    name: str
    weights: float
    scalars: float
    alone: float = math.nan


@dataclass(frozen=True)
class Updates:
    """The change of the function for each rate η, and the shares of the branches.

    Attributes:
        rates: The learning rates η.
        changes: ‖Δf‖ for each rate.
        slope: The exponent of a power law through the changes; 1 is linear.
        per_unit: ‖Δf‖/η at the smallest rate.
        shares: The contribution of each branch.
        outside: The fraction of stem, shortcuts and classifier.
        classifier: 'kept', or 'random' if zeros were replaced for the measurement.
        which: The stepped parameters, as given to `measure_updates`.
        scalar_rate: The rate of scalars relative to that of weights.
        precision: 'double' or 'same'.
    """

    rates: tuple[float, ...]
    changes: tuple[float, ...]
    slope: float
    per_unit: float
    shares: tuple[BranchShare, ...]
    outside: float
    classifier: str
    which: str
    scalar_rate: float
    precision: str

    @property
    def alignment(self) -> float:
        """The mean cosine between the changes of sampled branches and the whole change; near 1, they move in sync.

        Reference: fixup, section 3 ("in sync") and appendix B.1.
        """
        cosines = [s.weights * self.per_unit / s.alone for s in self.shares if s.alone > 0]
        return sum(cosines) / len(cosines) if cosines else math.nan

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain data; numbers may be NaN."""
        return {**asdict(self), "alignment": self.alignment}


def measure_updates(
    model: nn.Module,
    inputs: Any,
    targets: Any,
    *,
    rates: Sequence[float] | None = None,
    which: Stepped = "branch weights",
    classifier: Literal["random", "keep"] = "random",
    scalar_rate: float | None = None,
    plan: ResidualPlan | None = None,
    loss: Loss | None = None,
    generator: torch.Generator | None = None,
    precision: Literal["double", "same"] | None = None,
    share_limit: int = 16,
) -> Updates:
    """Take one step of gradient descent from the same point for each rate, and measure the change of the output.

    Everything happens on a copy of the model. The fractions of all branches cost one backward pass, since
    ⟨J_b g_b, Δf⟩ = ⟨g_b, J_bᵀ Δf⟩. `BranchShare.alone` costs a forward pass per branch; it is measured at the smallest
    rate in float64 and at the largest rate otherwise.

    Args:
        model: Any model with residual sums.
        inputs: A tensor, a tuple of positional arguments or a mapping of keyword arguments.
        targets: The second argument of the loss.
        rates: The learning rates (default: 1e-6, 1e-5 and 1e-4 in float64, and 1e-3 to 1e-2 otherwise, below which
            rounding in float32 hides the change).
        which: The stepped parameters: 'branch weights'; 'branches', which are all parameters of the blocks except for
            the layers of shortcuts; or 'all'.
        classifier: 'random' replaces a classifier of zeros by N(0, 1/fan_in) for the measurement, because no gradient
            would reach the branches and any initialization would pass. 'keep' does not.
        scalar_rate: The rate of scalars, which are parameters of one number outside weight layers, relative to that of
            weights (default: the one of the model's method). In a block with several sums, scalars count with the
            first sum.
        plan: The residual plan (default: the model's own, or the discovered one).
        loss: A function of the output and the targets (default: cross-entropy).
        generator: The source of a random classifier (default: seed 0).
        precision: 'double' for a copy in float64, 'same' for one in the model's type (default: float64 up to 100
            million parameters).
        share_limit: The largest number of branches, evenly spaced, for which `BranchShare.alone` is measured.

    Returns:
        The change for each rate, its slope in the rate, and the share of each branch.

    Raises:
        ValueError: if the model has no residual sums or is on the meta device, and for settings that cannot work.

    Reference: fixup, section 3 (the goal Θ(η)), appendix B.1 (in sync), B.2 (the branch's scale).

    >>> from normfree.models import build
    >>> x, y = torch.randn(4, 1, 28, 28, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 3])
    >>> updates = measure_updates(build("resmlp-10-16", "fixup", in_channels=1), x, y)
    >>> f"{updates.slope:.3f}", updates.classifier
    ('1.000', 'random')
    """
    plan = plan_of(model, inputs, plan)
    plan.require_sums()
    double = _is_double(model, precision)
    rates = tuple(sorted(rates or (DOUBLE_RATES if double else SINGLE_RATES)))
    _check_settings(rates, which, classifier)
    method = getattr(model, "method", None)
    if scalar_rate is None:
        scalar_rate = 1.0
        if isinstance(method, Method):
            scalar_rate = method.scalar_rate.factor(len(plan.branches), transformer=is_transformer(plan))
    copy = _copy(model, double)
    args, kwargs = call_arguments(_cast(inputs) if double else inputs)
    targets = _cast(targets) if double else targets
    replaced = classifier == "random" and _randomize_classifier_(copy, plan, generator)

    learning = {name: p for name, p in copy.named_parameters() if p.requires_grad}

    def gradients(value: Callable[[Any], Tensor]) -> Parameters:
        with preserve_model_state(copy), torch.enable_grad():
            found = torch.autograd.grad(value(copy(*args, **kwargs)), list(learning.values()), materialize_grads=True)
        return dict(zip(learning, found, strict=True))

    owners = _owners(copy, plan)
    step = {
        name: -(scalar_rate if owners[name].single else 1.0) * g
        for name, g in gradients(lambda output: (loss or cross_entropy)(output, targets)).items()
    }

    def function(names: Sequence[str], rate: float) -> Tensor:
        # Each pass sees the same buffers and random numbers.
        with preserve_model_state(copy), torch.no_grad():
            moved = {id(learning[n]): learning[n] + rate * step[n] for n in names}
            with substitute_tensors(copy, moved):
                return first_tensor(copy(*args, **kwargs))

    stepped = [name for name in learning if _is_stepped(owners[name], which)]
    base = function([], 0.0)

    def change(names: Sequence[str], rate: float) -> Tensor:
        return function(names, rate) - base

    changes = [change(stepped, rate) for rate in rates]
    norms = [_norm(c) for c in changes]
    direction = changes[0] / rates[0]
    back = gradients(lambda output: (first_tensor(output) * direction).sum())
    parts = {name: float(torch.sum(step[name] * back[name])) for name in learning}
    whole = float(direction.square().sum())
    in_branch = _by_branch({name: owner for name, owner in owners.items() if name in learning}, len(plan.branches))
    fractions = [{kind: _ratio(sum(parts[n] for n in names), whole) for kind, names in b.items()} for b in in_branch]
    alone = [math.nan] * len(in_branch)
    rate = rates[0] if double else rates[-1]
    for i in _spaced(len(in_branch), share_limit):
        alone[i] = _norm(change(in_branch[i]["weights"], rate)) / rate
    shares = tuple(
        BranchShare(b.name, f["weights"], f["scalars"], a)
        for b, f, a in zip(plan.branches, fractions, alone, strict=True)
    )
    outside = sum(parts[n] for n in stepped if owners[n].branch is None)
    return Updates(
        rates=rates,
        changes=tuple(norms),
        slope=_log_slope(rates, norms),
        per_unit=norms[0] / rates[0],
        shares=shares,
        outside=_ratio(outside, whole),
        classifier="random" if replaced else "kept",
        which=which,
        scalar_rate=scalar_rate,
        precision="double" if double else "same",
    )


def _check_settings(rates: Sequence[float], which: str, classifier: str) -> None:
    if not rates[0] > 0 or which not in ("branch weights", "branches", "all") or classifier not in ("random", "keep"):
        raise ValueError(
            "expected positive rates, which 'branch weights', 'branches' or 'all', and classifier 'random' or 'keep', "
            f"got {rates}, '{which}', '{classifier}'"
        )


@dataclass(frozen=True)
class _Owner:
    """The owner of a parameter: the index of its branch or None, its kind, and whether it is a single number."""

    branch: int | None
    kind: Literal["weights", "scalars"]
    single: bool


def _owners(model: nn.Module, plan: ResidualPlan) -> dict[str, _Owner]:
    """The owner of every parameter by its name."""
    in_branch = {layer.name: i for i, b in enumerate(plan.branches) for layer in b.layers}
    outside = {layer.name for b in plan.branches for layer in b.shortcut_layers}
    outside |= {layer.name for layer in (*plan.stem, *plan.body, *plan.classifier)}
    homes: dict[str, int] = {}
    for i, b in enumerate(plan.branches):
        homes.setdefault(b.home, i)
    owners = {}
    for prefix, module in model.named_modules():
        weighted = isinstance(module, WEIGHT_LAYERS)
        branch = in_branch.get(prefix)
        if branch is None and prefix not in outside:
            above = prefix.split(".")
            names = (".".join(above[:n]) for n in range(len(above), 0, -1))
            branch = next((homes[name] for name in names if name in homes), None)
        for name, parameter in module.named_parameters(recurse=False):
            kind: Literal["weights", "scalars"] = "weights" if weighted and name != "bias" else "scalars"
            full = f"{prefix}.{name}" if prefix else name
            owners[full] = _Owner(branch, kind, single=not weighted and parameter.numel() == 1)
    return owners


def _by_branch(owners: Mapping[str, _Owner], count: int) -> list[dict[str, list[str]]]:
    """The names of weights and of scalars in each branch."""
    found: list[dict[str, list[str]]] = [{"weights": [], "scalars": []} for _ in range(count)]
    for name, owner in owners.items():
        if owner.branch is not None:
            found[owner.branch][owner.kind].append(name)
    return found


def _is_stepped(owner: _Owner, which: Stepped) -> bool:
    if which == "all":
        return True
    return owner.branch is not None and (which == "branches" or owner.kind == "weights")


def _is_double(model: nn.Module, precision: str | None) -> bool:
    """Whether to measure in float64."""
    if precision not in (None, "double", "same"):
        raise ValueError(f"expected precision 'double' or 'same', got '{precision}'; None chooses by size")
    small = sum(p.numel() for p in model.parameters()) <= DOUBLE_LIMIT
    able = all(p.device.type != "mps" for p in model.parameters())
    return precision == "double" or (precision is None and small and able)


def _copy(model: nn.Module, double: bool) -> nn.Module:
    """Copy a model without its gradients; `double` converts everything to float64."""
    with preserve_model_state(model):  # removes the gradients meanwhile
        copy = deepcopy(model)
    if double:
        copy.double()
        for module in copy.modules():
            if isinstance(module, Residual):
                module.stream_dtype = module.branch_dtype = None
    return copy


def _cast(value: Any) -> Any:
    """Convert all floating-point tensors in a structure to float64."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return {key: _cast(item) for key, item in value.items()}
    return type(value)(_cast(item) for item in value) if isinstance(value, tuple | list) else value


def _randomize_classifier_(model: nn.Module, plan: ResidualPlan, generator: torch.Generator | None) -> bool:
    """Write N(0, 1/fan_in) into a classifier of zeros; return whether there was one."""
    module = zero_classifier(model, plan)
    if not isinstance(module, nn.Linear | nn.Conv2d):
        return False
    source = generator or torch.Generator().manual_seed(0)
    draw = torch.randn(module.weight.shape, generator=source, device=source.device)
    set_weight_(module, draw.to(module.weight) / fans(module)[0] ** 0.5)
    return True


def _spaced(count: int, limit: int) -> list[int]:
    """At most `limit` evenly spaced numbers below `count`, the first and the last among them.

    >>> _spaced(9, 3), _spaced(2, 16)
    ([0, 4, 8], [0, 1])
    """
    if count <= limit:
        return list(range(count))
    return [round(i * (count - 1) / max(limit - 1, 1)) for i in range(limit)]


def _norm(change: Tensor) -> float:
    """The root mean square, over the batch, of the norm of a sample's change."""
    return float((change.double().square().sum() / max(len(change), 1)).sqrt())


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def _log_slope(rates: Sequence[float], norms: Sequence[float]) -> float:
    """The exponent of the power law through the points; NaN if a change is zero or there is only one rate."""
    if len(rates) < 2 or not all(0 < n < math.inf for n in norms):
        return math.nan
    x, y = (torch.tensor(values, dtype=torch.float64).log() for values in (rates, norms))
    x = x - x.mean()
    return float((x * y).sum() / x.square().sum())
