"""Growth over depth and time: what looks like it, but is a design, is no fault."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normfree.diagnostics import diagnose
from normfree.diagnostics.rules.growth import DepthPoint, judge_direction

Y = torch.arange(32) % 5


def causes(model: nn.Module, inputs: Tensor) -> list[str]:
    return [f.cause for f in diagnose(model, inputs, Y).verdict.findings]


class LastState(nn.Module):
    """A bidirectional recurrent layer of which the network reads the final states alone."""

    def __init__(self, kind: Any, cut: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rnn, self.head, self.cut = kind(4, 16, batch_first=True, bidirectional=True), nn.Linear(32, 5), cut

    def forward(self, x: Tensor) -> Tensor:
        state = self.rnn(x)[1]
        state = state[0] if isinstance(state, tuple) else state
        return self.head((state.detach() if self.cut else state).transpose(0, 1).flatten(1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
@pytest.mark.parametrize(("cut", "found"), [(False, []), (True, ["gradient cut"])])
def test_recurrent_layer_may_be_read_by_its_final_state(kind: Any, cut: bool, found: list[str]) -> None:
    x = torch.randn(32, 10, 4, generator=torch.Generator().manual_seed(0))
    assert causes(LastState(kind, cut), x) == found


class Cell(nn.Module):
    """A cell in a loop; its last state is classified."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.head = kind(4, 32), nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        state: Any = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.head(state[0] if isinstance(state, tuple) else state)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("kind", "sound"), [(nn.LSTMCell, True), (nn.GRUCell, True), (nn.RNNCell, False)])
def test_cell_with_gates_may_forget_at_the_start(kind: Any, sound: bool) -> None:
    x = torch.randn(32, 24, 4, generator=torch.Generator().manual_seed(0))
    assert (diagnose(Cell(kind), x, Y).verdict.word in ("preserved", "growing")) == sound


class PostNorm(nn.Module):
    """Two blocks of two branches, each with a normalizer behind its sum, and a small input; or one large factor."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(16, 32)
        nn.init.normal_(self.stem.weight, std=0.005)
        nn.init.zeros_(self.stem.bias)
        self.branches = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)) for _ in range(4))
        for branch in self.branches:
            for layer in (branch[0], branch[2]):
                nn.init.normal_(layer.weight, std=0.02)
                nn.init.zeros_(layer.bias)
        self.norms = nn.ModuleList(nn.LayerNorm(32) if norm else nn.Identity() for _ in range(4))
        self.factor, self.head = 1 if norm else 300, nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for i, (branch, norm) in enumerate(zip(self.branches, self.norms, strict=True)):
            x = norm(x + branch(x)) * (self.factor if i == 1 else 1)
        return self.head(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("norm", [True, False])
def test_first_normalizer_may_bring_a_small_signal_to_unit_scale(norm: bool) -> None:
    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(0))
    verdict = diagnose(PostNorm(norm), x, Y).verdict
    assert (verdict.status in ("preserved", "growing")) == norm
    assert norm or verdict.status == "exploding"


class GraphAttention(nn.Module):
    """Layers of graph attention, whose scores are a sum of two numbers, one per node each; one layer has a factor."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(4, 32), nn.Linear(32, 32)])
        self.source, self.target = (nn.ModuleList(nn.Linear(32, 1) for _ in range(2)) for _ in range(2))
        self.head = nn.Linear(32, 5)
        with torch.no_grad():
            self.layers[1].weight *= factor

    def forward(self, x: Tensor) -> Tensor:
        near = torch.ones(x.shape[1], x.shape[1]).triu(-1).tril().bool()  # itself, and the one before
        for layer, source, target in zip(self.layers, self.source, self.target, strict=True):
            x = layer(x)
            scores = F.leaky_relu(source(x) + target(x).transpose(1, 2), 0.2)
            x = F.elu(scores.masked_fill(~near, -1e9).softmax(-1) @ x)
        return self.head(x.mean(1))  # type: ignore[no-any-return]


@pytest.mark.parametrize(("factor", "sound"), [(1.0, True), (1e3, False)])
def test_scores_of_one_number_have_no_part_in_the_growth(factor: float, sound: bool) -> None:
    x = torch.randn(32, 24, 4, generator=torch.Generator().manual_seed(0))
    x[:, :, 0] += Y[:, None]
    assert (causes(GraphAttention(factor), x) == []) == sound


@pytest.mark.parametrize(
    ("scale", "normalized", "status"), [(1.0, True, "preserved"), (100.0, True, "exploding"), (1.0, False, "exploding")]
)
def test_a_stream_may_grow_to_the_size_of_normalized_branches(scale: float, normalized: bool, status: str) -> None:
    """The sizes are those of an OLMo 2 of three layers, whose word vectors have a deviation of 0.02."""
    sizes = (0.00414, 0.0042, 0.197, 0.268, 1.11, 1.66)
    points = [DepthPoint(str(i), "", 1, scale * size) for i, size in enumerate(sizes)]
    assert judge_direction(points, normalized=normalized).status == status
