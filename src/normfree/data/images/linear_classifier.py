"""How far a linear classifier gets on the pixels: the floor that a network has to beat."""

from __future__ import annotations

import torch
from torch import Tensor

from normfree.data.images.image_set import ImageSet, Split

_STEPS = 1000  # far more than a convex problem of this kind needs


def linear_accuracy(data: ImageSet, *, decay: float = 1e-2, tolerance: float = 1e-5) -> float:
    """Test accuracy of softmax regression on the pixels, each with mean 0 and variance 1 over the training images.

    It minimizes mean cross entropy + decay/2 · ‖W‖² (the bias is free) by L-BFGS from zero in float64 until no entry of
    the gradient exceeds `tolerance`. The minimum is unique, so nothing is drawn. The default decay was chosen on
    images held out of the training split of `fashion14`.

    Raises:
        ValueError: if the decay is not positive (without it, there may be no minimum), or a split is empty.
    """
    if not decay > 0:
        raise ValueError(f"expected a positive decay of the linear classifier, got {decay}")
    if not len(data.train) or not len(data.test):
        raise ValueError(f"expected training and test images in '{data.name}', got {len(data.train)}, {len(data.test)}")
    x = _pixels(data.train)
    mean, std = x.mean(0), x.std(0, correction=0)
    std = torch.where(std > 0, std, 1.0)  # a pixel that never changes says nothing
    x = (x - mean) / std
    weight, bias = _fit(x, data.train.labels.cpu(), len(data.classes), decay, tolerance)
    scores = torch.addmm(bias, (_pixels(data.test) - mean) / std, weight)
    return (scores.argmax(1) == data.test.labels.cpu()).double().mean().item()


def _pixels(split: Split) -> Tensor:
    return split.images.cpu().flatten(1).double() / 255


def _fit(x: Tensor, labels: Tensor, classes: int, decay: float, tolerance: float) -> tuple[Tensor, Tensor]:
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
