"""The shapes are the best there are, by trying all."""

from __future__ import annotations

from itertools import combinations_with_replacement, pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from normfree.data.text import length_shapes
from normfree.data.text.length_shapes import nested_shapes

LENGTHS = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4)), min_size=1, max_size=12)


def slots(pairs: list[tuple[int, int]], shapes: list[tuple[int, int]]) -> int:
    """All slots, each pair padded to the first shape that holds it."""
    total = 0
    for s, t in pairs:
        total += next(S + T for S, T in shapes if s <= S and t <= T)
    return total


def least(pairs: list[tuple[int, int]], count: int) -> int:
    """The fewest slots of any nested shapes, by trying all of them."""
    largest = (max(s for s, _ in pairs), max(t for _, t in pairs))
    cells = list(product(range(1, largest[0] + 1), range(1, largest[1] + 1)))
    nested = (
        [*chain, largest]
        for chain in combinations_with_replacement(cells, count - 1)
        if all(a[0] <= b[0] and a[1] <= b[1] for a, b in pairwise(chain))
    )
    return min(slots(pairs, chain) for chain in nested)


def found(pairs: list[tuple[int, int]], most: int, padding: float = 0.0, overhead: int = -1) -> list[tuple[int, int]]:
    source, target = np.array(pairs).T
    return nested_shapes(source, target, most=most, padding=padding, overhead=overhead)


@settings(max_examples=60, deadline=None)
@given(pairs=LENGTHS, most=st.integers(1, 3))
def test_shapes_have_the_least_padding_of_all(pairs: list[tuple[int, int]], most: int) -> None:
    shapes = found(pairs, most)
    assert 1 <= len(shapes) <= most
    assert slots(pairs, shapes) == least(pairs, most)
    assert all(a != b and a[0] <= b[0] and a[1] <= b[1] for a, b in pairwise(shapes))


@settings(max_examples=60, deadline=None)
@given(pairs=LENGTHS, padding=st.sampled_from([0.05, 0.2, 0.4]))
def test_shapes_are_the_fewest_that_keep_the_padding(pairs: list[tuple[int, int]], padding: float) -> None:
    real = sum(s + t for s, t in pairs)
    shapes = found(pairs, 3, padding)
    enough = [k for k in (1, 2, 3) if 1 - real / least(pairs, k) <= padding]
    assert len(shapes) <= (min(enough) if enough else 3)
    if enough:
        assert 1 - real / slots(pairs, shapes) <= padding + 1e-12


def test_shapes_save_more_than_their_overhead() -> None:
    pairs = [(1, 1)] * 10 + [(5, 5)] * 10
    assert found(pairs, 5, overhead=79) == [(1, 1), (5, 5)]
    assert found(pairs, 5, overhead=80) == [(5, 5)]  # two shapes save 10 · 8 slots, and that is not more


def test_shapes_of_long_sentences_hold_them_on_a_coarser_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    draws = np.random.default_rng(0)
    pairs = [(int(s), int(t)) for s, t in draws.integers(1, 100, (200, 2))]
    fine = slots(pairs, found(pairs, 6))
    monkeypatch.setattr(length_shapes, "_GRID", 16)
    coarse = found(pairs, 6)
    assert coarse[-1] == (max(s for s, _ in pairs), max(t for _, t in pairs))
    assert fine <= slots(pairs, coarse) <= 1.1 * fine
