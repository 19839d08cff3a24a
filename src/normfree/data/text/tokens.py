"""Tokenized text as tensors: sentences, pairs of them, their files, and batches of running text for language models."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from normfree.data.counter_rng import epoch_order
from normfree.data.images.image_set import check_ranks
from normfree.nn.attention import END, PAD, START


@dataclass(frozen=True, eq=False)  # compared by identity: the equality of tensors is not one truth value
class TokenLines:
    """Tokenized sentences in one row: sentence i is ids[offsets[i] : offsets[i+1]], without START and END.

    Args:
        ids: int32 (M,).
        offsets: int64 (n + 1,).

    Raises:
        ValueError: if a type is wrong, the offsets do not rise from 0 to M, or an id is PAD, START or END, which the
            batches add.
    """

    ids: Tensor
    offsets: Tensor

    def __post_init__(self) -> None:
        ids, offsets = self.ids, self.offsets
        if ids.ndim != 1 or ids.dtype != torch.int32 or offsets.ndim != 1 or offsets.dtype != torch.int64:
            raise ValueError(
                f"expected ids as int32 and offsets as int64 in one dimension, got {ids.dtype} of shape "
                f"{tuple(ids.shape)} and {offsets.dtype} of shape {tuple(offsets.shape)}; use TokenLines.of"
            )
        if len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != len(ids) or bool((offsets.diff() < 0).any()):
            raise ValueError(
                f"expected offsets that rise from 0 to {len(ids)}, got offsets that do not; use TokenLines.of"
            )
        if bool(((ids <= PAD) | (ids == START) | (ids == END)).any()):
            raise ValueError(
                "expected ids of subwords, got PAD, START, END or a negative id; the batches add the special ones"
            )

    @classmethod
    def of(cls, lines: Iterable[Sequence[int]]) -> TokenLines:
        """Make the row from one list of ids per sentence."""
        arrays = [np.asarray(line, dtype=np.int64) for line in lines]
        ids = np.concatenate([np.empty(0, dtype=np.int64), *arrays])
        if len(ids) and ids.max() >= 1 << 31:
            raise ValueError(f"expected ids below 2^31, got {ids.max()}; the ids may belong to a different vocabulary")
        offsets = np.cumsum([0, *map(len, arrays)], dtype=np.int64)
        return cls(torch.from_numpy(ids.astype(np.int32)), torch.from_numpy(offsets))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> list[int]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        first, last = self.offsets[index : index + 2].tolist()
        return [int(number) for number in self.ids[first:last].tolist()]

    @property
    def lengths(self) -> Tensor:
        """The number of ids of each sentence, (n,) int64."""
        return self.offsets.diff()

    def stream(self) -> Tensor:
        """All sentences in one row with END after each, int32 (M + n,), for a language model."""
        count = len(self)
        row = torch.full((len(self.ids) + count,), END, dtype=torch.int32)
        sentence = torch.repeat_interleave(torch.arange(count), self.lengths)
        row[torch.arange(len(self.ids)) + sentence] = self.ids
        return row


@dataclass(frozen=True, eq=False)
class TokenPairs:
    """Tokenized sentences and their translations.

    Raises:
        ValueError: if the two sides have different numbers of sentences.
    """

    source: TokenLines
    target: TokenLines

    def __post_init__(self) -> None:
        if len(self.source) != len(self.target):
            raise ValueError(
                f"expected a translation for each of {len(self.source)} sentences, got {len(self.target)}; give as "
                "many of both"
            )

    @classmethod
    def of(cls, pairs: Iterable[tuple[Sequence[int], Sequence[int]]]) -> TokenPairs:
        """Make both sides from pairs of lists of ids, without START and END."""
        every = list(pairs)
        return cls(TokenLines.of(source for source, _ in every), TokenLines.of(target for _, target in every))

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[list[int], list[int]]:
        return self.source[index], self.target[index]


def pack_lines(sides: dict[str, TokenLines]) -> bytes:
    """The content of a safetensors file with the ids and offsets of each side, by name."""
    tensors = {}
    for name, lines in sides.items():
        tensors[name], tensors[f"{name}_offsets"] = lines.ids.contiguous(), lines.offsets.contiguous()
    return save(tensors)


def unpack_lines(content: bytes, names: Sequence[str], where: str) -> list[TokenLines]:
    """Read the named sides from the content of a file that `pack_lines` made.

    Raises:
        ValueError: if the content is something else; `where` is the file's name in the error.
    """
    try:
        tensors = load(content)
        return [TokenLines(tensors[name], tensors[f"{name}_offsets"]) for name in names]
    except (SafetensorError, KeyError, ValueError) as error:
        raise ValueError(
            f"expected tokens of {' and '.join(names)} in '{where}', got something else: {error}; prepare the data "
            "again"
        ) from error


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
