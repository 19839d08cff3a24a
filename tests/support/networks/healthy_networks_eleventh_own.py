"""The eleventh set's healthy networks of our own over tables and images, as practitioners write them."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fifth_parts import Case, categories, generator, images, scenes, sound, table

OWN: dict[str, Callable[[], Case]] = {}
own = sound(OWN)


@own
def mlp_batch_norm_and_dropout() -> Case:
    """A classifier of rows with batch norms and dropout."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((8, 128), (128, 64), (64, 32)):
        layers += [nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs), nn.ReLU(), nn.Dropout(0.2)]
    return nn.Sequential(*layers, nn.Linear(32, 4)), *categories(0), F.cross_entropy


@own
def mlp_layer_norm_regressor() -> Case:
    """A regressor with GELU and layer norms."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((8, 64), (64, 64), (64, 64)):
        layers += [nn.Linear(inputs, outputs), nn.LayerNorm(outputs), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(64, 1)), *table(0), F.mse_loss


class WideAndDeep(nn.Module):
    """Click rates from four categories: a linear model beside a perceptron on their vectors."""

    def __init__(self, sizes: tuple[int, ...] = (20, 30, 10, 50), width: int = 8) -> None:
        super().__init__()
        self.wide = nn.ModuleList(nn.Embedding(size, 1) for size in sizes)
        self.vectors = nn.ModuleList(nn.Embedding(size, width) for size in sizes)
        self.deep = nn.Sequential(
            nn.Linear(width * len(sizes), 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1)
        )
        self.bias = nn.Parameter(torch.zeros(1))
        for embedding in [*self.wide, *self.vectors]:
            nn.init.normal_(embedding.weight, std=0.05)

    def forward(self, rows: Tensor) -> Tensor:
        wide = torch.cat([part(rows[:, i]) for i, part in enumerate(self.wide)], 1).sum(1)
        deep = self.deep(torch.cat([part(rows[:, i]) for i, part in enumerate(self.vectors)], 1))
        return wide + deep.squeeze(1) + self.bias


@own
def wide_and_deep_clicks() -> Case:
    draw = generator(42)
    rows = torch.stack([torch.randint(size, (256,), generator=draw) for size in (20, 30, 10, 50)], 1)
    clicks = ((rows[:, 0] > 9).float() + (rows[:, 2] > 4).float() > 0.5).float()
    return WideAndDeep(), rows, clicks, F.binary_cross_entropy_with_logits


class Factors(nn.Module):
    """Ratings from the vectors and biases of users and items."""

    def __init__(self, users: int, items: int, width: int = 16) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(users, width), nn.Embedding(items, width)
        self.user_bias, self.item_bias = nn.Embedding(users, 1), nn.Embedding(items, 1)
        for part in (self.user, self.item):
            nn.init.normal_(part.weight, std=width**-0.5)
        for part in (self.user_bias, self.item_bias):
            nn.init.zeros_(part.weight)

    def forward(self, pairs: Tensor) -> Tensor:
        user, item = pairs.unbind(1)
        bias = self.user_bias(user) + self.item_bias(item)
        return (self.user(user) * self.item(item)).sum(1) + bias.squeeze(1)


@own
def matrix_factorization_with_biases() -> Case:
    draw = generator(43)
    pairs = torch.stack([torch.randint(40, (256,), generator=draw), torch.randint(30, (256,), generator=draw)], 1)
    ratings = torch.randn(40, generator=draw)[pairs[:, 0]] + torch.randn(30, generator=draw)[pairs[:, 1]]
    return Factors(40, 30), pairs, ratings / 2**0.5, F.mse_loss


class DuelingQ(nn.Module):
    """The values of four actions as the value of the state plus the advantages of the actions."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.value, self.advantage = nn.Linear(64, 1), nn.Linear(64, 4)

    def forward(self, states: Tensor) -> Tensor:
        hidden = self.body(states)
        advantage = self.advantage(hidden)
        return self.value(hidden) + advantage - advantage.mean(1, keepdim=True)


@own
def dueling_q_network() -> Case:
    return DuelingQ(), *table(0, outputs=4), F.smooth_l1_loss


class GraphAttention(nn.Module):
    """One layer of a graph attention network with several heads."""

    def __init__(self, inputs: int, outputs: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.linear = nn.Linear(inputs, outputs, bias=False)
        self.of_source = nn.Parameter(torch.empty(heads, outputs // heads))
        self.of_target = nn.Parameter(torch.empty(heads, outputs // heads))
        for weight in (self.linear.weight, self.of_source, self.of_target):
            nn.init.xavier_uniform_(weight)

    def forward(self, nodes: Tensor, links: Tensor) -> Tensor:
        values = self.linear(nodes).view(len(nodes), self.heads, -1)
        source, target = (values * self.of_source).sum(2), (values * self.of_target).sum(2)
        scores = F.leaky_relu(target[:, None] + source[None], 0.2).masked_fill(~links[:, :, None], float("-inf"))
        return torch.einsum("ijh,jhd->ihd", scores.softmax(1), values).flatten(1)


class GraphAttentionNet(nn.Module):
    """Two layers of graph attention over one graph that the network holds, as for the citation graphs."""

    def __init__(self, links: Tensor) -> None:
        super().__init__()
        self.first, self.second = GraphAttention(8, 32), GraphAttention(32, 32)
        self.head = nn.Linear(32, 4)
        self.register_buffer("links", links)

    def forward(self, nodes: Tensor) -> Tensor:
        links = self.get_buffer("links")
        return self.head(F.elu(self.second(F.elu(self.first(nodes, links)), links)))


@own
def graph_attention_of_nodes() -> Case:
    nodes, classes = categories(0)
    same = classes[:, None] == classes[None]
    links = torch.rand(128, 128, generator=generator(44)) < torch.where(same, 0.05, 0.005)
    return GraphAttentionNet(links | links.T | torch.eye(128, dtype=torch.bool)), nodes, classes, F.cross_entropy


@own
def lenet_of_digits() -> Case:
    """LeNet-5 with ReLU and max pooling, with the weights that PyTorch draws."""
    model = nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip
    return model, *images(0, size=28, channels=1), F.cross_entropy


@own
def vgg_with_batch_norm() -> Case:
    layers: list[nn.Module] = []
    inputs = 3
    for outputs in (16, 16, 0, 32, 32, 0, 64, 64, 0):
        if not outputs:
            layers.append(nn.MaxPool2d(2))
            continue
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
        inputs = outputs
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.3), nn.Linear(64, 10))
    return model, *images(0), F.cross_entropy


class BasicBlock(nn.Module):
    """The basic block of ResNet, with a projection where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            project = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(project, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(out)) + self.shortcut(x))


@own
def resnet_of_basic_blocks() -> Case:
    """A ResNet-14 for small pictures, with He's weights."""
    shapes = [(16, 16, 1), (16, 16, 1), (16, 32, 2), (32, 32, 1), (32, 64, 2), (64, 64, 1)]
    stem = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)]
    model = nn.Sequential(*stem, *(BasicBlock(*shape) for shape in shapes), *head)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model, *images(0, n=32), F.cross_entropy


def _double(inputs: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in (inputs, outputs):
        layers += [nn.Conv2d(width, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """The usual U-Net with batch norms and transposed convolutions."""

    def __init__(self, classes: int, width: int = 16) -> None:
        super().__init__()
        self.down1, self.down2, self.middle = (
            _double(3, width),
            _double(width, 2 * width),
            _double(2 * width, 4 * width),
        )
        self.grow2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.grow1 = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.up2, self.up1 = _double(4 * width, 2 * width), _double(2 * width, width)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.down1(x)
        coarse = self.down2(F.max_pool2d(fine, 2))
        middle = self.middle(F.max_pool2d(coarse, 2))
        coarse = self.up2(torch.cat([coarse, self.grow2(middle)], 1))
        return self.head(self.up1(torch.cat([fine, self.grow1(coarse)], 1)))


@own
def unet_with_batch_norm() -> Case:
    return UNet(classes=4), *scenes(0), F.cross_entropy


@own
def denoising_autoencoder() -> Case:
    """Convolutions down to a quarter and up again, from noisy pictures to clean ones."""
    down = [nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU()]
    up = [nn.ConvTranspose2d(32, 16, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(16, 16, 4, 2, 1), nn.ReLU()]
    clean = F.interpolate(torch.randn(32, 3, 4, 4, generator=generator(45)), size=16, mode="bilinear")
    clean = clean / clean.std()
    noisy = clean + 0.3 * torch.randn(clean.shape, generator=generator(46))
    return nn.Sequential(*down, *up, nn.Conv2d(16, 3, 3, padding=1)), noisy, clean, F.mse_loss


@own
def dcgan_discriminator() -> Case:
    """DCGAN's discriminator for 32×32 pictures, with its weights."""
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 4, 2, 1, bias=False), nn.LeakyReLU(0.2)]
    for width in (32, 64):
        layers += [nn.Conv2d(width, 2 * width, 4, 2, 1, bias=False), nn.BatchNorm2d(2 * width), nn.LeakyReLU(0.2)]
    model = nn.Sequential(*layers, nn.Conv2d(128, 1, 4, bias=False), nn.Flatten(0))
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.normal_(module.weight, 0.0, 0.02)
        elif isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight, 1.0, 0.02)
    real, _ = images(0, n=32, size=32)
    fake = torch.tanh(torch.randn(32, 3, 32, 32, generator=generator(47)))
    truth = torch.cat([torch.ones(32), torch.zeros(32)])
    return model, torch.cat([real.clamp(-1, 1), fake]), truth, F.binary_cross_entropy_with_logits
