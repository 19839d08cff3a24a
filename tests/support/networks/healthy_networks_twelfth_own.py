"""The twelfth set's healthy networks of our own over tables, graphs and images, as practitioners write them."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fifth_parts import Case, categories, generator, images, scenes, sound, table

OWN: dict[str, Callable[[], Case]] = {}
own = sound(OWN)


class DeepAndCross(nn.Module):
    """Click rates by the second version of the deep and cross network: crosses of the columns beside a perceptron."""

    def __init__(self, sizes: tuple[int, ...], numbers: int, width: int = 8) -> None:
        super().__init__()
        self.vectors = nn.ModuleList(nn.Embedding(size, width) for size in sizes)
        for vectors in self.vectors:
            nn.init.normal_(vectors.weight, std=width**-0.5)
        inputs = width * len(sizes) + numbers
        self.crosses = nn.ModuleList(nn.Linear(inputs, inputs) for _ in range(2))
        self.deep = nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())
        self.head = nn.Linear(inputs + 32, 1)
        self.sizes = sizes

    def forward(self, rows: Tensor) -> Tensor:
        parts = [vectors(rows[:, i].long()) for i, vectors in enumerate(self.vectors)]
        first = x = torch.cat([*parts, rows[:, len(self.sizes) :]], 1)
        for cross in self.crosses:
            x = first * cross(x) + x
        return self.head(torch.cat([x, self.deep(first)], 1)).squeeze(1)


@own
def deep_and_cross_clicks() -> Case:
    draw = generator(84)
    sizes = (20, 30, 10)
    kinds = torch.stack([torch.randint(size, (256,), generator=draw) for size in sizes], 1)
    numbers = torch.randn(256, 4, generator=draw)
    clicks = (kinds[:, 0] > 12) | ((kinds[:, 1] > 14) & (numbers[:, 0] > 0))
    return DeepAndCross(sizes, 4), torch.cat([kinds, numbers], 1), clicks.float(), F.binary_cross_entropy_with_logits


class TwoTowers(nn.Module):
    """The scores of all pairs of users and items of a batch, by their vectors of length one and a temperature."""

    def __init__(self, users: int, items: int, width: int = 32) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(users, width), nn.Embedding(items, width)
        self.user_tower = nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, width))
        self.item_tower = nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, width))
        self.log_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, pairs: Tensor) -> Tensor:
        user = F.normalize(self.user_tower(self.users(pairs[:, 0])), dim=1)
        item = F.normalize(self.item_tower(self.items(pairs[:, 1])), dim=1)
        return self.log_scale.exp() * user @ item.T


@own
def two_towers_with_negatives_of_the_batch() -> Case:
    users = torch.randperm(200, generator=generator(85))[:64]
    return TwoTowers(200, 200), torch.stack([users, (users * 7) % 200], 1), torch.arange(64), F.cross_entropy


class MaskedLinear(nn.Linear):
    """A linear layer some of whose weights are masked."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__(mask.shape[1], mask.shape[0])
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.get_buffer("mask"), self.bias)


class MaskedDensity(nn.Module):
    """MADE: a mean and a log of the spread for each column, from the columns before it."""

    def __init__(self, columns: int = 6, width: int = 60) -> None:
        super().__init__()
        order, hidden = torch.arange(columns), torch.arange(width) % (columns - 1)
        first = (hidden[:, None] >= order).float()
        second = (hidden[:, None] >= hidden).float()
        last = (order[:, None] > hidden).float().repeat(2, 1)
        self.net = nn.Sequential(MaskedLinear(first), nn.ReLU(), MaskedLinear(second), nn.ReLU(), MaskedLinear(last))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def gaussian(output: Tensor, targets: Tensor) -> Tensor:
    """Return the negative log likelihood of each column under its normal distribution."""
    mean, log_spread = output.chunk(2, 1)
    return (0.5 * ((targets - mean) / log_spread.exp()).square() + log_spread + 0.92).mean()


@own
def masked_autoregressive_density() -> Case:
    rows = torch.randn(128, 2, generator=generator(86)) @ torch.randn(2, 6, generator=generator(87))
    rows = (rows + 0.3 * torch.randn(128, 6, generator=generator(88))) / 1.4
    return MaskedDensity(), rows, rows, gaussian


def mixture(output: Tensor, targets: Tensor) -> Tensor:
    """Return the negative log likelihood of a number under a mixture of normal distributions."""
    weight, mean, log_spread = output.chunk(3, 1)
    parts = weight.log_softmax(1) - 0.5 * ((targets - mean) / log_spread.exp()).square() - log_spread - 0.92
    return -parts.logsumexp(1).mean()


@own
def mixture_density_regressor() -> Case:
    """The classic of Bishop: several answers to one question."""
    model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 15))
    answers = 2 * torch.rand(256, 1, generator=generator(89)) - 1
    asked = answers + 0.3 * torch.sin(6.28 * answers) + 0.05 * torch.randn(256, 1, generator=generator(90))
    return model, asked / 0.6, answers / 0.58, mixture


class ActorCritic(nn.Module):
    """The scores of four actions, with small weights at first, and the value of the state, as in PPO."""

    def __init__(self, states: int, actions: int, width: int = 64) -> None:
        super().__init__()
        self.actor = nn.Sequential(
            nn.Linear(states, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, actions)
        )
        self.critic = nn.Sequential(
            nn.Linear(states, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
        )
        for net, last in ((self.actor, 0.01), (self.critic, 1.0)):
            for i in (0, 2, 4):
                nn.init.orthogonal_(net[i].weight, last if i == 4 else 2**0.5)
                nn.init.zeros_(net[i].bias)

    def forward(self, states: Tensor) -> Tensor:
        return torch.cat([self.actor(states), self.critic(states)], 1)


def policy_and_value(output: Tensor, targets: Tensor) -> Tensor:
    """Return the policy gradient's loss, the value's and a little entropy; targets are action, advantage, return."""
    action, advantage, value = targets.unbind(1)
    logs = output[:, :4].log_softmax(1)
    entropy = -(logs.exp() * logs).sum(1).mean()
    chosen = logs.gather(1, action.long()[:, None]).squeeze(1)
    return -(advantage * chosen).mean() + 0.5 * F.mse_loss(output[:, 4], value) - 0.01 * entropy


@own
def actor_and_critic() -> Case:
    states, best = categories(0)
    draw = generator(91)
    action = torch.randint(4, (128,), generator=draw)
    reward = (action == best).float()
    value = reward + 0.5 * torch.randn(128, generator=draw)
    advantage = (reward - reward.mean()) / reward.std()
    return ActorCritic(8, 4), states, torch.stack([action.float(), advantage, value], 1), policy_and_value


class SageLayer(nn.Module):
    """GraphSAGE: a linear map of the node and one of the mean of its neighbors, and ReLU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.of_node, self.of_neighbors = nn.Linear(inputs, outputs), nn.Linear(inputs, outputs, bias=False)

    def forward(self, nodes: Tensor, mean: Tensor) -> Tensor:
        return F.relu(self.of_node(nodes) + self.of_neighbors(mean @ nodes))


class GraphRegressor(nn.Module):
    """A number for each graph, whose nodes' features and links come side by side."""

    def __init__(self, features: int, width: int = 48) -> None:
        super().__init__()
        self.features = features
        self.layers = nn.ModuleList([SageLayer(features, width), SageLayer(width, width), SageLayer(width, width)])
        self.head = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, graphs: Tensor) -> Tensor:
        nodes, links = graphs[:, :, : self.features], graphs[:, :, self.features :]
        mean = links / links.sum(2, keepdim=True).clamp(min=1)
        for layer in self.layers:
            nodes = layer(nodes, mean)
        return self.head(nodes.mean(1))


@own
def graph_sage_of_molecules() -> Case:
    draw = generator(92)
    kinds = F.one_hot(torch.randint(5, (64, 12), generator=draw), 5).float()
    links = (torch.rand(64, 12, 12, generator=draw) < 0.15).triu(1).float()
    links = links + links.transpose(1, 2)
    energy = (links.sum((1, 2)) / 4 + kinds[:, :, 0].sum(1) - kinds[:, :, 3].sum(1))[:, None]
    return GraphRegressor(5), torch.cat([kinds, links], 2), (energy - energy.mean()) / energy.std(), F.mse_loss


class WideBlock(nn.Module):
    """The block of a wide residual network: norm, ReLU, convolution, twice, with dropout between."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm2d(inputs), nn.BatchNorm2d(outputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.drop = nn.Dropout(0.1)
        self.project = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if stride > 1 or inputs != outputs else None

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.norm1(x))
        shortcut = x if self.project is None else self.project(out)
        return shortcut + self.conv2(self.drop(F.relu(self.norm2(self.conv1(out)))))


@own
def wide_resnet_of_many_labels() -> Case:
    """A wide residual network that says which of six things are in a picture."""
    blocks = [WideBlock(16, 32, 1), WideBlock(32, 32, 1), WideBlock(32, 64, 2), WideBlock(64, 64, 1)]
    head = [nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 6)]
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), *blocks, *head)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    patterns = F.interpolate(torch.randn(6, 3, 4, 4, generator=generator(93)), size=16, mode="bilinear")
    there = (torch.rand(48, 6, generator=generator(94)) < 0.4).float()
    pictures = torch.einsum("nk,kchw->nchw", there, patterns)
    pictures = (pictures + 0.5 * torch.randn(pictures.shape, generator=generator(95))) / 1.1
    return model, pictures, there, F.binary_cross_entropy_with_logits


class LinkNet(nn.Module):
    """A segmentation network that adds what comes from the way down."""

    def __init__(self, classes: int, width: int = 16) -> None:
        super().__init__()
        self.enter = self._step(3, width, 1)
        self.down1, self.down2 = self._step(width, 2 * width, 2), self._step(2 * width, 4 * width, 2)
        self.up2, self.up1 = self._up(4 * width, 2 * width), self._up(2 * width, width)
        self.head = nn.Conv2d(width, classes, 3, padding=1)

    @staticmethod
    def _step(inputs: int, outputs: int, stride: int) -> nn.Sequential:
        conv = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU())

    @staticmethod
    def _up(inputs: int, outputs: int) -> nn.Sequential:
        grow = nn.ConvTranspose2d(inputs, outputs, 4, 2, 1, bias=False)
        return nn.Sequential(grow, nn.BatchNorm2d(outputs), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        fine = self.enter(x)
        middle = self.down1(fine)
        return self.head(fine + self.up1(middle + self.up2(self.down2(middle))))


@own
def linknet_of_scenes() -> Case:
    return LinkNet(classes=4), *scenes(0), F.cross_entropy


class Residual(nn.Module):
    """x + inner(x)"""

    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(*inner)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


@own
def convmixer_of_patches() -> Case:
    """Patches, then depthwise convolutions with a shortcut and pointwise ones, each with GELU and batch norm."""
    width = 48
    layers: list[nn.Module] = [nn.Conv2d(3, width, 2, stride=2), nn.GELU(), nn.BatchNorm2d(width)]
    for _ in range(4):
        depthwise = nn.Conv2d(width, width, 5, padding=2, groups=width)
        layers += [Residual(depthwise, nn.GELU(), nn.BatchNorm2d(width))]
        layers += [nn.Conv2d(width, width, 1), nn.GELU(), nn.BatchNorm2d(width)]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))
    return model, *images(0), F.cross_entropy


class Faces(nn.Module):
    """Sixteen times the cosines between a picture's vector and a vector of each person, as for face recognition."""

    def __init__(self, persons: int, width: int = 128) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs in ((3, 16), (16, 32), (32, 64)):
            layers += [nn.Conv2d(inputs, outputs, 3, 2, 1, bias=False), nn.BatchNorm2d(outputs), nn.PReLU(outputs)]
        self.body = nn.Sequential(*layers, nn.Flatten(), nn.Linear(256, width), nn.BatchNorm1d(width))
        self.persons = nn.Parameter(torch.empty(persons, width))
        nn.init.xavier_normal_(self.persons)

    def forward(self, x: Tensor) -> Tensor:
        return 16 * F.normalize(self.body(x), dim=1) @ F.normalize(self.persons, dim=1).T


@own
def faces_by_scaled_cosines() -> Case:
    return Faces(10), *images(0), F.cross_entropy


class GatedRows(nn.Module):
    """A residual block of a table with RMS norm and SwiGLU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate, self.up = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(x)
        return x + self.down(F.silu(self.gate(out)) * self.up(out))


@own
def gated_rows_with_huber_loss() -> Case:
    blocks = [GatedRows(48) for _ in range(3)]
    return nn.Sequential(nn.Linear(8, 48), *blocks, nn.RMSNorm(48), nn.Linear(48, 1)), *table(0), F.huber_loss
