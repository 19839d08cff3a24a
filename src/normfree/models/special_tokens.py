"""Tokens: those that are no words, which positions are real, and what a model of sequences can be asked for."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from normfree.methods import Batch

PAD, UNKNOWN, START, END = range(4)
"""The tokens that are no words: what fills a batch up, what is not known, and the two ends of a sentence."""
SPECIAL = 4
VOCABULARY = 1000
"""The number of tokens of a model that was given none."""
DROPOUT = 0.1


def real_positions(tokens: Tensor) -> Tensor:
    """Which positions hold a token, (N, T); of a sequence of nothing but padding all count, so that a mean exists.

    >>> real_positions(torch.tensor([[7, PAD], [PAD, PAD]]))
    tensor([[ True, False],
            [ True,  True]])
    """
    real = tokens != PAD
    return real | ~real.any(1, keepdim=True)


def random_words(
    inputs: int, size: tuple[int, int], generator: torch.Generator, vocabulary: int = VOCABULARY
) -> Tensor | tuple[Tensor, ...]:
    """As many sequences (N, T) of random words as a model reads, one of them alone."""
    drawn = tuple(torch.randint(SPECIAL, vocabulary, size, generator=generator) for _ in range(inputs))
    return drawn[0] if inputs == 1 else drawn


class Reads(NamedTuple):
    """How many sequences of tokens a model reads, 0 where it reads none, and whether it predicts tokens."""

    inputs: int
    predicts: bool

    def settings(
        self, name: str, classes: int, vocabulary: int | None, dropout: float | None, example: Batch | None
    ) -> tuple[int, float]:
        """The number of tokens and the dropout of a model; 0 and 0 of one that reads none, which has neither.

        Raises `ValueError` for numbers that cannot be, and for an example that is no batch of such tokens.
        """
        if not self.inputs:
            if vocabulary is not None or dropout is not None:
                raise ValueError(
                    f"model '{name}' reads no tokens, so that it has no vocabulary or dropout; leave them out"
                )
            return 0, 0.0
        if vocabulary is None:
            vocabulary = classes if self.predicts else VOCABULARY
        dropout = DROPOUT if dropout is None else dropout
        fewest = min(vocabulary, classes) if self.predicts else vocabulary
        if fewest <= SPECIAL:
            raise ValueError(
                f"model '{name}' expects a vocabulary of more than its {SPECIAL} special tokens, got {fewest}"
            )
        if self.predicts and self.inputs == 1 and vocabulary != classes:
            raise ValueError(
                f"model '{name}' predicts the tokens that it reads: expected one vocabulary, got {vocabulary} and "
                f"num_classes {classes}; leave vocabulary out"
            )
        if not 0 <= dropout < 1:
            raise ValueError(f"expected a dropout in [0, 1), got {dropout:g}; 0 turns it off")
        if example is not None:
            self._check(name, (vocabulary, classes), (example,) if isinstance(example, Tensor) else example)
        return vocabulary, dropout

    def _check(self, name: str, limits: tuple[int, int], given: tuple[Tensor, ...]) -> None:
        whole = all(t.dim() == 2 and t.dtype == torch.int64 for t in given)
        if len(given) != self.inputs or not whole:
            raise ValueError(
                f"model '{name}' expects an example of {self.inputs} int64 tensor{'s' * (self.inputs > 1)} (N, T), got "
                f"{', '.join(f'{t.dtype} {tuple(t.shape)}' for t in given)}"
            )
        for tokens, limit in zip(given, limits, strict=False):
            if tokens.numel() and not (tokens.is_meta or 0 <= int(tokens.min()) <= int(tokens.max()) < limit):
                raise ValueError(
                    f"model '{name}' expects tokens from 0 to {limit - 1}, got {int(tokens.min())} to "
                    f"{int(tokens.max())}; give it a larger vocabulary"
                )
