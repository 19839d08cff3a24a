"""Convert a ResNet of timm to a network without normalization, find a learning rate, and train both."""

import timm
import torch
from torch import Tensor, nn

import normfree as nf


def stripes(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return noisy images of stripes, and which of eight directions the stripes have."""
    draw = torch.Generator().manual_seed(seed)
    direction = torch.randint(8, (count,), generator=draw)
    angle = (direction * torch.pi / 8)[:, None, None]
    y, x = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij")
    phase = 2 * torch.pi * torch.rand(count, 1, 1, generator=draw)
    waves = torch.sin(0.9 * (x * angle.cos() + y * angle.sin()) + phase)
    return (waves + torch.randn(count, 32, 32, generator=draw))[:, None], direction


def train(model: nn.Module, groups: list[dict[str, object]]) -> str:
    """Train a model for 60 steps, and return its accuracy on new images."""
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=60)
    model.train()
    for step in range(60):
        images, directions = stripes(32, seed=step + 1)
        loss = nn.functional.cross_entropy(model(images), directions)
        optimizer.zero_grad()
        loss.backward()
        nf.clip_grad_agc_(model, 0.02)
        optimizer.step()
        schedule.step()
    images, directions = stripes(500, seed=0)
    model.eval()
    with torch.no_grad():
        accuracy = (model(images).argmax(dim=1) == directions).float().mean().item()
    return f"{accuracy:.0%} after 60 steps"


def main() -> None:
    # A ResNet of timm, with batch norm. Any of its models will do.
    torch.manual_seed(0)
    original = timm.create_model("resnet10t", num_classes=8, in_chans=1)

    # Convert it. The original stays as it is, and the plan says what was found and changed.
    images, _ = stripes(32, seed=0)
    converted, plan = nf.convert(original, "fixup", images)
    print(plan)
    print("batch norm layers:", sum(isinstance(m, nn.BatchNorm2d) for m in converted.modules()))

    # The rate of the original need not suit the converted model: search for one on a few batches.
    batches = [stripes(32, seed=1000 + index) for index in range(8)]
    found = nf.find_lr(converted, batches, clip=0.02, steps=50, runs=2, curvature=False)
    print(found)
    found.save("convert_timm.png")

    # Train both. The groups give the scalars of Fixup a rate of their own.
    print("batch norm:", train(original, [{"params": original.parameters(), "lr": 0.1}]))
    print("fixup:     ", train(converted, nf.param_groups(converted, lr=found.suggestion)))


if __name__ == "__main__":
    main()
