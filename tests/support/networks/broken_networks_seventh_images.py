"""Broken networks of the seventh set for pictures and sound, each with a healthy twin."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fifth_parts import Case, generator, images, scenes


def tones(batch: int, n: int = 64, steps: int = 128) -> tuple[Tensor, Tensor]:
    """Return noisy tones (n, steps) of five pitches, and the pitch of each."""
    draw = generator(4000 + batch)
    labels = torch.randint(5, (n,), generator=draw)
    phase = 6.28 * torch.rand(n, 1, generator=draw)
    waves = 1.4 * torch.sin(torch.arange(float(steps)) * (0.15 + 0.2 * labels[:, None]) + phase)
    return waves + 0.4 * torch.randn(n, steps, generator=draw), labels


class NormedBlock(nn.Module):
    """A residual block of two convolutions with batch norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


class FrozenNormResNet(nn.Module):
    """A ResNet whose `train` can keep the batch norms in evaluation mode, as for fine-tuning."""

    def __init__(self, blocks: int, frozen: bool) -> None:
        super().__init__()
        self.stem, self.bn = nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16)
        self.blocks = nn.Sequential(*(NormedBlock(16) for _ in range(blocks)))
        self.fc = nn.Linear(16, 10)
        self.frozen = frozen
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        self.train()

    def train(self, mode: bool = True) -> "FrozenNormResNet":
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d) and self.frozen:
                module.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.blocks(F.relu(self.bn(self.stem(x)))).mean((2, 3)))


def resnet_norms_kept_in_eval(broken: bool = True, batch: int = 0) -> Case:
    """The batch norms stay in evaluation mode from scratch, with mean 0 and variance 1: they normalize nothing."""
    torch.manual_seed(0)
    return FrozenNormResNet(16, broken), *images(batch), nn.CrossEntropyLoss()


class SeparableNet(nn.Module):
    """Depthwise and pointwise convolutions in turn, without norm."""

    def __init__(self, blocks: int, mode: str) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 3, 2, 1)
        self.depthwise = nn.ModuleList(nn.Conv2d(64, 64, 3, padding=1, groups=64) for _ in range(blocks))
        self.pointwise = nn.ModuleList(nn.Conv2d(64, 64, 1) for _ in range(blocks))
        self.fc = nn.Linear(64 * 4, 10)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                depthwise = module.groups > 1
                nn.init.kaiming_normal_(module.weight, mode=mode if depthwise else "fan_in", nonlinearity="relu")
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        for depthwise, pointwise in zip(self.depthwise, self.pointwise, strict=True):
            x = F.relu(pointwise(F.relu(depthwise(x))))
        return self.fc(F.adaptive_avg_pool2d(x, 2).flatten(1))


def depthwise_fan_out_ignores_groups(broken: bool = True, batch: int = 0) -> Case:
    """fan_out counts all 64 channels, but each filter of a depthwise convolution reaches one: weights 8 times small."""
    torch.manual_seed(0)
    return SeparableNet(6, "fan_out" if broken else "fan_in"), *images(batch), nn.CrossEntropyLoss()


class RawSkipUNet(nn.Module):
    """A U-Net that standardizes 16-bit pictures, and concatenates the picture itself before its last convolutions."""

    def __init__(self, raw: bool) -> None:
        super().__init__()
        self.down1, self.down2 = self._conv(3, 16), self._conv(16, 32)
        self.middle = self._conv(32, 32)
        self.up2, self.up1 = self._conv(64, 32), nn.Conv2d(35, 16, 3, padding=1)
        self.out = nn.Conv2d(16, 4, 1)
        self.raw = raw

    @staticmethod
    def _conv(before: int, after: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(4, after), nn.GELU())

    def forward(self, pixels: Tensor) -> Tensor:
        x = (pixels - 30000) / 8000
        second = self.down2(F.max_pool2d(self.down1(x), 2))
        deep = F.interpolate(self.middle(F.max_pool2d(second, 2)), scale_factor=2)
        deep = F.interpolate(self.up2(torch.cat([deep, second], 1)), scale_factor=2)
        return self.out(F.relu(self.up1(torch.cat([deep, pixels if self.raw else x], 1))))


def unet_raw_pixels_in_last_skip(broken: bool = True, batch: int = 0) -> Case:
    """The last skip takes the 16-bit pixels, not the standardized ones: they drown the decoder's features."""
    torch.manual_seed(0)
    pictures, labels = scenes(batch)
    return RawSkipUNet(broken), 30000 + 8000 * pictures, labels, nn.CrossEntropyLoss()


class FilmAudio(nn.Module):
    """A 1-D CNN; a condition, the second channel, scales and shifts the features of each layer (FiLM)."""

    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv1d(before, 32, 9, 2, 4) for before in (1, 32, 32))
        self.films = nn.ModuleList(nn.Linear(1, 64) for _ in range(3))
        self.fc = nn.Linear(32, 5)
        self.one = 0.0 if broken else 1.0
        for film in self.films:
            nn.init.zeros_(film.weight)
            nn.init.zeros_(film.bias)

    def forward(self, sound: Tensor) -> Tensor:
        x, condition = sound[:, :1], sound[:, 1, :1]
        for conv, film in zip(self.convs, self.films, strict=True):
            scale, shift = film(condition)[:, :, None].chunk(2, 1)
            x = F.relu(conv(x) * (self.one + scale) + shift)
        return self.fc(x.mean(2))


def audio_film_without_one(broken: bool = True, batch: int = 0) -> Case:
    """FiLM's layers start at zero, but the scale is not 1 + its output: the features are multiplied by zero."""
    torch.manual_seed(0)
    waves, labels = tones(batch)
    loudness = torch.randn(len(waves), 1, generator=generator(4500 + batch)).expand_as(waves)
    return FilmAudio(broken), torch.stack([waves, loudness], 1), labels, nn.CrossEntropyLoss()


class ScaledBlock(nn.Module):
    """A pre-norm block whose branches end in a projection and a layer scale."""

    def __init__(self, width: int, gamma: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.MultiheadAttention(width, 4, batch_first=True)
        self.fc1, self.fc2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.gamma1, self.gamma2 = (nn.Parameter(torch.full((width,), gamma)) for _ in range(2))
        for last in (self.attn.out_proj, self.fc2):
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.gamma1 * self.attn(y, y, y, need_weights=False)[0]
        return x + self.gamma2 * self.fc2(F.gelu(self.fc1(self.norm2(x))))


class ScaledViT(nn.Module):
    """A vision transformer that reads its class token."""

    def __init__(self, width: int, depth: int, gamma: float) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.cls, self.positions = (nn.Parameter(0.02 * torch.randn(1, n, width)) for n in (1, 17))
        self.blocks = nn.Sequential(*(ScaledBlock(width, gamma) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])


def vit_two_zeros_in_branch(broken: bool = True, batch: int = 0) -> Case:
    """The last projection and the layer scale of each branch are both zero: neither ever gets a gradient."""
    torch.manual_seed(0)
    return ScaledViT(64, 4, 0.0 if broken else 1.0), *images(batch), nn.CrossEntropyLoss()


class CosineNet(nn.Module):
    """A CNN whose scores are cosines between the features and one direction per class, times a scale."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU(),
            nn.Conv2d(32, 64, 3, 2, 1), nn.BatchNorm2d(64), nn.ReLU(), nn.Flatten(),
        )  # fmt: skip
        self.classes = nn.Linear(64 * 16, 10, bias=False)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        weight = F.normalize(self.classes.weight, dim=1)
        return self.scale * F.linear(F.normalize(self.features(x), dim=1), weight)


def cosine_scores_without_scale(broken: bool = True, batch: int = 0) -> Case:
    """The scores are cosines from -1 to 1 without a scale: the softmax can never be confident."""
    torch.manual_seed(0)
    return CosineNet(1.0 if broken else 16.0), *images(batch), nn.CrossEntropyLoss()


class TransitionNet(nn.Module):
    """Two dense blocks with a transition between them."""

    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.dense1 = nn.ModuleList(self._layer(16 + 8 * i, 8) for i in range(4))
        self.transition = nn.Sequential(nn.BatchNorm2d(48), nn.ReLU(), nn.Conv2d(48, 24, 1, bias=False))
        self.dense2 = nn.ModuleList(self._layer(24 + 8 * i, 8) for i in range(4))
        self.norm, self.fc = nn.BatchNorm2d(56), nn.Linear(56 * 16, 10)
        if broken:
            nn.init.zeros_(self.transition[2].weight)

    @staticmethod
    def _layer(before: int, after: int) -> nn.Sequential:
        return nn.Sequential(nn.BatchNorm2d(before), nn.ReLU(), nn.Conv2d(before, after, 3, padding=1, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.dense1:
            x = torch.cat([x, layer(x)], 1)
        x = F.avg_pool2d(self.transition(x), 4)
        for layer in self.dense2:
            x = torch.cat([x, layer(x)], 1)
        return self.fc(F.relu(self.norm(x)).flatten(1))


def densenet_zero_transition(broken: bool = True, batch: int = 0) -> Case:
    """The transition's convolution was zero-initialized like a last residual layer, but no skip goes around it."""
    torch.manual_seed(0)
    return TransitionNet(broken), *images(batch), nn.CrossEntropyLoss()


class Logits(nn.Module):
    """The similarities of two sets of embeddings, times the exponential of a learned number."""

    def __init__(self, twice: bool) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(math.log(14.3)))
        self.twice = twice

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        scale = self.log_scale.exp()
        scale = scale.exp() if self.twice else scale
        return scale * F.normalize(left, dim=1) @ F.normalize(right, dim=1).T


class TwoTowers(nn.Module):
    """One encoder for pictures and one for tables, trained by contrast; both come in one tensor."""

    def __init__(self, twice: bool) -> None:
        super().__init__()
        self.picture = nn.Sequential(
            nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 32, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 32)
        )
        self.table = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 32))
        self.logits = Logits(twice)

    def forward(self, pairs: Tensor) -> Tensor:
        return self.logits(self.picture(pairs[:, :64]), self.table(pairs[:, 64:]))


def contrastive_scale_exponentiated_twice(broken: bool = True, batch: int = 0) -> Case:
    """The learned log-scale is exponentiated twice: the similarities are multiplied by 1.6 million."""
    torch.manual_seed(0)
    fixed, draw = generator(14), generator(5000 + batch)
    maps = torch.randn(8, 80, generator=fixed) / 2
    pairs = torch.randn(64, 8, generator=draw) @ maps + 0.2 * torch.randn(64, 80, generator=draw)
    return TwoTowers(broken), pairs, torch.arange(64), nn.CrossEntropyLoss()


class HalfRMSNorm(nn.Module):
    """RMS norm that takes the mean of squares in float16 or in float32."""

    def __init__(self, width: int, half: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.half_precision = half

    def forward(self, x: Tensor) -> Tensor:
        squares = (x.half() if self.half_precision else x).square().mean(-1, keepdim=True)
        return x * torch.rsqrt(squares + 1e-5).to(x.dtype) * self.weight


class FrameNet(nn.Module):
    """16-bit samples in frames, normalized frame by frame, then an MLP per frame and the mean over the frames."""

    def __init__(self, half: bool) -> None:
        super().__init__()
        self.norm = HalfRMSNorm(32, half)
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU())
        self.fc = nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.mlp(self.norm(x.unflatten(1, (-1, 32)))).mean(1))


def audio_rms_norm_overflows_in_half(broken: bool = True, batch: int = 0) -> Case:
    """The norm squares 16-bit samples in float16: the squares overflow, and the norm returns zeros."""
    torch.manual_seed(0)
    waves, labels = tones(batch)
    return FrameNet(broken), (3000 * waves).round(), labels, nn.CrossEntropyLoss()


class EpsMixerBlock(nn.Module):
    """Mixing over the patches, then over the channels."""

    def __init__(self, patches: int, width: int, eps: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=eps), nn.LayerNorm(width, eps=eps)
        self.patches = nn.Sequential(nn.Linear(patches, 32), nn.GELU(), nn.Linear(32, patches))
        self.channels = nn.Sequential(nn.Linear(width, 128), nn.GELU(), nn.Linear(128, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.patches(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class EpsMixer(nn.Module):
    """An MLP-Mixer for pictures."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 4, stride=4)
        self.blocks = nn.Sequential(*(EpsMixerBlock(16, 64, eps) for _ in range(4)))
        self.norm, self.head = nn.LayerNorm(64, eps=eps), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.stem(x).flatten(2).transpose(1, 2))).mean(1))


def mixer_eps_without_minus(broken: bool = True, batch: int = 0) -> Case:
    """The norms' eps is 1e6 and not 1e-6: each norm divides its input by a thousand."""
    torch.manual_seed(0)
    return EpsMixer(1e6 if broken else 1e-6), *images(batch), nn.CrossEntropyLoss()
