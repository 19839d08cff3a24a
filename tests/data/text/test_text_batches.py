"""Batches of running text equal those made slowly, and predict every token once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from normfree.data.counter_rng import epoch_order
from normfree.data.text.text_batches import TextBatches
from normfree.data.text.tokens import TokenLines
from normfree.nn.attention import END, PAD, START

LENGTHS = st.lists(st.integers(0, 6), min_size=1, max_size=12)


def lines_of(lengths: list[int]) -> list[list[int]]:
    """Lines of tokens that are all different."""
    counter = iter(range(4, 1000))
    return [[next(counter) for _ in range(length)] for length in lengths]


@settings(max_examples=60, deadline=None)
@given(
    lengths=LENGTHS, block=st.integers(1, 7), own=st.integers(1, 3), world=st.integers(1, 2), epoch=st.integers(0, 2)
)
def test_batches_equal_those_made_slowly(lengths: list[int], block: int, own: int, world: int, epoch: int) -> None:
    lines = lines_of(lengths)
    text = [token for line in lines for token in [*line, END]]
    blocks = []
    for first in range(0, len(text), block):
        after = text[first : first + block]
        before = [START, *text][first : first + len(after) + (len(after) < block)]
        padded = [side + [PAD] * (block - len(side)) for side in (before, after)]
        blocks.append((padded[0], padded[1]))
    visits = epoch_order(3, epoch, len(blocks)).tolist()
    settings_ = {"block": block, "batch_size": own * world, "seed": 3, "world": world}
    own = min(own, -(-len(blocks) // world))  # a text that is shorter than a batch does not fill it by repeats
    size = own * world
    ranks = [TextBatches(TokenLines.of(lines), rank=rank, **settings_) for rank in range(world)]
    for rank, batches in enumerate(ranks):
        batches.start_epoch(epoch)
        assert batches.steps == -(-len(blocks) // size)
        for step in range(batches.steps):
            everyone = [blocks[visits[(step * size + i) % len(blocks)]] for i in range(size)]
            mine = everyone[rank * own : (rank + 1) * own]
            got = batches.batch(torch.tensor(step))
            assert got.target_out.tolist() == [after for _, after in mine]
            for row, (before, after) in zip(got.target_in.tolist(), mine, strict=True):
                real = sum(token != PAD for token in after)
                assert row[:real] == before[:real]
            assert int(got.tokens) == sum(token != PAD for _, after in everyone for token in after)


@settings(max_examples=40, deadline=None)
@given(lengths=LENGTHS, block=st.integers(1, 7), own=st.integers(1, 3), world=st.integers(1, 2))
def test_once_predicts_the_text_once(lengths: list[int], block: int, own: int, world: int) -> None:
    lines = lines_of(lengths)
    text = [token for line in lines for token in [*line, END]]
    parts = [
        list(TextBatches(TokenLines.of(lines), block=block, batch_size=own * world, rank=rank, world=world).once())
        for rank in range(world)
    ]
    seen = [
        token
        for batches in zip(*parts, strict=True)
        for batch in batches
        for token in batch.target_out.flatten().tolist()
        if token != PAD
    ]
    assert seen == text
    assert {sum(int(batch.tokens) for batch in part) for part in parts} == {len(text)}


def test_text_batches_refuse_what_makes_none() -> None:
    lines = TokenLines.of([[5, 6]])
    with pytest.raises(ValueError, match="expected lines of text"):
        TextBatches(TokenLines.of([]), block=4, batch_size=2)
    with pytest.raises(ValueError, match="blocks of a token"):
        TextBatches(lines, block=0, batch_size=2)
    with pytest.raises(ValueError, match="3 ranks share evenly"):
        TextBatches(lines, block=4, batch_size=4, world=3)
