"""Token embeddings with sinusoidal position encodings, and the special tokens of sequence models."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

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


class TokenEmbedding(nn.Embedding):
    """√width · E[token] + p(position), with E drawn from N(0, 1/width), so that a token's vector has unit variance.

    The sinusoids p are computed at every call, so any length works, and the state dict does not contain them.

    Reference: Vaswani 2017, sections 3.4 and 3.5.

    Shapes: tokens (N, T) → (N, T, width).
    """

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__(tokens, width)
        self.embed_scale = math.sqrt(width)

    def forward(self, input: Tensor, start: int = 0) -> Tensor:
        """Return the vectors of tokens whose first position is `start`."""
        vectors = super().forward(input) * self.embed_scale
        return vectors + sinusoids(start, input.shape[1], self.embedding_dim, vectors)


def sinusoids(start: int, length: int, width: int, like: Tensor) -> Tensor:
    """Return sin(t·ω_i) in the first half of the channels and cos(t·ω_i) in the second, ω_i from 1 to 1/10000.

    Reference: Vaswani 2017, section 3.5.
    Differs: the paper interleaves the two halves.

    >>> sinusoids(0, 2, 4, torch.zeros(1))[0]
    tensor([0., 0., 1., 1.])
    """
    half = (width + 1) // 2
    times = torch.arange(start, start + length, device=like.device, dtype=torch.float32)
    steps = torch.arange(half, device=like.device, dtype=torch.float32)
    angles = times.unsqueeze(1) * torch.exp(steps * (-math.log(1e4) / max(half - 1, 1)))
    return torch.cat([angles.sin(), angles.cos()], 1)[:, :width].to(like.dtype)
