"""Batches hold every pair in a few padded shapes, depend on seed, epoch and step alone, and waste the least padding."""

from __future__ import annotations

from collections import Counter
from itertools import combinations_with_replacement, pairwise, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from normfree.data.counter_rng import epoch_order, key
from normfree.data.text import pair_batches
from normfree.data.text.pair_batches import PairBatch, PairBatches, padded_shapes
from normfree.data.text.tokens import TokenPairs
from normfree.nn.attention import END, PAD, START

LENGTHS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 7)), min_size=1, max_size=40)
SHORT_LENGTHS = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4)), min_size=1, max_size=12)


def pairs_of(lengths: list[tuple[int, int]]) -> TokenPairs:
    """Pairs with the given lengths; every token of a pair identifies the pair."""
    return TokenPairs.of(([4 + 2 * i] * s, [5 + 2 * i] * t) for i, (s, t) in enumerate(lengths))


def corpus(count: int, mean: float = 25.0, seed: int = 0) -> TokenPairs:
    """Pairs with log-normal lengths of correlation about 0.9, like sentences and their translations."""
    draws = np.random.default_rng(seed)
    log = draws.normal(np.log(mean), 0.45, count)
    lengths = [np.exp(log + draws.normal(0, 0.12, count)).astype(int).clip(1, 120) for _ in range(2)]
    return pairs_of([(int(s), int(t)) for s, t in zip(*lengths, strict=True)])


def number(source: torch.Tensor, target: torch.Tensor) -> int | None:
    """The index of the pair of `pairs_of` in a row, or None for a row without tokens."""
    if int(source[0]) > END:
        return (int(source[0]) - 4) // 2
    return (int(target[0]) - 5) // 2 if int(target[0]) > END else None


def slow_epoch(pairs: TokenPairs, batches: PairBatches, epoch: int) -> list[list[int]]:
    """The pairs of each batch of an epoch, by lists and loops."""
    waiting: list[list[int]] = [[] for _ in batches.shapes]
    for row in epoch_order(batches.seed, epoch, len(pairs)).tolist():
        s, t = (len(side) + 1 for side in pairs[row])
        first = next(k for k, shape in enumerate(batches.shapes) if s <= shape.source and t <= shape.target)
        waiting[first].append(row)
    made = []
    for shape, rows in zip(batches.shapes, waiting, strict=True):
        times = -(-len(rows) // shape.rows)
        endless = rows * (times * shape.rows // len(rows) + 1)
        made += [endless[time * shape.rows : (time + 1) * shape.rows] for time in range(times)]
    keys = key(batches.seed, 13, epoch, torch.arange(len(made))).tolist()
    return [made[place] for place in sorted(range(len(made)), key=lambda place: keys[place])]


def slow_batch(pairs: TokenPairs, rows: list[int], source: int, target: int) -> tuple[torch.Tensor, ...]:
    sides: list[list[list[int]]] = [[], [], []]
    for row in rows:
        one, other = pairs[row]
        for side, tokens, width in zip(
            sides, ([*one, END], [START, *other], [*other, END]), (source, target, target), strict=True
        ):
            side.append(tokens + [PAD] * (width - len(tokens)))
    return tuple(torch.tensor(side) for side in sides)


def assert_equal(a: PairBatch, b: PairBatch) -> None:
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@settings(max_examples=60, deadline=None)
@given(
    lengths=LENGTHS,
    tokens=st.integers(20, 60),
    shapes=st.integers(1, 5),
    seed=st.integers(0, 3),
    epoch=st.integers(0, 3),
)
def test_batches_equal_those_made_slowly(
    lengths: list[tuple[int, int]], tokens: int, shapes: int, seed: int, epoch: int
) -> None:
    pairs = pairs_of(lengths)
    batches = PairBatches(pairs, tokens=tokens, shapes=shapes, padding=0.0, seed=seed)
    batches.start_epoch(epoch)
    expected = slow_epoch(pairs, batches, epoch)
    assert batches.steps == len(expected)
    for step, rows in enumerate(expected):
        got, shape = batches.batch(step), batches.shapes[batches.shape_of(step)]
        assert got.source.shape == (shape.rows, shape.source)
        assert got.target_in.shape == got.target_out.shape == (shape.rows, shape.target)
        for x, y in zip(got, slow_batch(pairs, rows, shape.source, shape.target), strict=False):
            assert x.dtype == torch.int64
            assert torch.equal(x, y)
        assert int(got.tokens) == sum(len(pairs[row][1]) + 1 for row in rows)
        assert max(got.source.numel(), got.target_out.numel()) <= tokens


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, tokens=st.integers(20, 60), shapes=st.integers(1, 5))
def test_epoch_covers_every_pair_and_repeats_less_than_a_row_a_batch(
    lengths: list[tuple[int, int]], tokens: int, shapes: int
) -> None:
    batches = PairBatches(pairs_of(lengths), tokens=tokens, shapes=shapes, padding=0.0)
    assert len(batches.shapes) <= shapes
    seen = Counter(row for rows in slow_epoch(pairs_of(lengths), batches, 0) for row in rows)
    assert set(seen) == set(range(len(lengths)))
    assert max(seen.values()) <= 2
    assert sum(seen.values()) - len(lengths) < batches.steps


@settings(max_examples=40, deadline=None)
@given(lengths=LENGTHS, world=st.integers(2, 4), epoch=st.integers(0, 2))
def test_ranks_together_make_one_batch(lengths: list[tuple[int, int]], world: int, epoch: int) -> None:
    pairs, tokens = pairs_of(lengths), 60
    ranks = [PairBatches(pairs, tokens=tokens, world=world, rank=rank) for rank in range(world)]
    alone = PairBatches(pairs, tokens=tokens)
    for batches in (alone, *ranks):
        batches.start_epoch(epoch)
    assert len({batches.shapes for batches in ranks}) == 1
    same = ranks[0].shapes == alone.shapes  # unless a shape has fewer rows than there are ranks
    assert same == (min(shape.rows for shape in alone.shapes) >= world)
    for step in range(ranks[0].steps):
        parts = [batches.batch(step) for batches in ranks]
        sizes = [len(part.source) for part in parts]
        assert min(sizes) >= 1
        assert max(sizes) - min(sizes) <= 1
        whole = [torch.cat(sides) for sides in zip(*(part[:3] for part in parts), strict=True)]
        assert max(whole[0].numel(), whole[1].numel()) <= tokens
        assert {int(part.tokens) for part in parts} == {int((whole[2] != PAD).sum())}
        if same:
            assert all(torch.equal(x, y) for x, y in zip(whole, alone.batch(step)[:3], strict=True))


def test_any_step_can_be_made_again() -> None:
    pairs = corpus(300)
    one, other = (PairBatches(pairs, tokens=600, seed=4) for _ in range(2))
    one.start_epoch(2)
    forward = [one.batch(step) for step in range(one.steps)]
    other.start_epoch(7)
    other.batch(3)
    other.start_epoch(2)
    for step in reversed(range(one.steps)):
        assert_equal(other.batch(torch.tensor(step)), forward[step])
        assert_equal(other.gather(other.shape_of(step), torch.tensor(step)), forward[step])


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    pairs = corpus(300)
    orders = set()
    for seed, epoch in ((0, 0), (0, 1), (1, 0), (1, 1)):
        batches = PairBatches(pairs, tokens=600, seed=seed)
        batches.start_epoch(epoch)
        rows = [int(batches.batch(step).source[0, 0]) for step in range(batches.steps)]
        orders.add((tuple(rows), tuple(batches.shape_of(step) for step in range(batches.steps))))
    assert len(orders) == len({rows for rows, _ in orders}) == len({shapes for _, shapes in orders}) == 4


def test_gathering_waits_for_nothing_on_the_host() -> None:
    batches = PairBatches(corpus(200), tokens=600)
    with torch.device("cpu"):
        graph = torch.export.export(_Gather(batches, 0), (torch.tensor(batches._shape_ids.index(0)),))
    step = batches._shape_ids.index(0)  # an export fails where a value is read
    assert torch.equal(graph.module()(torch.tensor(step)), batches.batch(step).source)


class _Gather(torch.nn.Module):
    def __init__(self, batches: PairBatches, shape: int) -> None:
        super().__init__()
        self.batches, self.shape = batches, shape

    def forward(self, step: torch.Tensor) -> torch.Tensor:
        return self.batches.gather(self.shape, step).source


@settings(max_examples=40, deadline=None)
@given(lengths=LENGTHS, world=st.integers(1, 3))
def test_once_counts_every_pair_once(lengths: list[tuple[int, int]], world: int) -> None:
    pairs = pairs_of(lengths)
    seen: Counter[int | None] = Counter()
    ends, tokens = 0, []
    for rank in range(world):
        batches = PairBatches(pairs, tokens=60, rank=rank, world=world)
        made = list(batches.once())
        tokens.append(sum(int(batch.tokens) for batch in made))
        for batch in made:
            assert bool((batch.source != PAD).any(dim=1).all())  # a row of PAD alone would have nothing to attend to
            counted = (batch.target_out != PAD).any(dim=1)
            ends += int((batch.target_out == END).sum())
            for row in counted.nonzero()[:, 0].tolist():
                seen[number(batch.source[row], batch.target_out[row])] += 1
    assert ends == len(lengths)
    assert set(tokens) == {sum(t + 1 for _, t in lengths)}
    assert {row: count for row, count in seen.items() if row is not None} == {
        row: 1 for row, length in enumerate(lengths) if any(length)
    }


def test_padding_is_what_is_measured_and_little() -> None:
    batches = PairBatches(corpus(20000), tokens=4000)
    pad = slots = 0
    for step in range(batches.steps):
        batch = batches.batch(step)
        for side in (batch.source, batch.target_out):
            pad, slots = pad + int((side == PAD).sum()), slots + side.numel()
    assert batches.padding < 0.1
    assert len(batches.shapes) <= 24
    assert pad / slots == pytest.approx(batches.padding, abs=0.001)  # of repeated rows, too
    control = PairBatches(corpus(20000), tokens=4000, shapes=4)
    assert control.padding > 0.2


def test_small_sets_have_few_batches() -> None:
    batches = PairBatches(corpus(60), tokens=4000)
    assert batches.steps == len(batches.shapes) <= 3


def test_batches_refuse_what_does_not_fit() -> None:
    pairs = pairs_of([(3, 5), (9, 2)])
    PairBatches(pairs, tokens=10)
    with pytest.raises(ValueError, match=r"longest sentence of 10 tokens in a batch, got batch_size=9; raise"):
        PairBatches(pairs, tokens=9)
    with pytest.raises(ValueError, match=r"of 10 tokens for each of 2 ranks in a batch, got batch_size=19"):
        PairBatches(pairs, tokens=19, world=2)
    with pytest.raises(ValueError, match="at least one pair"):
        PairBatches(pairs_of([]), tokens=10)
    with pytest.raises(ValueError, match="a rank of 0 to 1 of 2, got 2"):
        PairBatches(pairs, tokens=100, rank=2, world=2)
    with pytest.raises(ValueError, match="at least one shape"):
        PairBatches(pairs, tokens=100, shapes=0)
    with pytest.raises(ValueError, match="a step of 0 to 0, got 1"):
        PairBatches(pairs, tokens=100).batch(1)


def test_every_shape_can_be_read_from_the_place_of_every_batch() -> None:
    """A capture does this: its first batch may be the last in memory, and the rows after it must be pairs, too."""
    batches = PairBatches(corpus(300), tokens=400)
    assert len({shape.rows for shape in batches.shapes}) > 1
    for step in range(batches.steps):
        for shape, (rows, width, _) in enumerate(batches.shapes):
            assert batches.gather(shape, torch.tensor(step)).source.shape == (rows, width)


def slots_of(pairs: list[tuple[int, int]], shapes: list[tuple[int, int]]) -> int:
    """The slots of all pairs, each padded to the first shape that holds it."""
    total = 0
    for s, t in pairs:
        total += next(S + T for S, T in shapes if s <= S and t <= T)
    return total


def least_slots(pairs: list[tuple[int, int]], count: int) -> int:
    """The fewest slots of any nested shapes, by trying all of them."""
    largest = (max(s for s, _ in pairs), max(t for _, t in pairs))
    cells = list(product(range(1, largest[0] + 1), range(1, largest[1] + 1)))
    nested = (
        [*chain, largest]
        for chain in combinations_with_replacement(cells, count - 1)
        if all(a[0] <= b[0] and a[1] <= b[1] for a, b in pairwise(chain))
    )
    return min(slots_of(pairs, chain) for chain in nested)


def shapes_of(
    pairs: list[tuple[int, int]], most: int, padding: float = 0.0, overhead: int = -1
) -> list[tuple[int, int]]:
    source, target = np.array(pairs).T
    return padded_shapes(source, target, most=most, padding=padding, overhead=overhead)


@settings(max_examples=60, deadline=None)
@given(pairs=SHORT_LENGTHS, most=st.integers(1, 3))
def test_shapes_have_the_least_padding_of_all(pairs: list[tuple[int, int]], most: int) -> None:
    shapes = shapes_of(pairs, most)
    assert 1 <= len(shapes) <= most
    assert slots_of(pairs, shapes) == least_slots(pairs, most)
    assert all(a != b and a[0] <= b[0] and a[1] <= b[1] for a, b in pairwise(shapes))


@settings(max_examples=60, deadline=None)
@given(pairs=SHORT_LENGTHS, padding=st.sampled_from([0.05, 0.2, 0.4]))
def test_shapes_are_the_fewest_that_keep_the_padding(pairs: list[tuple[int, int]], padding: float) -> None:
    real = sum(s + t for s, t in pairs)
    shapes = shapes_of(pairs, 3, padding)
    enough = [k for k in (1, 2, 3) if 1 - real / least_slots(pairs, k) <= padding]
    assert len(shapes) <= (min(enough) if enough else 3)
    if enough:
        assert 1 - real / slots_of(pairs, shapes) <= padding + 1e-12


def test_shapes_save_more_than_their_overhead() -> None:
    pairs = [(1, 1)] * 10 + [(5, 5)] * 10
    assert shapes_of(pairs, 5, overhead=79) == [(1, 1), (5, 5)]
    assert shapes_of(pairs, 5, overhead=80) == [(5, 5)]  # two shapes save 10 · 8 slots, and that is not more


def test_shapes_of_long_sentences_hold_them_on_a_coarser_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    draws = np.random.default_rng(0)
    pairs = [(int(s), int(t)) for s, t in draws.integers(1, 100, (200, 2))]
    fine = slots_of(pairs, shapes_of(pairs, 6))
    monkeypatch.setattr(pair_batches, "_GRID", 16)
    coarse = shapes_of(pairs, 6)
    assert coarse[-1] == (max(s for s, _ in pairs), max(t for _, t in pairs))
    assert fine <= slots_of(pairs, coarse) <= 1.1 * fine
