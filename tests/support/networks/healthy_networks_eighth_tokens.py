"""Ten sound networks of the eighth set for tokens, time series, tables and graphs, written for it."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fifth_parts import Case, categories, chains, generator, sentences, series, sound, table

OWN: dict[str, Callable[[], Case]] = {}


class SinkAttention(nn.Module):
    """Attention whose softmax has one more place per head, a learned score that attends to nothing."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.o = nn.RMSNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.sinks = nn.Parameter(torch.full((1, heads, 1, 1), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.sinks.shape[1]
        q, k, v = (part.unflatten(2, (heads, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, 2))
        scores = q @ k.transpose(2, 3) * q.shape[3] ** -0.5
        scores = scores.masked_fill(torch.ones_like(scores[0, 0]).triu(1) > 0, float("-inf"))
        scores = torch.cat([scores, self.sinks.expand(len(x), -1, x.shape[1], 1)], 3)
        return x + self.o((scores.softmax(3)[..., :-1] @ v).transpose(1, 2).flatten(2))


@sound(OWN)
def attention_sinks() -> Case:
    """Return a small decoder with attention sinks."""
    layers: list[nn.Module] = [nn.Embedding(50, 48)]
    for _ in range(2):
        layers += [SinkAttention(48, 4), Residual(nn.RMSNorm(48), nn.Linear(48, 96), nn.SiLU(), nn.Linear(96, 48))]
    layers += [nn.RMSNorm(48), nn.Linear(48, 50), nn.Flatten(0, 1)]
    return nn.Sequential(*layers), *chains(0, vocabulary=50), nn.CrossEntropyLoss()


class Residual(nn.Module):
    """Adds what the layers make of the input to it."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


class SpatialGate(nn.Module):
    """Half of the channels, mixed over the tokens by weights near zero and a bias of one, gates the other half."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.norm, self.tokens = nn.LayerNorm(width), nn.Linear(tokens, tokens)
        nn.init.normal_(self.tokens.weight, std=1e-4)
        nn.init.ones_(self.tokens.bias)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = x.chunk(2, 2)
        return value * self.tokens(self.norm(gate).transpose(1, 2)).transpose(1, 2)


class GatedText(nn.Module):
    """A gMLP for sentences."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.fc = nn.Embedding(40, 32), nn.Linear(32, 2)
        self.blocks = nn.Sequential(
            *(
                Residual(nn.LayerNorm(32), nn.Linear(32, 96), nn.GELU(), SpatialGate(20, 48), nn.Linear(48, 32))
                for _ in range(3)
            )
        )

    def forward(self, words: Tensor) -> Tensor:
        return self.fc(self.blocks(self.embed(words)).mean(1))


@sound(OWN)
def spatial_gates_near_one() -> Case:
    """Return a gMLP, whose gates start as ones by design."""
    return GatedText(), *sentences(0), nn.CrossEntropyLoss()


class ZeroReadout(nn.Module):
    """A GRU language model that scales a small embedding by the root of its width and reads out with zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.gru, self.readout = nn.Embedding(60, 64), nn.GRU(64, 64, batch_first=True), nn.Linear(64, 60)
        nn.init.normal_(self.embed.weight, std=64**-0.5)
        nn.init.zeros_(self.readout.weight)
        nn.init.zeros_(self.readout.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.readout(self.gru(8 * self.embed(tokens))[0]).flatten(0, 1)


@sound(OWN)
def readout_of_zeros() -> Case:
    """Return a language model with a readout that starts at zero, as maximal update parametrization has it."""
    return ZeroReadout(), *chains(0, vocabulary=60), nn.CrossEntropyLoss()


@sound(OWN)
def bag_of_few_words() -> Case:
    """Return an MLP on counts of words, nearly all of which are zero."""
    draw = generator(54)
    counts = torch.zeros(128, 400).scatter_add(1, torch.randint(400, (128, 12), generator=draw), torch.ones(128, 12))
    labels = (counts[:, :200].sum(1) > counts[:, 200:].sum(1)).long()
    model = nn.Sequential(
        nn.Linear(400, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)
    )
    return model, counts, labels, nn.CrossEntropyLoss()


@sound(OWN)
def thirty_orthogonal_layers() -> Case:
    """Return a plain network of thirty layers without norm or skip, whose orthogonal weights keep the signal."""
    layers: list[nn.Module] = []
    for i in range(30):
        layer = nn.Linear(48 if i else 8, 48)
        nn.init.orthogonal_(layer.weight, gain=nn.init.calculate_gain("leaky_relu", 0.5))
        nn.init.zeros_(layer.bias)
        layers += [layer, nn.LeakyReLU(0.5)]
    return nn.Sequential(*layers, nn.Linear(48, 4)), *categories(0), nn.CrossEntropyLoss()


class IdentityRNN(nn.Module):
    """A recurrent network of ReLUs whose recurrent weights start as the identity."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.fc = nn.RNN(4, 48, nonlinearity="relu", batch_first=True), nn.Linear(48, 4)
        nn.init.normal_(self.rnn.weight_ih_l0, std=0.05)
        nn.init.eye_(self.rnn.weight_hh_l0)
        nn.init.zeros_(self.rnn.bias_ih_l0)
        nn.init.zeros_(self.rnn.bias_hh_l0)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.rnn(x)[0][:, -1])


@sound(OWN)
def recurrent_identity() -> Case:
    """Return an IRNN."""
    return IdentityRNN(), *series(0), nn.CrossEntropyLoss()


class LinearRecurrence(nn.Module):
    """A diagonal linear recurrence with decays close to one, and a gate."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.value, self.gate = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)
        self.decay, self.out = nn.Parameter(torch.linspace(1.0, 5.0, width)), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y, decay = self.norm(x), torch.sigmoid(self.decay)
        state, states = torch.zeros_like(x[:, 0]), []
        for value in self.value(y).unbind(1):
            state = decay * state + (1 - decay.square()).sqrt() * value
            states.append(state)
        return x + self.out(torch.stack(states, 1) * F.silu(self.gate(y)))


class StateSpace(nn.Module):
    """Two layers of linear recurrences; the last step is classified."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.fc = nn.Linear(4, 32), nn.Linear(32, 4)
        self.layers = nn.Sequential(LinearRecurrence(32), LinearRecurrence(32))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.layers(self.embed(x))[:, -1])


@sound(OWN)
def linear_recurrences() -> Case:
    """Return a state space model for time series."""
    return StateSpace(), *series(0), nn.CrossEntropyLoss()


class Ordinal(nn.Module):
    """One score and sorted thresholds: the scores of an answer of at least each grade."""

    def __init__(self, grades: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 1))
        self.first, self.steps = nn.Parameter(torch.tensor(-1.0)), nn.Parameter(torch.zeros(grades - 2))

    def forward(self, x: Tensor) -> Tensor:
        thresholds = torch.cat([self.first[None], self.first + F.softplus(self.steps).cumsum(0)])
        return self.body(x) - thresholds


@sound(OWN)
def ordinal_grades() -> Case:
    """Return an ordinal regression with five grades."""
    x, wanted = table(0)
    levels = torch.tensor([-0.8, -0.3, 0.3, 0.8])
    return Ordinal(5), x, (wanted > levels).float(), nn.BCEWithLogitsLoss()


class Bootstrap(nn.Module):
    """Two views of each row; each is predicted from the other, whose embedding is detached by design."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(12, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32))
        self.predictor = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32))

    def forward(self, views: Tensor) -> Tensor:
        left, right = (self.encoder(view) for view in views.unbind(1))
        first = F.cosine_similarity(self.predictor(left), right.detach())
        return (first + F.cosine_similarity(self.predictor(right), left.detach())) / 2


@sound(OWN)
def stopped_gradient_by_design() -> Case:
    """Return SimSiam on two noisy views of rows."""
    x = torch.randn(128, 1, 12, generator=generator(55))
    views = x + 0.3 * torch.randn(128, 2, 12, generator=generator(56))
    return Bootstrap(), views, torch.zeros(128), lambda similarity, _: 1 - similarity.mean()


class EdgeConv(nn.Module):
    """The maximum over the nearest neighbours of an MLP of a point and its difference to the neighbour."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(2 * before, after), nn.LayerNorm(after), nn.LeakyReLU(0.2))

    def forward(self, x: Tensor) -> Tensor:
        nearest = torch.cdist(x, x).topk(5, largest=False).indices
        others = x[torch.arange(len(x))[:, None, None], nearest]
        own = x[:, :, None].expand_as(others)
        return self.mlp(torch.cat([own, others - own], 3)).amax(2)


class DynamicGraph(nn.Module):
    """Two edge convolutions, each on the neighbours by its own input, joined by their concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = EdgeConv(3, 24), EdgeConv(24, 32)
        self.fc = nn.Linear(56, 3)

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        return self.fc(torch.cat([first, self.second(first)], 2).amax(1))


@sound(OWN)
def graphs_of_nearest_points() -> Case:
    """Return a dynamic graph CNN on clouds that are stretched along one of three axes."""
    kind = torch.randint(3, (48,), generator=generator(57))
    clouds = torch.randn(48, 32, 3, generator=generator(58)) * (0.6 + F.one_hot(kind, 3))[:, None]
    return DynamicGraph(), clouds, kind, nn.CrossEntropyLoss()
