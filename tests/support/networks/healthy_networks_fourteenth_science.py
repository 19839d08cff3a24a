"""The fourteenth set's healthy networks of our own over points, graphs and physics, as practitioners write them."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fifth_parts import Case, generator, sound

OWN: dict[str, Callable[[], Case]] = {}
own = sound(OWN)


class PointNet(nn.Module):
    """The same perceptron for each point, the largest of each feature, and a classifier."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs in ((3, 32), (32, 64), (64, 128)):
            layers += [nn.Conv1d(inputs, outputs, 1), nn.BatchNorm1d(outputs), nn.ReLU()]
        self.points = nn.Sequential(*layers)
        self.head = nn.Sequential(
            nn.Linear(128, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, classes)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.points(x.transpose(1, 2)).amax(2))


@own
def pointnet_of_shapes() -> Case:
    """Clouds of 128 points: balls, cubes, rods and plates, whose farthest point is at distance one."""
    draw = generator(280)
    labels = torch.arange(32) % 4
    points = torch.randn(32, 128, 3, generator=draw)
    stretch = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 1.0], [0.15, 0.15, 1.0], [1.0, 1.0, 0.1]])[labels][:, None]
    ball, cube = F.normalize(points, dim=2), points / points.abs().amax(2, keepdim=True)
    clouds = stretch * torch.where((labels == 1)[:, None, None], cube, ball)
    clouds = clouds + 0.02 * torch.randn(clouds.shape, generator=draw)
    clouds = clouds - clouds.mean(1, keepdim=True)
    return PointNet(4), clouds / clouds.norm(dim=2).amax(1)[:, None, None], labels, F.cross_entropy


class AttentionHeads(nn.Module):
    """A layer of GAT: each head weighs the neighbors of a node."""

    def __init__(self, inputs: int, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.map = nn.Linear(inputs, heads * width, bias=False)
        self.asks, self.answers = nn.Parameter(torch.empty(heads, width)), nn.Parameter(torch.empty(heads, width))
        for weight in (self.map.weight, self.asks, self.answers):
            nn.init.xavier_uniform_(weight)

    def forward(self, nodes: Tensor, links: Tensor) -> Tensor:
        mapped = self.map(nodes).view(len(nodes), self.heads, -1)
        scores = (mapped * self.asks).sum(2).T[:, :, None] + (mapped * self.answers).sum(2).T[:, None]
        weights = F.leaky_relu(scores, 0.2).masked_fill(links == 0, -math.inf).softmax(2)
        return torch.einsum("hij,jhw->ihw", F.dropout(weights, 0.3, self.training), mapped)


class GraphAttention(nn.Module):
    """Two layers of attention over the neighbors, for all nodes of one graph."""

    def __init__(self, links: Tensor, features: int, classes: int) -> None:
        super().__init__()
        self.register_buffer("links", links)
        self.first, self.second = AttentionHeads(features, 8, 4), AttentionHeads(32, classes, 1)

    def forward(self, nodes: Tensor) -> Tensor:
        links = self.get_buffer("links")
        hidden = F.elu(self.first(F.dropout(nodes, 0.3, self.training), links).flatten(1))
        return self.second(F.dropout(hidden, 0.3, self.training), links).squeeze(1)


@own
def graph_attention_of_members() -> Case:
    """Members of four clubs, who mostly know each other within their club; half of them say in which they are."""
    draw = generator(281)
    club = torch.arange(120) % 4
    chance = torch.where(club[:, None] == club, 0.15, 0.01)
    links = (torch.rand(120, 120, generator=draw) < chance).triu(1).float()
    interests = torch.randn(4, 16, generator=draw)[club] + 1.5 * torch.randn(120, 16, generator=draw)
    interests = (interests - interests.mean(0)) / interests.std(0)
    known = torch.where(torch.arange(120) < 60, club, torch.tensor(-100))
    return GraphAttention(links + links.T + torch.eye(120), 16, 4), interests, known, F.cross_entropy


class Messages(nn.Module):
    """The network of Gilmer et al.: messages by the kind of bond, a GRU that takes them in, a gated sum."""

    def __init__(self, kinds: int, bonds: int, width: int = 32, rounds: int = 3) -> None:
        super().__init__()
        self.kinds, self.bonds, self.rounds = kinds, bonds, rounds
        self.enter = nn.Linear(kinds, width)
        self.by_bond = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(bonds))
        self.update = nn.GRUCell(width, width)
        self.gate, self.share = nn.Linear(width + kinds, width), nn.Linear(width, width)
        self.head = nn.Linear(width, 1)

    def forward(self, graphs: Tensor) -> Tensor:
        n, atoms, _ = graphs.shape
        kinds = graphs[:, :, : self.kinds]
        links = graphs[:, :, self.kinds :].view(n, atoms, self.bonds, atoms).unbind(2)
        hidden = torch.relu(self.enter(kinds))
        for _ in range(self.rounds):
            message = sum(link @ layer(hidden) for link, layer in zip(links, self.by_bond, strict=True))
            hidden = self.update(message.flatten(0, 1), hidden.flatten(0, 1)).view(n, atoms, -1)
        gate = torch.sigmoid(self.gate(torch.cat([hidden, kinds], 2)))
        return self.head((gate * torch.tanh(self.share(hidden))).mean(1))


@own
def messages_of_molecules() -> Case:
    draw = generator(282)
    kinds = torch.randint(4, (64, 10), generator=draw)
    chain = torch.diag(torch.ones(9), 1) + torch.diag(torch.ones(9), -1)
    double = (torch.rand(64, 10, 10, generator=draw) < 0.3).triu(1).float()
    double = (double + double.transpose(1, 2)) * chain
    bonds = torch.stack([chain - double, double], 2)
    atoms = F.one_hot(kinds, 4).float()
    charge = torch.tensor([-1.0, 0.3, 0.8, 1.5])[kinds]
    worth = (charge[:, :, None] * charge[:, None] * (chain + double)).sum((1, 2))[:, None] + charge.sum(1)[:, None]
    return Messages(4, 2), torch.cat([atoms, bonds.flatten(2)], 2), (worth - worth.mean()) / worth.std(), F.mse_loss


class EquivariantLayer(nn.Module):
    """A layer of EGNN: bodies tell each other by distance, move and change what they are."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.edge = nn.Sequential(nn.Linear(2 * width + 1, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.move = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1, bias=False))
        nn.init.xavier_uniform_(self.move[2].weight, gain=0.001)
        self.speed = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1))
        self.node = nn.Sequential(nn.Linear(2 * width, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, hidden: Tensor, places: Tensor, speeds: Tensor) -> tuple[Tensor, Tensor]:
        apart = places[:, :, None] - places[:, None]
        count = places.shape[1]
        pairs = torch.cat(
            [
                hidden[:, :, None].expand(-1, -1, count, -1),
                hidden[:, None].expand(-1, count, -1, -1),
                apart.square().sum(3, keepdim=True),
            ],
            3,
        )
        message = self.edge(pairs) * (1 - torch.eye(count))[..., None]
        places = places + (apart * self.move(message)).sum(2) / (count - 1) + self.speed(hidden) * speeds
        return hidden + self.node(torch.cat([hidden, message.sum(2)], 2)), places


class EquivariantNetwork(nn.Module):
    """Where charged bodies will be; a row holds a body's place, its speed and its charge."""

    def __init__(self, width: int = 32, depth: int = 3) -> None:
        super().__init__()
        self.enter = nn.Linear(2, width)
        self.layers = nn.ModuleList(EquivariantLayer(width) for _ in range(depth))

    def forward(self, bodies: Tensor) -> Tensor:
        places, speeds, charge = bodies.split([3, 3, 1], 2)
        hidden = self.enter(torch.cat([charge, speeds.norm(dim=2, keepdim=True)], 2))
        for layer in self.layers:
            hidden, places = layer(hidden, places, speeds)
        return places


@own
def equivariant_network_of_bodies() -> Case:
    draw = generator(283)
    places, speeds = torch.randn(64, 5, 3, generator=draw), torch.randn(64, 5, 3, generator=draw)
    charge = torch.randint(2, (64, 5, 1), generator=draw) * 2.0 - 1
    x, v = places, speeds
    for _ in range(10):
        apart = x[:, :, None] - x[:, None]
        force = charge[:, :, None] * charge[:, None] * apart / (apart.square().sum(3, keepdim=True) + 0.5) ** 1.5
        v = v + 0.1 * force.sum(2)
        x = x + 0.1 * v
    return EquivariantNetwork(), torch.cat([places, speeds, charge], 2), x, F.mse_loss


class Hamiltonian(nn.Module):
    """Greydanus et al.: a perceptron gives the energy, whose slope gives how place and momentum change."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.energy = nn.Sequential(
            nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1, bias=False)
        )
        for i in (0, 2, 4):
            nn.init.orthogonal_(self.energy[i].weight)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.clone().requires_grad_()
            slope = torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]
        return torch.stack([slope[:, 1], -slope[:, 0]], 1)


@own
def hamiltonian_network_of_a_pendulum() -> Case:
    draw = generator(284)
    angle, momentum = 2 * math.pi * torch.rand(256, generator=draw) - math.pi, 1.5 * torch.randn(256, generator=draw)
    change = torch.stack([momentum, -torch.sin(angle)], 1)
    return Hamiltonian(), torch.stack([angle, momentum], 1), change, F.mse_loss


class HeatEquation(nn.Module):
    """A physics-informed network of place and time: the warmth, and how far it is from the law u_t = a u_xx."""

    def __init__(self, conducts: float = 0.1, width: int = 32) -> None:
        super().__init__()
        self.conducts = conducts
        layers: list[nn.Module] = []
        for i in range(4):
            layers += [nn.Linear(width if i else 2, width), nn.Tanh()]
        self.net = nn.Sequential(*layers, nn.Linear(width, 1))
        for module in self.net:
            if isinstance(module, nn.Linear):
                nn.init.xavier_normal_(module.weight)
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.clone().requires_grad_()
            warmth = self.net(x)
            slope = torch.autograd.grad(warmth.sum(), x, create_graph=True)[0]
            bend = torch.autograd.grad(slope[:, 0].sum(), x, create_graph=True)[0][:, :1]
        return torch.cat([warmth, slope[:, 1:] - self.conducts * bend], 1)


def edges_and_law(output: Tensor, targets: Tensor) -> Tensor:
    """Return the squared error at the edges, where the warmth is known, and the squared distance from the law."""
    value, known = targets.unbind(1)
    return ((output[:, 0] - value).square() * known).sum() / known.sum() + output[:, 1].square().mean()


@own
def physics_informed_heat() -> Case:
    """A rod from -1 to 1 with cold ends that begins warm in the middle, for one unit of time."""
    draw = generator(285)
    place, time = 2 * torch.rand(384, generator=draw) - 1, torch.rand(384, generator=draw)
    kind = torch.arange(384) % 6
    time = torch.where(kind == 0, torch.zeros(384), time)
    place = torch.where(kind == 1, torch.sign(place), place)
    start = torch.sin(math.pi * place) * (kind == 0)
    return HeatEquation(), torch.stack([place, time], 1), torch.stack([start, (kind < 2).float()], 1), edges_and_law
