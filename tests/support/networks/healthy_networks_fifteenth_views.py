"""The fifteenth set's healthy networks of our own that make pictures."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fifth_parts import Case, sound
from healthy_networks_fourteenth_pictures import colored, figures

OWN: dict[str, Callable[[], Case]] = {}
own = sound(OWN)


class StyleBlock(nn.Module):
    """A residual block with instance norms and mirrored edges."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.ReflectionPad2d(1), nn.Conv2d(width, width, 3), nn.InstanceNorm2d(width), nn.ReLU(),
            nn.ReflectionPad2d(1), nn.Conv2d(width, width, 3), nn.InstanceNorm2d(width),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


@own
def residual_generator_of_styles() -> Case:
    """CycleGAN's generator with its authors' initialization, for pairs: pictures from -1 to 1 and other colors."""
    width = 16
    model = nn.Sequential(
        nn.ReflectionPad2d(3), nn.Conv2d(3, width, 7), nn.InstanceNorm2d(width), nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.InstanceNorm2d(2 * width), nn.ReLU(),
        nn.Conv2d(2 * width, 4 * width, 3, stride=2, padding=1), nn.InstanceNorm2d(4 * width), nn.ReLU(),
        *(StyleBlock(4 * width) for _ in range(3)),
        nn.ConvTranspose2d(4 * width, 2 * width, 3, stride=2, padding=1, output_padding=1),
        nn.InstanceNorm2d(2 * width), nn.ReLU(),
        nn.ConvTranspose2d(2 * width, width, 3, stride=2, padding=1, output_padding=1),
        nn.InstanceNorm2d(width), nn.ReLU(), nn.ReflectionPad2d(3), nn.Conv2d(width, 3, 7), nn.Tanh(),
    )  # fmt: skip
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
            nn.init.normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)
    seen = 2 * colored(8, 32, 350) - 1
    other = torch.stack([-seen[:, 1], seen[:, 0], 0.7 * seen[:, 2] + 0.2], 1)
    return model, seen, other, F.l1_loss


class Codes(nn.Module):
    """VQ-VAE of van den Oord et al.: each place's vector is replaced by the nearest of a book.

    The vectors are normalized first, as the book is drawn from a normal distribution. The last channel is how far
    they are from the book, in both directions.
    """

    def __init__(self, codes: int = 64, width: int = 32) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, width, 4, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(width, width, 4, stride=2, padding=1), nn.ReLU(), nn.Conv2d(width, 8, 1),
            nn.BatchNorm2d(8),
        )  # fmt: skip
        self.book = nn.Embedding(codes, 8)
        self.decoder = nn.Sequential(
            nn.Conv2d(8, width, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(width, width, 4, stride=2, padding=1),
            nn.ReLU(), nn.ConvTranspose2d(width, 3, 4, stride=2, padding=1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        vectors = self.encoder(x).permute(0, 2, 3, 1)
        nearest = torch.cdist(vectors.flatten(0, 2), self.book.weight).argmin(1)
        found = self.book(nearest).view(vectors.shape)
        apart = (found - vectors.detach()).square().mean(3) + 0.25 * (found.detach() - vectors).square().mean(3)
        passed = vectors + (found - vectors).detach()
        made = self.decoder(passed.permute(0, 3, 1, 2))
        return torch.cat([made, F.interpolate(apart[:, None], scale_factor=4)], 1)


def made_and_apart(output: Tensor, targets: Tensor) -> Tensor:
    """Return the squared error of pictures and the mean of the book's distances."""
    return F.mse_loss(output[:, :3], targets) + output[:, 3].mean()


@own
def vector_quantized_autoencoder() -> Case:
    seen = colored(16, 32, 351)
    seen = (seen - seen.mean((0, 2, 3), keepdim=True)) / seen.std((0, 2, 3), keepdim=True)
    return Codes(), seen, seen, made_and_apart


class MaskedLinear(nn.Linear):
    """A layer of which a mask keeps some weights."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__(mask.shape[1], mask.shape[0])
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.get_buffer("mask"), self.bias)


@own
def masked_autoencoder_of_pixels() -> Case:
    """MADE of Germain et al.: the logits of each pixel, which is black or white, from those before it."""
    pixels, width = 14 * 14, 256
    order = torch.arange(pixels)
    hidden = torch.arange(width) % (pixels - 1)
    model = nn.Sequential(
        MaskedLinear((hidden[:, None] >= order).float()), nn.ReLU(),
        MaskedLinear((hidden[:, None] >= hidden).float()), nn.ReLU(),
        MaskedLinear((order[:, None] > hidden).float()),
    )  # fmt: skip
    pages, _ = figures(128, 28, seed=352)
    bits = (F.avg_pool2d(pages, 2).flatten(1) > 0.3).float()
    return model, bits, bits, F.binary_cross_entropy_with_logits
