"""The backward pass of a measurement: where it starts, its gradient at the output, and its errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from normfree.diagnostics.measurement.autograd_graph import overwritten_place
from normfree.diagnostics.measurement.inputs_and_outputs import first_tensor, injected_outputs, loss_of
from normfree.diagnostics.signals import SURE, Fact, OutputFacts
from normfree.nn.model_state import ModelParts


def gradients_by_sample(output: Tensor | None) -> list[Tensor]:
    """A list that the backward pass fills with the largest gradient of each sample's output."""
    found: list[Tensor] = []
    if output is not None and output.requires_grad and output.dim():
        output.register_hook(lambda g: found.append(g.detach().reshape(len(g), -1).abs().amax(1)))
    return found


def is_flat(by_sample: Sequence[Tensor], head: OutputFacts) -> bool:
    """Whether the gradient of the loss is zero at the whole output, and not only by rounding."""
    rounded = bool(by_sample) and (by_sample[0].dtype is torch.float16 or head.confidence > SURE)
    return bool(by_sample) and not rounded and not bool(by_sample[0].any())


def backward_starts(
    output: Any,
    features: Sequence[Tensor],
    targets: Any,
    loss: Callable[[Any, Any], Tensor] | None,
    source: torch.Generator,
) -> tuple[dict[Tensor, Tensor | None], str, Tensor | None, float]:
    """The tensors where the backward pass starts with their gradients, the injected place, and the loss, if any.

    The last number is the loss of an output of zeros, NaN if it is not known.
    """
    value, zero_loss = None, math.nan
    starts: dict[Tensor, Tensor | None] = {}
    result = loss_of(output, targets, loss)
    if result is not None:
        value = result.detach()
        if isinstance(output, Tensor):  # a model with a loss of its own returns more
            with suppress(Exception):  # a loss may refuse zeros, as a density with a width of zero
                zero = loss_of(torch.zeros_like(output), targets, loss)
                zero_loss = math.nan if zero is None else float(zero)
        starts[result] = None  # reaches at least a classifier of zeros
        if not features:
            return starts, "", value, zero_loss
    ends = [] if value is not None else injected_outputs(output)
    places = ["features"] if features else []
    if not features or len(ends) > 1:  # the only output is that of the classifier
        places += ["output" if len(ends) == 1 else "outputs"]
    for start in (*features[-1:], *(ends if places[-1] != "features" else ())):
        starts[start] = random_gradient(start, source)
    return starts, ", ".join(places), value, zero_loss


def outputs_without_loss(output: Any) -> list[Fact]:
    """The number of outputs that the default loss does not read, although they feed no other output."""
    others = sum(t is not first_tensor(output) for t in injected_outputs(output))
    return [Fact("outputs without a loss", "the loss", value=others)] if others else []


def run_backward(parts: ModelParts, starts: dict[Tensor, Tensor | None]) -> None:
    """Run the backward pass; a tensor that was changed in place on the way is one clear error."""
    try:
        torch.autograd.backward(list(starts), list(starts.values()))
    except RuntimeError as error:
        if not (place := overwritten_place(parts, starts)):
            raise
        remedy = "write x = x * y there, not x *= y or x.mul_(y)"
        message = f"expected a backward pass, but a tensor that it needs was changed in place behind {place}; {remedy}"
        raise ValueError(message) from error


def random_gradient(tensor: Tensor, source: torch.Generator) -> Tensor:
    """Draw a gradient with unit variance for a tensor."""
    return torch.randn(tensor.shape, generator=source, device=source.device).to(tensor)
