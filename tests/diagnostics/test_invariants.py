"""Checks that hold for every sound model: what breaks them is named, and what only looks like it is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normfree.diagnostics import diagnose
from normfree.diagnostics.measurement.moments import variations


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


def along_the_batch(h: Tensor) -> Tensor:
    return F.relu(h + torch.arange(len(h))[:, None].sin())


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (along_the_batch, ["place in the batch"]),
        (lambda h: F.relu(h + torch.arange(h.shape[1]).sin()), []),
        (lambda h: F.relu(h) + 0.1 * torch.randn_like(h), []),  # the noise of a sample depends on its place, too
        (lambda h: F.batch_norm(h, None, None, training=True), []),
    ],
)
def test_output_that_depends_on_the_place_in_the_batch_is_found(function: Any, found: list[str]) -> None:
    verdict = diagnose(Layers(function), X, Y).verdict
    assert [f.cause for f in verdict.findings] == found
    assert not found or verdict.findings[0].place == "last"  # the function is called before it


class NextToken(nn.Module):
    """Predicts the next token; the output has one row per position of all samples."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm = nn.Embedding(20, 32), nn.GroupNorm(4, 32) if kind == "group norm" else nn.Identity()
        self.conv, self.head = nn.Conv1d(32, 32, 3), nn.Linear(32, 20)
        self.pad = (1, 1) if kind == "both sides" else (2, 0)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens).transpose(1, 2)
        x = F.relu(self.norm(self.conv(F.pad(x, self.pad))))
        return self.head(x.transpose(1, 2)).flatten(0, 1)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("kind", "found"), [("causal", []), ("both sides", ["later positions seen"]), ("group norm", [])]
)
def test_later_positions_are_found_where_samples_and_positions_are_one_dimension(kind: str, found: list[str]) -> None:
    tokens = torch.randint(20, (16, 13), generator=torch.Generator().manual_seed(0))
    assert causes(NextToken(kind), tokens[:, :-1], tokens[:, 1:].flatten()) == found


@pytest.mark.parametrize(("classes", "found"), [(1, ["loss of one class"]), (2, [])])
def test_cross_entropy_of_one_class_is_found(classes: int, found: list[str]) -> None:
    assert causes(Layers(F.relu, classes), targets=Y % classes) == found


def test_loss_that_is_cut_off_is_no_loss_of_one_class() -> None:
    loss = lambda out, y: F.binary_cross_entropy_with_logits(out.detach()[:, 0], y / 5)  # noqa: E731
    assert causes(Layers(F.relu, 1), loss=loss) == ["loss without a gradient"]


@pytest.mark.parametrize(("mean", "found"), [(0.0, ["gains around zero"]), (1.0, [])])
def test_gains_around_zero_are_found(mean: float, found: list[str]) -> None:
    norm = nn.LayerNorm(64)
    nn.init.normal_(norm.weight, mean, 0.02)
    assert causes(Layers(nn.Sequential(norm, nn.ReLU()))) == found


def test_gains_around_zero_next_to_usual_ones_are_no_fault() -> None:
    """The last normalizers of branches may start at 0, and are around it after a few steps."""
    norms = nn.LayerNorm(64), nn.LayerNorm(64)
    nn.init.normal_(norms[1].weight, 0.0, 0.02)
    assert causes(Layers(nn.Sequential(norms[0], nn.ReLU(), norms[1]))) == []


class Doubled(nn.Module):
    """Two layers; the second reads the output of the first, concatenated with another tensor."""

    def __init__(self, join: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.join = nn.Linear(16, 16), nn.Linear(32, 5), join

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.join(x, F.relu(self.first(x))))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("join", "found"),
    [
        (lambda x, h: torch.cat([h, h], 1), ["concatenated with itself"]),
        (lambda x, h: torch.cat([h, h], -1), ["concatenated with itself"]),
        (lambda x, h: torch.cat([h, x], 1), []),
        (lambda x, h: torch.cat([h, -h], 1), []),
        (lambda x, h: torch.cat([x, x], 1) + 0.1 * torch.cat([x, h], 1), []),
        (lambda x, h: torch.cat([*h.chunk(2, 1), x], 1), []),  # two outputs of one function
    ],
)
def test_tensor_that_is_concatenated_with_itself_is_found(join: Any, found: list[str]) -> None:
    assert causes(Doubled(join)) == found


def test_constant_output_names_the_modules_between_which_samples_become_alike() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(16, 64), nn.ReLU(), nn.LayerNorm(64), nn.AvgPool1d(64), nn.Linear(1, 5)]
    verdict = diagnose(nn.Sequential(*layers), X, Y).verdict  # the mean of what has a mean of zero
    assert [f.cause for f in verdict.findings] == ["constant output"]
    assert "look at 4, and between 3 and it" in verdict.recommendation


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
