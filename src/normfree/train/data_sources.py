"""The data of a run: `open_data` opens what a configuration names.

Images are here, in memory or in a folder from which they are read as they are needed. Text is in
`train/text/text_data.py`. `Data` in `train/engine/data_interface.py` is the base of both.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normfree.data import Augmentation, ImageSet, load
from normfree.data.counter_rng import epoch_order
from normfree.data.images.image_checksums import contents_digest
from normfree.data.images.image_folder import FolderBatches, ImageFolder, folder_in_order, read_folder
from normfree.data.images.image_set import ImageBatches, Split, in_order
from normfree.errors import wrong_argument
from normfree.methods import get
from normfree.models import build
from normfree.models.builder import is_foreign
from normfree.models.third_party import create_model
from normfree.plan import ResidualPlan
from normfree.train.config import TrainConfig
from normfree.train.engine.data_interface import FOLDER, PAIRS, TEXT, Data, EvalBatches, Inputs, try_model
from normfree.train.engine.distributed import Processes
from normfree.train.engine.step import image_loss

if TYPE_CHECKING:
    from normfree.data.text.prepared_folder import Prepared

AS_BUILT = "as built"  # method name for third-party models trained unchanged
FOLDER_SIZE = 224  # the side that the images of a folder are scaled to


def is_text(name: str) -> bool:
    """Return whether the name of data is that of a prepared folder, such as 'pairs:.data/multi30k'."""
    return name.startswith((PAIRS, TEXT))


def open_data(config: TrainConfig) -> Data:
    """Open the data that a configuration names.

    Raises `ValueError` if it is not there or damaged.
    """
    if is_text(config.data):
        from normfree.train.text.text_data import open_text  # imported here because images do not need it

        return open_text(config.data)
    if config.data.startswith(FOLDER):
        return FolderImages(config.data.removeprefix(FOLDER))
    return MemoryImages(load(config.data, config.data_dir))


def as_data(given: ImageSet | Prepared) -> Data:
    """Wrap data that a caller passes to `fit`."""
    if isinstance(given, ImageSet):
        return MemoryImages(given)
    from normfree.data.text.prepared_folder import Prepared  # imported here because images do not need it
    from normfree.train.text.text_data import TextData

    if not isinstance(given, Prepared):
        remedy = (
            "make one by normfree.data.image_set, name stored data as in data='cifar10', or train in a loop of your own"
        )
        raise wrong_argument("data", "an ImageSet or prepared text", given, remedy)
    return TextData(given)


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


def augmentation_of(config: TrainConfig) -> Augmentation:
    """Return the augmentation of training images that the settings `crop` to `randaugment` describe."""
    return Augmentation(
        crop=config.crop,
        flip=config.flip,
        cutout=config.cutout,
        mixup=config.mixup,
        randaugment=config.randaugment if config.randaugment[0] else None,
    )


class ImageData(Data):
    """Labelled images; a subclass says how they are read.

    Args:
        name: The name of the data in a configuration.
        classes: The names of the classes.
        train: The training images, a `Split` or an `ImageFolder`.
        test: The test images.
    """

    kind = "images"
    unit = "images"
    unused_settings: tuple[str, ...] = ("dropout", "inner_dropout", "block", "beam", "length_penalty")

    def __init__(self, name: str, classes: tuple[str, ...], train: Any, test: Any) -> None:
        self.name, self.num_classes = name, len(classes)
        self.classes, self.train, self.test = classes, train, test

    @abstractmethod
    def _batches(self, part: Any, **settings: Any) -> ImageBatches | FolderBatches:
        """Return the training batches of a part."""

    @abstractmethod
    def _in_order(self, part: Any, **settings: Any) -> Iterator[tuple[Tensor, Tensor]]:
        """Return every image of a part once, in batches."""

    @abstractmethod
    def _hold_out(self, count: int, seed: int) -> tuple[Any, Any]:
        """Split `count` images off the training images; return the others and them."""

    @abstractmethod
    def _update_digest(self, digest: Any, part: Any) -> None:
        """Add the images of a part to a digest."""

    def _reader_settings(self, config: TrainConfig) -> dict[str, Any]:
        """Return more settings of the batches: how their images are read."""
        return {}

    def missing_validation(self, config: TrainConfig) -> str | None:
        """Return the remedy if no training images are held out."""
        return None if config.validation > 0 else "got validation=0; set validation=0.1"

    def build_model(self, config: TrainConfig) -> tuple[nn.Module, ResidualPlan | None]:
        """Build the configured model, initialized from the configured seed; convert a third-party one by the method."""
        generator = torch.Generator().manual_seed(config.seed)
        if not is_foreign(config.model):
            network = build(
                config.model,
                config.method,
                num_classes=self.num_classes,
                form=config.form,
                example=self.example(config)[0],
                generator=generator,
            )
            return network, None
        model = create_model(config.model, classes=self.num_classes)
        if config.method == AS_BUILT:
            return model, None
        from normfree.conversion import convert_  # imported here because our own models are not converted

        (images,) = self.example(config, 64 if get(config.method).needs_example else 16)
        _require_scores(model, images[:2], self.num_classes)
        try:
            return model, convert_(model, config.method, images, generator=generator)
        except ValueError as error:
            raise ValueError(f"{error}; or train it without a method, with method='{AS_BUILT}'") from error

    def require_scores(self, model: nn.Module, config: TrainConfig) -> None:
        """Raise `ValueError` if a model does not give each image one score per class."""
        _require_scores(model, self.example(config, 2)[0], self.num_classes)

    def example(self, config: TrainConfig, count: int = 64) -> tuple[Tensor]:
        """Return the first training images as the network reads them."""
        return (next(self._in_order(self.train.take(slice(count)), batch_size=count))[0],)

    def inputs(self, config: TrainConfig, *, device: torch.device, dtype: torch.dtype, processes: Processes) -> Inputs:
        """Return the batches; part of the training images is held out for validation.

        Raises `ValueError` if the processes cannot share a batch evenly.
        """
        rank, world = processes.rank, processes.world
        if config.batch_size % (world * config.accumulate):
            raise ValueError(
                f"expected a batch size that {world} processes with {config.accumulate} micro-batches each share "
                f"evenly, got {config.batch_size}; change it"
            )
        train, held_out = self._hold_out(round(config.validation * len(self.train)), config.seed)
        layout: dict[str, Any] = {"device": device, "dtype": dtype, "channels_last": bool(config.channels_last)}
        layout |= self._reader_settings(config)

        def scored(part: Any) -> EvalBatches:
            own = part.take(slice(rank, None, world))
            return (
                partial(self._in_order, own, batch_size=config.eval_batch_size, **layout) if own else partial(iter, ())
            )

        return Inputs(
            feed=self._batches(
                train,
                batch_size=config.batch_size,
                augmentation=augmentation_of(config),
                seed=config.seed,
                rank=rank,
                world=world,
                **layout,
            ),
            validation=scored(held_out) if held_out else None,
            test=scored(self.test),
            items_per_step=config.batch_size,
            loss=image_loss,
            sums=image_sums,
        )

    def label_fingerprint(self) -> dict[str, Any]:
        """Return the names of the classes."""
        return {"classes": list(self.classes)}

    def fingerprint(self, config: TrainConfig) -> dict[str, Any]:
        """Return the classes, and the shape, the number and the digest of the images."""
        digest = hashlib.sha256()
        for part in (self.train, self.test):
            self._update_digest(digest, part)
            digest.update(part.labels.cpu().contiguous().numpy().data)
        return {
            **self.label_fingerprint(),
            "input_shape": list(self.example(config, 1)[0].shape[1:]),
            "images": [len(self.train), len(self.test)],
            "images_sha256": digest.hexdigest(),
        }


class MemoryImages(ImageData):
    """An `ImageSet`, all in memory."""

    def __init__(self, images: ImageSet) -> None:
        super().__init__(images.name, images.classes, images.train, images.test)
        self.images = images
        self.linear_accuracy = images.linear_accuracy

    def require_usable(self) -> None:
        """Raise `ValueError` if a split is empty, a label has no class, or the splits have different sizes."""
        count = len(self.classes)
        for part, split in (("training", self.train), ("test", self.test)):
            if not len(split):
                raise ValueError(f"expected {part} images in '{self.name}', found none; give it at least one")
            low, high = int(split.labels.min()), int(split.labels.max())
            if low < 0 or high >= count:
                raise ValueError(
                    f"expected {part} labels of 0 to {count - 1} for the {count} classes of '{self.name}', got {low} "
                    f"to {high}; name every class"
                )
        sizes = [tuple(split.images.shape[1:]) for split in (self.train, self.test)]
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"expected training and test images of one size in '{self.name}', got {sizes[0]} and {sizes[1]}; "
                "resize one of them"
            )

    def _batches(self, part: Split, **settings: Any) -> ImageBatches:
        return ImageBatches(part, mean=self.images.mean, std=self.images.std, **settings)

    def _in_order(self, part: Split, **settings: Any) -> Iterator[tuple[Tensor, Tensor]]:
        return in_order(part, mean=self.images.mean, std=self.images.std, **settings)

    def _hold_out(self, count: int, seed: int) -> tuple[Split, Split]:
        return self.images.hold_out(count, seed)

    def _update_digest(self, digest: Any, part: Split) -> None:
        digest.update(part.images.cpu().contiguous().numpy().data)


class FolderImages(ImageData):
    """An image folder: train/<class>/<image> and val/<class>/<image>.

    Raises `ValueError` if there are no images.
    """

    def __init__(self, root: str) -> None:
        train = read_folder(root, "train")
        super().__init__(f"{FOLDER}{root}", train.classes, train, read_folder(root, "val", train.classes))
        self.root = Path(root)

    def _reader_settings(self, config: TrainConfig) -> dict[str, Any]:
        return {"workers": config.workers}

    def _batches(self, part: ImageFolder, **settings: Any) -> FolderBatches:
        return FolderBatches(part, size=FOLDER_SIZE, **settings)

    def _in_order(self, part: ImageFolder, **settings: Any) -> Iterator[tuple[Tensor, Tensor]]:
        return folder_in_order(part, size=FOLDER_SIZE, **settings)

    def _hold_out(self, count: int, seed: int) -> tuple[ImageFolder, ImageFolder]:
        drawn = epoch_order(seed, 0, len(self.train))
        return self.train.take(drawn[count:].sort().values), self.train.take(drawn[:count].sort().values)

    def _update_digest(self, digest: Any, part: ImageFolder) -> None:
        """Add the names and sizes of the files, as earlier releases did."""
        listed = ((file.parent.name, file.name, file.stat().st_size) for file in part.files)
        digest.update("".join(f"{folder}/{file} {size}\n" for folder, file, size in listed).encode())

    def fingerprint(self, config: TrainConfig) -> dict[str, Any]:
        """Return also the digest of the contents of the files, of which `images_sha256` has only names and sizes."""
        contents = contents_digest(self.root, [*self.train.files, *self.test.files])
        return {**super().fingerprint(config), "contents_sha256": contents}


def _require_scores(model: nn.Module, images: Tensor, classes: int) -> None:
    """Raise `ValueError` if a model does not give each image one score per class."""
    expected = f"expected a model that gives images of {tuple(images.shape[1:])} a score for each of {classes} classes"
    remedy = "change the model's input or output size, or use other data"
    if images.shape[1] == 1:
        remedy = (
            "these images are grey, with 1 channel, so use colour images, such as data='cifar10', or a model that "
            "reads 1 channel"
        )
    scores = try_model(model, [images], expected, remedy)
    if not isinstance(scores, Tensor) or scores.dim() != 2 or scores.shape[1] < classes:
        got = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise ValueError(
            f"{expected}, got {got} from {len(images)} images; change the output size of {type(model).__name__}, or "
            "use other data"
        )


def image_sums(model: Callable[[Tensor], Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the summed cross-entropy, the hits and the number of images of a batch."""
    images, labels = batch
    logits = model(images).float()
    loss = F.cross_entropy(logits, labels, reduction="sum").double()
    hits = (logits.argmax(1) == labels).sum().double()
    return torch.stack((loss, hits, loss.new_tensor(len(labels))))
