"""Score a model over batches: its mean loss and accuracy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from normfree.nn.model_state import eval_mode
from normfree.train.data_sources import image_sums
from normfree.train.engine.data_interface import BatchSums
from normfree.train.engine.stop_signals import Stop
from normfree.train.run.result import Score


@torch.no_grad()
def sum_scores(
    model: nn.Module,
    batches: Iterable[Any],
    sums_of: BatchSums = image_sums,
    forward: Callable[..., Tensor] | None = None,
) -> Tensor:
    """Score a model in evaluation mode; the mode of every module is restored.

    Args:
        model: The model.
        batches: The batches; each label is counted once.
        sums_of: The sums over one batch.
        forward: The function to call in place of the model, if any.

    Returns:
        Three float64 sums over all batches, for `mean_score`: the losses, the hits, and the number of labels.
    """
    sums = torch.zeros(3, dtype=torch.float64, device=next(model.parameters()).device)
    with eval_mode(model):
        for batch in batches:
            sums += sums_of(model if forward is None else forward, batch)
    return sums


def mean_score(sums: Tensor) -> Score:
    """Return the means over all labels; NaN if there are none."""
    loss, hits, labels = sums.tolist()
    return Score(loss / labels, hits / labels) if labels else Score(float("nan"), float("nan"))


def score(model: nn.Module, batches: Iterable[Any], sums_of: BatchSums = image_sums) -> Score:
    """Score a model on batches that this process has alone; see `sum_scores`."""
    return mean_score(sum_scores(model, batches, sums_of))


class UntilSignal:
    """Batches that end early, without an error, when a Unix signal asks the run to stop; `stop_signal` is then its
    number.

    It is not an error because all processes have to take part in the reduction at the end of an evaluation.
    """

    def __init__(self, batches: Iterable[Any], stop: Stop) -> None:
        self._batches, self._stop = batches, stop
        self.stop_signal = 0

    def __iter__(self) -> Iterator[Any]:
        for batch in self._batches:
            if self._stop.requested is not None:
                self.stop_signal = self._stop.requested
                return
            yield batch
