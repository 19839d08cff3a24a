"""Compare a converted model with its original: every parameter learns, outputs and first loss keep their scale."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from normfree.nn.model_state import preserve_model_state, run_on_copy, small_copy, substitute_tensors
from normfree.plan import ResidualPlan
from normfree.report.terminal import compact

_SMALL = 0.1  # the scale of the random values that take the place of zeros inside the network
# Outputs k times as large as the targets have a squared error of k² + 1, where an output of 0 has 1.
_LARGE_NOTED, _LARGE = 3.0, 10.0
# Gradients shrink with the output. One of a usual 1e-3 times 1e-5 is as small as the ε of Adam, and learns no more.
_SMALL_NOTED, _SMALLEST = 1e-3, 1e-5
_FEW_CLASSES = 2.0  # of two classes, a softmax is as sure as that of many only at about this loss above the guess
_BEHIND = 3  # a step moves a weight by about 1e-3, so the gradient behind three zeros is about 1e-9 of a usual one
_BIASES = ("bias", "shift", "delta")


@dataclass(frozen=True)
class Behaviour:
    """The result of one forward and backward pass.

    Attributes:
        outputs: The floating-point outputs.
        learning: The parameters in the graph of the outputs, and whether their gradient is not 0; None if no output
            has a graph.
    """

    outputs: tuple[Tensor, ...]
    learning: Mapping[str, bool] | None


def behave(
    model: nn.Module,
    example: Any,
    plan: ResidualPlan,
    norms: Collection[str] = (),
    *,
    replaced: Collection[str] | None = None,
    watched: Collection[str] | None = None,
) -> Behaviour:
    """Run a model forward and backward on an example; it is left unchanged.

    Normalizers run as in training, dropout does not. Weights and scalars that are 0 get small random values for the
    pass, since nothing learns before a layer of zeros in the first step. A random gradient starts at every output.

    Args:
        model: The model.
        example: Its example; of a batch of images, two are used.
        plan: Its plan.
        norms: The names of its normalizers.
        replaced: The names of the zeros inside the network that are replaced, besides those of the output layers.
            Default: all.
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
        with substitute_tensors(model, {id(parameters[name]): p for name, p in drawn.items()}):
            try:
                out = run_on_copy(model, example)
            except ValueError:  # a batch norm of a single number per channel
                model.eval()
                out = run_on_copy(model, example)
        outputs = floats_of(out)
        starts = [t for t in outputs if t.requires_grad]
        if not starts:
            return Behaviour(tuple(outputs), None)
        used = {name: p for name, p in (parameters | drawn).items() if watched is None or name in watched}
        directions = [torch.randn(t.shape, generator=generator).to(t) for t in starts]
        if used:
            found = torch.autograd.grad(starts, list(used.values()), directions, allow_unused=True)
            learning = {name: not _is_zero(g) for name, g in zip(used, found, strict=True) if g is not None}
        else:
            reached = _reached(starts)
            learning = {name: True for name, p in (parameters | drawn).items() if id(p) in reached}
    return Behaviour(tuple(t.detach() for t in outputs), learning)


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
    return [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _zeros(
    model: nn.Module, plan: ResidualPlan, replaced: Collection[str] | None = None
) -> Iterator[tuple[str, float]]:
    """The trainable weights and scalars that are 0, each with the scale of the values to draw for it."""
    last = {layer.path for layer in plan.classifier}
    small = _SMALL * max(len(plan.branches), 1) ** -0.5
    for name, p in model.named_parameters():
        if p.requires_grad and p.is_floating_point() and not name.endswith(_BIASES) and _is_zero(p):
            fan_in = p[0].numel() if p.dim() > 1 else 1
            if name in last or replaced is None or name in replaced:
                yield name, (1.0 if name in last else small) * max(fan_in, 1) ** -0.5


def _stuck_zeros(model: nn.Module, example: Any, plan: ResidualPlan, learning: Mapping[str, bool]) -> list[str]:
    """The zeros that stay 0: none of their factors gets a gradient before another one does.

    A zero behind another zero learns one step later, and its gradient is smaller by the size of a step. Behind
    `_BEHIND` other zeros it is lost in rounding, so that it counts as stuck.
    """
    last = {layer.path for layer in plan.classifier}
    waiting = [name for name, _ in _zeros(model, plan) if name not in last and learning.get(name)]
    moved: list[str] = []
    for _ in range(_BEHIND):
        found = behave(model, example, plan, replaced=moved, watched=waiting).learning or {} if waiting else {}
        new = [name for name in waiting if found.get(name)]
        waiting = [name for name in waiting if name not in new]
        moved += new
        if not waiting:
            return []
        if not new:
            break
    return waiting


def verify(
    model: nn.Module,
    example: Any,
    plan: ResidualPlan,
    growth: float,
    before: Behaviour,
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
    after = behave(model, example, plan)
    notes: list[str] = []
    reasons = [*_scale(before.outputs, after.outputs, growth, notes)]
    reasons += _first_loss(model, plan, out, before, heads, notes, growth)
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
    if not stuck:
        stuck = _stuck_zeros(model, example, plan, after.learning)
        why = "it starts at zero, and so does every way from it to the output, one layer behind another"
    owners = {layer.path: branch.name for branch in plan.branches for layer in branch.layers}
    for name in stuck[:1]:
        where = f"the branch '{owners[name]}'" if name in owners else "the model"
        more = f" (and {len(stuck) - 1} more)" if len(stuck) > 1 else ""
        reasons.append(f"in {where}, '{name}'{more} would never learn: {why}")
    return reasons, notes


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


def _rms(tensor: Tensor) -> float:
    return float(tensor.double().square().mean().sqrt())


def _first_loss(
    model: nn.Module,
    plan: ResidualPlan,
    out: Any,
    before: Behaviour,
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
