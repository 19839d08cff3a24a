"""More networks of `broken_networks_third`: those for images, attention and diffusion."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fault_cases import CLASSES
from unseen_networks import conv_bn


class Attend(nn.Module):
    """Attention of one head from x to a memory, with a factor for its logits and perhaps a causal mask."""

    def __init__(self, width: int, causal: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.factor, self.causal = width**-0.5, causal

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        logits = self.factor * self.q(x) @ self.k(memory).mT
        if self.causal:
            logits = logits.masked_fill(torch.ones_like(logits, dtype=torch.bool).triu(1), float("-inf"))
        return self.out(logits.softmax(-1) @ self.v(memory))


class AttentionBlock(nn.Module):
    """A pre-norm block: attention to itself, perhaps to a memory, and an MLP."""

    def __init__(self, width: int, causal: bool = False, cross: bool = False) -> None:
        super().__init__()
        self.norm1, self.norm3 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width) if cross else nn.Identity()
        self.own = Attend(width, causal)
        self.cross = Attend(width) if cross else None
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        h = self.norm1(x)
        x = x + self.own(h, h)
        if self.cross is not None:
            assert memory is not None
            x = x + self.cross(self.norm2(x), memory)
        return x + self.mlp(self.norm3(x))


class Translator(nn.Module):
    """An encoder and a decoder of two blocks each, over pairs of a source and a target of 10 words."""

    def __init__(self, width: int = 64, forget_source: bool = False) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(40, width), nn.Embedding(40, width)
        self.encoder = nn.ModuleList(AttentionBlock(width) for _ in range(2))
        self.encoder_norm, self.norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.decoder = nn.ModuleList(AttentionBlock(width, True, True) for _ in range(2))
        self.head, self.forget_source = nn.Linear(width, 40), forget_source

    def forward(self, pairs: Tensor) -> Tensor:
        memory, x = self.source(pairs[:, 0]), self.target(pairs[:, 1])
        for block in self.encoder:
            memory = block(memory)
        memory = self.encoder_norm(memory)
        for block in self.decoder:
            x = block(x, x if self.forget_source else memory)
        return self.head(self.norm(x))


class GPT(nn.Module):
    """Words and learned positions, three causal blocks, and a prediction of the next word."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(100, width), nn.Embedding(12, width)
        self.blocks = nn.ModuleList(AttentionBlock(width, causal=True) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 100)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class ViT(nn.Module):
    """Patches, a class token, and three blocks; the class token is read after the blocks or before them."""

    def __init__(self, early: bool, width: int = 32) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.class_token = nn.Parameter(0.02 * torch.randn(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 17, width))
        self.blocks = nn.ModuleList(AttentionBlock(width) for _ in range(3))
        self.norm, self.head, self.early = nn.LayerNorm(width), nn.Linear(width, CLASSES), early

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patches(images).flatten(2).mT
        tokens = torch.cat([self.class_token.expand(len(images), -1, -1), patches], 1) + self.positions
        x = tokens
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm((tokens if self.early else x)[:, 0]))


class ProjectedBlock(nn.Module):
    """A ResNet block, with a projection on its shortcut if the width changes."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        stride = 1 if inputs == outputs else 2
        self.conv1, self.bn1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs)
        nn.init.zeros_(self.bn2.weight)
        self.shortcut = nn.Identity() if stride == 1 else nn.Conv2d(inputs, outputs, 1, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.shortcut(x) + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


class PaddedBlock(nn.Module):
    """x + conv(pad(relu(bn(x))))"""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bn, self.conv, self.fill = nn.BatchNorm2d(width), nn.Conv2d(width, width, 3, bias=False), 0.0

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(F.pad(F.relu(self.bn(x)), (1, 1, 1, 1), value=self.fill))


class Detector(nn.Module):
    """A class score for 3 anchors at each place, and 4 numbers for each box."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(conv_bn(3, 16, 2), conv_bn(16, 24))
        self.cls_head, self.box_head = nn.Conv2d(24, 3, 3, padding=1), nn.Conv2d(24, 12, 3, padding=1)
        nn.init.normal_(self.cls_head.weight, std=0.01)

    def forward(self, x: Tensor) -> Tensor:
        x = self.backbone(x)
        return torch.cat([self.cls_head(x), self.box_head(x)], 1)


class Segmenter(nn.Module):
    """One level down and up with a skip; the probability of each pixel, or a mask of zeros and ones."""

    def __init__(self, hard: bool) -> None:
        super().__init__()
        self.top, self.bottom = conv_bn(3, 16), conv_bn(16, 32, 2)
        self.lift, self.join = nn.ConvTranspose2d(32, 16, 2, 2), conv_bn(32, 16)
        self.head, self.hard = nn.Conv2d(16, 1, 1), hard

    def forward(self, x: Tensor) -> Tensor:
        top = self.top(x)
        probability = self.head(self.join(torch.cat([top, self.lift(self.bottom(top))], 1))).sigmoid()
        return (probability > 0.5).float() if self.hard else probability


class Crop(nn.Module):
    """The middle 8×8 of a map of 16×16, read by bilinear interpolation; the grid is in [-1, 1] or in pixels."""

    grid: Tensor

    def __init__(self, in_pixels: bool) -> None:
        super().__init__()
        line = torch.linspace(4.0, 11.0, 8)
        line = line if in_pixels else line / 7.5 - 1.0
        y, x = torch.meshgrid(line, line, indexing="ij")
        self.register_buffer("grid", torch.stack([x, y], -1)[None])

    def forward(self, x: Tensor) -> Tensor:
        return F.grid_sample(x, self.grid.expand(len(x), -1, -1, -1), align_corners=True)


class TimedBlock(nn.Module):
    """A residual block of a denoiser whose branch knows the time; `keep` divides the branch or the whole sum."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.time, self.keep = nn.Linear(16, width), 1.0
        nn.init.kaiming_normal_(self.conv1.weight)
        nn.init.kaiming_normal_(self.conv2.weight)
        with torch.no_grad():
            self.conv2.weight.mul_(depth**-0.5)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        return (x + self.conv2(F.silu(self.conv1(F.silu(x)) + self.time(time)[..., None, None]))) / self.keep


class Denoiser(nn.Module):
    """Twelve timed blocks between two convolutions; the input's last channel holds the time."""

    def __init__(self, depth: int = 12, width: int = 16) -> None:
        super().__init__()
        self.stem, self.out = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
        self.time = nn.Sequential(nn.Linear(8, 16), nn.SiLU())
        self.blocks = nn.ModuleList(TimedBlock(width, depth) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        noisy, moment = x[:, :3], 1000.0 * x[:, 3, 0, 0]
        angles = moment[:, None] * 10.0 ** -torch.arange(4.0)
        time, h = self.time(torch.cat([angles.sin(), angles.cos()], 1)), self.stem(noisy)
        for block in self.blocks:
            h = block(h, time)
        return self.out(h)


class MixerBlock(nn.Module):
    """An MLP over the tokens and one over the channels, both added."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.across = nn.Sequential(nn.Linear(tokens, 32), nn.GELU(), nn.Linear(32, tokens))
        self.within = nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.across(self.norm1(x).mT).mT
        return x + self.within(self.norm2(x))


class PatchMixer(nn.Module):
    """Sixteen patches, four mixer blocks, and a classifier on the mean of the patches."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.patches, self.head = nn.Conv2d(3, width, 4, 4), nn.Linear(width, CLASSES)
        self.blocks = nn.ModuleList(MixerBlock(16, width) for _ in range(4))

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).mT
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))
