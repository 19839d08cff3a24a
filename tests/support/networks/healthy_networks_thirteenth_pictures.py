"""The thirteenth set's healthy networks of our own that see or make pictures, as practitioners write them."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fifth_parts import Case, generator, sound

OWN: dict[str, Callable[[], Case]] = {}
own = sound(OWN)


def digits(n: int, seed: int = 160) -> tuple[Tensor, Tensor]:
    """Return pictures of 28 pixels from 0 to 1, mostly dark as handwriting is, and their ten classes."""
    draw = generator(seed)
    glyphs = F.interpolate((torch.rand(10, 1, 5, 5, generator=generator(161)) < 0.45).float(), size=20, mode="bilinear")
    labels = torch.randint(10, (n,), generator=draw)
    shifts = torch.randint(-2, 3, (n, 2), generator=draw).tolist()
    pages = F.pad(glyphs[labels], (4, 4, 4, 4))
    pages = torch.stack([page.roll(shift, (1, 2)) for page, shift in zip(pages, shifts, strict=True)])
    return (1.5 * pages * (0.8 + 0.2 * torch.rand(n, 1, 1, 1, generator=draw))).clamp(0, 1), labels


@own
def basic_example_of_digits() -> Case:
    """The network of PyTorch's basic MNIST example."""
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25),
        nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10), nn.LogSoftmax(1),
    )  # fmt: skip
    pages, labels = digits(32)
    return model, (pages - pages.mean()) / pages.std(), labels, F.nll_loss


def twice(inputs: int, outputs: int) -> nn.Sequential:
    """Return two convolutions with batch norm and ReLU."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True),
        nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True),
    )  # fmt: skip


class UNet(nn.Module):
    """A U-Net of three levels for scans of one channel."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.enter = twice(1, width)
        self.downs = nn.ModuleList(twice(width * 2**i, width * 2 ** (i + 1)) for i in range(3))
        self.grows = nn.ModuleList(
            nn.ConvTranspose2d(width * 2 ** (i + 1), width * 2**i, 2, stride=2) for i in (2, 1, 0)
        )
        self.ups = nn.ModuleList(twice(width * 2 ** (i + 1), width * 2**i) for i in (2, 1, 0))
        self.leave = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = [self.enter(x)]
        for down in self.downs:
            kept.append(down(F.max_pool2d(kept[-1], 2)))
        x = kept.pop()
        for grow, up in zip(self.grows, self.ups, strict=True):
            x = up(torch.cat([kept.pop(), grow(x)], 1))
        return self.leave(x)


def dice_and_entropy(output: Tensor, targets: Tensor) -> Tensor:
    """Return the Dice loss of each picture and the binary cross entropy."""
    there = output.sigmoid()
    both = (there * targets).sum((1, 2, 3))
    dice = 1 - (2 * both + 1) / (there.sum((1, 2, 3)) + targets.sum((1, 2, 3)) + 1)
    return dice.mean() + F.binary_cross_entropy_with_logits(output, targets)


@own
def unet_of_scans() -> Case:
    draw = generator(162)
    line = torch.arange(64.0)
    center, radius = 16 + 32 * torch.rand(8, 2, 1, 1, generator=draw), 6 + 6 * torch.rand(8, 1, 1, generator=draw)
    apart = ((line[:, None] - center[:, 0]).square() + (line - center[:, 1]).square()).sqrt()
    lesion = (apart < radius).float()[:, None]
    tissue = F.interpolate(torch.randn(8, 1, 8, 8, generator=draw), size=64, mode="bilinear")
    scans = 1.5 * lesion + tissue + 0.3 * torch.randn(8, 1, 64, 64, generator=draw)
    return UNet(), (scans - scans.mean()) / scans.std(), lesion, dice_and_entropy


class ScaledBlock(nn.Module):
    """A block of EDSR: two convolutions without norm, whose sum with the shortcut is scaled."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * self.body(x)


class SuperResolution(nn.Module):
    """EDSR for twice the size."""

    def __init__(self, width: int = 32, blocks: int = 6) -> None:
        super().__init__()
        self.head = nn.Conv2d(3, width, 3, padding=1)
        self.body = nn.Sequential(*[ScaledBlock(width) for _ in range(blocks)], nn.Conv2d(width, width, 3, padding=1))
        self.tail = nn.Sequential(
            nn.Conv2d(width, 4 * width, 3, padding=1), nn.PixelShuffle(2), nn.Conv2d(width, 3, 3, padding=1)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.head(x)
        return self.tail(x + self.body(x))


def smooth(n: int, size: int, seed: int) -> Tensor:
    """Return pictures of pixels from -1 to 1 with coarse and fine parts."""
    draw = generator(seed)
    coarse = F.interpolate(torch.randn(n, 3, 4, 4, generator=draw), size=size, mode="bicubic")
    fine = F.interpolate(torch.randn(n, 3, 16, 16, generator=draw), size=size, mode="bicubic")
    return torch.tanh(0.8 * coarse + 0.3 * fine)


@own
def super_resolution_without_norms() -> Case:
    large = smooth(16, 48, 163)
    return SuperResolution(), F.avg_pool2d(large, 2), large, F.l1_loss


class DigitVAE(nn.Module):
    """The variational autoencoder of PyTorch's examples: the pixels, the means and the logs of the variances."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(784, 400)
        self.fc21, self.fc22 = nn.Linear(400, 20), nn.Linear(400, 20)
        self.fc3, self.fc4 = nn.Linear(20, 400), nn.Linear(400, 784)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.fc1(x.flatten(1)))
        mean, log_variance = self.fc21(hidden), self.fc22(hidden)
        code = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        pixels = torch.sigmoid(self.fc4(F.relu(self.fc3(code))))
        return torch.cat([pixels, mean, log_variance], 1)


def evidence(output: Tensor, targets: Tensor) -> Tensor:
    """Return the mean over pictures of the pixels' cross entropy and the divergence from the prior."""
    pixels, mean, log_variance = output.split([784, 20, 20], 1)
    entropy = F.binary_cross_entropy(pixels, targets.flatten(1), reduction="sum")
    divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum()
    return (entropy + divergence) / len(targets)


@own
def variational_autoencoder_of_digits() -> Case:
    pages, _ = digits(64)
    return DigitVAE(), pages, pages, evidence


class NoisyBlock(nn.Module):
    """A residual block that knows the time; its last convolution starts at zero."""

    def __init__(self, inputs: int, outputs: int, times: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(8, inputs), nn.Conv2d(inputs, outputs, 3, padding=1)
        self.time = nn.Linear(times, outputs)
        self.norm2, self.conv2 = nn.GroupNorm(8, outputs), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()
        nn.init.zeros_(self.conv2.weight)
        nn.init.zeros_(self.conv2.bias)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        out = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(time))[:, :, None, None]
        return self.shortcut(x) + self.conv2(F.silu(self.norm2(out)))


class Denoiser(nn.Module):
    """The noise in a picture, as in DDPM; the fourth channel holds the time, from 0 to 1."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.width = width
        self.time = nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, 4 * width))
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        self.fine1 = NoisyBlock(width, width, 4 * width)
        self.down = nn.Conv2d(width, width, 3, stride=2, padding=1)
        self.coarse1 = NoisyBlock(width, 2 * width, 4 * width)
        self.coarse2 = NoisyBlock(2 * width, 2 * width, 4 * width)
        self.up = nn.Conv2d(2 * width, width, 3, padding=1)
        self.fine2 = NoisyBlock(2 * width, width, 4 * width)
        self.leave = nn.Sequential(nn.GroupNorm(8, width), nn.SiLU(), nn.Conv2d(width, 3, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        pace = torch.exp(-math.log(10000) * torch.arange(self.width // 2).to(x) / (self.width // 2))
        angle = 1000 * x[:, 3, 0, 0, None] * pace
        time = self.time(torch.cat([angle.sin(), angle.cos()], 1))
        fine = self.fine1(self.enter(x[:, :3]), time)
        coarse = self.coarse2(self.coarse1(self.down(fine), time), time)
        grown = self.up(F.interpolate(coarse, scale_factor=2))
        return self.leave(self.fine2(torch.cat([fine, grown], 1), time))


@own
def denoising_diffusion() -> Case:
    draw = generator(164)
    clean = smooth(16, 16, 165)
    time = torch.randint(1000, (16,), generator=draw)
    kept = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000), 0)[time][:, None, None, None]
    noise = torch.randn(clean.shape, generator=draw)
    noisy = kept.sqrt() * clean + (1 - kept).sqrt() * noise
    plane = (time / 1000)[:, None, None, None].expand(16, 1, 16, 16)
    return Denoiser(), torch.cat([noisy, plane], 1), noise, F.mse_loss


class Flow(nn.Module):
    """RealNVP of two columns: each step moves and stretches one of them, as a function of the other."""

    def __init__(self, steps: int = 6, width: int = 64) -> None:
        super().__init__()
        self.steps = nn.ModuleList(
            nn.Sequential(nn.Linear(1, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2))
            for _ in range(steps)
        )

    def forward(self, x: Tensor) -> Tensor:
        kept, moved = x.chunk(2, 1)
        volume = torch.zeros_like(kept)
        for step in self.steps:
            stretch, move = step(kept).chunk(2, 1)
            stretch = torch.tanh(stretch)
            moved = moved * stretch.exp() + move
            volume = volume + stretch
            kept, moved = moved, kept
        return torch.cat([kept, moved, volume], 1)


def flow_likelihood(output: Tensor, targets: Tensor) -> Tensor:
    """Return the negative log likelihood of the points; the targets are the points themselves."""
    return (0.5 * output[:, :2].square().sum(1) + math.log(2 * math.pi) - output[:, 2]).mean()


@own
def normalizing_flow_of_moons() -> Case:
    draw = generator(166)
    angle, upper = math.pi * torch.rand(256, generator=draw), torch.arange(256) % 2 == 0
    x = torch.where(upper, angle.cos(), 1 - angle.cos())
    y = torch.where(upper, angle.sin(), 0.5 - angle.sin())
    points = torch.stack([x, y], 1) + 0.05 * torch.randn(256, 2, generator=draw)
    points = (points - points.mean(0)) / points.std(0)
    return Flow(), points, points, flow_likelihood


@own
def discriminator_of_deep_convolutions() -> Case:
    """The discriminator of PyTorch's DCGAN tutorial, for pictures and what an untrained generator makes."""
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 4, 2, 1, bias=False), nn.LeakyReLU(0.2)]
    for width in (32, 64, 128):
        layers += [nn.Conv2d(width, 2 * width, 4, 2, 1, bias=False), nn.BatchNorm2d(2 * width), nn.LeakyReLU(0.2)]
    model = nn.Sequential(*layers, nn.Conv2d(256, 1, 4, 1, 0, bias=False), nn.Flatten(0), nn.Sigmoid())
    for module in model:
        if isinstance(module, nn.Conv2d):
            nn.init.normal_(module.weight, 0.0, 0.02)
        elif isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight, 1.0, 0.02)
    made = torch.tanh(F.avg_pool2d(torch.randn(16, 3, 66, 66, generator=generator(167)), 3, 1))
    real = torch.cat([torch.ones(16), torch.zeros(16)])
    return model, torch.cat([smooth(16, 64, 168), made]), real, F.binary_cross_entropy


class MaskedConv(nn.Conv2d):
    """A convolution that sees the pixels before; without `own` not the pixel itself."""

    def __init__(self, inputs: int, outputs: int, kernel: int, own: bool) -> None:
        super().__init__(inputs, outputs, kernel, padding=kernel // 2)
        mask = torch.ones(kernel, kernel)
        mask[kernel // 2, kernel // 2 + own :] = 0
        mask[kernel // 2 + 1 :] = 0
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight * self.get_buffer("mask"), self.bias, padding=self.padding)


class PixelBlock(nn.Module):
    """A residual block of PixelCNN."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.ReLU(), nn.Conv2d(2 * width, width, 1), nn.ReLU(), MaskedConv(width, width, 3, own=True), nn.ReLU(),
            nn.Conv2d(width, 2 * width, 1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


@own
def pixel_cnn_of_black_and_white() -> Case:
    width = 24
    blocks = [PixelBlock(width) for _ in range(4)]
    model = nn.Sequential(
        MaskedConv(1, 2 * width, 7, own=False), *blocks, nn.ReLU(), nn.Conv2d(2 * width, 64, 1), nn.ReLU(),
        nn.Conv2d(64, 1, 1),
    )  # fmt: skip
    pages = (digits(16)[0] > 0.5).float()
    return model, pages, pages, F.binary_cross_entropy_with_logits
