"""What a run is fed: training batches, and what it is judged by: images from memory or a folder, or tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from normfree.data import ImageSet, load
from normfree.data.counter_rng import epoch_order
from normfree.data.images.image_batches import ImageBatches, in_order
from normfree.data.images.image_folder import FolderBatches, ImageFolder, folder_in_order, read_folder
from normfree.data.images.image_set import Split
from normfree.data.text.prepared_folder import Prepared
from normfree.data.text.token_batches import TokenBatches
from normfree.train.config import TrainConfig
from normfree.train.engine.distributed import Processes
from normfree.train.engine.evaluation import Score, score
from normfree.train.engine.step import Feed, Loss, ShapedFeed, image_loss
from normfree.train.text.token_runs import is_tokens, open_tokens, require_bleu, token_batches, token_loss, token_score

Data = ImageSet | tuple[ImageFolder, ImageFolder] | Prepared
Judged = Callable[[], Iterator[Any]]
"""What a model is scored on: batches, each image, pair or block once."""
FOLDER_SIZE = 224  # the side that the images of a folder are brought to


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The feed of a run, and what it is judged by in validation and test, each process with its part.

    A step has `per_step` of a `unit` on average, which is how throughput is told.
    """

    feed: Feed | ShapedFeed
    validation: Judged | None
    test: Judged | None
    unit: str = "images"
    per_step: float
    loss: Loss = image_loss
    score: Callable[..., Score] = score


def is_folder(name: str) -> bool:
    """Whether the name of data means an image folder, such as 'folder:.data/imagenet'."""
    return name.startswith("folder:")


def open_data(config: TrainConfig) -> Data:
    """The data that a configuration names: a set in memory, the two parts of a folder, or a prepared folder of text."""
    if is_tokens(config.data):
        return open_tokens(config.data)
    if not is_folder(config.data):
        return load(config.data, config.data_dir)
    root = config.data.removeprefix("folder:")
    train = read_folder(root, "train")
    return train, read_folder(root, "val", train.classes)


def require_whole(data: Data) -> None:
    """Raise `ValueError` for data without training or test images, with a label that has no class, or not to be scored.

    `read_folder` makes sure of it for a folder, and `open_tokens` for text.
    """
    if isinstance(data, Prepared):
        require_bleu(data)
    if not isinstance(data, ImageSet):
        return
    for part, split in (("training", data.train), ("test", data.test)):
        if not len(split):
            raise ValueError(f"expected {part} images in '{data.name}', found none; give it at least one")
        low, high = int(split.labels.min()), int(split.labels.max())
        if low < 0 or high >= len(data.classes):
            raise ValueError(
                f"expected {part} labels of 0 to {len(data.classes) - 1} for the {len(data.classes)} classes of "
                f"'{data.name}', got {low} to {high}; name every class"
            )


def example_of(config: TrainConfig, data: ImageSet | tuple[ImageFolder, ImageFolder], count: int = 64) -> Tensor:
    """A few training images as the network sees them, for its shape and for methods that look at data."""
    if isinstance(data, ImageSet):
        split = data.train.take(slice(0, count))
        return next(iter(in_order(split, batch_size=count, mean=data.mean, std=data.std)))[0]
    few = _part(data[0], range(min(count, len(data[0]))))
    return next(iter(folder_in_order(few, batch_size=count, size=FOLDER_SIZE)))[0]


def inputs_of(
    config: TrainConfig,
    data: Data,
    *,
    device: torch.device,
    dtype: torch.dtype,
    channels_last: bool,
    processes: Processes,
) -> Inputs:
    """Batches of the training images less those held out, and these and the test images for scoring; or of tokens.

    Raises `ValueError` when nothing would be left to train on, or the processes cannot share a batch evenly.
    """
    if isinstance(data, Prepared):
        return _token_inputs(config, data, device, processes)
    layout: dict[str, Any] = {"device": device, "dtype": dtype, "channels_last": channels_last}
    shared: dict[str, Any] = {
        "batch_size": config.batch_size,
        "augmentation": config.augmentation(),
        "seed": config.seed,
        "rank": processes.rank,
        "world": processes.world,
    }
    if config.batch_size % (processes.world * config.accumulate):
        raise ValueError(
            f"expected a batch size that {processes.world} processes with {config.accumulate} micro-batches each share "
            f"evenly, got {config.batch_size}; change it"
        )
    mine = slice(processes.rank, None, processes.world)
    if isinstance(data, ImageSet):
        train, held = data.hold_out(round(config.validation * len(data.train)), config.seed)
        colours: dict[str, Any] = {"mean": data.mean, "std": data.std}

        def scored(split: Split) -> Judged:
            part = split.take(mine)
            return partial(in_order, part, batch_size=config.eval_batch_size, **colours, **layout) if part else _none

        return Inputs(
            feed=ImageBatches(train, **shared, **colours, **layout),
            per_step=config.batch_size,
            validation=scored(held) if len(held) else None,
            test=scored(data.test),
        )
    whole, test = data
    drawn = epoch_order(config.seed, 0, len(whole)).tolist()
    count = round(config.validation * len(whole))
    kept, held_out = _part(whole, sorted(drawn[count:])), _part(whole, sorted(drawn[:count]))
    reading: dict[str, Any] = {
        "batch_size": config.eval_batch_size,
        "workers": config.workers,
        "size": FOLDER_SIZE,
        **layout,
    }

    def streamed(folder: ImageFolder) -> Judged:
        part = _part(folder, range(len(folder))[mine])
        return partial(folder_in_order, part, **reading) if part else _none

    return Inputs(
        per_step=config.batch_size,
        feed=FolderBatches(kept, **shared, **layout, size=FOLDER_SIZE, workers=config.workers),
        validation=streamed(held_out) if count else None,
        test=streamed(test),
    )


def _token_inputs(config: TrainConfig, data: Prepared, device: torch.device, processes: Processes) -> Inputs:
    """Batches of token pairs or running text, and each pair or block once for scoring."""
    if config.accumulate > 1:
        raise ValueError(f"expected accumulate=1 for tokens, got {config.accumulate}; make batch_size smaller")

    def batches(split: str) -> Any:
        return token_batches(config, data, split, device=device, processes=processes)

    def judged(split: str) -> Judged | None:
        return batches(split).once if split in data.splits else None

    feed = batches("train")
    return Inputs(
        feed=feed,
        validation=judged("valid"),
        test=judged("test"),
        unit="tokens",
        per_step=feed.mean_tokens if isinstance(feed, TokenBatches) else feed.batch_size * config.block,
        loss=partial(token_loss, world=processes.world),
        score=partial(token_score, world=processes.world),
    )


def _none() -> Iterator[tuple[Tensor, Tensor]]:
    """The part of a process where there are fewer images than processes."""
    return iter(())


def _part(folder: ImageFolder, which: Iterable[int]) -> ImageFolder:
    """The files of a folder by their numbers."""
    numbers = list(which)
    return ImageFolder(
        classes=folder.classes, files=tuple(folder.files[i] for i in numbers), labels=folder.labels[numbers]
    )
