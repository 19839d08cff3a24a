"""Broken networks of the eighth set for pictures and video, each with a healthy twin."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fifth_parts import Case, generator, images, scenes


def clips(batch: int, n: int = 48) -> tuple[Tensor, Tensor]:
    """Return noisy clips (n, 1, 6, 12, 12), one smooth pattern in space and time per class, and their classes."""
    patterns = torch.randn(5, 1, 3, 3, 3, generator=generator(41))
    patterns = F.interpolate(patterns, size=(6, 12, 12), mode="trilinear")
    draw = generator(2000 + batch)
    labels = torch.randint(5, (n,), generator=draw)
    return (patterns[labels] + 0.8 * torch.randn(n, 1, 6, 12, 12, generator=draw)) / 1.1, labels


class VideoNet(nn.Module):
    """Three-dimensional convolutions with stride, then a linear layer."""

    def __init__(self, std: float | None) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv3d(1, 12, 3, 2, 1), nn.Conv3d(12, 24, 3, 2, 1)
        self.conv3, self.fc = nn.Conv3d(24, 24, 3, 1, 1), nn.Linear(24 * 18, 5)
        for layer in (self.conv1, self.conv2, self.conv3, self.fc):
            if std is None:
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            else:
                nn.init.normal_(layer.weight, std=std)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv3(F.relu(self.conv2(F.relu(self.conv1(x))))))
        return self.fc(x.flatten(1))


def video_weights_of_std_one(broken: bool = True, batch: int = 0) -> Case:
    """`nn.init.normal_` without a standard deviation: each layer multiplies the signal by ten or more."""
    torch.manual_seed(0)
    return VideoNet(1.0 if broken else None), *clips(batch), nn.CrossEntropyLoss()


class Critic(nn.Module):
    """The discriminator of a GAN, which can clip its weights in each forward pass."""

    def __init__(self, clip: float | None) -> None:
        super().__init__()
        sizes = ((3, 12), (12, 24), (24, 24), (24, 24))
        self.convs = nn.ModuleList(nn.Conv2d(*size, 3, 2 if i < 2 else 1, 1) for i, size in enumerate(sizes))
        self.score = nn.Linear(24 * 16, 1)
        self.clip = clip

    def forward(self, x: Tensor) -> Tensor:
        if self.clip is not None:
            for parameter in self.parameters():
                parameter.data.clamp_(-self.clip, self.clip)
        for conv in self.convs:
            x = F.leaky_relu(conv(x), 0.2)
        return self.score(x.flatten(1)).squeeze(1)


def critic_clips_weights_in_forward(broken: bool = True, batch: int = 0) -> Case:
    """The forward pass clips all parameters to a thousandth, so that they stay there whatever the optimizer does."""
    torch.manual_seed(0)
    real, draw = images(batch, n=32)[0], generator(2500 + batch)
    fake = 1.1 * torch.randn(32, 3, 16, 16, generator=draw)
    targets = torch.arange(64).lt(32).float()
    return Critic(0.001 if broken else None), torch.cat([real, fake]), targets, nn.BCEWithLogitsLoss()


class ScaledBody(nn.Module):
    """A residual block without norm, whose branch is multiplied by a factor."""

    def __init__(self, width: int, factor: float) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x + self.factor * self.conv2(F.relu(self.conv1(x)))


class SuperResolution(nn.Module):
    """EDSR: residual blocks at the small size, then a pixel shuffle."""

    def __init__(self, blocks: int, factor: float) -> None:
        super().__init__()
        self.head, self.tail = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 12, 3, padding=1)
        self.body = nn.Sequential(*(ScaledBody(16, factor) for _ in range(blocks)))
        self.shuffle = nn.PixelShuffle(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.shuffle(self.tail(self.body(self.head(x))))


def superresolution_divides_by_scale(broken: bool = True, batch: int = 0) -> Case:
    """The branches are divided by the residual scale of 0.1 and not multiplied by it: the stream explodes."""
    torch.manual_seed(0)
    wanted = 2 * torch.randn(32, 3, 4, 4, generator=generator(2700 + batch))
    wanted = F.interpolate(wanted, size=16, mode="bicubic")
    return SuperResolution(10, 10.0 if broken else 0.1), F.avg_pool2d(wanted, 2), wanted, nn.MSELoss()


class ChannelsLastUNet(nn.Module):
    """A U-Net of one level for pictures with the channels last."""

    def __init__(self, view: bool) -> None:
        super().__init__()
        self.down, self.middle = self._conv(3, 16), self._conv(16, 16)
        self.up, self.out = self._conv(32, 16), nn.Conv2d(16, 4, 1)
        self.view = view

    @staticmethod
    def _conv(before: int, after: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        n, height, width, channels = x.shape
        x = x.reshape(n, channels, height, width) if self.view else x.permute(0, 3, 1, 2)
        fine = self.down(x)
        coarse = F.interpolate(self.middle(F.max_pool2d(fine, 2)), scale_factor=2)
        return self.out(self.up(torch.cat([fine, coarse], 1)))


def unet_channels_first_by_reshape(broken: bool = True, batch: int = 0) -> Case:
    """Pictures (N, H, W, C) are reshaped to (N, C, H, W) and not permuted: pixels and colors are scrambled."""
    torch.manual_seed(0)
    pictures, labels = scenes(batch)
    return ChannelsLastUNet(broken), pictures.permute(0, 2, 3, 1).contiguous(), labels, nn.CrossEntropyLoss()


class Glimpse(nn.Module):
    """Scores the patches of a picture, and classifies their mean by these scores or the best one."""

    def __init__(self, hard: bool) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Conv2d(3, 48, 4, 4), nn.ReLU(), nn.Flatten(2))
        self.score, self.fc = nn.Linear(48, 1), nn.Linear(48, 5)
        self.hard = hard

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).transpose(1, 2)
        scores = self.score(x).squeeze(2)
        if self.hard:
            return self.fc(x[torch.arange(len(x)), scores.argmax(1)])
        return self.fc((scores.softmax(1)[:, None] @ x).squeeze(1))


def glimpse_by_argmax(broken: bool = True, batch: int = 0) -> Case:
    """The best patch is picked by an argmax: the scores get no gradient, and the patch that counts is not found."""
    torch.manual_seed(0)
    draw = generator(2800 + batch)
    patches, kinds = torch.randn(64, 16, 3, 4, 4, generator=draw), torch.randint(5, (64, 16), generator=draw)
    chosen = torch.randint(16, (64,), generator=draw)
    patches[:, :, :2] += 2 * torch.randn(5, 2, 4, 4, generator=generator(41))[kinds]
    patches[torch.arange(64), chosen, 2] += 1.5 * torch.randn(4, 4, generator=generator(46))
    x = patches.unflatten(1, (4, 4)).permute(0, 3, 1, 4, 2, 5).reshape(64, 3, 16, 16) / 1.6
    return Glimpse(broken), x, kinds[torch.arange(64), chosen], nn.CrossEntropyLoss()


def objects(batch: int, n: int = 48) -> tuple[Tensor, Tensor]:
    """Return noisy pictures with ringed spots, and for each of 4x4 cells whether one is there."""
    draw = generator(2900 + batch)
    wanted = (torch.rand(n, 4, 4, generator=draw) < 0.15).float()
    spot = torch.tensor([[0.0, -1, -1, 0], [-1, 3, 3, -1], [-1, 3, 3, -1], [0, -1, -1, 0]])
    grid = torch.einsum("nij,ab->niajb", wanted, spot).reshape(n, 1, 16, 16)
    return grid + 0.7 * torch.randn(n, 1, 16, 16, generator=draw), wanted


class CellDetector(nn.Module):
    """Convolutions to a grid of cells, and a probability per cell; the bias of the last layer states the prior."""

    def __init__(self, bias: float) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU())
        self.objectness = nn.Conv2d(32, 1, 1)
        nn.init.constant_(self.objectness.bias, bias)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.objectness(self.body(x))).squeeze(1)


def detector_prior_without_log(broken: bool = True, batch: int = 0) -> Case:
    """The bias for a prior of 0.01 is -(1 - p) / p, minus 99, without the logarithm: the sigmoid is shut."""
    torch.manual_seed(0)
    return CellDetector(-99.0 if broken else -4.6), *objects(batch), nn.BCELoss()


class GridClassifier(nn.Module):
    """A backbone, a neck and a head that gives each cell a class."""

    def __init__(self, data: bool) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after, stride in ((3, 8, 1), (8, 8, 2), (8, 8, 2), (8, 8, 1)):
            layers += [nn.Conv2d(before, after, 3, stride, 1), nn.BatchNorm2d(after), nn.ReLU()]
        self.backbone = nn.Sequential(*layers)
        self.neck, self.head = nn.Conv2d(8, 32, 1), nn.Conv2d(32, 8, 1)
        self.data = data

    def forward(self, x: Tensor) -> Tensor:
        x = self.backbone(x)
        return self.head(F.relu(self.neck(x.data if self.data else x)))


def grid_head_on_backbone_data(broken: bool = True, batch: int = 0) -> Case:
    """The head takes `.data` of the features, so that the backbone gets no gradient."""
    torch.manual_seed(0)
    draw = generator(3100 + batch)
    textures = torch.randn(8, 3, 4, 4, generator=generator(42))
    labels = torch.randint(8, (48, 4, 4), generator=draw)
    x = textures[labels].permute(0, 3, 1, 4, 2, 5).reshape(48, 3, 16, 16)
    x = (x + 0.8 * torch.randn(48, 3, 16, 16, generator=draw)) / 1.3
    return GridClassifier(broken), x, labels, nn.CrossEntropyLoss()


class Exposure(nn.Module):
    """Divides each picture by its mean brightness, which is summed in float16 or in float32."""

    def __init__(self, half: bool) -> None:
        super().__init__()
        self.half_precision = half

    def forward(self, pixels: Tensor) -> Tensor:
        total = (pixels.half() if self.half_precision else pixels).sum((1, 2, 3), keepdim=True).float()
        return 3 * (pixels * (pixels[0].numel() / total) - 1)


def exposure_summed_in_half(broken: bool = True, batch: int = 0) -> Case:
    """The brightness is summed in float16, which overflows: each picture is divided by infinity."""
    torch.manual_seed(0)
    pictures, labels = images(batch)
    model = nn.Sequential()
    model.add_module("exposure", Exposure(broken))
    for i, (before, after) in enumerate(((3, 16), (16, 32))):
        model.add_module(f"conv{i}", nn.Conv2d(before, after, 3, 2, 1))
        model.add_module(f"act{i}", nn.ReLU())
    model.add_module("flat", nn.Flatten())
    model.add_module("fc", nn.Linear(512, 10))
    return model, (130 + 40 * pictures).clamp(0, 255).round(), labels, nn.CrossEntropyLoss()


def vgg_norm_momentum_zero(broken: bool = True, batch: int = 0) -> Case:
    """The batch norms' momentum is 0: their running statistics stay at 0 and 1, and evaluation fails."""
    torch.manual_seed(0)
    model = nn.Sequential()
    for i, (before, after) in enumerate(((3, 16), (16, 16), (16, 32), (32, 32))):
        model.add_module(f"conv{i}", nn.Conv2d(before, after, 3, 1 + i % 2, 1))
        model.add_module(f"norm{i}", nn.BatchNorm2d(after, momentum=0.0 if broken else 0.1))
        model.add_module(f"act{i}", nn.ReLU())
    model.add_module("flat", nn.Flatten())
    model.add_module("fc", nn.Linear(512, 10))
    pictures, labels = images(batch)
    return model, 0.5 + 0.15 * pictures, labels, nn.CrossEntropyLoss()


class AffineBlock(nn.Module):
    """A block of ResMLP: affine maps in place of norms, mixing over patches, then over channels."""

    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.affine1, self.affine2 = (nn.Parameter(torch.ones(width)) for _ in range(2))
        self.patches = nn.Linear(patches, patches)
        self.channels = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.patches((self.affine1 * x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.affine2 * x)


class ResMLP(nn.Module):
    """A network of patches that reads all of them with one linear layer."""

    def __init__(self, std: float) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 48, 4, stride=4)
        self.blocks = nn.Sequential(*(AffineBlock(16, 48) for _ in range(3)))
        self.head = nn.Linear(48 * 16, 10)
        nn.init.normal_(self.head.weight, std=std)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x).flatten(2).transpose(1, 2)).flatten(1))


def resmlp_head_of_std_one(broken: bool = True, batch: int = 0) -> Case:
    """The head's weights have standard deviation 1 and not 0.02: the logits are in the tens from the start."""
    torch.manual_seed(0)
    return ResMLP(1.0 if broken else 0.02), *images(batch), nn.CrossEntropyLoss()
