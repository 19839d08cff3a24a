"""A thin ResNet of torchvision's own blocks, with batch norm, for small images of one colour."""

from typing import Any

import torch
from torch import Tensor, nn


class ThinResNet(nn.Module):
    """A 3×3 stem, `blocks` basic blocks in each of two stages, a linear classifier."""

    def __init__(self, blocks: int = 1, width: int = 8, classes: int = 10) -> None:
        super().__init__()
        from torchvision.models.resnet import BasicBlock

        self.conv1, self.bn1 = nn.Conv2d(1, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        shortcut = nn.Sequential(nn.Conv2d(width, 2 * width, 1, 2, bias=False), nn.BatchNorm2d(2 * width))
        first: list[Any] = [BasicBlock(width, width) for _ in range(blocks)]
        second = [BasicBlock(width, 2 * width, 2, shortcut)]
        second += [BasicBlock(2 * width, 2 * width) for _ in range(blocks - 1)]
        self.layer1, self.layer2 = nn.Sequential(*first), nn.Sequential(*second)
        self.fc = nn.Linear(2 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer2(self.layer1(self.relu(self.bn1(self.conv1(x)))))
        return self.fc(x.mean((2, 3)))


def thin_resnet(seed: int = 0, **options: Any) -> ThinResNet:
    """The network with its own package's weights, drawn from a seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ThinResNet(**options)


def deeper() -> ThinResNet:
    """A factory without arguments that a configuration can name: 'thin_resnet:deeper'."""
    return ThinResNet(blocks=2)
