"""Counter-based random numbers: each is a hash of a seed and counters, so there is no state to save.

The arithmetic is on integers until the last step, so every device, eager or compiled, gives the same numbers. No value
is read back to the host, so a CUDA graph can capture a draw.
"""

from __future__ import annotations

import torch
from torch import Tensor

_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # 2^64 / golden ratio as int64; splitmix64 adds it before every output
_FIRST, _SECOND = 0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64)
_LARGEST_RANGE = 1 << 31  # a product with 32 random bits must fit 63


class Purpose:
    """The counter that separates the draws for different purposes; these numbers never change."""

    ORDER = 0
    SAMPLE = 1
    SHIFT = 2
    SHARE = 3
    CROP_ROW = 4
    CROP_COLUMN = 5
    FLIP = 6
    CUTOUT_ROW = 7
    CUTOUT_COLUMN = 8
    OPERATION = 9
    SIGN = 10
    AREA = 11
    ASPECT = 12
    BATCH_ORDER = 13


def key(seed: int | Tensor, *counters: int | Tensor) -> Tensor:
    """64 random bits (int64) for a seed and counters, broadcast against each other.

        key(s) = splitmix64(s),   key(s, …, c) = splitmix64(key(s, …) ⊕ c)   modulo 2^64

    Reference: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, Figure 17, with
    the constants of the later `splitmix64.c` of Vigna.
    Differs: a counter is not multiplied by G, because a product of a long constant with `torch.arange` does not
    compile for a GPU.

    >>> key(1234567) == 6457827717110365317
    tensor(True)
    """
    state = splitmix64(seed)
    for counter in counters:
        state = splitmix64(state ^ _wrapped(counter))
    return state if isinstance(state, Tensor) else torch.tensor(state, dtype=torch.int64)


def extend(key: Tensor, *counters: int | Tensor) -> Tensor:
    """Add counters to a key: `extend(key(s, a), b)` is `key(s, a, b)`."""
    for counter in counters:
        key = splitmix64(key ^ _wrapped(counter))  # type: ignore[assignment]  # a tensor stays one
    return key


def uniform(key: Tensor) -> Tensor:
    """The upper 24 bits of a key as a float32 in [0, 1)."""
    return ((key >> 40) & 0xFFFFFF).to(torch.float32) * 2.0**-24


def below(key: Tensor, n: int) -> Tensor:
    """An int64 in [0, n) from the upper 32 bits of a key, ⌊bits·n / 2^32⌋; probabilities are 1/n to within 2^-32.

    Raises:
        ValueError: for an n outside 1 … 2^31.
    """
    if not 1 <= n <= _LARGEST_RANGE:
        raise ValueError(f"expected a range of 1 to 2^31 values, got {n}; draw from a smaller one")
    return (((key >> 32) & 0xFFFFFFFF) * n) >> 32


def epoch_order(seed: int, epoch: int, n: int, device: torch.device | str | None = None) -> Tensor:
    """The permutation of 0 … n-1 (int64) in which an epoch visits n samples: the order of their keys."""
    keys = key(seed, Purpose.ORDER, epoch, torch.arange(n, device=device))
    return torch.argsort(keys, stable=True)


def sample_keys(seed: int, epoch: int | Tensor, slots: Tensor) -> Tensor:
    """The keys from which samples draw their augmentation; a slot is a sample's place in the epoch, with repeats."""
    return key(seed, Purpose.SAMPLE, epoch, slots)


def splitmix64(state: int | Tensor) -> int | Tensor:
    """The output of splitmix64 at a state, mix(state + G) modulo 2^64, as int64; G is 2^64 / golden ratio."""
    word = _wrapped(state + _GOLDEN)
    # A shift to the right copies the sign of an int64; the masks clear it.
    word = _wrapped((word ^ ((word >> 30) & (_WORD >> 30))) * _FIRST)
    word = _wrapped((word ^ ((word >> 27) & (_WORD >> 27))) * _SECOND)
    return word ^ ((word >> 31) & (_WORD >> 31))


def _wrapped(word: int | Tensor) -> int | Tensor:
    """The number modulo 2^64 in the range of int64; arithmetic on tensors wraps by itself."""
    return word if isinstance(word, Tensor) else ((word + (1 << 63)) & _WORD) - (1 << 63)
