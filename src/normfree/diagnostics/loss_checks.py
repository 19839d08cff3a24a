"""Checks of a loss that the user gave, by its values at other outputs than those of the model.

- It depends on the targets, and prefers right answers to wrong ones.
- It is a mean over the samples, or a sum, but no mixture of both.
- It has a lower bound, or falls no faster than its outputs grow.
- It reads no output without a gradient, unless that has a part in the gradient of another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map, tree_unflatten

from normfree.diagnostics.signals import Fact

FEW_SAMPLES = 8  # on which a loss is tried
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
            if found:
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
        return float(value), [torch.zeros(()) if g is None else g for g in found]

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
    if not isinstance(y, Tensor) or not y.dim():
        return
    suited = [i for i in tried.floats if _can_be_compared(tried.leaves[i], y)]
    index = next(iter(suited or tried.floats))
    z, wrong = tried.leaves[index].float(), y.roll(1, 0)
    if not z.dim() or len(z) != len(y) or torch.equal(wrong, y):
        return

    def value(answer: Tensor, targets: Tensor) -> float:
        return float(tried.at(tried.with_leaf(index, answer), targets))

    source = torch.Generator().manual_seed(0)
    guess, other = (torch.rand(z.shape, generator=source).to(z) * 0.9 + 0.05 for _ in range(2))
    if value(guess, y) == value(guess, wrong):  # a loss of the outputs alone has no right answers
        if suited and len(tried.floats) == 1 and value(guess, y) != value(other, y):
            yield Fact("targets ignored", "the loss")
        return
    pairs = [(_answers(z, y), _answers(z, wrong))]
    if y.is_floating_point() and y.shape == z.shape:  # what only looks like targets is no answer beyond 0 to 1 either
        pairs.append((y.to(z), wrong.to(z)))
    differences = [value(right, y) - value(bad, y) for right, bad in pairs if right is not None and bad is not None]
    if differences and all(d > 1e-6 for d in differences):
        yield Fact("loss of the wrong sign", "the loss", value=differences[0])


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
