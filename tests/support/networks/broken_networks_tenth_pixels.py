"""Networks of the tenth set that rebuild pictures or give each pixel a class, each with its fault or mended."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fifth_parts import Case, generator


class Codebook(nn.Module):
    """The nearest of 32 codes for each place, with the straight-through estimate of the gradient or without."""

    def __init__(self, straight_through: bool) -> None:
        super().__init__()
        self.codes = nn.Embedding(32, 8)
        self.straight_through = straight_through

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        flat = z.permute(0, 2, 3, 1)
        nearest = torch.cdist(flat.reshape(-1, 8), self.codes.weight).argmin(1).view(flat.shape[:-1])
        chosen = self.codes(nearest)
        distance = (chosen - flat.detach()).square().mean()
        if self.straight_through:
            chosen = flat + (chosen - flat).detach()
        return chosen.permute(0, 3, 1, 2), distance


class VectorQuantizer(nn.Module):
    """A convolutional autoencoder with a codebook between its halves."""

    def __init__(self, straight_through: bool) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, 32, 4, 2, 1), nn.ReLU(), nn.Conv2d(32, 32, 4, 2, 1), nn.BatchNorm2d(32), nn.ReLU()
        )
        self.project = nn.Conv2d(32, 8, 1)
        self.codebook = Codebook(straight_through)
        self.decoder = nn.Sequential(nn.ConvTranspose2d(8, 32, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(32, 3, 4, 2, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        codes, distance = self.codebook(self.project(self.encoder(x)))
        return self.decoder(codes), distance


def mosaics(batch: int, n: int = 64, size: int = 16) -> tuple[Tensor, Tensor]:
    """Return noisy pictures of tiles in seven colors, and the tiles without noise."""
    colors = torch.randn(7, 3, generator=generator(13))
    draw = generator(1000 + batch)
    shown = colors[torch.randint(7, (n, size // 4, size // 4), generator=draw)].permute(0, 3, 1, 2)
    clean = F.interpolate(shown, size=size, mode="nearest")
    return clean + 0.3 * torch.randn(n, 3, size, size, generator=draw), clean


def vq_loss(output: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    rebuilt, distance = output
    return F.mse_loss(rebuilt, targets) + distance


def vqvae_no_straight_through(broken: bool = True, batch: int = 0) -> Case:
    torch.manual_seed(0)
    return VectorQuantizer(straight_through=not broken), *mosaics(batch), vq_loss


class VAE(nn.Module):
    """A variational autoencoder of flattened pictures; it returns the picture, the mean and the log variance."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU())
        self.mean, self.log_variance = nn.Linear(128, 8), nn.Linear(128, 8)
        self.decoder = nn.Sequential(nn.Linear(8, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 256))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.encoder(x)
        mean, log_variance = self.mean(h), self.log_variance(h)
        noise = torch.randn_like(mean) if self.training else torch.zeros_like(mean)
        return self.decoder(mean + torch.exp(log_variance / 2) * noise), mean, log_variance


def smooth_pictures(batch: int, n: int = 64) -> tuple[Tensor, Tensor]:
    """Return standardized pictures that mix six fixed patterns, and the same pictures to be rebuilt."""
    patterns = F.interpolate(torch.randn(6, 1, 4, 4, generator=generator(12)), size=16, mode="bicubic").flatten(1)
    pictures = torch.randn(n, 6, generator=generator(1000 + batch)) @ F.normalize(patterns) * (256 / 6) ** 0.5
    return pictures, pictures


def evidence(output: tuple[Tensor, Tensor, Tensor], targets: Tensor) -> Tensor:
    rebuilt, mean, log_variance = output
    divergence = (mean.square() + log_variance.exp() - 1 - log_variance).sum(1).mean() / 2
    return F.mse_loss(rebuilt, targets) + divergence / 256


def vae_log_variance_too_wide(broken: bool = True, batch: int = 0) -> Case:
    torch.manual_seed(0)
    model = VAE()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            nn.init.zeros_(module.bias)
    nn.init.normal_(model.mean.weight, std=0.05)
    nn.init.normal_(model.log_variance.weight, std=1.0 if broken else 0.05)
    return model, *smooth_pictures(batch), evidence


class DoubleConv(nn.Module):
    """Two convolutions with batch norm, each with ReLU or without."""

    def __init__(self, inputs: int, width: int, relu: bool) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inputs, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.relu = relu

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(self.conv1(x))
        if self.relu:
            x = F.relu(x)
        x = self.norm2(self.conv2(x))
        return F.relu(x) if self.relu else x


class UNet(nn.Module):
    """Two levels down by strided convolutions and two up, with skips."""

    def __init__(self, relu: bool, classes: int = 2, width: int = 12) -> None:
        super().__init__()
        self.enc1 = DoubleConv(1, width, relu)
        self.down1, self.enc2 = nn.Conv2d(width, width, 2, 2), DoubleConv(width, 2 * width, relu)
        self.down2, self.mid = nn.Conv2d(2 * width, 2 * width, 2, 2), DoubleConv(2 * width, 2 * width, relu)
        self.up2, self.dec2 = nn.ConvTranspose2d(2 * width, 2 * width, 2, 2), DoubleConv(4 * width, width, relu)
        self.up1, self.dec1 = nn.ConvTranspose2d(width, width, 2, 2), DoubleConv(2 * width, width, relu)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.enc1(x)
        middle = self.enc2(self.down1(fine))
        x = self.mid(self.down2(middle))
        x = self.dec2(torch.cat([self.up2(x), middle], 1))
        return self.head(self.dec1(torch.cat([self.up1(x), fine], 1)))


def textures(batch: int, n: int = 16, size: int = 16) -> tuple[Tensor, Tensor]:
    """Return pictures of noise with regions of high contrast, and where they are."""
    draw = generator(1000 + batch)
    field = F.interpolate(torch.randn(n, 1, 4, 4, generator=draw), size=size, mode="bilinear")
    mask = field > 0
    noise = torch.randn(n, 1, size, size, generator=draw)
    return torch.where(mask, 1.4 * noise, 0.2 * noise), mask[:, 0].long()


def unet_without_activations(broken: bool = True, batch: int = 0) -> Case:
    torch.manual_seed(0)
    return UNet(relu=not broken), *textures(batch), F.cross_entropy
