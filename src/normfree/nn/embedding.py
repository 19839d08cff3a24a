"""Token embeddings with sinusoidal position encodings."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


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
