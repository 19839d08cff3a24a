"""Transformers: encoder and decoder, encoder alone and decoder alone, from one description and any method.

Forms: "pre" has the normalizer at the entry of each branch and one after the last sum, "post" one after every sum; a
method without normalizer has none in either.

Reference: Vaswani 2017, section 3; fixup, section 4.3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from normfree.models.base import BaseModel, ModelConfig, walk
from normfree.models.builder import BlockBuilder, chain
from normfree.models.special_tokens import real_positions
from normfree.models.transformer_layers import DecoderCache, LayerBuilder, Memory
from normfree.nn.attention import Attention
from normfree.nn.embedding import TokenEmbedding
from normfree.nn.residual import Residual
from normfree.nn.scalar_folding import Stream
from normfree.plan import Branch, Layer, Position, ResidualPlan, positions


class _Sequences(BaseModel):
    """What the three have in common: embeddings, layers, a stated plan, and an output that may share a weight."""

    skip = "sequence"
    classifier: nn.Linear

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.dropout = nn.Dropout(config.dropout) if config.dropout else nn.Identity()

    def _tie(self, embedding: TokenEmbedding, width: int) -> None:
        """Give the output the embedding's weight."""
        self.classifier = nn.Linear(width, embedding.num_embeddings, bias=False)
        self.classifier.weight = embedding.weight

    def _logits(self, x: Tensor) -> Tensor:
        """The output layer, whose type may be shorter than that of the stream."""
        return self.classifier(x.to(self.classifier.weight.dtype))  # type: ignore[no-any-return]

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        """As torch has it; but a move from the meta device gives each of two modules a weight of its own."""
        tied = [(e, self.classifier) for e in self._embeddings() if e.weight is self.classifier.weight]
        out = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for embedding, classifier in tied:
            classifier.weight = embedding.weight
        return out

    def _stacks(self) -> Iterator[nn.Module]:
        return (m for m in self.children() if isinstance(m, nn.ModuleList))

    def _embeddings(self) -> Iterator[TokenEmbedding]:
        return (m for m in self.children() if isinstance(m, TokenEmbedding))

    def streams(self) -> list[Stream]:
        """The residual sums of encoder and decoder in order, each with what reads their last."""
        return [Stream(_residuals(stack), ends) for stack, ends in zip(self._stacks(), self._ends(), strict=True)]

    def _ends(self) -> list[list[nn.Module | None]]:
        """What reads the output of each stack."""
        raise NotImplementedError

    @property
    def plan(self) -> ResidualPlan:
        """The plan: one branch a residual sum; encoder and decoder are two stages.

        Embeddings stand aside, unless the output shares their weight.
        """
        residuals = [(name, m) for name, m in self.named_modules() if isinstance(m, Residual)]
        stacks = [len(_residuals(part)) for part in self._stacks()]
        placed = positions(stacks, [False] * len(residuals))
        branches = tuple(_branch(name, m, p) for (name, m), p in zip(residuals, placed, strict=True))
        shared = [e for e in self._embeddings() if e.weight is self.classifier.weight]
        aside = [f"{n}.weight" for n, m in self.named_children() if isinstance(m, TokenEmbedding) and m not in shared]
        return ResidualPlan(branches, classifier=(Layer("classifier", tied=bool(shared)),), aside=tuple(aside))


def _residuals(layers: nn.Module) -> list[Residual]:
    return [module for module in layers.modules() if isinstance(module, Residual)]


def _branch(name: str, residual: Residual, position: Position) -> Branch:
    assert residual.branch is not None
    layers, _ = walk(f"{name}.branch", residual.branch, False)
    itself = isinstance(residual.branch, Attention) and not residual.branch.cross
    return Branch(name, position, layers, home=name, entries=layers[:3] if itself else ())


def _attentions(layers: nn.Module) -> Iterator[Attention]:
    return (module for module in layers.modules() if isinstance(module, Attention))


class Transformer(_Sequences):
    """Encoder and decoder, which translate.

    Shapes: source (N, S) and target (N, T) of tokens → logits (N, T, V); position t predicts the token after it.
    Padding stands at the end of a sequence.
    """

    def __init__(self, shape: TransformerShape, config: ModelConfig) -> None:
        super().__init__(config)
        parts = shape.parts(config)
        if config.vocabulary != config.num_classes:
            self.source_embedding = TokenEmbedding(config.vocabulary, shape.width)
        self.embedding = TokenEmbedding(config.num_classes, shape.width)
        self.encoder = nn.ModuleList(parts.encoder_layer() for _ in range(shape.encoder))
        self.encoder_head = parts.head(bias=False)
        self.decoder = nn.ModuleList(parts.decoder_layer(cross=True) for _ in range(shape.decoder))
        self.head = parts.head()
        self._tie(self.embedding, shape.width)

    def _ends(self) -> list[list[nn.Module | None]]:
        memories: list[nn.Module | None] = [a.memory_bias for a in _attentions(self.decoder) if a.cross]
        return [[*self.encoder_head] or memories, [*self.head]]

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Logits of the token that follows each of the target's."""
        return self.decode(target, self.encode(source))

    def encode(self, source: Tensor) -> Memory:
        """Read the source."""
        real = real_positions(source)
        mask = real[:, None, None, :]
        x = self.dropout(getattr(self, "source_embedding", self.embedding)(source))
        for layer in self.encoder:
            x = layer(x, mask)
        return Memory(self.encoder_head(x), real)

    def decode(self, target: Tensor, memory: Memory, cache: DecoderCache | None = None) -> Tensor:
        """Logits of the token that follows each of the target's; with a cache, of new positions only, and it grows."""
        x = self.dropout(self.embedding(target, 0 if cache is None else cache.used))
        if cache is None:
            mask = memory.real[:, None, None, :]
            for layer in self.decoder:
                x = layer(x, memory.states, mask)
        else:
            for i, layer in enumerate(self.decoder):
                x = layer(x, None, cache.mask, *cache.layer(i))
        return self._logits(self.head(x))

    def start_cache(self, memory: Memory, length: int) -> DecoderCache:
        """Room for at most `length` positions of a target a row of the memory."""
        own = [a.room(len(memory.states), length) for a in _attentions(self.decoder) if not a.cross]
        remembered = [a.remember(memory.states) for a in _attentions(self.decoder) if a.cross]
        return DecoderCache(own, remembered, memory.real[:, None, None, :])


class Decoder(_Sequences):
    """A decoder alone, which is a language model.

    Shapes: tokens (N, T) → logits (N, T, V); position t predicts the token after it. Padding stands at the end.
    """

    def __init__(self, shape: TransformerShape, config: ModelConfig) -> None:
        super().__init__(config)
        parts = shape.parts(config)
        self.embedding = TokenEmbedding(config.num_classes, shape.width)
        self.decoder = nn.ModuleList(parts.decoder_layer(cross=False) for _ in range(shape.decoder))
        self.head = parts.head()
        self._tie(self.embedding, shape.width)

    def _ends(self) -> list[list[nn.Module | None]]:
        return [[*self.head]]

    def forward(self, tokens: Tensor, cache: DecoderCache | None = None) -> Tensor:
        """Logits of the token that follows each; with a cache, of new positions only, and it grows."""
        x = self.dropout(self.embedding(tokens, 0 if cache is None else cache.used))
        for i, layer in enumerate(self.decoder):
            x = layer(x) if cache is None else layer(x, None, None, *cache.layer(i))
        return self._logits(self.head(x))

    def start_cache(self, rows: int, length: int) -> DecoderCache:
        """Room for at most `length` positions of `rows` sequences."""
        return DecoderCache([attention.room(rows, length) for attention in _attentions(self.decoder)], [], None)


class Encoder(_Sequences):
    """An encoder alone, which classifies a sequence by the mean over its real positions.

    Shapes: tokens (N, T) → logits (N, classes).
    """

    def __init__(self, shape: TransformerShape, config: ModelConfig) -> None:
        super().__init__(config)
        parts = shape.parts(config)
        self.embedding = TokenEmbedding(config.vocabulary, shape.width)
        self.encoder = nn.ModuleList(parts.encoder_layer() for _ in range(shape.encoder))
        self.head = parts.head(bias=False)
        self.bias = chain(parts.kit.bias())
        self.classifier = nn.Linear(shape.width, config.num_classes)

    def _ends(self) -> list[list[nn.Module | None]]:
        return [[*self.head, *self.bias]]

    def forward(self, tokens: Tensor) -> Tensor:
        """Class scores."""
        real = real_positions(tokens)
        mask = real[:, None, None, :]
        x = self.dropout(self.embedding(tokens))
        for layer in self.encoder:
            x = layer(x, mask)
        counted = real.unsqueeze(-1).to(x.dtype)
        mean = (self.head(x) * counted).sum(1) / counted.sum(1)
        return self._logits(self.bias(mean))


@dataclass(frozen=True, kw_only=True)
class TransformerShape:
    """What makes one Transformer different from another: layers, width, inner width and heads."""

    width: int
    inner: int
    heads: int
    encoder: int = 0
    decoder: int = 0

    def build(self, config: ModelConfig) -> BaseModel:
        """The model, its parameters not yet initialized."""
        if config.method.weight != "plain" or config.method.remove_branches:
            raise ValueError(
                f"model '{config.name}' expects a method with plain weight layers and branches, got "
                f"'{config.method.spec}' with {config.method.weight.replace('_', ' ')} layers"
                f"{' and no branches' if config.method.remove_branches else ''}; use 'fixup' or 'layernorm'"
            )
        kind = Transformer if self.encoder and self.decoder else Encoder if self.encoder else Decoder
        return kind(self, config)

    def parts(self, config: ModelConfig) -> LayerBuilder:
        """The layers of such a model, in order."""
        sizes = [2 * self.encoder, (3 if self.encoder else 2) * self.decoder]
        kit = BlockBuilder(config.method, config.form, spatial=False, tokens=True)
        numbered = iter(positions([size for size in sizes if size], [False] * sum(sizes)))
        return LayerBuilder(self.width, self.inner, self.heads, kit, config.dropout, numbered)
