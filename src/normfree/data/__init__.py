"""Images: data sets by name, held in memory as bytes, and the batches that a training run sees."""

from normfree.data.download.sources import get, load, names, on_disk, stand_in_note
from normfree.data.images.augment import Augmentation
from normfree.data.images.folder_batches import FolderBatches, folder_in_order
from normfree.data.images.image_batches import Batch, Batches, in_order
from normfree.data.images.image_set import ImageSet, Split, image_set
from normfree.data.images.linear_classifier import linear_accuracy

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
