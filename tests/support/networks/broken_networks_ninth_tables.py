"""Broken networks of the ninth set for tables, graphs, points and densities, each with a healthy twin."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from broken_networks_seventh_tables import signs_of_product
from fifth_parts import Case, generator, table


class Messages(nn.Module):
    """Adds to each node what a linear layer makes of its neighbours; messages to one node can replace each other."""

    def __init__(self, width: int, edges: Tensor, replace: bool) -> None:
        super().__init__()
        self.register_buffer("edges", edges)
        self.own, self.message = nn.Linear(width, 32), nn.Linear(width, 32)
        self.replace = replace

    def forward(self, x: Tensor) -> Tensor:
        messages, received = self.message(x)[:, self.edges[0]], torch.zeros(*x.shape[:2], 32)
        if self.replace:
            received[:, self.edges[1]] = messages
        else:
            received = received.index_add(1, self.edges[1], messages)
        return F.relu(self.own(x) + received)


class SensorGraph(nn.Module):
    """Two layers of messages over a fixed graph of sensors, and a class for each of them."""

    def __init__(self, edges: Tensor, replace: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(Messages(4, edges, replace), Messages(32, edges, replace))
        self.fc = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.layers(x)).flatten(0, 1)


def graph_messages_overwrite(broken: bool = True, batch: int = 0) -> Case:
    """Messages are assigned by index and not added: of all messages to a node, the last one alone arrives."""
    torch.manual_seed(0)
    near = torch.rand(16, 16, generator=generator(66)).argsort(1)[:, :5]
    edges = torch.stack([near.flatten(), torch.arange(16).repeat_interleave(5)])
    x = torch.randn(32, 16, 4, generator=generator(10200 + batch))
    return SensorGraph(edges, broken), x, x[:, near].sum(2).argmax(2).flatten(), nn.CrossEntropyLoss()


class Coupling(nn.Module):
    """Scales and shifts one half of the columns by what a network makes of the other half."""

    def __init__(self, width: int, second: bool) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2 * width)
        )
        nn.init.zeros_(self.net[-1].weight)
        nn.init.zeros_(self.net[-1].bias)
        self.second = second

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first, second = x.chunk(2, 1)
        kept, changed = (first, second) if self.second else (second, first)
        scale, shift = self.net(kept).chunk(2, 1)
        scale = 3 * torch.tanh(scale / 3)
        changed = changed * scale.exp() + shift
        return torch.cat([kept, changed] if self.second else [changed, kept], 1), scale.sum(1)


class Flow(nn.Module):
    """A RealNVP; its couplings change the halves in turn, or the same one each time."""

    def __init__(self, width: int, depth: int, alternates: bool) -> None:
        super().__init__()
        self.couplings = nn.ModuleList(Coupling(width // 2, i % 2 == 0 or not alternates) for i in range(depth))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        volume = torch.zeros(len(x))
        for coupling in self.couplings:
            x, added = coupling(x)
            volume = volume + added
        return x, volume


def flow_likelihood(output: tuple[Tensor, Tensor], _: Tensor) -> Tensor:
    """Return the mean negative logarithm of the density of a flow to a standard normal."""
    z, volume = output
    return (z.square().sum(1) / 2 - volume).mean()


def flow_halves_never_swapped(broken: bool = True, batch: int = 0) -> Case:
    """All couplings change the same half of the columns: the other half passes through all of them unchanged."""
    torch.manual_seed(0)
    draw = generator(10300 + batch)
    cause = torch.randn(256, 2, generator=draw)
    effect = 2 * torch.sin(2 * cause) + 0.1 * torch.randn(256, 2, generator=draw)
    return Flow(4, 4, not broken), torch.cat([effect, cause], 1), torch.zeros(256), flow_likelihood


class MixtureDensity(nn.Module):
    """A mixture of two normal densities of a path: its parts' logits, means and one log-deviation each."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.parts = nn.Linear(64, 2 * (length + 2))
        self.length = length

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        parts = self.parts(self.body(x)).unflatten(1, (2, -1))
        means, logits, logstd = parts.split([self.length, 1, 1], 2)
        return means, logits.squeeze(2), logstd.squeeze(2)


def mixture_without_logsumexp(broken: bool = True, batch: int = 0) -> Case:
    """The density of a path of 100 values is summed over the parts before the logarithm: it is below 1e-45, and 0."""
    torch.manual_seed(0)
    x, wanted = table(batch, outputs=6)
    basis = torch.sin(torch.arange(1.0, 7)[:, None] * torch.arange(100) / 30)
    paths = 1.5 * wanted @ basis + 0.1 * torch.randn(128, 100, generator=generator(10400 + batch))

    def loss(output: tuple[Tensor, Tensor, Tensor], path: Tensor) -> Tensor:
        means, logits, logstd = output
        errors = (path[:, None] - means).square().sum(2) * (-2 * logstd).exp() / 2
        logs = -errors - path.shape[1] * (logstd + 0.919)
        if broken:
            return -(logits.softmax(1) * logs.exp()).sum(1).log().mean() / 100
        return -(logits.log_softmax(1) + logs).logsumexp(1).mean() / 100

    return MixtureDensity(100), x, paths, loss


class Solver(nn.Module):
    """A network u(x) in a differential equation; gives u and its second derivative."""

    def __init__(self, activation: type[nn.Module]) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 48), activation(), nn.Linear(48, 48), activation(), nn.Linear(48, 1))

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            u = self.net(x)
            (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
            second = torch.zeros_like(x)
            if slope.requires_grad:
                found = torch.autograd.grad(slope.sum(), x, create_graph=True, allow_unused=True)[0]
                second = second if found is None else found
        return torch.cat([u, second], 1)


def physics_loss(output: Tensor, force: Tensor) -> Tensor:
    """Return the error of the equation, and of the border's values, which are zero, at the first 16 points."""
    return (output[:, 1] - force).square().mean() / 4 + 4 * output[:16, 0].square().mean()


def pinn_of_relus(broken: bool = True, batch: int = 0) -> Case:
    """The equation has a second derivative, and that of a network of ReLUs is zero: only the border is learned."""
    torch.manual_seed(0)
    x = 4 * torch.rand(128, 1, generator=generator(10500 + batch)) - 2
    x[:8], x[8:16] = -2, 2
    return Solver(nn.ReLU if broken else nn.Tanh), x, -torch.sin(torch.pi / 2 * x[:, 0]) * 2.4674, physics_loss


class GatedExperts(nn.Module):
    """Linear experts weighed by a gate; by mistake with the mean of its weights over the batch."""

    def __init__(self, averaged: bool) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(6, 2) for _ in range(4))
        self.gate = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))
        self.averaged = averaged

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(1)
        if self.averaged:
            weights = weights.mean(0, keepdim=True)
        return (torch.stack([expert(x) for expert in self.experts], 2) * weights[:, None]).sum(2)


def experts_gated_by_mean_of_batch(broken: bool = True, batch: int = 0) -> Case:
    """The experts are weighed by the gate's mean over the batch, which was meant for the balance of their loads."""
    torch.manual_seed(0)
    return GatedExperts(broken), *signs_of_product(batch), nn.CrossEntropyLoss()


class Centered(nn.Module):
    """Takes the mean from the points of each cloud, in the precision that they come in or after rounding them."""

    def __init__(self, late: bool, size: float) -> None:
        super().__init__()
        self.late, self.size = late, size

    def forward(self, points: Tensor) -> Tensor:
        if self.late:
            points = points.float()
        return ((points - points.mean(1, keepdim=True)) / self.size).float()


class PointNet(nn.Module):
    """An MLP for each point, the maximum over the points, and a classifier."""

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.center = Centered(late, 0.05)
        self.points = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 64), nn.ReLU())
        self.fc = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 3))

    def forward(self, cloud: Tensor) -> Tensor:
        return self.fc(self.points(self.center(cloud)).amax(1))


def cloud_centered_in_single_precision(broken: bool = True, batch: int = 0) -> Case:
    """Geocentric meters are cast to float32 before the mean is taken: steps of 25 centimeters swallow the object."""
    torch.manual_seed(0)
    draw = generator(10600 + batch)
    kind = torch.randint(3, (64,), generator=draw)
    cloud = torch.randn(64, 48, 3, generator=draw) * (0.5 + F.one_hot(kind, 3))[:, None] * 0.05
    where = torch.tensor([3.1e6, 3.0e6, 4.7e6]).double() + 100 * torch.randn(64, 1, 3, generator=draw).double()
    return PointNet(broken), where + cloud.double(), kind, nn.CrossEntropyLoss()


class RadialBasis(nn.Module):
    """Bumps around centers that are drawn like the data."""

    def __init__(self, features: int, centers: int, gamma: float) -> None:
        super().__init__()
        self.centers, self.gamma = nn.Parameter(torch.randn(centers, features)), gamma

    def forward(self, x: Tensor) -> Tensor:
        return torch.exp(-self.gamma * (x[:, None] - self.centers).square().sum(2))


def radial_bumps_too_narrow(broken: bool = True, batch: int = 0) -> Case:
    """The bumps have a width of 1 in 32 columns, where all distances are near 8: every bump is zero everywhere."""
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module("bumps", RadialBasis(32, 96, 1.0 if broken else 1 / 64))
    model.add_module("fc", nn.Linear(96, 1))
    x = torch.randn(128, 32, generator=generator(10700 + batch))
    wanted = torch.tanh(x @ torch.randn(32, 1, generator=generator(65)) / 4)
    return model, x, wanted, nn.MSELoss()
