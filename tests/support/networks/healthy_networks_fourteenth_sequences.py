"""The fourteenth set's healthy networks of our own over sounds, words and time series, as practitioners write them."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fifth_parts import Case, generator, sentences, sound

OWN: dict[str, Callable[[], Case]] = {}
own = sound(OWN)


@own
def spoken_commands_of_waves() -> Case:
    """M5 of Dai et al. as in PyTorch's tutorial: one second of sound at 8 kHz."""
    width = 32
    layers: list[nn.Module] = [nn.Conv1d(1, width, 80, stride=16), nn.BatchNorm1d(width), nn.ReLU(), nn.MaxPool1d(4)]
    for inputs, outputs in ((width, width), (width, 2 * width), (2 * width, 2 * width)):
        layers += [nn.Conv1d(inputs, outputs, 3), nn.BatchNorm1d(outputs), nn.ReLU(), nn.MaxPool1d(4)]
    model = nn.Sequential(
        *layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(2 * width, 6), nn.LogSoftmax(1)
    )  # fmt: skip
    draw = generator(270)
    labels = torch.arange(24) % 6
    time = torch.arange(8000) / 8000
    first, last = torch.tensor([200.0, 350.0, 600.0])[labels % 3], torch.tensor([250.0, 900.0])[labels // 3]
    turns = first[:, None] * time + 0.5 * (last - first)[:, None] * time.square()
    voice = torch.sin(2 * math.pi * (turns + torch.rand(24, 1, generator=draw)))
    loud = torch.exp(-((time - 0.35 - 0.3 * torch.rand(24, 1, generator=draw)) / 0.2).square())
    waves = loud * voice + 0.05 * torch.randn(24, 8000, generator=draw)
    return model, (waves / waves.std())[:, None], labels, F.nll_loss


class BagOfWords(nn.Module):
    """The text classifier of PyTorch's tutorial: the mean of the words' vectors, and a layer."""

    def __init__(self, words: int, classes: int, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(words, width, padding_idx=0)
        self.fc = nn.Linear(width, classes)
        nn.init.uniform_(self.embedding.weight, -0.5, 0.5)
        nn.init.uniform_(self.fc.weight, -0.5, 0.5)
        nn.init.zeros_(self.fc.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.embedding(x))


@own
def bag_of_words_of_news() -> Case:
    return BagOfWords(40, 2), *sentences(0), F.cross_entropy


class Translator(nn.Module):
    """The Transformer of PyTorch's translation tutorial; the second row of a pair is the translation so far."""

    def __init__(self, words: int, width: int = 64, length: int = 64) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(words, width), nn.Embedding(words, width)
        pace = torch.exp(-math.log(10000) * torch.arange(0, width, 2) / width) * torch.arange(length)[:, None]
        self.register_buffer("positions", torch.stack([pace.sin(), pace.cos()], 2).flatten(1))
        self.drop = nn.Dropout(0.1)
        self.transformer = nn.Transformer(width, 4, 2, 2, 128, dropout=0.1, batch_first=True)
        self.generator = nn.Linear(width, words)
        self.scale = width**0.5
        for weight in self.parameters():
            if weight.dim() > 1:
                nn.init.xavier_uniform_(weight)

    def forward(self, pairs: Tensor) -> Tensor:
        positions = self.get_buffer("positions")[: pairs.shape[2]]
        source = self.drop(self.source(pairs[:, 0]) * self.scale + positions)
        target = self.drop(self.target(pairs[:, 1]) * self.scale + positions)
        future = nn.Transformer.generate_square_subsequent_mask(pairs.shape[2])
        return self.generator(self.transformer(source, target, tgt_mask=future, tgt_is_causal=True)).flatten(0, 1)


@own
def translator_of_the_tutorial() -> Case:
    source = torch.randint(3, 60, (32, 12), generator=generator(271))
    target = (source * 5) % 57 + 3
    begun = torch.cat([torch.full((32, 1), 1), target[:, :-1]], 1)
    return Translator(60), torch.stack([source, begun], 1), target.flatten(), F.cross_entropy


class GatedLayer(nn.Module):
    """A layer of WaveNet: a gated causal convolution, what goes on and what is kept for the end."""

    def __init__(self, width: int, kept: int, dilation: int) -> None:
        super().__init__()
        self.dilation = dilation
        self.filter, self.gate = (nn.Conv1d(width, width, 2, dilation=dilation) for _ in range(2))
        self.on, self.keep = nn.Conv1d(width, width, 1), nn.Conv1d(width, kept, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        past = F.pad(x, (self.dilation, 0))
        out = torch.tanh(self.filter(past)) * torch.sigmoid(self.gate(past))
        return x + self.on(out), self.keep(out)


class WaveNet(nn.Module):
    """The next sample of a sound, of which the samples are among 64 levels."""

    def __init__(self, levels: int = 64, width: int = 32, kept: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(levels, width)
        self.layers = nn.ModuleList(GatedLayer(width, kept, 2 ** (i % 5)) for i in range(10))
        self.head = nn.Sequential(nn.ReLU(), nn.Conv1d(kept, kept, 1), nn.ReLU(), nn.Conv1d(kept, levels, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).transpose(1, 2)
        total: Tensor | float = 0.0
        for layer in self.layers:
            x, kept = layer(x)
            total = total + kept
        return self.head(total)


@own
def wavenet_of_tones() -> Case:
    draw = generator(272)
    pace = 0.1 + 0.3 * torch.rand(8, 1, generator=draw)
    wave = torch.sin(pace * torch.arange(129) + 6.3 * torch.rand(8, 1, generator=draw))
    wave = 0.8 * wave + 0.03 * torch.randn(8, 129, generator=draw)
    levels = ((wave + 1) * 32).long().clamp(0, 63)
    return WaveNet(), levels[:, :-1], levels[:, 1:], F.cross_entropy


class ForecastBlock(nn.Module):
    """A generic block of N-BEATS: what it explains of the past, and its share of the forecast."""

    def __init__(self, past: int, ahead: int, width: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for i in range(4):
            layers += [nn.Linear(width if i else past, width), nn.ReLU()]
        self.body = nn.Sequential(*layers)
        self.backcast, self.forecast = nn.Linear(width, past), nn.Linear(width, ahead)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(x)
        return self.backcast(hidden), self.forecast(hidden)


class NBeats(nn.Module):
    """Blocks, each of which sees what the blocks before have left over."""

    def __init__(self, past: int, ahead: int, width: int = 64, blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ForecastBlock(past, ahead, width) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor | float = 0.0
        for block in self.blocks:
            explained, share = block(x)
            x, total = x - explained, total + share
        return total


@own
def forecast_by_leftovers() -> Case:
    """Hours of a week with days and a trend, and the next twelve."""
    draw = generator(273)
    time = torch.arange(60.0)
    shift = 6.3 * torch.rand(64, 1, generator=draw)
    values = torch.sin(2 * math.pi * time / 24 + shift) + 0.02 * torch.randn(64, 1, generator=draw) * (time - 30)
    values = values + 0.1 * torch.randn(64, 60, generator=draw)
    values = (values - values.mean()) / values.std()
    return NBeats(48, 12), values[:, :48], values[:, 48:], F.mse_loss
