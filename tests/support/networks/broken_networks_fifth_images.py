"""Broken networks for pictures, each with a healthy twin: classifiers, a detector, a U-Net and a VAE."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fifth_parts import Case, generator, images, scenes


class DigitNet(nn.Module):
    """Two convolutions and two linear layers, as in the tutorials."""

    def __init__(self, classes: int, softmax: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.fc1 = nn.Linear(32 * 16, 64)
        self.fc2 = nn.Linear(64, classes)
        self.softmax = softmax

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = self.fc2(F.relu(self.fc1(x.flatten(1))))
        return F.softmax(x, dim=1) if self.softmax else x


def softmax_before_loss(broken: bool = True, batch: int = 0) -> Case:
    torch.manual_seed(0)
    return DigitNet(20, broken), *images(batch, classes=20, channels=1), nn.CrossEntropyLoss()


def vgg_without_norm(broken: bool = True, batch: int = 0) -> Case:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    width = 3
    for item in (16, 16, "M", 32, 32, "M", 48, 48, 48, "M", 64, 64, 64, "M", 64, 64, 64):
        if item == "M":
            layers.append(nn.MaxPool2d(2))
            continue
        layers.append(nn.Conv2d(width, int(item), 3, padding=1))
        if not broken:
            layers.append(nn.BatchNorm2d(int(item)))
        layers.append(nn.ReLU(inplace=True))
        width = int(item)
    model = nn.Sequential()
    model.add_module("features", nn.Sequential(*layers))
    model.add_module("flatten", nn.Flatten())
    model.add_module(
        "classifier",
        nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
    )
    return model, *images(batch), nn.CrossEntropyLoss()


class BasicBlock(nn.Module):
    """The block of a ResNet."""

    def __init__(self, width: int, skip: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.skip = skip

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.skip:
            out = out + x
        return F.relu(out)


class ResNet(nn.Module):
    """A stem, equal blocks, and a linear head on pooled features."""

    def __init__(self, blocks: list[nn.Module], width: int, classes: int = 10, pool: int = 2) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.pool = nn.AvgPool2d(pool)
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.blocks(self.pool(self.stem(x))).mean((2, 3)))


def resnet_forgotten_skip(broken: bool = True, batch: int = 0) -> Case:
    torch.manual_seed(0)
    model = ResNet([BasicBlock(16, not broken) for _ in range(27)], 16, pool=4)
    return model, *images(batch), nn.CrossEntropyLoss()


class PlainBlock(nn.Module):
    """A residual block without normalization, its branch scaled down."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.3 * self.conv2(F.relu(self.conv1(F.relu(x))))


def resnet_one_block_unlike(broken: bool = True, batch: int = 0) -> Case:
    torch.manual_seed(0)
    blocks: list[nn.Module] = [PlainBlock(24) for _ in range(8)]
    for index, block in enumerate(blocks):
        for conv in (block.conv1, block.conv2):
            nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
            if broken and index == 5:
                nn.init.normal_(conv.weight)
    return ResNet(blocks, 24, 20, pool=4), *images(batch, classes=20), nn.CrossEntropyLoss()


class GatedBlock(nn.Module):
    """A residual block whose branch a learned gate opens, as in ReZero."""

    def __init__(self, width: int, zero_norm: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.gate = nn.Parameter(torch.zeros(1))
        if zero_norm:
            nn.init.zeros_(self.bn2.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * self.bn2(self.conv2(F.relu(self.bn1(self.conv1(F.relu(x))))))


def resnet_zero_twice(broken: bool = True, batch: int = 0) -> Case:
    torch.manual_seed(0)
    x, labels = images(batch, n=128)
    flip = torch.randint(2, (len(x), 1, 1, 1), generator=generator(2000 + batch)) * 2.0 - 1
    return ResNet([GatedBlock(24, broken) for _ in range(6)], 24, pool=4), x * flip, labels, nn.CrossEntropyLoss()


class Detector(nn.Module):
    """A backbone and a dense head of four convolutions that says where objects are."""

    def __init__(self, everywhere: bool) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        )  # fmt: skip
        tower: list[nn.Module] = []
        for _ in range(3):
            tower += [nn.Conv2d(32, 32, 3, padding=1), nn.ReLU()]
        self.head = nn.Sequential(*tower, nn.Conv2d(32, 1, 3, padding=1))
        convs = [m for m in self.head if isinstance(m, nn.Conv2d)]
        for conv in convs:
            nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
            nn.init.zeros_(conv.bias)
        nn.init.normal_(convs[-1].weight, std=0.01)
        for conv in convs if everywhere else convs[-1:]:
            nn.init.constant_(conv.bias, -4.6)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))


def detector_prior_everywhere(broken: bool = True, batch: int = 0) -> Case:
    torch.manual_seed(0)
    draw = generator(1000 + batch)
    there = (torch.rand(32, 1, 8, 8, generator=draw) < 0.05).float()
    pattern = torch.randn(3, 2, 2, generator=generator(7)) * 2
    x = torch.randn(32, 3, 16, 16, generator=draw) * 0.5
    x = x + F.conv_transpose2d(there, pattern[None], stride=2)
    return Detector(broken), x, there, nn.BCEWithLogitsLoss()


class UNet(nn.Module):
    """A small U-Net that gives one row of scores per pixel."""

    def __init__(self, classes: int, view: bool) -> None:
        super().__init__()
        self.down1 = self.double(3, 16)
        self.down2 = self.double(16, 32)
        self.middle = self.double(32, 32)
        self.up2 = self.double(64, 32)
        self.up1 = self.double(48, 16)
        self.out = nn.Conv2d(16, classes, 1)
        self.classes, self.view = classes, view

    @staticmethod
    def double(inner: int, outer: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(inner, outer, 3, padding=1), nn.BatchNorm2d(outer), nn.ReLU(),
            nn.Conv2d(outer, outer, 3, padding=1), nn.BatchNorm2d(outer), nn.ReLU(),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        c = self.middle(F.max_pool2d(b, 2))
        b = self.up2(torch.cat([F.interpolate(c, scale_factor=2), b], 1))
        a = self.up1(torch.cat([F.interpolate(b, scale_factor=2), a], 1))
        scores = self.out(a)
        if self.view:
            return scores.reshape(-1, self.classes)
        return scores.permute(0, 2, 3, 1).reshape(-1, self.classes)


def unet_view_of_scores(broken: bool = True, batch: int = 0) -> Case:
    torch.manual_seed(0)
    x, labels = scenes(batch)
    return UNet(4, broken), x, labels.flatten(), nn.CrossEntropyLoss()


def _backbone() -> nn.Sequential:
    layers: list[nn.Module] = []
    for inner, outer in ((3, 32), (32, 48), (48, 64)):
        layers += [nn.Conv2d(inner, outer, 3, stride=2, padding=1), nn.BatchNorm2d(outer), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten())


class Transfer(nn.Module):
    """A backbone and a new linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = _backbone()
        self.fc = nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.backbone(x))


def transfer_all_frozen(broken: bool = True, batch: int = 0) -> Case:
    torch.manual_seed(0)
    model = Transfer()
    for parameter in model.parameters() if broken else model.backbone.parameters():
        parameter.requires_grad = False
    return model, *images(batch), nn.CrossEntropyLoss()


class Encoded(nn.Module):
    """An encoder and a classifier; the broken one still has the no_grad of an earlier experiment."""

    def __init__(self, no_grad: bool) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, 8, 5, stride=4, padding=2), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.ReLU()
        )
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(32, 10))
        self.no_grad = no_grad

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.no_grad):
            features = self.encoder(x)
        return self.head(features)


def encoder_under_no_grad(broken: bool = True, batch: int = 0) -> Case:
    torch.manual_seed(0)
    return Encoded(broken), *images(batch), nn.CrossEntropyLoss()


class VAE(nn.Module):
    """A variational autoencoder; the broken one samples where it should reparameterize."""

    def __init__(self, sample: bool) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(256, 128), nn.ReLU())
        self.mu = nn.Linear(128, 8)
        self.logvar = nn.Linear(128, 8)
        self.decoder = nn.Sequential(nn.Linear(8, 128), nn.ReLU(), nn.Linear(128, 256))
        self.sample = sample

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.encoder(x)
        mu, logvar = self.mu(hidden), self.logvar(hidden)
        latent = torch.distributions.Normal(mu, (logvar / 2).exp())
        z = latent.sample() if self.sample else latent.rsample()
        return self.decoder(z), mu, logvar


def vae_loss(output: tuple[Tensor, Tensor, Tensor], target: Tensor) -> Tensor:
    """Return the squared error of the reconstruction plus the divergence from the prior."""
    picture, mu, logvar = output
    divergence = (mu**2 + logvar.exp() - 1 - logvar).sum(1).mean() / 2
    return F.mse_loss(picture, target, reduction="none").sum(1).mean() + divergence


def _smooth_pictures(batch: int) -> Tensor:
    basis = F.interpolate(torch.randn(6, 1, 4, 4, generator=generator(7)), size=16, mode="bilinear").flatten(1)
    return torch.randn(64, 6, generator=generator(1000 + batch)) @ basis / 1.3


def vae_sample(broken: bool = True, batch: int = 0) -> Case:
    torch.manual_seed(0)
    x = _smooth_pictures(batch)
    return VAE(broken), x, x, vae_loss
