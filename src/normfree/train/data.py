"""The data of a run: one protocol for images in memory, image folders and text.

`fit` and `evaluate` open their data here once; the training loop does not depend on the kind of data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from normfree.data import ImageSet, load
from normfree.data.text.prepared_folder import Prepared
from normfree.plan import ResidualPlan
from normfree.train.config import TrainConfig
from normfree.train.engine.distributed import Processes
from normfree.train.engine.inputs import Inputs
from normfree.train.image_data import FOLDER, FolderImages, MemoryImages
from normfree.train.text.text_data import TextData, is_text, open_text
from normfree.train.text.translation import Bleu

_NOUNS = {  # the noun of each entry of a fingerprint, for error messages
    "classes": "classes",
    "input_shape": "shape of images",
    "images": "number of training and test images",
    "images_sha256": "images",
    "vocabulary": "vocabulary",
    "vocabulary_sha256": "vocabulary",
    "data_sha256": "data",
}


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


def open_data(config: TrainConfig) -> Data:
    """Open the data that a configuration names.

    Raises `ValueError` if it is not there or damaged.
    """
    if is_text(config.data):
        return open_text(config.data)
    if config.data.startswith(FOLDER):
        return FolderImages(config.data.removeprefix(FOLDER))
    return MemoryImages(load(config.data, config.data_dir))


def as_data(given: ImageSet | Prepared) -> Data:
    """Wrap data that a caller passes to `fit`."""
    return TextData(given) if isinstance(given, Prepared) else MemoryImages(given)


def with_data_dir(config: TrainConfig, folder: str) -> TrainConfig:
    """Return the configuration for data that was moved to another folder."""
    if is_text(config.data) or config.data.startswith(FOLDER):
        return replace(config, data=f"{config.data.partition(':')[0]}:{folder}")
    return replace(config, data_dir=folder)


def require_same_data(data: Data, own: Mapping[str, Any], state: Mapping[str, Any], run: str | Path) -> None:
    """Raise `ValueError` if a run was trained on other data.

    Args:
        data: The data at hand.
        own: The fingerprint of the data, or the part of it that has to agree.
        state: The state of the run's checkpoint. Entries missing in it are not compared.
        run: The folder of the run.
    """
    for key, value in own.items():
        if state.get(key, value) != value:
            raise ValueError(
                f"expected '{data.name}' to have the same {_NOUNS[key]} as the run in '{run}', but it differs; use the "
                "same data, or start another run"
            )
