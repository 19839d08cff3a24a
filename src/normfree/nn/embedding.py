"""Tokens become vectors: a learnable row a token, and sinusoids that tell the positions."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class TokenEmbedding(nn.Embedding):
    """√width · E[token] + p(position), with E drawn from N(0, 1/width), so that a token has unit variance.

    The sinusoids are computed, not stored: any length works, and nothing of them is part of a state dict.

    Reference: Vaswani 2017, sections 3.4 and 3.5.

    Shapes: tokens (N, T) → (N, T, width).
    """

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__(tokens, width)
        self.embed_scale = math.sqrt(width)

    def forward(self, input: Tensor, start: int = 0) -> Tensor:
        """Look the tokens up; the first of them stands at position `start`."""
        found = super().forward(input) * self.embed_scale
        return found + sinusoids(start, input.shape[1], self.embedding_dim, found)


def sinusoids(start: int, length: int, width: int, like: Tensor) -> Tensor:
    """sin(t·ω_i) in the first half of the channels, cos(t·ω_i) in the second, ω_i from 1 to 1/10000.

    Reference: Vaswani 2017, section 3.5 (who interleaves the two halves).

    >>> sinusoids(0, 2, 4, torch.zeros(1))[0]
    tensor([0., 0., 1., 1.])
    """
    half = (width + 1) // 2
    places = torch.arange(start, start + length, device=like.device, dtype=torch.float32)
    steps = torch.arange(half, device=like.device, dtype=torch.float32)
    angles = places.unsqueeze(1) * torch.exp(steps * (-math.log(1e4) / max(half - 1, 1)))
    return torch.cat([angles.sin(), angles.cos()], 1)[:, :width].to(like.dtype)
