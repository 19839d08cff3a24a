"""Lower bounds on the gradients of positively homogeneous networks, compared with the measured norms.

A function is positively homogeneous (p.h.) if f(αx) = α f(x) for α > 0, and a set of parameters is if f(x; αθ) =
α f(x; θ). The derivative of the loss along that direction is then known, and bounds the gradient from below:

    ⟨∂ℓ/∂x, x⟩ = ℓ - H(p)   so   ‖∂ℓ/∂x‖ ≥ (ℓ - H(p)) / ‖x‖

with ℓ the cross-entropy, p the softmax probabilities and H their entropy. If logits explode, so do gradients.

Reference: fixup, section 2, Definitions 1 and 2, Theorems 1 and 2; appendix A, equations 6 and 8.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normfree.diagnostics.measurement.inputs_and_outputs import first_tensor
from normfree.diagnostics.propagation import plan_of
from normfree.nn.model_state import call_arguments, hooked, preserve_model_state, substitute_tensors
from normfree.nn.normalizers import NORM_TYPES
from normfree.nn.scalars import ScalarBias
from normfree.nn.weight_layers import WEIGHT_LAYERS, weight_kind
from normfree.plan import Layer, ResidualPlan
from normfree.report.tables import compact


@dataclass(frozen=True)
class HomogeneousSet:
    """A set of parameters that scales the network's output, by their qualified names."""

    name: str
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class BlockBound:
    """Theorem 1 at the input x of one block.

    `measured` and `bound` are the means over the samples of ‖∂ℓ/∂x‖ and of its lower bound. `ratio` is the smallest
    measured/bound over the samples with a positive bound (∞ if there is none). `deviation` is the largest
    |⟨∂ℓ/∂x, x⟩ - (ℓ - H(p))| over the samples, relative to the largest ‖∂ℓ/∂x‖·‖x‖ or |ℓ - H(p)|; it is 0 if the
    network is p.h. from this block on.
    """

    name: str
    measured: float
    bound: float
    ratio: float
    deviation: float


@dataclass(frozen=True)
class SetBound:
    """Theorem 2 for one set θ of parameters.

    `measured` is ‖∂ℓ_avg/∂θ‖, `bound` its lower bound G(θ), and `expected` the bound (mean max z - log c)/‖θ‖ on E[G],
    which holds in expectation over a classifier with independent symmetric weights, not for every draw. `deviation` is
    as for `BlockBound`.
    """

    name: str
    parameters: tuple[str, ...]
    measured: float
    bound: float
    expected: float
    deviation: float


@dataclass(frozen=True)
class Bounds:
    """Both theorems on one batch.

    Attributes:
        blocks: Theorem 1 at the input of each block.
        sets: Theorem 2 for each p.h. set of parameters.
        loss: The mean of ℓ.
        entropy: The mean of H(p).
        largest: The mean of the largest logit.
        valid: Whether the bounds hold for this network.
        reason: The reason why they do not hold; '' if they do.
    """

    blocks: tuple[BlockBound, ...]
    sets: tuple[SetBound, ...]
    loss: float
    entropy: float
    largest: float
    valid: bool
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the bounds as plain data."""
        return asdict(self)


def homogeneous_sets(model: nn.Module, plan: ResidualPlan) -> list[HomogeneousSet]:
    """List the paper's three kinds of sets: stem layers, the classifier, and a projection with a layer of its branch.

    A layer counts with its weight (its gain if the weight is normalized or standardized) and its own bias. A spectrally
    normalized layer cannot be scaled. A listed set is p.h. if everything after it is: no normalization and no other
    biases. `check_homogeneous` measures that.

    Reference: fixup, Definition 2 and Figure 2.

    >>> from normfree.models import build
    >>> model = build("wrn-10-1", "he_in")
    >>> [s.name for s in homogeneous_sets(model, model.plan)][:3]
    ['stem.conv', 'body.1.0: shortcut.conv + branch.conv1', 'body.1.0: shortcut.conv + branch.conv2']
    """
    sets = [HomogeneousSet(layer.name, _scaling(model, layer)) for layer in plan.stem]
    for branch in plan.branches:
        if branch.shortcut != "projection" or not branch.shortcut_layers:
            continue
        last = branch.shortcut_layers[-1]
        for layer in branch.layers:
            short = (name.removeprefix(f"{branch.name}.") for name in (last.name, layer.name))
            both = (_scaling(model, last), _scaling(model, layer))
            sets.append(HomogeneousSet(f"{branch.name}: {' + '.join(short)}", both[0] + both[1] if all(both) else ()))
    sets += [HomogeneousSet(layer.name, _scaling(model, layer)) for layer in plan.classifier]
    return [s for s in sets if s.parameters]


def check_homogeneous(model: nn.Module, inputs: Any, parameters: Sequence[str], alpha: float = 2.0) -> float:
    """Measure how far a set of parameters is from p.h.: max |f(x; αθ) - α f(x; θ)| / max |α f(x; θ)|.

    The result is 0 up to rounding for a p.h. set (exactly 0 if α is a power of 2), and ∞ if only one side is zero. The
    model is unchanged.

    Args:
        model: Any model.
        inputs: A tensor, a tuple of positional arguments or a mapping of keyword arguments.
        parameters: The names of the parameters, as in `named_parameters`.
        alpha: The scale α.

    Returns:
        The relative deviation.

    Raises:
        ValueError: for names that the model does not have, and for an alpha that is not positive.

    Reference: fixup, Definition 2.

    >>> net = nn.Sequential(nn.Linear(2, 3, bias=False), nn.ReLU(), nn.Linear(3, 2, bias=False))
    >>> _ = [nn.init.ones_(p) for p in net.parameters()]
    >>> check_homogeneous(net, torch.ones(1, 2), ["0.weight"])
    0.0
    >>> check_homogeneous(net, torch.ones(1, 2), ["0.weight", "2.weight"])  # second degree
    1.0
    """
    known = dict(model.named_parameters(remove_duplicate=False))
    missing = [name for name in parameters if name not in known]
    if missing or not alpha > 0:
        raise ValueError(
            f"expected names of parameters and a positive alpha, got {missing or 'known names'} and {alpha}; "
            "names are those of model.named_parameters()"
        )
    args, kwargs = call_arguments(inputs)
    outputs = []
    with torch.no_grad():
        for scaled in ({}, {id(known[name]): alpha * known[name] for name in parameters}):
            with (
                preserve_model_state(model),
                substitute_tensors(model, scaled),
            ):  # both passes see the same buffers and random numbers
                outputs.append(first_tensor(model(*args, **kwargs)).double())
    target = alpha * outputs[0]
    return _relative(float((outputs[1] - target).abs().max()), float(target.abs().max()))


def gradient_bounds(
    model: nn.Module, inputs: Any, targets: Tensor, *, plan: ResidualPlan | None = None, tolerance: float = 1e-3
) -> Bounds:
    """Measure the gradients that the theorems of `fixup` bound, at the input of each block and for each p.h. set.

    One forward and one backward pass of the summed loss give the gradient of each sample. The inputs of blocks are
    those of the first stem layer, of each module with exactly one residual sum, and of the classifier.

    Args:
        model: Any classifier.
        inputs: A tensor, a tuple of positional arguments or a mapping of keyword arguments.
        targets: Class indices (N), or probabilities (N, classes).
        plan: The residual plan (default: the model's own, or the discovered one).
        tolerance: The largest deviation from the identities behind the bounds (equations 6 and 8). Biases that are not
            zero cause a larger one.

    Returns:
        The bounds and the measured gradients. `valid` is false for a network with a normalizer, or with a deviation
        above the tolerance.

    Raises:
        ValueError: if the output does not have the shape (N, classes), or the model is on the meta device.
    """
    plan = plan_of(model, inputs, plan)
    args, kwargs = call_arguments(inputs)
    watched = _ModuleInputs()
    hooks = {model.get_submodule(name): watched.hook(name) for name in _block_inputs(plan)}
    with preserve_model_state(model), torch.enable_grad(), hooked(hooks, before=True):
        logits = first_tensor(model(*args, **kwargs))
        if logits.dim() != 2:
            raise ValueError(
                f"expected logits of shape (N, classes), got {tuple(logits.shape)}; the bounds hold for classification"
            )
        losses = F.cross_entropy(logits, targets, reduction="none")
        learning = [p for p in model.parameters() if p.requires_grad]
        found = torch.autograd.grad(losses.sum(), [*learning, *watched.leaves], materialize_grads=True)
    gradients = {id(p): g / len(logits) for p, g in zip(learning, found[: len(learning)], strict=True)}
    z = logits.detach().double()
    logs = z.log_softmax(1)
    y = targets.double() if targets.is_floating_point() else F.one_hot(targets, z.shape[1]).double()
    entropies = -(logs.exp() * logs).sum(1)
    # ℓ - H(p) = pᵀz - yᵀz of equation 6, written so that it is exact for logits of 0 and for saturated ones.
    gaps = (logs.exp() * (z - (y * z).sum(1, keepdim=True))).sum(1)
    largest = float(z.amax(1).mean())
    blocks = tuple(_block_bound(name, *seen, gaps) for name, seen in watched.seen.items())
    above = largest - math.log(z.shape[1])
    sets = []
    for s in homogeneous_sets(model, plan):
        members = [model.get_parameter(name) for name in s.parameters]
        if all(id(p) in gradients for p in members):  # a frozen parameter has no gradient to bound
            pairs = [(p.detach().double(), gradients[id(p)].double()) for p in members]
            sets.append(_set_bound(s, pairs, float(gaps.mean()), above))
    reason = _reason(model, (*blocks, *sets), tolerance)
    loss, entropy = float(losses.detach().mean()), float(entropies.mean())
    return Bounds(blocks, tuple(sets), loss, entropy, largest, valid=not reason, reason=reason)


def _scaling(model: nn.Module, layer: Layer) -> tuple[str, ...]:
    """The names of the parameters that scale a layer's output."""
    module = model.get_submodule(layer.name)
    kind = weight_kind(module)
    if kind == "spectral":
        return ()
    names = ["weight" if kind == "plain" else "gain"]
    names += ["bias"] if module.bias is not None else []
    return tuple(f"{layer.name}.{name}" for name in names)


def _block_inputs(plan: ResidualPlan) -> list[str]:
    """The modules whose input is the signal between blocks."""
    homes = Counter(b.home for b in plan.branches)
    single = [home for home, count in homes.items() if count == 1 and home]
    return [*(layer.name for layer in plan.stem[:1]), *single, *(layer.name for layer in plan.classifier)]


class _ModuleInputs:
    """Per sample, the norm of a module's input, the norm of its gradient, and their product."""

    def __init__(self) -> None:
        self.seen: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
        self.leaves: list[Tensor] = []

    def hook(self, name: str) -> Any:
        """Observe the first input of a module."""

        def note(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
            if not args or not isinstance(args[0], Tensor) or not args[0].is_floating_point():
                return None
            x = args[0]
            if not x.requires_grad:  # the network's own input belongs to the caller: observe a copy
                x = x.detach().requires_grad_()
                self.leaves.append(x)
            kept = x.detach()
            norms = kept.flatten(1).double().norm(dim=1)
            self.seen[name] = (norms, torch.zeros_like(norms), torch.zeros_like(norms))

            def backward(gradient: Tensor) -> None:
                back = gradient.flatten(1).double()
                self.seen[name] = (norms, back.norm(dim=1), (back * kept.flatten(1)).sum(1))

            x.register_hook(backward)
            return (x, *args[1:])

        return note


def _block_bound(name: str, norms: Tensor, gradients: Tensor, products: Tensor, gaps: Tensor) -> BlockBound:
    bounds = torch.where(norms > 0, gaps / norms, 0.0)  # a p.h. function of 0 is 0, where the gap is 0 too
    positive = bounds > 0
    ratio = float((gradients / bounds)[positive].min()) if bool(positive.any()) else math.inf
    scale = torch.maximum(gradients * norms, gaps.abs())
    deviation = _relative(float((products - gaps).abs().max()), float(scale.max()))
    return BlockBound(name, float(gradients.mean()), float(bounds.mean()), ratio, deviation)


def _set_bound(s: HomogeneousSet, members: Sequence[tuple[Tensor, Tensor]], gap: float, above: float) -> SetBound:
    norm = math.hypot(*(float(value.norm()) for value, _ in members))
    measured = math.hypot(*(float(gradient.norm()) for _, gradient in members))
    product = sum(float((value * gradient).sum()) for value, gradient in members)
    bound, expected = (gap / norm, above / norm) if norm else (0.0, 0.0)
    deviation = _relative(abs(product - gap), max(measured * norm, abs(gap)))
    return SetBound(s.name, s.parameters, measured, bound, expected, deviation)


def _reason(model: nn.Module, parts: Sequence[BlockBound | SetBound], tolerance: float) -> str:
    """The reason why the bounds do not hold; '' if they do."""
    for name, module in model.named_modules():
        if isinstance(module, NORM_TYPES):
            return f"not positively homogeneous: '{name}' is a {type(module).__name__}"
    worst = max(parts, key=lambda part: part.deviation, default=None)
    if worst is None or worst.deviation <= tolerance:
        return ""
    for name, module in model.named_modules():
        bias = module.bias if isinstance(module, WEIGHT_LAYERS) else None
        bias = module.value if isinstance(module, ScalarBias) else bias
        if bias is not None and int(bias.detach().count_nonzero()):
            return f"not positively homogeneous: '{name}' has a bias that is not zero"
    return (
        f"not positively homogeneous: the directional derivative at '{worst.name}' is off by {compact(worst.deviation)}"
    )


def _relative(difference: float, scale: float) -> float:
    if difference == 0:
        return 0.0
    return difference / scale if scale > 0 else math.inf
