"""Special tokens of the sequence models: padding, unknown word, start and end."""

from __future__ import annotations

import torch
from torch import Tensor

PAD, UNKNOWN, START, END = range(4)
"""Padding, unknown word, start and end of a sentence; words are numbered from `SPECIAL` on."""
SPECIAL = 4
VOCABULARY = 1000
"""The default number of tokens of a model."""


def real_positions(tokens: Tensor) -> Tensor:
    """Return a mask (N, T) of the positions that are not padding.

    It is all True for an all-padding row, so its mean is defined.

    >>> real_positions(torch.tensor([[7, PAD], [PAD, PAD]]))
    tensor([[ True, False],
            [ True,  True]])
    """
    real = tokens != PAD
    return real | ~real.any(1, keepdim=True)


def random_words(
    inputs: int, size: tuple[int, int], generator: torch.Generator, vocabulary: int = VOCABULARY
) -> Tensor | tuple[Tensor, ...]:
    """Draw batches (N, T) of random words: one tensor for one input, a tuple for several."""
    drawn = tuple(torch.randint(SPECIAL, vocabulary, size, generator=generator) for _ in range(inputs))
    return drawn[0] if inputs == 1 else drawn
