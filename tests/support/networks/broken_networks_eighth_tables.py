"""Broken networks of the eighth set for tables and graphs, each with a healthy twin."""

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from broken_networks_seventh_tables import signs_of_product
from fifth_parts import Case, categories, generator


class Adapter(nn.Module):
    """A frozen linear layer plus a learned map of low rank, as in LoRA."""

    def __init__(self, before: int, after: int, rank: int, zero: bool) -> None:
        super().__init__()
        self.base = nn.Linear(before, after).requires_grad_(False)
        self.down, self.up = nn.Linear(before, rank, bias=False), nn.Linear(rank, after, bias=False)
        nn.init.zeros_(self.up.weight)
        if zero:
            nn.init.zeros_(self.down.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 4 * self.up(self.down(x))


def adapters_zero_twice(broken: bool = True, batch: int = 0) -> Case:
    """Both factors of each adapter start at zero: neither gets a gradient, and the rest is frozen."""
    torch.manual_seed(0)
    model = nn.Sequential()
    for i, (before, after) in enumerate(((8, 96), (96, 96), (96, 4))):
        model.add_module(f"adapter{i}", Adapter(before, after, 8, broken))
        if i < 2:
            model.add_module(f"act{i}", nn.GELU())
    return model, *categories(batch), nn.CrossEntropyLoss()


class LinearExperts(nn.Module):
    """Linear experts, weighed by a softmax that starts out uniform."""

    def __init__(self, experts: int, copies: bool) -> None:
        super().__init__()
        first = nn.Linear(6, 2)
        self.experts = nn.ModuleList(copy.deepcopy(first) if copies else nn.Linear(6, 2) for _ in range(experts))
        self.gate = nn.Linear(6, experts)
        nn.init.zeros_(self.gate.weight)
        nn.init.zeros_(self.gate.bias)

    def forward(self, x: Tensor) -> Tensor:
        outputs = torch.stack([expert(x) for expert in self.experts], 2)
        return (outputs * self.gate(x).softmax(1)[:, None]).sum(2)


def experts_are_copies(broken: bool = True, batch: int = 0) -> Case:
    """The experts are deep copies of one, and the gate starts at zero: they get equal gradients and stay equal."""
    torch.manual_seed(0)
    return LinearExperts(4, broken), *signs_of_product(batch), nn.CrossEntropyLoss()


class GraphReader(nn.Module):
    """Means over neighbours, the mean over the nodes, a norm and a linear layer."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.own = nn.ModuleList(nn.Linear(before, 24) for before in (4, 24))
        self.others = nn.ModuleList(nn.Linear(before, 24) for before in (4, 24))
        self.norm = nn.GroupNorm(groups, 24)
        self.fc = nn.Linear(24, 3)

    def forward(self, graph: Tensor) -> Tensor:
        x, edges = graph[..., :4], graph[..., 4:]
        for own, others in zip(self.own, self.others, strict=True):
            x = F.relu(own(x) + others(edges @ x))
        return self.fc(self.norm(x.mean(1)))


def graph_norm_of_single_values(broken: bool = True, batch: int = 0) -> Case:
    """GroupNorm has as many groups as channels, and no space is left after the pooling: each value becomes zero."""
    torch.manual_seed(0)
    draw = generator(3400 + batch)
    kind = torch.randint(3, (48,), generator=draw)
    edges = (torch.rand(48, 10, 10, generator=draw) < (0.1 + 0.3 * kind)[:, None, None]).float() / 5
    x = torch.randn(48, 10, 4, generator=draw) / 2 + 1
    return GraphReader(24 if broken else 4), torch.cat([x, edges], 2), kind, nn.CrossEntropyLoss()


class SparseAutoencoder(nn.Module):
    """A wide code of ReLUs; the output is what was rebuilt, and the code."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(24, 64), nn.Linear(64, 24)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        code = F.relu(self.encoder(x))
        return self.decoder(code), code


def sparse_code_penalty_summed(broken: bool = True, batch: int = 0) -> Case:
    """The penalty on the code is a sum over the batch beside a mean error: the code collapses to zero."""
    torch.manual_seed(0)
    x = torch.randn(128, 4, generator=generator(1000 + batch)) @ torch.randn(4, 24, generator=generator(43)) / 2

    def loss(output: tuple[Tensor, Tensor], wanted: Tensor) -> Tensor:
        rebuilt, code = output
        penalty = code.abs().sum() if broken else code.abs().mean()
        return F.mse_loss(rebuilt, wanted) + 0.02 * penalty

    return SparseAutoencoder(), x, x, loss


class Student(nn.Module):
    """An MLP with batch norm that ends in a softmax or in its logarithm."""

    def __init__(self, logarithm: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU())
        self.classes = nn.Linear(48, 5)
        self.logarithm = logarithm

    def forward(self, x: Tensor) -> Tensor:
        scores = self.classes(self.body(x))
        return scores.log_softmax(1) if self.logarithm else scores.softmax(1)


def student_divergence_of_probabilities(broken: bool = True, batch: int = 0) -> Case:
    """KLDivLoss wants log-probabilities and gets probabilities: they are pushed to one class."""
    torch.manual_seed(0)
    x = torch.randn(128, 8, generator=generator(1000 + batch))
    teacher = (1.5 * torch.tanh(x @ torch.randn(8, 5, generator=generator(44)) / 2)).softmax(1)
    return Student(not broken), x, teacher, nn.KLDivLoss(reduction="batchmean")


def decoder_without_gain(broken: bool = True, batch: int = 0) -> Case:
    """Xavier's weights without the gain of ReLU: the variance halves in each of twenty layers."""
    torch.manual_seed(0)
    model = nn.Sequential()
    for i in range(20):
        layer = nn.Linear(64 if i else 6, 64 if i < 19 else 16)
        nn.init.xavier_normal_(layer.weight, gain=1.0 if broken or i == 19 else 2**0.5)
        nn.init.zeros_(layer.bias)
        model.add_module(f"fc{i}", layer)
        if i < 19:
            model.add_module(f"act{i}", nn.ReLU())
    x = torch.randn(128, 6, generator=generator(1000 + batch))
    return model, x, torch.tanh(x @ torch.randn(6, 16, generator=generator(45)) / 5), nn.MSELoss()
