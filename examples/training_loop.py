"""A training loop of your own: parameter groups, adaptive clipping, a schedule, and a monitor of the signal."""

import torch
from torch import Tensor, nn

import normfree as nf


def stripes(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return noisy images of stripes, and which of eight directions the stripes have."""
    draw = torch.Generator().manual_seed(seed)
    direction = torch.randint(8, (count,), generator=draw)
    angle = (direction * torch.pi / 8)[:, None, None]
    y, x = torch.meshgrid(torch.arange(12.0), torch.arange(12.0), indexing="ij")
    phase = 2 * torch.pi * torch.rand(count, 1, 1, generator=draw)
    waves = torch.sin(1.2 * (x * angle.cos() + y * angle.sin()) + phase)
    return (waves + 0.5 * torch.randn(count, 12, 12, generator=draw))[:, None], direction


def main() -> None:
    # A ResNet-32 without normalization. It is a plain nn.Module.
    draw = torch.Generator().manual_seed(0)
    model = nf.build("resnet32", "fixup", num_classes=8, in_channels=1, generator=draw)

    # The method's parameter groups: the scalars of Fixup learn at a tenth of the rate.
    groups = nf.param_groups(model, lr=0.3, weight_decay=1e-4)
    for group in groups:
        numbers = sum(p.numel() for p in group["params"])
        print(f"{group['name']}: {len(group['params'])} tensors, {numbers:,} numbers, rate {group['lr']:g}")
    optimizer = torch.optim.SGD(groups, momentum=0.9)

    # OneCycleLR replaces the rates of the groups, so give it one for each.
    steps = 200
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, [group["lr"] for group in groups], total_steps=steps)

    # Every 50 steps the monitor measures the signal on the batch, and leaves the training run as it was.
    monitor = nf.Monitor(model, every=50, log=show)
    for step in range(steps):
        images, directions = stripes(32, seed=step + 1)
        loss = nn.functional.cross_entropy(model(images), directions)
        optimizer.zero_grad()
        loss.backward()
        nf.clip_grad_agc_(model, 0.02)  # no gradient is larger than 2 % of the weights that it changes
        optimizer.step()
        schedule.step()
        monitor.step(images, directions)

    # Test, then fold the scalars into the weights for inference.
    images, directions = stripes(1000, seed=0)
    model.eval()
    with torch.no_grad():
        accuracy = (model(images).argmax(dim=1) == directions).float().mean().item()
        before = model(images)
        nf.fold_(model)
        change = (model(images) - before).abs().max().item()
    print(f"accuracy {accuracy:.0%}; folding the scalars changed no output by more than {change:.0e}")


def show(numbers: dict[str, float], step: int) -> None:
    """Print what the monitor measured."""
    print(f"step {step}:", ", ".join(f"{name} {value:.3g}" for name, value in numbers.items()))


if __name__ == "__main__":
    main()
