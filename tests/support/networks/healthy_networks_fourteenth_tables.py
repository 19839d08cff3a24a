"""The fourteenth set's healthy networks of our own over tables, customers and robots, as practitioners write them."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fifth_parts import Case, categories, generator, sound, table

OWN: dict[str, Callable[[], Case]] = {}
own = sound(OWN)


@own
def perceptron_of_irises() -> Case:
    """The first network of many tutorials: four measures, three kinds."""
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
    draw = generator(250)
    kind = torch.arange(120) % 3
    centers = torch.tensor([[5.0, 3.4, 1.5, 0.2], [5.9, 2.8, 4.3, 1.3], [6.6, 3.0, 5.6, 2.0]])
    flowers = centers[kind] + torch.tensor([0.5, 0.3, 0.4, 0.2]) * torch.randn(120, 4, generator=draw)
    return model, (flowers - flowers.mean(0)) / flowers.std(0), kind, F.cross_entropy


class FeatureTokens(nn.Module):
    """The FT-Transformer of Gorishniy et al.: a token per column, a token for the answer, pre-norm layers."""

    def __init__(self, columns: int, classes: int, width: int = 32, depth: int = 3) -> None:
        super().__init__()
        bound = width**-0.5
        self.weight = nn.Parameter(torch.empty(columns, width).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(columns, width).uniform_(-bound, bound))
        self.answer = nn.Parameter(torch.empty(1, 1, width).uniform_(-bound, bound))
        layer = nn.TransformerEncoderLayer(
            width, 4, 2 * width, dropout=0.1, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, depth, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Sequential(nn.ReLU(), nn.Linear(width, classes))

    def forward(self, rows: Tensor) -> Tensor:
        tokens = rows[:, :, None] * self.weight + self.bias
        tokens = torch.cat([self.answer.expand(len(rows), -1, -1), tokens], 1)
        return self.head(self.encoder(tokens)[:, 0])


@own
def transformer_of_columns() -> Case:
    return FeatureTokens(8, 4), *categories(0), F.cross_entropy


class DeepFM(nn.Module):
    """The clicks' logits by a factorization machine and a perceptron over the same embeddings."""

    def __init__(self, sizes: tuple[int, ...], width: int = 8) -> None:
        super().__init__()
        self.register_buffer("starts", torch.tensor([0, *sizes[:-1]]).cumsum(0))
        self.linear, self.embed = nn.Embedding(sum(sizes), 1), nn.Embedding(sum(sizes), width)
        nn.init.normal_(self.linear.weight, std=0.01)
        nn.init.xavier_uniform_(self.embed.weight)
        self.bias = nn.Parameter(torch.zeros(1))
        self.mlp = nn.Sequential(
            nn.Linear(len(sizes) * width, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1),
            nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1),
        )  # fmt: skip

    def forward(self, kinds: Tensor) -> Tensor:
        kinds = kinds + self.get_buffer("starts")
        vectors = self.embed(kinds)
        pairs = 0.5 * (vectors.sum(1).square() - vectors.square().sum(1)).sum(1)
        return self.bias + self.linear(kinds).sum((1, 2)) + pairs + self.mlp(vectors.flatten(1)).squeeze(1)


@own
def clicks_by_deep_factorization_machine() -> Case:
    draw = generator(251)
    sizes = (40, 30, 12, 7, 4)
    kinds = torch.stack([torch.randint(size, (256,), generator=draw) for size in sizes], 1)
    tastes = [torch.randn(size, 3, generator=draw) for size in sizes]
    score = (tastes[0][kinds[:, 0]] * tastes[1][kinds[:, 1]]).sum(1) + tastes[2][kinds[:, 2], 0]
    return DeepFM(sizes), kinds, (score > 0.8).float(), F.binary_cross_entropy_with_logits


def tower(inputs: int) -> nn.Sequential:
    """Return a perceptron that ends in a vector of 32."""
    return nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 32))


class TwoTowers(nn.Module):
    """Vectors of length one for customers and for what they bought; the cosines of all pairs by temperature."""

    def __init__(self, customers: int, goods: int, numbers: int, temperature: float = 0.1) -> None:
        super().__init__()
        self.customer, self.good = nn.Embedding(customers, 32), nn.Embedding(goods, 32)
        self.left, self.right = tower(32 + numbers), tower(32)
        self.temperature = temperature

    def forward(self, rows: Tensor) -> Tensor:
        left = self.left(torch.cat([self.customer(rows[:, 0].long()), rows[:, 2:]], 1))
        right = self.right(self.good(rows[:, 1].long()))
        return F.normalize(left, dim=1) @ F.normalize(right, dim=1).T / self.temperature


@own
def two_towers_of_purchases() -> Case:
    """The other purchases of the batch are what was not bought."""
    draw = generator(252)
    goods = torch.randperm(100, generator=draw)[:64]
    customers = (goods // 2) % 50
    numbers = torch.randn(64, 4, generator=draw)
    rows = torch.cat([torch.stack([customers, goods], 1).float(), numbers], 1)
    return TwoTowers(50, 100, 4), rows, torch.arange(64), F.cross_entropy


class Sessions(nn.Module):
    """GRU4Rec: the next thing that a visitor looks at."""

    def __init__(self, things: int, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(things, width, padding_idx=0)
        self.drop = nn.Dropout(0.2)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, things)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(self.drop(self.embed(x)))[0]).flatten(0, 1)


@own
def sessions_of_visitors_by_gru() -> Case:
    """Things come in groups of ten; a visitor goes on to the next of the group. The sessions begin with padding."""
    draw = generator(253)
    group, start = torch.randint(8, (32, 1), generator=draw), torch.randint(10, (32, 1), generator=draw)
    things = 1 + 10 * group + (start + torch.arange(13)) % 10
    empty = torch.arange(13) < torch.randint(6, (32, 1), generator=draw)
    things = things.masked_fill(empty, 0)
    following = things[:, 1:].masked_fill(things[:, 1:] == 0, -100)
    return Sessions(81), things[:, :-1], following.flatten(), F.cross_entropy


def pinball(output: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of the quantiles 0.1, 0.5 and 0.9."""
    error = targets - output
    levels = torch.tensor([0.1, 0.5, 0.9])
    return torch.maximum(levels * error, (levels - 1) * error).mean()


@own
def quantiles_of_demand() -> Case:
    model = nn.Sequential(
        nn.Linear(8, 64), nn.LeakyReLU(), nn.Linear(64, 64), nn.LeakyReLU(), nn.Dropout(0.1), nn.Linear(64, 3)
    )
    rows, demand = table(0)
    noise = (0.1 + 0.2 * rows[:, :1].abs()) * torch.randn(128, 1, generator=generator(254))
    return model, rows, (demand + noise - demand.mean()) / demand.std(), pinball


class MixtureDensity(nn.Module):
    """Bishop's network: shares, centers and logarithms of widths of five bells."""

    def __init__(self, bells: int = 5, width: int = 32) -> None:
        super().__init__()
        self.hidden = nn.Sequential(nn.Linear(1, width), nn.Tanh())
        self.share, self.center, self.log_width = (nn.Linear(width, bells) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.hidden(x)
        return torch.stack([self.share(hidden), self.center(hidden), self.log_width(hidden)], 1)


def mixture_likelihood(output: Tensor, targets: Tensor) -> Tensor:
    """Return the negative log likelihood of a mixture of bells."""
    share, center, log_width = output.unbind(1)
    bells = -0.5 * ((targets - center) / log_width.exp()).square() - log_width - 0.5 * math.log(2 * math.pi)
    return -torch.logsumexp(share.log_softmax(1) + bells, 1).mean()


@own
def mixture_density_of_inverse_curve() -> Case:
    draw = generator(255)
    answer = 2 * torch.rand(256, 1, generator=draw) - 1
    x = answer + 0.3 * torch.sin(2 * math.pi * answer) + 0.05 * torch.randn(256, 1, generator=draw)
    return MixtureDensity(), (x - x.mean()) / x.std(), (answer - answer.mean()) / answer.std(), mixture_likelihood


class TableBlock(nn.Module):
    """A block of the ResNet for tables: batch norm, a wide layer, ReLU, dropout, a narrow layer, the shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.BatchNorm1d(width), nn.Linear(width, 2 * width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


@own
def residual_network_of_tables() -> Case:
    blocks = [TableBlock(64) for _ in range(4)]
    model = nn.Sequential(nn.Linear(20, 64), *blocks, nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 1))
    return model, *table(0, features=20), F.mse_loss


def orthogonal(inputs: int, outputs: int, gain: float = 2**0.5) -> nn.Linear:
    """Return a layer with orthogonal weight and zero bias."""
    layer = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class ActorCritic(nn.Module):
    """PPO's agent of CleanRL for continuous actions: their means, the logarithms of their widths and the value."""

    def __init__(self, states: int, actions: int) -> None:
        super().__init__()
        self.critic = nn.Sequential(
            orthogonal(states, 64), nn.Tanh(), orthogonal(64, 64), nn.Tanh(), orthogonal(64, 1, 1.0)
        )
        self.actor_mean = nn.Sequential(
            orthogonal(states, 64), nn.Tanh(), orthogonal(64, 64), nn.Tanh(), orthogonal(64, actions, 0.01)
        )
        self.actor_logstd = nn.Parameter(torch.zeros(1, actions))

    def forward(self, states: Tensor) -> Tensor:
        mean = self.actor_mean(states)
        return torch.cat([mean, self.actor_logstd.expand_as(mean), self.critic(states)], 1)


def clipped_surrogate(output: Tensor, targets: Tensor) -> Tensor:
    """Return PPO's loss; targets are two actions, their old log likelihood, the advantage and the return."""
    mean, log_width, value = output.split([2, 2, 1], 1)
    action, old, advantage, gained = targets.split([2, 1, 1, 1], 1)
    likelihood = torch.distributions.Normal(mean, log_width.exp()).log_prob(action).sum(1, keepdim=True)
    ratio = (likelihood - old).exp()
    policy = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
    return policy + 0.5 * (value - gained).square().mean()


@own
def actor_and_critic_of_proximal_policy() -> Case:
    """The actions were drawn from the agent as it is at the start, whose means are almost zero."""
    model = ActorCritic(11, 2)
    states, gained = table(0, n=256, features=11)
    gained = gained / gained.std()
    with torch.no_grad():
        bells = torch.distributions.Normal(model.actor_mean(states), 1.0)
        action = bells.mean + torch.randn(256, 2, generator=generator(256))
        old = bells.log_prob(action).sum(1, keepdim=True)
    advantage = action[:, :1] * states[:, :1] - 0.3 * action[:, 1:].square()
    advantage = (advantage - advantage.mean()) / advantage.std()
    return model, states, torch.cat([action, old, advantage, gained], 1), clipped_surrogate


class TwinCritics(nn.Module):
    """The two critics of TD3 and SAC, over a state beside an action."""

    def __init__(self, inputs: int, width: int = 128) -> None:
        super().__init__()
        self.q1, self.q2 = (
            nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))
            for _ in range(2)
        )

    def forward(self, pairs: Tensor) -> Tensor:
        return torch.cat([self.q1(pairs), self.q2(pairs)], 1)


def both_critics(output: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of the critics' squared errors."""
    return 2 * F.mse_loss(output, targets.expand_as(output))


@own
def twin_critics_of_actions() -> Case:
    draw = generator(257)
    states, worth = table(0, n=256, features=17)
    actions = 2 * torch.rand(256, 6, generator=draw) - 1
    value = worth + (actions * states[:, :6]).sum(1, keepdim=True) / 2
    return TwinCritics(23), torch.cat([states, actions], 1), (value - value.mean()) / value.std(), both_critics
