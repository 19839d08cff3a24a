"""The fourteenth set's healthy networks of our own that see or make pictures, as practitioners write them."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fifth_parts import Case, generator, images, sound

OWN: dict[str, Callable[[], Case]] = {}
own = sound(OWN)


def figures(n: int, size: int = 28, seed: int = 260) -> tuple[Tensor, Tensor]:
    """Return bright strokes on black, from 0 to 1, and which of ten signs they are."""
    draw = generator(seed)
    ends = torch.rand(10, 4, 2, generator=generator(261)) * 1.2 - 0.6
    labels = torch.randint(10, (n,), generator=draw)
    ends = ends[labels] + 0.05 * torch.randn(n, 4, 2, generator=draw)
    line = torch.linspace(-1, 1, size)
    places = torch.stack(torch.meshgrid(line, line, indexing="ij"), -1).view(-1, 2)
    nearest = torch.full((n, size * size), 9.0)
    for i in range(3):
        start, way = ends[:, i, None], ends[:, i + 1, None] - ends[:, i, None]
        along = ((places - start) * way).sum(2, keepdim=True) / way.square().sum(2, keepdim=True)
        nearest = torch.minimum(nearest, (places - start - along.clamp(0, 1) * way).norm(dim=2))
    return (2 - nearest / 0.08).clamp(0, 1).view(n, 1, size, size), labels


def standard(x: Tensor) -> Tensor:
    """Return the same with mean 0 and variance 1."""
    return (x - x.mean()) / x.std()


@own
def lenet_of_signs() -> Case:
    """LeNet-5 with tanh and average pooling, for pictures of 32 pixels."""
    model = nn.Sequential(
        nn.Conv2d(1, 6, 5), nn.Tanh(), nn.AvgPool2d(2), nn.Conv2d(6, 16, 5), nn.Tanh(), nn.AvgPool2d(2),
        nn.Conv2d(16, 120, 5), nn.Tanh(), nn.Flatten(), nn.Linear(120, 84), nn.Tanh(), nn.Linear(84, 10),
    )  # fmt: skip
    pages, labels = figures(64, 32)
    return model, standard(pages), labels, F.cross_entropy


@own
def vgg_with_batch_norm_of_small_pictures() -> Case:
    """VGG-11 for pictures of 32 pixels, a quarter as wide, with its authors' initialization in torchvision."""
    layers: list[nn.Module] = []
    inputs = 3
    for step in (16, "M", 32, "M", 64, 64, "M", 128, 128, "M", 128, 128, "M"):
        if isinstance(step, str):
            layers.append(nn.MaxPool2d(2))
        else:
            layers += [nn.Conv2d(inputs, step, 3, padding=1), nn.BatchNorm2d(step), nn.ReLU(inplace=True)]
            inputs = step
    model = nn.Sequential(*layers, nn.Flatten(), nn.Dropout(0.3), nn.Linear(128, 10))
    for module in model:
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            nn.init.zeros_(module.bias)
    return model, *images(0, n=32, size=32), F.cross_entropy


class SignVectors(nn.Module):
    """A vector of length one for each picture."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
            nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, width),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.encoder(x), dim=1)


def all_triplets(output: Tensor, targets: Tensor) -> Tensor:
    """Return the mean triplet loss of all anchors with one of the same and one of another class; the margin is 0.5."""
    apart = 2 - 2 * output @ output.T
    same = targets[:, None] == targets
    others = ~torch.eye(len(targets), dtype=torch.bool)
    valid = (same & others)[:, :, None] & ~same[:, None]
    return F.relu(apart[:, :, None] - apart[:, None] + 0.5)[valid].mean()


@own
def vectors_of_signs_by_triplets() -> Case:
    pages, labels = figures(64)
    return SignVectors(), standard(pages), labels, all_triplets


class TextLines(nn.Module):
    """CRNN: convolutions, an LSTM in both directions along the line, and the logits of letters and of the blank."""

    def __init__(self, letters: int) -> None:
        super().__init__()
        self.cnn = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d((2, 1)),
        )  # fmt: skip
        self.lstm = nn.LSTM(256, 64, bidirectional=True, batch_first=True)
        self.head = nn.Linear(128, letters + 1)

    def forward(self, x: Tensor) -> Tensor:
        columns = self.cnn(x).permute(0, 3, 1, 2).flatten(2)
        return self.head(self.lstm(columns)[0])


def by_alignment(output: Tensor, targets: Tensor) -> Tensor:
    """Return the CTC loss of lines that all have the same number of letters."""
    steps, letters = torch.full((len(output),), output.shape[1]), torch.full((len(output),), targets.shape[1])
    return F.ctc_loss(output.log_softmax(2).transpose(0, 1), targets, steps, letters)


@own
def text_lines_by_alignment() -> Case:
    """Four letters of 24 by 16 pixels beside another, on a line of 32 by 96."""
    pages, labels = figures(64, 24)
    letters = F.interpolate(pages, size=(24, 20), mode="bilinear").view(16, 4, 24, 20)
    lines = F.pad(torch.cat(list(letters.unbind(1)), 2), (8, 8, 4, 4))[:, None]
    return TextLines(10), standard(lines), 1 + labels.view(16, 4), by_alignment


def colored(n: int, size: int, seed: int) -> Tensor:
    """Return pictures of pixels from 0 to 1 with edges and smooth parts."""
    draw = generator(seed)
    smooth = F.interpolate(torch.randn(n, 3, 5, 5, generator=draw), size=size, mode="bicubic")
    areas = F.interpolate(torch.randn(n, 3, 6, 6, generator=draw), size=size, mode="bicubic").sign()
    return torch.sigmoid(0.8 * smooth + 0.7 * areas)


class DnCNN(nn.Module):
    """Zhang et al.: the noise in a picture is guessed and taken away."""

    def __init__(self, depth: int = 8, width: int = 32) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1), nn.ReLU(inplace=True)]
        for _ in range(depth - 2):
            layers += [nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
        self.noise = nn.Sequential(*layers, nn.Conv2d(width, 3, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        return x - self.noise(x)


@own
def denoiser_of_photographs() -> Case:
    clean = colored(16, 32, 262)
    noisy = clean + 0.1 * torch.randn(clean.shape, generator=generator(263))
    return DnCNN(), noisy, clean, F.mse_loss


@own
def convolutional_autoencoder_of_signs() -> Case:
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(32 * 49, 32), nn.Linear(32, 32 * 49), nn.ReLU(), nn.Unflatten(1, (32, 7, 7)),
        nn.ConvTranspose2d(32, 16, 3, stride=2, padding=1, output_padding=1), nn.ReLU(),
        nn.ConvTranspose2d(16, 1, 3, stride=2, padding=1, output_padding=1), nn.Sigmoid(),
    )  # fmt: skip
    pages, _ = figures(64)
    return model, pages, pages, F.binary_cross_entropy


class PoseBlock(nn.Module):
    """A pre-activation bottleneck block of the hourglass."""

    def __init__(self, width: int) -> None:
        super().__init__()
        half = width // 2
        self.body = nn.Sequential(
            nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, half, 1), nn.BatchNorm2d(half), nn.ReLU(),
            nn.Conv2d(half, half, 3, padding=1), nn.BatchNorm2d(half), nn.ReLU(), nn.Conv2d(half, width, 1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


class Hourglass(nn.Module):
    """A pass down to a coarse grid and up again, with a branch at each size."""

    def __init__(self, width: int, levels: int) -> None:
        super().__init__()
        self.beside, self.down, self.up = PoseBlock(width), PoseBlock(width), PoseBlock(width)
        self.inner: nn.Module = Hourglass(width, levels - 1) if levels > 1 else PoseBlock(width)

    def forward(self, x: Tensor) -> Tensor:
        coarse = self.up(self.inner(self.down(F.max_pool2d(x, 2))))
        return self.beside(x) + F.interpolate(coarse, scale_factor=2)


@own
def hourglass_of_joints() -> Case:
    """Where three colored joints are, as a map of each in units of its height."""
    width = 32
    model = nn.Sequential(
        nn.Conv2d(3, width, 5, stride=2, padding=2), nn.BatchNorm2d(width), nn.ReLU(), PoseBlock(width),
        Hourglass(width, 3), nn.Conv2d(width, width, 1), nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, 3, 1),
    )  # fmt: skip
    draw = generator(264)
    centers = 12 + 40 * torch.rand(8, 3, 2, generator=draw)

    def maps(size: int, spread: float) -> Tensor:
        line = (torch.arange(size) + 0.5) * 64 / size
        rows, columns = centers[..., 0, None, None] - line[:, None], centers[..., 1, None, None] - line
        return torch.exp(-(rows.square() + columns.square()) / (2 * spread**2))

    scenery = 0.5 * torch.randn(8, 3, 64, 64, generator=draw)
    return model, standard(scenery + 4 * maps(64, 4.0)), maps(32, 5.0), F.mse_loss


class CompactTransformer(nn.Module):
    """CCT of Hassani et al.: convolutions make the tokens, whose weighted mean is classified."""

    def __init__(self, classes: int, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        self.tokenizer = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.ReLU(), nn.MaxPool2d(3, 2, 1),
            nn.Conv2d(32, width, 3, padding=1, bias=False), nn.ReLU(), nn.MaxPool2d(3, 2, 1),
        )  # fmt: skip
        for module in self.tokenizer:
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)
        self.position = nn.Parameter(torch.empty(1, 64, width))
        nn.init.trunc_normal_(self.position, std=0.2)
        layer = nn.TransformerEncoderLayer(
            width, 4, 2 * width, dropout=0.1, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, depth, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        self.pool, self.head = nn.Linear(width, 1), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.encoder(self.tokenizer(x).flatten(2).transpose(1, 2) + self.position)
        weights = self.pool(tokens).softmax(1)
        return self.head((weights * tokens).sum(1))


@own
def compact_convolutional_transformer() -> Case:
    return CompactTransformer(10), *images(0, n=16, size=32), F.cross_entropy


class Velocity(nn.Module):
    """Flow matching: the speed of a point at a time, which is the third column."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(3, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(),
            nn.Linear(width, 2),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


@own
def flow_matching_of_rings() -> Case:
    draw = generator(265)
    angle = 2 * math.pi * torch.rand(512, generator=draw)
    radius = 1.0 + (torch.arange(512) % 2)
    data = radius[:, None] * torch.stack([angle.cos(), angle.sin()], 1)
    data = data / data.std()
    noise, time = torch.randn(512, 2, generator=draw), torch.rand(512, 1, generator=draw)
    return Velocity(), torch.cat([(1 - time) * noise + time * data, time], 1), data - noise, F.mse_loss
