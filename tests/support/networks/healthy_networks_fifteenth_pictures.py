"""The fifteenth set's healthy networks of our own that tell what is in pictures."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fifth_parts import Case, generator, images, sound
from healthy_networks_fourteenth_pictures import figures, standard

OWN: dict[str, Callable[[], Case]] = {}
own = sound(OWN)


class BasicBlock(nn.Module):
    """He et al.'s block for small pictures, whose shortcut leaves out pixels and pads channels."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.stride, self.more = stride, outputs - inputs
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        short = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.more // 2, self.more // 2))
        return F.relu(out + short)


@own
def resnet20_of_small_pictures() -> Case:
    blocks: list[nn.Module] = []
    for inputs, outputs, stride in ((16, 16, 1), (16, 32, 2), (32, 64, 2)):
        blocks += [
            BasicBlock(inputs, outputs, stride),
            BasicBlock(outputs, outputs, 1),
            BasicBlock(outputs, outputs, 1),
        ]
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), *blocks,
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight)
    return model, *images(0, n=16, size=32), F.cross_entropy


class Views(nn.Module):
    """SimCLR of Chen et al.: a small encoder, and a head whose vectors have length one."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs in ((3, 16), (16, 32), (32, width)):
            layers += [
                nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()
            ]  # fmt: skip
        self.encoder = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 32))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.head(self.encoder(x)), dim=1)


def other_view(output: Tensor, targets: Tensor) -> Tensor:
    """Return the cross entropy of finding the other view of a picture among all; the temperature is 0.5."""
    alike = output @ output.T / 0.5
    return F.cross_entropy(alike.masked_fill(torch.eye(len(output)) == 1, -1e9), targets)


@own
def contrastive_views_of_pictures() -> Case:
    """Two views of 32 pictures: shifted, half of them mirrored, in other light, with noise."""
    draw = generator(340)
    colors = torch.randn(32, 3, 1, 1, generator=draw)
    scenery = colors + F.interpolate(torch.randn(32, 3, 6, 6, generator=draw), size=32, mode="bicubic")
    views = []
    for shift in (-3, 3):
        mirrored = torch.rand(32, 1, 1, 1, generator=draw) < 0.5
        view = torch.where(mirrored, scenery.flip(3), scenery).roll((shift, shift), (2, 3))
        light = 1 + 0.2 * torch.randn(32, 1, 1, 1, generator=draw)
        views.append(light * view + 0.2 * torch.randn(32, 3, 32, 32, generator=draw))
    return Views(), standard(torch.cat(views)), torch.arange(64).roll(32), other_view


class Prototypes(nn.Module):
    """Snell et al.: the queries' distances from the mean vectors of each class's examples, which come first."""

    def __init__(self, ways: int, shots: int, width: int = 32) -> None:
        super().__init__()
        self.ways, self.shots = ways, shots
        layers: list[nn.Module] = []
        for i in range(4):
            layers += [
                nn.Conv2d(width if i else 1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2)
            ]  # fmt: skip
        self.encoder = nn.Sequential(*layers, nn.Flatten())

    def forward(self, x: Tensor) -> Tensor:
        vectors = self.encoder(x)
        known = self.ways * self.shots
        centers = vectors[:known].view(self.ways, self.shots, -1).mean(1)
        return -torch.cdist(vectors[known:], centers).square()


@own
def prototypes_of_few_signs() -> Case:
    """Five signs with five examples each, and fifteen queries of each."""
    pages, labels = figures(600, 28, seed=341)
    draw = generator(342)
    pages = pages + 0.5 * torch.randn(pages.shape, generator=draw)
    kinds = [pages[labels == kind][:20] for kind in range(5)]
    examples, queries = torch.cat([kind[:5] for kind in kinds]), torch.cat([kind[5:] for kind in kinds])
    return Prototypes(5, 5), standard(torch.cat([examples, queries])), torch.arange(75) // 15, F.cross_entropy


class GridDetector(nn.Module):
    """A detector of one stage: for each cell of a grid whether a thing is there, its box and its kind."""

    def __init__(self, kinds: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs in ((3, 16), (16, 32), (32, 64)):
            layers += [
                nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.LeakyReLU(0.1),
                nn.MaxPool2d(2),
            ]  # fmt: skip
        self.backbone = nn.Sequential(
            *layers, nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.LeakyReLU(0.1)
        )
        self.head = nn.Conv2d(64, 5 + kinds, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))


def boxes_and_kinds(output: Tensor, targets: Tensor) -> Tensor:
    """Return the losses of presence, and where a thing is, of its box and kind; targets' channels are these."""
    present = targets[:, 0]
    there = F.binary_cross_entropy_with_logits(output[:, 0], present)
    boxes = F.smooth_l1_loss(output[:, 1:5], targets[:, 1:5], reduction="none").sum(1)
    kinds = F.cross_entropy(output[:, 5:], targets[:, 5].long(), reduction="none")
    return there + ((boxes + kinds) * present).sum() / present.sum()


@own
def grid_detector_of_boxes() -> Case:
    """Colored boxes on scenes of 64 pixels, two per picture in distant cells of eight by eight."""
    draw = generator(343)
    colors = torch.tensor([[2.0, -1.0, -1.0], [-1.0, 2.0, -1.0], [-1.0, -1.0, 2.0]])
    seen = 0.4 * torch.randn(16, 3, 64, 64, generator=draw)
    seen = seen + 0.5 * F.interpolate(torch.randn(16, 3, 5, 5, generator=draw), size=64, mode="bilinear")
    targets = torch.zeros(16, 6, 8, 8)
    for i in range(16):
        for half in range(2):
            row, column = 8 + 40 * torch.rand(2, generator=draw)
            row, column = row.clamp(max=52), column / 2 + 28 * half
            height, width = 8 + 8 * torch.rand(2, generator=draw)
            kind = int(torch.randint(3, (1,), generator=draw))
            rows = (torch.arange(64) - row).abs() < height / 2
            columns = (torch.arange(64) - column).abs() < width / 2
            seen[i] = torch.where(rows[:, None] & columns, colors[kind, :, None, None], seen[i])
            box = torch.stack([row / 8 % 1 - 0.5, column / 8 % 1 - 0.5, (height / 12).log(), (width / 12).log()])
            targets[i, :, int(row // 8), int(column // 8)] = torch.cat([torch.ones(1), box, torch.tensor([kind])])
    return GridDetector(3), standard(seen), targets, boxes_and_kinds


class Bags(nn.Module):
    """Ilse et al.: the weighted mean of a bag's patches by gated attention."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.patch = nn.Sequential(
            nn.Conv2d(1, 12, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(12, 24, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(24 * 16, width), nn.ReLU(),
        )  # fmt: skip
        self.ask, self.gate, self.weigh = nn.Linear(width, 32), nn.Linear(width, 32), nn.Linear(32, 1)
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patch(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        weights = self.weigh(torch.tanh(self.ask(patches)) * torch.sigmoid(self.gate(patches))).softmax(1)
        return self.head((weights * patches).sum(1)).squeeze(1)


@own
def bags_of_patches_by_attention() -> Case:
    """Bags of six signs, of which half have two of the sign that counts."""
    pages, labels = figures(1200, 28, seed=344)
    wanted, others = pages[labels == 3], pages[labels != 3]
    bags = others[:240].view(40, 6, 1, 28, 28).clone()
    ill = torch.arange(40) % 2
    bags[ill == 1, :2] = wanted[:40].view(20, 2, 1, 28, 28)
    return Bags(), standard(bags), ill.float(), F.binary_cross_entropy_with_logits


class SpatialTransformer(nn.Module):
    """PyTorch's tutorial: a small network turns and moves a picture, beginning with the identity; another reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.localization = nn.Sequential(
            nn.Conv2d(1, 8, 7), nn.MaxPool2d(2, 2), nn.ReLU(), nn.Conv2d(8, 10, 5), nn.MaxPool2d(2, 2), nn.ReLU()
        )
        self.fc_loc = nn.Sequential(nn.Linear(90, 32), nn.ReLU(), nn.Linear(32, 6))
        nn.init.zeros_(self.fc_loc[2].weight)
        self.fc_loc[2].bias.data.copy_(torch.tensor([1.0, 0, 0, 0, 1, 0]))
        self.read = nn.Sequential(
            nn.Conv2d(1, 10, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(10, 20, 5), nn.Dropout2d(), nn.MaxPool2d(2),
            nn.ReLU(), nn.Flatten(), nn.Linear(320, 50), nn.ReLU(), nn.Dropout(), nn.Linear(50, 10), nn.LogSoftmax(1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        theta = self.fc_loc(self.localization(x).flatten(1)).view(-1, 2, 3)
        grid = F.affine_grid(theta, list(x.shape), align_corners=False)
        return self.read(F.grid_sample(x, grid, align_corners=False))


@own
def spatial_transformer_of_signs() -> Case:
    pages, labels = figures(64, 28, seed=345)
    return SpatialTransformer(), standard(pages), labels, F.nll_loss
