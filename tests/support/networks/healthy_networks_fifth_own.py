"""Sound networks of unusual design: zero layers, shut gates, frozen and shared parts, all on purpose."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fifth_parts import Case, categories, generator, images, series, table


class ReZero(nn.Module):
    """A deep residual MLP whose branches start at zero."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 48)
        self.layers = nn.ModuleList(nn.Linear(48, 48) for _ in range(depth))
        self.gates = nn.Parameter(torch.zeros(depth))
        self.head = nn.Linear(48, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for gate, layer in zip(self.gates, self.layers, strict=True):
            x = x + gate * F.relu(layer(x))
        return self.head(x)


def rezero_mlp() -> Case:
    torch.manual_seed(0)
    return ReZero(24), *categories(0), nn.CrossEntropyLoss()


class Highway(nn.Module):
    """Highway layers whose gates start nearly shut."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(depth))
        self.gates = nn.ModuleList(nn.Linear(32, 32) for _ in range(depth))
        for gate in self.gates:
            nn.init.constant_(gate.bias, -3.0)
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer, gate in zip(self.layers, self.gates, strict=True):
            open_ = torch.sigmoid(gate(x))
            x = open_ * F.relu(layer(x)) + (1 - open_) * x
        return self.head(x)


def highway_shut_gates() -> Case:
    torch.manual_seed(0)
    return Highway(10), *categories(0), nn.CrossEntropyLoss()


def selu_mlp() -> Case:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for index in range(20):
        layers += [nn.Linear(8 if index == 0 else 64, 64), nn.SELU()]
    model = nn.Sequential(*layers, nn.Linear(64, 4))
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="linear")
            nn.init.zeros_(layer.bias)
    return model, *categories(0), nn.CrossEntropyLoss()


class DeepEncoder(nn.Module):
    """A deep pre-norm Transformer over a time series."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 32)
        self.position = nn.Parameter(0.02 * torch.randn(20, 32))
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, nn.LayerNorm(32), enable_nested_tensor=False)
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(x) + self.position).mean(1))


def deep_prenorm_transformer() -> Case:
    torch.manual_seed(0)
    return DeepEncoder(24), *series(0, n=32), nn.CrossEntropyLoss()


class ScaledMixer(nn.Module):
    """A mixer over patches with layer scale at 1e-6 and stochastic depth."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, stride=4)
        self.spatial = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1, groups=width) for _ in range(depth))
        self.norms = nn.ModuleList(nn.GroupNorm(1, width) for _ in range(depth))
        self.channel = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, 2 * width, 1), nn.GELU(), nn.Conv2d(2 * width, width, 1))
            for _ in range(depth)
        )
        self.scales = nn.ParameterList(nn.Parameter(torch.full((width, 1, 1), 1e-6)) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x)
        for spatial, norm, channel, scale in zip(self.spatial, self.norms, self.channel, self.scales, strict=True):
            branch = scale * channel(norm(spatial(x)))
            if self.training:
                kept = (torch.rand(len(x), 1, 1, 1) < 0.9).float() / 0.9
                branch = branch * kept
            x = x + branch
        return self.head(self.norm(x.mean((2, 3))))


def layer_scale_stochastic_depth() -> Case:
    torch.manual_seed(0)
    return ScaledMixer(48, 8), *images(0), nn.CrossEntropyLoss()


class LoRALinear(nn.Module):
    """A frozen linear layer with a low-rank correction that starts at zero."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        nn.init.kaiming_normal_(self.base.weight, nonlinearity="relu")
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def lora_on_frozen_net() -> Case:
    torch.manual_seed(0)
    embed = nn.Linear(8, 64).requires_grad_(False)
    nn.init.kaiming_normal_(embed.weight, nonlinearity="relu")
    model = nn.Sequential(
        embed, nn.ReLU(), LoRALinear(64, 4), nn.ReLU(), LoRALinear(64, 4), nn.ReLU(), nn.Linear(64, 4)
    )
    return model, *categories(0), nn.CrossEntropyLoss()


class TiedAutoencoder(nn.Module):
    """An autoencoder whose decoder uses the encoder's weights, transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(256, 96)
        self.second = nn.Linear(96, 12)
        self.bias1 = nn.Parameter(torch.zeros(96))
        self.bias2 = nn.Parameter(torch.zeros(256))

    def forward(self, x: Tensor) -> Tensor:
        code = self.second(torch.tanh(self.first(x)))
        hidden = torch.tanh(F.linear(code, self.second.weight.T, self.bias1))
        return F.linear(hidden, self.first.weight.T, self.bias2)


def tied_autoencoder() -> Case:
    torch.manual_seed(0)
    basis = torch.randn(6, 256, generator=generator(7))
    x = torch.randn(64, 6, generator=generator(1000)) @ basis / 2.4
    return TiedAutoencoder(), x, x, nn.MSELoss()


class Contrast(nn.Module):
    """An encoder of two views of each picture, with unit vectors as outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, 24, 3, stride=2, padding=1), nn.BatchNorm2d(24), nn.ReLU(),
            nn.Conv2d(24, 48, 3, stride=2, padding=1), nn.BatchNorm2d(48), nn.ReLU(),
            nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        )  # fmt: skip
        self.projector = nn.Sequential(nn.Linear(192, 64), nn.ReLU(), nn.Linear(64, 32))

    def forward(self, views: Tensor) -> Tensor:
        return F.normalize(self.projector(self.encoder(views)), dim=1)


def nt_xent(vectors: Tensor, partners: Tensor) -> Tensor:
    """Return the cross-entropy of finding each vector's partner among all others."""
    likeness = vectors @ vectors.T / 0.2
    itself = torch.eye(len(vectors), dtype=torch.bool)
    return F.cross_entropy(likeness.masked_fill(itself, -1e9), partners)


def contrastive_encoder() -> Case:
    torch.manual_seed(0)
    x, _ = images(0, n=32)
    views = torch.cat([x, x + 0.3 * torch.randn(x.shape, generator=generator(3))])
    return Contrast(), views, torch.arange(64).roll(32), nt_xent


def gan_discriminator() -> Case:
    torch.manual_seed(0)
    real, _ = images(0, n=32)
    fake = torch.tanh(torch.randn(32, 3, 16, 16, generator=generator(3)))
    layers: list[nn.Module] = []
    for inner, outer in ((3, 24), (24, 48), (48, 64)):
        layers += [nn.utils.parametrizations.spectral_norm(nn.Conv2d(inner, outer, 4, 2, 1)), nn.LeakyReLU(0.2)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(256, 1))
    return model, torch.cat([real, fake]), torch.cat([torch.ones(32, 1), torch.zeros(32, 1)]), nn.BCEWithLogitsLoss()


def policy_small_head() -> Case:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))
    for layer, gain in ((model[0], 2**0.5), (model[2], 2**0.5), (model[4], 0.01)):
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return model, *categories(0), nn.CrossEntropyLoss()


class Rescaled(nn.Module):
    """Predicts prices: the net works on standardized targets, its output is scaled back for the loss."""

    def __init__(self, mean: float, std: float) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
        nn.init.zeros_(self.net[4].weight)
        self.mean, self.std = mean, std

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * self.std + self.mean


def price_loss(output: Tensor, targets: Tensor) -> Tensor:
    """Return the squared error in units of ten thousand."""
    return F.mse_loss(output / 1e4, targets / 1e4)


def regression_scaled_targets() -> Case:
    torch.manual_seed(0)
    columns, targets = table(0)
    return Rescaled(50000.0, 20000.0), columns, targets * 20000 + 50000, price_loss


OWN: list[Callable[[], Case]] = [
    rezero_mlp, highway_shut_gates, selu_mlp, deep_prenorm_transformer, layer_scale_stochastic_depth,
    lora_on_frozen_net, tied_autoencoder, contrastive_encoder, gan_discriminator, policy_small_head,
    regression_scaled_targets,
]  # fmt: skip
