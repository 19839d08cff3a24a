"""Multi-head attention over sequences: self, causal or cross, with a cache of keys and values for decoding."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normfree.nn.scalars import ScalarBias


class KeyValueCache:
    """The keys and values of one attention: room for some positions that fills as a sequence grows, or a memory's.

    Shapes: keys and values are (N, heads, room, width / heads), of which the first `used` positions count.
    """

    def __init__(self, keys: Tensor, values: Tensor, used: int) -> None:
        self.keys = keys
        self.values = values
        self.used = used

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write down the next positions and give back all there are.

        Raises `ValueError` when there is no room, or when another number of sequences is given.
        """
        rows, room = self.keys.shape[0], self.keys.shape[2]
        end = self.used + keys.shape[2]
        if end > room or keys.shape[0] != rows:
            raise ValueError(
                f"expected at most {room - self.used} more positions of {rows} sequences in the cache, got "
                f"{keys.shape[2]} of {keys.shape[0]}; start a cache of more length, or reorder it to the sequences"
            )
        self.keys[:, :, self.used : end] = keys
        self.values[:, :, self.used : end] = values
        self.used = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def reorder(self, index: Tensor) -> None:
        """Let row i hold what row index[i] held; the number of rows may change."""
        if len(index) != len(self.keys):
            self.keys, self.values = self.keys.index_select(0, index), self.values.index_select(0, index)
            return
        for held in (self.keys, self.values):  # only what is used is copied
            held[:, :, : self.used] = held[:, :, : self.used].index_select(0, index)


class Attention(nn.Module):
    """W_o · [softmax(Q Kᵀ / √d + mask) V over heads], Q = W_q x, and K = W_k s, V = W_v s of s = x or a memory.

    `causal` lets position t see positions up to t only. `cross` says that it reads a memory. `scalar_biases` puts a
    learnable number before the output layer, and before the layers that read a memory; the one before the others
    stands at the branch's entry. The key layer has no bias: it would add the same to every logit of a query.

    Reference: Vaswani 2017, section 3.2; fixup, section 3, rule 3 for the scalar biases.

    Shapes: x (N, T, width), memory (N, S, width), mask (N, 1, 1 or T, S), True where a key may be seen → (N, T, width).
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        causal: bool = False,
        cross: bool = False,
        dropout: float = 0.0,
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
        self.q = nn.Linear(width, width)
        self.memory_bias = ScalarBias() if cross and scalar_biases else None
        self.k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, width)
        self.bias = ScalarBias() if scalar_biases else nn.Identity()
        self.out = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(
        self, x: Tensor, memory: Tensor | None = None, mask: Tensor | None = None, cache: KeyValueCache | None = None
    ) -> Tensor:
        """Attend; with a cache, x holds only the new positions of a sequence, and a memory is not read again."""
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
            mask = _seen(query, keys, before, mask)
        attended = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, is_causal=causal)
        out: Tensor = self.dropout(self.out(self.bias(attended.transpose(1, 2).flatten(2))))
        return out

    def remember(self, memory: Tensor) -> KeyValueCache:
        """The keys and values of a memory, computed once for all steps of a decoding."""
        keys, values = self._project(memory.to(self.k.weight.dtype))
        return KeyValueCache(keys, values, keys.shape[2])

    def room(self, rows: int, length: int) -> KeyValueCache:
        """An empty cache for at most `length` positions of `rows` sequences."""
        weight = self.k.weight
        shape = (rows, self.heads, length, weight.shape[0] // self.heads)
        return KeyValueCache(weight.new_zeros(shape), weight.new_zeros(shape), 0)

    def _project(self, source: Tensor) -> tuple[Tensor, Tensor]:
        if self.memory_bias is not None:
            source = self.memory_bias(source)
        return self._split(self.k(source)), self._split(self.v(source))

    def _split(self, x: Tensor) -> Tensor:
        """(N, T, width) → (N, heads, T, width / heads)."""
        return x.view(*x.shape[:-1], self.heads, x.shape[-1] // self.heads).transpose(1, 2)

    def extra_repr(self) -> str:
        """The number of heads, and what it sees."""
        return f"heads={self.heads}, causal={self.causal}, cross={self.cross}"


def _seen(query: Tensor, keys: Tensor, before: int, mask: Tensor | None) -> Tensor | None:
    """The mask of queries that come after `before` positions: keys up to their own, of those that the mask shows."""
    new = query.shape[2]
    if new == 1 and mask is None:
        return None  # the last position sees everything
    own = torch.ones(new, keys.shape[2], dtype=torch.bool, device=query.device).tril(before)
    return own if mask is None else mask & own
