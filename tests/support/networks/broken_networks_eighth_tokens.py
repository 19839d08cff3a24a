"""Broken networks of the eighth set for sound, time series and tokens, each with a healthy twin."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from broken_networks_seventh_images import tones
from broken_networks_seventh_tokens import early_signals
from fifth_parts import Case, generator, series


class PreActivation(nn.Module):
    """ReLU, then a convolution."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(before, after, 3, stride, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.relu(x))


class SpectrogramNet(nn.Module):
    """Pre-activation layers over a spectrogram, and the maximum over time."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(PreActivation(1, 16, 1), PreActivation(16, 24, 2), PreActivation(24, 24, 2))
        self.fc = nn.Linear(24 * 4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.relu(self.layers(x)).amax(3).flatten(1))


def spectrogram_decibels_into_relu(broken: bool = True, batch: int = 0) -> Case:
    """The spectrogram is in decibels below full scale, and the network begins with a ReLU: nothing passes."""
    torch.manual_seed(0)
    draw = generator(3300 + batch)
    labels = torch.randint(5, (48,), generator=draw)
    band = torch.arange(16)[None, :, None] - (2 + 3 * labels[:, None, None])
    power = 25 * torch.exp(-0.5 * band**2) - 55 + 8 * torch.randn(48, 16, 16, generator=draw)
    power = power.clamp(-80, 0)[:, None]
    return SpectrogramNet(), power if broken else (power + 52) / 10, labels, nn.CrossEntropyLoss()


class GatedConvs(nn.Module):
    """The layers of WaveNet, tanh times sigmoid, with their residual sums or without."""

    def __init__(self, depth: int, skip: bool) -> None:
        super().__init__()
        self.embed = nn.Conv1d(1, 24, 4, 4)
        self.layers = nn.ModuleList(nn.Conv1d(24, 48, 3, padding=1) for _ in range(depth))
        self.fc = nn.Linear(24, 5)
        self.skip = skip

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x[:, None])
        for layer in self.layers:
            value, gate = layer(x).chunk(2, 1)
            y = torch.tanh(value) * torch.sigmoid(gate)
            x = x + y if self.skip else y
        return self.fc(x.amax(2))


def gated_convolutions_without_skip(broken: bool = True, batch: int = 0) -> Case:
    """The residual sums were forgotten: twelve gates in a row each halve the signal or more."""
    torch.manual_seed(0)
    return GatedConvs(12, not broken), *tones(batch), nn.CrossEntropyLoss()


class DilatedConvs(nn.Module):
    """Causal convolutions whose dilation doubles; the last step is read."""

    def __init__(self, forgets: bool) -> None:
        super().__init__()
        self.embed = nn.Conv1d(5, 32, 1)
        self.layers = nn.ModuleList(nn.Conv1d(32, 32, 3, dilation=2**i) for i in range(4))
        self.fc = nn.Linear(32, 5)
        self.forgets = forgets

    def forward(self, x: Tensor) -> Tensor:
        x = y = self.embed(x.transpose(1, 2))
        for layer in self.layers:
            before = x if self.forgets else y
            y = F.relu(layer(F.pad(before, (2 * layer.dilation[0], 0))))
        return self.fc(y[:, :, -1])


def dilated_loop_keeps_last_layer(broken: bool = True, batch: int = 0) -> Case:
    """The loop feeds each layer the embedding and not the output of the layer before: the last one alone counts."""
    torch.manual_seed(0)
    return DilatedConvs(broken), *early_signals(batch), nn.CrossEntropyLoss()


class PlainRNN(nn.Module):
    """A recurrent network of tanh units whose last state is classified."""

    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.rnn, self.fc = nn.RNN(4, 48, batch_first=True), nn.Linear(48, 4)
        if broken:
            nn.init.normal_(self.rnn.weight_hh_l0)
        else:
            nn.init.orthogonal_(self.rnn.weight_hh_l0)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.rnn(x)[0][:, -1])


def rnn_recurrent_weights_of_std_one(broken: bool = True, batch: int = 0) -> Case:
    """The recurrent weights have standard deviation 1, and are not orthogonal: the states are saturated and chaotic."""
    torch.manual_seed(0)
    return PlainRNN(broken), *series(batch), nn.CrossEntropyLoss()


class PriceGRU(nn.Module):
    """A GRU over the prices of four stocks; the mean of its states is classified."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.fc = nn.GRU(4, 32, batch_first=True), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.gru(x)[0].mean(1))


def gru_of_raw_prices(broken: bool = True, batch: int = 0) -> Case:
    """The prices come as they are, near 3000 with a deviation of 30: they saturate all gates."""
    torch.manual_seed(0)
    x, labels = series(batch)
    prices = 3000 + 30 * x
    return PriceGRU(), prices if broken else (prices - 3000) / 30, labels, nn.CrossEntropyLoss()


class Memory(nn.Module):
    """Looks up a key by attention over pairs of keys and values; the first column of the input is the question."""

    def __init__(self, keys: int, values: int, width: int, twice: bool) -> None:
        super().__init__()
        self.keys, self.values = nn.Embedding(keys, width), nn.Embedding(values, width)
        self.attend = Lookup(width, twice)
        self.out = nn.Linear(width, values)

    def forward(self, x: Tensor) -> Tensor:
        question, keys, values = x[:, :1], x[:, 1::2], x[:, 2::2]
        return self.out(self.attend(self.keys(question), self.keys(keys), self.values(values)).squeeze(1))


class Lookup(nn.Module):
    """Attention with projections; its weights can go through the softmax twice."""

    def __init__(self, width: int, twice: bool) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.twice = twice

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        weights = (self.q(query) @ self.k(key).transpose(1, 2) * query.shape[2] ** -0.5).softmax(-1)
        return (weights.softmax(-1) if self.twice else weights) @ self.v(value)


def memory_softmax_twice(broken: bool = True, batch: int = 0) -> Case:
    """The attention weights go through a second softmax, which makes them nearly uniform."""
    torch.manual_seed(0)
    draw = generator(7200 + batch)
    keys = torch.rand(96, 24, generator=draw).argsort(1)[:, :20]
    values = torch.randint(6, (96, 20), generator=draw)
    asked = torch.randint(20, (96, 1), generator=draw)
    x = torch.cat([keys.gather(1, asked), torch.stack([keys, values], 2).flatten(1)], 1)
    return Memory(24, 6, 32, broken), x, values.gather(1, asked).squeeze(1), nn.CrossEntropyLoss()


class MaskedBlock(nn.Module):
    """Pre-norm self-attention under a mask, and an MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, attn_mask=hidden, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class CausalTagger(nn.Module):
    """Tags each word from the words up to it."""

    def __init__(self, diagonal: bool) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(24, 32), nn.Embedding(12, 32)
        self.blocks = nn.ModuleList(MaskedBlock(32) for _ in range(2))
        self.norm, self.tags = nn.LayerNorm(32), nn.Linear(32, 4)
        self.diagonal = diagonal

    def forward(self, words: Tensor) -> Tensor:
        length = words.shape[1]
        seen = torch.eye(length) if self.diagonal else torch.ones(length, length).tril()
        x = self.embed(words) + self.positions.weight[:length]
        for block in self.blocks:
            x = block(x, seen == 0)
        return self.tags(self.norm(x)).flatten(0, 1)


def tagger_mask_of_the_diagonal(broken: bool = True, batch: int = 0) -> Case:
    """The mask is the identity and not the lower triangle: each word sees itself alone."""
    torch.manual_seed(0)
    words = torch.randint(24, (64, 12), generator=generator(7300 + batch))
    first = (words[:, :1] % 4).expand_as(words)
    return CausalTagger(broken), words, first.flatten(), nn.CrossEntropyLoss()


class Ordered(nn.Module):
    """A post-norm encoder over events; its position embedding can be forgotten."""

    def __init__(self, forgotten: bool) -> None:
        super().__init__()
        self.embed, self.positions = nn.Linear(6, 32), nn.Embedding(10, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, "gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.fc = nn.Linear(32, 6)
        self.forgotten = forgotten

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = x if self.forgotten else x + self.positions.weight[: x.shape[1]]
        return self.fc(self.encoder(x).mean(1))


def events_positions_never_added(broken: bool = True, batch: int = 0) -> Case:
    """The position embedding is made and never added: the encoder cannot tell the order of the events."""
    torch.manual_seed(0)
    kinds = torch.rand(96, 6, generator=generator(7400 + batch)).argsort(1)
    x = 2.2 * F.one_hot(kinds, 6).float()
    return Ordered(broken), x, kinds[:, 0], nn.CrossEntropyLoss()
