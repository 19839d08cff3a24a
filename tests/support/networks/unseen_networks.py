"""The architectures of the unseen faults; each has a switch for its fault where the fault lies in its forward pass."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fault_cases import CLASSES


class Attention(nn.Module):
    """Self-attention of several heads; `scale`, `axis` and `mask` are where people go wrong."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.scale, self.axis = math.sqrt(heads / width), -1
        self.mask: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        logits = q @ k.transpose(-1, -2) * self.scale
        if self.mask is not None:
            logits = logits.masked_fill(self.mask, -math.inf)
        return self.out((logits.softmax(self.axis) @ v).transpose(1, 2).reshape(batch, tokens, width))


class PreNormBlock(nn.Module):
    """x + attention(norm(x)), then x + factor · mlp(norm(x))."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.factor * self.mlp(self.norm2(x))


class LanguageModel(nn.Module):
    """A pre-norm Transformer over words, without a causal mask: it is to fill in the next word."""

    def __init__(self, depth: int = 4, width: int = 64, heads: int = 4, words: int = 100) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.position = nn.Parameter(0.02 * torch.randn(12, width))
        self.blocks = nn.ModuleList(PreNormBlock(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=width**-0.5 if isinstance(module, nn.Linear) else 0.02)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class BasicBlock(nn.Module):
    """The block of ResNet-18: relu(x + bn(conv(relu(bn(conv(x)))))), with a gate on its branch if asked."""

    def __init__(self, width: int, gated: bool = False) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.gate = nn.Sequential(nn.Conv2d(width, 4, 1), nn.ReLU(), nn.Conv2d(4, width, 1)) if gated else None

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.gate is not None:
            out = out * torch.sigmoid(self.gate(out.mean((2, 3), keepdim=True)))
        return F.relu(x + out)


class PostActivationResNet(nn.Module):
    """Basic blocks of one width; with `twice`, the caller adds the input once more."""

    def __init__(self, depth: int = 8, width: int = 16, gated: bool = False) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.layer = nn.ModuleList(BasicBlock(width, gated) for _ in range(depth))
        self.fc = nn.Linear(width, CLASSES)
        self.twice, self.pooled = False, (2, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.layer:
            x = x + block(x) if self.twice else block(x)
        x = x.mean(self.pooled, keepdim=True).expand(len(x), -1, 1, 1)
        return self.fc(x.flatten(1))


class ScaledBlock(nn.Module):
    """The block of ConvNeXt: x + gamma · mlp(norm(depthwise(x)))."""

    def __init__(self, width: int, gamma: float) -> None:
        super().__init__()
        self.depthwise, self.norm = nn.Conv2d(width, width, 7, padding=3, groups=width), nn.GroupNorm(1, width)
        self.mlp = nn.Sequential(nn.Conv2d(width, 4 * width, 1), nn.GELU(), nn.Conv2d(4 * width, width, 1))
        self.gamma = nn.Parameter(torch.full((width, 1, 1), gamma))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gamma * self.mlp(self.norm(self.depthwise(x)))


class Mixer(nn.Module):
    """Patches, then blocks that mix tokens and channels in turn."""

    def __init__(self, depth: int = 4, width: int = 32, tokens: int = 16) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.mixers = nn.ModuleList(MixerBlock(width, tokens) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        for mixer in self.mixers:
            x = mixer(x)
        return self.head(self.norm(x).mean(1))


class MixerBlock(nn.Module):
    def __init__(self, width: int, tokens: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.over_tokens = nn.Sequential(nn.Linear(tokens, 32), nn.GELU(), nn.Linear(32, tokens))
        self.over_channels = nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.over_tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.over_channels(self.norm2(x))


def conv_bn(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU())


class UNet(nn.Module):
    """Two levels down and up with concatenated skips; a class for each pixel. The gradient may be cut in the middle."""

    def __init__(self, cut: bool) -> None:
        super().__init__()
        self.down1, self.down2, self.middle = conv_bn(3, 16), conv_bn(16, 32, 2), conv_bn(32, 64, 2)
        self.up2, self.up1, self.head = conv_bn(96, 32), conv_bn(48, 16), nn.Conv2d(16, 4, 1)
        self.cut = cut

    def forward(self, x: Tensor) -> Tensor:
        one = self.down1(x)
        two = self.down2(one)
        low = self.middle(two)
        if self.cut:
            low = low.detach()
        x = self.up2(torch.cat([F.interpolate(low, scale_factor=2), two], 1))
        return self.head(self.up1(torch.cat([F.interpolate(x, scale_factor=2), one], 1)))


class Autoencoder(nn.Module):
    """Encoder and decoder of linear layers; the code may be rounded, with or without a straight-through gradient."""

    def __init__(self, rounded: bool = False, straight_through: bool = True) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16), nn.ReLU())
        self.decoder = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 32))
        self.rounded, self.straight_through = rounded, straight_through

    def forward(self, x: Tensor) -> Tensor:
        code = self.encoder(x)
        if self.rounded:
            code = code + (code.round() - code).detach() if self.straight_through else code.round()
        return self.decoder(code)


class Recurrent(nn.Module):
    """A recurrent network that is read after its last step."""

    def __init__(self, nonlinearity: str, gain: float, width: int = 32) -> None:
        super().__init__()
        self.cell, self.fc = nn.RNNCell(8, width, nonlinearity=nonlinearity), nn.Linear(width, CLASSES)
        nn.init.orthogonal_(self.cell.weight_hh, gain)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(x.shape[0], self.fc.in_features)
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.fc(state)


class HalfRMSNorm(nn.Module):
    """An RMS norm whose squares overflow in half precision, so that it returns zeros."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * self.weight


class Standardize(nn.Module):
    """(x - mean) / std of each column over the batch, without an epsilon unless given."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) / (x.std(0) + self.eps)


class Adapter(nn.Module):
    """A linear layer that is frozen, and an update of low rank beside it (LoRA)."""

    def __init__(self, width: int, rank: int = 4) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.base(x) + self.up(self.down(x)))
