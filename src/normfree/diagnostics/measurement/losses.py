"""Facts about a loss: the functions that it is made of, and its values at other outputs than those of the model.

- It gets the probabilities or logits that it expects, and the output can reach its targets.
- It depends on the targets, and prefers right answers to wrong ones.
- It is a mean over the samples, or a sum, but no mixture of both.
- It has a lower bound, or falls no faster than its outputs grow.
- It reads no output without a gradient, unless that has a part in the gradient of another one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import (
    keystr,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_unflatten,
)

from normfree.diagnostics.measurement.graph_nodes import (
    PARTS,
    VIEWS,
    dimension,
    first_function,
    function_name,
    place_of,
    saved_tensor,
    walk,
)
from normfree.diagnostics.signals import Fact

# The ranges of the functions that may end a network.
RANGES = {
    **dict.fromkeys(("Relu", "Softplus", "Exp"), (0.0, math.inf)),
    **dict.fromkeys(("Sigmoid", "Hardsigmoid", "Softmax"), (0.0, 1.0)),
    **dict.fromkeys(("Tanh", "Hardtanh"), (-1.0, 1.0)),
}


TOGETHER = 1e-2  # rounding of targets that add up to 1


def unreachable_targets(function: str, output: Tensor, targets: Tensor) -> float:
    """The fraction of the targets outside the range of the function that made an output.

    >>> unreachable_targets("Relu", torch.ones(4, 1), torch.tensor([[-1.0], [2.0], [-3.0], [4.0]]))
    0.5
    """
    low, high = RANGES.get(function, (-math.inf, math.inf))
    if not targets.is_floating_point() or targets.numel() != output.numel() or not targets.numel():
        return 0.0
    if function == "Softmax" and targets.dim() == 2:  # they have to add up to 1, too
        return float(((targets.sum(1) - 1).abs() > TOGETHER).float().mean())
    return float(((targets < low) | (targets > high)).float().mean())


def broadcasts(output: Tensor | None, targets: Any, loss: tuple[str, ...]) -> bool:
    """Whether the loss compares (N, 1) with (N,), which makes (N, N); `loss` names its functions.

    A loss that changes the shape of the output itself is none.
    """
    if output is None or not isinstance(targets, Tensor) or not targets.is_floating_point() or not loss:
        return False
    if output.shape == targets.shape or output.numel() != targets.numel():
        return False
    reshaped = {"View", "UnsafeView", "Reshape", "Squeeze", "Select", "Unsqueeze", "T", "Transpose"} & set(loss)
    try:
        shape = torch.broadcast_shapes(output.shape, targets.shape)
    except RuntimeError:
        return False
    return math.prod(shape) > output.numel() and not reshaped


@torch.no_grad()
def loss_facts(
    result: Tensor | None, outputs: Sequence[Tensor], targets: Any, names: Mapping[int, str]
) -> Iterator[Fact]:
    """Read the functions of a loss, between the loss and the outputs of the model.

    A binary cross-entropy takes targets from 0 to 1, a likelihood log-probabilities that add up to 1. The logits of a
    softmax or sigmoid must be able to grow, and an output must be able to reach its targets. A loss that the model
    computed itself lies behind its outputs.
    """
    own = any(t is result for t in outputs)
    for t in outputs[:1] if isinstance(targets, Tensor) and result is not None else ():
        yield from _check_range(first_function(t.grad_fn), t, targets, names)
    ends = () if own else [f for t in outputs if t.grad_fn is not None for f, _ in t.grad_fn.next_functions]
    for node in walk([None if result is None else result.grad_fn], ends):
        kind, wanted = function_name(node), saved_tensor(node, "target")
        maker = first_function(node.next_functions[0][0]) if node.next_functions else None
        if kind.startswith("BinaryCrossEntropy") and wanted is not None:
            low, high = map(float, torch.aminmax(wanted))
            yield from (Fact("targets no probabilities", "the targets", "", low, high),) * (low < 0 or high > 1)
        if function_name(maker) in BOUNDED.get(kind, ()):
            yield Fact("bounded logits", place_of(maker, names), function_name(maker).lower())
        elif kind == "LogSoftmax":
            yield from _check_scores(node, names)
        elif kind in LIKELIHOODS:
            yield from _check_likelihood(node, kind, names)
        elif wanted is not None and kind != "BinaryCrossEntropyWithLogits":
            yield from _check_range(maker, saved_tensor(node, "self"), wanted, names)


LIMITED = ("Sigmoid", "Hardsigmoid", "Tanh", "Hardtanh")
BOUNDED = {"BinaryCrossEntropyWithLogits": (*LIMITED, "Softmax"), "LogSoftmax": (*LIMITED, "Relu")}  # no logits
UNREACHABLE = 0.1  # of the targets outside the range of the output


def _check_range(maker: Any, output: Tensor | None, targets: Tensor, names: Mapping[int, str]) -> Iterator[Fact]:
    """Whether the function that made an output can return its targets."""
    function = function_name(maker)
    share = unreachable_targets(function, output, targets) if output is not None else 0.0
    if share > UNREACHABLE:
        yield Fact("targets out of range", place_of(maker, names), function.lower(), share)


LIKELIHOODS = {"NllLoss": ("self", 1), "NllLoss2D": ("self", 1), "CtcLoss": ("log_probs", -1)}  # and their classes
MOST_ROWS = 64
MOSTLY = 0.5  # of the rows; a few may add up to 1 by chance


def _check_likelihood(node: Any, kind: str, names: Mapping[int, str]) -> Iterator[Fact]:
    """Whether what a likelihood takes for log-probabilities adds up to 1 over the classes."""
    name, axis = LIKELIHOODS[kind]
    given = saved_tensor(node, name)
    if given is None or given.dim() < 2 or given.shape[axis] < 2:
        return
    rows = given.movedim(axis, -1).flatten(0, -2)[:MOST_ROWS].float()
    if float(((rows.exp().sum(-1) - 1).abs() > TOGETHER).float().mean()) > MOSTLY:
        before = function_name(first_function(node.next_functions[0][0]))
        yield Fact("wrong axis of classes" if before in ("LogSoftmax", "Log") else "no softmax", place_of(node, names))


REACHABLE = 0.5  # the probability of the right class that a network must be able to reach
COMPARED = 1.5  # a bound that shows a temperature, if samples are compared with each other
SAME_LENGTH = 1e-3  # relative difference between vectors that were divided by their lengths
MOST_VECTORS = 256


def _check_scores(node: Any, names: Mapping[int, str]) -> Iterator[Fact]:
    """Follow the logits of a softmax back: they must be able to grow beyond all bounds, or far enough."""
    likely = saved_tensor(node, "result")
    if likely is None or likely.dim() < 2:
        return
    classes, (bound, learned) = likely.shape[dimension(node._saved_dim)], _bound_of_scores(node.next_functions[0][0])
    best = 1 / (1 + (classes - 1) * math.exp(-2 * min(bound, 1e3)))
    # Samples that are compared with each other have a temperature, often of 1/2, whatever their number.
    too_small = best < REACHABLE and (learned or bound < COMPARED)
    if classes > 1 and too_small:
        yield Fact("scores without a scale", place_of(node, names) or "the output", value=best)


def _bound_of_scores(node: Any) -> tuple[float, bool]:
    """The largest possible product of vectors of fixed lengths, times a fixed scale; ∞ if something can learn more.

    And whether one of the factors is made of weights, as the classes of a classifier are.
    """
    scale, node = 1.0, first_function(node, (*VIEWS, "MaskedFill"))
    while function_name(node) in ("Mul", "Div") and sum(f is not None for f, _ in node.next_functions) == 1:
        index = next(i for i, (f, _) in enumerate(node.next_functions) if f is not None)
        factor = saved_tensor(node, "self" if index else "other")
        if factor is None or factor.numel() != 1 or (index and function_name(node) == "Div"):
            return math.inf, False
        scale *= float(factor) if function_name(node) == "Mul" else 1 / float(factor)
        node = first_function(node.next_functions[index][0], (*VIEWS, "MaskedFill"))
    names, dims = ("self", "mat2"), (-1, -2)
    if function_name(node) == "Sum" and len(getattr(node, "_saved_dim", None) or ()) == 1:
        names, dims, node = ("self", "other"), (-1, -1), first_function(node.next_functions[0][0])
        if function_name(node) != "Mul":
            return math.inf, False
    elif function_name(node) not in ("Mm", "Bmm"):
        return math.inf, False
    bound, weights = abs(scale), False
    for (source, _), name, dim in zip(node.next_functions, names, dims, strict=True):
        vectors, maker = saved_tensor(node, name), first_function(source, (*VIEWS, *PARTS, "Expand"))
        if vectors is None or function_name(maker) not in ("Mul", "Div"):
            return math.inf, False
        learned = _learned_factors(maker)
        if len(learned) > 1 or any(p.numel() == max(p.shape, default=1) for p in learned):  # a gain
            return math.inf, False
        lengths = vectors.float().movedim(dim, -1).flatten(0, -2)[:MOST_VECTORS].norm(dim=-1)
        longest = float(lengths.max())
        if not bool(((lengths < SAME_LENGTH * longest) | (lengths > (1 - SAME_LENGTH) * longest)).all()):
            return math.inf, False
        bound *= longest
        weights = weights or bool(learned)
    return bound, weights


FACTORS = ("Mul", "Div", "Expand", "Exp", "Softplus", "Clamp", "ClampMin", *VIEWS)


def _learned_factors(node: Any) -> set[Tensor]:
    """The parameters that a tensor is a product or quotient of; the lengths that it is divided by are none."""
    found, waiting = {node}, [node]
    while waiting:
        current = waiting.pop()
        inputs = current.next_functions if function_name(current) in FACTORS else ()
        new = {f for f, _ in inputs if f is not None} - found
        found |= new
        waiting += new
    return {f.variable for f in found if function_name(f) == "AccumulateGrad"}


FEW_SAMPLES = 8  # on which a loss is tried
UNUSED = "targets unused"  # a fact that is no fault
CLEAR = 1e-3  # relative change of a loss that is more than rounding


class _Tried:
    """A loss as a function of the tensors in an output; random numbers that it draws are the same in all calls."""

    def __init__(self, loss: Callable[[Any, Any], Tensor], output: Any, targets: Any) -> None:
        with_paths, self.spec = tree_flatten_with_path(output)
        self.loss, self.targets = loss, targets
        self.names = [f"output{keystr(path)}" if path else "the output" for path, _ in with_paths]
        self.leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for _, leaf in with_paths]
        self.floats = [i for i, t in enumerate(self.leaves) if isinstance(t, Tensor) and t.is_floating_point()]

    def at(self, leaves: Sequence[Any], targets: Any = None, repeat: int = 1) -> Tensor:
        """The loss of other outputs or targets; `repeat` gives it every sample several times."""
        count = _samples(leaves)

        def again(t: Any) -> Any:
            rows = isinstance(t, Tensor) and t.dim() > 0 and len(t) == count
            return torch.cat([t] * repeat) if rows and repeat > 1 else t

        torch.manual_seed(0)
        values = tree_map(again, (list(leaves), self.targets if targets is None else targets))
        return self.loss(tree_unflatten(values[0], self.spec), values[1])

    def with_leaf(self, index: int, leaf: Tensor) -> list[Any]:
        """The tensors of the output with another one in one place."""
        return [leaf if i == index else t for i, t in enumerate(self.leaves)]


def check_loss(loss: Callable[[Any, Any], Tensor], output: Any, targets: Any) -> Iterator[Fact]:
    """Try a loss on other outputs and targets; what it cannot take is left out."""
    count = _samples(tree_leaves(output))

    def few(t: Any) -> Any:
        return t[:FEW_SAMPLES] if isinstance(t, Tensor) and t.dim() > 0 and len(t) == count else t

    tried = _Tried(loss, tree_map(few, output), tree_map(few, targets))
    frozen = [i for i, t in enumerate(tree_leaves(output)) if i in tried.floats and not t.requires_grad]
    for check in (_check_answers, _check_mean, _check_bound):
        with suppress(Exception), torch.no_grad():
            found = list(check(tried))
            yield from found
            if any(fact.kind != UNUSED for fact in found):
                return
    if 0 < len(frozen) < len(tried.floats):
        with suppress(Exception):
            yield from _check_constants(tried, frozen)


def _samples(leaves: Sequence[Any]) -> int:
    """The number of samples: the length of the first tensor of an output."""
    return next((len(t) for t in leaves if isinstance(t, Tensor) and t.dim()), 0)


def _check_mean(tried: _Tried) -> Iterator[Fact]:
    """Give the loss all samples twice and four times: a mean stays, a sum grows in proportion, a mixture does neither.

    A term that does not depend on the output, as a penalty on the weights, may be a sum or none.
    """

    def parts(leaves: Sequence[Any]) -> tuple[float, float, float]:
        one, two, four = (float(tried.at(leaves, repeat=n)) for n in (1, 2, 4))
        return 2 * one - two, two - one, abs(four - 3 * two + 2 * one)

    mean, summed, bent = parts(tried.leaves)
    size = max(abs(mean), abs(summed))
    if min(abs(mean), abs(summed)) < CLEAR * size or not bent < CLEAR * min(abs(mean), abs(summed)):
        return
    other, _, _ = parts([0.5 * t if i in tried.floats else t for i, t in enumerate(tried.leaves)])
    if abs(other - mean) > CLEAR * abs(mean):
        yield Fact("sum beside a mean", "the loss", value=summed)


LOGITS = 10.0  # difference between the logits of a right and a wrong answer
STEEP = 30.0  # fall from 10 to 100 times an output over that to 10 times; 11 in proportion, 101 for a square


def _check_bound(tried: _Tried) -> Iterator[Fact]:
    """Make one output far larger: a loss that falls as its square, or faster, has a term of the wrong sign."""
    start = float(tried.at(tried.leaves))
    for i in tried.floats:
        low, high = map(float, torch.aminmax(tried.leaves[i]))
        signs = () if low >= 0 and high <= 1 else (1, -1) if low < 0 < high else (1,)  # probabilities, any number
        for sign in signs:
            near, far = (float(tried.at(tried.with_leaf(i, sign * n * tried.leaves[i]))) - start for n in (10, 100))
            if far < STEEP * min(near, 0.0) - abs(start):
                yield Fact("loss without a lower bound", "the loss", tried.names[i])
                return


def _check_constants(tried: _Tried, frozen: Sequence[int]) -> Iterator[Fact]:
    """Change an output without a gradient: if the loss changes, the gradient of another output has to change, too."""
    learning = [i for i in tried.floats if i not in frozen]

    def gradients(leaves: Sequence[Any]) -> tuple[float, list[Tensor]]:
        leaves = [t.clone().requires_grad_() if i in learning else t for i, t in enumerate(leaves)]
        with torch.enable_grad():
            value = tried.at(leaves)
            found = torch.autograd.grad(value, [leaves[i] for i in learning], allow_unused=True)
        return float(value.detach()), [torch.zeros(()) if g is None else g for g in found]

    before, old = gradients(tried.leaves)
    for i in frozen:
        after, new = gradients(tried.with_leaf(i, 1.7 * tried.leaves[i] + 0.3))
        if abs(after - before) > CLEAR * abs(before) and all(map(torch.equal, old, new)):
            yield Fact("term without a gradient", "the output", tried.names[i])
            return


def _check_answers(tried: _Tried) -> Iterator[Fact]:
    """The loss must depend on the targets, and prefer right answers to wrong ones.

    The answers lie between 0 and 1, so that they may be logits, probabilities or numbers.
    """
    y = tried.targets
    if y is None:
        yield Fact(UNUSED, "the loss")
    if not isinstance(y, Tensor) or not y.dim():
        return
    suited = [i for i in tried.floats if _can_be_compared(tried.leaves[i], y)]
    index = next(iter(suited or tried.floats))
    z, wrong = tried.leaves[index].float(), y.roll(1, 0)
    if not z.dim() or len(z) != len(y):
        return

    def value(answer: Tensor, targets: Tensor) -> float:
        return float(tried.at(tried.with_leaf(index, answer), targets))

    if torch.equal(wrong, y):
        if y.dtype != torch.bool and value(z, y) == value(z, y + 1):
            yield Fact(UNUSED, "the loss")
        return
    source = torch.Generator().manual_seed(0)
    guess, other = (torch.rand(z.shape, generator=source).to(z) * 0.9 + 0.05 for _ in range(2))
    one, two, middle = value(guess, y), value(other, y), value((guess + other) / 2, y)
    linear = abs(one + two - 2 * middle) <= CLEAR * abs(one - two)  # the output is a density, an energy or a critic
    if one == value(guess, wrong):  # a loss of the outputs alone has no right answers
        fault = suited and len(tried.floats) == 1 and one != two and not linear
        yield Fact("targets ignored" if fault else UNUSED, "the loss")
        return
    if linear and y.is_floating_point():
        return  # more or less may be meant
    pairs = [(_answers(z, y), _answers(z, wrong))]
    if y.is_floating_point() and y.shape == z.shape:  # what only looks like targets is no answer beyond 0 to 1 either
        pairs.append((y.to(z), wrong.to(z)))
    differences = [value(right, y) - value(bad, y) for right, bad in pairs if right is not None and bad is not None]
    if differences and all(d > 1e-6 for d in differences):
        yield Fact("loss of the wrong sign", "the loss", value=differences[0])
    right, bad = pairs[0]
    classes = not y.is_floating_point() or bool(((y == 0) | (y == 1)).all())
    if right is not None and bad is not None and classes and bool((z < 0).any()):
        logits = [value(LOGITS * (answer - 0.5), targets) for answer, targets in ((right, y), (bad, y))]
        if not logits[0] <= logits[1] and differences[0] < 0:
            yield Fact("logits taken as probabilities", "the loss", tried.names[index])


def _can_be_compared(output: Tensor, targets: Tensor) -> bool:
    """Whether targets are numbers or classes of this output; else a loss of the output alone is meant.

    A triplet loss, for example, compares the parts of each sample with each other.
    """
    if targets.is_floating_point() or targets.numel() == output.numel():
        try:
            return tuple(torch.broadcast_shapes(output.shape, targets.shape)) == tuple(output.shape)
        except RuntimeError:
            return targets.numel() == output.numel()
    for axis in {1, output.dim() - 1}:
        if output.dim() > 1 and targets.shape == (*output.shape[:axis], *output.shape[axis + 1 :]):
            return int(targets.max()) < output.shape[axis]
    return False


def _answers(output: Tensor, targets: Tensor) -> Tensor | None:
    """The output that the targets ask for, between 0 and 1 for classes; None if it is not known."""
    if targets.is_floating_point():
        return targets.to(output).clamp(0.05, 0.95) if targets.shape == output.shape else None
    if output.dim() < 2 or targets.shape != output.shape[:1] + output.shape[2:] or output.shape[1] < 2:
        return None
    inside = targets.clamp(0, output.shape[1] - 1).unsqueeze(1)
    return torch.full_like(output, 0.05).scatter_(1, inside, 0.95)
