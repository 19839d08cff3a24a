"""Conversion: remove the normalization of any model, and fold batch norms and scalars into the weights."""

from normfree.conversion.changes import Added, Changes, Folding, Removed, Rescaled
from normfree.conversion.folding.batchnorm import fold_batchnorm
from normfree.conversion.folding.inference_folding import fold_
from normfree.conversion.pipeline import convert, convert_
from normfree.conversion.saving import load_converted, read_plan, save_converted

__all__ = [
    "Added",
    "Changes",
    "Folding",
    "Removed",
    "Rescaled",
    "convert",
    "convert_",
    "fold_",
    "fold_batchnorm",
    "load_converted",
    "read_plan",
    "save_converted",
]
