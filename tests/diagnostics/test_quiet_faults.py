"""Faults that leave the signal sound or end it early, in networks of no stored set, each beside healthy twins."""

from __future__ import annotations

import copy
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
WORDS = torch.arange(24 * 10).reshape(24, 10) % 29


def causes(model: nn.Module, x: Any = X, targets: Any = None, loss: Any = None) -> list[tuple[str, str]]:
    with torch.random.fork_rng(devices=[]):
        return [(f.cause, f.place) for f in diagnose(model, x, targets, loss=loss).verdict.findings]


class Called(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Attending(nn.Module):
    """Reads words by one attention, which gets a mask of the positions that are seen."""

    def __init__(self, kind: str, seen: Tensor) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(29, 32), nn.Embedding(10, 32)
        self.keys, self.head, self.kind, self.seen = nn.Linear(32, 96), nn.Linear(32, 12), kind, seen
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True) if kind == "module" else nn.Identity()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places.weight
        if self.kind == "module":
            return self.head((x + self.attention(x, x, x, attn_mask=~self.seen)[0]).mean(1))  # type: ignore[no-any-return]
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.keys(x).chunk(3, -1))
        if self.kind == "fused":
            read = F.scaled_dot_product_attention(q, k, v, attn_mask=self.seen)
        else:
            scores = q @ k.mT / 8**0.5
            hidden = scores.masked_fill(~self.seen, -1e9) if self.kind == "filled" else scores - 1e9 * ~self.seen
            read = hidden.softmax(-1) @ v
        return self.head((x + read.transpose(1, 2).flatten(2)).mean(1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ["module", "fused", "filled", "added"])
def test_mask_that_leaves_each_position_itself_only_is_named(kind: str) -> None:
    place = "attention" if kind == "module" else "keys"
    assert ("mask of the diagonal", place) in causes(Attending(kind, torch.eye(10).bool()), WORDS, Y)
    square = torch.ones(10, 10)
    for seen in (square.tril(), square.tril(1).triu(-1), square - torch.eye(10), square):
        assert causes(Attending(kind, seen.bool()), WORDS, Y) == []


class Committee(nn.Module):
    """Parallel parts whose mean, or whose chain, is read."""

    def __init__(self, part: nn.Module, *, copied: bool, shared: bool = True, series: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(copy.deepcopy(part) for _ in range(3))
        if not copied:
            for p in self.parts.parameters():
                nn.init.normal_(p, std=0.2)
        self.head, self.shared, self.series = nn.Linear(32, 12), shared, series

    def forward(self, x: Tensor) -> Tensor:
        if self.series:
            for part in self.parts:
                x = x + part(x)
            return self.head(x)  # type: ignore[no-any-return]
        inputs = [x if self.shared else x.roll(i, 1) for i in range(len(self.parts))]
        return self.head(torch.stack([part(z) for part, z in zip(self.parts, inputs, strict=True)]).mean(0))  # type: ignore[no-any-return]


PARTS = {
    "layers": lambda: nn.Linear(32, 32),
    "networks": lambda: nn.Sequential(nn.Linear(32, 24), nn.GELU(), nn.Linear(24, 32)),
    "convolutions": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 32)), nn.Conv1d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv1d(4, 1, 1), nn.Flatten()
    ),
}


@pytest.mark.parametrize("name", PARTS)
def test_parallel_copies_that_stay_equal_are_named(name: str) -> None:
    torch.manual_seed(1)
    part = PARTS[name]()
    named = dict(causes(Committee(part, copied=True), X, Y))
    assert named["copies of one module"].startswith("parts.0")
    for sound in ({"copied": False}, {"copied": True, "shared": False}, {"copied": True, "series": True}):
        found = [c for c, _ in causes(Committee(part, **sound), X, Y)]
        assert "copies of one module" not in found, sound


def test_copies_in_series_and_frozen_copies_are_no_fault() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    assert causes(nn.Sequential(encoder, Called(lambda h: h.mean(1)), nn.Linear(32, 12)), batch(24, 6, 32), Y) == []
    frozen = Committee(nn.Linear(32, 32), copied=True)
    frozen.parts.requires_grad_(False)
    assert "copies of one module" not in [c for c, _ in causes(frozen, X, Y)]


def normed(norm: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 40), norm, nn.ReLU(), nn.Linear(40, 12))


def with_statistics(norm: nn.BatchNorm1d) -> nn.Module:
    norm.running_mean = 0.1 * torch.randn(40)
    return norm


def test_running_statistics_that_never_move_are_named() -> None:
    assert causes(normed(nn.BatchNorm1d(40, momentum=0.0)), X, Y) == [("statistics never move", "1")]
    moving = [nn.BatchNorm1d(40), nn.BatchNorm1d(40, momentum=None), nn.BatchNorm1d(40, momentum=1e-3)]
    unused = nn.BatchNorm1d(40, momentum=0.0, track_running_stats=False)
    loaded = with_statistics(nn.BatchNorm1d(40, momentum=0.0))
    for norm in (*moving, unused, loaded, nn.BatchNorm1d(40, momentum=0.0).eval()):
        assert causes(normed(norm), X, Y) == []


class Placed(nn.Module):
    """Reads words whose places, and whose kinds, it may forget to add."""

    def __init__(self, *used: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places, self.kinds = nn.Embedding(29, 32), nn.Embedding(10, 32), nn.Embedding(2, 32)
        self.body, self.head, self.used = nn.Linear(32, 32), nn.Linear(32, 12), used
        self.other_head = nn.Linear(32, 5)  # for another task

    def forward(self, ids: Tensor) -> Tensor:
        h = self.words(ids)
        h = h + self.places.weight if "places" in self.used else h
        h = h + self.kinds(ids % 2) if "kinds" in self.used else h
        return self.head(self.body(h).relu().mean(1))  # type: ignore[no-any-return]


def test_embedding_that_is_never_read_is_named_and_another_head_is_not() -> None:
    assert causes(Placed("kinds"), WORDS, Y) == [("unused module", "places")]
    assert causes(Placed("places"), WORDS, Y) == [("unused module", "kinds")]
    assert causes(Placed("places", "kinds"), WORDS, Y) == []


def pictures(start: Callable[[Tensor], Tensor]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Called(start), nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10))


WIDE = {
    "sum": lambda x: x / (x.to(x.dtype).abs().sum((1, 2, 3), keepdim=True) / 192),
    "squares": lambda x: x * 100 / (100 * x).square().sum((1, 2, 3), keepdim=True).sqrt(),
    "exponential": lambda x: x / (12 * x.abs()).exp().sum((1, 2, 3), keepdim=True).log(),
}


@pytest.mark.parametrize("name", WIDE)
def test_overflow_in_half_precision_before_the_first_weight_is_named(name: str) -> None:
    x = batch(16, 3, 8, 8)
    x = 1000 * x.abs() if name == "sum" else x
    usual = WIDE[name]

    def half(t: Tensor) -> Tensor:
        return usual(t.half()).float()

    for start, found in ((half, True), (usual, False)):
        model = pictures(start)
        model(x)
        assert (("half precision overflow", "0") in causes(model, x)) == found


STARTS = {
    "plain": lambda: nn.Sequential(nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 12)),
    "function": lambda: nn.Sequential(Called(F.relu), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 12)),
    "clamp": lambda: nn.Sequential(Called(lambda x: x.clamp_min(0)), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 12)),
}


@pytest.mark.parametrize("name", STARTS)
def test_first_activation_that_passes_nothing_is_named(name: str) -> None:
    torch.manual_seed(0)
    model = STARTS[name]()
    for negative in (-X.abs() - 0.1, -50 - 10 * X.abs()):
        assert causes(model, negative, Y)[0] == ("input all negative", "the input")
    for sound in (X, X.abs()):
        assert causes(model, sound, Y) == []
    reads = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 12))
    assert causes(reads, -X.abs() - 0.1, Y) == []  # weights of both signs
