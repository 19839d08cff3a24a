"""The networks of `healthy_networks_third` that no package has."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from fault_cases import CLASSES
from third_blocks import Attend


class GatedLayer(nn.Module):
    """A pre-norm block of causal attention and SwiGLU with RMS norms, as in present language models."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = Attend(width, causal=True)
        self.gate, self.up, self.down = nn.Linear(width, hidden), nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        x = x + self.attention(h, h)
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class TiedLanguageModel(nn.Module):
    """The classifier has the weights of the embedding, which start at a deviation of 0.02."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, width), nn.Linear(width, 50, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.head.weight = self.embedding.weight
        self.layers = nn.ModuleList(GatedLayer(width, 96) for _ in range(4))
        self.norm = nn.RMSNorm(width)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)).mT


class ReZeroEncoder(nn.Module):
    """Attention and MLPs without norms, each times a learnable scalar that starts at zero."""

    def __init__(self, depth: int = 12, width: int = 32) -> None:
        super().__init__()
        self.attentions = nn.ModuleList(Attend(width) for _ in range(depth))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, width)) for _ in range(depth)
        )
        self.alphas, self.head = nn.Parameter(torch.zeros(2 * depth)), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for i, (attention, mlp) in enumerate(zip(self.attentions, self.mlps, strict=True)):
            x = x + self.alphas[2 * i] * attention(x, x)
            x = x + self.alphas[2 * i + 1] * mlp(x)
        return self.head(x.mean(1))


class ScaledBlock(nn.Module):
    """A ConvNeXt block: its layer scale starts at 1e-6."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise, self.norm = nn.Conv2d(width, width, 5, padding=2, groups=width), nn.GroupNorm(1, width)
        self.up, self.down = nn.Conv2d(width, 4 * width, 1), nn.Conv2d(4 * width, width, 1)
        self.scale = nn.Parameter(torch.full((width, 1, 1), 1e-6))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(F.gelu(self.up(self.norm(self.depthwise(x)))))


class SharedLayer(nn.Module):
    """One post-norm layer that runs six times, as in the Universal Transformer."""

    def __init__(self, width: int = 32, times: int = 6) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True)
        self.head, self.times = nn.Linear(width, CLASSES), times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.layer(x)
        return self.head(x.mean(1))


class DeepNormEncoder(nn.Module):
    """Post-norm layers of which the shortcut is times (2N)^¼, and the branch's weights times (8N)^-¼."""

    def __init__(self, depth: int = 12, width: int = 32) -> None:
        super().__init__()
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width)) for _ in range(depth)
        )
        self.attentions = nn.ModuleList(Attend(width) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * depth))
        self.head, self.alpha = nn.Linear(width, CLASSES), (2 * depth) ** 0.25
        for i in range(depth):
            for linear in (self.mlps[i][0], self.mlps[i][2], self.attentions[i].v, self.attentions[i].out):
                nn.init.xavier_normal_(linear.weight, gain=(8 * depth) ** -0.25)

    def forward(self, x: Tensor) -> Tensor:
        for i, (attention, mlp) in enumerate(zip(self.attentions, self.mlps, strict=True)):
            x = self.norms[2 * i](self.alpha * x + attention(x, x))
            x = self.norms[2 * i + 1](self.alpha * x + mlp(x))
        return self.head(x.mean(1))


class Sine(nn.Module):
    """sin(30 · (W x + b)), with the weights of SIREN"""

    def __init__(self, inputs: int, outputs: int, first: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        bound = 1 / inputs if first else math.sqrt(6 / inputs) / 30
        nn.init.uniform_(self.linear.weight, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(30.0 * self.linear(x))


class ConditionedBlock(nn.Module):
    """A branch whose shift, scale and gate come from the time, by a layer that starts at zero (adaLN-Zero)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.modulation = nn.LayerNorm(width, elementwise_affine=False), nn.Linear(width, 3 * width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        shift, scale, gate = self.modulation(F.silu(time)).chunk(3, -1)
        return x + gate * self.mlp(self.norm(x) * (1 + scale) + shift)


class DiffusionMLP(nn.Module):
    """Predicts the noise in a vector; the last number of the input is the time, and the last layer starts at zero."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.stem, self.time, self.out = nn.Linear(16, width), nn.Linear(8, width), nn.Linear(width, 16)
        self.blocks = nn.ModuleList(ConditionedBlock(width) for _ in range(4))
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, x: Tensor) -> Tensor:
        angles = x[:, 16:] * 2.0 ** torch.arange(4.0)
        time, h = self.time(torch.cat([angles.sin(), angles.cos()], 1)), self.stem(x[:, :16])
        for block in self.blocks:
            h = block(h, time)
        return self.out(h)


class EulerNetwork(nn.Module):
    """Twenty steps of one vector field: x + f(x) / 20."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(32, width), nn.Linear(width, CLASSES)
        self.field = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for _ in range(20):
            x = x + self.field(x) / 20
        return self.head(x)


class Perceiver(nn.Module):
    """Eight learned vectors read the input by cross attention."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.latents = nn.Parameter(0.5 * torch.randn(1, 8, width))
        self.stem, self.norm, self.read = nn.Linear(6, width), nn.LayerNorm(width), Attend(width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True, norm_first=True) for _ in range(2)
        )
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        latents = self.latents.expand(len(x), -1, -1)
        x = latents + self.read(latents, self.norm(self.stem(x)))
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


class Maxout(nn.Module):
    """The largest of three linear maps."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, 3 * outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).unflatten(-1, (3, -1)).amax(-2)


class Quantized(nn.Module):
    """An autoencoder whose code is rounded in the forward pass only."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 16))
        self.decoder = nn.Sequential(nn.Linear(16, 64), nn.SiLU(), nn.Linear(64, 32))

    def forward(self, x: Tensor) -> Tensor:
        code = 4.0 * self.encoder(x).tanh()
        return self.decoder(code + (code.round() - code).detach())


class GraphAttention(nn.Module):
    """Nodes that attend to their neighbours and themselves; the largest over the nodes is classified."""

    edges: Tensor

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.register_buffer("edges", (torch.rand(12, 12) < 0.3) | torch.eye(12, dtype=torch.bool))
        self.stem, self.head = nn.Linear(6, width), nn.Linear(width, CLASSES)
        self.maps = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.scores = nn.ModuleList(nn.Linear(width, 2) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for linear, score in zip(self.maps, self.scores, strict=True):
            h = linear(x)
            to, by = score(h).chunk(2, -1)
            weights = F.leaky_relu(to + by.mT, 0.2).masked_fill(~self.edges, float("-inf")).softmax(-1)
            x = x + F.elu(weights @ h)
        return self.head(x.amax(1))


class TwoTowers(nn.Module):
    """Pairs of vectors are matched within the batch by cosines times a learnable exponential."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(16, 48), nn.GELU(), nn.Linear(48, 24))
        self.right = nn.Sequential(nn.Linear(16, 48), nn.GELU(), nn.Linear(48, 24))
        self.log_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, pairs: Tensor) -> Tensor:
        left, right = F.normalize(self.left(pairs[:, 0]), dim=-1), F.normalize(self.right(pairs[:, 1]), dim=-1)
        return self.log_scale.exp() * left @ right.T


def critic() -> nn.Sequential:
    """A discriminator with spectral norm."""
    return nn.Sequential(
        spectral_norm(nn.Conv2d(3, 16, 4, 2, 1)), nn.LeakyReLU(0.2), spectral_norm(nn.Conv2d(16, 32, 4, 2, 1)),
        nn.LeakyReLU(0.2), nn.Flatten(), spectral_norm(nn.Linear(512, 1)),
    )  # fmt: skip


class PointwiseGated(nn.Module):
    """A gMLP: one half of the channels gates the other by a map over the tokens that starts at one."""

    def __init__(self, tokens: int = 8, width: int = 32) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(4))
        self.ups = nn.ModuleList(nn.Linear(width, 64) for _ in range(4))
        self.gates = nn.ModuleList(nn.Linear(tokens, tokens) for _ in range(4))
        self.downs = nn.ModuleList(nn.Linear(32, width) for _ in range(4))
        self.head = nn.Linear(width, CLASSES)
        for gate in self.gates:
            nn.init.normal_(gate.weight, std=1e-3)
            nn.init.ones_(gate.bias)

    def forward(self, x: Tensor) -> Tensor:
        for norm, up, gate, down in zip(self.norms, self.ups, self.gates, self.downs, strict=True):
            kept, gating = F.gelu(up(norm(x))).chunk(2, -1)
            x = x + down(kept * gate(gating.mT).mT)
        return self.head(x.mean(1))
