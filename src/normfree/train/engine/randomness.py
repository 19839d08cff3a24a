"""Torch's own generators during a run, for what draws from them: dropout, and the factories of others' models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

_MASK = 2**64 - 1


@contextmanager
def seeded_draws(device: torch.device) -> Iterator[Callable[..., None]]:
    """A function that seeds the generators of the CPU and of `device` from whole numbers; as before afterwards.

    A run calls it before every step with its seed and the number of the step, so that a step draws the same whether or
    not the run was interrupted before it.
    """
    generators = [torch.default_generator]
    if device.type == "cuda":
        torch.cuda.init()  # which makes the generators
        generators.append(torch.cuda.default_generators[device.index])
    before = [generator.get_state() for generator in generators]

    def seed(*numbers: int) -> None:
        mixed = _mixed(*numbers)
        for generator in generators:
            generator.manual_seed(mixed)

    try:
        yield seed
    finally:
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)


def _mixed(*numbers: int) -> int:
    """One number of 63 bits from several, each passed through the finalizer of SplitMix64.

    >>> _mixed(0, 1) == _mixed(1, 0), 0 <= _mixed(7, 7) < 2**63
    (False, True)
    """
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1
