"""Draws pass tests of randomness, equal known values, and orders are permutations."""

from __future__ import annotations

from collections.abc import Callable
from math import factorial, sqrt

import pytest
import torch
from scipy import stats

from normfree.data.counter_rng import Purpose, below, epoch_order, extend, key, sample_keys, uniform

COUNT = 1 << 15
CHANCE = 1e-6  # of a false alarm per check; the seeds are fixed

KNOWN_KEY = 6768782832058643234
KNOWN_UNIFORM = [0.9798413515090942, 0.880789577960968, 0.14158421754837036]
KNOWN_BELOW = [9, 8, 1, 4, 8, 8, 6, 5]
KNOWN_ORDER = [4, 6, 0, 3, 1, 9, 2, 8, 5, 7]

RUNS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "seeds": lambda n: key(n),
    "counters": lambda n: key(0, n),
    "second counters": lambda n: key(7, n // 8, n % 8),
    "epochs": lambda n: key(0, Purpose.SAMPLE, n, 5),
    "purposes of a sample": lambda n: extend(sample_keys(3, 1, n // 4), n % 4),
}


def looks_uniform(values: torch.Tensor, bins: int = 64) -> bool:
    """Whether Pearson's statistic of equal bins is in neither tail; too even is as wrong as too uneven."""
    counts = torch.histc(values.double(), bins=bins, min=0, max=1)
    statistic = float(((counts - len(values) / bins) ** 2).sum() / (len(values) / bins))
    low, high = stats.chi2.ppf([CHANCE, 1 - CHANCE], bins - 1)
    return bool(low < statistic < high)


def looks_independent(values: torch.Tensor) -> bool:
    """Whether values 1 to 8 apart are uncorrelated; the correlation of n pairs has a standard deviation of 1/√n."""
    centred = values.double() - 0.5
    limit = stats.norm.isf(CHANCE / 2)
    return all(
        abs(float((centred[:-lag] * centred[lag:]).mean())) * 12 * sqrt(len(values) - lag) < limit
        for lag in range(1, 9)
    )


@pytest.mark.parametrize("name", RUNS)
def test_uniform_is_uniform_and_independent(name: str) -> None:
    values = uniform(RUNS[name](torch.arange(COUNT)))
    assert values.dtype == torch.float32
    assert values.min() >= 0
    assert values.max() < 1
    assert looks_uniform(values)
    assert looks_independent(values)


@pytest.mark.parametrize("name", RUNS)
def test_key_flips_half_of_the_bits_from_one_counter_to_the_next(name: str) -> None:
    keys = RUNS[name](torch.arange(COUNT))
    bits = (((keys[1:] ^ keys[:-1])[:, None] >> torch.arange(64)) & 1).double().mean(0)
    assert (bits - 0.5).abs().max() < stats.norm.isf(CHANCE / 128) * 0.5 / sqrt(COUNT - 1)


@pytest.mark.parametrize(
    "hash_", [lambda n: n * 0x9E3779B97F4A7C1, lambda n: n << 40, lambda n: key(n // 2)], ids=["Weyl", "raw", "twice"]
)
def test_checks_refuse_a_bad_hash(hash_: Callable[[torch.Tensor], torch.Tensor]) -> None:
    values = uniform(hash_(torch.arange(COUNT)))
    assert not (looks_uniform(values) and looks_independent(values))


def test_key_is_splitmix64() -> None:
    """The outputs of `splitmix64.c` for the seed 1234567, as other implementations test theirs."""
    outputs = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    for number, output in enumerate(outputs):
        state = (1234567 + number * 0x9E3779B97F4A7C15) % 2**64
        assert int(key(state)) % 2**64 == output
        assert int(key(torch.tensor(state - 2**64 if state >> 63 else state))) % 2**64 == output


def test_key_of_counters_equals_an_oracle_in_whole_numbers() -> None:
    def output(state: int) -> int:
        z = state % 2**64
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    golden = 0x9E3779B97F4A7C15
    for seed, first, second in [(0, 0, 0), (1, 2, 3), (-1, 2**40, 5), (2**63, 10, 2**31)]:
        state = output(seed + golden)
        for counter in (first, second):
            state = output((state ^ counter) + golden)
        assert int(key(seed, first, second)) % 2**64 == state
        assert int(key(seed, torch.tensor(first), second)) % 2**64 == state
        assert int(key(seed, first, torch.tensor([second]))) % 2**64 == state


def test_extended_key_is_the_key_of_all_counters() -> None:
    assert torch.equal(extend(key(3, 1), torch.arange(5), -2), key(3, 1, torch.arange(5), -2))


def test_draws_stay_what_they_were() -> None:
    """A change here changes every run ever recorded."""
    assert key(0, 1, 2).item() == KNOWN_KEY
    assert uniform(key(5, torch.arange(3))).tolist() == KNOWN_UNIFORM
    assert below(key(5, torch.arange(8)), 10).tolist() == KNOWN_BELOW
    assert epoch_order(3, 1, 10).tolist() == KNOWN_ORDER


@pytest.mark.parametrize("n", [1, 2, 7, 255])
def test_below_reaches_every_value_equally_often(n: int) -> None:
    counts = torch.bincount(below(key(1, torch.arange(COUNT)), n), minlength=n)
    assert len(counts) == n
    expected = COUNT / n
    assert ((counts - expected) ** 2 / expected).sum() <= stats.chi2.isf(CHANCE, max(n - 1, 1))


def test_below_keeps_to_a_large_range() -> None:
    values = below(key(1, torch.arange(COUNT)), 2**31)
    assert values.min() >= 0
    assert values.max() < 2**31
    assert looks_uniform(values / 2**31)


@pytest.mark.parametrize("n", [0, -1, 2**31 + 1])
def test_below_refuses_a_range_it_cannot_draw(n: int) -> None:
    with pytest.raises(ValueError, match="expected a range of 1 to"):
        below(key(0), n)


@pytest.mark.parametrize("n", [0, 1, 2, 1000])
def test_order_is_a_permutation_of_its_epoch(n: int) -> None:
    first, second = epoch_order(0, 0, n), epoch_order(0, 1, n)
    assert first.sort().values.tolist() == second.sort().values.tolist() == list(range(n))
    if n > 2:
        assert not torch.equal(first, second)
        assert not torch.equal(first, epoch_order(1, 0, n))
    assert torch.equal(first, epoch_order(0, 0, n))


def test_order_takes_every_permutation_equally_often() -> None:
    epochs, n = 2400, 4
    seen: dict[tuple[int, ...], int] = {}
    for epoch in range(epochs):
        permutation = tuple(epoch_order(11, epoch, n).tolist())
        seen[permutation] = seen.get(permutation, 0) + 1
    expected = epochs / factorial(n)
    assert len(seen) == factorial(n)
    assert sum((count - expected) ** 2 / expected for count in seen.values()) < stats.chi2.isf(CHANCE, factorial(n) - 1)


def test_purposes_are_numbers_of_their_own() -> None:
    numbers = [number for name, number in vars(Purpose).items() if name.isupper()]
    assert len(set(numbers)) == len(numbers) > 10


def test_draws_leave_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    epoch_order(0, 0, 10)
    uniform(key(0, 1))
    assert torch.equal(torch.get_rng_state(), before)
