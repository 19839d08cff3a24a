"""The thirteenth set's healthy networks of our own over graphs, molecules and physics, as practitioners write them."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fifth_parts import Case, generator, sound

OWN: dict[str, Callable[[], Case]] = {}
own = sound(OWN)


class GraphConvolutions(nn.Module):
    """The network of Kipf and Welling: two layers that average over neighbors, for all nodes of one graph."""

    def __init__(self, links: Tensor, features: int, classes: int, width: int = 16) -> None:
        super().__init__()
        links = links + torch.eye(len(links))
        scale = links.sum(1).rsqrt()
        self.register_buffer("links", scale[:, None] * links * scale)
        self.first, self.second = nn.Linear(features, width), nn.Linear(width, classes)
        for layer in (self.first, self.second):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, nodes: Tensor) -> Tensor:
        links = self.get_buffer("links")
        hidden = F.relu(links @ self.first(F.dropout(nodes, 0.5, self.training)))
        return links @ self.second(F.dropout(hidden, 0.5, self.training))


@own
def graph_convolutions_of_citations() -> Case:
    """Papers that hold few of many words, cite their like, and of which some have a known field."""
    draw = generator(150)
    field = torch.arange(210) % 7
    same = field[:, None] == field
    links = (torch.rand(210, 210, generator=draw) < torch.where(same, 0.1, 0.004)).triu(1).float()
    usual = torch.rand(7, 140, generator=draw) < 0.2
    words = (torch.rand(210, 140, generator=draw) < torch.where(usual[field], 0.3, 0.05)).float()
    known = torch.where(torch.arange(210) < 140, field, torch.tensor(-100))
    words = words / words.sum(1, keepdim=True).clamp(min=1)
    return GraphConvolutions(links + links.T, 140, 7), words, known, F.cross_entropy


class IsomorphismLayer(nn.Module):
    """A layer of GIN: a perceptron over the node and the sum of its neighbors."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.eps = nn.Parameter(torch.zeros(()))
        self.mlp = nn.Sequential(
            nn.Linear(inputs, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, width), nn.BatchNorm1d(width)
        )

    def forward(self, nodes: Tensor, links: Tensor) -> Tensor:
        joined = (1 + self.eps) * nodes + links @ nodes
        return F.relu(self.mlp(joined.flatten(0, 1)).view(*joined.shape[:2], -1))


class IsomorphismNetwork(nn.Module):
    """GIN over graphs of one size: kinds of atoms and links side by side; the mean of each layer counts."""

    def __init__(self, kinds: int, classes: int, width: int = 32, depth: int = 3) -> None:
        super().__init__()
        self.kinds = kinds
        self.layers = nn.ModuleList(IsomorphismLayer(width if i else kinds, width) for i in range(depth))
        self.head = nn.Sequential(
            nn.Linear(depth * width, width), nn.ReLU(), nn.Dropout(0.3), nn.Linear(width, classes)
        )

    def forward(self, graphs: Tensor) -> Tensor:
        nodes, links = graphs[:, :, : self.kinds], graphs[:, :, self.kinds :]
        means = []
        for layer in self.layers:
            nodes = layer(nodes, links)
            means.append(nodes.mean(1))
        return self.head(torch.cat(means, 1))


@own
def isomorphism_network_of_molecules() -> Case:
    draw = generator(151)
    kinds = torch.randint(6, (64, 14), generator=draw)
    chain = torch.diag(torch.ones(13), 1).repeat(64, 1, 1)
    rings = (torch.rand(64, 14, 14, generator=draw) < 0.06).triu(2).float()
    links = chain + rings
    links = links + links.transpose(1, 2)
    charged = (links @ (kinds == 2).float()[:, :, None])[:, :, 0] * (kinds == 0)
    toxic = (charged.sum(1) > 0.5).long()
    return IsomorphismNetwork(6, 2), torch.cat([F.one_hot(kinds, 6).float(), links], 2), toxic, F.cross_entropy


class Interaction(nn.Module):
    """An interaction of SchNet: atoms get filtered features of the others, by distance."""

    def __init__(self, width: int, centers: int) -> None:
        super().__init__()
        self.filters = nn.Sequential(nn.Linear(centers, width), nn.Softplus(), nn.Linear(width, width))
        self.enter = nn.Linear(width, width, bias=False)
        self.leave = nn.Sequential(nn.Linear(width, width), nn.Softplus(), nn.Linear(width, width))

    def forward(self, atoms: Tensor, near: Tensor, cut: Tensor) -> Tensor:
        weights = self.filters(near) * cut[..., None]
        return atoms + self.leave(torch.einsum("nijw,njw->niw", weights, self.enter(atoms)))


class SchNet(nn.Module):
    """The energy of atoms, each of a kind and at a place, as a sum over atoms."""

    def __init__(self, kinds: int, width: int = 48, centers: int = 20, reach: float = 5.0) -> None:
        super().__init__()
        self.kinds, self.reach = nn.Embedding(kinds, width), reach
        self.register_buffer("centers", torch.linspace(0, reach, centers))
        self.interactions = nn.ModuleList(Interaction(width, centers) for _ in range(3))
        self.readout = nn.Sequential(nn.Linear(width, width // 2), nn.Softplus(), nn.Linear(width // 2, 1))

    def forward(self, molecules: Tensor) -> Tensor:
        atoms, places = self.kinds(molecules[:, :, 0].long()), molecules[:, :, 1:]
        apart = (places[:, :, None] - places[:, None]).square().sum(3).add(1e-9).sqrt()
        near = torch.exp(-8 * (apart[..., None] - self.get_buffer("centers")).square())
        cut = 0.5 * (torch.cos(math.pi * apart / self.reach) + 1) * (apart < self.reach)
        cut = cut * (1 - torch.eye(apart.shape[1]).to(cut))
        for interaction in self.interactions:
            atoms = interaction(atoms, near, cut)
        return self.readout(atoms).sum(1)


@own
def schnet_of_energies() -> Case:
    draw = generator(152)
    grid = 1.5 * torch.stack(torch.meshgrid(*[torch.arange(2.0)] * 3, indexing="ij"), -1).view(1, 8, 3)
    places = grid + 0.25 * torch.randn(64, 8, 3, generator=draw)
    kinds = torch.randint(4, (64, 8), generator=draw)
    apart = torch.cdist(places, places) + 10 * torch.eye(8)
    strength = torch.rand(4, 4, generator=draw)
    energy = -(strength[kinds[:, :, None], kinds[:, None]] * torch.exp(-apart)).sum((1, 2))[:, None]
    energy = (energy - energy.mean()) / energy.std()
    return SchNet(4), torch.cat([kinds[:, :, None], places], 2), energy, F.mse_loss


class DeepONet(nn.Module):
    """An operator: a branch for the function's values, a trunk for the place where the result is asked."""

    def __init__(self, sensors: int, width: int = 64) -> None:
        super().__init__()
        self.sensors = sensors
        self.branch = nn.Sequential(
            nn.Linear(sensors, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)
        )
        self.trunk = nn.Sequential(
            nn.Linear(1, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
        )
        self.bias = nn.Parameter(torch.zeros(1))
        for module in (*self.branch, *self.trunk):
            if isinstance(module, nn.Linear):
                nn.init.xavier_normal_(module.weight)
                nn.init.zeros_(module.bias)

    def forward(self, asked: Tensor) -> Tensor:
        branch, trunk = self.branch(asked[:, : self.sensors]), self.trunk(asked[:, self.sensors :])
        return (branch * trunk).sum(1, keepdim=True) + self.bias


def _functions(n: int, points: int, seed: int) -> Tensor:
    """Return smooth random functions on [0, 1], of variance 1."""
    waves = torch.arange(1, 4)[:, None] * torch.linspace(0, 1, points) * math.pi
    parts = torch.randn(n, 6, generator=generator(seed)) / 3**0.5
    return parts @ torch.cat([torch.sin(waves), torch.cos(waves)])


@own
def deeponet_of_integrals() -> Case:
    values = _functions(256, 40, 153)
    place = torch.randint(40, (256, 1), generator=generator(154))
    integral = (values.cumsum(1) / 40).gather(1, place)
    return DeepONet(40), torch.cat([values, place / 20 - 1], 1), integral / integral.std(), F.mse_loss


class SpectralConv(nn.Module):
    """A linear map of each of the lowest frequencies."""

    def __init__(self, width: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(torch.rand(width, width, modes, dtype=torch.cfloat) / width**2)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x)[:, :, : self.modes]
        return torch.fft.irfft(torch.einsum("nim,iom->nom", spectrum, self.weight), n=x.shape[2])


class FourierOperator(nn.Module):
    """The Fourier neural operator of one dimension, for a function's values and the places beside them."""

    def __init__(self, width: int = 32, modes: int = 12) -> None:
        super().__init__()
        self.lift = nn.Linear(2, width)
        self.spectral = nn.ModuleList(SpectralConv(width, modes) for _ in range(4))
        self.local = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in range(4))
        self.project = nn.Sequential(nn.Linear(width, 128), nn.GELU(), nn.Linear(128, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x).transpose(1, 2)
        for i, (spectral, local) in enumerate(zip(self.spectral, self.local, strict=True)):
            x = spectral(x) + local(x)
            x = F.gelu(x) if i < 3 else x
        return self.project(x.transpose(1, 2))


@own
def fourier_operator_of_heat() -> Case:
    start = _functions(32, 64, 155)
    spectrum = torch.fft.rfft(start) * torch.exp(-0.05 * torch.arange(33.0).square())
    places = torch.linspace(-1, 1, 64).expand(32, 64)
    later = torch.fft.irfft(spectrum, n=64)
    return FourierOperator(), torch.stack([start, places], 2), later[:, :, None] / later.std(), F.mse_loss


class Oscillator(nn.Module):
    """A physics-informed network: the place at a time, and how far it is from the law of a damped spring."""

    def __init__(self, damping: float = 1.0, pace: float = 5.0, width: int = 32) -> None:
        super().__init__()
        self.damping, self.pace = damping, pace
        self.net = nn.Sequential(
            nn.Linear(1, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(),
            nn.Linear(width, 1),
        )  # fmt: skip

    def forward(self, time: Tensor) -> Tensor:
        with torch.enable_grad():
            time = time.clone().requires_grad_()
            place = self.net(time)
            speed = torch.autograd.grad(place.sum(), time, create_graph=True)[0]
            change = torch.autograd.grad(speed.sum(), time, create_graph=True)[0]
            law = change + 2 * self.damping * speed + self.pace**2 * place
            return torch.cat([place, law / self.pace**2], 1)


def data_and_law(output: Tensor, targets: Tensor) -> Tensor:
    """Return the error where the place is known, and a tenth of the squared distance from the law."""
    value, known = targets.unbind(1)
    return ((output[:, 0] - value).square() * known).sum() / known.sum() + 0.1 * output[:, 1].square().mean()


@own
def physics_informed_oscillator() -> Case:
    time = torch.linspace(0, 2, 80)[:, None]
    pace = (25.0 - 1.0) ** 0.5
    place = torch.exp(-time) * (torch.cos(pace * time) + torch.sin(pace * time) / pace)
    known = (torch.arange(80) % 4 == 0).float()
    return Oscillator(), time, torch.stack([place[:, 0], known], 1), data_and_law


class Sine(nn.Module):
    """A layer of SIREN with the initialization of its authors."""

    def __init__(self, inputs: int, outputs: int, first: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        bound = 1 / inputs if first else (6 / inputs) ** 0.5 / 30
        nn.init.uniform_(self.linear.weight, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(30 * self.linear(x))


@own
def sine_layers_of_a_picture() -> Case:
    head = nn.Linear(64, 1)
    nn.init.uniform_(head.weight, -((6 / 64) ** 0.5) / 30, (6 / 64) ** 0.5 / 30)
    model = nn.Sequential(Sine(2, 64, first=True), Sine(64, 64), Sine(64, 64), head)
    line = torch.linspace(-1, 1, 32)
    places = torch.stack(torch.meshgrid(line, line, indexing="ij"), -1).view(-1, 2)
    picture = F.interpolate(torch.randn(1, 1, 8, 8, generator=generator(156)), size=32, mode="bicubic").view(-1, 1)
    return model, places, (picture - picture.mean()) / picture.std(), F.mse_loss


class NeuralODE(nn.Module):
    """The path of a point whose speed a perceptron gives, by Runge-Kutta; as in the demo of torchdiffeq."""

    def __init__(self, steps: int = 20, width: int = 50) -> None:
        super().__init__()
        self.steps = steps
        self.speed = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 2))
        for i in (0, 2):
            nn.init.normal_(self.speed[i].weight, std=0.1)
            nn.init.zeros_(self.speed[i].bias)

    def forward(self, x: Tensor) -> Tensor:
        path, h = [], 0.1
        for _ in range(self.steps):
            first = self.speed(x)
            second = self.speed(x + h / 2 * first)
            third = self.speed(x + h / 2 * second)
            fourth = self.speed(x + h * third)
            x = x + h / 6 * (first + 2 * second + 2 * third + fourth)
            path.append(x)
        return torch.stack(path, 1)


@own
def neural_ode_of_spirals() -> Case:
    turn = torch.matrix_exp(0.1 * torch.tensor([[-0.3, 2.0], [-2.0, -0.3]]))
    start = x = torch.randn(64, 2, generator=generator(157))
    path = []
    for _ in range(20):
        x = x @ turn.T
        path.append(x)
    return NeuralODE(), start, torch.stack(path, 1), F.l1_loss
