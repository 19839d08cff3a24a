"""Debug a network that does not train: find the broken block, then the exploding signal, then train."""

from collections import OrderedDict

import torch
from torch import Tensor, nn

import normfree as nf


def spirals(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return points in the plane and the spiral arm, of five, that each belongs to."""
    draw = torch.Generator().manual_seed(seed)
    arm = torch.randint(5, (count,), generator=draw)
    radius = 0.1 + 0.9 * torch.rand(count, generator=draw)
    angle = 2 * torch.pi * (arm / 5 + 1.5 * radius) + 0.15 * torch.randn(count, generator=draw)
    return 2 * torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), arm


class Block(nn.Module):
    """A residual block; in one of them somebody forgot a `detach` after looking at the branch."""

    def __init__(self, width: int, *, detached: bool) -> None:
        super().__init__()
        self.first, self.second, self.detached = nn.Linear(width, width), nn.Linear(width, width), detached
        nn.init.kaiming_normal_(self.first.weight)
        nn.init.kaiming_normal_(self.second.weight)

    def forward(self, x: Tensor) -> Tensor:
        branch = self.second(torch.relu(self.first(torch.relu(x))))
        return x + (branch.detach() if self.detached else branch)


def network() -> nn.Sequential:
    """Return a network of 82 layers without normalization, always with the same weights."""
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Block(64, detached=index == 17) for index in range(40)))
    return nn.Sequential(OrderedDict(stem=nn.Linear(2, 64), blocks=blocks, relu=nn.ReLU(), head=nn.Linear(64, 5)))


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Train a model, and return its accuracy on new points."""
    for step in range(300):
        points, arms = spirals(128, seed=step + 1)
        loss = nn.functional.cross_entropy(model(points), arms)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    points, arms = spirals(2000, seed=0)
    accuracy = (model(points).argmax(dim=1) == arms).float().mean()
    return f"{accuracy:.0%} of the points are right"


def main() -> None:
    # The network does not learn the spirals well.
    model = network()
    print("as written:", train(model, torch.optim.AdamW(model.parameters(), lr=0.003)))

    # Diagnose a fresh one. One forward and one backward pass name the block that gets no gradient.
    model = network()
    points, arms = spirals(256, seed=0)
    print(nf.diagnose(model, points, arms))

    # Mend that block, and look again: the signal explodes. The picture shows it block by block.
    model.blocks[17].detached = False
    report = nf.diagnose(model, points, arms)
    print(report.verdict.word, "-", report.verdict.recommendation)
    report.save("debug_training.png")

    # Follow the advice. The code of the model stays; its layers get new weights and a few scalars.
    model, _ = nf.convert(model, "fixup", points)
    print(nf.diagnose(model, points, arms).verdict.sentence)

    # Train it with the same optimizer, rate and data.
    print("mended:", train(model, torch.optim.AdamW(nf.param_groups(model, lr=0.003))))


if __name__ == "__main__":
    main()
