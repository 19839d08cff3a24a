"""The data of a run as training sees it: the `Data` protocol, its batches, and the score of a model over them."""

from __future__ import annotations

from abc import ABC, abstractmethod
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


class Data(ABC):
    """Data that a model can be trained on.

    Args:
        name: The name of the data in a configuration.
        num_classes: The number of scores per image or token.

    Attributes:
        kind: The kind of data, "images" or "text".
        unit: The unit of throughput, "images" or "tokens".
        linear_accuracy: The test accuracy of a linear classifier, for comparison; None if nobody measured it.
        source_files: The text files that the data was prepared from, with their sha256; None for images.
        unused_settings: The settings that have no effect on such data.
        translates_test: Whether a run ends with a translation of test sentences.
    """

    kind: str
    unit: str
    unused_settings: tuple[str, ...]
    linear_accuracy: float | None = None
    source_files: Mapping[str, Any] | None = None
    translates_test = False

    def __init__(self, name: str, num_classes: int) -> None:
        self.name, self.num_classes = name, num_classes

    def require_usable(self) -> None:  # noqa: B027
        """Raise `ValueError` if a model cannot be trained and tested on the data."""

    @abstractmethod
    def missing_validation(self, config: TrainConfig) -> str | None:
        """Return what the data has in place of a validation part, and the remedy; None if it has one."""

    @abstractmethod
    def build_model(self, config: TrainConfig) -> tuple[nn.Module, ResidualPlan | None]:
        """Build the configured model with the configured seed; return it, and its plan if it was converted."""

    @abstractmethod
    def require_scores(self, model: nn.Module, config: TrainConfig) -> None:
        """Raise `ValueError` if a model does not score the data."""

    @abstractmethod
    def example(self, config: TrainConfig, count: int = 64) -> tuple[Tensor, ...]:
        """Return the arguments of the model for the first training examples."""

    @abstractmethod
    def inputs(self, config: TrainConfig, *, device: torch.device, dtype: torch.dtype, processes: Processes) -> Inputs:
        """Return the batches for training, validation and test. Raises `ValueError` for unusable settings."""

    @abstractmethod
    def label_fingerprint(self) -> dict[str, Any]:
        """Return the meaning of the labels: the classes, or the vocabulary."""

    @abstractmethod
    def fingerprint(self, config: TrainConfig) -> dict[str, Any]:
        """Return the checkpoint entries that describe the data: enough to build the model and detect different data."""

    def translate_test(
        self, model: nn.Module, config: TrainConfig, progress: Callable[[int, int], None] | None = None
    ) -> tuple[list[str], Bleu]:
        """Translate the test sentences; return the lines and their BLEU. Raises `ValueError` if there are none."""
        raise ValueError(f"expected pairs of sentences to translate, got '{self.name}'; see translates_test")

    def write_files(self, folder: Path) -> None:  # noqa: B027
        """Write the files that a run's folder needs besides checkpoints."""


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
