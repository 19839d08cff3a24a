"""The checks of a loss, the shapes of a reshape and other outputs than the main one, beside sound twins of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normfree.diagnostics import diagnose
from normfree.diagnostics.measurement.losses import check_loss
from normfree.diagnostics.passes.invariants import exchanges


def picked(p: Tensor, y: Tensor) -> Tensor:
    return p.gather(1, y[:, None])[:, 0]


def entropy(z: Tensor) -> Tensor:
    p = z.softmax(1)
    return -(p * p.log()).sum(1).mean()


LOGITS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "cross-entropy": (F.cross_entropy, ""),
    "its sum": (lambda z, y: F.cross_entropy(z, y, reduction="sum"), ""),
    "with a bonus for entropy": (lambda z, y: F.cross_entropy(z, y) - 0.1 * entropy(z), ""),
    "with a constant": (lambda z, y: F.cross_entropy(z, y, reduction="sum") + 3.0, ""),
    "a score that may grow": (lambda z, y: picked(z, y.roll(1)).mean() - picked(z, y).mean(), ""),
    "with a penalty on their size": (lambda z, y: F.cross_entropy(z, y) + z.square().mean(), ""),
    "with a summed penalty": (lambda z, y: F.cross_entropy(z, y) + 0.01 * z.square().sum(), "sum beside a mean"),
    "with a reward for their size": (
        lambda z, y: F.cross_entropy(z, y) - z.square().mean(),
        "loss without a lower bound",
    ),
    "of other targets": (lambda z, y: F.cross_entropy(z, 0 * y), "targets ignored"),
    "negated": (lambda z, y: -F.cross_entropy(z, y), "loss of the wrong sign"),
}


@pytest.mark.parametrize("name", LOGITS)
def test_loss_of_logits(name: str) -> None:
    loss, fault = LOGITS[name]
    source = torch.Generator().manual_seed(0)
    logits = torch.randn(16, 4, generator=source, requires_grad=True)
    assert [fact.kind for fact in check_loss(loss, logits, torch.arange(16) % 4)] == [fault] * bool(fault)


OF_PROBABILITIES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], bool]] = {
    "mean square": (lambda p, y: F.mse_loss(p, F.one_hot(y, 4).float()), True),
    "logarithm": (lambda p, y: F.nll_loss(p.log(), y), True),
    "focal": (lambda p, y: -((1 - picked(p, y)) ** 2 * picked(p, y).log()).mean(), True),
    "dice": (lambda p, y: 1 - 2 * picked(p, y).sum() / (p.sum() + len(y)), True),
    "divergence": (lambda p, y: F.kl_div(p.log(), F.one_hot(y, 4) * 0.9 + 0.025, reduction="batchmean"), True),
    "divergence without a logarithm": (lambda p, y: F.kl_div(p, F.one_hot(y, 4) * 0.9 + 0.025), False),
    "cross-entropy": (F.cross_entropy, False),
}


@pytest.mark.filterwarnings("ignore:reduction")
@pytest.mark.parametrize("name", OF_PROBABILITIES)
def test_output_of_probabilities_is_a_fault_only_if_the_loss_takes_logits(name: str) -> None:
    loss, sound = OF_PROBABILITIES[name]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 4), nn.Softmax(1))
    found = diagnose(model, torch.randn(48, 12), torch.arange(48) % 4, loss=loss).verdict.findings
    assert ([f.cause for f in found] == []) is sound
    assert sound or found[0].cause == "softmax before the loss"


EXCHANGED = {
    "channels last": ((2, 16, 16, 3), (2, 3, 16, 16)),
    "series": ((2, 40, 6), (2, 6, 40)),
    "heads": ((2, 12, 32), (2, 4, 12, 8)),
    "heads back": ((2, 4, 12, 8), (2, 12, 32)),
    "heads of a power of two": ((2, 16, 32), (2, 4, 16, 8)),
    "patches": ((2, 32, 4, 4), (2, 16, 32)),
    "steps before samples": ((2, 12, 32), (12, 2, 32)),
    "joint queries": ((2, 20, 96), (2, 3, 4, 20, 8)),
}
KEPT = {
    "heads": ((2, 12, 32), (2, 12, 4, 8)),
    "flat": ((2, 16, 4, 4), (2, 256)),
    "positions": ((2, 32, 16), (64, 16)),
    "groups": ((2, 32, 8, 8), (2, 8, 256)),
    "windows": ((2, 16, 16, 32), (2, 4, 4, 4, 4, 32)),
    "windows of all pictures": ((32, 16, 32), (2, 4, 4, 4, 4, 32)),
    "two steps together": ((2, 20, 8), (2, 10, 16)),
    "shuffle": ((2, 32, 8, 8), (2, 4, 8, 8, 8)),
    "sides of one": ((2, 32, 1, 1), (2, 1, 1, 32)),
}


@pytest.mark.parametrize("name", EXCHANGED)
def test_reshape_that_exchanges_dimensions(name: str) -> None:
    assert exchanges(*EXCHANGED[name])


@pytest.mark.parametrize("name", KEPT)
def test_reshape_that_splits_and_joins_dimensions(name: str) -> None:
    assert not exchanges(*KEPT[name])


class Physics(nn.Module):
    """A function with its slope, whose graph is kept or not."""

    def __init__(self, kept: bool = True, activation: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(2, 32), nn.Linear(32, 32), nn.Linear(32, 1)
        self.kept, self.activation = kept, activation

    def forward(self, x: Tensor) -> Sequence[Tensor]:
        x = x.detach().requires_grad_()
        u = self.last(self.activation(self.second(self.activation(self.first(x)))))
        (slope,) = torch.autograd.grad(u.sum(), x, create_graph=self.kept, retain_graph=True)
        return u, slope.sum(1, keepdim=True)


def causes(model: nn.Module, inputs: Any, targets: Any = None, loss: Any = None) -> list[str]:
    return [str(f) for f in diagnose(model, inputs, targets, loss=loss).verdict.findings]


def test_slope_without_its_graph_is_named() -> None:
    def loss(out: Sequence[Tensor], y: Tensor) -> Tensor:
        return F.mse_loss(out[0], y) + out[1].square().mean()

    torch.manual_seed(0)
    x = torch.rand(32, 2)
    assert causes(Physics(), x, x[:, :1], loss) == []
    assert causes(Physics(kept=False), x, x[:, :1], loss) == ["term without a gradient at the output"]


def test_model_that_takes_derivatives_is_diagnosed_although_it_has_a_fault() -> None:
    torch.manual_seed(0)
    x = torch.rand(32, 2)
    assert causes(Physics(activation=lambda h: 0 * h), x, x[:, :1], lambda out, y: F.mse_loss(out[0], y))


class Experts(nn.Module):
    """The best of four experts, by the weight of the gate or only by its choice."""

    def __init__(self, weighted: bool) -> None:
        super().__init__()
        self.gate, self.weighted, self.head = nn.Linear(12, 4), weighted, nn.Linear(32, 4)
        self.experts = nn.ModuleList(nn.Linear(12, 32) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weight, best = self.gate(x).softmax(1).max(1)
        h = torch.stack([expert(x) for expert in self.experts], 1)[torch.arange(len(x)), best].relu()
        out: Tensor = self.head(h * weight[:, None] if self.weighted else h)
        return out


def test_gate_with_as_many_units_as_the_output_is_no_head_if_it_changes_the_output() -> None:
    torch.manual_seed(0)
    x = torch.randn(32, 12)
    assert causes(Experts(weighted=True), x) == []
    assert causes(Experts(weighted=False), x) == ["gradient cut at gate"]
