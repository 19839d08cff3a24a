"""Whole stages of norm-free residual blocks as single CUDA kernels, forward and backward.

`stage` runs a stage, `prepare` compiles it ahead, `why_not` says why one cannot run; docs/kernels.md describes the
kernels.
"""

from normfree.kernels.driver import prepare
from normfree.kernels.operators import stage, why_not
from normfree.kernels.tiling import FORMS, NEUTRAL, SCALARS, SHAPES, Form

__all__ = ["FORMS", "NEUTRAL", "SCALARS", "SHAPES", "Form", "prepare", "stage", "why_not"]
