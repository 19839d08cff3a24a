"""Eighteen sound networks of the seventh set, written for it: each of another family."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fifth_parts import Case, categories, chains, generator, images, scenes, sentences, series, sound, table

OWN: dict[str, Callable[[], Case]] = {}


class Inverted(nn.Module):
    """An inverted bottleneck with a linear end, as in MobileNetV2."""

    def __init__(self, width: int) -> None:
        super().__init__()
        wide = 4 * width
        self.expand, self.norm1 = nn.Conv2d(width, wide, 1, bias=False), nn.BatchNorm2d(wide)
        self.depthwise, self.norm2 = nn.Conv2d(wide, wide, 3, 1, 1, groups=wide, bias=False), nn.BatchNorm2d(wide)
        self.reduce, self.norm3 = nn.Conv2d(wide, width, 1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu6(self.norm2(self.depthwise(F.relu6(self.norm1(self.expand(x))))))
        return x + self.norm3(self.reduce(y))


@sound(OWN)
def inverted_bottlenecks() -> Case:
    """Return a small MobileNetV2."""
    blocks = [Inverted(16) for _ in range(3)]
    head = [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 10)]
    stem = [nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU6()]
    return nn.Sequential(*stem, *blocks, *head), *images(0), nn.CrossEntropyLoss()


class Inception(nn.Module):
    """Branches of several kernel sizes, concatenated."""

    def __init__(self, before: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Conv2d(before, 12, size, padding=size // 2) for size in (1, 3, 5))
        self.pooled = nn.Conv2d(before, 12, 1)
        self.norm = nn.BatchNorm2d(48)

    def forward(self, x: Tensor) -> Tensor:
        parts = [branch(x) for branch in self.branches]
        return F.relu(self.norm(torch.cat([*parts, self.pooled(F.max_pool2d(x, 3, 1, 1))], 1)))


@sound(OWN)
def inception_blocks() -> Case:
    """Return a CNN of Inception blocks."""
    layers = [Inception(3), nn.MaxPool2d(2), Inception(48), nn.MaxPool2d(4), nn.Flatten(), nn.Linear(192, 10)]
    return nn.Sequential(*layers), *images(0), nn.CrossEntropyLoss()


class Modern(nn.Module):
    """A decoder block with RMS norm, rotary positions, grouped keys and SwiGLU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.kv, self.o = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width)
        self.gate, self.up, self.down = nn.Linear(width, 96), nn.Linear(width, 96), nn.Linear(96, width)

    @staticmethod
    def _rotate(x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        angles = torch.arange(x.shape[2])[:, None] * 100.0 ** (-torch.arange(half) / half)
        a, b = x.chunk(2, -1)
        return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q = self.q(y).unflatten(2, (4, -1)).transpose(1, 2)
        k, v = (part.unflatten(2, (2, -1)).transpose(1, 2) for part in self.kv(y).chunk(2, 2))
        mixed = F.scaled_dot_product_attention(self._rotate(q), self._rotate(k), v, is_causal=True, enable_gqa=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


@sound(OWN)
def rotary_language_model() -> Case:
    """Return a small decoder in today's manner."""
    layers = [nn.Embedding(50, 48), *(Modern(48) for _ in range(3)), nn.RMSNorm(48), nn.Linear(48, 50)]
    return nn.Sequential(*layers, nn.Flatten(0, 1)), *chains(0, vocabulary=50), nn.CrossEntropyLoss()


class LinearAttention(nn.Module):
    """Attention with a positive feature map and no softmax."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.o = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, 2)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        total = (q * k.sum(1, keepdim=True)).sum(2, keepdim=True)
        return x + self.o(q @ (k.transpose(1, 2) @ v) / total)


class LinearReader(nn.Module):
    """Layers of linear attention over words."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(40, 32), nn.Sequential(*(LinearAttention(32) for _ in range(3)))
        self.fc = nn.Linear(32, 2)

    def forward(self, words: Tensor) -> Tensor:
        return self.fc(self.layers(self.embed(words)).mean(1))


@sound(OWN)
def linear_attention() -> Case:
    """Return a text classifier with linear attention."""
    return LinearReader(), *sentences(0), nn.CrossEntropyLoss()


class Isomorphism(nn.Module):
    """A graph isomorphism network: each layer is an MLP with batch norm of a node plus its neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(n, 32), nn.ReLU(), nn.Linear(32, 32), nn.LayerNorm(32), nn.ReLU()) for n in (4, 32)
        )
        self.fc = nn.Linear(32, 3)

    def forward(self, graph: Tensor) -> Tensor:
        x, edges = graph[..., :4], graph[..., 4:]
        for mlp in self.mlps:
            x = mlp(x + edges @ x)
        return self.fc(x.mean(1))


@sound(OWN)
def graph_isomorphism() -> Case:
    """Return a graph classifier; the class is the density of the edges."""
    draw = generator(31)
    kind = torch.randint(3, (48,), generator=draw)
    edges = (torch.rand(48, 12, 12, generator=draw) < (0.1 + 0.2 * kind)[:, None, None]).float()
    x = torch.randn(48, 12, 4, generator=draw) + 0.5
    return Isomorphism(), torch.cat([x, edges], 2), kind, nn.CrossEntropyLoss()


class NoisePredictor(nn.Module):
    """An MLP that predicts the noise in a point from the point and an embedded time, the last column."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, 64), nn.SiLU(), nn.Linear(64, 64))
        self.point, self.out = nn.Linear(2, 64), nn.Linear(64, 2)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        angles = x[:, 2:] * 2 ** torch.arange(8.0)
        time, x = self.time(torch.cat([angles.sin(), angles.cos()], 1)), self.point(x[:, :2])
        for layer in self.layers:
            x = x + F.silu(layer(x + time))
        return self.out(x)


@sound(OWN)
def diffusion_of_points() -> Case:
    """Return a small diffusion model in two dimensions."""
    draw = generator(32)
    noise, time, angle = torch.randn(256, 2, generator=draw), torch.rand(256, 1, generator=draw), torch.rand(256, 1)
    points = torch.cat([torch.sin(6.28 * angle), torch.cos(6.28 * angle)], 1) * 1.4
    noisy = (1 - time).sqrt() * points + time.sqrt() * noise
    return NoisePredictor(), torch.cat([noisy, time], 1), noise, nn.MSELoss()


class Variational(nn.Module):
    """A variational autoencoder for small pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 32))
        self.decoder = nn.Sequential(
            nn.Linear(16, 1024), nn.ReLU(), nn.Unflatten(1, (16, 8, 8)), nn.ConvTranspose2d(16, 3, 4, 2, 1)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, 1)
        return self.decoder(mean + (log_variance / 2).exp() * torch.randn_like(mean)), mean, log_variance


@sound(OWN)
def variational_pictures() -> Case:
    """Return a variational autoencoder with its loss per pixel."""

    def loss(outputs: tuple[Tensor, Tensor, Tensor], wanted: Tensor) -> Tensor:
        rebuilt, mean, log_variance = outputs
        kl = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()
        return F.mse_loss(rebuilt, wanted) + kl / wanted[0].numel()

    pictures = scenes(0)[0]
    return Variational(), pictures, pictures, loss


@sound(OWN)
def xavier_tanh_regression() -> Case:
    """Return a network of tanh units with Xavier's weights, and the Huber loss."""
    layers: list[nn.Module] = []
    for before in (8, 64, 64):
        layers += [nn.Linear(before, 64), nn.Tanh()]
        nn.init.xavier_uniform_(layers[-2].weight, gain=5 / 3)
    return nn.Sequential(*layers, nn.Linear(64, 4)), *table(0, outputs=4), nn.SmoothL1Loss()


class Points(nn.Module):
    """PointNet: a shared MLP by 1-D convolutions, and the maximum over the points."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Sequential(
            nn.Conv1d(3, 32, 1), nn.BatchNorm1d(32), nn.ReLU(), nn.Conv1d(32, 64, 1), nn.BatchNorm1d(64), nn.ReLU()
        )
        self.fc = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.shared(x).amax(2))


@sound(OWN)
def point_clouds() -> Case:
    """Return PointNet on clouds that are stretched along one of three axes."""
    kind = torch.randint(3, (64,), generator=generator(33))
    clouds = torch.randn(64, 3, 48, generator=generator(34)) * (0.6 + F.one_hot(kind, 3))[:, :, None]
    return Points(), clouds, kind, nn.CrossEntropyLoss()


class Spectral(nn.Module):
    """A Fourier layer: a learned product on the lowest frequencies plus a pointwise convolution."""

    def __init__(self, width: int, modes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width, modes, 2) / (2 * width) ** 0.5)
        self.point, self.modes = nn.Conv1d(width, width, 1), modes

    def forward(self, x: Tensor) -> Tensor:
        waves = torch.fft.rfft(x, norm="ortho")[:, :, : self.modes]
        waves = torch.einsum("nim,iom->nom", waves, torch.view_as_complex(self.weight))
        return F.gelu(torch.fft.irfft(waves, n=x.shape[2], norm="ortho") + self.point(x))


@sound(OWN)
def fourier_operator() -> Case:
    """Return a Fourier neural operator that learns to smooth a function."""
    x = torch.randn(64, 1, 32, generator=generator(35))
    wanted = 2 * F.avg_pool1d(F.pad(x, (2, 2), mode="circular"), 5, 1)
    layers = [nn.Conv1d(1, 24, 1), Spectral(24, 8), Spectral(24, 8), nn.Conv1d(24, 1, 1)]
    return nn.Sequential(*layers), x, wanted, nn.MSELoss()


class Radiance(nn.Module):
    """A coordinate network with Fourier features and a skip to the middle, as in NeRF."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.second = nn.Sequential(nn.Linear(80, 64), nn.ReLU(), nn.Linear(64, 3))

    def forward(self, x: Tensor) -> Tensor:
        angles = (x[:, :, None] * 2 ** torch.arange(4.0)).flatten(1)
        waves = torch.cat([angles.sin(), angles.cos()], 1)
        return torch.sigmoid(self.second(torch.cat([self.first(waves), waves], 1)))


@sound(OWN)
def coordinate_colors() -> Case:
    """Return a coordinate network whose colors are from 0 to 1."""
    x = 2 * torch.rand(256, 2, generator=generator(36)) - 1
    colors = torch.stack([torch.sin(3 * x[:, 0]), torch.cos(4 * x[:, 1]), x.prod(1)], 1) / 2 + 0.5
    return Radiance(), x, colors, nn.MSELoss()


@sound(OWN)
def counts_with_poisson() -> Case:
    """Return a regression of counts with the Poisson likelihood."""
    x, wanted = table(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1))
    return model, x, torch.poisson((wanted + 1).exp(), generator=generator(37)), nn.PoissonNLLLoss()


class BothWaysTagger(nn.Module):
    """A bidirectional LSTM of two layers that gives each word a tag."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(40, 32), nn.Linear(64, 5)
        self.lstm = nn.LSTM(32, 32, 2, batch_first=True, bidirectional=True)

    def forward(self, words: Tensor) -> Tensor:
        return self.out(self.lstm(self.embed(words))[0]).flatten(0, 1)


@sound(OWN)
def two_layer_tagger() -> Case:
    """Return a tagger."""
    words = torch.randint(40, (48, 16), generator=generator(38))
    return BothWaysTagger(), words, (words % 5).flatten(), nn.CrossEntropyLoss()


class ConvGRU(nn.Module):
    """A recurrent network over frames whose gates are convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.gates, self.state = nn.Conv2d(19, 32, 3, padding=1), nn.Conv2d(19, 16, 3, padding=1)
        self.out = nn.Conv2d(16, 3, 1)

    def forward(self, frames: Tensor) -> Tensor:
        h = frames.new_zeros(len(frames), 16, *frames.shape[3:])
        for frame in frames.unbind(1):
            update, reset = torch.sigmoid(self.gates(torch.cat([frame, h], 1))).chunk(2, 1)
            h = (1 - update) * h + update * torch.tanh(self.state(torch.cat([frame, reset * h], 1)))
        return self.out(h)


@sound(OWN)
def frame_predictor() -> Case:
    """Return a predictor of the next frame: the last one, moved by a pixel."""
    last = F.avg_pool2d(scenes(0)[0], 2)
    frames = torch.stack([last.roll(-2, 3), last.roll(-1, 3), last], 1)
    return ConvGRU(), frames, last.roll(1, 3), nn.MSELoss()


class TwoTasks(nn.Module):
    """One body with a head for classes and a head for a number."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64), nn.GELU())
        self.kind, self.number = nn.Linear(64, 4), nn.Linear(64, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.body(x)
        return self.kind(x), self.number(x)


@sound(OWN)
def two_tasks() -> Case:
    """Return a network with two heads, and the sum of their losses."""
    x, kind = categories(0)
    number = table(0)[1]

    def loss(outputs: tuple[Tensor, Tensor], wanted: Tensor) -> Tensor:
        return F.cross_entropy(outputs[0], wanted) + F.mse_loss(outputs[1], number)

    return TwoTasks(), x, kind, loss


@sound(OWN)
def focal_segmentation() -> Case:
    """Return a dilated fully convolutional network with the focal loss."""

    def loss(output: Tensor, wanted: Tensor) -> Tensor:
        value = F.cross_entropy(output, wanted, reduction="none")
        return ((1 - (-value).exp()) ** 2 * value).mean()

    layers: list[nn.Module] = []
    for before, dilation in ((3, 1), (24, 2), (24, 4)):
        layers += [nn.Conv2d(before, 24, 3, padding=dilation, dilation=dilation), nn.BatchNorm2d(24), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(24, 4, 1)), *scenes(0), loss


@sound(OWN)
def label_smoothed_vgg() -> Case:
    """Return convolutions with batch norm and pooling in the manner of VGG, with label smoothing."""
    layers: list[nn.Module] = []
    for before, after in ((3, 24), (24, 24), (24, 48)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(192, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))
    return model, *images(0), nn.CrossEntropyLoss(label_smoothing=0.1)


@sound(OWN)
def group_normed_series() -> Case:
    """Return a 1-D CNN with group norm for time series."""
    layers = [nn.Conv1d(20, 32, 1), nn.GroupNorm(4, 32), nn.ELU(), nn.Flatten(), nn.Linear(128, 4)]
    return nn.Sequential(*layers), *series(0), nn.CrossEntropyLoss()
