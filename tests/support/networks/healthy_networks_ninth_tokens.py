"""Ten sound networks of the ninth set for tokens, time series and tables, written for it."""

import copy
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fifth_parts import Case, chains, generator, sentences, series, sound, table

OWN: dict[str, Callable[[], Case]] = {}


class MaskedWords(nn.Module):
    """A small BERT; its classifier has the embedding's weights."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(24, width)
        nn.init.normal_(self.embed.weight, std=0.1)
        nn.init.normal_(self.positions.weight, std=0.1)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, "gelu", batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.transform, self.bias = nn.Linear(width, width), nn.Parameter(torch.zeros(vocabulary))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.encoder(self.norm(self.embed(tokens) + self.positions.weight))
        return (F.gelu(self.transform(x)) @ self.embed.weight.T + self.bias).flatten(0, 1)


@sound(OWN)
def words_mostly_ignored() -> Case:
    """Return a masked language model: 80 % of its targets are -100, which the loss leaves out."""
    tokens = chains(0, n=64, vocabulary=20)[0]
    hidden = torch.rand(tokens.shape, generator=generator(81)) < 0.2
    return (
        MaskedWords(21, 64),
        tokens.masked_fill(hidden, 20),
        tokens.masked_fill(~hidden, -100).flatten(),
        nn.CrossEntropyLoss(),
    )


class FrozenWords(nn.Module):
    """Frozen word vectors, an LSTM in both directions, and its maximum over the words that are no padding."""

    def __init__(self) -> None:
        super().__init__()
        vectors = torch.randn(40, 32, generator=generator(82))
        vectors[0] = 0
        self.embed = nn.Embedding.from_pretrained(vectors, padding_idx=0)
        self.lstm = nn.LSTM(32, 24, batch_first=True, bidirectional=True)
        self.fc = nn.Linear(48, 2)

    def forward(self, words: Tensor) -> Tensor:
        states = self.lstm(self.embed(words))[0]
        return self.fc(states.masked_fill((words == 0)[..., None], -math.inf).amax(1))


@sound(OWN)
def frozen_word_vectors() -> Case:
    """Return a reader of sentences with word vectors that are not trained."""
    return FrozenWords(), *sentences(0), nn.CrossEntropyLoss()


class WideAndDeep(nn.Module):
    """The sum of a linear model of crossed categories, which starts at zero, and an MLP on embeddings and numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Embedding(100, 1)
        nn.init.zeros_(self.wide.weight)
        self.tables = nn.ModuleList(nn.Embedding(10, 8) for _ in range(2))
        self.norm = nn.BatchNorm1d(4)
        self.deep = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x: Tensor) -> Tensor:
        left, right = x[:, 0].long(), x[:, 1].long()
        parts = [self.tables[0](left), self.tables[1](right), self.norm(x[:, 2:])]
        return (self.wide(10 * left + right) + self.deep(torch.cat(parts, 1))).squeeze(1)


@sound(OWN)
def wide_and_deep_columns() -> Case:
    """Return a model of two categories and four amounts of money, which a batch norm scales."""
    draw = generator(83)
    kinds = torch.randint(10, (256, 2), generator=draw)
    money = torch.exp(2 + torch.randn(256, 4, generator=draw))
    score = 2 * torch.randn(10, 10, generator=draw)[kinds[:, 0], kinds[:, 1]] + money[:, 0].log() - 2
    return WideAndDeep(), torch.cat([kinds.float(), money], 1), (score > 0).float(), nn.BCEWithLogitsLoss()


class Pointer(nn.Module):
    """An encoder of a list, and a decoder's question; the output is a score for each place of the list."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.GRU(4, 32, batch_first=True, bidirectional=True)
        self.question = nn.Linear(64, 48)
        self.place, self.score = nn.Linear(64, 48, bias=False), nn.Linear(48, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        states = self.encoder(x)[0]
        return self.score(torch.tanh(self.place(states) + self.question(states.mean(1))[:, None])).squeeze(2)


@sound(OWN)
def pointer_into_a_list() -> Case:
    """Return a pointer network that finds the place of the largest first value."""
    x = 1.5 * torch.randn(128, 10, 4, generator=generator(84))
    return Pointer(), x, x[:, :, 0].argmax(1), nn.CrossEntropyLoss()


class MomentumContrast(nn.Module):
    """Similarities of a view to the other one, by a frozen copy of the encoder, and to a bank of stored vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 32))
        self.teacher = copy.deepcopy(self.encoder).requires_grad_(False)
        self.register_buffer("bank", F.normalize(self.teacher(torch.randn(256, 24)), dim=1))

    def forward(self, views: Tensor) -> Tensor:
        question = F.normalize(self.encoder(views[:, 0]), dim=1)
        answer = F.normalize(self.teacher(views[:, 1]), dim=1)
        return torch.cat([(question * answer).sum(1, keepdim=True), question @ self.bank.T], 1) / 0.07


@sound(OWN)
def contrast_with_a_bank() -> Case:
    """Return MoCo on two noisy views of rows: the first score is to be the largest."""
    views = torch.randn(96, 1, 24, generator=generator(85)) + 0.5 * torch.randn(96, 2, 24, generator=generator(86))
    return MomentumContrast(), views, torch.zeros(96, dtype=torch.long), nn.CrossEntropyLoss()


@sound(OWN)
def risks_by_partial_likelihood() -> Case:
    """Return a Cox model: its loss compares the samples of a batch, and does not see a shift of all outputs."""
    x, risk = table(0, n=192)
    draw = generator(87)
    time = -torch.log(torch.rand(192, generator=draw)) * torch.exp(-2 * risk[:, 0])
    seen = (torch.rand(192, generator=draw) < 0.7).float()
    model = nn.Sequential(nn.Linear(8, 48), nn.SELU(), nn.Linear(48, 48), nn.SELU(), nn.Linear(48, 1, bias=False))

    def loss(output: Tensor, wanted: Tensor) -> Tensor:
        order = wanted[:, 0].argsort(descending=True)
        score, event = output.squeeze(1)[order], wanted[order, 1]
        return -((score - score.logcumsumexp(0)) * event).sum() / event.sum()

    return model, x, torch.stack([time, seen], 1), loss


class HardCode(nn.Module):
    """An autoencoder whose code is six choices of one in eight, drawn by Gumbel noise, straight through."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 48))
        self.decoder = nn.Sequential(nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 24))

    def forward(self, x: Tensor) -> Tensor:
        logits = self.encoder(x).unflatten(1, (6, 8))
        noise = -torch.empty_like(logits).exponential_().log() if self.training else 0.0
        shares = (logits + noise).softmax(2)
        code = F.one_hot(shares.argmax(2), 8) + shares - shares.detach()
        return self.decoder(code.flatten(1))


@sound(OWN)
def hard_choices_by_gumbel() -> Case:
    """Return an autoencoder with a discrete random code."""
    draw = generator(88)
    kind = torch.randint(6, (192,), generator=draw)
    x = 1.2 * torch.randn(6, 24, generator=draw)[kind] + 0.2 * torch.randn(192, 24, generator=draw)
    return HardCode(), x, x, nn.MSELoss()


class LinearBias(nn.Module):
    """Causal attention without positions; each head takes its slope times the distance from the scores (ALiBi)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.register_buffer("slopes", 2.0 ** -torch.arange(1, heads + 1)[:, None, None])

    def forward(self, x: Tensor) -> Tensor:
        steps = torch.arange(x.shape[1])
        distance = steps[:, None] - steps
        bias = (-self.slopes * distance).masked_fill(distance < 0, -math.inf)
        parts = self.qkv(self.norm1(x)).chunk(3, 2)
        q, k, v = (part.unflatten(2, (len(self.slopes), -1)).transpose(1, 2) for part in parts)
        weights = (q @ k.transpose(2, 3) * q.shape[3] ** -0.5 + bias).softmax(3)
        x = x + self.out((weights @ v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


@sound(OWN)
def slopes_in_place_of_positions() -> Case:
    """Return a language model with linear biases and no embedding of positions."""
    layers = [nn.Embedding(50, 48), LinearBias(48, 4), LinearBias(48, 4), nn.LayerNorm(48), nn.Linear(48, 50)]
    return nn.Sequential(*layers, nn.Flatten(0, 1)), *chains(0, vocabulary=50), nn.CrossEntropyLoss()


class FieldTagger(nn.Module):
    """Scores of three tags per step by a GRU, and the scores of their transitions, which start at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.tags = nn.GRU(4, 24, batch_first=True, bidirectional=True), nn.Linear(48, 3)
        self.moves = nn.Parameter(torch.zeros(3, 3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.tags(self.gru(x)[0]), self.moves


@sound(OWN)
def field_of_tags() -> Case:
    """Return a tagger with a conditional random field, whose loss sums over all ways to tag a series."""
    x = series(0)[0]
    wanted = torch.bucketize(x[..., 0].cumsum(1) / 3, torch.tensor([-1.0, 1.0]))

    def loss(output: tuple[Tensor, Tensor], tags: Tensor) -> Tensor:
        scores, moves = output
        path = scores.gather(2, tags[..., None]).sum((1, 2)) + moves[tags[:, :-1], tags[:, 1:]].sum(1)
        ways = scores[:, 0]
        for step in scores[:, 1:].unbind(1):
            ways = (ways[:, :, None] + moves).logsumexp(1) + step
        return (ways.logsumexp(1) - path).mean() / scores.shape[1]

    return FieldTagger(), x, wanted, loss


class Hamiltonian(nn.Module):
    """An energy of place and momentum; the output is its derivative, so that the last bias has no part in it."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, state: Tensor) -> Tensor:
        with torch.enable_grad():
            state = state.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.energy(state).sum(), state, create_graph=True)
        return torch.stack([slope[:, 1], -slope[:, 0]], 1)


@sound(OWN)
def energy_of_a_pendulum() -> Case:
    """Return a Hamiltonian network that learns the motion of a pendulum."""
    state = 2 * torch.randn(192, 2, generator=generator(89)).clamp(-1.5, 1.5)
    return Hamiltonian(), state, torch.stack([state[:, 1], -torch.sin(state[:, 0])], 1), nn.MSELoss()
