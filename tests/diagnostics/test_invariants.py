"""Checks that hold for every sound model: what breaks them is named, and what only looks like it is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normfree.diagnostics import diagnose
from normfree.diagnostics.moments import variations


class Rounding(torch.autograd.Function):
    """Rounds; the derivative is that of the identity (straight-through)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.round(4 * x) / 4

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


class Square(torch.autograd.Function):
    """The square, with a factor on its derivative."""

    factor = 2.0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return Square.factor * x * gradient


class Layers(nn.Module):
    """Two layers with a function between them."""

    def __init__(self, function: Any, outputs: int = 5) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.function = nn.Linear(16, 64), nn.Linear(64, outputs), function
        nn.init.kaiming_normal_(self.first.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x)))  # type: ignore[no-any-return]


X = torch.randn(32, 16, generator=torch.Generator().manual_seed(0))
Y = torch.arange(32) % 5


def causes(model: nn.Module, inputs: Any = X, targets: Any = Y, loss: Any = None) -> list[str]:
    return [f.cause for f in diagnose(model, inputs, targets, loss=loss).verdict.findings]


def test_straight_through_rounding_is_no_wrong_derivative() -> None:
    assert causes(Layers(Rounding.apply)) == []


@pytest.mark.parametrize(("factor", "found"), [(2.0, []), (1.0, ["wrong derivative"]), (6.0, ["wrong derivative"])])
def test_derivative_is_compared_with_finite_differences(
    factor: float, found: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Square, "factor", factor)
    assert causes(Layers(Square.apply)) == found


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (F.relu, []),
        (lambda h: F.relu(h) - F.relu(h).mean(0), ["samples mixed"]),
        (lambda h: F.normalize(F.relu(h), dim=0), ["samples mixed"]),
        (lambda h: F.normalize(F.relu(h), dim=1), []),
    ],
)
def test_samples_that_influence_each_other_are_found(function: Any, found: list[str]) -> None:
    assert causes(Layers(function)) == found


@pytest.mark.parametrize(("sign", "found"), [(1.0, []), (-1.0, ["loss of the wrong sign"])])
def test_loss_that_prefers_wrong_answers_is_found(sign: float, found: list[str]) -> None:
    assert causes(Layers(F.relu), loss=lambda out, y: sign * F.cross_entropy(out, y)) == found
    numbers = torch.randn(32, 5, generator=torch.Generator().manual_seed(1))
    assert causes(Layers(F.relu), targets=numbers, loss=lambda out, y: sign * F.mse_loss(out, y)) == found


def test_variation_is_the_variance_over_samples_and_over_tokens() -> None:
    x = torch.randn(6, 5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 2
    power = (x * x).mean()
    over_samples = ((x - x.mean(0)) ** 2).mean() / power
    over_tokens = ((x - x.mean(1, keepdim=True)) ** 2).mean() / power
    assert variations(x).tolist() == pytest.approx([float(over_samples), float(over_tokens)], rel=1e-5)
    assert variations(x[:1]).tolist() == [1.0, 1.0]
    assert variations(torch.zeros(4, 3)).tolist() == [1.0, 1.0]
