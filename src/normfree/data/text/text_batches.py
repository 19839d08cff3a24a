"""Batches of running text for a language model: blocks of one length, a pure function of seed, epoch and step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from normfree.data.draws import order
from normfree.data.images.image_batches import check_ranks
from normfree.data.text.token_pairs import TokenLines
from normfree.models.special_tokens import PAD, START


class TextBatch(NamedTuple):
    """What a step of a language model takes: both (N, T) int64; position t of the first predicts that of the second.

    `tokens`, without dimensions, is the number of real tokens of `target_out` over all ranks.
    """

    target_in: Tensor
    target_out: Tensor
    tokens: Tensor


class TextBatches:
    """The training batches of a text: the lines, each ended by END, in one row, cut into blocks of `block` tokens.

    Block i predicts tokens i·T … (i+1)·T - 1 of the row from the one before each, which is START for the first; PAD
    fills the last block. `batch_size` counts the blocks of all ranks together, no more than there are. An epoch visits
    the blocks in an order of its own, and its last batch goes on at the start of that order, so every token is
    predicted at least once.

    Raises `ValueError` for no text, a block without tokens, or a batch that the ranks cannot share evenly.
    """

    capturable = True

    def __init__(
        self,
        lines: TokenLines,
        *,
        block: int,
        batch_size: int,
        seed: int = 0,
        device: torch.device | str = "cpu",
        rank: int = 0,
        world: int = 1,
    ) -> None:
        check_ranks(batch_size, rank, world)
        if len(lines) == 0 or block < 1:
            raise ValueError(f"expected lines of text and blocks of a token or more, got {len(lines)} and {block}")
        self.block, self.seed, self.rank, self.world = block, seed, rank, world
        row = lines.stream()
        self.blocks = -(-len(row) // block)
        self.batch_size = batch_size = min(batch_size, -(-self.blocks // world) * world)
        self.steps = -(-self.blocks // batch_size)
        start, fill = row.new_full((1,), START), row.new_full((self.blocks * block - len(row),), PAD)
        self._row = torch.cat([start, row, fill]).to(device)
        own = batch_size // world
        self._everyone = torch.arange(batch_size, device=device)
        self._own = self._everyone[rank * own : (rank + 1) * own]
        self._order = torch.zeros(self.steps * batch_size, dtype=torch.int64, device=device)
        self.start_epoch(0)

    def start_epoch(self, epoch: int) -> None:
        """Write the order of an epoch where `batch`, captured or not, reads it."""
        device = self._order.device
        visits = order(self.seed, epoch, self.blocks, device)
        self._order.copy_(visits[torch.arange(len(self._order), device=device) % self.blocks])

    def batch(self, step: Tensor) -> TextBatch:
        """This rank's part of the batch of a step; `step` is an int64 without dimensions on the device, below `steps`.

        Waits for nothing on the host, so it compiles and can be captured in a CUDA graph.
        """
        first = step * self.batch_size
        return self._made(self._order[first + self._own], self._order[first + self._everyone])

    def once(self) -> Iterator[TextBatch]:
        """Every block once, in order, for a loss over the whole text.

        What fills the last batch has PAD for its target, and is not counted in `tokens`.
        """
        for first in range(0, self.blocks, self.batch_size):
            own, everyone = first + self._own, first + self._everyone
            batch = self._made(own % self.blocks, everyone[everyone < self.blocks])
            yield batch._replace(target_out=batch.target_out.masked_fill((own >= self.blocks)[:, None], PAD))

    def _made(self, own: Tensor, counted: Tensor) -> TextBatch:
        real = (self._read(counted, 1) != PAD).sum()
        return TextBatch(self._read(own, 0), self._read(own, 1), real)

    def _read(self, blocks: Tensor, shift: int) -> Tensor:
        places = blocks[:, None] * self.block + torch.arange(self.block, device=blocks.device)
        return self._row[places + shift].to(torch.int64)
