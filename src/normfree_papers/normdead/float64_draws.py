"""Seeded draws and comparisons in float64, by which the statements of `normdead` are measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import wraps

import torch
from torch import Tensor, nn

from normfree_papers.claims.claim import Check, Measurement, Settings, expect

ROUNDING = 1e-12
WHY_ROUNDING = "float64: sums of some thousand terms of unit roundoff 1.1e-16 each leave less than 1e-12"


def rounding(name: str, statement: str, paper: float | str | None = 0.0) -> Check:
    """A check that two sides are equal in every draw, up to rounding."""
    return expect(name, paper=paper, high=ROUNDING).derived(statement, why=WHY_ROUNDING, exact=True)


def undisturbed(measure: Callable[[Settings], Measurement]) -> Callable[[Settings], Measurement]:
    """Decorate a measurement to restore torch's global random state, from which new layers and dropout draw."""

    @wraps(measure)
    def inside(settings: Settings) -> Measurement:
        with torch.random.fork_rng(devices=[]):
            return measure(settings)

    return inside


def generator(seed: int) -> torch.Generator:
    """The generator of all draws of a seed."""
    return torch.Generator().manual_seed(seed)


def normal(shape: Sequence[int], g: torch.Generator) -> Tensor:
    """Draws from N(0, 1) in float64."""
    return torch.randn(*shape, generator=g, dtype=torch.float64)


def he(inputs: int, outputs: int, gain: float, g: torch.Generator) -> nn.Linear:
    """A linear layer with weights from N(0, gain/fan_in)."""
    layer = nn.Linear(inputs, outputs, bias=False).double()
    with torch.no_grad():
        layer.weight.copy_(normal((outputs, inputs), g) * math.sqrt(gain / inputs))
    return layer


def apart(a: Tensor, b: Tensor) -> float:
    """The relative difference ‖a - b‖/‖b‖."""
    return float((a - b).norm() / b.norm())


def batch_norm(x: Tensor) -> Tensor:
    """Batch norm of vectors without affine part."""
    return (x - x.mean(0)) / x.std(0, correction=0)
