"""Sound networks of the tenth set on pictures and tables, as practitioners write them."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fifth_parts import Case, categories, generator, images, scenes, sound, table

OWN = {}
own = sound(OWN)


def conv_norm(inputs: int, width: int, stride: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(inputs, width, 3, stride, 1, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(width), nn.ReLU(inplace=True))


@own
def tabular_mlp_with_batch_norm() -> Case:
    layers: list[nn.Module] = []
    for inputs in (8, 64, 64):
        layers += [nn.Linear(inputs, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1)]
    return nn.Sequential(*layers, nn.Linear(64, 1)), *table(0), nn.HuberLoss()


class WideAndDeep(nn.Module):
    """A linear part and an MLP on embeddings of four columns; the probability of a click as a logit."""

    def __init__(self, sizes: tuple[int, ...] = (50, 30, 12, 7)) -> None:
        super().__init__()
        self.wide = nn.ModuleList(nn.Embedding(size, 1) for size in sizes)
        self.deep = nn.ModuleList(nn.Embedding(size, 8) for size in sizes)
        for embedding in [*self.wide, *self.deep]:
            nn.init.normal_(embedding.weight, std=0.1)
        self.mlp = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, columns: Tensor) -> Tensor:
        wide = sum(embedding(columns[:, i]) for i, embedding in enumerate(self.wide))
        deep = torch.cat([embedding(columns[:, i]) for i, embedding in enumerate(self.deep)], 1)
        return (wide + self.mlp(deep))[:, 0]


@own
def wide_and_deep_clicks() -> Case:
    draw = generator(1)
    columns = torch.stack([torch.randint(size, (512,), generator=draw) for size in (50, 30, 12, 7)], 1)
    clicks = ((columns[:, 2] < 6) & (columns[:, 3] < 5)).float()
    return WideAndDeep(), columns, clicks, F.binary_cross_entropy_with_logits


class DuelingNetwork(nn.Module):
    """The values of four actions from the value of the state and the actions' advantages."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.value, self.advantage = nn.Linear(64, 1), nn.Linear(64, 4)

    def forward(self, state: Tensor) -> Tensor:
        h = self.body(state)
        advantage = self.advantage(h)
        return self.value(h) + advantage - advantage.mean(1, keepdim=True)


def taken(values: Tensor, targets: Tensor) -> Tensor:
    chosen = values.gather(1, targets[:, :1].long())
    return F.smooth_l1_loss(chosen, targets[:, 1:])


@own
def dueling_dqn() -> Case:
    states, returns = table(0)
    actions = torch.randint(4, (len(states), 1), generator=generator(2))
    return DuelingNetwork(), states, torch.cat([actions.float(), returns], 1), taken


class ResidualTable(nn.Module):
    """A residual MLP with layer norm."""

    def __init__(self, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        self.stem = nn.Linear(8, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, width))
            for _ in range(depth)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x))


@own
def residual_mlp_for_classes() -> Case:
    return ResidualTable(), *categories(0), F.cross_entropy


@own
def vgg_with_batch_norm() -> Case:
    stages = [conv_norm(3, 32), conv_norm(32, 32), nn.MaxPool2d(2), conv_norm(32, 64), conv_norm(64, 64)]
    head = [nn.MaxPool2d(2), conv_norm(64, 128), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2)]
    return nn.Sequential(*stages, *head, nn.Linear(128, 10)), *images(0), nn.CrossEntropyLoss(label_smoothing=0.1)


class GroupBlock(nn.Module):
    """A residual block with group norm, and a projection where the width changes."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False)
        self.norm1 = nn.GroupNorm(8, width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm2 = nn.GroupNorm(8, width)
        self.shortcut = nn.Conv2d(inputs, width, 1, stride) if stride > 1 or inputs != width else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(out)) + self.shortcut(x))


@own
def resnet_with_group_norm() -> Case:
    blocks = [GroupBlock(32, 32, 1), GroupBlock(32, 64, 2), GroupBlock(64, 64, 1), GroupBlock(64, 128, 2)]
    stem = [nn.Conv2d(3, 32, 3, 1, 1, bias=False), nn.GroupNorm(8, 32), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)]
    return nn.Sequential(*stem, *blocks, *head), *images(0), F.cross_entropy


class UNet(nn.Module):
    """Two levels with max pooling, transposed convolutions and skips."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.enc1 = nn.Sequential(conv_norm(3, width), conv_norm(width, width))
        self.enc2 = nn.Sequential(conv_norm(width, 2 * width), conv_norm(2 * width, 2 * width))
        self.bottom = nn.Sequential(conv_norm(2 * width, 4 * width), conv_norm(4 * width, 4 * width))
        self.up2, self.up1 = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2), nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.dec2 = nn.Sequential(conv_norm(4 * width, 2 * width), conv_norm(2 * width, 2 * width))
        self.dec1 = nn.Sequential(conv_norm(2 * width, width), conv_norm(width, width))
        self.head = nn.Conv2d(width, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip1 = self.enc1(x)
        skip2 = self.enc2(F.max_pool2d(skip1, 2))
        x = self.bottom(F.max_pool2d(skip2, 2))
        x = self.dec2(torch.cat([self.up2(x), skip2], 1))
        return self.head(self.dec1(torch.cat([self.up1(x), skip1], 1)))


@own
def unet_with_batch_norm() -> Case:
    return UNet(), *scenes(0), F.cross_entropy


@own
def convolutional_autoencoder() -> Case:
    encoder = [nn.Conv2d(3, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3, 2, 1)]
    decoder = [nn.ConvTranspose2d(32, 32, 4, 2, 1), nn.BatchNorm2d(32), nn.ReLU(), nn.ConvTranspose2d(32, 3, 4, 2, 1)]
    pictures, _ = images(0)
    return nn.Sequential(*encoder, nn.BatchNorm2d(32), nn.ReLU(), *decoder), pictures, pictures, F.mse_loss


class VAE(nn.Module):
    """A variational autoencoder of small pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(768, 128), nn.ReLU())
        self.mean, self.log_variance = nn.Linear(128, 16), nn.Linear(128, 16)
        self.decoder = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 768), nn.Unflatten(1, (3, 16, 16)))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.encoder(x)
        mean, log_variance = self.mean(h), self.log_variance(h)
        z = mean + torch.exp(0.5 * log_variance) * torch.randn_like(mean)
        return self.decoder(z), mean, log_variance


def evidence(output: tuple[Tensor, Tensor, Tensor], targets: Tensor) -> Tensor:
    rebuilt, mean, log_variance = output
    divergence = (mean.square() + log_variance.exp() - 1 - log_variance).sum(1).mean() / 2
    return F.mse_loss(rebuilt, targets, reduction="sum") / len(targets) + divergence


@own
def variational_autoencoder() -> Case:
    pictures, _ = images(0)
    return VAE(), pictures, pictures, evidence


@own
def gan_discriminator() -> Case:
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 4, 2, 1), nn.LeakyReLU(0.2)]
    for inputs in (32, 64):
        layers += [nn.Conv2d(inputs, 64, 4, 2, 1, bias=False), nn.BatchNorm2d(64), nn.LeakyReLU(0.2)]
    pictures, labels = images(0)
    model = nn.Sequential(*layers, nn.Conv2d(64, 1, 2), nn.Flatten())
    return model, pictures, (labels % 2).float()[:, None], F.binary_cross_entropy_with_logits


class Coupling(nn.Module):
    """An affine coupling: one half scales and shifts the other."""

    def __init__(self, width: int, flip: bool) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(width // 2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, width)
        )
        nn.init.zeros_(self.net[4].weight)
        nn.init.zeros_(self.net[4].bias)
        self.flip = flip

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = x.chunk(2, 1)[:: -1 if self.flip else 1]
        scale, shift = self.net(a).chunk(2, 1)
        scale = torch.tanh(scale)
        b = b * scale.exp() + shift
        return torch.cat([b, a] if self.flip else [a, b], 1), scale.sum(1)


class Flow(nn.Module):
    """RealNVP of six couplings; it returns the latent vectors and the logarithm of the volume."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.couplings = nn.ModuleList(Coupling(width, bool(i % 2)) for i in range(6))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        volume = x.new_zeros(len(x))
        for coupling in self.couplings:
            x, change = coupling(x)
            volume = volume + change
        return x, volume


def negative_likelihood(output: tuple[Tensor, Tensor], _: Tensor) -> Tensor:
    z, volume = output
    return (z.square().sum(1) / 2 - volume).mean()


@own
def realnvp_flow() -> Case:
    x = torch.randn(256, 4, generator=generator(3))
    x = torch.cat([x[:, :2], 0.3 * x[:, 2:] + x[:, :2].square() - 1], 1)
    return Flow(), x, torch.zeros(256), negative_likelihood
