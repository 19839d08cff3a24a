"""Designs that are a fault only where they do harm, each beside a twin in which they do."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normfree.diagnostics import diagnose
from signal_oracles import batch

X = batch(24, 32)
Y = torch.arange(24) % 12


def causes(model: nn.Module, x: Any = X, targets: Any = None, loss: Any = None) -> list[tuple[str, str]]:
    with torch.random.fork_rng(devices=[]):
        findings = diagnose(model, x, targets, loss=loss).verdict.findings
        return [(f.cause, f.place) for f in findings if f.status != "drifting"]


def mlp(*start: nn.Module, out: int = 12) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*start, nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, out))


class Call(nn.Module):
    """A function as a module."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *x: Tensor) -> Any:
        return self.function(*x)


@pytest.mark.parametrize("start", [Call(lambda x: x.log() - 7), nn.BatchNorm1d(32), Call(lambda x: (x - 1000) / 100)])
def test_scale_of_the_input_matters_where_a_layer_reads_it(start: nn.Module) -> None:
    counts = 1000 + 100 * X
    assert causes(mlp(start), counts, Y) == []
    assert causes(mlp(), counts, Y)[0][0] == "input not centred"
    assert causes(mlp(nn.Identity()), 40 * X, Y)[0] == ("input scale", "the input")


def in_order(output: Tensor, targets: Tensor) -> Tensor:
    scores = output[targets.flatten().argsort(descending=True), 0]
    return (scores.logcumsumexp(0) - scores).mean()


def of_logarithms(output: Tensor, targets: Tensor) -> Tensor:
    return F.huber_loss(output, targets.log() - 6)


def test_scale_of_the_targets_matters_if_the_output_has_to_reach_it() -> None:
    prices = 500 * torch.exp(0.5 * X[:, :1])
    for sound in (in_order, of_logarithms):
        assert causes(mlp(out=1), X, prices, sound) == []
    for wrong in (F.mse_loss, F.l1_loss, lambda z, y: F.huber_loss(z, y) + z.square().mean()):
        assert causes(mlp(out=1), X, prices, wrong)[0] == ("targets scale", "the targets")


def test_samples_without_a_label_are_left_out_on_purpose() -> None:
    few = torch.where(torch.arange(24) % 4 == 0, Y, -100)
    assert causes(mlp(), X, few) == []
    assert causes(mlp(), X, few.clamp(min=-1), nn.CrossEntropyLoss(ignore_index=-1)) == []
    assert causes(mlp(), X, few.clamp(min=3), nn.CrossEntropyLoss(ignore_index=3)) == [("samples left out", "the loss")]
    known = torch.where(torch.arange(24)[:, None] % 4 == 0, X[:, :1], torch.nan)
    assert causes(mlp(out=1), X, known, lambda z, y: (z - y)[~y.isnan()].square().mean()) == []


class Compared(nn.Module):
    """Similarities of a sample to its other view and to stored vectors, or the logits of a classifier."""

    def __init__(self, *, bank: bool) -> None:
        super().__init__()
        self.body, self.bank = mlp(out=40), bank
        self.register_buffer("stored", torch.randn(20, 40))

    def forward(self, x: Tensor) -> Tensor:
        z, other = self.body(x), self.body(x.flip(1)).detach()
        return torch.cat([(z * other).sum(1, keepdim=True), z @ self.stored.T], 1) if self.bank else z


def test_first_of_many_similarities_may_be_the_right_one_for_all_samples() -> None:
    first = torch.zeros(24, dtype=torch.long)
    assert causes(Compared(bank=True), X, first) == []
    assert ("targets constant", "the targets") in causes(Compared(bank=False), X, first)


class Views(nn.Module):
    """A student of one view, and a frozen teacher of the other one."""

    def __init__(self, *, reads_both: bool) -> None:
        super().__init__()
        self.student = mlp()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        nn.init.normal_(self.teacher[-1].weight, std=0.3)
        self.reads_both = reads_both

    def forward(self, views: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            wanted = self.teacher(views[:, int(self.reads_both)])
        return self.student(views[:, 0]), wanted


def test_input_that_another_output_depends_on_is_read() -> None:
    views = torch.stack([X, X + 0.1], 1)
    assert causes(Views(reads_both=True), views, None, lambda out, _: F.mse_loss(*out)) == []
    assert causes(Views(reads_both=False), views, None, lambda out, _: F.mse_loss(*out))[0][0] == "input ignored"


class Parallel(nn.Module):
    """A question and the places of a list, which are added: the mean of the places has hardly a gradient."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.read, self.question, self.place = nn.Linear(16, 48), nn.Linear(48, 48), nn.Linear(48, 48)
        self.score, self.factor = nn.Linear(48, 1), factor

    def forward(self, x: Tensor) -> Tensor:
        states = self.read(x).relu()
        places = self.place(self.factor * states)
        question = self.question(states.mean(1))
        return self.score(torch.tanh((places + question[:, None]) / 4)).squeeze(2)  # type: ignore[no-any-return]


def test_layers_side_by_side_are_not_compared_like_layers_in_a_row() -> None:
    x = batch(128, 10, 16)
    assert causes(Parallel(1.0), x, x[:, :, 0].argmax(1)) == []
    assert causes(Parallel(100.0), x, x[:, :, 0].argmax(1)) != []


class Controlled(nn.Module):
    """A frozen path that shrinks the signal, and layers beside it that start at zero, or do not."""

    def __init__(self, start: float, path: float = 0.08) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frozen = nn.ModuleList(nn.Linear(32, 32) for _ in range(3)).requires_grad_(False)
        for layer in self.frozen:
            nn.init.normal_(layer.weight, std=path)
            nn.init.zeros_(layer.bias)
        self.control, self.added = (nn.ModuleList(nn.Linear(32, 32) for _ in range(3)) for _ in range(2))
        self.head = nn.Linear(32, 12)
        for layer in self.added:
            nn.init.normal_(layer.weight, std=start)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        hint = x
        for frozen, control, added in zip(self.frozen, self.control, self.added, strict=True):
            hint = F.silu(control(hint))
            x = F.silu(frozen(x)) + added(hint)
        return self.head(x)  # type: ignore[no-any-return]


def test_layers_beside_a_path_may_start_at_zero() -> None:
    assert causes(Controlled(0.0), X, Y) == []
    assert causes(Controlled(0.2), X, Y) == []  # every way has weights, so that training recovers from a small signal
    assert causes(Controlled(0.0, path=0.01), X, Y) != []  # but not from one that is lost


class Small(nn.Module):
    """Tiny word vectors behind a normalizer, and a block with another one."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.first = nn.Embedding(50, 32), nn.LayerNorm(32, eps=eps)
        nn.init.uniform_(self.words.weight, -1e-5, 1e-5)
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(3))
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.head = nn.Linear(32, 12)

    def forward(self, words: Tensor) -> Tensor:
        x = self.first(self.words(words))
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        return self.head(x.mean(1))  # type: ignore[no-any-return]


def test_small_vectors_behind_a_usual_epsilon_are_restored_by_the_next_normalizer() -> None:
    words = torch.randint(50, (24, 8), generator=torch.Generator().manual_seed(0))
    assert "epsilon too large" not in dict(causes(Small(1e-5), words, Y))
    assert "epsilon too large" in dict(causes(Small(1e3), words, Y))


def test_size_that_the_code_leaves_open_may_equal_another_one() -> None:
    x = batch(24, 3, 4, 8)

    def cut(*sizes: int) -> nn.Module:
        torch.manual_seed(0)
        read = nn.Linear(24, 32)
        return nn.Sequential(Call(lambda x: x.reshape(24 if len(x) == 24 else len(x), *sizes)), read, nn.Flatten(),
                             nn.ReLU(), nn.Linear(128, 12))  # fmt: skip

    assert causes(cut(-1, 24), x, Y) == []
    assert causes(cut(4, 24), x, Y)[0][0] == "reshape of dimensions"


def test_loss_of_the_outputs_alone_has_no_sign() -> None:
    def variance(views: tuple[Tensor, Tensor], _: Tensor) -> Tensor:
        return F.mse_loss(*views) + F.relu(1 - views[0].std(0)).mean()

    views = nn.Sequential(mlp(), Call(lambda z: (z, z.flip(1))))
    for shift in range(4):
        assert causes(views, X, (Y + shift) % 12, variance) == []
    assert causes(mlp(), X, Y, lambda z, y: -F.cross_entropy(z, y))[0][0] == "loss of the wrong sign"


def test_last_layer_before_rounding_is_where_the_signal_ends() -> None:
    bumps = mlp(Call(lambda x: torch.exp(-(x.square() + 20))))
    assert ("no signal", "0") in causes(bumps, X, Y)
    assert causes(mlp(Call(lambda x: torch.exp(-x.square()))), X, Y) == []


class Assigned(nn.Module):
    """Items that are written to the places of a table, each to its own or several to one."""

    def __init__(self, places: Tensor) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.items, self.head, self.places = nn.Linear(4, 16), nn.Linear(16, 12), places

    def forward(self, x: Tensor) -> Tensor:
        table = torch.zeros(len(x), 8, 16)
        table[:, self.places] = self.items(x)
        return self.head(table.relu().sum(1))  # type: ignore[no-any-return]


def test_items_of_one_index_overwrite_each_other() -> None:
    x = batch(24, 8, 4)
    assert causes(Assigned(torch.randperm(8)), x, Y) == []
    assert causes(Assigned(torch.arange(8) // 2), x, Y) == [("items overwritten", "items")]
