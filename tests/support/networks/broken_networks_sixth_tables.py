"""Broken networks of the sixth set for tables, graphs, fields and generative models, each with a healthy twin."""

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fifth_parts import Case, categories, generator


class Stack(nn.Module):
    """Linear layers, with a ReLU between them unless it was forgotten."""

    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(before, after) for before, after in ((4, 64), (64, 64), (64, 64), (64, 2))
        )
        self.broken = broken

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = layer(x) if self.broken else F.relu(layer(x))
        return self.layers[-1](x)


def mlp_without_activations(broken: bool = True, batch: int = 0) -> Case:
    """The activations between the linear layers were forgotten: the network is one linear map."""
    torch.manual_seed(0)
    x = torch.randn(128, 4, generator=generator(1000 + batch))
    return Stack(broken), x, (x[:, 0] * x[:, 1] > 0).long(), nn.CrossEntropyLoss()


class VAE(nn.Module):
    """A variational autoencoder for tables."""

    def __init__(self, features: int, latent: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(features, 64), nn.ReLU())
        self.mu, self.logvar = nn.Linear(64, latent), nn.Linear(64, latent)
        self.decoder = nn.Sequential(nn.Linear(latent, 64), nn.ReLU(), nn.Linear(64, features))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.encoder(x)
        mu, logvar = self.mu(h), self.logvar(h)
        z = mu + (0.5 * logvar).exp() * torch.randn_like(mu) if self.training else mu
        return self.decoder(z), mu, logvar


def vae_kl_summed_over_batch(broken: bool = True, batch: int = 0) -> Case:
    """The KL term is summed over the batch, and the reconstruction error is a mean: the latents collapse."""
    torch.manual_seed(0)
    x = torch.randn(128, 4, generator=generator(1000 + batch)) @ torch.randn(4, 24, generator=generator(13)) / 2

    def loss(outputs: tuple[Tensor, Tensor, Tensor], targets: Tensor) -> Tensor:
        rebuilt, mu, logvar = outputs
        kl = -0.5 * (1 + logvar - mu.square() - logvar.exp()).sum(1)
        return F.mse_loss(rebuilt, targets) + (kl.sum() if broken else kl.mean() / targets.shape[1])

    return VAE(24, 8), x, x, loss


class GraphNet(nn.Module):
    """Graph convolutions by a product with the adjacency matrix; features and edges come in one tensor."""

    def __init__(self, features: int, width: int, classes: int, broken: bool) -> None:
        super().__init__()
        self.encode = nn.Linear(features, width)
        self.convs = nn.ModuleList(nn.Linear(width, width) for _ in range(5))
        self.classify = nn.Linear(width, classes)
        self.features, self.broken = features, broken

    def forward(self, graph: Tensor) -> Tensor:
        x, adjacency = graph[..., : self.features], graph[..., self.features :]
        if not self.broken:
            adjacency = adjacency / adjacency.sum(-1, keepdim=True)
        x = self.encode(x)
        for conv in self.convs:
            x = x + F.relu(conv(adjacency @ x))
        return self.classify(x).flatten(0, 1)


def graph_sum_of_neighbours(broken: bool = True, batch: int = 0) -> Case:
    """The adjacency matrix is not normalized: each layer multiplies the features by the number of neighbours."""
    torch.manual_seed(0)
    draw = generator(1000 + batch)
    community = torch.randint(3, (8, 40), generator=draw)
    same = community[:, :, None] == community[:, None]
    adjacency = (torch.rand(8, 40, 40, generator=draw) < torch.where(same, 0.8, 0.2)).float()
    adjacency = torch.maximum(adjacency, torch.eye(40))
    x = F.one_hot(community, 3) + torch.randn(8, 40, 3, generator=draw)
    return GraphNet(3, 48, 3, broken), torch.cat([x, adjacency], 2), community.flatten(), nn.CrossEntropyLoss()


class MixerBlock(nn.Module):
    """Mixes tokens, then channels; there are as many tokens as channels."""

    def __init__(self, width: int, broken: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.token_mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.channel_mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.broken = broken

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + (self.token_mlp(y) if self.broken else self.token_mlp(y.transpose(1, 2)).transpose(1, 2))
        return x + self.channel_mlp(self.norm2(x))


class Mixer(nn.Module):
    """An MLP-Mixer over a sequence of 32 steps."""

    def __init__(self, features: int, classes: int, broken: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(features, 32)
        self.blocks = nn.Sequential(*(MixerBlock(32, broken) for _ in range(3)))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embed(x))).mean(1))


def mixer_without_transpose(broken: bool = True, batch: int = 0) -> Case:
    """The transposes around the token mixing were forgotten: it mixes channels, and no token sees another one."""
    torch.manual_seed(0)
    x = torch.randn(64, 32, 6, generator=generator(1000 + batch))
    return Mixer(6, 4, broken), x, x[:, :8, :4].mean(1).argmax(1), nn.CrossEntropyLoss()


class RiskModel(nn.Module):
    """An MLP with residual blocks for a yes or a no."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.stem = nn.Linear(features, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
            for _ in range(3)
        )
        self.logit = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.logit(x)


def binary_cross_entropy_of_one_logit(broken: bool = True, batch: int = 0) -> Case:
    """CrossEntropyLoss over a single output: its softmax is always 1, so the gradient is zero."""
    torch.manual_seed(0)
    x, classes = categories(batch, classes=2)
    loss = nn.CrossEntropyLoss() if broken else nn.BCEWithLogitsLoss()
    return RiskModel(8, 64), x, classes.float()[:, None], loss


class Siamese(nn.Module):
    """The distance of two embeddings; the two items come as one tensor (samples, 2, features)."""

    def __init__(self, features: int, broken: bool) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(features, 64), nn.ReLU(), nn.Linear(64, 16))
        self.eps = 0.0 if broken else 1e-6

    def forward(self, pairs: Tensor) -> Tensor:
        left, right = self.embed(pairs[:, 0]), self.embed(pairs[:, 1])
        return torch.sqrt((left - right).square().sum(1) + self.eps)


def siamese_root_of_zero(broken: bool = True, batch: int = 0) -> Case:
    """Some pairs hold the same item twice: the gradient of the square root at distance zero is infinite, then NaN."""
    torch.manual_seed(0)
    draw = generator(1000 + batch)
    left, right = torch.randn(2, 96, 8, generator=draw)
    right = torch.where(torch.arange(96)[:, None] % 8 == 0, left, right)
    distance = (left[:, :3] - right[:, :3]).norm(dim=1)
    return Siamese(8, broken), torch.stack([left, right], 1), distance, nn.MSELoss()


class Siren(nn.Module):
    """A network of sines that learns a picture as a function of the coordinates."""

    def __init__(self, width: int, depth: int, broken: bool) -> None:
        super().__init__()
        sizes = [2] + [width] * depth
        self.layers = nn.ModuleList(nn.Linear(before, after) for before, after in itertools.pairwise(sizes))
        self.out = nn.Linear(width, 1)
        self.frequency = 30.0
        if not broken:
            nn.init.uniform_(self.layers[0].weight, -0.5 / 2, 0.5 / 2)
            for layer in self.layers[1:]:
                bound = (6 / width) ** 0.5 / self.frequency
                nn.init.uniform_(layer.weight, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.sin(self.frequency * layer(x))
        return self.out(x)


def siren_default_weights(broken: bool = True, batch: int = 0) -> Case:
    """The sine layers keep nn.Linear's default weights, many times too large for the frequency of 30."""
    torch.manual_seed(0)
    x = 2 * torch.rand(256, 2, generator=generator(1000 + batch)) - 1
    wanted = torch.sin(4 * x[:, :1]) * torch.cos(5 * x[:, 1:]) * 1.4
    return Siren(64, 4, broken), x, wanted, nn.MSELoss()
