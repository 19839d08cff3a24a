"""Evaluate the model of a run on its test data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from normfree.arguments import check_arguments
from normfree.nn.devices import device_of
from normfree.train.config import TrainConfig
from normfree.train.data_sources import explained_worker_end, is_text, open_data
from normfree.train.engine.data_interface import FOLDER, Data
from normfree.train.engine.distributed import Processes
from normfree.train.engine.forward import apply_precision_
from normfree.train.engine.setup import score
from normfree.train.run import checkpoint
from normfree.train.run.loading import load, read_config
from normfree.train.run.run_records import Score
from normfree.train.text.generation import Bleu


def evaluate(
    run: str | Path,
    *,
    device: str = "cpu",
    data_dir: str | None = None,
    progress: Callable[[int], None] | None = None,
    trust: bool = False,
) -> Score:
    """Compute the test loss and accuracy of a run's model, on a GPU in the training precision, on a CPU in float32.

    Args:
        run: The folder of the run.
        device: The torch device; 'auto' takes a GPU if there is one.
        data_dir: The folder of the data, if it was moved: the folder of data sets, or the image folder or prepared
            folder of text that the run was trained on.
        progress: Called after each batch with the number of batches done.
        trust: Whether you trust the folder; see `load`.

    Returns:
        The mean loss and the accuracy.

    Raises:
        ValueError: If the folder holds no run, its checkpoint is damaged, its model is unknown, or its data is missing,
            has changed or has no test split.
    """
    check_arguments(folder=run)
    config, data = _config_and_data(run, data_dir)
    place = device_of(device)
    model = load(run, device=str(place), trust=trust)
    dtype = apply_precision_(model, config.precision if place.type == "cuda" else "float32")
    if config.channels_last:  # as in training: convolutions of weights in another order round in another way
        for parameter in model.parameters():
            if parameter.dim() == 4:
                parameter.data = parameter.data.clone(memory_format=torch.channels_last)
    inputs = data.inputs(config, device=place, dtype=dtype, processes=Processes())
    if inputs.test is None:
        raise ValueError(f"expected a test split in '{config.data}', found none; prepare the data with one")
    with explained_worker_end():
        return score(model, _counted(inputs.test(), progress), inputs.sums)


def _counted(batches: Iterable[Any], progress: Callable[[int], None] | None) -> Iterator[Any]:
    for done, batch in enumerate(batches, 1):
        yield batch
        if progress is not None:
            progress(done)


def evaluate_translation(
    run: str | Path,
    *,
    device: str = "cpu",
    data_dir: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Bleu | None:
    """Translate the test sentences of a run with its beam, and compute BLEU.

    Args:
        run: The folder of the run.
        device: The torch device; 'auto' takes a GPU if there is one.
        data_dir: The folder of the prepared text, if it was moved.
        progress: Called with the number of sentences done, and of all sentences.

    Returns:
        BLEU; None if the run does not translate, or has no test sentences.

    Raises:
        ValueError: If the folder holds no run, or its data is missing or has changed.
    """
    if not is_text(read_config(run).data):
        return None  # before any image is read
    config, data = _config_and_data(run, data_dir)
    if not data.translates_test:
        return None
    return data.translate_test(load(run, device=str(device_of(device))), config, progress)[1]


def with_data_dir(config: TrainConfig, folder: str) -> TrainConfig:
    """Return the configuration for data that was moved to another folder."""
    if is_text(config.data) or config.data.startswith(FOLDER):
        return replace(config, data=f"{config.data.partition(':')[0]}:{folder}")
    return replace(config, data_dir=folder)


def _config_and_data(run: str | Path, data_dir: str | None) -> tuple[TrainConfig, Data]:
    """Return the configuration and the data of a run.

    Raises `ValueError` if the classes or tokens of the data are not those that the model learned.
    """
    config = read_config(run)
    if data_dir is not None:
        config = with_data_dir(config, data_dir)
    data, state = open_data(config), checkpoint.load_state(run)
    data.require_same(data.label_fingerprint(), run, state)
    return config, data
