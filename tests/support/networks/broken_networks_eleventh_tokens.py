"""The eleventh set's broken networks over sequences: recurrent nets and Transformers."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fifth_parts import Case, chains, generator, images, sentences


class LastState(nn.Module):
    """The class of a series by the last state of a recurrent net."""

    def __init__(self, features: int, width: int, classes: int) -> None:
        super().__init__()
        self.rnn = nn.RNN(features, width, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1])


def rnn_recurrent_weights_near_zero(broken: bool = True, batch: int = 0) -> Case:
    """A recurrent net whose state-to-state weights are within ±0.01, so that it forgets at once."""
    torch.manual_seed(0)
    model = LastState(4, 48, 4)
    if broken:
        nn.init.uniform_(model.rnn.weight_hh_l0, -0.01, 0.01)
    else:
        nn.init.orthogonal_(model.rnn.weight_hh_l0)
    draw = generator(1000 + batch)
    classes = torch.randint(4, (128,), generator=draw)
    steps = torch.randn(128, 30, 4, generator=draw) * 0.5
    steps[:, :5] += 2 * F.one_hot(classes, 4)[:, None]
    return model, steps, classes, F.cross_entropy


class Attention(nn.Module):
    """Self-attention with several heads, with a causal mask or without one.

    The mask hides what comes after a token, or also the token itself; the heads and the tokens are put in order
    before the attention, or that was forgotten.
    """

    def __init__(
        self, width: int, heads: int, causal: bool = False, hides_itself: bool = False, over_heads: bool = False
    ) -> None:
        super().__init__()
        self.heads, self.causal, self.over_heads = heads, causal, over_heads
        self.diagonal = 0 if hides_itself else 1
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        count, tokens, width = x.shape
        parts = self.qkv(x).view(count, tokens, 3, self.heads, width // self.heads).unbind(2)
        if not self.over_heads:
            parts = tuple(part.transpose(1, 2) for part in parts)
        query, key, value = parts
        scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5
        if self.causal:
            hidden = torch.ones(tokens, tokens, dtype=torch.bool).triu(self.diagonal)
            scores = scores.masked_fill(hidden, float("-inf"))
        mixed = scores.softmax(-1) @ value
        if not self.over_heads:
            mixed = mixed.transpose(1, 2)
        return self.project(mixed.reshape(count, tokens, width))


class Block(nn.Module):
    """A Transformer block with its normalizers first."""

    def __init__(self, attention: nn.Module, width: int, norm: Callable[[int], nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.norm1, self.attention = norm(width), attention
        self.norm2 = norm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    """A small GPT."""

    def __init__(self, vocabulary: int, length: int, width: int, hides_itself: bool) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(
            Block(Attention(width, 4, causal=True, hides_itself=hides_itself), width) for _ in range(2)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        for part in (self.words, self.positions, self.head):
            nn.init.normal_(part.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).flatten(0, 1)


def decoder_mask_hides_the_token_itself(broken: bool = True, batch: int = 0) -> Case:
    """A decoder whose causal mask begins at the diagonal: the first token may attend to nothing."""
    torch.manual_seed(0)
    return Decoder(100, 24, 64, broken), *chains(batch), F.cross_entropy


class ViT(nn.Module):
    """A vision Transformer that classifies by an extra token."""

    def __init__(self, over_heads: bool, width: int = 48, depth: int = 3) -> None:
        super().__init__()
        self.patch_conv = nn.Conv2d(3, width, 4, stride=4)
        self.extra = nn.Parameter(0.02 * torch.randn(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 17, width))
        self.blocks = nn.Sequential(*(Block(Attention(width, 4, over_heads=over_heads), width) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_conv(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.extra.expand(len(x), -1, -1), x], 1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])


def vit_attends_over_heads(broken: bool = True, batch: int = 0) -> Case:
    """A vision Transformer whose attention is among the heads of a token, as a transpose is missing."""
    torch.manual_seed(0)
    return ViT(broken), *images(batch), F.cross_entropy


class Logits(nn.Module):
    """A model of transformers that returns its logits alone."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, tokens: Tensor) -> Tensor:
        return self.network(input_ids=tokens, attention_mask=(tokens != 0).long()).logits


def transformers_distilbert_gains_drawn_too(broken: bool = True, batch: int = 0) -> Case:
    """A DistilBERT all of whose parameters were drawn from N(0, 0.02), those of the normalizers too."""
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    torch.manual_seed(0)
    config = DistilBertConfig(
        vocab_size=40, max_position_embeddings=32, dim=48, hidden_dim=96, n_layers=6, n_heads=4, dropout=0.0,
        attention_dropout=0.0, seq_classif_dropout=0.0, num_labels=2,
    )  # fmt: skip
    model = Logits(DistilBertForSequenceClassification(config))
    for parameter in model.parameters():
        if broken or parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)
    return model, *sentences(batch), F.cross_entropy


class RootMeanSquare(nn.Module):
    """Divides each vector by the root of its mean square, taken from the sum of squares."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype, self.gain = dtype, nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        short = x.to(self.dtype)
        mean_square = short.pow(2).sum(-1, keepdim=True) / x.shape[-1]
        return (short * torch.rsqrt(mean_square + 1e-5)).float() * self.gain


class Encoder(nn.Module):
    """A Transformer encoder over words, whose vectors are multiplied by the root of the width."""

    def __init__(self, norm: Callable[[int], nn.Module], width: int = 320) -> None:
        super().__init__()
        self.words = nn.Embedding(40, width)
        self.blocks = nn.ModuleList(Block(Attention(width, 4), width, norm) for _ in range(2))
        self.final_norm, self.head = norm(width), nn.Linear(width, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) * self.words.embedding_dim**0.5
        for block in self.blocks:
            x = block(x)
        return self.head(self.final_norm(x).mean(1))


def encoder_squares_overflow_in_half(broken: bool = True, batch: int = 0) -> Case:
    """An encoder whose RMS norm sums squares in half precision: the sum is infinite, and the result zero."""
    torch.manual_seed(0)
    norm = partial(RootMeanSquare, dtype=torch.float16 if broken else torch.float32)
    return Encoder(norm), *sentences(batch), F.cross_entropy
