"""Broken networks of the ninth set for pictures, each with a healthy twin."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fifth_parts import Case, generator, images, scenes


class NormedLayers(nn.Module):
    """Convolutions with batch norms, which can all be one and the same."""

    def __init__(self, depth: int, shared: bool) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 24, 3, 2, 1)
        self.convs = nn.ModuleList(nn.Conv2d(24, 24, 3, padding=1, bias=False) for _ in range(depth))
        norms = [nn.BatchNorm2d(24) for _ in range(depth)]
        self.norms = nn.ModuleList([norms[0]] * depth if shared else norms)
        self.fc = nn.Linear(24 * 4, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.relu(norm(conv(x)))
        return self.fc(F.adaptive_avg_pool2d(x, 2).flatten(1))


def cnn_one_norm_for_all_layers(broken: bool = True, batch: int = 0) -> Case:
    """One batch norm serves all layers: its running statistics mix theirs, and evaluation fails."""
    torch.manual_seed(0)
    return NormedLayers(8, broken), *images(batch), nn.CrossEntropyLoss()


class BinaryUNet(nn.Module):
    """A U-Net of one level with one logit per pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle = self._conv(3, 16), self._conv(16, 32)
        self.up, self.mask = self._conv(48, 16), nn.Conv2d(16, 1, 1)

    @staticmethod
    def _conv(before: int, after: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        fine = self.down(x)
        coarse = F.interpolate(self.middle(F.max_pool2d(fine, 2)), scale_factor=2)
        return self.mask(self.up(torch.cat([fine, coarse], 1))).squeeze(1)


def unet_dice_of_logits(broken: bool = True, batch: int = 0) -> Case:
    """The Dice loss is taken of the logits, without a sigmoid: it has no lower bound, and its denominator no sign."""
    torch.manual_seed(0)
    pictures, labels = scenes(batch, classes=3)

    def dice(output: Tensor, wanted: Tensor) -> Tensor:
        share = output if broken else torch.sigmoid(output)
        return 1 - (2 * (share * wanted).sum() + 1) / (share.sum() + wanted.sum() + 1)

    return BinaryUNet(), pictures, (labels == 0).float(), dice


class BoxNet(nn.Module):
    """A CNN that gives one box per picture: its center, its width and its height, from 0 to 1."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in ((1, 16), (16, 32), (32, 32)):
            layers += [nn.Conv2d(before, after, 3, 2, 1), nn.BatchNorm2d(after), nn.ReLU()]
        self.backbone = nn.Sequential(*layers, nn.Flatten())
        self.neck, self.boxes = nn.Linear(128, 64), nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.boxes(F.relu(self.neck(self.backbone(x)))))


def overlap_loss(left: Tensor, right: Tensor) -> Tensor:
    """Return 1 minus the mean intersection over union of boxes that are given by their corners."""
    sides = torch.minimum(left[:, 2:], right[:, 2:]) - torch.maximum(left[:, :2], right[:, :2])
    shared = sides.clamp(min=0).prod(1)
    areas = [(boxes[:, 2:] - boxes[:, :2]).prod(1) for boxes in (left, right)]
    return 1 - (shared / (areas[0] + areas[1] - shared + 1e-6)).mean()


def detector_boxes_read_as_corners(broken: bool = True, batch: int = 0) -> Case:
    """Boxes of centers and sizes go into an overlap loss that reads corners: nothing overlaps, the gradient is zero."""
    torch.manual_seed(0)
    draw = generator(9100 + batch)
    sizes = 0.2 + 0.2 * torch.rand(64, 2, generator=draw)
    centers = 0.45 + 0.3 * torch.rand(64, 2, generator=draw)
    steps = (torch.arange(16) + 0.5) / 16
    inside = (steps - centers[..., None]).abs() < sizes[..., None] / 2
    x = (inside[:, 0, None, :] & inside[:, 1, :, None]).float()[:, None]
    x = 2 * x - 0.3 + 0.3 * torch.randn(64, 1, 16, 16, generator=draw)

    def corners(boxes: Tensor) -> Tensor:
        return torch.cat([boxes[:, :2] - boxes[:, 2:] / 2, boxes[:, :2] + boxes[:, 2:] / 2], 1)

    def loss(output: Tensor, wanted: Tensor) -> Tensor:
        return overlap_loss(output, wanted) if broken else overlap_loss(corners(output), corners(wanted))

    return BoxNet(), x, torch.cat([centers, sizes], 1), loss


def discriminator_leaky_relu_true(broken: bool = True, batch: int = 0) -> Case:
    """`nn.LeakyReLU(True)`, meant as in place, is a slope of 1 for negative values: the network is linear."""
    torch.manual_seed(0)
    model = nn.Sequential()
    for i, (before, after) in enumerate(((3, 24), (24, 48), (48, 48))):
        model.add_module(f"conv{i}", nn.Conv2d(before, after, 4, 2, 1))
        model.add_module(f"act{i}", nn.LeakyReLU(True if broken else 0.2))
    model.add_module("flat", nn.Flatten())
    model.add_module("real", nn.Linear(48 * 4, 1))
    model.add_module("squeeze", nn.Flatten(0))
    real = images(batch, n=64)[0]
    fake = 1.05 * torch.randn(64, 3, 16, 16, generator=generator(9200 + batch))
    flipped = real * (torch.randint(2, (64, 1, 1, 1), generator=generator(9250 + batch)) * 2 - 1)
    return model, torch.cat([flipped, fake]), torch.arange(128).lt(64).float(), nn.BCEWithLogitsLoss()


class Twins(nn.Module):
    """Embeds both pictures of a pair with the same layers."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in ((3, 16), (16, 32)):
            layers += [nn.Conv2d(before, after, 3, 2, 1), nn.BatchNorm2d(after), nn.ReLU()]
        self.features = nn.Sequential(*layers, nn.Flatten())
        self.embed = nn.Linear(512, 32)

    def forward(self, pairs: Tensor) -> tuple[Tensor, Tensor]:
        left, right = self.embed(self.features(pairs.flatten(0, 1))).unflatten(0, (-1, 2)).unbind(1)
        return left, right


def siamese_cosine_labels_zero_one(broken: bool = True, batch: int = 0) -> Case:
    """CosineEmbeddingLoss wants the labels 1 and -1 and gets 1 and 0: unlike pairs count nothing, all become alike."""
    torch.manual_seed(0)
    pictures, labels = images(batch, n=400, classes=6)
    order = labels.argsort()
    half = torch.randperm(200, generator=generator(9300 + batch))[:64]
    same = torch.stack([pictures[order[0::2]], pictures[order[1::2]]], 1)[half]
    other = torch.stack([pictures[order[:200]], pictures[order[200:]]], 1)[half]
    first, second = labels[order[:200]][half], labels[order[200:]][half]
    agree = torch.cat([(labels[order[0::2]] == labels[order[1::2]])[half], first == second])
    targets = agree.float() if broken else 2 * agree.float() - 1
    criterion = nn.CosineEmbeddingLoss()
    return Twins(), torch.cat([same, other]), targets, lambda output, wanted: criterion(*output, wanted)


class Waves(nn.Module):
    """Sine and cosine of the coordinates at doubling frequencies."""

    def __init__(self, octaves: int) -> None:
        super().__init__()
        self.register_buffer("frequencies", 2 * torch.pi * 2.0 ** torch.arange(octaves))

    def forward(self, x: Tensor) -> Tensor:
        angles = (x[..., None] * self.frequencies).flatten(1)
        return torch.cat([angles.sin(), angles.cos()], 1)


def coordinates_in_pixels(broken: bool = True, batch: int = 0) -> Case:
    """The coordinates are whole pixels and not from 0 to 1: each wave is at the same phase for all of them."""
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module("encode", Waves(4))
    model.add_module("fc1", nn.Linear(16, 64))
    model.add_module("act1", nn.ReLU())
    model.add_module("fc2", nn.Linear(64, 64))
    model.add_module("act2", nn.ReLU())
    model.add_module("color", nn.Linear(64, 3))
    picture = F.interpolate(torch.randn(1, 3, 5, 5, generator=generator(61)), size=32, mode="bicubic")[0]
    pixels = torch.randint(32, (256, 2), generator=generator(9400 + batch))
    colors = picture[:, pixels[:, 0], pixels[:, 1]].T
    return model, pixels.float() if broken else pixels / 32, colors, nn.MSELoss()


class PictureVAE(nn.Module):
    """A variational autoencoder of pictures, which gives the logits of the pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), nn.Flatten()
        )
        self.mean, self.logvar = nn.Linear(512, 8), nn.Linear(512, 8)
        self.decoder = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 256))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        features = self.encoder(x)
        mean, logvar = self.mean(features), self.logvar(features)
        code = mean + torch.randn_like(mean) * (logvar / 2).exp() if self.training else mean
        return self.decoder(code).view_as(x), mean, logvar


def vae_cross_entropy_of_standardized_pictures(broken: bool = True, batch: int = 0) -> Case:
    """The targets of the binary cross entropy are standardized pictures: below 0 and above 1 it has no lower bound."""
    torch.manual_seed(0)
    draw = generator(9500 + batch)
    patterns = F.interpolate(torch.randn(3, 1, 4, 4, generator=generator(62)), size=16, mode="bilinear")
    x = torch.einsum("nk,kchw->nchw", torch.randn(64, 3, generator=draw), patterns)
    x = x + 0.1 * torch.randn(64, 1, 16, 16, generator=draw)

    def loss(output: tuple[Tensor, Tensor, Tensor], wanted: Tensor) -> Tensor:
        logits, mean, logvar = output
        divergence = (mean.square() + logvar.exp() - 1 - logvar).mean() / 2
        return F.binary_cross_entropy_with_logits(logits, wanted) + 0.001 * divergence

    return PictureVAE(), x, x if broken else (0.5 + 0.15 * x).clamp(0, 1), loss


class Equalized(nn.Module):
    """A convolution whose weights are drawn with variance 1 and scaled in each pass, as in StyleGAN."""

    def __init__(self, before: int, after: int, stride: int, power: float) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(after, before, 3, 3)), nn.Parameter(torch.zeros(after))
        self.scale, self.stride = (2 / (9 * before)) ** power, stride

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.scale * self.weight, self.bias, self.stride, 1)


def equalized_convolutions_without_root(broken: bool = True, batch: int = 0) -> Case:
    """The scale of the weights is 2 over the fan and not its square root: each layer divides the signal by ten."""
    torch.manual_seed(0)
    model = nn.Sequential()
    for i, (before, after) in enumerate(((3, 24), (24, 24), (24, 32), (32, 32), (32, 48))):
        model.add_module(f"conv{i}", Equalized(before, after, 1 + i % 2, 1.0 if broken else 0.5))
        model.add_module(f"act{i}", nn.LeakyReLU(0.2))
    model.add_module("flat", nn.Flatten())
    model.add_module("fc", nn.Linear(48 * 16, 10))
    return model, *images(batch), nn.CrossEntropyLoss()


class Flattened(nn.Module):
    """A linear layer for features of any size; `at_each_pass` makes a new one in every forward pass."""

    def __init__(self, before: int, after: int, at_each_pass: bool) -> None:
        super().__init__()
        self.after = after
        self.layer = None if at_each_pass else nn.Linear(before, after)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        layer = nn.Linear(x.shape[1], self.after) if self.layer is None else self.layer
        return F.relu(layer(x))


def cnn_linear_made_in_forward(broken: bool = True, batch: int = 0) -> Case:
    """The first linear layer is made in the forward pass: its weights are new at random in each, and never trained."""
    torch.manual_seed(0)
    model = nn.Sequential()
    for i, (before, after) in enumerate(((3, 16), (16, 24))):
        model.add_module(f"conv{i}", nn.Conv2d(before, after, 3, 2, 1))
        model.add_module(f"norm{i}", nn.BatchNorm2d(after))
        model.add_module(f"act{i}", nn.ReLU())
    model.add_module("flattened", Flattened(24 * 16, 64, broken))
    model.add_module("fc", nn.Linear(64, 10))
    return model, *images(batch), nn.CrossEntropyLoss()


class PooledViT(nn.Module):
    """A vision transformer whose last features are averaged over the patches, or by mistake over the channels."""

    def __init__(self, axis: int) -> None:
        super().__init__()
        self.patches, self.positions = nn.Conv2d(3, 36, 4, 4), nn.Parameter(0.02 * torch.randn(36, 36))
        layer = nn.TransformerEncoderLayer(36, 4, 72, 0.0, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(36), nn.Linear(36, 10)
        self.axis = axis

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.norm(self.encoder(x)).mean(self.axis))


def vit_pools_over_channels(broken: bool = True, batch: int = 0) -> Case:
    """The mean is over the 36 channels and not over the 36 patches: after a layer norm it is zero for each patch."""
    torch.manual_seed(0)
    return PooledViT(2 if broken else 1), *images(batch, size=24), nn.CrossEntropyLoss()
