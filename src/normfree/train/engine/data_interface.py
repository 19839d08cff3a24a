"""The interface between training and its data: batches, losses, scores, and `Data`, the base class of all data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from normfree.nn.model_state import eval_mode
from normfree.plan import ResidualPlan
from normfree.train.config import TrainConfig
from normfree.train.engine.distributed import Processes

if TYPE_CHECKING:
    from normfree.train.text.generation import Bleu

FOLDER, PAIRS, TEXT = "folder:", "pairs:", "text:"
"""Prefixes of data that are read from disk: an image folder, prepared pairs of sentences, prepared text."""
BatchLoss = Callable[[Callable[..., Tensor], Any, float], tuple[Tensor, Tensor]]
"""Returns the mean loss and the accuracy, given the forward function, a batch, and the label smoothing."""
EvalBatches = Callable[[], Iterator[Any]]
"""Returns an iterator over the batches of a split; each image, sentence pair or block occurs once."""
BatchSums = Callable[[Any, Any], Tensor]
"""Returns three float64 sums over a batch, given the model or its forward function.

They are the losses, the hits, and the number of labels.
"""


_NOUNS = {  # the noun of each entry of a fingerprint, for error messages
    "classes": "classes",
    "input_shape": "shape of images",
    "images": "number of training and test images",
    "images_sha256": "images",
    "contents_sha256": "contents of images",
    "vocabulary": "vocabulary",
    "vocabulary_sha256": "vocabulary",
    "data_sha256": "data",
}


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
    """Training batches of a few shapes, which the host knows in advance; see `PairBatches`."""

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

    A step has `items_per_step` images or target tokens on average, from which the throughput is computed.
    `loss` is minimized, and `sums` scores a batch.
    """

    feed: Feed | ShapedFeed
    validation: EvalBatches | None
    test: EvalBatches | None
    items_per_step: float
    loss: BatchLoss
    sums: BatchSums


@torch.no_grad()
def try_model(model: nn.Module, inputs: Iterable[Tensor], expected: str, remedy: str) -> Any:
    """Return the output of a model in evaluation mode; if it fails, raise `ValueError` with its first line."""
    weight = next(model.parameters(), None)
    try:
        with eval_mode(model):
            return model(*(x if weight is None else x.to(weight.device) for x in inputs))
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{expected}, but {type(model).__name__} failed: {reason}; {remedy}") from error


class Data(ABC):
    """Data that a model can be trained on.

    Attributes:
        name: The name of the data in a configuration.
        num_classes: The number of scores per image or token.
        kind: The kind of data, "images" or "text".
        unit: The unit of throughput, "images" or "tokens".
        linear_accuracy: The test accuracy of a linear classifier, for comparison; None if nobody measured it.
        source_files: The text files that the data was prepared from, with their sha256; None for images.
        unused_settings: The settings that have no effect on such data.
        translates_test: Whether a run ends with a translation of test sentences.
    """

    name: str
    num_classes: int
    kind: str
    unit: str
    unused_settings: tuple[str, ...]
    linear_accuracy: float | None = None
    source_files: Mapping[str, Any] | None = None
    translates_test = False

    def require_usable(self) -> None:  # noqa: B027
        """Raise `ValueError` if a model cannot be trained and tested on the data."""

    @abstractmethod
    def missing_validation(self, config: TrainConfig) -> str | None:
        """Return why the data has no validation part, and the remedy; None if it has one."""

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

    def require_same(self, own: Mapping[str, Any], run: str | Path, state: Mapping[str, Any]) -> None:
        """Raise `ValueError` if a run was trained on other data.

        Args:
            own: The fingerprint of this data, or the part of it that has to agree.
            run: The folder of the run.
            state: The state of the run's checkpoint. Entries missing in it are not compared.
        """
        for key, value in own.items():
            if state.get(key, value) != value:
                raise ValueError(
                    f"expected '{self.name}' to have the same {_NOUNS[key]} as the run in '{run}', but it differs; use "
                    "the same data, or start another run"
                )

    def translate_test(
        self, model: nn.Module, config: TrainConfig, progress: Callable[[int, int], None] | None = None
    ) -> tuple[list[str], Bleu]:
        """Translate the test sentences; return the lines and their BLEU. Raises `ValueError` if there are none."""
        raise ValueError(f"expected pairs of sentences to translate, got '{self.name}'; see translates_test")

    def write_files(self, folder: Path) -> None:  # noqa: B027
        """Write the files that a run's folder needs besides checkpoints, if any."""
