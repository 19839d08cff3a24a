"""Ten sound networks of the eighth set for pictures and sound, written for it: each of another family."""

import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from broken_networks_eighth_images import objects
from fifth_parts import Case, generator, images, scenes, sound

OWN: dict[str, Callable[[], Case]] = {}


class FixupBlock(nn.Module):
    """A residual block without norm: scalar biases, a scalar factor, and a last convolution that starts at zero."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.biases, self.factor = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.ones(()))
        nn.init.kaiming_normal_(self.conv1.weight, nonlinearity="relu")
        nn.init.zeros_(self.conv2.weight)
        with torch.no_grad():
            self.conv1.weight.mul_(depth**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.conv1(x + self.biases[0]) + self.biases[1]) + self.biases[2]
        return F.relu(x + self.factor * self.conv2(y) + self.biases[3])


@sound(OWN)
def zero_branches_without_norm() -> Case:
    """Return a residual network by Fixup, with a classifier of zeros."""
    stem, head = nn.Conv2d(3, 16, 3, 2, 1), nn.Linear(16 * 4, 10)
    nn.init.zeros_(head.weight)
    blocks = [FixupBlock(16, 12) for _ in range(12)]
    model = nn.Sequential(stem, nn.ReLU(), *blocks, nn.AdaptiveAvgPool2d(2), nn.Flatten(), head)
    return model, *images(0), nn.CrossEntropyLoss()


class ClassAttention(nn.Module):
    """A class token that reads the patches through a layer scale, as in CaiT."""

    def __init__(self, width: int, scale: float) -> None:
        super().__init__()
        self.token, self.norm = nn.Parameter(0.02 * torch.randn(1, 1, width)), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.gamma = nn.Parameter(torch.full((width,), scale))

    def forward(self, x: Tensor) -> Tensor:
        token = self.token.expand(len(x), -1, -1)
        y = self.norm(torch.cat([token, x], 1))
        return (token + self.gamma * self.attention(y[:, :1], y, y, need_weights=False)[0]).squeeze(1)


class Talking(nn.Module):
    """A pre-norm block whose branches are multiplied by a small layer scale."""

    def __init__(self, width: int, scale: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.gammas = nn.Parameter(torch.full((2, width), scale))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.gammas[0] * self.attention(y, y, y, need_weights=False)[0]
        return x + self.gammas[1] * self.mlp(self.norm2(x))


@sound(OWN)
def class_attention_with_layer_scale() -> Case:
    """Return a small CaiT, whose layer scales start at a hundredth."""
    patches = nn.Sequential(nn.Conv2d(3, 48, 4, 4), nn.Flatten(2))
    blocks = [Talking(48, 0.01) for _ in range(4)]
    tail = [ClassAttention(48, 0.01), nn.LayerNorm(48), nn.Linear(48, 10)]
    return nn.Sequential(patches, Transposed(), *blocks, *tail), *images(0), nn.CrossEntropyLoss()


class Transposed(nn.Module):
    """Swaps channels and tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


class StandardizedConv(nn.Conv2d):
    """A convolution whose filters are standardized in each pass."""

    def forward(self, x: Tensor) -> Tensor:
        variance, mean = torch.var_mean(self.weight, (1, 2, 3), keepdim=True)
        weight = (self.weight - mean) * torch.rsqrt(variance * self.weight[0].numel() + 1e-4)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding)


@sound(OWN)
def batch_of_two_pictures() -> Case:
    """Return convolutions with weight standardization and group norm, and a batch of two."""
    layers: list[nn.Module] = []
    for before, after in ((3, 16), (16, 32), (32, 32)):
        layers += [StandardizedConv(before, after, 3, 2, 1), nn.GroupNorm(8, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128, 10)), *images(0, n=2), nn.CrossEntropyLoss()


@sound(OWN)
def spectral_norm_critic() -> Case:
    """Return a critic under spectral norm with the hinge loss."""
    norm = nn.utils.parametrizations.spectral_norm
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise((3, 16, 32, 32)):
        layers += [norm(nn.Conv2d(before, after, 4, 2, 1)), nn.LeakyReLU(0.1)]
    model = nn.Sequential(*layers, nn.Flatten(), norm(nn.Linear(128, 1)), nn.Flatten(0))
    real, fake = images(0, n=32)[0], 1.2 * torch.randn(32, 3, 16, 16, generator=generator(51))

    def hinge(scores: Tensor, signs: Tensor) -> Tensor:
        return F.relu(1 - signs * scores).mean()

    return model, torch.cat([real, fake]), torch.cat([torch.ones(32), -torch.ones(32)]), hinge


class Centers(nn.Module):
    """CenterNet: a map of objectness with a prior, a map of offsets and a map of positive sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU()
        )
        self.heat, self.offset, self.size = nn.Conv2d(32, 1, 1), nn.Conv2d(32, 2, 1), nn.Conv2d(32, 2, 1)
        nn.init.constant_(self.heat.bias, -2.19)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.body(x)
        return self.heat(x).squeeze(1), self.offset(x), self.size(x).exp()


@sound(OWN)
def detector_of_centers() -> Case:
    """Return a detector with three heads; offset and size count where an object is."""

    def loss(maps: tuple[Tensor, Tensor, Tensor], wanted: Tensor) -> Tensor:
        heat, offset, size = maps
        inside = wanted[:, None] / wanted.sum()
        boxes = (offset - 0.3).abs() + 0.1 * (size - 2).abs()
        return F.binary_cross_entropy_with_logits(heat, wanted) + (inside * boxes).sum() / 2

    return Centers(), *objects(0), loss


class TimedBlock(nn.Module):
    """A residual block of a diffusion model: group norm, a shift by the time, a last convolution of zeros."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, width), nn.GroupNorm(4, width)
        self.conv1, self.conv2 = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.time = nn.Linear(1, width)
        nn.init.zeros_(self.conv2.weight)
        nn.init.zeros_(self.conv2.bias)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x))) + self.time(time)[:, :, None, None]
        return x + self.conv2(F.silu(self.norm2(y)))


class DenoisingUNet(nn.Module):
    """A U-Net whose last convolution starts at zero; the time is the last channel of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.merge = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(32, 16, 1)
        self.down, self.middle, self.up = TimedBlock(16), TimedBlock(16), TimedBlock(16)
        self.norm, self.out = nn.GroupNorm(4, 16), nn.Conv2d(16, 3, 3, padding=1)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, x: Tensor) -> Tensor:
        time = x[:, 3:, 0, 0]
        fine = self.down(self.stem(x[:, :3]), time)
        coarse = self.middle(F.avg_pool2d(fine, 2), time)
        x = self.merge(torch.cat([fine, F.interpolate(coarse, scale_factor=2)], 1))
        return self.out(F.silu(self.norm(self.up(x, time))))


@sound(OWN)
def denoiser_with_zero_output() -> Case:
    """Return a diffusion model for pictures that predicts the noise."""
    pictures, draw = scenes(0)[0], generator(52)
    noise, time = torch.randn(pictures.shape, generator=draw), torch.rand(32, 1, 1, 1, generator=draw)
    noisy = (1 - time).sqrt() * pictures + time.sqrt() * noise
    return DenoisingUNet(), torch.cat([noisy, time.expand(-1, 1, 16, 16)], 1), noise, nn.MSELoss()


@sound(OWN)
def delta_orthogonal_tanh() -> Case:
    """Return a plain CNN of twenty tanh layers, whose filters are orthogonal at the center and zero around it."""
    layers: list[nn.Module] = []
    for i in range(20):
        conv = nn.Conv2d(3 if i == 0 else 24, 24, 3, 2 if i in (0, 6) else 1, 1)
        if i:
            nn.init.zeros_(conv.weight)
            with torch.no_grad():
                nn.init.orthogonal_(conv.weight[:, :, 1, 1])
        nn.init.zeros_(conv.bias)
        layers += [conv, nn.Tanh()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(24 * 16, 10)), *images(0, n=32), nn.CrossEntropyLoss()


class Levels(nn.Module):
    """Rounds bounded codes to five levels each, with a straight-through gradient."""

    def forward(self, x: Tensor) -> Tensor:
        x = 2 * torch.tanh(x)
        return x + (x.round() - x).detach()


@sound(OWN)
def finite_scalar_codes() -> Case:
    """Return an autoencoder whose codes are rounded."""
    encoder = [nn.Conv2d(3, 16, 4, 2, 1), nn.ReLU(), nn.Conv2d(16, 8, 4, 2, 1)]
    decoder = [nn.ConvTranspose2d(8, 16, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(16, 3, 4, 2, 1)]
    x = F.interpolate(F.avg_pool2d(scenes(0)[0], 4), scale_factor=4) * 1.4
    return nn.Sequential(*encoder, Levels(), *decoder), x, x, nn.MSELoss()


class Conformer(nn.Module):
    """Half an MLP, attention, a gated depthwise convolution, half an MLP, and a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(5))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width)) for _ in range(2)
        )
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.gate, self.depthwise = nn.Conv1d(width, 2 * width, 1), nn.Conv1d(width, width, 7, 1, 3, groups=width)
        self.batch_norm, self.point = nn.BatchNorm1d(width), nn.Conv1d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mlps[0](self.norms[0](x)) / 2
        y = self.norms[1](x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        y = F.glu(self.gate(self.norms[2](x).transpose(1, 2)), 1)
        x = x + self.point(F.silu(self.batch_norm(self.depthwise(y)))).transpose(1, 2)
        return self.norms[4](x + self.mlps[1](self.norms[3](x)) / 2)


class Speech(nn.Module):
    """Frames of a sound, two Conformer blocks, the mean over the frames."""

    def __init__(self) -> None:
        super().__init__()
        self.frames, self.fc = nn.Conv1d(1, 32, 8, 8), nn.Linear(32, 5)
        self.blocks = nn.Sequential(Conformer(32), Conformer(32))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.blocks(self.frames(x[:, None]).transpose(1, 2)).mean(1))


@sound(OWN)
def conformer_of_tones() -> Case:
    """Return a small Conformer for sounds."""
    labels = torch.randint(5, (48,), generator=generator(53))
    waves = 1.4 * torch.sin(torch.arange(96.0) * (0.15 + 0.2 * labels[:, None]) + torch.rand(48, 1) * 6)
    return Speech(), waves + 0.3 * torch.randn(48, 96), labels, nn.CrossEntropyLoss()


class ChannelGate(nn.Module):
    """Efficient channel attention: a short convolution across the channels' means."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 1, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.conv(x.mean((2, 3))[:, None])).transpose(1, 2)[..., None]


@sound(OWN)
def gated_channels() -> Case:
    """Return a CNN with efficient channel attention and hard swish."""
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise((3, 24, 32, 48)):
        layers += [nn.Conv2d(before, after, 3, 2, 1, bias=False), nn.BatchNorm2d(after), nn.Hardswish(), ChannelGate()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(192, 10)), *images(0), nn.CrossEntropyLoss()
