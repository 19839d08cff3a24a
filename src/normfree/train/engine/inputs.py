"""The training, validation and test batches of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from normfree.train.engine.evaluation import BatchSums, image_sums

Loss = Callable[[Callable[..., Tensor], Any, float], tuple[Tensor, Tensor]]
"""Returns the mean loss and the accuracy, given the forward function, a batch, and the label smoothing."""
EvalBatches = Callable[[], Iterator[Any]]
"""Returns an iterator over the batches of a split; each image, sentence pair or block occurs once."""


class Feed(Protocol):
    """A source of training batches of one shape. If `capturable`, `batch` depends on device tensors only."""

    steps: int
    capturable: bool

    def start_epoch(self, epoch: int) -> None:
        """Prepare the batches of an epoch."""
        ...

    def batch(self, step: Tensor) -> Any:
        """Return the batch of a step of the epoch."""
        ...


@runtime_checkable
class ShapedFeed(Protocol):
    """Training batches of a few shapes, which the host knows in advance; see `TokenBatches`."""

    steps: int
    shapes: Sequence[Any]

    def start_epoch(self, epoch: int) -> None:
        """Prepare the batches of an epoch."""
        ...

    def shape_of(self, step: int) -> int:
        """Return the index of the shape of a step's batch."""
        ...

    def gather(self, shape: int, step: Tensor) -> Any:
        """Return the batch of a step that has this shape; a function of device tensors only."""
        ...


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The training batches of a run, and this process's part of the validation and test batches.

    A step has `per_step` images or target tokens (the `unit`) on average, from which the throughput is computed.
    `loss` is minimized, and `sums` scores a batch.
    """

    feed: Feed | ShapedFeed
    validation: EvalBatches | None
    test: EvalBatches | None
    unit: str
    per_step: float
    loss: Loss
    sums: BatchSums = image_sums


class OneShapeFeed:
    """A `Feed` as a `ShapedFeed` of one shape; batches made on the host are copied to where a captured step reads."""

    shapes: Sequence[Any] = (None,)

    def __init__(self, feed: Feed, *, compile: bool) -> None:
        self._feed, self.steps = feed, feed.steps
        self._batch = torch.compile(feed.batch, dynamic=False) if compile and feed.capturable else feed.batch
        self._fetched: Any = None

    def start_epoch(self, epoch: int) -> None:
        """Prepare the batches of an epoch."""
        self._feed.start_epoch(epoch)

    def shape_of(self, step: int) -> int:
        """Return the index of the only shape."""
        return 0

    def gather(self, shape: int, step: Tensor) -> Any:
        """Return the fetched batch, or compute the batch of the step on the device."""
        return self._fetched if self._fetched is not None else self._batch(step)

    def fetch(self, step: int) -> None:
        """Load the batch of a step into those tensors if it is made on the host.

        The step is an int, so that the device need not be read.
        """
        if self._feed.capturable:
            return
        batch = self._feed.batch(torch.tensor(step))
        if self._fetched is None:
            self._fetched = batch
            return
        for target, source in zip(self._fetched, batch, strict=True):
            if target is not None and source is not None:
                target.copy_(source, non_blocking=True)
