"""Conversion: any model with normalization → one without, and folding of what is left into the weights."""

from normfree.conversion.changes import Added, Changes, Removed, Scaled
from normfree.conversion.folding.batchnorm import fold_batchnorm
from normfree.conversion.folding.inference import fold_
from normfree.conversion.pipeline import convert, convert_
from normfree.conversion.saving import load_converted, read_plan, save_converted

__all__ = [
    "Added",
    "Changes",
    "Removed",
    "Scaled",
    "convert",
    "convert_",
    "fold_",
    "fold_batchnorm",
    "load_converted",
    "read_plan",
    "save_converted",
]
