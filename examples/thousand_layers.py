"""Train a network of 1,000 layers without normalization, beside the same network with He's weights and batch norm."""

import math

import torch
from torch import Tensor, nn

import normfree as nf

CENTRES = torch.randn(40, 16, generator=torch.Generator().manual_seed(42))


def clusters(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return points of 40 clusters, and the class of each; a class has ten clusters, so no plane separates it."""
    draw = torch.Generator().manual_seed(seed)
    cluster = torch.randint(40, (count,), generator=draw)
    return CENTRES[cluster] + 0.3 * torch.randn(count, 16, generator=draw), cluster % 4


def linear_accuracy() -> float:
    """Return the accuracy of a linear classifier by least squares."""
    (points, classes), (new_points, new_classes) = clusters(4000, seed=1), clusters(1000, seed=0)
    weights = torch.linalg.lstsq(points, nn.functional.one_hot(classes, 4).float()).solution
    return ((new_points @ weights).argmax(dim=1) == new_classes).float().mean().item()


def train(model: nn.Module, steps: int = 100) -> str:
    """Train a model until it diverges or all steps are done, and return its accuracy on new points."""
    optimizer = torch.optim.SGD(nf.param_groups(model, lr=0.05), momentum=0.9)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, steps)
    for step in range(steps):
        points, classes = clusters(64, seed=step + 1)
        loss = nn.functional.cross_entropy(model(points[:, :, None, None]), classes)
        if not math.isfinite(loss.item()):
            return f"the loss is {loss.item()} at step {step}"
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    points, classes = clusters(1000, seed=0)
    with torch.no_grad():
        accuracy = (model.eval()(points[:, :, None, None]).argmax(dim=1) == classes).float().mean().item()
    return f"accuracy {accuracy:.0%} after {steps} steps; last loss {loss.item():.3g}"


def main() -> None:
    # What would a linear classifier get?
    print(f"linear classifier: {linear_accuracy():.0%}")

    # 500 branches of two layers. At this depth the scalars of Fixup learn at 10/L of the rate.
    points, classes = clusters(64, seed=0)
    for method in ("he_in", "batchnorm", "fixup:scalar_lr=10/L"):
        draw = torch.Generator().manual_seed(0)
        model = nf.build("resmlp-500-32", method, num_classes=4, in_channels=16, size=1, generator=draw)
        report = nf.diagnose(model, points[:, :, None, None], classes)
        print(f"{method}: {report.verdict.word}")
        print("  signal:  ", report.verdict.sentence)
        print("  training:", train(model))


if __name__ == "__main__":
    main()
