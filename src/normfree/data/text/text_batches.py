"""Batches of running text for language models: blocks of equal length, a pure function of seed, epoch and step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from normfree.data.counter_rng import epoch_order
from normfree.data.images.image_set import check_ranks
from normfree.data.text.tokens import TokenLines
from normfree.nn.attention import PAD, START


class TextBatch(NamedTuple):
    """The batch of a step of a language model; position t of `target_in` predicts position t of `target_out`.

    Attributes:
        target_in: int64 (N, T).
        target_out: int64 (N, T).
        tokens: the number of real tokens of `target_out` over all ranks, a scalar.
    """

    target_in: Tensor
    target_out: Tensor
    tokens: Tensor


class TextBatches:
    """The training batches of a text: all lines in one row, with END after each, cut into blocks of equal length.

    Block i predicts tokens i·T … (i+1)·T - 1 of the row, each from the token before it, which is START for the first.
    PAD fills the last block. An epoch visits the blocks in an order of its own, and its last batch continues at the
    start of that order, so every token is predicted at least once.

    Args:
        lines: the tokenized text.
        block: the number of tokens T of a block.
        batch_size: the number of blocks per batch over all ranks; capped at the number of blocks in the text.
        seed: the seed of the order.
        device: where the text lies and the batches are made.
        rank: the rank of this process.
        world: the number of processes.

    Attributes:
        blocks: the number of blocks.
        steps: the number of batches of an epoch.

    Raises:
        ValueError: for no text, a block without tokens, or a batch size that the ranks cannot share evenly.
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
        """Write the order of an epoch into the tensor that `batch`, captured or not, reads."""
        device = self._order.device
        order = epoch_order(self.seed, epoch, self.blocks, device)
        self._order.copy_(order[torch.arange(len(self._order), device=device) % self.blocks])

    def batch(self, step: Tensor) -> TextBatch:
        """This rank's part of the batch of a step of the epoch.

        It never waits for the host, so it compiles and a CUDA graph can capture it.

        Args:
            step: an int64 scalar on the device, below `steps`.
        """
        first = step * self.batch_size
        return self._make(self._order[first + self._own], self._order[first + self._everyone])

    def once(self) -> Iterator[TextBatch]:
        """Every block once, in order, for a loss over the whole text.

        The blocks that fill the last batch have PAD as their target, and `tokens` does not count them.
        """
        for first in range(0, self.blocks, self.batch_size):
            own, everyone = first + self._own, first + self._everyone
            batch = self._make(own % self.blocks, everyone[everyone < self.blocks])
            yield batch._replace(target_out=batch.target_out.masked_fill((own >= self.blocks)[:, None], PAD))

    def _make(self, own: Tensor, counted: Tensor) -> TextBatch:
        real = (self._read(counted, 1) != PAD).sum()
        return TextBatch(self._read(own, 0), self._read(own, 1), real)

    def _read(self, blocks: Tensor, shift: int) -> Tensor:
        places = blocks[:, None] * self.block + torch.arange(self.block, device=blocks.device)
        return self._row[places + shift].to(torch.int64)
