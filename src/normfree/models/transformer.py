"""Encoder and decoder layers of a Transformer, their builder, and the cache for decoding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from normfree.models.base import BaseModel, BlockBuilder, ModelConfig, NamedModules, named_sequential, sequence_layers
from normfree.nn.attention import Attention, KeyValueCache, TokenEmbedding, real_positions
from normfree.nn.residual import Residual
from normfree.nn.scalars import ScalarMultiplier
from normfree.nn.training_scalar_folding import Stream
from normfree.plan import Branch, Layer, Position, ResidualPlan, positions


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
        return ResidualPlan(
            branches, classifier=(Layer("classifier", tied=bool(shared)),), other_parameters=tuple(aside)
        )


def _residuals(layers: nn.Module) -> list[Residual]:
    return [module for module in layers.modules() if isinstance(module, Residual)]


def _branch(name: str, residual: Residual, position: Position) -> Branch:
    assert residual.branch is not None
    layers, _ = sequence_layers(f"{name}.branch", residual.branch, False)
    itself = isinstance(residual.branch, Attention) and not residual.branch.cross
    return Branch(name, position, layers, home=name, first_layers=layers[:3] if itself else ())


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
        if config.method.weight_kind != "plain" or config.method.remove_branches:
            raise ValueError(
                f"model '{config.name}' expects a method with plain weight layers and branches, got "
                f"'{config.method.spec}' with {config.method.weight_kind.replace('_', ' ')} layers"
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
