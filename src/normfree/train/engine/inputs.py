"""The data of a run as training sees it: the `Data` protocol, its batches, and the score of a model over them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normfree.nn.model_state import eval_mode
from normfree.plan import ResidualPlan
from normfree.train.config import TrainConfig
from normfree.train.engine.environment import Processes, Stop

if TYPE_CHECKING:
    from normfree.train.text.generation import Bleu

Loss = Callable[[Callable[..., Tensor], Any, float], tuple[Tensor, Tensor]]
"""Returns the mean loss and the accuracy, given the forward function, a batch, and the label smoothing."""
EvalBatches = Callable[[], Iterator[Any]]
"""Returns an iterator over the batches of a split; each image, sentence pair or block occurs once."""
BatchSums = Callable[[Any, Any], Tensor]
"""Returns three float64 sums over a batch, given the model or its forward function.

They are the losses, the hits, and the number of labels.
"""


def image_sums(model: Callable[[Tensor], Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the summed cross-entropy, the hits and the number of images of a batch."""
    images, labels = batch
    logits = model(images).float()
    loss = F.cross_entropy(logits, labels, reduction="sum").double()
    hits = (logits.argmax(1) == labels).sum().double()
    return torch.stack((loss, hits, loss.new_tensor(len(labels))))


@contextmanager
def explained_worker_end() -> Iterator[None]:
    """Explain in one sentence that a worker was killed; torch raises its error wherever the main thread is."""
    try:
        yield
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise ValueError(
            "expected the workers that read images to continue, but one of them was killed; free some memory or use "
            "fewer workers, and resume the run if it has a folder"
        ) from error


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


class Data(Protocol):
    """Data that a model can be trained on.

    Attributes:
        name: The name of the data in a configuration.
        kind: The kind of data, "images" or "text".
        unit: The unit of throughput, "images" or "tokens".
        num_classes: The number of scores per image or token.
        linear_accuracy: The test accuracy of a linear classifier, for comparison; None if nobody measured it.
        source_files: The text files that the data was prepared from, with their sha256; None for images.
        unused_settings: The settings that have no effect on such data.
        translates_test: Whether a run ends with a translation of test sentences.
    """

    name: str
    kind: str
    unit: str
    unused_settings: tuple[str, ...]
    translates_test: bool

    @property
    def num_classes(self) -> int: ...

    @property
    def linear_accuracy(self) -> float | None: ...

    @property
    def source_files(self) -> Mapping[str, Any] | None: ...

    def require_usable(self) -> None:
        """Raise `ValueError` if a model cannot be trained and tested on the data."""
        ...

    def missing_validation(self, config: TrainConfig) -> str | None:
        """Return what the data has in place of a validation part, and the remedy; None if it has one."""
        ...

    def build_model(self, config: TrainConfig) -> tuple[nn.Module, ResidualPlan | None]:
        """Build the configured model with the configured seed; return it, and its plan if it was converted."""
        ...

    def require_scores(self, model: nn.Module, config: TrainConfig) -> None:
        """Raise `ValueError` if a model does not score the data."""
        ...

    def example(self, config: TrainConfig, count: int = 64) -> tuple[Tensor, ...]:
        """Return the arguments of the model for the first training examples."""
        ...

    def inputs(
        self,
        config: TrainConfig,
        *,
        device: torch.device,
        dtype: torch.dtype,
        channels_last: bool,
        processes: Processes,
    ) -> Inputs:
        """Return the batches for training, validation and test. Raises `ValueError` for unusable settings."""
        ...

    def label_fingerprint(self) -> dict[str, Any]:
        """Return the meaning of the labels: the classes, or the vocabulary."""
        ...

    def fingerprint(self, config: TrainConfig) -> dict[str, Any]:
        """Return the checkpoint entries that describe the data: enough to build the model and detect different data."""
        ...

    def translate_test(
        self, model: nn.Module, config: TrainConfig, progress: Callable[[int, int], None] | None = None
    ) -> tuple[list[str], Bleu]:
        """Translate the test sentences; return the lines and their BLEU."""
        ...

    def write_files(self, folder: Path) -> None:
        """Write the files that a run's folder needs besides checkpoints."""
        ...


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


class Score(NamedTuple):
    """The result of an evaluation.

    Attributes:
        loss: The mean cross-entropy.
        accuracy: The share of labels that have the highest score.
    """

    loss: float
    accuracy: float


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
