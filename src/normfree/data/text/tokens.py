"""Tokenized text as tensors: sentences, pairs of them, their files, and batches of running text for language models."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

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
