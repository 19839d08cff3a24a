"""Open the data that a configuration names: images in memory, an image folder, or prepared text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from normfree.data import ImageSet, load
from normfree.errors import wrong_argument
from normfree.train.config import TrainConfig
from normfree.train.engine.data_interface import FOLDER, PAIRS, TEXT, Data
from normfree.train.image_data import FolderImages, MemoryImages

if TYPE_CHECKING:
    from normfree.data.text.prepared_folder import Prepared


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
