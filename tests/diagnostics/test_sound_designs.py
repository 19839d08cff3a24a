"""Designs that look like faults: sinks, readouts of zeros, losses of the output alone, pyramids, branches left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normfree.diagnostics import diagnose
from signal_oracles import batch

X = batch(24, 32)
Y = torch.arange(24) % 12
SERIES = batch(24, 8, 32)


def causes(model: nn.Module, x: Any = X, targets: Any = None, loss: Any = None) -> list[str]:
    with torch.random.fork_rng(devices=[]):
        return [f.cause for f in diagnose(model, x, targets, loss=loss).verdict.findings]


class Sinking(nn.Module):
    """An attention whose scores get the column of a sink; a function makes the weights of the positions from them."""

    def __init__(self, weigh: Callable[[Tensor], Tensor], *, first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.keys, self.sink, self.head = nn.Linear(32, 64), nn.Parameter(torch.ones(4, 1, 1)), nn.Linear(32, 12)
        self.weigh, self.first = weigh, first

    def forward(self, x: Tensor) -> Tensor:
        q, k = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.keys(x).chunk(2, -1))
        sink = self.sink.expand(len(x), -1, x.shape[1], 1)
        scores = q @ k.mT / 8**0.5
        weights = self.weigh(torch.cat([sink, scores] if self.first else [scores, sink], -1))
        read = weights @ x.unflatten(-1, (4, 8)).transpose(1, 2)
        return self.head((x + read.transpose(1, 2).flatten(2)).mean(1))  # type: ignore[no-any-return]


SINKS = {
    "last": (False, lambda z, dim: z.softmax(dim)[..., :-1]),
    "first": (True, lambda z, dim: z.softmax(dim)[..., 1:]),
    "narrow": (True, lambda z, dim: z.softmax(dim).narrow(-1, 1, 8)),
    "heads first": (False, lambda z, dim: z.softmax(dim)[:, :, :, :-1].contiguous()),
}


@pytest.mark.parametrize("name", SINKS)
def test_sink_may_take_a_part_of_the_weights(name: str) -> None:
    first, weigh = SINKS[name]
    assert causes(Sinking(lambda z: weigh(z, -1), first=first), SERIES, Y) == []
    for wrong in (-2, 1):  # the queries and the heads
        found = causes(Sinking(lambda z, dim=wrong: weigh(z, dim), first=first), SERIES, Y)  # type: ignore[misc]
        assert "softmax over the wrong axis" in found


class Read(nn.Module):
    """A recurrent network that is read at each step."""

    def __init__(self, body: nn.Module, *zeros: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.middle, self.readout = body, nn.Linear(32, 32), nn.Linear(32, 12)
        for name in zeros:
            nn.init.zeros_(self.get_submodule(name).weight)
            nn.init.zeros_(self.get_submodule(name).bias)

    def forward(self, x: Tensor) -> Tensor:
        h = self.middle(self.body(x)[0]).tanh()
        return self.readout(h).flatten(0, 1)  # type: ignore[no-any-return]


@pytest.mark.parametrize("body", [nn.GRU, nn.LSTM, nn.RNN])
def test_readout_of_zeros_learns_and_zeros_before_another_layer_do_not_pass(body: type[nn.RNNBase]) -> None:
    torch.manual_seed(0)
    recurrent, targets = body(32, 32, batch_first=True), torch.arange(24 * 8) % 12
    assert causes(Read(recurrent, "readout"), SERIES, targets) == []
    assert "zero weights" in causes(Read(recurrent, "middle", "readout"), SERIES, targets)
    assert "zero weights" in causes(Read(recurrent, "middle"), SERIES, targets)


def towers(width: int, parts: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, parts * width), nn.Unflatten(1, (parts, width)))


def triplet(out: Tensor, _: Tensor) -> Tensor:
    return F.triplet_margin_loss(*F.normalize(out, dim=-1).unbind(1), margin=0.5)


def two_views(out: Tensor, _: Tensor) -> Tensor:
    one, other = F.normalize(out, dim=-1).unbind(1)
    return (one - other).square().mean() - one.var(0).mean()


def test_loss_that_compares_parts_of_the_output_may_ignore_the_targets() -> None:
    assert causes(towers(16, 3), X, Y, triplet) == []
    assert causes(towers(16, 2), X, Y, two_views) == []
    flat = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 12))
    torch.manual_seed(0)
    assert "targets ignored" in causes(flat, X, Y, lambda out, _y: F.cross_entropy(out, torch.arange(len(out)) % 12))
    numbers = torch.randn(24, 12)
    assert "targets ignored" in causes(flat, X, numbers, lambda out, _y: (out - 1).square().mean())
    assert "targets ignored" in causes(flat, X, numbers[:, :1], lambda out, _y: (out - 1).square().mean())
    names = 100 + torch.arange(24)  # of the samples, which are no classes of the output
    assert "targets ignored" not in causes(flat, X, names, lambda out, _y: (out - 1).square().mean())


class Pyramid(nn.Module):
    """Residual blocks over positions, of which a mean leaves a quarter after every second block."""

    def __init__(self, shrink: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32)) for _ in range(8)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(4))
        self.head, self.shrink = nn.Linear(32, 12), shrink

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = self.shrink * x + block(self.shrink * x)
            if i % 2:
                x = self.norms[i // 2](x.unflatten(1, (-1, 4)).mean(2))
        return self.head(x.mean(1))  # type: ignore[no-any-return]


def test_gradient_is_judged_among_sums_of_one_resolution() -> None:
    x = batch(12, 256, 32)
    assert diagnose(Pyramid(1.0), x, Y[:12]).verdict.backward.status in ("preserved", "growing")
    assert diagnose(Pyramid(0.01), x, Y[:12]).verdict.findings != ()


class LeftOut(nn.Module):
    """Residual blocks, one of which is left out for the whole batch at random, or always."""

    def __init__(self, share: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.head, self.share = nn.Linear(32, 32), nn.Linear(32, 12), share
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU()) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for i, block in enumerate(self.blocks):
            x = x + block(x) * (torch.rand(()) >= self.share if i == 3 else 1.0)
        return self.head(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("share", "dead"), [(0.4, False), (1.0, True)])
def test_branch_that_chance_left_out_is_not_dead(share: float, dead: bool) -> None:
    with torch.random.fork_rng(devices=[]):
        drawn = []
        for seed in range(40):
            torch.manual_seed(seed)
            drawn.append(float(torch.rand(())))
    seed = next(i for i, number in enumerate(drawn) if number < 0.4)
    model = LeftOut(share)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        verdict = diagnose(model, X, Y).verdict
        assert torch.equal(torch.get_rng_state(), state)
    assert bool(verdict.dead) == dead
    assert bool(verdict.findings) == dead
