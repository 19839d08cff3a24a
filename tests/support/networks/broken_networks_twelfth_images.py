"""The twelfth set's broken networks over images: classifiers, a U-Net, a discriminator, and models of libraries."""

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fault_cases import he_, times_
from fifth_parts import Case, generator, images, scenes


def head(width: int, classes: int = 10) -> nn.Sequential:
    """Return the mean over the pixels and a linear layer."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes))


def vgg_one_convolution_times_hundred(broken: bool = True, batch: int = 0) -> Case:
    """A plain CNN without normalizers, whose fifth convolution has weights a hundred times too large."""
    torch.manual_seed(0)
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    inputs = 3
    for i, width in enumerate((16, 16, 32, 32, 48, 48), 1):
        layers[f"conv{i}"], layers[f"relu{i}"] = nn.Conv2d(inputs, width, 3, padding=1), nn.ReLU()
        if i in (2, 4):
            layers[f"pool{i}"] = nn.MaxPool2d(2)
        inputs = width
    features = he_(nn.Sequential(layers))
    if broken:
        times_(features.get_submodule("conv5"), 100.0)
    return nn.Sequential(OrderedDict(features=features, head=head(48))), *images(batch), F.cross_entropy


def autoencoder_tanh_weights_uniform(broken: bool = True, batch: int = 0) -> Case:
    """A convolutional autoencoder with tanh, whose weights are uniform between -1 and 1: the units are saturated."""
    torch.manual_seed(0)
    encoder = nn.Sequential(
        nn.Conv2d(1, 24, 4, stride=2, padding=1), nn.Tanh(), nn.Conv2d(24, 32, 4, stride=2, padding=1), nn.Tanh(),
        nn.Conv2d(32, 32, 4, stride=2, padding=1), nn.Tanh(),
    )  # fmt: skip
    decoder = nn.Sequential(
        nn.ConvTranspose2d(32, 32, 4, stride=2, padding=1), nn.Tanh(),
        nn.ConvTranspose2d(32, 24, 4, stride=2, padding=1), nn.Tanh(),
        nn.ConvTranspose2d(24, 24, 4, stride=2, padding=1), nn.Tanh(),
    )  # fmt: skip
    model = nn.Sequential(OrderedDict(encoder=encoder, decoder=decoder, to_pixels=nn.Conv2d(24, 1, 3, padding=1)))
    for layer in [*encoder, *decoder]:
        if isinstance(layer, nn.Conv2d | nn.ConvTranspose2d):
            if broken:
                nn.init.uniform_(layer.weight, -1.0, 1.0)
            else:
                nn.init.xavier_uniform_(layer.weight, gain=5 / 3)
            nn.init.zeros_(layer.bias)
    patterns = F.interpolate(torch.randn(6, 1, 4, 4, generator=generator(66)), size=16, mode="bilinear")
    pictures = torch.einsum("nk,kchw->nchw", torch.randn(32, 6, generator=generator(1000 + batch)), patterns) / 1.7
    return model, pictures, pictures, F.mse_loss


class UpBlock(nn.Module):
    """Doubles the size, joins what comes from the way down, and convolves."""

    def __init__(self, inputs: int, skip: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs + skip, outputs, 3, padding=1)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return self.relu(self.conv(torch.cat([F.interpolate(x, scale_factor=2.0), skip], 1)))


class UNet(nn.Module):
    """A U-Net of two levels."""

    def __init__(self, classes: int, width: int = 16) -> None:
        super().__init__()
        self.down1 = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.ReLU())
        self.down2 = nn.Sequential(nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU())
        self.bottom = nn.Sequential(nn.Conv2d(2 * width, 4 * width, 3, padding=1), nn.ReLU())
        self.up2, self.up1 = UpBlock(4 * width, 2 * width, 2 * width), UpBlock(2 * width, width, width)
        self.to_classes = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.down1(x)
        coarse = self.down2(F.max_pool2d(fine, 2))
        return self.to_classes(self.up1(self.up2(self.bottom(F.max_pool2d(coarse, 2)), coarse), fine))


def unet_last_block_dead(broken: bool = True, batch: int = 0) -> Case:
    """A U-Net whose last block has biases of -10 before its ReLU: all of its units are dead."""
    torch.manual_seed(0)
    model = he_(UNet(classes=4))
    if broken:
        nn.init.constant_(model.up1.conv.bias, -10.0)
    return model, *scenes(batch), F.cross_entropy


class DenseLayer(nn.Module):
    """cat(x, relu(conv(x)))"""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, growth, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, F.relu(self.conv(x))], 1)


def densenet_pixels_up_to_255(broken: bool = True, batch: int = 0) -> Case:
    """A DenseNet without normalizers, which gets the bytes of the pictures, from 0 to 255, as they are."""
    torch.manual_seed(0)
    stem = nn.Sequential(nn.Conv2d(3, 12, 3, stride=2, padding=1), nn.ReLU())
    dense = nn.Sequential(*(DenseLayer(12 + 12 * i, 12) for i in range(5)))
    model = he_(nn.Sequential(OrderedDict(stem=stem, dense=dense, head=head(72))))
    pictures, labels = images(batch)
    return model, (128 + 50 * pictures).round().clamp(0, 255) if broken else pictures, labels, F.cross_entropy


def timm_vit_queries_and_keys_times_thirty(broken: bool = True, batch: int = 0) -> Case:
    """A ViT of timm whose queries and keys are thirty times too large: each token attends to one other alone."""
    import timm

    torch.manual_seed(0)
    model = timm.models.VisionTransformer(img_size=16, patch_size=4, embed_dim=48, depth=4, num_heads=4, num_classes=10)
    for block in model.blocks:
        nn.init.xavier_uniform_(block.attn.qkv.weight)
        if broken:
            with torch.no_grad():
                block.attn.qkv.weight[: 2 * 48] *= 30
    return model, *images(batch), F.cross_entropy


def torchvision_swin_bias_of_counts(broken: bool = True, batch: int = 0) -> Case:
    """A Swin Transformer of torchvision; the bias of its head holds counts of the classes, not logs of their shares."""
    from torchvision.models import SwinTransformer

    torch.manual_seed(0)
    model = SwinTransformer(
        patch_size=[2, 2], embed_dim=24, depths=[2, 2], num_heads=[2, 4], window_size=[4, 4], num_classes=10,
        stochastic_depth_prob=0.0,
    )  # fmt: skip
    counts = 50.0 * torch.bincount(images(0)[1], minlength=10)
    with torch.no_grad():
        model.head.bias.copy_(counts if broken else (counts / counts.sum()).log())
    return model, *images(batch), F.cross_entropy


class EqualizedConv(nn.Module):
    """A convolution that multiplies its weight by He's factor in each call, for weights of standard deviation one."""

    def __init__(self, inputs: int, outputs: int, size: int, stride: int) -> None:
        super().__init__()
        self.stride, self.padding = stride, size // 2
        self.weight = nn.Parameter(torch.randn(outputs, inputs, size, size))
        self.bias = nn.Parameter(torch.zeros(outputs))
        self.factor = (2 / (inputs * size * size)) ** 0.5

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.factor * self.weight, self.bias, self.stride, self.padding)


def equalized_discriminator_scaled_twice(broken: bool = True, batch: int = 0) -> Case:
    """A discriminator with equalized learning rates, whose weights were also drawn with He's standard deviation."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for i in range(10):
        layers += [EqualizedConv(24 if i else 3, 24, 3, 2 if i in (1, 3) else 1), nn.LeakyReLU(0.2)]
    if broken:
        for layer in layers[::2]:
            nn.init.kaiming_normal_(layer.get_parameter("weight"), nonlinearity="relu")
    to_score = nn.Sequential(nn.Flatten(), nn.Linear(24 * 16, 1))
    model = nn.Sequential(OrderedDict(convs=nn.Sequential(*layers), to_score=to_score))
    pictures, labels = images(batch)
    return model, pictures, (labels < 5).float()[:, None], F.binary_cross_entropy_with_logits


class TwoStream(nn.Module):
    """The class of a film of two channels: what a frame shows and how the frames differ."""

    def __init__(self, classes: int, width: int = 24) -> None:
        super().__init__()
        self.appearance, self.motion = self._stream(width), self._stream(width)
        self.fuse = nn.Linear(2 * width, classes)

    def _stream(self, width: int) -> nn.Sequential:
        return nn.Sequential(
            OrderedDict(
                conv1=nn.Conv2d(3, width, 3, padding=1, bias=False), norm1=nn.BatchNorm2d(width), relu1=nn.ReLU(),
                pool1=nn.MaxPool2d(2),
                conv2=nn.Conv2d(width, width, 3, padding=1, bias=False), norm2=nn.BatchNorm2d(width), relu2=nn.ReLU(),
                pool2=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten(),
            )
        )  # fmt: skip

    def forward(self, film: Tensor) -> Tensor:
        frame, change = film[:, 0], film[:, 1] - film[:, 0]
        return self.fuse(torch.cat([self.appearance(frame), self.motion(change)], 1))


def two_streams_motion_gain_zero(broken: bool = True, batch: int = 0) -> Case:
    """Two streams, one of which ends in a norm with a gain of zero and a ReLU: it is zero and stays so."""
    torch.manual_seed(0)
    model = TwoStream(10)
    if broken:
        nn.init.zeros_(model.motion.norm2.weight)
    changes, labels = images(batch)
    frames = torch.randn(changes.shape, generator=generator(2000 + batch))
    return model, torch.stack([frames, frames + changes], 1), labels, F.cross_entropy


class Autoencoder(nn.Module):
    """A code of eight numbers for each picture, and the picture made of it again."""

    def __init__(self, width: int = 64, code: int = 8) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(144, width), nn.ReLU(), nn.Linear(width, code))
        self.decoder = nn.Sequential(nn.Linear(code, width), nn.ReLU(), nn.Linear(width, 144))

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x)).view_as(x)


def autoencoder_decoder_frozen(broken: bool = True, batch: int = 0) -> Case:
    """An autoencoder whose decoder was left frozen, with random weights."""
    torch.manual_seed(0)
    model = Autoencoder()
    model.decoder.requires_grad_(not broken)
    patterns = F.interpolate(torch.randn(6, 1, 4, 4, generator=generator(61)), size=12, mode="bilinear")
    pictures = torch.einsum("nk,kchw->nchw", torch.randn(64, 6, generator=generator(1000 + batch)), patterns) / 1.7
    return model, pictures, pictures, F.mse_loss
