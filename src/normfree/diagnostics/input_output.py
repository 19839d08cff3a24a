"""Both ends of a network, measured: the input, the output and the first loss."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from normfree.diagnostics.signals import InputFacts, OutputFacts
from normfree.nn.model_state import ModelParts

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
    return InputFacts(finite, float(values.mean()), float(values.std(correction=0)), alike, _name(main.dtype))


@torch.no_grad()
def target_facts(targets: Any) -> InputFacts:
    """Measure the targets of a loss, if they are a tensor; `alike`: whether all numbers are the same."""
    if not isinstance(targets, Tensor) or targets.is_complex() or not targets.numel():
        return InputFacts()
    values = targets.float()
    alike = targets.numel() > 1 and bool((targets == targets.flatten()[0]).all())
    return InputFacts(True, float(values.mean()), float(values.std(correction=0)), alike, _name(targets.dtype))


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


RANGES = {
    "Relu": (0.0, math.inf),
    "Softplus": (0.0, math.inf),
    "Exp": (0.0, math.inf),
    "Sigmoid": (0.0, 1.0),
    "Hardsigmoid": (0.0, 1.0),
    "Softmax": (0.0, 1.0),
    "Tanh": (-1.0, 1.0),
    "Hardtanh": (-1.0, 1.0),
}  # of the functions that may end a network


@torch.no_grad()
def unreachable_targets(function: str, output: Tensor | None, targets: Any) -> float:
    """The fraction of the targets outside the range of the function that ends the network.

    >>> unreachable_targets("Relu", torch.ones(4, 1), torch.tensor([[-1.0], [2.0], [-3.0], [4.0]]))
    0.5
    """
    low, high = RANGES.get(function, (-math.inf, math.inf))
    if output is None or not isinstance(targets, Tensor) or not targets.is_floating_point():
        return 0.0
    if targets.numel() != output.numel() or not targets.numel():
        return 0.0
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


def is_finite(tensor: Tensor) -> bool:
    """Whether a tensor has no NaN and no infinity, or is a mask."""
    return bool(torch.isfinite(tensor).all()) or is_mask(tensor)


@contextmanager
def clear_type_errors(parts: ModelParts, arguments: Any) -> Iterator[None]:
    """Turn an error of torch about types into one that names the type of the weights and of the input."""
    try:
        yield
    except (RuntimeError, ValueError, IndexError) as error:
        kinds = {p.dtype for p in parts.parameters.values() if p.is_floating_point()}
        given = [t for t in tree_leaves(arguments) if isinstance(t, Tensor)]
        wrong = next((t for t in given if t.dtype not in kinds and t.dtype != torch.bool), None)
        if wrong is None or len(kinds) != 1 or not re.search("dtype|scalar type|data type|Input type", str(error)):
            raise
        wanted, got = (str(d).removeprefix("torch.") for d in (next(iter(kinds)), wrong.dtype))
        raise ValueError(
            f"expected inputs of type {wanted}, as the weights have, got {got}; convert them with "
            f"inputs.to(torch.{wanted}), and scale bytes to about unit variance"
        ) from error


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


def own_loss(output: Any) -> Tensor | None:
    """Return the loss that a model computed itself, as those of transformers do when they get labels; else None."""
    value = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return value if isinstance(value, Tensor) and value.numel() == 1 else None


def cross_entropy(output: Any, targets: Any) -> Tensor:
    """The default loss; for sequences (N, T, V) with targets (N, T), the mean over all positions."""
    logits = first_tensor(output)
    if isinstance(targets, Tensor) and logits.dim() == 3 and targets.shape == logits.shape[:2]:
        logits, targets = logits.flatten(0, 1), targets.flatten()
    return nn.functional.cross_entropy(logits, targets)
