"""The coordinate check against closed forms: how far an output moves at each width."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from normfree.diagnostics import coordinate_check
from signal_oracles import batch

WIDTHS = (16, 64, 256)
LR, STEPS = 1e-2, 3
X = batch(8, 1) + 2.0


class Widened(nn.Module):
    """A linear output of `width` equal features: y = width^-power · Σ w_j x."""

    def __init__(self, width: int, power: float) -> None:
        super().__init__()
        self.width, self.factor = width, width**-power
        self.last = nn.Linear(width, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.factor * x.expand(-1, self.width))  # type: ignore[no-any-return]


def check(optimizer: Callable[[nn.Module], torch.optim.Optimizer], power: float = 0.0) -> tuple[float, ...]:
    found = coordinate_check(
        lambda width: Widened(width, power), WIDTHS, X, steps=STEPS, optimizer=optimizer, loss=lambda y, _: y.mean()
    )
    return (found.exponent("the output"), *found.changes["the output"])


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LR)


def sgd_over_width(model: nn.Module) -> torch.optim.Optimizer:
    """The rate of the maximal update parametrization for an output layer."""
    assert isinstance(model, Widened)
    return torch.optim.SGD(model.parameters(), lr=LR / model.width)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=LR, eps=1e-30)


@pytest.mark.parametrize(
    ("optimizer", "power", "exponent"),
    [
        (sgd, 0.0, 1.0),
        (sgd_over_width, 0.0, 0.0),
        (sgd, 0.5, 0.0),
        (adam, 0.5, 0.5),
        (adam, 0.0, 1.0),
        (adam, 1.0, 0.0),
    ],
)
def test_change_is_that_of_the_closed_form(
    optimizer: Callable[[nn.Module], torch.optim.Optimizer], power: float, exponent: float
) -> None:
    """The loss is the mean output, so that every gradient is f·x̄ with f = width^-power.

    SGD changes each weight by lr f x̄ per step, Adam by lr, and the output by width · f · x times that.
    """
    found = check(optimizer, power)
    assert found[0] == pytest.approx(exponent, abs=1e-3)
    size = float(X.square().mean().sqrt())
    for width, change in zip(WIDTHS, found[1:], strict=True):
        factor = width**-power
        step = LR if optimizer is adam else LR * factor * float(X.mean())
        step /= width if optimizer is sgd_over_width else 1
        assert change == pytest.approx(STEPS * step * width * factor * size, rel=1e-3)


@pytest.mark.parametrize(("power", "word"), [(1.0, "the same at every width"), (0.0, "grows with the width")])
def test_verdict_tells_the_law(power: float, word: str) -> None:
    """The control: the output without its factor moves more at larger widths."""
    found = coordinate_check(
        lambda width: Widened(width, power), WIDTHS, X, steps=STEPS, optimizer=adam, loss=lambda y, _: y.mean()
    )
    assert word in found.verdict
    assert (abs(found.exponent("the output")) < 0.25) is (power == 1.0)
