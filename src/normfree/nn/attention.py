"""Parts of sequence models: special tokens, token embeddings with positions, and multi-head attention with a cache."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normfree.nn.scalars import ScalarBias

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


class KeyValueCache:
    """The keys and values of one attention, of a growing sequence or of a memory.

    Shapes: keys and values are (N, heads, length, width / heads); the first `used` positions are filled.
    """

    def __init__(self, keys: Tensor, values: Tensor, used: int) -> None:
        self.keys = keys
        self.values = values
        self.used = used

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add the next positions and return the keys and values of all positions so far.

        Raises:
            ValueError: If the cache is too short, or if the number of sequences differs.
        """
        rows, length = self.keys.shape[0], self.keys.shape[2]
        end = self.used + keys.shape[2]
        if end > length or keys.shape[0] != rows:
            raise ValueError(
                f"expected at most {length - self.used} more positions of {rows} sequences in the cache, got "
                f"{keys.shape[2]} of {keys.shape[0]}; start a longer cache, or reorder it to the sequences"
            )
        self.keys[:, :, self.used : end] = keys
        self.values[:, :, self.used : end] = values
        self.used = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def reorder(self, index: Tensor) -> None:
        """Move row index[i] to row i, for all i; the number of rows may change."""
        if len(index) != len(self.keys):
            self.keys, self.values = self.keys.index_select(0, index), self.values.index_select(0, index)
            return
        for stored in (self.keys, self.values):  # copies only the positions in use
            stored[:, :, : self.used] = stored[:, :, : self.used].index_select(0, index)


class Attention(nn.Module):
    """W_o · [softmax(Q Kᵀ / √d + mask) V over heads], Q = W_q x, K = W_k s, V = W_v s, with s = x or a memory.

    The key layer has no bias: it would add the same to every logit of a query.

    Reference: Vaswani 2017, section 3.2; fixup, section 3, rule 3 for the scalar biases.

    Shapes: x (N, T, width), memory (N, S, width), mask (N, 1, 1 or T, S), True where a key is visible → (N, T, width).

    Args:
        width: The number of features.
        heads: The number of heads; it divides the width.
        causal: Whether position t attends to positions up to t only.
        cross: Whether keys and values come from a memory.
        dropout: The dropout probability of the output.
        bias: Whether query, value and output have bias vectors.
        scalar_biases: Whether a learnable scalar precedes the output layer and the layers that read a memory. The bias
            before the query (and, in self-attention, key and value) is at the branch's entry.

    Raises:
        ValueError: If the heads do not divide the width, or if the attention is both causal and cross.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        causal: bool = False,
        cross: bool = False,
        dropout: float = 0.0,
        bias: bool = True,
        scalar_biases: bool = False,
    ) -> None:
        super().__init__()
        if heads < 1 or width % heads:
            raise ValueError(f"expected a width that the heads divide, got {width} and {heads}; use a multiple")
        if causal and cross:
            raise ValueError("expected causal or cross attention, got both; a memory has no future to hide")
        self.heads = heads
        self.causal = causal
        self.cross = cross
        self.q = nn.Linear(width, width, bias=bias)
        self.memory_bias = ScalarBias() if cross and scalar_biases else None
        self.k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, width, bias=bias)
        self.bias = ScalarBias() if scalar_biases else nn.Identity()
        self.out = nn.Linear(width, width, bias=bias)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(
        self, x: Tensor, memory: Tensor | None = None, mask: Tensor | None = None, cache: KeyValueCache | None = None
    ) -> Tensor:
        """Return the attention's output; with a cache, pass the new positions only, and no memory."""
        query = self._split(self.q(x))
        before = 0
        if self.cross and cache is not None:
            keys, values = cache.keys, cache.values
        else:
            keys, values = self._project(x if memory is None else memory)
            if cache is not None:
                before = cache.used
                keys, values = cache.append(keys, values)
        causal = self.causal and mask is None and before == 0
        if self.causal and not causal:
            mask = _causal_mask(query, keys, before, mask)
        attended = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, is_causal=causal)
        out: Tensor = self.dropout(self.out(self.bias(attended.transpose(1, 2).flatten(2))))
        return out

    def memory_cache(self, memory: Tensor) -> KeyValueCache:
        """Return the keys and values of a memory, computed once for all decoding steps."""
        keys, values = self._project(memory.to(self.k.weight.dtype))
        return KeyValueCache(keys, values, keys.shape[2])

    def empty_cache(self, rows: int, length: int) -> KeyValueCache:
        """Return an empty cache for `rows` sequences of at most `length` positions."""
        weight = self.k.weight
        shape = (rows, self.heads, length, weight.shape[0] // self.heads)
        return KeyValueCache(weight.new_zeros(shape), weight.new_zeros(shape), 0)

    def _project(self, source: Tensor) -> tuple[Tensor, Tensor]:
        if self.memory_bias is not None:
            source = self.memory_bias(source)
        return self._split(self.k(source)), self._split(self.v(source))

    def _split(self, x: Tensor) -> Tensor:
        """Reshape (N, T, width) to (N, heads, T, width / heads)."""
        return x.view(*x.shape[:-1], self.heads, x.shape[-1] // self.heads).transpose(1, 2)

    def extra_repr(self) -> str:
        """Return the number of heads and the kind of attention."""
        return f"heads={self.heads}, causal={self.causal}, cross={self.cross}"


def _causal_mask(query: Tensor, keys: Tensor, before: int, mask: Tensor | None) -> Tensor | None:
    """Combine `mask` with a causal mask for queries that start at position `before`."""
    new = query.shape[2]
    if new == 1 and mask is None:
        return None  # the last position attends to all
    own = torch.ones(new, keys.shape[2], dtype=torch.bool, device=query.device).tril(before)
    return own if mask is None else mask & own
