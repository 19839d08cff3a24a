"""The twelfth set's broken networks over tables, points, graphs and pairs."""

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fifth_parts import Case, categories, generator, table


class PointNet(nn.Module):
    """The class of a cloud of points: the same perceptron for each point, the largest values, and a linear layer."""

    def __init__(self, classes: int, width: int = 32, depth: int = 24) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for i in range(depth):
            layers += [nn.Conv1d(width if i else 3, width, 1), nn.ReLU()]
        self.points = nn.Sequential(*layers)
        self.to_classes = nn.Linear(width, classes)

    def forward(self, clouds: Tensor) -> Tensor:
        return self.to_classes(self.points(clouds).amax(2))


def pointnet_weights_without_gain(broken: bool = True, batch: int = 0) -> Case:
    """A deep PointNet with ReLU, whose layers keep the small weights that PyTorch draws, without the gain of ReLU."""
    torch.manual_seed(0)
    model = PointNet(4)
    if not broken:
        for layer in model.points:
            if isinstance(layer, nn.Conv1d):
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
                nn.init.zeros_(layer.bias)
    shapes = torch.randn(4, 3, 3, generator=generator(62))
    draw = generator(1000 + batch)
    labels = torch.randint(4, (48,), generator=draw)
    return (
        model,
        torch.einsum("nij,njk->nik", shapes[labels], torch.randn(48, 3, 16, generator=draw)) / 1.7,
        labels,
        F.cross_entropy,
    )


class ColumnTokens(nn.Module):
    """A Transformer over the columns of a table, each a token, and a token for the answer."""

    def __init__(self, columns: int, classes: int, width: int = 32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(columns, width) / width**0.5)
        self.bias = nn.Parameter(torch.randn(columns, width) / width**0.5)
        self.answer = nn.Parameter(torch.randn(1, 1, width) / width**0.5)
        layer = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, rows: Tensor) -> Tensor:
        tokens = rows[:, :, None] * self.weight + self.bias
        x = self.encoder(torch.cat([self.answer.expand(len(rows), -1, -1), tokens], 1))
        return self.head(self.norm(x[:, 0]))


def tabular_transformer_missing_values(broken: bool = True, batch: int = 0) -> Case:
    """A Transformer over the columns of a table, some of whose values are missing: NaN, or zero in the twin."""
    torch.manual_seed(0)
    rows, classes = categories(batch)
    missing = torch.rand(rows.shape, generator=generator(2000 + batch)) < 0.01
    return ColumnTokens(8, 4), rows.masked_fill(missing, float("nan") if broken else 0.0), classes, F.cross_entropy


class Pairs(nn.Module):
    """The cosines of all pairs of two views, over a temperature."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.projector = nn.Linear(width, 32)

    def forward(self, views: Tensor) -> Tensor:
        first, second = F.normalize(self.projector(self.encoder(views)), dim=2).unbind(1)
        return first @ second.T / 0.1


def contrastive_inputs_far_from_zero(broken: bool = True, batch: int = 0) -> Case:
    """A contrastive encoder of measurements around 300 (temperatures in kelvin) that nobody centered."""
    torch.manual_seed(0)
    draw = generator(1000 + batch)
    first = torch.randn(64, 16, generator=draw)
    views = torch.stack([first, first + 0.3 * torch.randn(64, 16, generator=draw)], 1)
    return Pairs(), views + 300 if broken else views, torch.arange(64), F.cross_entropy


class Factorization(nn.Module):
    """How much a user likes an item: the product of their vectors and a bias for each."""

    def __init__(self, users: int, items: int, std: float, width: int = 8) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(users, width), nn.Embedding(items, width)
        self.user_bias, self.item_bias = nn.Embedding(users, 1), nn.Embedding(items, 1)
        for part in (self.users, self.items):
            nn.init.normal_(part.weight, std=std)
        for part in (self.user_bias, self.item_bias):
            nn.init.zeros_(part.weight)

    def forward(self, pairs: Tensor) -> Tensor:
        user, item = pairs.unbind(1)
        bias = self.user_bias(user) + self.item_bias(item)
        return (self.users(user) * self.items(item)).sum(1) + bias.squeeze(1)


def factorization_both_tables_zero(broken: bool = True, batch: int = 0) -> Case:
    """A recommender whose vectors of users and of items are all zero: neither gets a gradient from the other."""
    torch.manual_seed(0)
    fixed, draw = generator(63), generator(1000 + batch)
    users, items = torch.randn(40, 3, generator=fixed), torch.randn(30, 3, generator=fixed)
    pairs = torch.stack([torch.randint(40, (512,), generator=draw), torch.randint(30, (512,), generator=draw)], 1)
    ratings = (users[pairs[:, 0]] * items[pairs[:, 1]]).sum(1) / 1.7
    return Factorization(40, 30, 0.0 if broken else 0.3), pairs, ratings, F.mse_loss


class GraphConvolution(nn.Module):
    """The layer of Kipf and Welling: neighbors weighted by the roots of both degrees, a linear map and ReLU."""

    def __init__(self, inputs: int, outputs: int, broken: bool) -> None:
        super().__init__()
        self.broken = broken
        self.linear = nn.Linear(inputs, outputs)
        nn.init.kaiming_normal_(self.linear.weight, nonlinearity="relu")

    def forward(self, nodes: Tensor, links: Tensor) -> Tensor:
        if not self.broken:
            links = links + torch.eye(len(links))
        roots = links.sum(1).pow(-0.5)
        return F.relu(self.linear(roots[:, None] * links * roots @ nodes))


class GraphNet(nn.Module):
    """Two graph convolutions over a graph that the network holds, and a class for each node."""

    def __init__(self, links: Tensor, broken: bool) -> None:
        super().__init__()
        self.conv1, self.conv2 = GraphConvolution(8, 48, broken), GraphConvolution(48, 48, broken)
        self.head = nn.Linear(48, 4)
        self.register_buffer("links", links)

    def forward(self, nodes: Tensor) -> Tensor:
        links = self.get_buffer("links")
        return self.head(self.conv2(self.conv1(nodes, links), links))


def gcn_isolated_nodes_divide_by_zero(broken: bool = True, batch: int = 0) -> Case:
    """A graph convolutional network without self-loops, which divides by the degree of isolated nodes, zero."""
    torch.manual_seed(0)
    fixed = generator(64)
    classes = torch.randint(4, (128,), generator=fixed)
    noise = torch.randn(128, 8, generator=generator(1000 + batch))
    nodes = 0.7 * torch.randn(4, 8, generator=fixed)[classes] + noise
    chance = torch.where(classes[:, None] == classes[None], 0.08, 0.004)
    links = (torch.rand(128, 128, generator=fixed) < chance).triu(1).float()
    return GraphNet(links + links.T, broken), nodes, classes, F.cross_entropy


class ResidualLayer(nn.Module):
    """A residual block of a perceptron."""

    def __init__(self, width: int, broken: bool) -> None:
        super().__init__()
        self.broken = broken
        self.norm = nn.LayerNorm(width)
        self.branch = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        out = self.branch(self.norm(x))
        return x * out if self.broken else x + out


def residual_mlp_multiplies_shortcut(broken: bool = True, batch: int = 0) -> Case:
    """A residual perceptron of a table in which the shortcut is multiplied with the branch, not added."""
    torch.manual_seed(0)
    blocks = nn.Sequential(*(ResidualLayer(64, broken) for _ in range(10)))
    model = nn.Sequential(OrderedDict(enter=nn.Linear(8, 64), blocks=blocks, leave=nn.Linear(64, 1)))
    return model, *table(batch), F.mse_loss


class ColorField(nn.Module):
    """The color at a place of a picture: norm, features of sines, and a perceptron."""

    def __init__(self, broken: bool, width: int = 64) -> None:
        super().__init__()
        self.enter_norm = nn.LayerNorm(2) if broken else nn.BatchNorm1d(2)
        self.enter = nn.Linear(2, width)
        self.body = nn.Sequential(nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 3))
        nn.init.normal_(self.enter.weight, std=1.5)

    def forward(self, places: Tensor) -> Tensor:
        return self.body(self.enter(self.enter_norm(places)))


def color_field_layer_norm_of_two_coordinates(broken: bool = True, batch: int = 0) -> Case:
    """A network from places to colors, with a layer norm over the two coordinates: only their order is left."""
    torch.manual_seed(0)
    places = 2 * torch.rand(256, 2, generator=generator(1000 + batch)) - 1
    waves = torch.randn(2, 6, generator=generator(67)) * 2
    colors = torch.sin(places @ waves) @ torch.randn(6, 3, generator=generator(68)) / 1.7
    return ColorField(broken), places, colors, F.mse_loss


class Memory(nn.Module):
    """The class of the entry of a memory that fits a question best, by attention."""

    def __init__(self, broken: bool, question: int, classes: int, width: int = 32) -> None:
        super().__init__()
        self.broken, self.question = broken, question
        self.to_query, self.to_key = nn.Linear(question, width), nn.Linear(question, width)
        self.to_value = nn.Linear(classes, width)
        self.answer = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, classes))

    def forward(self, x: Tensor) -> Tensor:
        entries, kinds = x[:, 1:, : self.question], x[:, 1:, self.question :]
        scores = self.to_key(entries) @ self.to_query(x[:, 0, : self.question])[:, :, None]
        weights = (scores / 32**0.5).softmax(1)
        if self.broken:
            weights = weights.detach()
        return self.answer((weights * self.to_value(kinds)).sum(1))


def memory_attention_detached(broken: bool = True, batch: int = 0) -> Case:
    """A memory that is asked by attention, whose weights are detached: queries and keys never learn."""
    torch.manual_seed(0)
    draw = generator(1000 + batch)
    entries = torch.randn(128, 6, 8, generator=draw)
    kinds = torch.randint(4, (128, 6), generator=draw)
    asked = torch.randint(6, (128,), generator=draw)
    rows = torch.arange(128)
    turn = torch.linalg.qr(torch.randn(8, 8, generator=generator(69)))[0]
    question = torch.cat([entries[rows, asked] @ turn, torch.zeros(128, 4)], 1)
    memory = torch.cat([entries, F.one_hot(kinds, 4).float()], 2)
    return Memory(broken, 8, 4), torch.cat([question[:, None], memory], 1), kinds[rows, asked], F.cross_entropy
