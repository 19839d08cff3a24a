"""The eleventh set's healthy networks of our own over sequences, as practitioners write them."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fifth_parts import Case, chains, generator, sentences, sound

OWN: dict[str, Callable[[], Case]] = {}
own = sound(OWN)


class PositionalEncoding(nn.Module):
    """Adds sines and cosines of the position, as in the tutorials of PyTorch."""

    def __init__(self, width: int, length: int = 64) -> None:
        super().__init__()
        angles = torch.arange(length)[:, None] * torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
        self.register_buffer("table", torch.stack([angles.sin(), angles.cos()], 2).flatten(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.get_buffer("table")[: x.shape[1]]


class SentenceEncoder(nn.Module):
    """A Transformer encoder of PyTorch that classifies by the mean over the words."""

    def __init__(self, vocabulary: int, width: int = 64) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width, padding_idx=0)
        self.positions = PositionalEncoding(width)
        layer = nn.TransformerEncoderLayer(width, 4, 128, dropout=0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        padding = tokens == 0
        x = self.encoder(self.positions(self.words(tokens)), src_key_padding_mask=padding)
        words = (~padding)[:, :, None]
        return self.head((x * words).sum(1) / words.sum(1))


@own
def transformer_encoder_of_sentences() -> Case:
    return SentenceEncoder(40), *sentences(0), F.cross_entropy


class CausalBlock(nn.Module):
    """A block of a small GPT, with PyTorch's own attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        count, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(count, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(count, length, width))
        return x + self.mlp(self.norm2(x))


class NanoGPT(nn.Module):
    """A small GPT with GPT-2's weights and a tied head."""

    def __init__(self, vocabulary: int, length: int, width: int = 64, depth: int = 3) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(CausalBlock(width, 4) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.words.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                last = name.endswith(("project.weight", "mlp.2.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * depth) ** 0.5 if last else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).flatten(0, 1)


@own
def nano_gpt_with_tied_head() -> Case:
    return NanoGPT(100, 24), *chains(0), F.cross_entropy


class LanguageModel(nn.Module):
    """An LSTM of two layers that predicts the next token."""

    def __init__(self, vocabulary: int, width: int = 64) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, 96, num_layers=2, dropout=0.1, batch_first=True)
        self.head = nn.Linear(96, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.words(tokens))[0]).flatten(0, 1)


@own
def lstm_language_model() -> Case:
    model = LanguageModel(12)
    for name, parameter in model.lstm.named_parameters():
        if name.startswith("weight_hh"):
            nn.init.orthogonal_(parameter)
    return model, *chains(0, vocabulary=12), F.cross_entropy


class Tagger(nn.Module):
    """A tag for each word by a GRU in both directions."""

    def __init__(self, vocabulary: int, tags: int, width: int = 48) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.gru = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(2 * width, tags)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.drop(self.gru(self.words(tokens))[0])).flatten(0, 1)


@own
def gru_tagger_in_both_directions() -> Case:
    tokens = torch.randint(30, (32, 16), generator=generator(48))
    after = tokens.roll(-1, 1)
    return Tagger(30, 4), tokens, (2 * (tokens > 14).long() + (after > 14).long()).flatten(), F.cross_entropy


class CausalConv(nn.Module):
    """A residual block of a temporal convolutional network."""

    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        self.reach = 2 * dilation
        self.conv1 = nn.Conv1d(width, width, 3, dilation=dilation)
        self.conv2 = nn.Conv1d(width, width, 3, dilation=dilation)
        for conv in (self.conv1, self.conv2):
            nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
            nn.init.zeros_(conv.bias)
        nn.init.normal_(self.conv2.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.conv1(F.pad(x, (self.reach, 0))))
        return F.relu(x + self.conv2(F.pad(out, (self.reach, 0))))


class Forecaster(nn.Module):
    """The next value of each series at each step, by dilated convolutions."""

    def __init__(self, features: int, width: int = 32) -> None:
        super().__init__()
        self.enter = nn.Conv1d(features, width, 1)
        self.blocks = nn.Sequential(*(CausalConv(width, 2**i) for i in range(4)))
        self.leave = nn.Conv1d(width, features, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.blocks(self.enter(x)))


@own
def tcn_forecaster() -> Case:
    draw = generator(49)
    phase, pace = 6.3 * torch.rand(32, 3, 1, generator=draw), 0.2 + 0.4 * torch.rand(32, 3, 1, generator=draw)
    waves = 1.4 * torch.sin(phase + pace * torch.arange(33.0))
    return Forecaster(3), waves[:, :, :-1], waves[:, :, 1:], F.mse_loss


class Translator(nn.Module):
    """A GRU that reads, and a GRU that writes while it attends to what was read; it is given the last words."""

    def __init__(self, vocabulary: int, width: int = 48) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(vocabulary, width), nn.Embedding(vocabulary, width)
        self.reader, self.writer = nn.GRU(width, width, batch_first=True), nn.GRU(width, width, batch_first=True)
        self.query = nn.Linear(width, width, bias=False)
        self.mix, self.head = nn.Linear(2 * width, width), nn.Linear(width, vocabulary)

    def forward(self, sentences: Tensor) -> Tensor:
        read, state = self.reader(self.source(sentences[:, 0]))
        written, _ = self.writer(self.target(sentences[:, 1]), state)
        weights = (self.query(written) @ read.transpose(1, 2) / read.shape[2] ** 0.5).softmax(2)
        mixed = torch.tanh(self.mix(torch.cat([written, weights @ read], 2)))
        return self.head(mixed).flatten(0, 1)


@own
def seq2seq_gru_with_attention() -> Case:
    source = torch.randint(1, 20, (32, 10), generator=generator(50))
    target = (source * 3) % 19 + 1
    begun = torch.cat([torch.zeros(32, 1, dtype=torch.long), target[:, :-1]], 1)
    return Translator(20), torch.stack([source, begun], 1), target.flatten(), F.cross_entropy
