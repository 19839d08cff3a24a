"""Networks of the tenth set on tables, ratings, graphs and point clouds, each with its fault or mended."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fault_cases import Plain
from fifth_parts import Case, generator, table

STATIONS = 24
SIZES = (24, 20, 6)  # users, items, hours


def mlp_dropout_of_keep_probability(broken: bool = True, batch: int = 0) -> Case:
    torch.manual_seed(0)
    share = 0.9 if broken else 0.1
    layers: list[nn.Module] = []
    for inputs in (8, 128, 128, 128):
        layers += [nn.Linear(inputs, 128), nn.ReLU(), nn.Dropout(share)]
    return Plain(layers, nn.Linear(128, 1)), *table(batch), F.mse_loss


class Regressor(nn.Module):
    """An MLP with one output, which is a column or, if squeezed, a plain vector."""

    def __init__(self, squeeze: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.head = nn.Linear(64, 1)
        self.squeeze = squeeze

    def forward(self, x: Tensor) -> Tensor:
        out = self.head(self.layers(x))
        return out.squeeze(1) if self.squeeze else out


def square_error(output: Tensor, targets: Tensor) -> Tensor:
    return ((output - targets) ** 2).mean()


def regressor_error_of_all_pairs(broken: bool = True, batch: int = 0) -> Case:
    torch.manual_seed(0)
    columns, targets = table(batch)
    return Regressor(squeeze=not broken), columns, targets[:, 0], square_error


class Interactions(nn.Module):
    """The products of the vectors of each pair of columns, summed."""

    def __init__(self, registered: bool) -> None:
        super().__init__()
        vectors = [nn.Embedding(size, 8) for size in SIZES]
        for embedding in vectors:
            nn.init.normal_(embedding.weight, std=0.3)
        self.vectors = nn.ModuleList(vectors) if registered else vectors

    def forward(self, columns: Tensor) -> Tensor:
        vectors = torch.stack([embedding(columns[:, i]) for i, embedding in enumerate(self.vectors)], 1)
        return (vectors.sum(1).square() - vectors.square().sum(1)).sum(1) / 2


class FactorizationMachine(nn.Module):
    """A bias, a weight for each value of a column, and the interactions of the columns."""

    def __init__(self, registered: bool) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))
        self.weights = nn.ModuleList(nn.Embedding(size, 1) for size in SIZES)
        for embedding in self.weights:
            nn.init.normal_(embedding.weight, std=0.1)
        self.interactions = Interactions(registered)

    def forward(self, columns: Tensor) -> Tensor:
        first = sum(embedding(columns[:, i])[:, 0] for i, embedding in enumerate(self.weights))
        return self.bias + first + self.interactions(columns)


def ratings(batch: int, n: int = 512) -> tuple[Tensor, Tensor]:
    """Return users, items and hours, and ratings that depend on the pair of user and item."""
    fixed = generator(11)
    tastes = [torch.randn(size, 4, generator=fixed) for size in SIZES]
    draw = generator(1000 + batch)
    columns = torch.stack([torch.randint(size, (n,), generator=draw) for size in SIZES], 1)
    users, items, hours = (taste[columns[:, i]] for i, taste in enumerate(tastes))
    return columns, (users * items).sum(1) / 2 + 0.2 * hours[:, 0]


def recommender_vectors_in_list(broken: bool = True, batch: int = 0) -> Case:
    torch.manual_seed(0)
    return FactorizationMachine(registered=not broken), *ratings(batch), F.mse_loss


class GraphLayer(nn.Module):
    """relu(own(h) + neighbors(A h)) with the sum or the mean of the neighbors."""

    def __init__(self, inputs: int, width: int, mean: bool) -> None:
        super().__init__()
        self.own, self.neighbors = nn.Linear(inputs, width), nn.Linear(inputs, width, bias=False)
        self.mean = mean

    def forward(self, h: Tensor, links: Tensor) -> Tensor:
        messages = links @ h
        if self.mean:
            messages = messages / links.sum(1, keepdim=True).clamp(min=1)
        return F.relu(self.own(h) + self.neighbors(messages))


def network_of_stations() -> Tensor:
    """Return the links of a dense graph: each station with the 14 that are nearest on a ring."""
    places = torch.arange(STATIONS)
    apart = (places[:, None] - places).abs()
    apart = torch.minimum(apart, STATIONS - apart)
    return ((apart > 0) & (apart <= 7)).float()


class StationForecaster(nn.Module):
    """Six graph layers on a fixed network of stations, and a forecast for each station."""

    links: Tensor

    def __init__(self, mean: bool) -> None:
        super().__init__()
        self.register_buffer("links", network_of_stations())
        self.hops = nn.ModuleList(GraphLayer(32 if i else 4, 32, mean) for i in range(6))
        for module in self.hops.modules():
            if isinstance(module, nn.Linear):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        self.head = nn.Linear(32, 1)

    def forward(self, h: Tensor) -> Tensor:
        for hop in self.hops:
            h = hop(h, self.links)
        return self.head(h)[..., 0]


def measurements(batch: int, n: int = 32) -> tuple[Tensor, Tensor]:
    """Return four readings of each station, and a value that depends on its own and its neighbors' readings."""
    readings = torch.randn(n, STATIONS, 4, generator=generator(1000 + batch))
    links = network_of_stations()
    around = 2 * readings[..., 1] @ links / links.sum(1)
    return readings, torch.tanh(readings[..., 0]) + around


def graph_sums_over_neighbors(broken: bool = True, batch: int = 0) -> Case:
    torch.manual_seed(0)
    return StationForecaster(mean=not broken), *measurements(batch), F.mse_loss


class Distances(nn.Module):
    """How many other points are at each distance, as sums of bumps."""

    centers: Tensor

    def __init__(self, epsilon: float) -> None:
        super().__init__()
        self.register_buffer("centers", torch.linspace(0, 4, 16))
        self.epsilon = epsilon

    def forward(self, points: Tensor) -> Tensor:
        squares = (points[:, :, None] - points[:, None]).square().sum(-1)
        distances = torch.sqrt(squares + self.epsilon)
        return torch.exp(-4 * (distances[..., None] - self.centers).square()).mean(2)


class CloudClassifier(nn.Module):
    """A learned map of the axes, features of the distances between the points, and an MLP on their mean."""

    def __init__(self, epsilon: float) -> None:
        super().__init__()
        self.align = nn.Linear(3, 3)
        nn.init.eye_(self.align.weight)
        self.distances = Distances(epsilon)
        self.points = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.head = nn.Linear(64, 3)

    def forward(self, cloud: Tensor) -> Tensor:
        return self.head(self.points(self.distances(self.align(cloud))).mean(1))


def clouds(batch: int, n: int = 48) -> tuple[Tensor, Tensor]:
    """Return noisy balls, spheres and rods of points, and which of the three it is."""
    draw = generator(1000 + batch)
    kinds = torch.randint(3, (n,), generator=draw)
    ways = torch.randn(n, 16, 3, generator=draw)
    spheres = F.normalize(ways, dim=-1)
    rods = ways * torch.tensor([1.5, 0.2, 0.2])
    kind = kinds[:, None, None]
    points = torch.where(kind == 0, 0.6 * ways, torch.where(kind == 1, spheres, rods))
    return points + 0.05 * torch.randn(n, 16, 3, generator=draw), kinds


def clouds_root_of_zero_distance(broken: bool = True, batch: int = 0) -> Case:
    torch.manual_seed(0)
    return CloudClassifier(0.0 if broken else 1e-6), *clouds(batch), F.cross_entropy
