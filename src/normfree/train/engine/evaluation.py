"""Loss and accuracy of a model on images, each counted once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normfree.nn.model_state import evaluating


class Score(NamedTuple):
    """Mean cross-entropy, and the share of images whose highest score is their label's."""

    loss: float
    accuracy: float


@torch.no_grad()
def score(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    reduce: Callable[[Tensor], None] | None = None,
) -> Score:
    """Score `model` in evaluation mode; every module's mode is as before afterwards.

    `reduce` averages a tensor over all processes, in place, where each has a part of the images.
    """
    device = next(model.parameters()).device
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    with evaluating(model):
        for inputs, labels in batches:
            logits = model(inputs).float()
            loss = F.cross_entropy(logits, labels, reduction="sum")
            hits = (logits.argmax(1) == labels).sum()
            sums += torch.stack((loss.double(), hits.double(), sums.new_tensor(len(labels))))
    if reduce is not None:
        reduce(sums)
    loss_sum, correct, seen = sums.tolist()
    return Score(loss_sum / seen, correct / seen) if seen else Score(float("nan"), float("nan"))
