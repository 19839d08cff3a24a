"""Compare a converted model with its original: every parameter learns, outputs differ and keep their scale."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn

from normfree.graph.flow import tensors_of
from normfree.nn.model_state import preserve_model_state, run_on_copy, small_copy, substitute_tensors
from normfree.plan import ResidualPlan
from normfree.report.terminal import compact

_SMALL = 0.1  # the scale of the random values that take the place of zeros inside the network
# Outputs k times as large as the targets have a squared error of k² + 1, where an output of 0 has 1.
_LARGE_NOTED, _LARGE = 3.0, 10.0
# Gradients shrink with the output. One of a usual 1e-3 times 1e-5 is as small as the ε of Adam, and learns no more.
_SMALL_NOTED, _SMALLEST = 1e-3, 1e-5
_ALIKE = 1e-3  # of the size of an output: samples that differ by less, compared with the original, are the same
_FEW_CLASSES = 2.0  # of two classes, a softmax is as sure as that of many only at about this loss above the guess
_BEHIND = 3  # a step moves a weight by about 1e-3, so the gradient behind three zeros is about 1e-9 of a usual one
_BIASES = ("bias", "shift", "delta")


@dataclass(frozen=True)
class PassResult:
    """The result of one forward and backward pass.

    Attributes:
        outputs: The floating-point outputs.
        learning: The parameters in the graph of the outputs, and whether their gradient is not 0; None if no output
            has a graph.
    """

    outputs: tuple[Tensor, ...]
    learning: Mapping[str, bool] | None


def forward_and_backward(
    model: nn.Module,
    example: Any,
    plan: ResidualPlan,
    norms: Collection[str] = (),
    *,
    replaced: Collection[str] | None = None,
    watched: Collection[str] | None = None,
) -> PassResult:
    """Run a model forward and backward on an example; it is left unchanged.

    Normalizers run as in training, dropout does not. Weights and scalars that are 0 get small random values for the
    pass, since nothing learns before a layer of zeros in the first step. A random gradient starts at every output.

    Args:
        model: The model.
        example: Its example; of a batch of images, two are used.
        plan: Its plan.
        norms: The names of its normalizers.
        replaced: The names of the zeros that are replaced. Default: all.
        watched: The names of the parameters to differentiate by, default all. If it is empty there is no backward pass,
            and every parameter in the graph counts as learning.
    """
    example = small_copy(example)
    generator = torch.Generator().manual_seed(0)
    with preserve_model_state(model, attributes=True), torch.inference_mode(False), torch.enable_grad():
        model.eval()
        for name in norms:
            model.get_submodule(name).train()
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        drawn = {}
        for name, scale in _zeros(model, plan, replaced):
            draw = torch.randn(parameters[name].shape, generator=generator) * scale
            drawn[name] = nn.Parameter(draw.to(parameters[name]))
        used = {name: p for name, p in (parameters | drawn).items() if watched is None or name in watched}
        # The backward pass runs inside, too: a checkpointed block runs again there.
        with substitute_tensors(model, {id(parameters[name]): p for name, p in drawn.items()}):
            try:
                out = run_on_copy(model, example)
            except ValueError:  # a batch norm of a single number per channel
                model.eval()
                out = run_on_copy(model, example)
            outputs = floats_of(out)
            starts = [t for t in outputs if t.requires_grad]
            if not starts:
                return PassResult(tuple(outputs), None)
            directions = [torch.randn(t.shape, generator=generator).to(t) for t in starts]
            if used:
                found = torch.autograd.grad(starts, list(used.values()), directions, allow_unused=True)
                learning = {name: not _is_zero(g) for name, g in zip(used, found, strict=True) if g is not None}
            else:
                reached = _reached(starts)
                learning = {name: True for name, p in (parameters | drawn).items() if id(p) in reached}
    return PassResult(tuple(t.detach() for t in outputs), learning)


def _reached(starts: Sequence[Tensor]) -> set[int]:
    """The ids of the tensors at the ends of the graph of these outputs."""
    stack: list[Any] = [t.grad_fn or t for t in starts]
    seen = set(stack)
    while stack:
        for node, _ in getattr(stack.pop(), "next_functions", ()):
            if node is not None and node not in seen:
                seen.add(node)
                stack.append(node)
    return {id(getattr(node, "variable", node)) for node in seen}


def _is_zero(tensor: Tensor) -> bool:
    """Whether all entries are 0; most tensors show by their first entry that they are not."""
    return not tensor.reshape(-1)[:1].any() and not tensor.any()


def floats_of(out: Any) -> list[Tensor]:
    """The floating-point tensors among the outputs of a model."""
    return [leaf for leaf in tensors_of(out) if leaf.is_floating_point()]


def _zeros(
    model: nn.Module, plan: ResidualPlan, replaced: Collection[str] | None = None
) -> Iterator[tuple[str, float]]:
    """The trainable weights and scalars that are 0, each with the scale of the values to draw for it."""
    heads = {layer.path for layer in plan.classifier}
    small = _SMALL * max(len(plan.branches), 1) ** -0.5
    for name, p in model.named_parameters():
        if p.requires_grad and p.is_floating_point() and not name.endswith(_BIASES) and _is_zero(p):
            fan_in = p[0].numel() if p.dim() > 1 else 1
            if replaced is None or name in replaced:
                yield name, (1.0 if name in heads else small) * max(fan_in, 1) ** -0.5


def _stuck_zeros(model: nn.Module, example: Any, plan: ResidualPlan, learning: Mapping[str, bool]) -> list[str]:
    """The zeros that stay 0: none of their factors gets a gradient before another one does.

    A zero behind another zero learns one step later, and its gradient is smaller by the size of a step. Behind
    `_BEHIND` other zeros it is lost in rounding, so that it counts as stuck.
    """
    heads = {layer.path for layer in plan.classifier}
    waiting = [name for name, _ in _zeros(model, plan) if learning.get(name)]
    moved = [name for name in waiting if name in heads]
    if len(moved) == len(waiting):
        return []

    def learning_now() -> Mapping[str, bool]:
        return forward_and_backward(model, example, plan, replaced=moved, watched=waiting).learning or {}

    found = learning_now()
    # Output layers learn in the first step, and so does a zero before one of them, except where these read zeros.
    if not all(found.get(name) for name in moved):
        moved = [name for name in moved if found.get(name)]
        found = learning_now()
    for round_ in range(_BEHIND):
        new = [name for name in waiting if found.get(name)]
        waiting = [name for name in waiting if name not in new]
        moved += new
        if not waiting or not new or round_ == _BEHIND - 1:
            break
        found = learning_now()
    return waiting


def verify(
    model: nn.Module,
    example: Any,
    plan: ResidualPlan,
    growth: float,
    before: PassResult,
    learned: Callable[[Collection[str]], Collection[str]],
    out: Any,
    heads: Collection[str],
) -> tuple[list[str], list[str]]:
    """Compare a converted model with the behaviour of its original.

    Args:
        model: The converted model.
        example: The example.
        plan: Its plan.
        growth: The factor by which the method lets the variance grow.
        before: The behaviour of the original, without a backward pass.
        learned: Returns those of the named parameters that have a gradient in the original.
        out: The output of the converted model on the example, at its initial values.
        heads: The names of the output layers that return class scores; of a single output layer it need not be given.

    Returns:
        The reasons to refuse the model, and notes on what needs care.
    """
    after = forward_and_backward(model, example, plan)
    notes: list[str] = []
    reasons = [*_scale(before.outputs, after.outputs, growth, notes)]
    reasons += _alike_samples(model, example, before.outputs, after.outputs)
    reasons += _first_loss(model, plan, out, before, heads, notes, growth)
    if _holds_one_value(example):
        notes.append("all values of the example are the same, so the checks say little; pass a batch of the data")
    if before.learning is None or after.learning is None:
        notes.append("whether every parameter learns was not checked, because no output of the model has a gradient")
        return reasons, notes
    held = {name for name, p in model.named_parameters() if p.requires_grad}
    stuck = [name for name in before.learning if name in held and not after.learning.get(name)]
    with_gradient = learned(stuck) if stuck else ()
    stuck = [name for name in stuck if name in with_gradient]
    why = "it had a gradient in the original and has none"
    if stuck and all(name.endswith(_BIASES) for name in stuck):
        notes.append(f"'{stuck[0]}' does nothing any more: without the normalizer, the bias cancels or is not used")
        stuck = []
    if unreached := [name for name in stuck if name not in after.learning]:
        notes.append(
            f"the example does not reach '{unreached[0]}'{_more(unreached)} any more, so whether it learns was not "
            "checked; a model that chooses its experts by values chooses others now"
        )
        stuck = [name for name in stuck if name in after.learning]
    if not stuck:
        stuck = _stuck_zeros(model, example, plan, after.learning)
        why = "it starts at zero, and so does every way from it to the output, one layer behind another"
    owners = {layer.path: branch.name for branch in plan.branches for layer in branch.layers}
    for name in stuck[:1]:
        where = f"the branch '{owners[name]}'" if name in owners else "the model"
        reasons.append(f"in {where}, '{name}'{_more(stuck)} would never learn: {why}")
    return reasons, notes


def _more(names: Sequence[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def require_usable(model: nn.Module, example: Any, before: PassResult | None) -> None:
    """Refuse an example on which the original fails, too, or whose values are all the same.

    Raises:
        ValueError: With the reason and a remedy.
    """
    name = type(model).__name__
    if before is not None and not all(t.isfinite().all() for t in before.outputs):
        raise ValueError(
            f"expected finite outputs of {name} on the example, got NaN or infinity before anything was changed; check "
            "the example and the model's weights"
        )
    if _holds_one_value(example):
        raise ValueError(
            f"expected an example with different values, got one value everywhere, on which {name} cannot be judged; "
            "pass a batch of the data, or torch.randn"
        )


def _holds_one_value(example: Any) -> bool:
    """Whether each tensor of an example holds a single value, such as 0."""
    given = [t.flatten() for t in tensors_of(example) if t.numel() > 1]
    return bool(given) and all(bool((t == t[0]).all()) for t in given)


def expected_growth(plan: ResidualPlan, values: Sequence[Mapping[str, float]]) -> float:
    """The factor by which a method lets the variance grow: c²(a² + β²) over all branches, e^4.3 at most for 'hanin'.

    `values` are the method's scalars at each branch. A β of 1 counts 0: methods that have it make the weights of the
    branch small. A sum of whole blocks, x + blocks(x), doubles the signal. However much that is, an output may grow by
    `_LARGE` only.
    """
    growth = 1.0
    for branch, present in zip(plan.branches, values, strict=True):
        scalars = {"c": 1.0, "a": 1.0, "beta": 1.0, **present}
        beta = scalars["beta"] if scalars["beta"] != 1.0 else 0.0
        growth *= scalars["c"] ** 2 * (scalars["a"] ** 2 + beta**2) if branch.layers else 4.0
    return min(max(growth, 1.0), _LARGE**2)


def _scale(before: tuple[Tensor, ...], after: tuple[Tensor, ...], growth: float, notes: list[str]) -> Iterator[str]:
    """Compare the root mean squares of outputs of the same shape.

    A converted model may repair the scale of an original that explodes or vanishes, so the scale 1 is near, too. A
    method that lets the variance grow may do so.
    """
    pairs = [(a, b) for a, b in zip(before, after, strict=False) if a.shape == b.shape and a.numel() > 1]
    for i, (old, new) in enumerate(pairs):
        was, now = _rms(old), _rms(new)
        large, small = now / max(was, 1.0), now / min(was or 1.0, 1.0)
        if not was or (large <= _LARGE_NOTED and small >= _SMALL_NOTED):
            continue
        text = f"output {i} is {compact(now / was)} times as large as the original's"
        if not (large < _LARGE * growth**0.5 and small > _SMALLEST):
            yield text
        elif large > _LARGE_NOTED:
            notes.append(f"{text}; a smaller learning rate or adaptive clipping (clip_grad_agc_) may be needed")
        else:
            notes.append(f"{text}; plain SGD may learn slowly at first")


def _alike_samples(
    model: nn.Module, example: Any, before: tuple[Tensor, ...], after: tuple[Tensor, ...]
) -> Iterator[str]:
    """Compare how much outputs of the same shape differ between samples, as a part of their size."""
    for i, (old, new) in enumerate(zip(before, after, strict=False)):
        if old.shape == new.shape and old.dim() and old.shape[0] > 1 and new.any():
            was, now = _spread(old), _spread(new)
            if was > _ALIKE and now < _ALIKE * was:
                place = _first_alike(model, example, _ALIKE * was)
                yield (
                    f"output {i} is the same for all samples, from {place} on (they differ by {compact(now)} of its "
                    f"size, in the original by {compact(was)})"
                )


def _first_alike(model: nn.Module, example: Any, limit: float) -> str:
    """The first module from which on all modules without children return nearly the same for all samples."""
    outputs: list[tuple[str, float]] = []

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
            outputs.extend((name, _spread(t)) for t in floats_of(out)[:1] if t.dim() and t.shape[0] > 1)

        return hook

    with preserve_model_state(model, attributes=True), torch.no_grad():
        model.eval()
        for name, module in model.named_modules():
            if next(module.children(), None) is None:
                module.register_forward_hook(keep(name))
        run_on_copy(model, small_copy(example))
    alike = list(takewhile(lambda found: found[1] < limit, reversed(outputs)))
    return f"'{alike[-1][0]}'" if alike else "the model's own code"


def _spread(tensor: Tensor) -> float:
    """The standard deviation between samples, as a part of the root mean square."""
    tensor = tensor.double()
    return _rms(tensor - tensor.mean(0)) / (_rms(tensor) or 1.0)


def _rms(tensor: Tensor) -> float:
    return float(tensor.double().square().mean().sqrt())


def _first_loss(
    model: nn.Module,
    plan: ResidualPlan,
    out: Any,
    before: PassResult,
    heads: Collection[str],
    notes: list[str],
    growth: float,
) -> Iterator[str]:
    """Compare the cross-entropy of random classes with that of a uniform guess, log C.

    Normal scores of variance σ² have the loss log C + σ²/2. At twice log C a softmax freezes: it gives nearly all
    weight to a few classes, at random. An original that starts high may do so again, and so may a method that lets the
    signal grow. A new classifier turns features of variance `growth` into scores of a third of it.
    """
    known = [layer for layer in plan.classifier if layer.name in heads or (not heads and len(plan.classifier) == 1)]
    outputs = floats_of(out)
    for layer in known:
        weight = getattr(model.get_submodule(layer.name), layer.parameter)
        classes = weight.shape[1 if layer.transposed else 0]
        for i, scores in enumerate(outputs):
            axis = 1 if weight.dim() > 2 else -1
            if classes < 2 or scores.dim() < 2 or scores.shape[axis] != classes:
                continue
            loss, guess = _uniform_loss(scores, axis), math.log(classes)
            same = i < len(before.outputs) and before.outputs[i].shape[axis] == classes
            old = _uniform_loss(before.outputs[i], axis) if same else guess
            frozen = max(guess, _FEW_CLASSES)
            grown = min(growth / 6, (2 * guess * growth / 3) ** 0.5)
            above = loss - guess - 3 * max(old - guess, 0.0)
            if above <= frozen / 4:  # half the spread
                continue
            text = f"the first loss at '{layer.name}' is {compact(loss)}, where a uniform guess has {compact(guess)}"
            if above > grown + frozen:
                yield text
            else:
                notes.append(f"{text}; a smaller learning rate at the start may be needed")


def _uniform_loss(scores: Tensor, axis: int) -> float:
    """The mean cross-entropy of scores over targets that are uniform over the classes."""
    scores = scores.double()
    return float((scores.logsumexp(axis) - scores.mean(axis)).mean())
