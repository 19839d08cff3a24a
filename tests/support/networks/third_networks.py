"""The networks of `broken_networks_third`: each has one switch that breaks it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fault_cases import CLASSES


class MobileNet(nn.Module):
    """Six pairs of a depthwise and a pointwise convolution, without norms."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, width, 3, 2, 1), nn.Linear(width, CLASSES)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1, groups=width), nn.ReLU(), nn.Conv2d(width, width, 1), nn.ReLU()
            )
            for _ in range(6)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class Adversaries(nn.Module):
    """What the generator's step sees: the discriminator's score of made-up images."""

    def __init__(self, cut: bool) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(16, 32 * 4 * 4), nn.Unflatten(1, (32, 4, 4)), nn.BatchNorm2d(32), nn.ReLU(),
            nn.ConvTranspose2d(32, 16, 4, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
            nn.ConvTranspose2d(16, 3, 4, 2, 1), nn.Tanh(),
        )  # fmt: skip
        self.discriminator = nn.Sequential(
            nn.Conv2d(3, 16, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(16, 32, 4, 2, 1), nn.LeakyReLU(0.2),
            nn.Flatten(), nn.Linear(32 * 4 * 4, 1),
        )  # fmt: skip
        self.cut = cut

    def forward(self, z: Tensor) -> Tensor:
        image = self.generator(z)
        return self.discriminator(image.detach() if self.cut else image)


class HalfRMSNorm(nn.Module):
    """An RMS norm that computes in half precision."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.gain, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        half = x.half()
        return (half * (half.square().mean(-1, keepdim=True) + self.eps).rsqrt()).float() * self.gain


class TokenLayer(nn.Module):
    """x + mlp(norm(x))"""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.norm = HalfRMSNorm(width, eps)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class SentenceClassifier(nn.Module):
    """An embedding whose word 0 is padding, layers on each word, and the mean over the sentence."""

    def __init__(self, eps: float, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(60, width, padding_idx=0)
        self.layers = nn.ModuleList(TokenLayer(width, eps) for _ in range(3))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


class GraphConvolution(nn.Module):
    """Neighbours are averaged by D^-1/2 A D^-1/2, then mapped."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        root = adjacency.sum(-1).rsqrt()
        return self.linear((root[:, None] * adjacency * root) @ x)


class GraphNetwork(nn.Module):
    """Four graph convolutions over one graph of 12 nodes, and the mean of the nodes."""

    adjacency: Tensor

    def __init__(self, self_loops: bool, width: int = 32) -> None:
        super().__init__()
        edges = torch.triu((torch.rand(12, 12) < 0.4).float(), 1)
        edges[:, 7] = edges[7] = 0.0
        adjacency = edges + edges.T + (torch.eye(12) if self_loops else 0.0)
        self.register_buffer("adjacency", adjacency)
        self.convs = nn.ModuleList(GraphConvolution(width if i else 8, width) for i in range(4))
        self.acts = nn.ModuleList(nn.Sequential(nn.ReLU()) for _ in range(4))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for conv, act in zip(self.convs, self.acts, strict=True):
            x = act(conv(x, self.adjacency))
        return self.head(x.mean(1))


class SequenceClassifier(nn.Module):
    """A GRU over (sample, step, feature), and a classifier of the last step."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.gru = nn.GRU(8, 32, batch_first=batch_first)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(x)[0][:, -1])


class MaskedMean(nn.Module):
    """Words, an MLP on each, and the mean over those that the mask keeps."""

    def __init__(self, inverted: bool, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(60, width, padding_idx=0)
        self.encoder = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.head, self.inverted = nn.Linear(width, CLASSES), inverted

    def forward(self, ids: Tensor) -> Tensor:
        kept = ((ids == 0) if self.inverted else (ids != 0)).float()[..., None]
        return self.head((self.encoder(self.embedding(ids)) * kept).sum(1) / kept.sum(1))


class Siamese(nn.Module):
    """One tower for both samples of a pair; their distance is classified."""

    def __init__(self, second: int) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 24))
        self.head, self.second = nn.Linear(24, 1), second

    def forward(self, pairs: Tensor) -> Tensor:
        left, right = self.tower(pairs[:, 0]), self.tower(pairs[:, self.second])
        return self.head((left - right).abs())


class Transferred(nn.Module):
    """A backbone and its classifier, `fc`."""

    def __init__(self, backbone: nn.Module, width: int) -> None:
        super().__init__()
        self.backbone, self.fc = backbone, nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.backbone(x))


class OwnLinear(nn.Module):
    """x W + b with weights that the caller made."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(torch.zeros(weight.shape[1]))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class IdentityRNN(nn.Module):
    """A recurrent network with ReLU whose recurrent matrix starts as a multiple of the identity."""

    def __init__(self, factor: float, width: int = 32) -> None:
        super().__init__()
        self.inputs, self.recurrent = nn.Linear(4, width), nn.Linear(width, width, bias=False)
        self.head, self.width = nn.Linear(width, CLASSES), width
        nn.init.normal_(self.inputs.weight, std=0.1)
        nn.init.zeros_(self.inputs.bias)
        with torch.no_grad():
            self.recurrent.weight.copy_(factor * torch.eye(width))

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), self.width)
        for step in x.unbind(1):
            state = F.relu(self.inputs(step) + self.recurrent(state))
        return self.head(state)


class ResettingRNN(nn.Module):
    """A loop over steps, in which the state may be made new each time."""

    def __init__(self, reset: bool, width: int = 32) -> None:
        super().__init__()
        self.cell, self.head = nn.RNNCell(8, width), nn.Linear(width, CLASSES)
        self.reset, self.width = reset, width

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), self.width)
        for step in x.unbind(1):
            if self.reset:
                state = torch.zeros_like(state)
            state = self.cell(step, state)
        return self.head(state)


class Experts(nn.Module):
    """Each sample goes to the expert that the router likes best, times the router's probability."""

    def __init__(self, width: int = 48, count: int = 4) -> None:
        super().__init__()
        self.stem, self.router, self.head = nn.Linear(32, width), nn.Linear(width, count), nn.Linear(width, CLASSES)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, width)) for _ in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        weight, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = (chosen == i).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, weight[rows, None] * expert(x[rows]))
        return self.head(x + out)


class TabularTransformer(nn.Module):
    """Each column becomes a token by a weight and a bias of its own."""

    def __init__(self, columns: int = 8, width: int = 32) -> None:
        super().__init__()
        self.tokenizer = ColumnTokens(columns, width)
        self.encoder = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.tokenizer(x)).mean(1))


class ColumnTokens(nn.Module):
    """x[column] · weight[column] + bias[column]"""

    def __init__(self, columns: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(columns, width) * 0.3)
        self.bias = nn.Parameter(torch.randn(columns, width) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x[..., None] * self.weight + self.bias
