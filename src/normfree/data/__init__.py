"""Images: data sets by name, held in memory as bytes, and the batches that a training run sees."""

from normfree.data.augment import Augmentation
from normfree.data.batches import Batch, Batches, in_order
from normfree.data.images import ImageSet, Split, image_set
from normfree.data.linear import linear_accuracy
from normfree.data.sources import get, load, names, on_disk, stand_in_note
from normfree.data.stream import FolderBatches, folder_in_order

__all__ = [
    "Augmentation",
    "Batch",
    "Batches",
    "FolderBatches",
    "ImageSet",
    "Split",
    "folder_in_order",
    "get",
    "image_set",
    "in_order",
    "linear_accuracy",
    "load",
    "names",
    "on_disk",
    "stand_in_note",
]
