"""Transformers: encoder and decoder, encoder alone, and decoder alone, with any method.

The block form "pre" has a normalizer at the entry of each branch and one after the last sum; "post" has one after every
sum. A method without normalizer has none in either form.

Reference: Vaswani 2017, section 3; fixup, section 4.3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from normfree.models.base import BaseModel, BlockBuilder, ModelConfig, named_sequential, sequence_layers
from normfree.models.transformer_layers import DecoderCache, LayerBuilder, Memory
from normfree.nn.attention import Attention
from normfree.nn.embedding import TokenEmbedding, real_positions
from normfree.nn.residual import Residual
from normfree.nn.scalar_folding import Stream
from normfree.plan import Branch, Layer, Position, ResidualPlan, positions


class _SequenceModel(BaseModel):
    """The base of the three models: embeddings, layers, plan, and an output layer that may share its weight."""

    skip = "sequence"
    classifier: nn.Linear

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.dropout = nn.Dropout(config.dropout) if config.dropout else nn.Identity()

    def _tie(self, embedding: TokenEmbedding, width: int) -> None:
        """Make the output layer, with the embedding's weight."""
        self.classifier = nn.Linear(width, embedding.num_embeddings, bias=False)
        self.classifier.weight = embedding.weight

    def _logits(self, x: Tensor) -> Tensor:
        """Apply the output layer, which may be in half precision while the stream is in float32."""
        return self.classifier(x.to(self.classifier.weight.dtype))  # type: ignore[no-any-return]

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        """Apply `fn` as torch does, then tie the weights again: a move from the meta device separates them."""
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
        """Return the residual blocks of encoder and decoder, each with the modules that read the last block."""
        return [Stream(_residuals(stack), ends) for stack, ends in zip(self._stacks(), self._ends(), strict=True)]

    def _ends(self) -> list[list[nn.Module | None]]:
        """Return the modules that read the output of each stack."""
        raise NotImplementedError

    @property
    def plan(self) -> ResidualPlan:
        """The plan: one branch per residual sum; encoder and decoder are two stages.

        Embeddings are listed in `aside`, unless the output shares their weight.
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
    layers, _ = sequence_layers(f"{name}.branch", residual.branch, False)
    itself = isinstance(residual.branch, Attention) and not residual.branch.cross
    return Branch(name, position, layers, home=name, entries=layers[:3] if itself else ())


def _attentions(layers: nn.Module) -> Iterator[Attention]:
    return (module for module in layers.modules() if isinstance(module, Attention))


class Transformer(_SequenceModel):
    """Encoder and decoder, for translation.

    Shapes: source (N, S) and target (N, T) of tokens → logits (N, T, V); position t predicts the next token. Padding is
    at the end of a sequence.
    """

    def __init__(self, shape: TransformerShape, config: ModelConfig) -> None:
        super().__init__(config)
        layers = shape.layers(config)
        if config.vocabulary != config.num_classes:
            self.source_embedding = TokenEmbedding(config.vocabulary, shape.width)
        self.embedding = TokenEmbedding(config.num_classes, shape.width)
        self.encoder = nn.ModuleList(layers.encoder_layer() for _ in range(shape.encoder))
        self.encoder_head = layers.encoder_head()
        self.decoder = nn.ModuleList(layers.decoder_layer(cross=True) for _ in range(shape.decoder))
        self.head = layers.head()
        self._tie(self.embedding, shape.width)

    def _ends(self) -> list[list[nn.Module | None]]:
        memories: list[nn.Module | None] = [a.memory_bias for a in _attentions(self.decoder) if a.cross]
        return [[*self.encoder_head] or memories, [*self.head]]

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Return the logits of each next token of the target."""
        return self.decode(target, self.encode(source))

    def encode(self, source: Tensor) -> Memory:
        """Return the encoder's output for a source."""
        real = real_positions(source)
        mask = real[:, None, None, :]
        x = self.dropout(getattr(self, "source_embedding", self.embedding)(source))
        for layer in self.encoder:
            x = layer(x, mask)
        return Memory(self.encoder_head(x), real)

    def decode(self, target: Tensor, memory: Memory, cache: DecoderCache | None = None) -> Tensor:
        """Return the logits of each next token.

        Args:
            target: The tokens (N, T) of the target; with a cache, only those after the ones in the cache.
            memory: The encoder's output.
            cache: The keys and values of the positions so far, which this call extends.
        """
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
        """Return an empty cache for targets of at most `length` positions, one per row of the memory."""
        own = [a.empty_cache(len(memory.states), length) for a in _attentions(self.decoder) if not a.cross]
        remembered = [a.memory_cache(memory.states) for a in _attentions(self.decoder) if a.cross]
        return DecoderCache(own, remembered, memory.real[:, None, None, :])


class Decoder(_SequenceModel):
    """A decoder alone: a language model.

    Shapes: tokens (N, T) → logits (N, T, V); position t predicts the next token. Padding is at the end.
    """

    def __init__(self, shape: TransformerShape, config: ModelConfig) -> None:
        super().__init__(config)
        layers = shape.layers(config)
        self.embedding = TokenEmbedding(config.num_classes, shape.width)
        self.decoder = nn.ModuleList(layers.decoder_layer(cross=False) for _ in range(shape.decoder))
        self.head = layers.head()
        self._tie(self.embedding, shape.width)

    def _ends(self) -> list[list[nn.Module | None]]:
        return [[*self.head]]

    def forward(self, tokens: Tensor, cache: DecoderCache | None = None) -> Tensor:
        """Return the logits of each next token; with a cache, pass only the tokens after those in the cache."""
        x = self.dropout(self.embedding(tokens, 0 if cache is None else cache.used))
        for i, layer in enumerate(self.decoder):
            x = layer(x) if cache is None else layer(x, None, None, *cache.layer(i))
        return self._logits(self.head(x))

    def start_cache(self, rows: int, length: int) -> DecoderCache:
        """Return an empty cache for `rows` sequences of at most `length` positions."""
        return DecoderCache([attention.empty_cache(rows, length) for attention in _attentions(self.decoder)], [], None)


class Encoder(_SequenceModel):
    """An encoder alone, which classifies a sequence by the mean over its tokens, padding excluded.

    Shapes: tokens (N, T) → logits (N, classes).
    """

    def __init__(self, shape: TransformerShape, config: ModelConfig) -> None:
        super().__init__(config)
        layers = shape.layers(config)
        self.embedding = TokenEmbedding(config.vocabulary, shape.width)
        self.encoder = nn.ModuleList(layers.encoder_layer() for _ in range(shape.encoder))
        self.head = layers.head(bias=False)
        self.bias = named_sequential(layers.blocks.bias())
        self.classifier = nn.Linear(shape.width, config.num_classes)

    def _ends(self) -> list[list[nn.Module | None]]:
        return [[*self.head, *self.bias]]

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the class scores."""
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
    """The layers, width, inner width and heads of a Transformer."""

    width: int
    inner: int
    heads: int
    encoder: int = 0
    decoder: int = 0

    def build(self, config: ModelConfig) -> BaseModel:
        """Build the model; its parameters are not initialized."""
        if config.method.weight != "plain" or config.method.remove_branches:
            raise ValueError(
                f"model '{config.name}' expects a method with plain weight layers and branches, got "
                f"'{config.method.spec}' with {config.method.weight.replace('_', ' ')} layers"
                f"{' and no branches' if config.method.remove_branches else ''}; use 'fixup' or 'layernorm'"
            )
        kind = Transformer if self.encoder and self.decoder else Encoder if self.encoder else Decoder
        return kind(self, config)

    def layers(self, config: ModelConfig) -> LayerBuilder:
        """Return a builder of the model's layers."""
        sizes = [2 * self.encoder, (3 if self.encoder else 2) * self.decoder]
        builder = BlockBuilder(config.method, config.form, spatial=False, tokens=True)
        numbered = iter(positions([size for size in sizes if size], [False] * sum(sizes)))
        inner = config.dropout if config.inner_dropout is None else config.inner_dropout
        return LayerBuilder(self.width, self.inner, self.heads, builder, config.dropout, inner, numbered)
