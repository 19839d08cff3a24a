"""The eleventh set's broken networks over images: residual nets, parts of GANs, a U-Net, a VAE, and library models."""

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn import functional as F

from fault_cases import he_
from fifth_parts import Case, generator, images, scenes


def convs(inputs: int, outputs: int) -> nn.Sequential:
    """Return two 3×3 convolutions with ReLU."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.Conv2d(outputs, outputs, 3, padding=1), nn.ReLU()
    )


class UNet(nn.Module):
    """A U-Net of two levels and a bottom, without normalizers."""

    def __init__(self, classes: int, width: int = 16) -> None:
        super().__init__()
        self.down1, self.down2 = convs(3, width), convs(width, 2 * width)
        self.down3 = convs(2 * width, 4 * width)
        self.up2, self.up1 = convs(6 * width, 2 * width), convs(3 * width, width)
        self.to_classes = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.down1(x)
        middle = self.down2(F.max_pool2d(fine, 2))
        coarse = self.down3(F.max_pool2d(middle, 2))
        middle = self.up2(torch.cat([middle, F.interpolate(coarse, scale_factor=2.0)], 1))
        return self.to_classes(self.up1(torch.cat([fine, F.interpolate(middle, scale_factor=2.0)], 1)))


def normal_weights_(model: nn.Module, std: float) -> None:
    """Draw all weights from a normal distribution; DCGAN and pix2pix take 0.02."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d | nn.Linear):
            nn.init.normal_(module.weight, std=std)
            nn.init.zeros_(module.bias)


def unet_gan_weights_without_norms(broken: bool = True, batch: int = 0) -> Case:
    """A U-Net without normalizers that starts with the weights of pix2pix, N(0, 0.02)."""
    torch.manual_seed(0)
    model = UNet(classes=4)
    if broken:
        normal_weights_(model, 0.02)
    else:
        he_(model)
    return model, *scenes(batch), F.cross_entropy


class WeightedBlock(nn.Module):
    """A weighted sum of the stream and a branch of two convolutions."""

    def __init__(self, width: int, weights: tuple[float, float]) -> None:
        super().__init__()
        self.weights = weights
        self.branch = nn.Sequential(
            nn.ReLU(), nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.weights[0] * x + self.weights[1] * self.branch(x)


def resnet_blocks_average_both_paths(broken: bool = True, batch: int = 0) -> Case:
    """A residual net without normalizers, each of whose 24 blocks averages the stream with its branch."""
    torch.manual_seed(0)
    blocks = [WeightedBlock(16, (0.5, 0.5) if broken else (1.0, 0.2)) for _ in range(24)]
    stem = nn.Conv2d(3, 16, 3, padding=1, stride=2)
    to_classes = nn.Sequential(nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    model = nn.Sequential(OrderedDict(stem=he_(stem), stage=he_(nn.Sequential(*blocks)), to_classes=to_classes))
    return model, *images(batch), F.cross_entropy


class Generator(nn.Module):
    """A generator of 16×16 pictures, whose convolutions are drawn from a normal distribution."""

    def __init__(self, std: float, width: int = 32) -> None:
        super().__init__()
        self.enter = nn.Linear(8, width * 16)
        layers: list[nn.Module] = [nn.BatchNorm2d(width), nn.ReLU()]
        for _ in range(2):
            layers += [nn.ConvTranspose2d(width, width, 4, 2, 1), nn.BatchNorm2d(width), nn.ReLU()]
        self.body = nn.Sequential(*layers)
        self.to_rgb = nn.Sequential(nn.Conv2d(width, 3, 3, padding=1), nn.Tanh())
        normal_weights_(self, std)

    def forward(self, codes: Tensor) -> Tensor:
        x = self.enter(codes)
        return self.to_rgb(self.body(x.view(len(x), -1, 4, 4)))


def generator_weights_without_std(broken: bool = True, batch: int = 0) -> Case:
    """A generator with all weights from N(0, 1): batch norms mend it, except before the tanh at the end."""
    torch.manual_seed(0)
    codes = torch.randn(64, 8, generator=generator(1000 + batch))
    patterns = F.interpolate(torch.randn(8, 3, 4, 4, generator=generator(35)), size=16, mode="bilinear")
    pictures = torch.tanh(torch.einsum("nk,kchw->nchw", codes, patterns) / 8**0.5)
    return Generator(1.0 if broken else 0.02), codes, pictures, F.mse_loss


class Lipschitz(nn.Module):
    """Divides the weight of a layer by its largest singular value in each call."""

    def __init__(self, layer: nn.Conv2d | nn.Linear, broken: bool) -> None:
        super().__init__()
        self.layer, self.broken = layer, broken

    def forward(self, x: Tensor) -> Tensor:
        weight = self.layer.weight.data if self.broken else self.layer.weight
        weight = weight / torch.linalg.matrix_norm(self.layer.weight.detach().flatten(1), 2)
        if isinstance(self.layer, nn.Linear):
            return F.linear(x, weight, self.layer.bias)
        return F.conv2d(x, weight, self.layer.bias, self.layer.stride, self.layer.padding)


def discriminator_normalizes_weight_data(broken: bool = True, batch: int = 0) -> Case:
    """A discriminator with a spectral norm written by hand, which divides `weight.data` and not the weight."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 24), (24, 32), (32, 48)):
        layers += [Lipschitz(nn.Conv2d(inputs, outputs, 4, stride=2, padding=1), broken), nn.LeakyReLU(0.2)]
    to_score = nn.Sequential(nn.Flatten(), Lipschitz(nn.Linear(48 * 4, 1), broken))
    model = nn.Sequential(OrderedDict(convs=nn.Sequential(*layers), to_score=to_score))
    pictures, labels = images(batch)
    return model, pictures, (labels < 5).float()[:, None], F.binary_cross_entropy_with_logits


class VAE(nn.Module):
    """A VAE over small pictures whose code comes from `sample` or from `rsample`."""

    def __init__(self, broken: bool, width: int = 96, code: int = 4) -> None:
        super().__init__()
        self.broken = broken
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(144, width), nn.ReLU())
        self.to_mean, self.to_log_variance = nn.Linear(width, code), nn.Linear(width, code)
        self.decoder = nn.Sequential(nn.Linear(code, width), nn.ReLU(), nn.Linear(width, 144))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.encoder(x)
        mean, log_variance = self.to_mean(hidden), self.to_log_variance(hidden)
        codes = Normal(mean, (log_variance / 2).exp())
        code = codes.sample() if self.broken else codes.rsample()
        return self.decoder(code).view_as(x), mean, log_variance


def evidence(output: tuple[Tensor, Tensor, Tensor], targets: Tensor) -> Tensor:
    """Return the squared error, and a little of the divergence from the prior, per pixel."""
    pictures, mean, log_variance = output
    divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(1).mean()
    return F.mse_loss(pictures, targets) + 0.02 * divergence / 4


def vae_codes_from_sample(broken: bool = True, batch: int = 0) -> Case:
    """A VAE that draws its codes with `sample`, through which no gradient gets to the encoder."""
    torch.manual_seed(0)
    patterns = F.interpolate(torch.randn(4, 1, 4, 4, generator=generator(36)), size=12, mode="bilinear")
    amounts = torch.randn(64, 4, generator=generator(1000 + batch))
    pictures = torch.einsum("nk,kchw->nchw", amounts, patterns)
    pictures = (pictures + 0.1 * torch.randn(64, 1, 12, 12, generator=generator(2000 + batch))) / 1.3
    return VAE(broken), pictures, pictures, evidence


class Detector(nn.Module):
    """Scores for each cell of an 8×8 grid, with the bias of RetinaNet for rare objects."""

    def __init__(self, bias: float, width: int = 24) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, stride=2), nn.BatchNorm2d(width), nn.ReLU(),
        )  # fmt: skip
        self.tower = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU())
        self.score_conv = nn.Conv2d(width, 2, 3, padding=1)
        nn.init.normal_(self.score_conv.weight, std=0.01)
        nn.init.constant_(self.score_conv.bias, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.score_conv(self.tower(self.backbone(x)))


def focal(scores: Tensor, targets: Tensor) -> Tensor:
    """Return the focal loss, summed and divided by the number of objects."""
    right = torch.where(targets > 0, scores, -scores)
    return -((-right).sigmoid().square() * F.logsigmoid(right)).sum() / targets.sum()


def detector_prior_of_wrong_sign(broken: bool = True, batch: int = 0) -> Case:
    """A detector whose bias for rare objects, -4.6, has lost its minus: every cell begins as an object."""
    torch.manual_seed(0)
    draw = generator(1000 + batch)
    cells = (torch.rand(16, 2, 8, 8, generator=draw) < 0.03).float()
    colors = torch.tensor([[2.0, -1.0, 1.0], [-1.0, 2.0, 1.0]])
    marks = F.interpolate(torch.einsum("nkhw,kc->nchw", cells, colors), scale_factor=2.0)
    return Detector(4.6 if broken else -4.6), marks + 0.5 * torch.randn(16, 3, 16, 16, generator=draw), cells, focal


def cnn_log_softmax_over_the_batch(broken: bool = True, batch: int = 0) -> Case:
    """A picture classifier whose log softmax runs over the batch and not over the classes."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 16), (16, 32), (32, 32)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]
    model = nn.Sequential(OrderedDict(convs=nn.Sequential(*layers, nn.Flatten()), to_classes=nn.Linear(128, 10)))
    model.add_module("log_probabilities", nn.LogSoftmax(dim=0 if broken else 1))
    return model, *images(batch), F.nll_loss


def timm_convnext_instance_norm_before_pooling(broken: bool = True, batch: int = 0) -> Case:
    """A ConvNeXt of timm that was given an instance norm right before its mean over each channel."""
    import timm

    torch.manual_seed(0)
    model = timm.models.convnext.ConvNeXt(depths=(1, 1, 2, 1), dims=(16, 32, 48, 64), num_classes=10)
    model.norm_pre = nn.InstanceNorm2d(64) if broken else nn.BatchNorm2d(64)
    return model, *images(batch, n=32, size=64), F.cross_entropy


def torchvision_mobilenet_norms_frozen_from_scratch(broken: bool = True, batch: int = 0) -> Case:
    """A MobileNet of torchvision with frozen batch norms, as in detectors, but with random weights."""
    from torchvision.models import mobilenet_v2
    from torchvision.ops import FrozenBatchNorm2d

    torch.manual_seed(0)
    norm = FrozenBatchNorm2d if broken else nn.BatchNorm2d
    model = mobilenet_v2(num_classes=10, width_mult=0.35, norm_layer=norm, dropout=0.0)
    return model, *images(batch, n=32, size=64), F.cross_entropy


def cnn_fan_in_without_the_kernel(broken: bool = True, batch: int = 0) -> Case:
    """A plain CNN of ReLU6 with He's formula on the channels alone, without the nine taps of the kernel."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for i in range(8):
        layers += [nn.Conv2d(16 if i else 3, 16, 3, padding=1, stride=2 if i in (1, 3) else 1), nn.ReLU6()]
    to_classes = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    model = he_(nn.Sequential(OrderedDict(convs=nn.Sequential(*layers), to_classes=to_classes)))
    if broken:
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.normal_(module.weight, std=(2 / module.in_channels) ** 0.5)
    return model, *images(batch), F.cross_entropy
