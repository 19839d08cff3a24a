"""The thirteenth set's healthy networks of our own over tables, users and games, as practitioners write them."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fifth_parts import Case, categories, generator, sound, table

OWN: dict[str, Callable[[], Case]] = {}
own = sound(OWN)


class TabularModel(nn.Module):
    """Embeddings of the categories beside normalized numbers, and a perceptron with batch norm and dropout."""

    def __init__(self, sizes: tuple[int, ...], numbers: int, widths: tuple[int, ...] = (128, 64)) -> None:
        super().__init__()
        self.sizes = sizes
        self.embeds = nn.ModuleList(nn.Embedding(size, min(50, (size + 1) // 2)) for size in sizes)
        self.bn_numbers = nn.BatchNorm1d(numbers)
        self.embed_drop = nn.Dropout(0.05)
        layers: list[nn.Module] = []
        inputs = sum(embed.embedding_dim for embed in self.embeds) + numbers
        for width in widths:
            layers += [nn.Linear(inputs, width), nn.ReLU(), nn.BatchNorm1d(width), nn.Dropout(0.1)]
            inputs = width
        self.layers = nn.Sequential(*layers, nn.Linear(inputs, 1))

    def forward(self, rows: Tensor) -> Tensor:
        kinds = rows[:, : len(self.sizes)].long()
        parts = [embed(kinds[:, i]) for i, embed in enumerate(self.embeds)]
        numbers = self.bn_numbers(rows[:, len(self.sizes) :])
        return self.layers(torch.cat([self.embed_drop(torch.cat(parts, 1)), numbers], 1))


@own
def house_prices_with_entity_embeddings() -> Case:
    draw = generator(140)
    sizes = (25, 12, 6, 4)
    kinds = torch.stack([torch.randint(size, (128,), generator=draw) for size in sizes], 1)
    numbers = torch.randn(128, 6, generator=draw)
    places = torch.randn(25, generator=draw)
    price = places[kinds[:, 0]] + numbers[:, 0] + 0.5 * numbers[:, 1] * (kinds[:, 2] > 2) + 0.2 * kinds[:, 3]
    price = ((price - price.mean()) / price.std())[:, None]
    return TabularModel(sizes, 6), torch.cat([kinds, numbers], 1), price, F.mse_loss


@own
def self_normalizing_perceptron() -> Case:
    """Eight layers of SELU with LeCun's initialization and alpha dropout, for a yes or no."""
    layers: list[nn.Module] = []
    for i in range(8):
        layers += [nn.Linear(64 if i else 16, 64), nn.SELU(), nn.AlphaDropout(0.05)]
    model = nn.Sequential(*layers, nn.Linear(64, 1), nn.Flatten(0))
    for module in model:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
            nn.init.zeros_(module.bias)
    columns, score = table(0, features=16)
    return model, columns, (score[:, 0] > 0).float(), F.binary_cross_entropy_with_logits


def partial_likelihood(risk: Tensor, targets: Tensor) -> Tensor:
    """Return Cox's negative log partial likelihood; targets are the time and whether the event was seen."""
    order = targets[:, 0].argsort(descending=True)
    risk, seen = risk[order, 0], targets[order, 1]
    return -((risk - risk.logcumsumexp(0)) * seen).sum() / seen.sum()


@own
def survival_by_cox_network() -> Case:
    """DeepSurv: the logarithm of the hazard of patients."""
    model = nn.Sequential(
        nn.Linear(10, 48), nn.ReLU(), nn.BatchNorm1d(48), nn.Dropout(0.1),
        nn.Linear(48, 48), nn.ReLU(), nn.BatchNorm1d(48), nn.Dropout(0.1), nn.Linear(48, 1, bias=False),
    )  # fmt: skip
    patients, hazard = table(0, features=10)
    draw = generator(141)
    death = -torch.rand(128, generator=draw).log() * torch.exp(-1.5 * hazard[:, 0])
    left = -2 * torch.rand(128, generator=draw).log()
    seen = (death <= left).float()
    return model, patients, torch.stack([torch.minimum(death, left), seen], 1), partial_likelihood


class NeuMF(nn.Module):
    """Neural collaborative filtering: the product of vectors beside a perceptron over other vectors."""

    def __init__(self, users: int, items: int, width: int = 16) -> None:
        super().__init__()
        self.user_gmf, self.item_gmf = nn.Embedding(users, width), nn.Embedding(items, width)
        self.user_mlp, self.item_mlp = nn.Embedding(users, 2 * width), nn.Embedding(items, 2 * width)
        self.mlp = nn.Sequential(
            nn.Linear(4 * width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width), nn.ReLU(),
        )  # fmt: skip
        self.predict = nn.Linear(2 * width, 1)
        for embed in (self.user_gmf, self.item_gmf, self.user_mlp, self.item_mlp):
            nn.init.normal_(embed.weight, std=0.1)
        for module in self.mlp:
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)

    def forward(self, pairs: Tensor) -> Tensor:
        user, item = pairs.unbind(1)
        product = self.user_gmf(user) * self.item_gmf(item)
        hidden = self.mlp(torch.cat([self.user_mlp(user), self.item_mlp(item)], 1))
        return self.predict(torch.cat([product, hidden], 1)).squeeze(1)


@own
def neural_collaborative_filtering() -> Case:
    draw = generator(142)
    pairs = torch.stack([torch.randint(60, (512,), generator=draw), torch.randint(80, (512,), generator=draw)], 1)
    tastes, kinds = torch.randn(60, 3, generator=draw), torch.randn(80, 3, generator=draw)
    liked = (tastes[pairs[:, 0]] * kinds[pairs[:, 1]]).sum(1) > 0.3
    return NeuMF(60, 80), pairs, liked.float(), F.binary_cross_entropy_with_logits


def of_chosen_action(output: Tensor, targets: Tensor) -> Tensor:
    """Return the smooth L1 loss of the chosen actions' values; targets are the action and its value."""
    chosen = output.gather(1, targets[:, :1].long()).squeeze(1)
    return F.smooth_l1_loss(chosen, targets[:, 1])


class DuelingNetwork(nn.Module):
    """The values of actions as the state's value and the advantages of the actions."""

    def __init__(self, states: int, actions: int, width: int = 128) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(states, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.value = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))
        self.advantage = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, actions))

    def forward(self, states: Tensor) -> Tensor:
        hidden = self.body(states)
        advantage = self.advantage(hidden)
        return self.value(hidden) + advantage - advantage.mean(1, keepdim=True)


@own
def dueling_q_network() -> Case:
    states, best = categories(0)
    action = torch.randint(4, (128,), generator=generator(143))
    value = (action == best).float() + 0.5 * states[:, 0]
    return DuelingNetwork(8, 4), states, torch.stack([action.float(), value], 1), of_chosen_action


@own
def q_network_of_game_frames() -> Case:
    """The network of Mnih et al. over four frames of a game with a ball and a bat, of pixels up to one."""
    model = nn.Sequential(
        nn.Conv2d(4, 32, 8, stride=4), nn.ReLU(), nn.Conv2d(32, 64, 4, stride=2), nn.ReLU(),
        nn.Conv2d(64, 64, 3, stride=1), nn.ReLU(), nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, 4),
    )  # fmt: skip
    draw = generator(144)
    frames = torch.full((32, 4, 84, 84), 0.34)
    frames[:, :, :8] = 0.56
    ball, speed = torch.randint(16, 60, (32, 2), generator=draw), torch.randint(-3, 4, (32, 2), generator=draw)
    bat = torch.randint(4, 70, (32,), generator=draw)
    for i in range(32):
        for step in range(4):
            row, column = (ball[i] + step * speed[i]).tolist()
            frames[i, step, row : row + 4, column : column + 4] = 0.93
            frames[i, step, 78:82, int(bat[i]) : int(bat[i]) + 12] = 0.78
    action = torch.randint(4, (32,), generator=draw)
    value = (1 - (ball[:, 1] - bat - 4).abs() / 20).clamp(-1, 1)
    return model, frames, torch.stack([action.float(), value], 1), of_chosen_action


class BoardBlock(nn.Module):
    """A residual block of a board: two convolutions with batch norm, then the shortcut and ReLU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


class PolicyAndValue(nn.Module):
    """AlphaZero for Connect Four: the moves' logits and, last, the value of the board."""

    def __init__(self, width: int = 48, blocks: int = 4) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.tower = nn.Sequential(*[BoardBlock(width) for _ in range(blocks)])
        self.policy = nn.Sequential(
            nn.Conv2d(width, 2, 1, bias=False), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(84, 7)
        )
        self.value = nn.Sequential(
            nn.Conv2d(width, 1, 1, bias=False), nn.BatchNorm2d(1), nn.ReLU(), nn.Flatten(), nn.Linear(42, 64),
            nn.ReLU(), nn.Linear(64, 1), nn.Tanh(),
        )  # fmt: skip

    def forward(self, boards: Tensor) -> Tensor:
        hidden = self.tower(self.stem(boards))
        return torch.cat([self.policy(hidden), self.value(hidden)], 1)


def moves_and_outcome(output: Tensor, targets: Tensor) -> Tensor:
    """Return the cross entropy with the search's shares of moves, and the error of the outcome."""
    return F.cross_entropy(output[:, :7], targets[:, :7]) + F.mse_loss(output[:, 7], targets[:, 7])


@own
def connect_four_policy_and_value() -> Case:
    draw = generator(145)
    heights = torch.randint(0, 6, (64, 1, 7), generator=draw)
    filled = torch.arange(6)[None, :, None] < heights
    mine = filled & (torch.rand(64, 6, 7, generator=draw) < 0.5)
    turn = (torch.arange(64) % 2).float()[:, None, None].expand(64, 6, 7)
    boards = torch.stack([mine.float(), (filled & ~mine).float(), turn], 1)
    balance = mine.float().sum((1, 2)) - (filled & ~mine).float().sum((1, 2))
    moves = torch.softmax(2.0 - heights[:, 0].float() + mine.float().sum(1), 1)
    return PolicyAndValue(), boards, torch.cat([moves, balance.sign()[:, None]], 1), moves_and_outcome
