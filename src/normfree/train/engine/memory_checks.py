"""Refuse a run that does not fit into the memory, before it fills the memory; explain it where that shows late."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from normfree.nn.devices import LARGE, require_memory, require_room_for_activations
from normfree.train.config import TrainConfig
from normfree.train.engine.inputs import Data


@contextmanager
def explained_shortage(config: TrainConfig) -> Iterator[None]:
    """Turn an error of torch for lack of memory into one sentence."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:  # torch has a class of its own for a GPU only
        short = isinstance(error, torch.OutOfMemoryError | MemoryError)
        if not short and "allocate memory" not in str(error) and "enough memory" not in str(error):
            raise
        raise ValueError(
            f"expected '{config.model}' with batches of {config.batch_size:,} to fit into the memory, but it ran out; "
            "use a smaller batch_size, more micro-batches (accumulate) or recompute=1"
        ) from error


def require_room_for_batch(config: TrainConfig, data: Data, device: torch.device, world: int) -> None:
    """Raise `ValueError` if the images of a batch do not fit into the memory."""
    if data.kind == "images":
        each = sum(x[0].nbytes for x in data.example(config, 1))
        batch = f"a batch of {config.batch_size:,} images"
        require_memory(batch, config.batch_size // world * each, "use a smaller batch_size", device)


def require_room_for_weights(model: nn.Module, config: TrainConfig, device: torch.device) -> None:
    """Raise `ValueError` if the weights and their optimizer do not fit into the memory."""
    count = sum(parameter.numel() for parameter in model.parameters())
    vectors = 2 + (1 if config.optimizer == "sgd" else 2) + bool(config.ema)  # weights, gradient, optimizer, average
    remedy = "choose a smaller model, or another machine"
    require_memory(f"the weights of '{config.model}' and their optimizer", 4 * count * vectors, remedy, device)


def require_room_for_micro_batch(
    model: nn.Module, config: TrainConfig, data: Data, device: torch.device, images: int
) -> None:
    """Raise `ValueError` if the activations of a large micro-batch of `images` do not fit into the memory."""
    if data.kind != "images" or images < LARGE or config.recompute:
        return
    share = 0.5 if config.compile or config.precision != "float32" else 1.0  # a compiler or bf16 may keep half
    remedy = "use a smaller batch_size, or a larger accumulate"
    require_room_for_activations(model, data.example(config, 2), images, remedy, device, share)
