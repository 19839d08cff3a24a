"""The layers of a Transformer, built from a method's parts, and the cache that decoding fills."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn

from normfree.models.builder import BlockBuilder, Named, chain
from normfree.nn.attention import Attention, KeyValueCache
from normfree.nn.residual import Residual
from normfree.plan import Position


class Memory(NamedTuple):
    """What an encoder hands to a decoder: states (N, S, width), and which positions are real (N, S)."""

    states: Tensor
    real: Tensor


class DecoderCache:
    """Keys and values of every decoder layer: its own as they come, and those of the memory, computed once."""

    def __init__(self, own: list[KeyValueCache], memory: list[KeyValueCache], mask: Tensor | None) -> None:
        self.own = own
        self.memory = memory
        self.mask = mask

    @property
    def used(self) -> int:
        """The number of positions so far."""
        return self.own[0].used

    def layer(self, index: int) -> tuple[KeyValueCache, KeyValueCache | None]:
        """The caches of one decoder layer."""
        return self.own[index], self.memory[index] if self.memory else None

    def reorder(self, index: Tensor, *, memory: bool = True) -> DecoderCache:
        """Let row i continue what row index[i] began, in place; the number of rows may change.

        `memory=False` leaves the memory's part as it is, which is right, and faster, where every row stays with its
        source, as the beams of a search do.
        """
        for held in (*self.own, *(self.memory if memory else ())):
            held.reorder(index)
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
        """(N, T, width) → the same."""
        return self.feedforward(self.attention(x, None, mask))  # type: ignore[no-any-return]


class DecoderLayer(nn.Module):
    """Causal attention, attention over a memory where there is one, then feed-forward."""

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
        """(N, T, width) → the same; `mask` says which positions of the memory are real."""
        x = self.attention(x, None, None, own)
        if self.cross is not None:
            x = self.cross(x, memory, mask, remembered)
        return self.feedforward(x)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class LayerBuilder:
    """Builds the layers of a model one after the other, each at its position."""

    width: int
    inner: int
    heads: int
    kit: BlockBuilder
    dropout: float
    numbered: Iterator[Position]

    def encoder_layer(self) -> EncoderLayer:
        """The next layer of an encoder."""
        return EncoderLayer(self._attention(), self._feedforward())

    def decoder_layer(self, *, cross: bool) -> DecoderLayer:
        """The next layer of a decoder."""
        attention = self._attention(causal=True)
        return DecoderLayer(attention, self._attention(cross=True) if cross else None, self._feedforward())

    def head(self, *, bias: bool = True) -> nn.Sequential:
        """What stands after the last sum: a normalizer in the pre form, and a scalar bias before the next layer."""
        norm = self.kit.norm(self.width) if self.kit.form == "pre" else []
        return chain([*norm, *(self.kit.bias() if bias else [])])

    def _attention(self, *, causal: bool = False, cross: bool = False) -> Residual:
        return self._sum(
            Attention(
                self.width,
                self.heads,
                causal=causal,
                cross=cross,
                dropout=self.dropout,
                scalar_biases=self.kit.method.scalar_biases,
            )
        )

    def _feedforward(self) -> Residual:
        """Two layers with an activation between; the first one's bias is the one before the activation."""
        parts: Named = [("linear", nn.Linear(self.width, self.inner)), self.kit.activation()[-1], *self._drop()]
        parts += [*self.kit.bias(), ("linear", nn.Linear(self.inner, self.width)), *self._drop()]
        return self._sum(chain(parts))

    def _drop(self) -> Named:
        return [("dropout", nn.Dropout(self.dropout))] if self.dropout else []

    def _sum(self, branch: nn.Module) -> Residual:
        norm = self.kit.norm(self.width)
        pre = self.kit.form != "post"
        entry = [*(norm if pre else []), *self.kit.bias()]
        return self.kit.sum(branch, next(self.numbered), entry=entry, exit=[] if pre else norm)
