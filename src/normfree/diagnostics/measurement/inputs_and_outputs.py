"""The input, the output and the targets of a model in numbers, and the loss of an output."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_leaves, tree_leaves_with_path, tree_map, tree_map_with_path

from normfree.arguments import call_loss, check_targets
from normfree.diagnostics.measurement.graph_nodes import walk
from normfree.diagnostics.measurement.moments import variations
from normfree.diagnostics.signals import Fact, InputFacts, OutputFacts
from normfree.graph.observer import tensors_of

MOST_VALUES = 2**22  # of an output that are looked at


@torch.no_grad()
def input_facts(arguments: Any) -> InputFacts:
    """Measure the arguments of a model."""
    tensors = [t for t in tree_leaves(arguments) if isinstance(t, Tensor) and t.is_floating_point() and t.numel()]
    finite = all(map(is_finite, tensors))
    numbers = [t for t in tree_leaves(arguments) if isinstance(t, Tensor) and t.dim() >= 2 and len(t) > 1]
    if not tensors and numbers and all(bool((t == t[:1]).all()) for t in numbers):
        return InputFacts(alike=True, mean=float(numbers[0].float().mean()))  # the same tokens in each sample
    main = max((t for t in tensors if t.dim() >= 2), key=lambda t: t.numel(), default=None)
    if main is None:
        return InputFacts(finite)
    values = main.double() if main.device.type == "cpu" else main.float()
    alike = main.shape[0] > 1 and bool((main == main[:1]).all())
    mean, deviation, variation = float(values.mean()), float(values.std(correction=0)), float(variations(main)[0])
    highest = float(values.max())
    return InputFacts(finite, mean, deviation, alike, _name(main.dtype), variation, highest=highest)


class WatchedInput(NamedTuple):
    """An argument of a model: the copy that the model reads, and the leaf that gets its gradient, if it can."""

    name: str
    read: Tensor
    leaf: Tensor


IMAGES = 4  # dimensions; the gradient of an image would cost as much as the first layer


def watch_inputs(arguments: Any, *, images: bool = False) -> tuple[Any, list[WatchedInput]]:
    """Copy the arguments so that their gradients and changes in place can be seen after the pass.

    Args:
        images: Whether images get a gradient, too.
    """
    watched: list[WatchedInput] = []

    def watch(path: Any, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        leaf = value.detach().clone()
        if value.is_floating_point() and (images or value.dim() < IMAGES):
            leaf.requires_grad_(True)
        watched.append(WatchedInput(keystr(path), leaf.clone(), leaf))
        return watched[-1].read

    return tree_map_with_path(watch, arguments), watched


IGNORED = 0.25  # of the features or positions of the input that get no gradient


class IgnoredInput(NamedTuple):
    """A part of an argument that gets no gradient, in words, and the argument with other values there."""

    name: str
    part: str
    changed: Tensor


@torch.no_grad()
def ignored_inputs(watched: list[WatchedInput], word_gradients: Mapping[int, Tensor]) -> Iterator[IgnoredInput]:
    """Find the arguments, and the features and positions of the main one, that get no gradient.

    Args:
        word_gradients: The size of the gradient that embeddings get at each word, by the address of the words.
    """
    numbers = [w for w in watched if w.leaf.dim() > 1 and len(w.leaf) > 1]
    numbers = [w for w in numbers if w.leaf.requires_grad or w.read.data_ptr() in word_gradients]
    gradients = [w.leaf.grad if w.leaf.requires_grad else word_gradients[w.read.data_ptr()] for w in numbers]
    used = [g for g in gradients if g is not None and bool(g.any())]
    for w, gradient in zip(numbers, gradients, strict=True):
        if not used:
            return
        if gradient is None or not bool(gradient.any()):
            yield IgnoredInput(w.name, f"all of the argument {w.name}", w.leaf.detach().roll(1, 0))
        elif gradient.numel() == max(g.numel() for g in used):
            for axis in (1, 2) if gradient.dim() == 3 else (1,):
                silent = gradient.abs().amax([i for i in range(gradient.dim()) if i != axis], keepdim=True) == 0
                indices = silent.flatten().nonzero().flatten().tolist()
                if len(indices) >= IGNORED * gradient.shape[axis]:
                    few = ", ".join(map(str, indices[:3])) + (", …" if len(indices) > 3 else "")
                    changed = torch.where(silent, w.leaf.detach().roll(1, 0), w.leaf.detach())
                    if torch.equal(changed, w.leaf):  # as padding, which is the same in all samples
                        return
                    yield IgnoredInput(w.name, f"index {few} of dimension {axis}", changed)
                    return


@torch.no_grad()
def target_facts(targets: Any) -> InputFacts:
    """Measure the targets of a loss, if they are a tensor; `alike`: whether all numbers are the same."""
    if not isinstance(targets, Tensor) or targets.is_complex() or not targets.numel():
        return InputFacts()
    values = targets.detach().float()
    alike = targets.numel() > 1 and bool((targets == targets.flatten()[0]).all())
    mean, deviation = float(values.mean()), float(values.std(correction=0))
    lowest, highest = map(float, torch.aminmax(values))
    return InputFacts(True, mean, deviation, alike, _name(targets.dtype), lowest=lowest, highest=highest)


TARGETS_LARGE = 30.0  # root mean square, also over that of the output, which has about 1 at the start; bytes have 150
DEMANDED = 0.1  # of the loss that is left at most if targets are divided by their size, which the output has to reach


@torch.no_grad()
def large_targets(output: Any, targets: Any, loss: Any) -> Iterator[Fact]:
    """The parts of the targets that are far larger than an output, if the loss is far smaller for smaller ones.

    A loss that uses only the order of the targets, or their logarithm, does not ask for an output of their size; it
    changes by a logarithm at most.
    """
    outputs = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point()]
    for path, part in tree_leaves_with_path(targets):
        if not isinstance(part, Tensor) or not part.is_floating_point() or not part.numel():
            continue
        alike = [t for t in outputs if t.squeeze().shape == part.squeeze().shape] or outputs[: not path]
        size = float(part.float().square().mean().sqrt())
        sizes = [float(t.float().square().mean().sqrt()) for t in alike]
        if not sizes or not TARGETS_LARGE * max(1.0, *sizes) < size < math.inf or bool((part == part.max()).all()):
            continue
        smaller = tree_map(lambda t, part=part, size=size: t / size if t is part else t, targets)
        values = [loss_of(output, y, loss) for y in (targets, smaller)]
        before, after = (math.nan if value is None else float(value) for value in values)
        if abs(after) <= DEMANDED * before and before - after > 2 * math.log(size):
            yield Fact("targets scale", f"the targets{keystr(path)}", value=size)


UNSEEN = 0.5  # of the samples whose output gets no gradient


def unseen_samples(by_sample: Sequence[Tensor], targets: Any, output: Tensor | None) -> tuple[Fact, ...]:
    """Whether the loss leaves out most samples, but for those that are marked: by no class, by NaN, or by a mask."""
    if not by_sample or output is None:
        return ()
    unseen, classes = by_sample[0] == 0, max(output.shape[1:], default=math.inf)
    share = float(unseen.float().mean())
    for t in (t for t in tree_leaves(targets) if isinstance(t, Tensor) and t.shape[:1] == unseen.shape):
        rows = t.detach().flatten(1) if t.dim() > 1 else t.detach()[:, None]
        no_class = ~rows if rows.dtype == torch.bool else (rows < 0) | (rows >= classes)
        marked = rows.isnan() if rows.is_floating_point() else no_class
        if bool(marked.all(1)[unseen].all()):
            return ()
    return (Fact("samples left out", "the loss", value=share),) if UNSEEN <= share < 1 else ()


def is_mask(tensor: Tensor) -> bool:
    """Whether a tensor is an additive mask: finite numbers and -∞, and the finite numbers are 0."""
    return bool(((tensor == 0) | (tensor == -math.inf)).all())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@torch.no_grad()
def output_facts(output: Tensor, targets: Any = None) -> OutputFacts:
    """Measure a model's output; `targets` tell which dimension the classes of a sequence have."""
    z = output.detach()
    if z.dim() < 2 or not z.numel():
        square = float(z.float().square().mean()) if z.numel() else math.nan
        spread = float(z.double().var(correction=0)) if z.numel() > 1 else math.nan
        return OutputFacts(mean_square=square, variation=spread / square if square > 0 else math.nan)
    z = z[: max(2, MOST_VALUES // max(1, z[0].numel()))].float()
    last = z.dim() == 3 and not (isinstance(targets, Tensor) and targets.shape == (len(output), *output.shape[2:]))
    logits = z if last or z.dim() == 2 else z.movedim(1, -1)
    square = float(z.square().mean())
    spread = float(z.double().var(0, correction=0).mean()) if len(z) > 1 else math.nan
    variation = spread / square if square > 0 else math.nan
    classes = logits.shape[-1]
    if classes < 2:
        return OutputFacts(0, square, variation=variation)
    chance = float((logits.logsumexp(-1) - logits.mean(-1)).mean())
    likely, which = logits.softmax(-1).flatten(0, -2).max(-1)
    favourite = int(which[0]) if bool((which == which[0]).all()) else -1
    sums = logits.sum(-1)
    probabilities = bool((logits >= 0).all()) and bool(((sums - 1).abs() < 1e-3).all())
    return OutputFacts(classes, square, chance, float(likely.mean()), variation, favourite, probabilities)


def is_finite(tensor: Tensor) -> bool:
    """Whether a tensor has no NaN and no infinity, or is a mask."""
    return bool(torch.isfinite(tensor).all()) or is_mask(tensor)


def first_tensor(output: Any) -> Tensor:
    """Find the tensor in a model's output: the output itself, its 'logits', or the first floating-point tensor in it.

    Raises:
        ValueError: if there is none.
    """
    values = list(output.values()) if isinstance(output, Mapping) else output
    items = values if isinstance(values, list | tuple) else ()
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    for value in (output, logits, *items):
        if isinstance(value, Tensor) and value.is_floating_point():
            return value
    raise ValueError(
        f"expected an output that is or holds a tensor of floating-point numbers, got {type(output).__name__}; "
        "pass a loss= that turns it into a number"
    )


def main_tensor(output: Any) -> Tensor:
    """The tensor in which two passes are compared: `first_tensor`, or all tensors of a nested output, side by side.

    Raises:
        ValueError: if there is none.
    """
    with suppress(ValueError):
        return first_tensor(output)
    tensors = [t if t.dim() else t[None] for t in tensors_of(output) if t.is_floating_point() and t.numel()]
    alike = [t.reshape(len(t), -1) for t in tensors if len(t) == len(tensors[0])]
    return torch.cat([t.to(alike[0].dtype) for t in alike], 1) if alike else first_tensor(output)


def injected_outputs(output: Any) -> list[Tensor]:
    """The outputs at which a random gradient is injected: all that feed no other output, the main one first.

    Gradients at these reach every layer. The inner feature maps of a backbone, and the keys and values that a decoder
    returns, feed other outputs.

    Raises:
        ValueError: if there is no output of floating-point numbers.
    """
    found = [t for t in tensors_of(output) if t.is_floating_point() and t.grad_fn is not None]
    makers = [t.grad_fn for t in found if t.grad_fn is not None] if len(found) > 1 else []
    inner = set(walk([f for maker in makers for f, _ in maker.next_functions], most=sys.maxsize))
    ends = list({id(t): t for t in found if t.grad_fn not in inner}.values())
    try:
        main = first_tensor(output)
    except ValueError:
        if not ends:
            raise
        return ends
    others = [t for t in ends if t is not main and bool(torch.isfinite(t.detach()).all())]
    return others if others and main.grad_fn in inner else [main, *others]


def own_loss(output: Any) -> Tensor | None:
    """Return the loss that a model computed itself, as those of transformers do when they get labels; else None."""
    value = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return value if isinstance(value, Tensor) and value.numel() == 1 else None


def cross_entropy(output: Any, targets: Any) -> Tensor:
    """The default loss; for sequences (N, T, V) with targets (N, T), the mean over all positions."""
    logits = first_tensor(output)
    if isinstance(targets, Tensor) and logits.dim() == 3 and targets.shape == logits.shape[:2]:
        logits, targets = logits.flatten(0, 1), targets.flatten()
    check_targets(logits, targets)
    return nn.functional.cross_entropy(logits, targets)


def loss_of(output: Any, targets: Any, loss: Callable[[Any, Any], Tensor] | None) -> Tensor | None:
    """The loss of an output: the model's own if there are no targets and no loss, None if it has none."""
    return own_loss(output) if targets is None and loss is None else call_loss(loss or cross_entropy, output, targets)
