"""Loss and accuracy of a model over the batches of a split."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normfree.nn.model_state import eval_mode
from normfree.train.engine.environment import Stop

BatchSums = Callable[[Any, Any], Tensor]
"""Returns three float64 sums over a batch, given the model or its forward function.

They are the losses, the hits, and the number of labels.
"""


class Score(NamedTuple):
    """The result of an evaluation.

    Attributes:
        loss: The mean cross-entropy.
        accuracy: The share of labels that have the highest score.
    """

    loss: float
    accuracy: float


def image_sums(model: Callable[[Tensor], Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the summed cross-entropy, the hits and the number of images of a batch."""
    images, labels = batch
    logits = model(images).float()
    loss = F.cross_entropy(logits, labels, reduction="sum").double()
    hits = (logits.argmax(1) == labels).sum().double()
    return torch.stack((loss, hits, loss.new_tensor(len(labels))))


class UntilSignal:
    """Batches that end early, without an error, when a signal asks the run to stop; `signal` is then its number.

    It is not an error because all processes have to take part in the reduction at the end of an evaluation.
    """

    def __init__(self, batches: Iterable[Any], stop: Stop) -> None:
        self._batches, self._stop = batches, stop
        self.signal = 0

    def __iter__(self) -> Iterator[Any]:
        for batch in self._batches:
            if self._stop.requested is not None:
                self.signal = self._stop.requested
                return
            yield batch


@torch.no_grad()
def score(
    model: nn.Module,
    batches: Iterable[Any],
    sums_of: BatchSums = image_sums,
    *,
    forward: Callable[..., Tensor] | None = None,
    reduce: Callable[[Tensor], None] | None = None,
) -> Score:
    """Score a model in evaluation mode; the mode of every module is restored.

    Args:
        model: The model.
        batches: The batches; each label is counted once.
        sums_of: The sums over one batch.
        forward: The function to call in place of the model, if any.
        reduce: Averages a tensor over all processes in place, if each process has a part of the batches.

    Returns:
        The means over all labels; NaN if there are none.
    """
    sums = torch.zeros(3, dtype=torch.float64, device=next(model.parameters()).device)
    with eval_mode(model):
        for batch in batches:
            sums += sums_of(model if forward is None else forward, batch)
    if reduce is not None:
        reduce(sums)
    loss, hits, labels = sums.tolist()
    return Score(loss / labels, hits / labels) if labels else Score(float("nan"), float("nan"))
