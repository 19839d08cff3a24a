"""Mixup: each image is blended with another one of its batch, by a share that the batch draws."""

from __future__ import annotations

import torch
from torch import Tensor

from normfree.data.draws import Purpose, below, key, uniform

_CELLS = 4096  # of the table of shares; a power of two, so that finding the cell of a draw rounds nothing
_FINE = 1 << 18  # steps of the integral behind the table


def share_table(alpha: float) -> Tensor:
    """The quantiles of Beta(α, α) at 0, 1/4096, …, 1, as float32; `shares` draws from it.

    With u = x^e, e = min(α, 1), the density has no poles, and by its symmetry the lower half says all:

        F(x) ∝ ∫_0^{x^e} v^{α-e} (1-v)^{α-1} du,   v = u^{1/e},   x ≤ ½

    The midpoint rule in float64 gives F, whose inverse is read off between the nodes. What is drawn is right at every
    quantile of the table, so its distribution function is off by less than 1/4096 anywhere; α = 1 is exactly uniform.

    Reference: Zhang et al., "mixup: beyond empirical risk minimization", ICLR 2018.

    Raises `ValueError` unless α is positive and finite.
    """
    if not 0 < alpha < float("inf"):
        raise ValueError(f"expected a positive mixup alpha, got {alpha}; 0 in the augmentation leaves mixup out")
    power = min(alpha, 1.0)
    edges = torch.linspace(0, 0.5**power, _FINE + 1, dtype=torch.float64)
    v = ((edges[1:] + edges[:-1]) / 2) ** (1 / power)
    density = ((alpha - power) * (2 * v).log() + (alpha - 1) * (2 - 2 * v).log()).exp()
    mass = torch.cat([density.new_zeros(1), density.cumsum(0)])
    mass = mass / (2 * mass[-1])
    levels = torch.arange(_CELLS // 2 + 1, dtype=torch.float64) / _CELLS
    above = torch.searchsorted(mass, levels).clamp(1, _FINE)
    part = (levels - mass[above - 1]) / (mass[above] - mass[above - 1])
    lower = (edges[above - 1] + part * (edges[above] - edges[above - 1])) ** (1 / power)
    lower[0] = 0.0  # where a density below the smallest float left 0/0
    return torch.cat([lower, 1 - lower.flip(0)[1:]]).to(torch.float32)


def shares(seed: int, epoch: int, steps: Tensor, table: Tensor) -> Tensor:
    """The share of the first image of each pair in the batches of `steps` (n,), float32 in [0, 1].

    The quantile at a uniform draw, read off the table linearly.
    """
    place = uniform(key(seed, Purpose.SHARE, epoch, steps)) * _CELLS
    cell = place.to(torch.int64)
    low, high = table[cell], table[cell + 1]
    return low + (place - cell) * (high - low)


def shifts(seed: int, epoch: int, steps: Tensor, batch_size: int) -> Tensor:
    """How far from an image its partner lies in the global batches of `steps` (n,): 1 … batch_size - 1, one a batch.

    The order of an epoch is random, so a shift pairs images as randomly as a permutation. A batch of one image is
    mixed with itself.
    """
    return 1 + below(key(seed, Purpose.SHIFT, epoch, steps), max(batch_size - 1, 1))


def mix(images: Tensor, others: Tensor, share: Tensor) -> Tensor:
    """share·images + (1 - share)·others, in the type of the images."""
    return share * images + (1 - share) * others
