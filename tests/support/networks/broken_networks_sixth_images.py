"""Broken networks of the sixth set for pictures and sound, each with a healthy twin."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fifth_parts import Case, generator, images, scenes


class LabelNet(nn.Module):
    """A small CNN that gives one score for each label."""

    def __init__(self, labels: int, sigmoid: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 24, 3, padding=1)
        self.conv2 = nn.Conv2d(24, 48, 3, padding=1)
        self.head = nn.Linear(48 * 16, labels)
        self.sigmoid = sigmoid

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = self.head(F.max_pool2d(F.relu(self.conv2(x)), 2).flatten(1))
        return torch.sigmoid(x) if self.sigmoid else x


def multilabel_sigmoid_twice(broken: bool = True, batch: int = 0) -> Case:
    """A sigmoid in the model and another one in BCEWithLogitsLoss."""
    torch.manual_seed(0)
    inputs, classes = images(batch, n=64, classes=16)
    targets = torch.stack([(classes >> bit) & 1 for bit in range(4)], 1).float()
    return LabelNet(4, broken), inputs, targets, nn.BCEWithLogitsLoss()


class WiredBlock(nn.Module):
    """Two convolutions with batch norm, and a sum at the end."""

    def __init__(self, width: int, broken: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.broken = broken

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        out = out + (out if self.broken else x)
        return F.relu(out)


class WiredResNet(nn.Module):
    """A stem, many blocks of one width, and a linear layer."""

    def __init__(self, blocks: int, broken: bool) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, stride=2, padding=1)
        self.blocks = nn.Sequential(*(WiredBlock(16, broken) for _ in range(blocks)))
        self.fc = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.blocks(F.relu(self.stem(x))).mean((2, 3)))


def resnet_adds_branch_twice(broken: bool = True, batch: int = 0) -> Case:
    """The block adds the output of its branch to itself, and not the input of the block."""
    torch.manual_seed(0)
    return WiredResNet(20, broken), *images(batch), nn.CrossEntropyLoss()


class SmallUNet(nn.Module):
    """Two levels down to a quarter of the size, and two levels up with concatenated skips."""

    def __init__(self, channels: int, classes: int, broken: bool) -> None:
        super().__init__()
        self.down1, self.down2 = self._conv(channels, 16), self._conv(16, 32)
        self.middle = self._conv(32, 32)
        self.reduce2, self.reduce1 = nn.Conv2d(32, 32, 1), nn.Conv2d(32, 16, 1)
        self.up2, self.up1 = self._conv(64, 32), self._conv(32, 16)
        self.out = nn.Conv2d(16, classes, 1)
        self.broken = broken

    @staticmethod
    def _conv(before: int, after: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        first = self.down1(x)
        second = self.down2(F.max_pool2d(first, 4))
        x = self.reduce2(F.interpolate(self.middle(F.max_pool2d(second, 2)), scale_factor=2))
        x = self.up2(torch.cat([x, x if self.broken else second], 1))
        x = self.reduce1(F.interpolate(x, scale_factor=4))
        return self.out(self.up1(torch.cat([x, x if self.broken else first], 1)))


def unet_concatenates_itself(broken: bool = True, batch: int = 0) -> Case:
    """The decoder concatenates its own features twice, and not those of the encoder."""
    torch.manual_seed(0)
    pictures = torch.randn(32, 3, 16, 16, generator=generator(2000 + batch))
    colors = torch.randn(4, 3, generator=generator(11))
    labels = torch.einsum("nchw,kc->nkhw", pictures, colors).argmax(1)
    return SmallUNet(3, 4, broken), pictures, labels, nn.CrossEntropyLoss()


class Attention(nn.Module):
    """Self-attention with several heads, written out."""

    def __init__(self, width: int, heads: int, broken: bool) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.broken = heads, broken

    def forward(self, x: Tensor) -> Tensor:
        n, tokens, width = x.shape
        q, k, v = self.qkv(x).view(n, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scale = q.shape[-1] ** (0.5 if self.broken else -0.5)
        attention = (q @ k.transpose(-2, -1) * scale).softmax(-1)
        return self.proj((attention @ v).transpose(1, 2).reshape(n, tokens, width))


class EncoderBlock(nn.Module):
    """A pre-norm block of a vision transformer."""

    def __init__(self, width: int, broken: bool) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width), Attention(width, 1, broken)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class SmallViT(nn.Module):
    """Patches, a class token, learned positions and a few blocks; the class token alone is read."""

    def __init__(self, width: int, depth: int, broken: bool) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.cls = nn.Parameter(0.02 * torch.randn(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 17, width))
        self.blocks = nn.Sequential(*(EncoderBlock(width, broken) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])


def vit_scores_times_sqrt(broken: bool = True, batch: int = 0) -> Case:
    """The attention scores are multiplied by the square root of the width, and not divided by it."""
    torch.manual_seed(0)
    return SmallViT(96, 4, broken), *images(batch), nn.CrossEntropyLoss()


class PictureAutoencoder(nn.Module):
    """A convolutional autoencoder; a sigmoid at its end bounds the pixels if asked."""

    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 32, 3, 2, 1), nn.ReLU())
        last = [nn.Sigmoid()] if broken else []
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(32, 32, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(32, 3, 4, 2, 1), *last
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))


def autoencoder_sigmoid_output(broken: bool = True, batch: int = 0) -> Case:
    """A sigmoid ends the decoder, but the pictures are standardized and half of their values are negative."""
    torch.manual_seed(0)
    x = scenes(batch)[0]
    x = F.interpolate(F.avg_pool2d(x, 2), scale_factor=2, mode="bilinear") * 1.2
    return PictureAutoencoder(broken), x, x, nn.MSELoss()


class Generator(nn.Module):
    """The generator of DCGAN for pictures of 16x16 pixels."""

    def __init__(self, mean: float) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(16, 64, 4, bias=False), nn.BatchNorm2d(64), nn.ReLU(),
            nn.ConvTranspose2d(64, 32, 4, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
            nn.ConvTranspose2d(32, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
            nn.ConvTranspose2d(16, 3, 4, 2, 1), nn.Tanh(),
        )  # fmt: skip
        for module in self.main:
            if isinstance(module, nn.ConvTranspose2d):
                nn.init.normal_(module.weight, 0.0, 0.02)
            elif isinstance(module, nn.BatchNorm2d):
                nn.init.normal_(module.weight, mean, 0.02)

    def forward(self, z: Tensor) -> Tensor:
        return self.main(z[:, :, None, None])


def dcgan_norm_weights_around_zero(broken: bool = True, batch: int = 0) -> Case:
    """The norms' weights are drawn around 0 as the convolutions' are, and not around 1."""
    torch.manual_seed(0)
    z = torch.randn(64, 16, generator=generator(3000 + batch))
    basis = F.interpolate(torch.randn(16, 3, 4, 4, generator=generator(12)), size=16, mode="bilinear")
    pictures = torch.tanh(torch.einsum("nz,zchw->nchw", z, basis) / 2)
    return Generator(0.0 if broken else 1.0), z, pictures, nn.MSELoss()


class ToneNet(nn.Module):
    """1-D convolutions over a sound, a norm, the mean over time and a linear layer."""

    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(1, 32, 9, stride=2, padding=4)
        self.conv2 = nn.Conv1d(32, 32, 9, stride=2, padding=4)
        self.conv3 = nn.Conv1d(32, 64, 9, stride=2, padding=4)
        self.norm = nn.InstanceNorm1d(64, affine=True) if broken else nn.BatchNorm1d(64)
        self.fc = nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv3(F.relu(self.conv2(F.relu(self.conv1(x))))))
        return self.fc(self.norm(x).mean(2))


def audio_instance_norm_before_pool(broken: bool = True, batch: int = 0) -> Case:
    """Instance norm sets each channel's mean over time to zero, and the pooling takes just this mean."""
    torch.manual_seed(0)
    draw = generator(4000 + batch)
    labels = torch.randint(5, (64,), generator=draw)
    time, phase = torch.arange(128.0), 6.28 * torch.rand(64, 1, generator=draw)
    tones = torch.sin(time * (0.15 + 0.2 * labels[:, None]) + phase) * 1.4
    return ToneNet(broken), (tones + 0.5 * torch.randn(64, 128, generator=draw))[:, None], labels, nn.CrossEntropyLoss()


def cnn_divided_by_255_twice(broken: bool = True, batch: int = 0) -> Case:
    """ToTensor has divided the pixels by 255 already; they are divided once more, then standardized."""
    torch.manual_seed(0)
    inputs, labels = images(batch)
    pixels = (0.45 + 0.22 * inputs).clamp(0, 1)
    pixels = pixels / 255 if broken else pixels
    return LabelNet(10, False), (pixels - 0.45) / 0.22, labels, nn.CrossEntropyLoss()


class Narrow(nn.Module):
    """Depthwise separable convolutions, as in MobileNet."""

    def __init__(self, broken: bool) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU6()]
        for _ in range(3):
            layers += [nn.Conv2d(32, 32, 3, 1, 1, groups=32), nn.BatchNorm2d(32), nn.ReLU6()]
            layers += [nn.Conv2d(32, 32, 1), nn.BatchNorm2d(32), nn.ReLU6()]
        self.features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(4), nn.Flatten())
        self.classifier = nn.Linear(32 * 16, 10)
        self.broken = broken

    def forward(self, x: Tensor) -> Tensor:
        x = self.classifier(self.features(x))
        return x if self.broken else F.log_softmax(x, 1)


def mobilenet_nll_of_logits(broken: bool = True, batch: int = 0) -> Case:
    """NLLLoss gets raw scores without a log-softmax: it falls without bound as the scores grow."""
    torch.manual_seed(0)
    return Narrow(broken), *images(batch), nn.NLLLoss()
