"""The eleventh set's broken networks over tables: perceptrons, a recommender, a graph, a flow and a diffusion net."""

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal
from torch.nn import functional as F

from fifth_parts import Case, categories, generator, table


class HandLinear(nn.Module):
    """A linear layer written by hand: its weights come from `torch.rand`, or from `torch.randn` with He's spread."""

    def __init__(self, inputs: int, outputs: int, broken: bool) -> None:
        super().__init__()
        weight = torch.rand(outputs, inputs) if broken else torch.randn(outputs, inputs) * (2 / inputs) ** 0.5
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T + self.bias


def mlp_weights_all_positive(broken: bool = True, batch: int = 0) -> Case:
    """A perceptron of linear layers written by hand, whose weights are uniform between 0 and 1."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for width in (8, 64, 64, 64):
        layers += [HandLinear(width, 64, broken), nn.ReLU()]
    model = nn.Sequential(OrderedDict(stack=nn.Sequential(*layers), to_classes=nn.Linear(64, 4)))
    return model, *categories(batch), F.cross_entropy


class Mixer(nn.Module):
    """A hidden layer, made once or in each call of `forward`."""

    def __init__(self, width: int, broken: bool) -> None:
        super().__init__()
        self.width, self.broken = width, broken
        if not broken:
            self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        linear = nn.Linear(self.width, self.width) if self.broken else self.linear
        return F.gelu(linear(x))


def mlp_layer_made_in_forward(broken: bool = True, batch: int = 0) -> Case:
    """A perceptron in which one hidden layer is created inside `forward`."""
    torch.manual_seed(0)
    enter = nn.Sequential(nn.Linear(8, 64), nn.GELU())
    to_classes = nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 4))
    model = nn.Sequential(OrderedDict(enter=enter, mixer=Mixer(64, broken), to_classes=to_classes))
    return model, *categories(batch), F.cross_entropy


class Recommender(nn.Module):
    """The probability that a user likes an item: the sigmoid of the dot product of their vectors."""

    def __init__(self, users: int, items: int, width: int, std: float) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(users, width), nn.Embedding(items, width)
        self.to_probability = nn.Sigmoid()
        for vectors in (self.users, self.items):
            nn.init.normal_(vectors.weight, std=std)

    def forward(self, pairs: Tensor) -> Tensor:
        return self.to_probability((self.users(pairs[:, 0]) * self.items(pairs[:, 1])).sum(1))


def recommender_probabilities_saturated(broken: bool = True, batch: int = 0) -> Case:
    """Long vectors of users and items from a standard normal distribution: their dot products are near ±16."""
    torch.manual_seed(0)
    model = Recommender(60, 40, 256, 1.0 if broken else 0.05)
    fixed, draw = generator(31), generator(1000 + batch)
    users, items = torch.randn(60, 3, generator=fixed), torch.randn(40, 3, generator=fixed)
    pairs = torch.stack([torch.randint(60, (256,), generator=draw), torch.randint(40, (256,), generator=draw)], 1)
    likes = (users[pairs[:, 0]] * items[pairs[:, 1]]).sum(1) > 0
    return model, pairs, likes.float(), F.binary_cross_entropy


class GraphLayer(nn.Module):
    """The mean over a node and its neighbors, a linear map and ReLU; added to the nodes unless that was forgotten."""

    def __init__(self, width: int, neighbors: Tensor, broken: bool) -> None:
        super().__init__()
        self.broken = broken
        self.linear = nn.Linear(width, width)
        nn.init.kaiming_normal_(self.linear.weight, nonlinearity="relu")
        nn.init.zeros_(self.linear.bias)
        self.register_buffer("neighbors", neighbors)

    def forward(self, nodes: Tensor) -> Tensor:
        update = F.relu(self.linear(self.get_buffer("neighbors") @ nodes))
        return update if self.broken else nodes + 0.3 * update


class GraphNet(nn.Module):
    """A graph network that gives each node a class."""

    def __init__(self, neighbors: Tensor, broken: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 32)
        self.convs = nn.ModuleList(GraphLayer(32, neighbors, broken) for _ in range(12))
        self.head = nn.Linear(32, 4)

    def forward(self, nodes: Tensor) -> Tensor:
        nodes = self.embed(nodes)
        for conv in self.convs:
            nodes = conv(nodes)
        return self.head(nodes).flatten(0, 1)


def graph_net_all_nodes_alike(broken: bool = True, batch: int = 0) -> Case:
    """Twelve layers that average over neighbors, without shortcuts: the nodes of a graph end up the same."""
    torch.manual_seed(0)
    links = torch.rand(16, 16, generator=generator(32)) < 0.3
    links = (links | links.T | torch.eye(16, dtype=torch.bool)).float()
    nodes, classes = categories(batch, n=16 * 16)
    return GraphNet(links / links.sum(1, keepdim=True), broken), nodes.view(16, 16, 8), classes, F.cross_entropy


class Coupling(nn.Module):
    """An affine coupling: half of the columns is scaled and shifted by what the other half says, then they swap."""

    def __init__(self, width: int, broken: bool) -> None:
        super().__init__()
        self.largest = 1.0 if broken else 2.0
        self.net = nn.Sequential(nn.Linear(width // 2, 32), nn.ReLU(), nn.Linear(32, width))
        nn.init.normal_(self.net[2].weight, std=0.01)
        nn.init.zeros_(self.net[2].bias)

    def forward(self, x: Tensor, log_scale: Tensor) -> tuple[Tensor, Tensor]:
        kept, changed = x.chunk(2, 1)
        score, shift = self.net(kept).chunk(2, 1)
        scale = self.largest * torch.sigmoid(score)
        return torch.cat([changed * scale + shift, kept], 1), log_scale + scale.log().sum(1)


class Flow(nn.Module):
    """A normalizing flow that returns the log density of each row."""

    def __init__(self, width: int, depth: int, broken: bool) -> None:
        super().__init__()
        self.couplings = nn.ModuleList(Coupling(width, broken) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        log_scale = torch.zeros(len(x))
        for coupling in self.couplings:
            x, log_scale = coupling(x, log_scale)
        return log_scale - 0.5 * (x.square() + 1.8378771).sum(1)


def likelihood(log_density: Tensor, _: Tensor) -> Tensor:
    return -log_density.mean()


def flow_scales_begin_at_half(broken: bool = True, batch: int = 0) -> Case:
    """A flow of 24 couplings whose scales are sigmoids, about one half, and not twice that."""
    torch.manual_seed(0)
    loadings = torch.randn(8, 3, generator=generator(33))
    covariance = loadings @ loadings.T + 0.1 * torch.eye(8)
    roots = covariance.diagonal().sqrt()
    columns = MultivariateNormal(torch.zeros(8), covariance / (roots * roots[:, None]))
    x = torch.randn(128, 8, generator=generator(1000 + batch)) @ columns.scale_tril.T
    return Flow(8, 24, broken), x, columns.log_prob(x), likelihood


class Regressor(nn.Module):
    """A mean and a variance for each row; the variance must be positive."""

    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU())
        self.to_mean, self.to_spread = nn.Linear(64, 1), nn.Linear(64, 1)
        self.to_variance = nn.ReLU() if broken else nn.Softplus()

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        return torch.cat([self.to_mean(x), self.to_variance(self.to_spread(x))], 1)


def gaussian(output: Tensor, targets: Tensor) -> Tensor:
    """Return the negative log likelihood under a normal distribution of this mean and variance."""
    mean, variance = output.chunk(2, 1)
    return 0.5 * (variance.log() + (targets - mean).square() / variance).mean()


def regressor_variance_through_relu(broken: bool = True, batch: int = 0) -> Case:
    """A regressor of a mean and a variance that is made positive by ReLU, so that about half are zero."""
    torch.manual_seed(0)
    return Regressor(broken), *table(batch), gaussian


class Reversed(torch.autograd.Function):
    """The identity, whose gradient has the other sign."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return -grad


class Passage(nn.Module):
    """Passes features on, and their gradient with the other sign."""

    def forward(self, x: Tensor) -> Tensor:
        return Reversed.apply(x)


class DomainAdversarial(nn.Module):
    """Features from which a head tells the class; a second head, behind a reversal, must not tell the domain."""

    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.broken = broken
        self.trunk = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))
        self.passage = Passage()
        self.classes, self.domain = nn.Linear(8, 4), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        features = self.trunk(x)
        reversed_features = self.passage(features)
        return torch.cat([self.classes(reversed_features if self.broken else features),
                          self.domain(reversed_features)], 1)  # fmt: skip


def class_and_domain(output: Tensor, targets: Tensor) -> Tensor:
    """Return the cross entropy of the class plus a little of that of the domain."""
    return F.cross_entropy(output[:, :4], targets[:, 0]) + 0.1 * F.cross_entropy(output[:, 4:], targets[:, 1])


def multitask_gradient_reversed_for_both(broken: bool = True, batch: int = 0) -> Case:
    """A network with a gradient reversal that stands before both heads and not only before the adversary's."""
    torch.manual_seed(0)
    x, classes = categories(batch)
    domain = torch.randint(2, (len(x),), generator=generator(2000 + batch))
    return DomainAdversarial(broken), x, torch.stack([classes, domain], 1), class_and_domain


class Denoiser(nn.Module):
    """The noise in a noisy row, whose first column is the time step from 0 to 999."""

    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.unit = 1.0 if broken else 1000.0
        self.embed_row, self.embed_step = nn.Linear(8, 96), nn.Linear(1, 96)
        self.body = nn.Sequential(nn.SiLU(), nn.Linear(96, 96), nn.SiLU(), nn.Linear(96, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.embed_row(x[:, 1:]) + self.embed_step(x[:, :1] / self.unit))


def diffusion_steps_up_to_thousand(broken: bool = True, batch: int = 0) -> Case:
    """A diffusion net that takes the number of the time step, up to 999, through a linear layer as it is."""
    torch.manual_seed(0)
    draw = generator(1000 + batch)
    rows = torch.randn(128, 2, generator=draw) @ torch.randn(2, 8, generator=generator(34))
    step = torch.randint(1000, (128, 1), generator=draw).float()
    noise = torch.randn(128, 8, generator=draw)
    angle = (0.1 + 0.9 * step / 1000) * torch.pi / 2
    return Denoiser(broken), torch.cat([step, angle.cos() * rows + angle.sin() * noise], 1), noise, F.mse_loss


class TwoTowers(nn.Module):
    """The scores of all pairs of a first and a second view: cosines, times a factor unless it was forgotten."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor
        self.tower_a = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 32))
        self.tower_b = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 32))

    def forward(self, views: Tensor) -> Tensor:
        first = F.normalize(self.tower_a(views[:, 0]), dim=1)
        second = F.normalize(self.tower_b(views[:, 1]), dim=1)
        return self.factor * first @ second.T


def contrastive_cosines_as_scores(broken: bool = True, batch: int = 0) -> Case:
    """Two towers in the manner of CLIP, whose cosines go into the cross entropy without a temperature."""
    torch.manual_seed(0)
    first = torch.randn(64, 8, generator=generator(1000 + batch))
    turn = torch.linalg.qr(torch.randn(8, 8, generator=generator(38)))[0]
    second = first @ turn + 0.1 * torch.randn(64, 8, generator=generator(2000 + batch))
    return TwoTowers(1.0 if broken else 15.0), torch.stack([first, second], 1), torch.arange(64), F.cross_entropy
