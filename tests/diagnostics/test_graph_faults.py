"""Faults that the tensors of the autograd graph show, in networks of no stored set, each beside healthy twins."""

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
WORDS = torch.arange(24 * 10).reshape(24, 10) % 29 + 1
LENGTHS = torch.arange(24) % 6 + 4
PADDED = WORDS.masked_fill(torch.arange(10) >= LENGTHS[:, None], 0)


def causes(model: nn.Module, x: Any = X, targets: Any = None, loss: Any = None) -> list[tuple[str, str]]:
    with torch.random.fork_rng(devices=[]):
        return [(f.cause, f.place) for f in diagnose(model, x, targets, loss=loss).verdict.findings]


class Scored(nn.Module):
    """Scores of 12 classes, or of all pairs, from vectors of length 1."""

    def __init__(self, score: Callable[[Scored, Tensor, Tensor], Tensor], classes: int = 12) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 24))
        self.classes = nn.Parameter(torch.randn(classes, 24))
        self.scale = nn.Parameter(torch.ones(()))
        self.gains = nn.Parameter(torch.ones(classes, 1))
        self.score = score

    def forward(self, x: Tensor) -> Tensor:
        return self.score(self, self.body(x), self.classes)


def unit(t: Tensor) -> Tensor:
    return F.normalize(t, dim=-1)


UNSCALED = {
    "cosine_similarity": lambda _m, h, w: F.cosine_similarity(h[:, None], w[None], dim=-1),
    "matmul": lambda _m, h, w: unit(h) @ unit(w).T,
    "by hand": lambda _m, h, w: (h * h.square().sum(-1, keepdim=True).rsqrt()) @ (w / w.norm(dim=1, keepdim=True)).T,
    "einsum": lambda _m, h, w: torch.einsum("nd,cd->nc", unit(h), unit(w)),
    "divided": lambda _m, h, w: unit(h) @ unit(w).T / 1.2,
    "before": lambda _m, h, w: (unit(h) * 0.5) @ unit(w).T,
    "pairs": lambda _m, h, w: unit(h) @ unit(h + w[0]).T,
}
SCALED = {
    "fixed scale": lambda _m, h, w: 16 * unit(h) @ unit(w).T,
    "temperature": lambda _m, h, w: F.cosine_similarity(h[:, None], w[None], dim=-1) / 0.07,
    "learned scale": lambda m, h, w: m.scale * (unit(h) @ unit(w).T),
    "learned logarithm": lambda m, h, w: m.scale.exp() * (unit(h) @ unit(w).T),
    "learned temperature": lambda m, h, w: (unit(h) / m.scale) @ unit(w).T,
    "learned gains": lambda m, h, w: unit(h) @ (m.gains * unit(w)).T,
    "one side": lambda _m, h, w: unit(h) @ w.T,
    "normalized features": lambda _m, h, w: F.layer_norm(h, (24,)) @ unit(w).T,
    "bias": lambda m, h, w: F.linear(unit(h), unit(w), m.gains[:, 0]),
    "pairs": lambda _m, h, w: 15 * unit(h) @ unit(h + w[0]).T,
}


@pytest.mark.parametrize("name", UNSCALED)
def test_scores_that_cannot_be_confident_are_named(name: str) -> None:
    assert causes(Scored(UNSCALED[name]), X, Y)[0][0] == "scores without a scale"


@pytest.mark.parametrize("name", SCALED)
def test_scores_that_can_grow_are_no_fault(name: str) -> None:
    targets = torch.arange(24) if name == "pairs" else Y
    assert "scores without a scale" not in [cause for cause, _ in causes(Scored(SCALED[name]), X, targets)]


def test_bounded_scores_are_judged_with_the_loss_and_the_number_of_classes() -> None:
    cosines = UNSCALED["matmul"]
    assert causes(Scored(cosines), X, Y, lambda out, y: F.cross_entropy(20 * out, y)) == []
    assert causes(Scored(cosines), X, torch.randn(24, 12), F.mse_loss) == []
    assert causes(Scored(cosines, classes=3), X, Y % 3) == []  # e² / (e² + 2) = 0.79


def test_best_probability_is_that_of_the_best_vectors() -> None:
    """Against a softmax of the scores of a vector that points to its class, and away from all others."""
    signal = diagnose(Scored(UNSCALED["before"]), X, Y).signal
    (fact,) = signal.by_kind["scores without a scale"]
    best = torch.tensor([0.5, *[-0.5] * 11]).softmax(0)[0]
    assert fact.value == pytest.approx(float(best), rel=1e-4)


class Rooted(nn.Module):
    """A normalizer of 40 units that divides by a root, in the middle of a network."""

    def __init__(self, divide: Callable[[Tensor], Tensor], size: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.size = nn.Linear(32, 40), nn.Linear(40, 10), size
        self.norm = nn.Identity() if divide is None else Called(divide)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.size * self.first(x)))  # type: ignore[no-any-return]


class Called(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


ROOTS = {
    "rsqrt": lambda h: h * h.half().square().mean(-1, keepdim=True).rsqrt().float(),
    "upcast too late": lambda h: h * h.half().pow(2).mean(-1, keepdim=True).float().add(1e-5).rsqrt(),
    "sqrt": lambda h: h / h.half().square().sum(-1, keepdim=True).sqrt().float(),
    "power": lambda h: h * h.half().square().mean(-1, keepdim=True).pow(-0.5).float(),
}


@pytest.mark.parametrize("name", ROOTS)
def test_overflow_inside_a_normalizer_is_found(name: str) -> None:
    assert causes(Rooted(ROOTS[name], 900.0))[0] == ("half precision overflow", "norm")
    assert "half precision overflow" not in [cause for cause, _ in causes(Rooted(ROOTS[name], 1.0))]


def test_roots_in_single_precision_do_not_overflow() -> None:
    model = Rooted(lambda h: h * h.square().mean(-1, keepdim=True).rsqrt(), 900.0)
    assert "half precision overflow" not in [cause for cause, _ in causes(model)]


class Gated(nn.Module):
    """A state that keeps or takes a new value by a gate, layer by layer or step by step."""

    def __init__(self, bias: float, *, steps: bool = False, coupled: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.head, self.coupled = nn.Linear(32, 32), nn.Linear(32, 10), coupled
        count = 1 if steps else 6
        self.news, self.gates = (nn.ModuleList(nn.Linear(32, 32) for _ in range(count)) for _ in range(2))
        for gate in self.gates:
            nn.init.constant_(gate.bias, bias)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        for i in range(6):
            j = i % len(self.gates)
            share = self.gates[j](h).sigmoid()
            h = share * self.news[j](h).tanh() + (1 - share if self.coupled else 1) * h
        return self.head(h)  # type: ignore[no-any-return]


@pytest.mark.parametrize("steps", [False, True])
@pytest.mark.parametrize("coupled", [False, True])
def test_shut_gates_are_named(steps: bool, coupled: bool) -> None:
    assert causes(Gated(-15.0, steps=steps, coupled=coupled))[0][0] in ("saturated sigmoid", "shut branch")
    assert causes(Gated(-15.0, steps=steps, coupled=coupled))[0][1].startswith(("gates", "news"))
    for bias in (-3.0, -2.0):  # a highway may begin nearly shut
        assert causes(Gated(bias, steps=steps, coupled=coupled)) == []


def test_probabilities_of_rare_classes_are_no_gates() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10), nn.Sigmoid())
    nn.init.constant_(model[2].bias, -7.0)
    rare = (torch.rand(24, 10) < 0.001).float()
    assert causes(model, X, rare, F.binary_cross_entropy) == []
    with torch.no_grad():
        model[2].bias.zero_()
        model[2].weight.mul_(500.0)
    assert ("saturated sigmoid", "2") in causes(model, X, rare, F.binary_cross_entropy)


class Experts(nn.Module):
    def __init__(self, choose: Callable[[Tensor], tuple[Tensor, Tensor]], *, zero: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.switch, self.head = nn.Linear(32, 24), nn.Linear(24, 5, bias=False), nn.Linear(24, 10)
        self.parts = nn.ModuleList(nn.Sequential(nn.Linear(24, 24), nn.Tanh()) for _ in range(5))
        self.choose = choose
        if zero:
            nn.init.zeros_(self.switch.weight)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x).relu()
        weights, chosen = self.choose(self.switch(h))
        every = torch.stack([part(h) for part in self.parts], 1)
        taken = every.gather(1, chosen[..., None].expand(-1, -1, 24))
        return self.head(h + (weights[..., None] * taken).sum(1))  # type: ignore[no-any-return]


def two_of_scores(z: Tensor) -> tuple[Tensor, Tensor]:
    values, chosen = z.topk(2, -1)
    return values.softmax(-1), chosen


CHOICES = {
    "max": lambda z: tuple(t[:, None] for t in z.softmax(-1).max(-1)),
    "topk of probabilities": lambda z: z.softmax(-1).topk(2, -1),
    "topk of scores": two_of_scores,
}


@pytest.mark.parametrize("name", CHOICES)
def test_choice_by_ties_is_named(name: str) -> None:
    assert ("choice by ties", "switch") in causes(Experts(CHOICES[name], zero=True))
    assert causes(Experts(CHOICES[name], zero=False)) == []


def test_mixture_of_all_experts_may_start_even() -> None:
    """All of them get a gradient, and so does the layer of zeros."""
    every = Experts(lambda z: (z.softmax(-1), torch.arange(5).expand(len(z), 5)), zero=True)
    assert causes(every) == []


def test_zero_classifier_with_a_softmax_by_hand_is_no_choice() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 12), Called(lambda z: z - z.amax(1, True)))
    largest = nn.Sequential(*model[:3], Called(lambda z: z - z.max(1, keepdim=True).values))
    nn.init.zeros_(model[2].weight)
    nn.init.zeros_(model[2].bias)
    for net in (model, largest):
        assert "choice by ties" not in [cause for cause, _ in causes(net, X, Y)]


class Reading(nn.Module):
    """Reads padded sentences by an attention, as torch or the user writes it."""

    def __init__(self, kind: str, *, inverted: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(30, 32, padding_idx=0)
        self.places = nn.Parameter(0.1 * torch.randn(10, 32))
        if kind == "encoder":
            self.layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True, norm_first=True)
        elif kind == "weights":
            self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        else:
            self.keys = nn.Linear(32, 32)
        self.head = nn.Linear(32, 12)
        self.kind, self.inverted = kind, inverted

    def forward(self, ids: Tensor) -> Tensor:
        hidden = (ids != 0) if self.inverted else (ids == 0)
        x = self.words(ids) + self.places
        if self.kind == "encoder":
            return self.head(self.layer(x, src_key_padding_mask=hidden)[:, 0])  # type: ignore[no-any-return]
        if self.kind == "weights":
            seen = self.attention(x, x, x, key_padding_mask=hidden, need_weights=True)[0]
        elif self.kind == "fused":
            heads = self.keys(x).unflatten(-1, (4, 8)).transpose(1, 2)
            seen = F.scaled_dot_product_attention(heads, heads, heads, attn_mask=~hidden[:, None, None])
            seen = seen.transpose(1, 2).flatten(2)
        else:
            scores = self.keys(x) @ x.mT / 32**0.5
            seen = scores.masked_fill(hidden[:, None], -1e9).softmax(-1) @ x
        return self.head((x + seen)[:, 0])  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ["encoder", "weights", "fused", "by hand"])
def test_inverted_padding_mask_is_named(kind: str) -> None:
    found = [cause for cause, _ in causes(Reading(kind, inverted=True), PADDED, Y)]
    assert "padding attended to" in found
    assert causes(Reading(kind, inverted=False), PADDED, Y) == []


class Unmasked(Reading):
    """The same without a mask: a flaw, but words are read."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places
        return self.head(self.layer(x)[:, 0])  # type: ignore[no-any-return]


def test_missing_padding_mask_is_not_an_inverted_one() -> None:
    assert causes(Unmasked("encoder", inverted=False), PADDED, Y) == []
    assert causes(Unmasked("encoder", inverted=False), WORDS, Y) == []  # no padding at all


class Dense(nn.Module):
    """Labels every pixel, or every step of a series."""

    def __init__(self, end: Callable[[Tensor], Tensor], dims: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.Conv2d if dims == 2 else nn.Conv1d
        self.body = nn.Sequential(layer(3, 16, 3, padding=1), nn.ReLU(), layer(16, 5, 1))
        self.end = end

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.body(x))


MIXED = {
    "reshape": (2, lambda z: z.reshape(-1, 5)),
    "view of a batch": (2, lambda z: z.view(len(z), -1, 5).flatten(0, 1)),
    "upsampled": (2, lambda z: F.interpolate(z, scale_factor=2).reshape(-1, 5)),
    "series": (1, lambda z: z.reshape(-1, 5)),
}
PERMUTED = {
    "permute": (2, lambda z: z.permute(0, 2, 3, 1).reshape(-1, 5)),
    "flatten first": (2, lambda z: z.flatten(2).mT.reshape(-1, 5)),
    "upsampled": (2, lambda z: F.interpolate(z, scale_factor=2).movedim(1, -1).reshape(-1, 5)),
    "series": (1, lambda z: z.mT.reshape(-1, 5)),
    "one place": (2, lambda z: z[:, :, 2, 3].reshape(-1, 5)),
    "mean": (2, lambda z: z.mean((2, 3)).view(-1, 5)),
}


def mixed(dims: int, end: Callable[[Tensor], Tensor]) -> bool:
    torch.manual_seed(0)
    x = torch.randn(12, 3, *[10] * dims)
    model = Dense(end, dims)
    targets = torch.randint(5, (len(model(x)),))
    return ("reshape of dimensions", "body.2") in causes(model, x, targets)


@pytest.mark.parametrize("name", MIXED)
def test_reshape_that_exchanges_dimensions_is_named(name: str) -> None:
    assert mixed(*MIXED[name])


@pytest.mark.parametrize("name", PERMUTED)
def test_classes_that_are_moved_to_the_end_are_no_fault(name: str) -> None:
    assert not mixed(*PERMUTED[name])
