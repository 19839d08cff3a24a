"""Encoder and decoder layers of a Transformer, their builder, and the cache for decoding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn

from normfree.models.base import BlockBuilder, NamedModules, named_sequential
from normfree.nn.attention import Attention, KeyValueCache
from normfree.nn.residual import Residual
from normfree.nn.scalars import ScalarMultiplier
from normfree.plan import Position


class Memory(NamedTuple):
    """An encoder's output: states (N, S, width), and a mask (N, S) that is True where a token is no padding."""

    states: Tensor
    real: Tensor


class DecoderCache:
    """Keys and values of every decoder layer: those of the target, which grow, and those of the memory."""

    def __init__(self, own: list[KeyValueCache], memory: list[KeyValueCache], mask: Tensor | None) -> None:
        self.own = own
        self.memory = memory
        self.mask = mask

    @property
    def used(self) -> int:
        """The number of positions so far."""
        return self.own[0].used

    def layer(self, index: int) -> tuple[KeyValueCache, KeyValueCache | None]:
        """Return the caches of one decoder layer: its own and that of the memory."""
        return self.own[index], self.memory[index] if self.memory else None

    def reorder(self, index: Tensor, *, memory: bool = True) -> DecoderCache:
        """Let row i continue the sequence of row index[i], in place; the number of rows may change.

        Args:
            index: For each new row, the number of the old one.
            memory: Whether to reorder the memory, too. Pass False if every row keeps its source, as in beam search; it
                is faster.

        Returns:
            The cache.
        """
        for cache in (*self.own, *(self.memory if memory else ())):
            cache.reorder(index)
        if memory and self.mask is not None:
            self.mask = self.mask.index_select(0, index)
        return self


class EncoderLayer(nn.Module):
    """Attention, then feed-forward."""

    def __init__(self, attention: Residual, feedforward: Residual) -> None:
        super().__init__()
        self.attention = attention
        self.feedforward = feedforward

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Map (N, T, width) to the same shape."""
        return self.feedforward(self.attention(x, None, mask))  # type: ignore[no-any-return]


class DecoderLayer(nn.Module):
    """Causal attention, attention over a memory if the model has one, then feed-forward."""

    def __init__(self, attention: Residual, cross: Residual | None, feedforward: Residual) -> None:
        super().__init__()
        self.attention = attention
        self.cross = cross
        self.feedforward = feedforward

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        mask: Tensor | None = None,
        own: KeyValueCache | None = None,
        remembered: KeyValueCache | None = None,
    ) -> Tensor:
        """Map (N, T, width) to the same shape; `mask` is True at the memory's positions that are no padding."""
        x = self.attention(x, None, None, own)
        if self.cross is not None:
            x = self.cross(x, memory, mask, remembered)
        return self.feedforward(x)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class LayerBuilder:
    """Makes the layers of a Transformer one after the other, each at the next position."""

    width: int
    inner: int
    heads: int
    blocks: BlockBuilder
    dropout: float
    inner_dropout: float
    positions: Iterator[Position]

    def encoder_layer(self) -> EncoderLayer:
        """Return the next layer of an encoder."""
        return EncoderLayer(self._attention(), self._feedforward())

    def decoder_layer(self, *, cross: bool) -> DecoderLayer:
        """Return the next layer of a decoder."""
        attention = self._attention(causal=True)
        return DecoderLayer(attention, self._attention(cross=True) if cross else None, self._feedforward())

    def head(self, *, bias: bool = True) -> nn.Sequential:
        """Return the modules after the last sum: a normalizer in the pre form, and a scalar bias."""
        norm = self.blocks.norm(self.width) if self.blocks.form == "pre" else []
        return named_sequential([*norm, *(self.blocks.bias() if bias else [])])

    def encoder_head(self) -> nn.Sequential:
        """Return the modules between encoder and decoder: a normalizer in the pre form, or Fixup's two scalars."""
        if self._vectors:
            return self.head(bias=False)
        scale: NamedModules = [("scale", ScalarMultiplier())] if self.blocks.method.rule.beta.learnable else []
        return named_sequential([*self.head().named_children(), *scale])

    @property
    def _vectors(self) -> bool:
        """Whether linear layers have bias vectors."""
        return self.blocks.method.transformer_biases != "scalars"

    def _attention(self, *, causal: bool = False, cross: bool = False) -> Residual:
        return self._sum(
            Attention(
                self.width,
                self.heads,
                causal=causal,
                cross=cross,
                dropout=self.dropout,
                bias=self._vectors,
                scalar_biases=self._vectors and self.blocks.method.scalar_biases,
            )
        )

    def _feedforward(self) -> Residual:
        """Return two linear layers with an activation between them.

        If the first layer has a bias vector, it replaces the scalar bias before the activation.
        """
        first = nn.Linear(self.width, self.inner, bias=self._vectors)
        second = nn.Linear(self.inner, self.width, bias=self._vectors)
        activation = self.blocks.activation()[-1:] if self._vectors else self.blocks.activation()
        parts: NamedModules = [("linear", first), *activation, *self._drop(self.inner_dropout)]
        parts += [*self.blocks.bias(), ("linear", second), *self._drop(self.dropout)]
        return self._sum(named_sequential(parts))

    def _drop(self, probability: float) -> NamedModules:
        return [("dropout", nn.Dropout(probability))] if probability else []

    def _sum(self, branch: nn.Module) -> Residual:
        norm = self.blocks.norm(self.width)
        pre = self.blocks.form != "post"
        entry = [*(norm if pre else []), *self.blocks.bias()]
        place = next(self.positions)
        return self.blocks.sum(branch, place, entry=entry, exit=[] if pre else norm, with_delta=self._vectors)
