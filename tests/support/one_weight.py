"""A model with one weight, trained for one step: the best learning rate is known without training.

The scores of a class are w times a fixed projection of the image, and w starts at 0. One step of SGD on all training
images sets w = lr · g, where -g is the gradient at 0. The validation loss is a convex function of w. So the best rate
is its minimum divided by g; both follow from the images in float64.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from normfree.train import TrainConfig
from normfree.train.data_sources import open_data
from normfree.train.engine.distributed import Processes

CONFIG = TrainConfig(
    model="one_weight:one_weight",
    method="as built",
    data="fashion14",
    epochs=1,
    batch_size=3000,  # all that are not held out
    validation=0.5,
    momentum=0.0,
    weight_decay=0.0,
    schedule="constant",
    device="cpu",
)


class OneWeight(nn.Module):
    """w times a fixed random projection of the image onto the classes."""

    def __init__(self, pixels: int = 196, classes: int = 10) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.register_buffer("projection", torch.randn(pixels, classes, generator=draw) / pixels**0.5)
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x.flatten(1) @ self.projection)


def one_weight() -> OneWeight:
    """A factory that a configuration can name."""
    return OneWeight()


class OneStep:
    """The validation loss as a function of the rate, from the images alone."""

    def __init__(self) -> None:
        data = open_data(CONFIG)
        inputs = data.inputs(CONFIG, device=torch.device("cpu"), dtype=torch.float32, processes=Processes())
        feed: Any = inputs.feed
        feed.start_epoch(0)
        images, labels, *_ = feed.batch(torch.tensor(0))
        scores, right = self._scores(images, labels)
        self.slope = float((right - scores.mean(1)).mean())  # minus the gradient of the training loss at w = 0
        assert inputs.validation is not None
        held = list(inputs.validation())
        self._validation = self._scores(torch.cat([x for x, *_ in held]), torch.cat([y for _, y, *_ in held]))

    @staticmethod
    def _scores(images: Tensor, labels: Tensor) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        projection: Any = OneWeight().projection
        scores = (images.flatten(1).double() @ projection.double()).numpy()
        return scores, scores[np.arange(len(scores)), labels.numpy()]

    def loss(self, rate: float) -> float:
        """The validation loss after one step at a rate."""
        scores, right = self._validation
        weight = rate * self.slope
        top = (weight * scores).max(1)
        return float((np.log(np.exp(weight * scores - top[:, None]).sum(1)) + top - weight * right).mean())

    def best_rate(self, low: float, high: float) -> float:
        """The minimum by golden section over the logarithm of the rate; the loss is convex in the rate."""
        ratio, a, b = (math.sqrt(5) - 1) / 2, math.log(low), math.log(high)
        for _ in range(100):
            c, d = b - ratio * (b - a), a + ratio * (b - a)
            a, b = (a, d) if self.loss(math.exp(c)) < self.loss(math.exp(d)) else (c, b)
        return math.exp((a + b) / 2)
