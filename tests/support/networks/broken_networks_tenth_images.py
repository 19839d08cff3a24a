"""Networks of the tenth set on pictures, each with its fault or mended."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fifth_parts import Case, generator, images


class Separable(nn.Module):
    """A depthwise and a pointwise convolution, each with ReLU, without normalizers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.pointwise = nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.pointwise(F.relu(self.depthwise(x))))


class Separables(nn.Module):
    """A stem, separable blocks with pooling after every second, and a classifier."""

    def __init__(self, width: int = 32, depth: int = 6) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(Separable(width) for _ in range(depth))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i % 2:
                x = F.max_pool2d(x, 2)
        return self.head(x.mean((2, 3)))


def separables_depthwise_by_all_channels(broken: bool = True, batch: int = 0) -> Case:
    torch.manual_seed(0)
    model = Separables()
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            inputs = module.in_channels if broken else module.in_channels // module.groups
            fan = module.kernel_size[0] * module.kernel_size[1] * inputs
            nn.init.normal_(module.weight, std=(2 / fan) ** 0.5)
            nn.init.zeros_(module.bias)
    return model, *images(batch), F.cross_entropy


def torchvision_resnet_every_norm_zero(broken: bool = True, batch: int = 0) -> Case:
    from torchvision.models.resnet import BasicBlock, ResNet

    torch.manual_seed(0)
    model = ResNet(BasicBlock, [1, 1, 1, 1], num_classes=10)
    for name, module in model.named_modules():
        if isinstance(module, nn.BatchNorm2d) and (broken or name.endswith("bn2")):
            nn.init.zeros_(module.weight)
    return model, *images(batch, size=32), F.cross_entropy


class Residual(nn.Module):
    """x + conv2(relu(conv1(x))), scaled so that the signal is kept."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        for conv in (self.conv1, self.conv2):
            nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
            nn.init.zeros_(conv.bias)
        with torch.no_grad():
            self.conv2.weight.mul_(depth**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(F.relu(self.conv1(x)))


class ResidualNet(nn.Module):
    """A stem, residual blocks without normalizers and a classifier."""

    def __init__(self, again: bool, width: int = 16, depth: int = 12) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(Residual(width, depth) for _ in range(depth))
        self.head = nn.Linear(width, 10)
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for i, block in enumerate(self.blocks):
            x = x + block(x) if self.again else block(x)
            if i in (3, 7):
                x = F.avg_pool2d(x, 2)
        return self.head(F.relu(x).mean((2, 3)))


def resnet_shortcut_added_again(broken: bool = True, batch: int = 0) -> Case:
    torch.manual_seed(0)
    return ResidualNet(again=broken), *images(batch), F.cross_entropy


class Gate(nn.Module):
    """Squeeze and excitation: a gate for each channel from the mean of all."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Conv2d(width, width // 4, 1), nn.Conv2d(width // 4, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * F.hardsigmoid(self.fc2(F.relu(self.fc1(x.mean((2, 3), keepdim=True)))))


class GatedBlock(nn.Module):
    """A convolution with batch norm and ReLU, and a gate."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, width, 3, stride, 1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.gate = Gate(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(F.relu(self.norm(self.conv(x))))


class GatedNet(nn.Module):
    """Three gated blocks and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(GatedBlock(3, 32, 1), GatedBlock(32, 32, 2), GatedBlock(32, 64, 2))
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x).mean((2, 3)))


def cnn_gates_begin_shut(broken: bool = True, batch: int = 0) -> Case:
    torch.manual_seed(0)
    model = GatedNet()
    for block in model.blocks:
        nn.init.constant_(block.gate.fc2.bias, -4.0 if broken else 0.0)
    return model, *images(batch), F.cross_entropy


def conv_norm(inputs: int, width: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())


class Detector(nn.Module):
    """A backbone with two heads: the class of the object, and how far its box is from the anchor."""

    def __init__(self, relu: bool) -> None:
        super().__init__()
        self.backbone = nn.Sequential(conv_norm(3, 16), conv_norm(16, 32, 2), conv_norm(32, 32, 2), nn.Flatten())
        self.classes = nn.Sequential(nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 3))
        self.offsets = nn.Sequential(nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 4), *([nn.ReLU()] if relu else []))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.backbone(x)
        return self.offsets(features), self.classes(features)


def objects(batch: int, n: int = 64, size: int = 16) -> tuple[Tensor, Tensor]:
    """Return pictures of a colored box, and its offsets from the middle (x, y, log w, log h) and its color."""
    draw = generator(1000 + batch)
    color = torch.randint(3, (n,), generator=draw)
    middle = size / 2 + 8 * (torch.rand(n, 2, generator=draw) - 0.5)
    extent = 5 * torch.exp(torch.rand(n, 2, generator=draw) * 1.4 - 0.7)
    grid = torch.arange(size) + 0.5
    inside = [((grid - middle[:, i, None]).abs() < extent[:, i, None] / 2).float() for i in range(2)]
    mask = inside[0][:, None, None, :] * inside[1][:, None, :, None]
    pictures = 2.5 * mask * F.one_hot(color, 3)[..., None, None] + 0.3 * torch.randn(n, 3, size, size, generator=draw)
    offsets = torch.cat([(middle - size / 2) / 4, torch.log(extent / 5)], 1)
    return pictures - 0.2, torch.cat([offsets, color[:, None].float()], 1)


def detection_loss(output: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    offsets, classes = output
    return F.smooth_l1_loss(offsets, targets[:, :4]) + F.cross_entropy(classes, targets[:, 4].long())


def detector_offsets_through_relu(broken: bool = True, batch: int = 0) -> Case:
    torch.manual_seed(0)
    return Detector(relu=broken), *objects(batch), detection_loss


class PooledNet(nn.Module):
    """Convolutions, pooling, a 1×1 convolution with group norm on what was pooled, and a classifier."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.backbone = nn.Sequential(conv_norm(3, 32), conv_norm(32, 64, 2), conv_norm(64, 64, 2))
        self.neck = nn.Sequential(nn.Conv2d(64, 64, 1), nn.GroupNorm(groups, 64), nn.ReLU())
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.neck(F.adaptive_avg_pool2d(self.backbone(x), 1)).flatten(1))


def cnn_group_norm_of_single_values(broken: bool = True, batch: int = 0) -> Case:
    torch.manual_seed(0)
    return PooledNet(groups=64 if broken else 8), *images(batch), F.cross_entropy


class Discriminator(nn.Module):
    """Strided convolutions with leaky ReLU, and the probability that a picture is real."""

    def __init__(self, last: nn.Module) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 32, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(32, 64, 4, 2, 1, bias=False),
            nn.BatchNorm2d(64),
            nn.LeakyReLU(0.2),
            nn.Conv2d(64, 128, 4, 2, 1, bias=False),
            nn.BatchNorm2d(128),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
        )
        self.judge = nn.Linear(512, 1)
        self.to_probability = last

    def forward(self, x: Tensor) -> Tensor:
        return self.to_probability(self.judge(self.features(x)))


def fakes(batch: int, n: int = 64) -> tuple[Tensor, Tensor]:
    """Return pictures of which every second is fake (without fine detail), and 1 for the real ones."""
    pictures, _ = images(batch, n)
    real = (torch.arange(n) % 2).float()[:, None]
    blurred = 1.6 * F.avg_pool2d(F.pad(pictures, (1, 1, 1, 1), mode="reflect"), 3, 1)
    return torch.where(real[..., None, None] > 0, pictures, blurred), real


def discriminator_softmax_of_one_score(broken: bool = True, batch: int = 0) -> Case:
    torch.manual_seed(0)
    return Discriminator(nn.Softmax(dim=1) if broken else nn.Sigmoid()), *fakes(batch), F.binary_cross_entropy


class FrozenNet(nn.Module):
    """A small vision Transformer of timm with a classifier of the user's own."""

    def __init__(self, frozen: bool, **options: Any) -> None:
        from timm.models import VisionTransformer

        super().__init__()
        self.backbone = VisionTransformer(**options, num_classes=0)
        if frozen:
            for parameter in self.backbone.parameters():
                parameter.requires_grad = False
        self.head = nn.Linear(self.backbone.num_features, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))


def timm_vit_frozen_at_random(broken: bool = True, batch: int = 0) -> Case:
    torch.manual_seed(0)
    options = {"img_size": 16, "patch_size": 4, "embed_dim": 48, "depth": 3, "num_heads": 3}
    return FrozenNet(broken, **options), *images(batch), F.cross_entropy
