"""Broken networks of the seventh set for tables and graphs, each with a healthy twin."""

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fifth_parts import Case, generator, series, table


def signs_of_product(batch: int, n: int = 128, features: int = 6) -> tuple[Tensor, Tensor]:
    """Return columns, and whether the product of the first two is positive: no linear map can tell."""
    x = torch.randn(n, features, generator=generator(1000 + batch))
    return x, (x[:, 0] * x[:, 1] > 0).long()


class Highway(nn.Module):
    """Highway layers: a gate chooses between the transformed and the carried features."""

    def __init__(self, width: int, depth: int, bias: float) -> None:
        super().__init__()
        self.stem = nn.Linear(6, width)
        self.transforms = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.gates = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, 2)
        for gate in self.gates:
            nn.init.constant_(gate.bias, bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for transform, gate in zip(self.transforms, self.gates, strict=True):
            share = torch.sigmoid(gate(x))
            x = share * torch.relu(transform(x)) + (1 - share) * x
        return self.head(x)


def highway_gates_closed(broken: bool = True, batch: int = 0) -> Case:
    """The gates' bias is -20 and not -2: every layer carries its input through, and no transform learns."""
    torch.manual_seed(0)
    return Highway(48, 8, -20.0 if broken else -2.0), *signs_of_product(batch), nn.CrossEntropyLoss()


class DeepGCN(nn.Module):
    """Graph convolutions by a product with the normalized adjacency, with or without skips."""

    def __init__(self, width: int, depth: int, skip: bool) -> None:
        super().__init__()
        self.encode = nn.Linear(4, width)
        self.convs = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.classify = nn.Linear(width, 4)
        self.skip = skip

    def forward(self, graph: Tensor) -> Tensor:
        x, adjacency = self.encode(graph[..., :4]), graph[..., 4:]
        for conv, norm in zip(self.convs, self.norms, strict=True):
            y = F.relu(conv(adjacency @ norm(x)))
            x = x + y if self.skip else y
        return self.classify(x).flatten(0, 1)


def gcn_oversmooths(broken: bool = True, batch: int = 0) -> Case:
    """Sixteen averages over the neighbours without a skip: all nodes of a graph end with the same features."""
    torch.manual_seed(0)
    draw = generator(2000 + batch)
    kind = torch.randint(4, (8, 24), generator=draw)
    edges = (torch.rand(8, 24, 24, generator=draw) < 0.2).float()
    edges = ((edges + edges.transpose(1, 2) + torch.eye(24)) > 0).float()
    x = F.one_hot(kind, 4) + 0.4 * torch.randn(8, 24, 4, generator=draw)
    graph = torch.cat([x, edges / edges.sum(-1, keepdim=True)], 2)
    return DeepGCN(32, 16, not broken), graph, kind.flatten(), nn.CrossEntropyLoss()


class GatedMLP(nn.Module):
    """Gated residual blocks on a table."""

    def __init__(self, features: int, width: int, outputs: int) -> None:
        super().__init__()
        self.stem = nn.Linear(features, width)
        self.gates = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.values = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for gate, value in zip(self.gates, self.values, strict=True):
            x = x + F.silu(gate(x)) * value(x) / 4
        return self.head(x)


def gated_mlp_one_column_unscaled(broken: bool = True, batch: int = 0) -> Case:
    """One column of the table, an income, is in the thousands; the others are standardized."""
    torch.manual_seed(0)
    x, wanted = table(batch)
    scale = torch.ones(8)
    scale[3] = 4000.0 if broken else 1.0
    return GatedMLP(8, 64, 1), x * scale, wanted, nn.MSELoss()


class ResidualRegressor(nn.Module):
    """Pre-norm residual blocks on a table."""

    def __init__(self, width: int, flat: bool = False) -> None:
        super().__init__()
        self.stem = nn.Linear(8, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
            for _ in range(3)
        )
        self.head = nn.Linear(width, 1)
        self.flat = flat

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x).squeeze(1) if self.flat else self.head(x)


def regression_broadcasts_targets(broken: bool = True, batch: int = 0) -> Case:
    """The output is (128, 1) and the targets (128,): MSELoss broadcasts them to 128 times 128 differences."""
    torch.manual_seed(0)
    x, wanted = table(batch)
    return ResidualRegressor(64, flat=not broken), x, wanted.squeeze(1), nn.MSELoss()


class VarianceForecaster(nn.Module):
    """1-D convolutions over a series, and a head for the mean and the variance of what comes next."""

    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.convs = nn.Sequential(nn.Conv1d(4, 32, 5), nn.ReLU(), nn.Conv1d(32, 32, 5), nn.ReLU())
        self.head = nn.Linear(32, 2)
        self.broken = broken

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, spread = self.head(self.convs(x.transpose(1, 2)).mean(2)).unbind(1)
        return mean, spread if self.broken else F.softplus(spread) + 1e-3


def gaussian_head_raw_variance(broken: bool = True, batch: int = 0) -> Case:
    """The variance is the raw output of the head, without softplus: the logarithm of a negative number is NaN."""
    torch.manual_seed(0)
    x = series(batch)[0]

    def loss(output: tuple[Tensor, Tensor], wanted: Tensor) -> Tensor:
        mean, variance = output
        return 0.5 * (variance.log() + (wanted - mean).square() / variance).mean()

    return VarianceForecaster(broken), x, x[:, :, 0].mean(1), loss


class ListedBody(nn.Module):
    """Hidden layers in a Python list or in a ModuleList."""

    def __init__(self, width: int, depth: int, listed: bool) -> None:
        super().__init__()
        layers = [nn.Linear(width if i else 6, width) for i in range(depth)]
        self.layers = layers if listed else nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def mlp_layers_in_python_list(broken: bool = True, batch: int = 0) -> Case:
    """The hidden layers are in a Python list: the model does not register them, and no optimizer trains them."""
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module("body", ListedBody(32, 4, broken))
    model.add_module("head", nn.Linear(32, 2))
    return model, *signs_of_product(batch), nn.CrossEntropyLoss()


class Bag(nn.Module):
    """The mean of word embeddings and an MLP, with a probability for each label."""

    def __init__(self, softmax: bool) -> None:
        super().__init__()
        self.embed = nn.EmbeddingBag(40, 32)
        self.hidden, self.labels = nn.Linear(32, 64), nn.Linear(64, 6)
        self.softmax = softmax

    def forward(self, words: Tensor) -> Tensor:
        x = self.labels(F.relu(self.hidden(self.embed(words))))
        return x.softmax(1) if self.softmax else x.sigmoid()


def multilabel_softmax_then_bce(broken: bool = True, batch: int = 0) -> Case:
    """A softmax makes the probabilities of six independent labels sum to one, and BCELoss wants each by itself."""
    torch.manual_seed(0)
    words = torch.randint(40, (96, 12), generator=generator(3000 + batch))
    scores = torch.randn(40, 6, generator=generator(15))[words].mean(1)
    return Bag(broken), words, (scores > 0).float(), nn.BCELoss()


def autoencoder_std_of_a_transformer(broken: bool = True, batch: int = 0) -> Case:
    """All weights have a standard deviation of 0.02 as in a transformer, but no norm follows: the signal vanishes."""
    torch.manual_seed(0)
    sizes = (24, 64, 64, 64, 8, 64, 64, 64, 24)
    model = nn.Sequential()
    for i, (before, after) in enumerate(itertools.pairwise(sizes)):
        layer = nn.Linear(before, after)
        nn.init.normal_(layer.weight, std=0.02 if broken else (2 / before) ** 0.5)
        nn.init.zeros_(layer.bias)
        model.add_module(f"fc{i}", layer)
        if i < len(sizes) - 2:
            model.add_module(f"act{i}", nn.LeakyReLU(0.1))
    x = torch.randn(128, 4, generator=generator(1000 + batch)) @ torch.randn(4, 24, generator=generator(13)) / 2
    return model, x, x, nn.MSELoss()


class HashingAutoencoder(nn.Module):
    """An autoencoder whose code is eight bits."""

    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 8))
        self.decoder = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 48))
        self.broken = broken

    def forward(self, x: Tensor) -> Tensor:
        soft = torch.tanh(self.encoder(x))
        hard = torch.where(soft > 0, 1.0, -1.0)
        return self.decoder(hard if self.broken else soft + (hard - soft).detach())


def hashing_without_straight_through(broken: bool = True, batch: int = 0) -> Case:
    """The bits are cut hard without a straight-through gradient: the encoder never learns."""
    torch.manual_seed(0)
    bits = torch.randint(2, (128, 8), generator=generator(1000 + batch)) * 2.0 - 1
    noise = 0.2 * torch.randn(128, 48, generator=generator(1500 + batch))
    x = bits @ torch.randn(8, 48, generator=generator(17)) / 3 + noise
    return HashingAutoencoder(broken), x, x, nn.MSELoss()
