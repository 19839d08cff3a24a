"""Tokenized sentences survive being joined into one row, and packed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from normfree.data.text.tokens import TokenLines, TokenPairs, pack_lines, unpack_lines
from normfree.nn.attention import END

TOKENS = st.lists(st.sampled_from([1, 4, 5, 9000, 2**31 - 1]), max_size=6)
LINES = st.lists(TOKENS, max_size=8)
SIDES = ("source", "target")


def packed(pairs: list[tuple[list[int], list[int]]]) -> bytes:
    """The content of a file of pairs."""
    made = TokenPairs.of(pairs)
    return pack_lines({"source": made.source, "target": made.target})


@settings(max_examples=60, deadline=None)
@given(lines=LINES)
def test_lines_come_back_as_they_were(lines: list[list[int]]) -> None:
    made = TokenLines.of(lines)
    assert [made[i] for i in range(len(made))] == lines == list(made)
    assert made.lengths.tolist() == [len(line) for line in lines]
    assert made.stream().tolist() == [token for line in lines for token in [*line, END]]


@settings(max_examples=30, deadline=None)
@given(pairs=st.lists(st.tuples(TOKENS, TOKENS), max_size=6))
def test_pairs_survive_packing(pairs: list[tuple[list[int], list[int]]]) -> None:
    read = TokenPairs(*unpack_lines(packed(pairs), SIDES, "a.safetensors"))
    assert [read[i] for i in range(len(read))] == pairs


@pytest.mark.parametrize("special", [-1, 0, 2, 3])
def test_lines_with_special_tokens_are_refused(special: int) -> None:
    with pytest.raises(ValueError, match="PAD, START, END"):
        TokenLines.of([[5, special]])


def test_lines_that_do_not_fit_are_refused() -> None:
    ids, offsets = torch.tensor([5, 6], dtype=torch.int32), torch.tensor([0, 1, 2])
    TokenLines(ids, offsets)
    for wrong in ([0, 1], [1, 2], [0, 2, 1, 2], []):
        with pytest.raises(ValueError, match="rise from 0 to 2"):
            TokenLines(ids, torch.tensor(wrong, dtype=torch.int64))
    with pytest.raises(ValueError, match="int32"):
        TokenLines(ids.long(), offsets)
    with pytest.raises(ValueError, match="below 2\\^31"):
        TokenLines.of([[2**31]])
    with pytest.raises(ValueError, match="each of 1 sentences, got 2"):
        TokenPairs(TokenLines.of([[5]]), TokenLines.of([[5], [6]]))


def test_something_else_is_refused_by_name() -> None:
    content = packed([([5, 6], [7])])
    for wrong in (b"", b"text", content[:-1], content[: len(content) // 2]):
        with pytest.raises(ValueError, match=r"source and target in 'a\.safetensors', got something else"):
            unpack_lines(wrong, SIDES, "a.safetensors")
