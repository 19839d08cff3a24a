"""The fifteenth set's healthy networks of our own over words, purchases and series, as practitioners write them."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fifth_parts import Case, generator, sound

OWN: dict[str, Callable[[], Case]] = {}
own = sound(OWN)


class Names(nn.Module):
    """PyTorch's tutorial: a plain recurrent network over letters, whose last state says the language."""

    def __init__(self, letters: int, width: int, classes: int) -> None:
        super().__init__()
        self.letters = letters
        self.rnn = nn.RNN(letters, width, batch_first=True)
        self.h2o = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        _, last = self.rnn(F.one_hot(x, self.letters).float())
        return self.h2o(last[0]).log_softmax(1)


@own
def names_by_plain_recurrence() -> Case:
    """Names of eight letters, which each language draws with other frequencies."""
    draw = generator(320)
    labels = torch.arange(96) % 4
    frequent = (1.5 * torch.randn(4, 26, generator=draw)).softmax(1)
    return Names(26, 128, 4), torch.multinomial(frequent[labels], 8, True, generator=draw), labels, F.nll_loss


class Purchases(nn.Module):
    """SASRec of Kang and McAuley: causal attention over what was bought, scored against the goods' own vectors."""

    def __init__(self, goods: int, length: int, width: int = 48) -> None:
        super().__init__()
        self.goods = nn.Embedding(goods, width, padding_idx=0)
        self.places = nn.Embedding(length, width)
        for embedding in (self.goods, self.places):
            nn.init.normal_(embedding.weight, std=width**-0.5)
        with torch.no_grad():
            self.goods.weight[0] = 0
        self.drop = nn.Dropout(0.2)
        layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.2, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(width), enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        future = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        hidden = self.goods(x) * self.goods.embedding_dim**0.5 + self.places(torch.arange(x.shape[1]))
        hidden = self.encoder(self.drop(hidden), mask=future, is_causal=True)
        return (hidden @ self.goods.weight.T).flatten(0, 1)


@own
def purchases_by_causal_attention() -> Case:
    """Buyers go through one of six catalogs in order and sometimes leave out a thing; short stories end in padding."""
    draw = generator(321)
    steps = 1 + (torch.rand(48, 16, generator=draw) < 0.15).long()
    catalog, start = torch.randint(6, (48, 1), generator=draw), torch.randint(12, (48, 1), generator=draw)
    bought = 1 + 12 * catalog + (start + steps.cumsum(1)) % 12
    bought = bought.masked_fill(torch.arange(16) >= torch.randint(8, 17, (48, 1), generator=draw), 0)
    following = bought[:, 1:].masked_fill(bought[:, 1:] == 0, -100)
    return Purchases(73, 15), bought[:, :-1], following.flatten(), F.cross_entropy


class Sales(nn.Module):
    """DeepAR of Salinas et al.: a recurrent network with the mean and the width of the next value."""

    def __init__(self, columns: int, width: int = 40) -> None:
        super().__init__()
        self.lstm = nn.LSTM(columns, width, num_layers=2, batch_first=True, dropout=0.1)
        self.mean, self.raw = nn.Linear(width, 1), nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.lstm(x)
        return torch.cat([self.mean(hidden), F.softplus(self.raw(hidden)) + 1e-4], 2)


def bell(output: Tensor, targets: Tensor) -> Tensor:
    """Return the mean negative log likelihood of values under bells of these means and widths."""
    mean, width = output.unbind(2)
    return -torch.distributions.Normal(mean, width).log_prob(targets).mean()


@own
def sales_by_autoregression() -> Case:
    """Six weeks of daily sales beside the day of the week as sine and cosine."""
    draw = generator(322)
    day = 2 * math.pi * torch.arange(43) / 7
    sales = torch.sin(day + 6.3 * torch.rand(48, 1, generator=draw)) + 0.7 * torch.randn(48, 1, generator=draw)
    sales = sales + 0.1 * torch.randn(48, 43, generator=draw)
    sales = (sales - sales.mean()) / sales.std()
    calendar = torch.stack([day.sin(), day.cos()], 1).expand(48, -1, -1)
    return Sales(3), torch.cat([sales[:, :-1, None], calendar[:, 1:]], 2), sales[:, 1:], bell


class BeatBlock(nn.Module):
    """A residual block of one-dimensional convolutions, with dropout between."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(inputs, outputs, 7, stride=2, padding=3, bias=False), nn.BatchNorm1d(outputs), nn.ReLU(),
            nn.Dropout(0.1), nn.Conv1d(outputs, outputs, 7, padding=3, bias=False), nn.BatchNorm1d(outputs),
        )  # fmt: skip
        self.short = nn.Sequential(nn.Conv1d(inputs, outputs, 1, stride=2, bias=False), nn.BatchNorm1d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.short(x))


@own
def heart_beats_by_residual_convolutions() -> Case:
    """Two leads of heart beats: regular, irregular, fast, and with inverted waves."""
    model = nn.Sequential(
        nn.Conv1d(2, 16, 15, stride=2, padding=7, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.MaxPool1d(3, 2, 1),
        BeatBlock(16, 32), BeatBlock(32, 64), BeatBlock(64, 64), nn.AdaptiveAvgPool1d(1), nn.Flatten(),
        nn.Linear(64, 4),
    )  # fmt: skip
    draw = generator(323)
    labels = torch.arange(32) % 4
    gaps = torch.where(labels == 2, 60.0, 110.0)[:, None] + (5 + 25 * (labels == 1))[:, None] * torch.randn(
        32, 12, generator=draw
    )
    beats = gaps.clamp(min=30).cumsum(1)
    time = torch.arange(600)[:, None]
    sharp = torch.exp(-((time - beats[:, None]) / 4).square()).sum(2)
    late = torch.exp(-((time - beats[:, None] - 25) / 8).square()).sum(2)
    lead = sharp + 0.4 * torch.where(labels == 3, -1.0, 1.0)[:, None] * late
    leads = torch.stack([lead, 0.6 * lead], 1) + 0.08 * torch.randn(32, 2, 600, generator=draw)
    leads = (leads - leads.mean(2, keepdim=True)) / leads.std(2, keepdim=True)
    return model, leads, labels, F.cross_entropy


class Attend(nn.Module):
    """A recurrent network in both directions and the weighted mean of its states, by a learned question."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.gru = nn.GRU(inputs, width, bidirectional=True, batch_first=True)
        self.project = nn.Linear(2 * width, 2 * width)
        self.question = nn.Linear(2 * width, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.gru(x)
        weights = self.question(torch.tanh(self.project(states))).softmax(1)
        return (weights * states).sum(1)


class Documents(nn.Module):
    """Yang et al.: words make sentences, sentences make a document."""

    def __init__(self, words: int, classes: int, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.sentence, self.document = Attend(width, width), Attend(2 * width, width)
        self.head = nn.Linear(2 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        sentences = self.sentence(self.embed(x.flatten(0, 1))).unflatten(0, x.shape[:2])
        return self.head(self.document(sentences))


@own
def documents_by_hierarchical_attention() -> Case:
    """Six sentences of ten words, of which a third are of the document's theme."""
    draw = generator(324)
    labels = torch.arange(48) % 4
    words = torch.randint(20, 100, (48, 6, 10), generator=draw)
    theme = 5 * labels[:, None, None] + torch.randint(5, words.shape, generator=draw)
    words = torch.where(torch.rand(words.shape, generator=draw) < 0.33, theme, words)
    return Documents(100, 4), words, labels, F.cross_entropy
