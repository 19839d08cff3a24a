"""Eighteen sound networks of the sixth set, written for it: each of another family."""

import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fifth_parts import Case, categories, chains, generator, images, scenes, sentences, series, sound, table

OWN: dict[str, Callable[[], Case]] = {}


class Dense(nn.Module):
    """Dense blocks: each layer reads all features before it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(16 + 8 * i), nn.ReLU(), nn.Conv2d(16 + 8 * i, 8, 3, padding=1))
            for i in range(6)
        )
        self.norm, self.fc = nn.BatchNorm2d(64), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = torch.cat([x, layer(x)], 1)
        return self.fc(F.relu(self.norm(x)).mean((2, 3)))


@sound(OWN)
def densely_connected_cnn() -> Case:
    """Return a small DenseNet."""
    return Dense(), *images(0), nn.CrossEntropyLoss()


@sound(OWN)
def selu_mlp() -> Case:
    """Return a self-normalizing network with the weights of its paper."""
    layers: list[nn.Module] = []
    for before in (8, *[64] * 7):
        layers += [nn.Linear(before, 64), nn.SELU()]
    model = nn.Sequential(*layers, nn.Linear(64, 4))
    for module in model:
        if isinstance(module, nn.Linear):
            nn.init.kaiming_normal_(module.weight, nonlinearity="linear")
            nn.init.zeros_(module.bias)
    return model, *categories(0), nn.CrossEntropyLoss()


@sound(OWN)
def weight_normed_regression() -> Case:
    """Return an MLP whose layers are parametrized by torch's weight norm."""
    sizes = (8, 64, 64, 64)
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(sizes):
        layers += [nn.utils.parametrizations.weight_norm(nn.Linear(before, after)), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(64, 1)), *table(0), nn.MSELoss()


class Coupling(nn.Module):
    """A normalizing flow of affine couplings; the output is the latent and the log-determinant."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(
            nn.Sequential(nn.Linear(3, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 6)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        total = x.new_zeros(len(x))
        for net in self.nets:
            kept, moved = x.chunk(2, 1)
            scale, shift = net(kept).chunk(2, 1)
            scale = torch.tanh(scale)
            x, total = torch.cat([moved * scale.exp() + shift, kept], 1), total + scale.sum(1)
        return x, total


@sound(OWN)
def normalizing_flow() -> Case:
    """Return a flow and its negative log-likelihood."""
    mix = torch.randn(6, 6, generator=generator(20)) / 2
    x = torch.randn(128, 6, generator=generator(21)) @ mix + 1

    def loss(outputs: tuple[Tensor, Tensor], _: Tensor) -> Tensor:
        return (outputs[0].square().sum(1) / 2 - outputs[1]).mean()

    return Coupling(), x, x, loss


class Causal(nn.Module):
    """Dilated causal convolutions with skips."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 32)
        self.convs = nn.ModuleList(nn.Conv1d(32, 32, 2, dilation=2**i) for i in range(4))
        self.norms = nn.ModuleList(nn.GroupNorm(4, 32) for _ in range(4))
        self.out = nn.Conv1d(32, 40, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens).transpose(1, 2)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = x + F.gelu(norm(conv(F.pad(x, (conv.dilation[0], 0)))))
        return self.out(x).transpose(1, 2).flatten(0, 1)


@sound(OWN)
def causal_convolutions() -> Case:
    """Return a temporal convolutional network that predicts the next token."""
    return Causal(), *chains(0, vocabulary=40), nn.CrossEntropyLoss()


class DeepSet(nn.Module):
    """A sum over the elements of a set between two MLPs, divided by the size."""

    def __init__(self) -> None:
        super().__init__()
        self.phi = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.rho = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.rho(self.phi(x).mean(1))


@sound(OWN)
def deep_sets() -> Case:
    """Return a network for sets."""
    return DeepSet(), *series(0), nn.CrossEntropyLoss()


class GraphAttention(nn.Module):
    """Two layers of graph attention over a dense graph, given with the features in one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.ModuleList([nn.Linear(4, 32), nn.Linear(32, 32)])
        self.source = nn.ModuleList(nn.Linear(32, 1) for _ in range(2))
        self.target = nn.ModuleList(nn.Linear(32, 1) for _ in range(2))
        self.out = nn.Linear(32, 4)

    def forward(self, graph: Tensor) -> Tensor:
        x, edges = graph[..., :4], graph[..., 4:] > 0
        for project, source, target in zip(self.project, self.source, self.target, strict=True):
            x = project(x)
            scores = F.leaky_relu(source(x) + target(x).transpose(1, 2), 0.2).masked_fill(~edges, float("-inf"))
            x = F.elu(scores.softmax(-1) @ x)
        return self.out(x).flatten(0, 1)


@sound(OWN)
def graph_attention() -> Case:
    """Return a graph attention network that finds the communities of nodes."""
    draw = generator(22)
    kind = torch.randint(4, (8, 24), generator=draw)
    close = torch.rand(8, 24, 24, generator=draw) < torch.where(kind[:, :, None] == kind[:, None], 0.7, 0.1)
    edges = (close | torch.eye(24, dtype=torch.bool)).float()
    x = F.one_hot(kind, 4) + 0.7 * torch.randn(8, 24, 4, generator=draw)
    return GraphAttention(), torch.cat([x, edges], 2), kind.flatten(), nn.CrossEntropyLoss()


class SqueezeBlock(nn.Module):
    """A residual block with squeeze and excitation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.down, self.up = nn.Linear(width, width // 4), nn.Linear(width // 4, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(F.silu(self.norm1(self.conv1(x)))))
        gate = torch.sigmoid(self.up(F.relu(self.down(y.mean((2, 3))))))
        return F.silu(x + y * gate[:, :, None, None])


@sound(OWN)
def squeeze_excite_resnet() -> Case:
    """Return a ResNet with squeeze and excitation."""
    blocks = [SqueezeBlock(24) for _ in range(4)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 10)]
    return nn.Sequential(nn.Conv2d(3, 24, 3, 2, 1), *blocks, *head), *images(0), nn.CrossEntropyLoss()


class Perceiver(nn.Module):
    """Learned queries that read the words by cross-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 32, padding_idx=0)
        self.queries = nn.Parameter(0.1 * torch.randn(4, 32))
        self.read = nn.MultiheadAttention(32, 4, batch_first=True)
        self.norm1, self.norm2 = nn.LayerNorm(32), nn.LayerNorm(32)
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        self.fc = nn.Linear(32, 2)

    def forward(self, words: Tensor) -> Tensor:
        queries, x = self.queries.expand(len(words), -1, -1), self.embed(words)
        read = self.read(queries, x, x, key_padding_mask=words == 0, need_weights=False)[0]
        x = self.norm1(queries + read)
        return self.fc(self.norm2(x + self.mlp(x)).mean(1))


@sound(OWN)
def learned_queries() -> Case:
    """Return a small Perceiver."""
    return Perceiver(), *sentences(0), nn.CrossEntropyLoss()


class Film(nn.Module):
    """A CNN whose features are scaled and shifted by a condition, the last channel of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(2, 24, 3, padding=1), nn.Conv2d(24, 24, 3, padding=1)
        self.film = nn.Linear(1, 48)
        self.out = nn.Linear(24 * 16, 10)

    def forward(self, x: Tensor) -> Tensor:
        scale, shift = self.film(x[:, 2].mean((1, 2))[:, None])[:, :, None, None].chunk(2, 1)
        x = F.max_pool2d(F.relu(self.conv1(x[:, :2])), 2)
        return self.out(F.max_pool2d(F.relu(self.conv2(x) * (1 + scale) + shift), 2).flatten(1))


@sound(OWN)
def conditioned_cnn() -> Case:
    """Return a network with feature-wise modulation."""
    return Film(), *images(0), nn.CrossEntropyLoss()


class SoftExperts(nn.Module):
    """Experts that are MLPs, weighed by a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 3)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        outputs = torch.stack([expert(x) for expert in self.experts], 2)
        return (outputs * self.gate(x).softmax(1)[:, None]).sum(2)


@sound(OWN)
def soft_experts() -> Case:
    """Return a dense mixture of experts."""
    return SoftExperts(), *table(0, outputs=3), nn.MSELoss()


@sound(OWN)
def triplet_embeddings() -> Case:
    """Return an embedding network with the triplet loss."""
    model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16))
    centers = torch.randn(6, 10, generator=generator(23))
    draw = generator(24)
    kind = torch.randint(6, (96,), generator=draw)
    other = (kind + torch.randint(1, 6, (96,), generator=draw)) % 6
    items = torch.stack([centers[kind], centers[kind], centers[other]], 1)
    items = items + 0.7 * torch.randn(96, 3, 10, generator=draw)

    def loss(output: Tensor, _: Tensor) -> Tensor:
        anchor, near, far = F.normalize(output, dim=-1).unbind(1)
        return F.triplet_margin_loss(anchor, near, far, margin=0.5)

    return model, items, kind, loss


class Euler(nn.Module):
    """A neural ODE, integrated by eight steps of Euler with one shared field."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(8, 32)
        self.field = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))
        self.read = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        for _ in range(8):
            x = x + self.field(x) / 8
        return self.read(x)


@sound(OWN)
def neural_ode() -> Case:
    """Return a neural ODE."""
    return Euler(), *categories(0), nn.CrossEntropyLoss()


@sound(OWN)
def quantile_regression() -> Case:
    """Return a regression with the pinball loss."""

    def loss(output: Tensor, wanted: Tensor) -> Tensor:
        levels, error = output.new_tensor([0.1, 0.5, 0.9]), wanted - output
        return torch.maximum(levels * error, (levels - 1) * error).mean()

    model = nn.Sequential(nn.Linear(8, 64), nn.LeakyReLU(), nn.Linear(64, 64), nn.LeakyReLU(), nn.Linear(64, 3))
    return model, *table(0), loss


class Pyramid(nn.Module):
    """A feature pyramid: coarse features are added to fine ones."""

    def __init__(self) -> None:
        super().__init__()
        self.c1 = nn.Sequential(nn.Conv2d(3, 24, 3, padding=1), nn.GroupNorm(4, 24), nn.ReLU())
        self.c2 = nn.Sequential(nn.Conv2d(24, 48, 3, 2, 1), nn.GroupNorm(4, 48), nn.ReLU())
        self.c3 = nn.Sequential(nn.Conv2d(48, 96, 3, 2, 1), nn.GroupNorm(4, 96), nn.ReLU())
        self.laterals = nn.ModuleList(nn.Conv2d(width, 32, 1) for width in (24, 48, 96))
        self.smooth, self.out = nn.Conv2d(32, 32, 3, padding=1), nn.Conv2d(32, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        c1 = self.c1(x)
        c2 = self.c2(c1)
        fine, middle, coarse = (layer(c) for layer, c in zip(self.laterals, (c1, c2, self.c3(c2)), strict=True))
        merged = fine + F.interpolate(middle + F.interpolate(coarse, scale_factor=2), scale_factor=2)
        return self.out(F.relu(self.smooth(merged)))


@sound(OWN)
def feature_pyramid() -> Case:
    """Return a pyramid for segmentation."""
    return Pyramid(), *scenes(0), nn.CrossEntropyLoss()


@sound(OWN)
def categorical_columns() -> Case:
    """Return an MLP on the embeddings of three categorical columns, with a binary target."""
    x = torch.randint(10, (256, 3), generator=generator(25)) + torch.tensor([0, 10, 20])
    hidden = [nn.Flatten(), nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 1), nn.Flatten(0)]
    model = nn.Sequential(nn.Embedding(30, 16), *hidden)
    return model, x, (x.sum(1) > 43).float(), nn.BCEWithLogitsLoss()


class Gaussian(nn.Module):
    """A regression that predicts mean and variance from a GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(4, 32, batch_first=True), nn.Linear(32, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, spread = self.head(self.gru(x)[0][:, -1]).unbind(1)
        return mean, F.softplus(spread) + 1e-3


@sound(OWN)
def gru_with_variance() -> Case:
    """Return a forecaster with the Gaussian likelihood."""
    x = series(0)[0]
    return Gaussian(), x, x[:, -5:, 0].mean(1), lambda out, wanted: F.gaussian_nll_loss(out[0], wanted, out[1])


class Separable(nn.Module):
    """A ConvNeXt block over tokens of a picture: depthwise convolution, layer norm, MLP, layer scale."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise, self.norm = nn.Conv2d(width, width, 5, padding=2, groups=width), nn.LayerNorm(width)
        self.expand, self.reduce = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gamma = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + (self.gamma * self.reduce(F.gelu(self.expand(y)))).permute(0, 3, 1, 2)


@sound(OWN)
def layer_scaled_cnn() -> Case:
    """Return a network of ConvNeXt blocks."""
    blocks = [Separable(32) for _ in range(4)]
    head = [nn.Flatten(), nn.Linear(32 * 16, 10)]
    return nn.Sequential(nn.Conv2d(3, 32, 4, 4), *blocks, *head), *images(0), nn.CrossEntropyLoss()
