"""The fifteenth set's healthy networks of our own over sets, points, graphs and physics."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fifth_parts import Case, generator, sound

OWN: dict[str, Callable[[], Case]] = {}
own = sound(OWN)


class DeepSets(nn.Module):
    """Zaheer et al.: a perceptron for each particle, their mean, and a perceptron."""

    def __init__(self, inputs: int, classes: int, width: int = 64) -> None:
        super().__init__()
        self.phi = nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.rho = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.rho(self.phi(x).mean(1))


@own
def deep_sets_of_jets() -> Case:
    """Jets of thirty particles with one, two or three cores; a particle's angles and logarithm of momentum."""
    draw = generator(330)
    labels = torch.arange(96) % 3
    cores = 1.5 * torch.randn(96, 3, 2, generator=draw)
    which = torch.randint(6, (96, 30), generator=draw) % (labels + 1)[:, None]
    angles = cores.gather(1, which[:, :, None].expand(-1, -1, 2)) + 0.2 * torch.randn(96, 30, 2, generator=draw)
    angles = angles - angles.mean(1, keepdim=True)
    momentum = torch.randn(96, 30, 1, generator=draw)
    particles = torch.cat([angles, momentum], 2)
    return DeepSets(3, 3), particles / particles.std((0, 1)), labels, F.cross_entropy


class EdgeConvolution(nn.Module):
    """Wang et al.: a layer over each point beside its way to each of its nearest ones, and the largest of them."""

    def __init__(self, inputs: int, outputs: int, near: int = 8) -> None:
        super().__init__()
        self.near = near
        self.layer = nn.Sequential(
            nn.Conv2d(2 * inputs, outputs, 1, bias=False), nn.BatchNorm2d(outputs), nn.LeakyReLU(0.2)
        )

    def forward(self, x: Tensor) -> Tensor:
        nearest = torch.cdist(x, x).topk(self.near, largest=False).indices
        others = x[torch.arange(len(x))[:, None, None], nearest]
        own_points = x[:, :, None].expand_as(others)
        edges = torch.cat([own_points, others - own_points], 3).permute(0, 3, 1, 2)
        return self.layer(edges).amax(3).transpose(1, 2)


class DynamicGraph(nn.Module):
    """DGCNN: edge convolutions whose neighbors are searched again in each layer's features."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.first, self.second, self.third = EdgeConvolution(3, 32), EdgeConvolution(32, 32), EdgeConvolution(32, 64)
        self.join = nn.Sequential(nn.Conv1d(128, 128, 1, bias=False), nn.BatchNorm1d(128), nn.LeakyReLU(0.2))
        self.head = nn.Sequential(
            nn.Linear(256, 64, bias=False), nn.BatchNorm1d(64), nn.LeakyReLU(0.2), nn.Dropout(0.3),
            nn.Linear(64, classes),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        second = self.second(first)
        hidden = self.join(torch.cat([first, second, self.third(second)], 2).transpose(1, 2))
        return self.head(torch.cat([hidden.amax(2), hidden.mean(2)], 1))


@own
def edge_convolutions_of_clouds() -> Case:
    """Clouds of 64 points: rings, spheres, two lumps and helices, in the unit ball."""
    draw = generator(331)
    labels = torch.arange(32) % 4
    turn = 6.2832 * torch.rand(32, 64, generator=draw)
    flat = torch.zeros(32, 64)
    ring = torch.stack([turn.cos(), turn.sin(), flat], 2)
    ball = F.normalize(torch.randn(32, 64, 3, generator=draw), dim=2)
    lumps = 0.3 * torch.randn(32, 64, 3, generator=draw)
    lumps[:, :, 2] += torch.where(torch.arange(64) % 2 == 0, 0.8, -0.8)
    helix = torch.stack([(2 * turn).cos(), (2 * turn).sin(), turn / 3.1416 - 1], 2)
    clouds = torch.stack([ring, ball, lumps, helix], 1)[torch.arange(32), labels]
    clouds = clouds + 0.02 * torch.randn(clouds.shape, generator=draw)
    clouds = clouds - clouds.mean(1, keepdim=True)
    return DynamicGraph(4), clouds / clouds.norm(dim=2).amax(1)[:, None, None], labels, F.cross_entropy


class LinkModel(nn.Module):
    """GraphSAGE with means over the neighbors; the logits of links are products of the nodes' vectors."""

    def __init__(self, links: Tensor, features: int, width: int = 32) -> None:
        super().__init__()
        self.register_buffer("mean", links / links.sum(1, keepdim=True).clamp(min=1))
        self.self_first, self.self_second = nn.Linear(features, width), nn.Linear(width, width)
        self.near_first, self.near_second = (
            nn.Linear(features, width, bias=False),
            nn.Linear(width, width, bias=False),
        )

    def forward(self, nodes: Tensor) -> Tensor:
        mean = self.get_buffer("mean")
        hidden = F.relu(self.self_first(nodes) + self.near_first(mean @ nodes))
        vectors = self.self_second(hidden) + self.near_second(mean @ hidden)
        return vectors @ vectors.T


def links_and_others(output: Tensor, targets: Tensor) -> Tensor:
    """Return the cross entropy of links and of pairs without a link that are as many; -1 leaves a pair out."""
    asked = targets >= 0
    return F.binary_cross_entropy_with_logits(output[asked], targets[asked])


@own
def links_by_graph_encoder() -> Case:
    """Papers of five fields, which mostly cite their own; the pairs without a link are drawn."""
    draw = generator(332)
    field = torch.arange(100) % 5
    chance = torch.where(field[:, None] == field, 0.3, 0.01)
    links = (torch.rand(100, 100, generator=draw) < chance).triu(1).float()
    links = links + links.T
    none = (links == 0) & (torch.rand(100, 100, generator=draw) < links.mean() / (1 - links.mean()))
    pairs = torch.where(links == 1, 1.0, torch.where(none, 0.0, -1.0)).masked_fill(torch.eye(100) == 1, -1)
    words = torch.randn(5, 20, generator=draw)[field] + torch.randn(100, 20, generator=draw)
    return LinkModel(links, 20), (words - words.mean(0)) / words.std(0), pairs, links_and_others


def block(inputs: int, outputs: int, width: int = 64) -> nn.Sequential:
    """Return a perceptron of the learned simulators, which ends in a layer norm."""
    return nn.Sequential(
        nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, outputs), nn.LayerNorm(outputs)
    )  # fmt: skip


class Simulator(nn.Module):
    """Sanchez-Gonzalez et al.: rounds of messages along springs, and the acceleration of each ball."""

    def __init__(self, width: int = 32, rounds: int = 3) -> None:
        super().__init__()
        self.node_in, self.edge_in = block(4, width), block(3, width)
        self.edges = nn.ModuleList(block(3 * width, width) for _ in range(rounds))
        self.nodes = nn.ModuleList(block(2 * width, width) for _ in range(rounds))
        self.out = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2))

    def forward(self, balls: Tensor) -> Tensor:
        places, count = balls[:, :, :2], balls.shape[1]
        after = torch.arange(count).roll(-1)
        begin, end = torch.cat([torch.arange(count), after]), torch.cat([after, torch.arange(count)])
        way = places[:, end] - places[:, begin]
        edge = self.edge_in(torch.cat([way, way.norm(dim=2, keepdim=True)], 2))
        node = self.node_in(balls)
        for edge_layer, node_layer in zip(self.edges, self.nodes, strict=True):
            edge = edge + edge_layer(torch.cat([edge, node[:, begin], node[:, end]], 2))
            received = torch.zeros_like(node).index_add(1, end, edge)
            node = node + node_layer(torch.cat([node, received], 2))
        return self.out(node)


@own
def simulator_of_springs() -> Case:
    """Six balls in a ring of springs; where they are, how fast, and their standardized acceleration with friction."""
    draw = generator(333)
    places, speeds = torch.randn(64, 6, 2, generator=draw), torch.randn(64, 6, 2, generator=draw)
    force = -0.5 * speeds
    for shift in (1, -1):
        way = places.roll(shift, 1) - places
        length = way.norm(dim=2, keepdim=True)
        force = force + 2 * (length - 1) * way / length
    return Simulator(), torch.cat([places, speeds], 2), force / force.std(), F.mse_loss
