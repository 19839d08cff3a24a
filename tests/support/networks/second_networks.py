"""The architectures of the second set of faults; a switch breaks each one whose fault lies in its forward pass."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fault_cases import CLASSES, he_, times_
from unseen_networks import Attention


class LoopResNet(nn.Module):
    """The forward pass of the network, not that of a block, adds each branch to the stream."""

    def __init__(self, depth: int = 12, width: int = 16, norm: bool = False) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.branches = nn.ModuleList(self.branch(width, norm) for _ in range(depth))
        self.head = nn.Linear(width, CLASSES)
        he_(self)
        nn.init.xavier_normal_(self.head.weight)

    @staticmethod
    def branch(width: int, norm: bool) -> nn.Sequential:
        layers: list[nn.Module] = []
        for _ in range(2):
            layers += [*([nn.BatchNorm2d(width)] if norm else []), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1)]
        return nn.Sequential(*layers)

    def scaled(self, factor: float) -> LoopResNet:
        """Multiply the last convolution of every branch."""
        for branch in self.branches:
            times_(branch[-1], factor)
        return self

    def logits(self, x: Tensor) -> Tensor:
        return self.head(F.relu(x).mean((2, 3)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for branch in self.branches:
            x = x + branch(x)
        return self.logits(x)


class ReplacedStream(LoopResNet):
    """One branch takes the place of the stream."""

    replaced = 5

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for i, branch in enumerate(self.branches):
            out = branch(x)
            x = out if i == self.replaced else x + out
        return self.logits(x)


class AveragedStream(LoopResNet):
    """Stream and branch are added and multiplied by `weight`."""

    weight = 0.5

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        for branch in self.branches:
            h = self.weight * (h + branch(h))
        return self.logits(h)


class DetachedStream(LoopResNet):
    """The gradient passes through the branches only, if `cut`."""

    cut = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for branch in self.branches:
            shortcut = x.detach() if self.cut else x
            x = torch.add(shortcut, branch(x))
        return self.logits(x)


class ShortLoop(LoopResNet):
    """The loop ends `left_out` branches before the last."""

    left_out = 1

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for i in range(len(self.branches) - self.left_out):
            x = x + self.branches[i](x)
        return self.logits(x)


class ReZeroMLP(nn.Module):
    """x + alpha · branch(x) with alphas that start at zero; they are parameters if `trained`, else buffers."""

    def __init__(self, trained: bool, depth: int = 8, width: int = 48) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(32, width), nn.Linear(width, CLASSES)
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)) for _ in range(depth)
        )
        if trained:
            self.alphas = nn.Parameter(torch.zeros(depth))
        else:
            self.register_buffer("alphas", torch.zeros(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for alpha, branch in zip(self.alphas, self.branches, strict=True):
            x = x + alpha * branch(x)
        return self.head(x)


class LoopTransformer(nn.Module):
    """A pre-norm Transformer over words; sublayers lie in four lists, and the model's forward pass adds them."""

    def __init__(self, depth: int = 6, width: int = 32, final_norm: bool = True) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(100, width), nn.Embedding(12, width)
        self.norms1 = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.attentions = nn.ModuleList(Attention(width, 4) for _ in range(depth))
        self.norms2 = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width) if final_norm else nn.Identity()
        self.head = nn.Linear(width, 100)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.positions.weight
        for norm1, attention, norm2, mlp in zip(self.norms1, self.attentions, self.norms2, self.mlps, strict=True):
            x = x + attention(norm1(x))
            x = x + mlp(norm2(x))
        return self.head(self.norm(x))


class LoopMixer(nn.Module):
    """An MLP-Mixer whose forward pass adds both kinds of MLPs."""

    def __init__(self, depth: int = 5, width: int = 32, tokens: int = 16) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.token_mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(tokens, 32), nn.GELU(), nn.Linear(32, tokens)) for _ in range(depth)
        )
        self.channel_mlps = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width))
            for _ in range(depth)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).mT
        for norm, over_tokens, over_channels in zip(self.norms, self.token_mlps, self.channel_mlps, strict=True):
            x = x + over_tokens(norm(x).mT).mT
            x = x + over_channels(x)
        return self.head(self.norm(x).mean(1))


class WaveNet(nn.Module):
    """Dilated convolutions over a sequence with gates: x + mix(tanh(filter(x)) · sigmoid(gate(x)))."""

    def __init__(self, depth: int = 5, width: int = 24) -> None:
        super().__init__()
        self.stem, self.fc = nn.Conv1d(4, width, 1), nn.Linear(width, CLASSES)
        self.filters = nn.ModuleList(nn.Conv1d(width, width, 3, padding=2**i, dilation=2**i) for i in range(depth))
        self.gates = nn.ModuleList(nn.Conv1d(width, width, 3, padding=2**i, dilation=2**i) for i in range(depth))
        self.mixes = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for take, gate, mix in zip(self.filters, self.gates, self.mixes, strict=True):
            x = x + mix(take(x).tanh() * gate(x).sigmoid())
        return self.fc(F.relu(x).mean(-1))


class SharedBlock(nn.Module):
    """One block is applied many times, and its output is divided by `divisor`."""

    def __init__(self, times: int, divisor: float, width: int = 48) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(32, width), nn.Linear(width, CLASSES)
        self.block = he_(nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width)))
        self.times, self.divisor = times, divisor

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for _ in range(self.times):
            x = x + self.block(x) / self.divisor
        return self.head(x)


class FrozenBatchNorm(nn.Module):
    """A batch norm of stored statistics, which are the identity as long as no checkpoint is loaded."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(width, 1, 1))
        self.register_buffer("shift", torch.zeros(width, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.shift


class Downsampling(nn.Module):
    """A basic block, with a projection on its shortcut where the stride is 2."""

    def __init__(self, inputs: int, width: int, stride: int, norm: type[nn.Module]) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False), norm(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), norm(width)
        self.down: nn.Module = nn.Identity()
        if stride == 2:
            self.down = nn.Sequential(nn.Conv2d(inputs, width, 1, 2, bias=False), norm(width))

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.down(x) + self.bn2(self.conv2(out)))


class StagedResNet(nn.Module):
    """Three stages of basic blocks; block j of stage i is `stages.i.j`."""

    def __init__(self, per_stage: int = 2, norm: type[nn.Module] = nn.BatchNorm2d) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 12, 3, padding=1, bias=False), norm(12), nn.ReLU())
        widths = (12, 12, 24, 48)
        self.stages = nn.Sequential(
            *(
                nn.Sequential(
                    Downsampling(widths[i], widths[i + 1], 2 if i else 1, norm),
                    *(Downsampling(widths[i + 1], widths[i + 1], 1, norm) for _ in range(per_stage - 1)),
                )
                for i in range(3)
            )
        )
        self.fc = nn.Linear(48, CLASSES)
        he_(self.stem)
        he_(self.stages)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.stages(self.stem(x)).mean((2, 3)))


class VAE(nn.Module):
    """A variational autoencoder whose noise is fixed, so that two passes agree."""

    def __init__(self, batch: int = 16) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(32, 64), nn.ReLU())
        self.to_mean, self.to_logvar = nn.Linear(64, 8), nn.Linear(64, 8)
        self.decoder = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 32))
        self.register_buffer("noise", torch.randn(batch, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.encoder(x)
        return self.decoder(self.to_mean(x) + torch.exp(0.5 * self.to_logvar(x)) * self.noise)


class LSTMReader(nn.Module):
    """Words, an LSTM and a classifier on its last state."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(CLASSES, width), nn.LSTM(width, width, batch_first=True)
        self.fc = nn.Linear(width, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        return self.fc(self.lstm(self.embedding(ids))[0][:, -1])


class Tabular(nn.Module):
    """A table of embeddings for each column, and an MLP on all of them side by side."""

    def __init__(self, columns: int = 5, values: int = 20, width: int = 12) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(values, width) for _ in range(columns))
        self.mlp = nn.Sequential(
            nn.Linear(columns * width, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, CLASSES)
        )

    def forward(self, ids: Tensor) -> Tensor:
        return self.mlp(torch.cat([table(column) for table, column in zip(self.tables, ids.T, strict=True)], -1))


class BagOfWords(nn.Module):
    """The mean of the words' embeddings, and an MLP."""

    def __init__(self, words: int = 100, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.mlp = nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, CLASSES))

    def forward(self, ids: Tensor) -> Tensor:
        return self.mlp(self.embedding(ids).mean(1))


class AttentionPool(nn.Module):
    """A recurrent network whose states are added with weights from a softmax of their scores."""

    def __init__(self, axis: int) -> None:
        super().__init__()
        self.gru, self.score = nn.GRU(8, 32, batch_first=True), nn.Linear(32, 1)
        self.fc, self.axis = nn.Linear(32, CLASSES), axis

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.gru(x)
        weights = torch.softmax(self.score(states), dim=self.axis)
        return self.fc((weights * states).sum(1))


def lift(inputs: int, outputs: int) -> nn.Sequential:
    """Double the size of the maps."""
    return nn.Sequential(nn.ConvTranspose2d(inputs, outputs, 2, 2), nn.BatchNorm2d(outputs), nn.ReLU())


def level(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())


class DeepUNet(nn.Module):
    """A U-Net of three levels with max pooling and transposed convolutions; a class for each pixel."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.down0, self.down1, self.bottom = level(3, width), level(width, 2 * width), level(2 * width, 4 * width)
        self.lift1, self.up1 = lift(4 * width, 2 * width), level(4 * width, 2 * width)
        self.lift0, self.up0 = lift(2 * width, width), level(2 * width, width)
        self.classify = nn.Conv2d(width, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.down0(x)
        coarse = self.down1(F.max_pool2d(fine, 2))
        low = self.lift1(self.bottom(F.max_pool2d(coarse, 2)))
        coarse = self.lift0(self.up1(torch.cat([low, coarse], 1)))
        return self.classify(self.up0(torch.cat([coarse, fine], 1)))


class Multiply(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * x


class LogPower(nn.Module):
    """The logarithm of the power in decibels, as a front end of audio models takes it."""

    def __init__(self, floor: float) -> None:
        super().__init__()
        self.floor = floor

    def forward(self, x: Tensor) -> Tensor:
        return torch.log10(x.square() + self.floor)


class UnitLength(nn.Module):
    """x / |x|; the root has no derivative at zero, unless the floor is under it."""

    def __init__(self, floor_under_root: bool) -> None:
        super().__init__()
        self.floor_under_root = floor_under_root

    def forward(self, x: Tensor) -> Tensor:
        squares = x.square().sum(-1, keepdim=True)
        return x / ((squares + 1e-8).sqrt() if self.floor_under_root else squares.sqrt() + 1e-8)


class Finetuned(nn.Module):
    """A backbone under `no_grad`, left over from a run that trained the classifier only."""

    def __init__(self, backbone: nn.Module, width: int, no_grad: bool) -> None:
        super().__init__()
        self.backbone, self.classifier, self.no_grad = backbone, nn.Linear(width, CLASSES), no_grad

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(not self.no_grad and torch.is_grad_enabled()):
            x = self.backbone(x)
        return self.classifier(x)


class Pooled(nn.Module):
    """Convolutions with batch norm, and a sum or a mean over all positions."""

    def __init__(self, reduce: Callable[..., Tensor]) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(level(3, 16), level(16, 24)), nn.Linear(24, CLASSES)
        self.reduce = reduce

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.reduce(self.body(x), (2, 3)))
