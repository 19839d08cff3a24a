"""What the statements of `normdead` are measured with: seeded draws in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps

import torch
from torch import Tensor

from normfree_papers.claims.claim import Measurement, Settings

ROUNDING = 1e-12
WHY_ROUNDING = "float64: sums of some thousand terms of unit roundoff 1.1e-16 each leave less than 1e-12"


def undisturbed(measure: Callable[[Settings], Measurement]) -> Callable[[Settings], Measurement]:
    """A measurement that leaves torch's global random state as it was: new layers and dropout draw from it."""

    @wraps(measure)
    def inside(settings: Settings) -> Measurement:
        with torch.random.fork_rng(devices=[]):
            return measure(settings)

    return inside


def generator(seed: int) -> torch.Generator:
    """The source of all draws of a seed."""
    return torch.Generator().manual_seed(seed)


def normal(shape: Sequence[int], g: torch.Generator) -> Tensor:
    """N(0, 1) in float64."""
    return torch.randn(*shape, generator=g, dtype=torch.float64)


def apart(a: Tensor, b: Tensor) -> float:
    """‖a - b‖/‖b‖."""
    return float((a - b).norm() / b.norm())
