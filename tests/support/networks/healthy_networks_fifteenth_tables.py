"""The fifteenth set's healthy networks of our own over tables, customers and robots, as practitioners write them."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fifth_parts import Case, generator, sound, table

OWN: dict[str, Callable[[], Case]] = {}
own = sound(OWN)


@own
def logistic_regression_of_tumors() -> Case:
    """Thirty correlated measures of cells, and whether the tumor is malignant."""
    draw = generator(310)
    ill = (torch.arange(256) % 5 < 2).float()[:, None]
    common = torch.randn(256, 6, generator=draw) + 1.2 * ill
    cells = common @ torch.randn(6, 30, generator=draw).abs() + torch.randn(256, 30, generator=draw)
    return nn.Linear(30, 1), (cells - cells.mean(0)) / cells.std(0), ill, F.binary_cross_entropy_with_logits


class WideAndDeep(nn.Module):
    """Cheng et al.: a linear model of kinds and crossed kinds beside a perceptron over embeddings and numbers."""

    def __init__(self, sizes: tuple[int, int], numbers: int, width: int = 16) -> None:
        super().__init__()
        self.sizes = sizes
        self.wide = nn.Embedding(sizes[0] * sizes[1], 1)
        nn.init.zeros_(self.wide.weight)
        self.embeds = nn.ModuleList(nn.Embedding(size, width) for size in sizes)
        self.deep = nn.Sequential(
            nn.Linear(2 * width + numbers, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 32), nn.ReLU(),
            nn.Linear(32, 1),
        )  # fmt: skip

    def forward(self, rows: Tensor) -> Tensor:
        kinds, numbers = rows[:, :2].long(), rows[:, 2:]
        crossed = kinds[:, 0] * self.sizes[1] + kinds[:, 1]
        vectors = [embed(kinds[:, i]) for i, embed in enumerate(self.embeds)]
        return (self.wide(crossed) + self.deep(torch.cat([*vectors, numbers], 1))).squeeze(1)


@own
def wide_and_deep_of_apps() -> Case:
    draw = generator(311)
    kinds = torch.stack([torch.randint(12, (256,), generator=draw), torch.randint(9, (256,), generator=draw)], 1)
    numbers, worth = table(1, n=256, features=6)
    liking = torch.randn(12, 9, generator=draw)[kinds[:, 0], kinds[:, 1]]
    installs = (liking + worth[:, 0] > 0.3).float()
    return WideAndDeep((12, 9), 6), torch.cat([kinds.float(), numbers], 1), installs, F.binary_cross_entropy_with_logits


class CrossNetwork(nn.Module):
    """DCN V2 of Wang et al.: cross layers beside a perceptron, and a layer over both."""

    def __init__(self, sizes: tuple[int, ...], width: int = 8, crosses: int = 3) -> None:
        super().__init__()
        total = len(sizes) * width
        self.embeds = nn.ModuleList(nn.Embedding(size, width) for size in sizes)
        self.crosses = nn.ModuleList(nn.Linear(total, total) for _ in range(crosses))
        self.deep = nn.Sequential(nn.Linear(total, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.head = nn.Linear(total + 64, 1)

    def forward(self, kinds: Tensor) -> Tensor:
        start = torch.cat([embed(kinds[:, i]) for i, embed in enumerate(self.embeds)], 1)
        crossed = start
        for layer in self.crosses:
            crossed = start * layer(crossed) + crossed
        return self.head(torch.cat([crossed, self.deep(start)], 1)).squeeze(1)


@own
def cross_network_of_advertisements() -> Case:
    draw = generator(312)
    sizes = (20, 15, 10, 6)
    kinds = torch.stack([torch.randint(size, (256,), generator=draw) for size in sizes], 1)
    tastes = [torch.randn(size, 2, generator=draw) for size in sizes]
    score = (tastes[0][kinds[:, 0]] * tastes[1][kinds[:, 1]]).sum(1) + tastes[3][kinds[:, 3], 0]
    return CrossNetwork(sizes), kinds, (score > 0.5).float(), F.binary_cross_entropy_with_logits


class GatedExperts(nn.Module):
    """MMoE of Ma et al.: experts that two tasks share, each with its own gate and tower."""

    def __init__(self, inputs: int, experts: int = 4, width: int = 32) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(inputs, width), nn.ReLU()) for _ in range(experts))
        self.gates = nn.ModuleList(nn.Linear(inputs, experts) for _ in range(2))
        self.towers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, 1)) for _ in range(2)
        )  # fmt: skip

    def forward(self, rows: Tensor) -> Tensor:
        known = torch.stack([expert(rows) for expert in self.experts], 1)
        mixed = [(gate(rows).softmax(1)[:, :, None] * known).sum(1) for gate in self.gates]
        return torch.cat([tower(task) for tower, task in zip(self.towers, mixed, strict=True)], 1)


def watched_and_liked(output: Tensor, targets: Tensor) -> Tensor:
    """Return the squared error of how long was watched and the cross entropy of whether it was liked."""
    watched = F.mse_loss(output[:, 0], targets[:, 0])
    return watched + F.binary_cross_entropy_with_logits(output[:, 1], targets[:, 1])


@own
def gated_experts_of_two_tasks() -> Case:
    rows, both = table(2, n=256, features=12, outputs=2)
    watched = (both[:, 0] - both[:, 0].mean()) / both[:, 0].std()
    liked = (both.sum(1) > both.sum(1).median()).float()
    return GatedExperts(12), rows, torch.stack([watched, liked], 1), watched_and_liked


class AdditiveModel(nn.Module):
    """A neural additive model of Agarwal et al.: a small perceptron for each column, whose outputs are added."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.shapes = nn.ModuleList(
            nn.Sequential(nn.Linear(1, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 1))
            for _ in range(columns)
        )
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, rows: Tensor) -> Tensor:
        parts = [shape(column) for shape, column in zip(self.shapes, rows.split(1, 1), strict=True)]
        return torch.cat(parts, 1).sum(1) + self.bias


@own
def additive_model_of_loans() -> Case:
    rows = torch.randn(256, 6, generator=generator(313))
    score = rows[:, 0].square() - 1 + 2 * torch.tanh(2 * rows[:, 1]) + rows[:, 2] - 0.7 * rows[:, 3].abs()
    return AdditiveModel(6), rows, (score > 0).float(), F.binary_cross_entropy_with_logits


@own
def counts_of_bicycles() -> Case:
    """How many bicycles are rented in an hour, by season, weather and time: the logarithm of Poisson's rate."""
    model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))
    rows, level = table(3, n=256, features=10)
    counts = torch.poisson((1 + 0.8 * (level - level.mean()) / level.std()).exp(), generator=generator(314))
    return model, rows, counts, nn.PoissonNLLLoss()


class MeanAndVariance(nn.Module):
    """A perceptron with a mean and a positive variance."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(inputs, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU())
        self.mean, self.raw = nn.Linear(50, 1), nn.Linear(50, 1)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.body(rows)
        return torch.cat([self.mean(hidden), F.softplus(self.raw(hidden)) + 1e-6], 1)


def gaussian(output: Tensor, targets: Tensor) -> Tensor:
    """Return the negative log likelihood of a bell with this mean and variance."""
    return F.gaussian_nll_loss(output[:, :1], targets, output[:, 1:])


@own
def mean_and_variance_of_concrete() -> Case:
    rows, strength = table(4, n=256)
    strength = strength + 0.2 * (rows[:, :1] > 0) * torch.randn(256, 1, generator=generator(315))
    return MeanAndVariance(8), rows, (strength - strength.mean()) / strength.std(), gaussian


class Ranks(nn.Module):
    """CORAL of Cao et al.: one score, and a threshold for each step of the rank."""

    def __init__(self, inputs: int, ranks: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(inputs, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 32), nn.ReLU(),
            nn.Linear(32, 1, bias=False),
        )  # fmt: skip
        self.thresholds = nn.Parameter(torch.arange(ranks - 1, 0, -1).float() / (ranks - 1))

    def forward(self, rows: Tensor) -> Tensor:
        return self.body(rows) + self.thresholds


@own
def ranks_of_wines() -> Case:
    """Five grades; a target says for each step whether the wine is above it."""
    rows, taste = table(5, n=256, features=11)
    edges = torch.quantile(taste, torch.tensor([0.1, 0.35, 0.65, 0.9]))
    return Ranks(11, 5), rows, (taste > edges).float(), F.binary_cross_entropy_with_logits


@own
def autoencoder_of_payments() -> Case:
    """Twenty-four standardized columns with five causes, through a code of eight, to find fraud by its error."""
    model = nn.Sequential(
        nn.Linear(24, 32), nn.ELU(), nn.Linear(32, 8), nn.ELU(), nn.Linear(8, 32), nn.ELU(), nn.Linear(32, 24)
    )
    draw = generator(316)
    rows = torch.randn(256, 5, generator=draw) @ torch.randn(5, 24, generator=draw)
    rows = rows + 0.3 * torch.randn(256, 24, generator=draw)
    rows = (rows - rows.mean(0)) / rows.std(0)
    return model, rows, rows, F.mse_loss


class Atoms(nn.Module):
    """C51 of Bellemare et al.: for each action the logits of 51 returns, as CleanRL writes it."""

    def __init__(self, states: int, actions: int, atoms: int = 51) -> None:
        super().__init__()
        self.shape = (actions, atoms)
        self.network = nn.Sequential(
            nn.Linear(states, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, actions * atoms)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x).unflatten(1, self.shape)


def taken_atoms(output: Tensor, targets: Tensor) -> Tensor:
    """Return the cross entropy of the taken action's returns; targets are the action and the returns' shares."""
    chosen = output[torch.arange(len(output)), targets[:, 0].long()]
    return -(targets[:, 1:] * chosen.log_softmax(1)).sum(1).mean()


@own
def categorical_q_network() -> Case:
    states, value = table(6, n=256)
    draw = generator(317)
    action = torch.randint(4, (256, 1), generator=draw)
    center = 2 * value / value.std() + 2 * (action == 1)
    shares = (-(torch.linspace(-10, 10, 51) - center).square() / 0.5).softmax(1)
    return Atoms(8, 4), states, torch.cat([action.float(), shares], 1), taken_atoms


def policy_gradient(output: Tensor, targets: Tensor) -> Tensor:
    """Return REINFORCE's loss; targets are the action and the standardized return."""
    likelihood = output.log_softmax(1).gather(1, targets[:, :1].long())
    return -(likelihood * targets[:, 1:]).mean()


@own
def policy_gradient_of_the_pole() -> Case:
    """PyTorch's example: one hidden layer with dropout; pushing the pole's side pays."""
    model = nn.Sequential(nn.Linear(4, 128), nn.Dropout(0.1), nn.ReLU(), nn.Linear(128, 2))
    draw = generator(318)
    states = torch.randn(200, 4, generator=draw)
    action = torch.randint(2, (200, 1), generator=draw)
    gained = (2 * action - 1) * torch.sign(states[:, 2:3]) + 0.5 * torch.randn(200, 1, generator=draw)
    gained = (gained - gained.mean()) / gained.std()
    return model, states, torch.cat([action.float(), gained], 1), policy_gradient


class Dynamics(nn.Module):
    """Five perceptrons of a world model, each with the change of a state and its log variance."""

    def __init__(self, inputs: int, states: int, members: int = 5) -> None:
        super().__init__()
        self.members = nn.ModuleList(
            nn.Sequential(nn.Linear(inputs, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 2 * states))
            for _ in range(members)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([member(x) for member in self.members], 1)


def members_likelihood(output: Tensor, targets: Tensor) -> Tensor:
    """Return the mean negative log likelihood of all members, but for a constant."""
    mean, log_variance = output.chunk(2, 2)
    log_variance = 0.5 - F.softplus(0.5 - log_variance)
    return ((targets[:, None] - mean).square() * (-log_variance).exp() + log_variance).mean()


@own
def world_model_of_a_robot() -> Case:
    rows, change = table(7, n=256, features=8, outputs=6)
    change = change + 0.1 * torch.randn(256, 6, generator=generator(319))
    return Dynamics(8, 6), rows, (change - change.mean(0)) / change.std(0), members_likelihood
