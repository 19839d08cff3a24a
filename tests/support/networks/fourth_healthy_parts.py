"""Networks of the fourth healthy set: unusual, right, and able to train."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fault_cases import CLASSES


def dense(*widths: int, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Linear layers with an activation between each two."""
    layers: list[nn.Module] = []
    for i in range(len(widths) - 1):
        layers += [nn.Linear(widths[i], widths[i + 1]), activation()]
    return nn.Sequential(*layers[:-1])


class ZeroGamma(nn.Module):
    """A residual block whose last group norm begins with a gain of zero."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.GroupNorm(4, width), nn.GroupNorm(4, width)
        nn.init.zeros_(self.norm2.weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


class RandomDepth(nn.Module):
    """A residual block whose branch is left out with probability `drop` while it trains."""

    def __init__(self, width: int, drop: float) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(width), drop
        self.mlp = dense(width, 2 * width, width, activation=nn.GELU)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.drop > 0:
            keep = (torch.rand(len(x), 1) >= self.drop).float() / (1 - self.drop)
            return x + keep * self.mlp(self.norm(x))
        return x + self.mlp(self.norm(x))


class GeneratorStep(nn.Module):
    """The step of a generator: a critic that is not trained in this step judges what it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = dense(8, 64, 64, 16), dense(16, 64, 64, 1, activation=nn.SiLU)
        self.critic.requires_grad_(False)

    def forward(self, noise: Tensor) -> Tensor:
        return self.critic(self.generator(noise))


class Coupling(nn.Module):
    """Half of the vector is scaled and moved by what the other half says; it begins as the identity."""

    def __init__(self, width: int, flip: bool) -> None:
        super().__init__()
        self.net, self.flip = dense(width // 2, 48, width), flip
        nn.init.zeros_(self.net[-1].weight)
        nn.init.zeros_(self.net[-1].bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = x.chunk(2, -1)
        a, b = (b, a) if self.flip else (a, b)
        scale, shift = self.net(a).chunk(2, -1)
        scale = 2 * torch.tanh(scale / 2)
        b = b * scale.exp() + shift
        return torch.cat([b, a] if self.flip else [a, b], -1), scale.sum(-1)


class Flow(nn.Module):
    """A normalizing flow; returns the logarithm of the density of each sample."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.couplings = nn.ModuleList(Coupling(width, bool(i % 2)) for i in range(6))

    def forward(self, x: Tensor) -> Tensor:
        total = x.new_zeros(len(x))
        for coupling in self.couplings:
            x, log_scale = coupling(x)
            total = total + log_scale
        return total - 0.5 * (x.square() + 1.8379).sum(-1)


class Hypernetwork(nn.Module):
    """A network makes the weights of a linear layer from a context, at the scale that the layer's fan asks for."""

    def __init__(self, context: int = 6, inputs: int = 12, outputs: int = 8) -> None:
        super().__init__()
        self.hyper, self.head = dense(context, 64, inputs * outputs), nn.Linear(outputs, 1)
        nn.init.normal_(self.hyper[-1].weight, std=(2 / 64 / inputs) ** 0.5)
        self.split = context

    def forward(self, x: Tensor) -> Tensor:
        context, x = x[:, : self.split], x[:, self.split :]
        weight = self.hyper(context).unflatten(1, (-1, x.shape[1]))
        return self.head(F.relu(torch.einsum("boi,bi->bo", weight, x)))


class LowRank(nn.Module):
    """A frozen linear layer and a trained update of rank 4, which begins at zero."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(4, base.in_features) * base.in_features**-0.5)
        self.b = nn.Parameter(torch.zeros(base.out_features, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T


class Adapted(nn.Module):
    """A frozen network with updates of low rank, and a classifier that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(48).requires_grad_(False) for _ in range(3))
        self.layers = nn.ModuleList(LowRank(nn.Linear(48, 48)) for _ in range(3))
        self.head = nn.Linear(48, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + F.gelu(layer(norm(x)))
        return self.head(x)


class Local(nn.Module):
    """Causal attention that reaches three words back, with padding that is masked, too."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True, norm_first=True) for _ in range(3)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 30)

    def forward(self, ids: Tensor) -> Tensor:
        away = torch.arange(ids.shape[1])[:, None] - torch.arange(ids.shape[1])
        hidden = (away < 0) | (away > 3)
        padding = torch.zeros_like(ids, dtype=torch.bool)
        padding[:, -4:] = True
        padding[:, -4] = False
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, src_mask=hidden, src_key_padding_mask=padding)
        return self.head(self.norm(x))[:, :-3].transpose(1, 2)


class TiedAutoencoder(nn.Module):
    """The decoder uses the transposed weights of the encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(24, 48), nn.Linear(48, 12)
        self.bias1, self.bias2 = nn.Parameter(torch.zeros(48)), nn.Parameter(torch.zeros(24))

    def forward(self, x: Tensor) -> Tensor:
        code = self.second(F.gelu(self.first(x)))
        return F.linear(F.gelu(F.linear(code, self.second.weight.T, self.bias1)), self.first.weight.T, self.bias2)


class Reader(nn.Module):
    """A GRU reads, a second one writes and attends to what the first one read."""

    def __init__(self, words: int = 20, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.encoder = nn.GRU(width, width, batch_first=True)
        self.cell, self.score = nn.GRUCell(2 * width, width), nn.Linear(width, width)
        self.head = nn.Linear(2 * width, words)

    def forward(self, ids: Tensor) -> Tensor:
        memory, last = self.encoder(self.embedding(ids[:, 0]))
        state, outputs = last[0], []
        for word in ids[:, 1].unbind(1):
            weights = torch.einsum("btd,bd->bt", memory, self.score(state)).softmax(-1)
            context = torch.einsum("bt,btd->bd", weights, memory)
            state = self.cell(torch.cat([self.embedding(word), context], -1), state)
            outputs.append(self.head(torch.cat([state, context], -1)))
        return torch.stack(outputs, -1)


class Variational(nn.Module):
    """Returns the reconstruction, the means and the log variances of the code."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = dense(16, 64, 16), dense(8, 64, 16)

    def forward(self, x: Tensor) -> Tensor:
        mean, log_variance = self.encoder(x).chunk(2, -1)
        code = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return torch.cat([self.decoder(code), mean, log_variance], 1)


class RungeKutta(nn.Module):
    """One small network is the right-hand side of an equation that eight steps solve."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.slope, self.head = dense(width, 48, width, activation=nn.Tanh), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(8):
            k1 = self.slope(x)
            k2 = self.slope(x + k1 / 16)
            k3 = self.slope(x + k2 / 16)
            k4 = self.slope(x + k3 / 8)
            x = x + (k1 + 2 * k2 + 2 * k3 + k4) / 48
        return self.head(x)


class Equilibrium(nn.Module):
    """A fixed point that is found without gradients, and one more step with them."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.state, self.input = nn.Linear(width, width, bias=False), nn.Linear(24, width)
        nn.init.normal_(self.state.weight, std=0.4 * width**-0.5)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        drive = self.input(x)
        z = torch.zeros_like(drive)
        with torch.no_grad():
            for _ in range(20):
                z = torch.tanh(self.state(z) + drive)
        return self.head(torch.tanh(self.state(z) + drive))


class TopTwo(nn.Module):
    """Each sample goes through the two experts that the router prefers, weighted by their probabilities."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.router, self.head = nn.Linear(24, experts), nn.Linear(32, CLASSES)
        self.experts = nn.ModuleList(dense(24, 48, 32) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x)
        best, chosen = scores.topk(2, -1)
        weights = torch.zeros_like(scores).scatter(1, chosen, best.softmax(-1))
        out = sum(weights[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts))
        return self.head(F.relu(out))


class Isomorphism(nn.Module):
    """Sums over neighbours with batch norm, as in GIN, on a ring with chords."""

    def __init__(self, nodes: int = 12, width: int = 24) -> None:
        super().__init__()
        ring = torch.eye(nodes).roll(1, 0) + torch.eye(nodes).roll(-1, 0) + torch.eye(nodes).roll(4, 0)
        self.adjacency = nn.Buffer(ring)
        self.eps = nn.Parameter(torch.zeros(3))
        self.mlps = nn.ModuleList(dense(width if i else 5, width, width) for i in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in range(3))
        self.head = nn.Linear(3 * width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        levels = []
        for eps, mlp, norm in zip(self.eps, self.mlps, self.norms, strict=True):
            x = mlp((1 + eps) * x + self.adjacency @ x)
            x = F.relu(norm(x.flatten(0, 1)).view_as(x))
            levels.append(x.mean(1))
        return self.head(torch.cat(levels, 1))


class Reservoir(nn.Module):
    """A recurrent network whose random weights stay as they are; only the readout is trained."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        weight = torch.randn(width, width) / width**0.5
        self.recurrent, self.inputs = nn.Buffer(0.9 * weight), nn.Buffer(0.5 * torch.randn(width, 3))
        self.readout = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), len(self.recurrent))
        for step in x.unbind(1):
            state = torch.tanh(state @ self.recurrent.T + step @ self.inputs.T)
        return self.readout(state)


class Gated(nn.Module):
    """tanh times sigmoid of dilated convolutions; residual sums and a sum of all skips, as in WaveNet."""

    def __init__(self, width: int = 16, depth: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv1d(2, width, 1)
        self.filters = nn.ModuleList(nn.Conv1d(width, 2 * width, 2, dilation=2**i) for i in range(depth))
        self.outs = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in range(depth))
        self.skips = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in range(depth))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x, total = self.stem(x), torch.zeros(())
        for i, (both, out, skip) in enumerate(zip(self.filters, self.outs, self.skips, strict=True)):
            value, gate = both(F.pad(x, (2**i, 0))).chunk(2, 1)
            y = value.tanh() * gate.sigmoid()
            x, total = x + out(y), total + skip(y)
        return self.head(F.relu(total).mean(-1))


class Recomputed(nn.Module):
    """Residual blocks whose activations are computed again in the backward pass."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(RandomDepth(width, 0.0) for _ in range(6))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


class MixtureDensity(nn.Module):
    """Returns weights, means and log deviations of three normal distributions."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = dense(6, 64, 64, activation=nn.Tanh), nn.Linear(64, 9)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


class Averaged(nn.Module):
    """A student and a teacher that is a frozen copy; returns the scores of the student against the teacher's."""

    def __init__(self) -> None:
        super().__init__()
        self.student = dense(16, 64, 32)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.predictor = dense(32, 32, 32)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            aim = self.teacher(x[:, 1])
        return F.cosine_similarity(self.predictor(self.student(x[:, 0])), aim, dim=-1)
