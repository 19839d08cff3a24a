"""Data for training: image sets and folders with their batches (images/, download/), and tokenized text (text/)."""

from normfree.data.data_sets import get, load, names, on_disk, stand_in_note
from normfree.data.images.augment import Augmentation
from normfree.data.images.image_folder import FolderBatches, folder_in_order
from normfree.data.images.image_set import ImageBatch, ImageBatches, ImageSet, Split, image_set, in_order

__all__ = [
    "Augmentation",
    "FolderBatches",
    "ImageBatch",
    "ImageBatches",
    "ImageSet",
    "Split",
    "folder_in_order",
    "get",
    "image_set",
    "in_order",
    "load",
    "names",
    "on_disk",
    "stand_in_note",
]
