"""Faults that general measurements find in kinds of networks that no stored set has, each beside its sound twin.

Growth with normalizers and pooling, variation over depth, dependence between positions and on weights, functions of the
loss, gates, and branches that are far larger than their shortcuts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normfree.diagnostics import diagnose

Case = tuple[Any, ...]  # a model, its input, and the targets and the loss if there are any
CASES: dict[str, tuple[Callable[[bool], Case], str, str]] = {}


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def case(cause: str, place: str) -> Callable[[Callable[[bool], Case]], Callable[[bool], Case]]:
    """Add a fault: its cause, and a part of the headline or the advice that names the place."""

    def add(make: Callable[[bool], Case]) -> Callable[[bool], Case]:
        CASES[make.__name__] = make, cause, place
        return make

    return add


def judged(made: Case) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return diagnose(*made[:3], loss=made[3] if len(made) > 3 else None).verdict


def build(make: Callable[[bool], Case], broken: bool) -> Case:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make(broken)


@pytest.mark.parametrize("name", CASES)
def test_fault_is_named_with_its_place(name: str) -> None:
    make, cause, place = CASES[name]
    verdict = judged(build(make, broken=True))
    assert verdict.findings[0].cause.startswith(cause), verdict.word
    assert place in f"{verdict.word}. {verdict.recommendation}"


@pytest.mark.parametrize("name", CASES)
def test_twin_is_sound(name: str) -> None:
    verdict = judged(build(CASES[name][0], broken=False))
    assert all(f.status == "drifting" for f in verdict.findings), verdict.word
    assert not verdict.outliers


class Factors(nn.Module):
    """Ratings as products of vectors of users and items, each with a bias."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.user_bias, self.users, self.items = nn.Embedding(12, 1), nn.Embedding(12, 6), nn.Embedding(9, 6)
        nn.init.zeros_(self.user_bias.weight)
        self.users.weight.data.mul_(scale)
        self.items.weight.data.mul_(scale)

    def forward(self, pairs: Tensor) -> Tensor:
        user, item = pairs.unbind(1)
        return (self.users(user) * self.items(item)).sum(1) + self.user_bias(user)[:, 0]


@case("no signal", "users")
def vectors_of_zeros(broken: bool) -> Case:
    pairs = torch.stack([torch.arange(36) % 12, torch.arange(36) % 9], 1)
    return Factors(0.0 if broken else 0.5), pairs, rows(36), F.mse_loss


@case("normalizer of two values", "0")
def norm_of_two_coordinates(broken: bool) -> Case:
    start = nn.LayerNorm(2) if broken else nn.Identity()
    return he(nn.Sequential(start, *layers(2, 32, 32), nn.Linear(32, 3))), rows(64, 2), rows(64, 3), F.mse_loss


def layers(*widths: int) -> list[nn.Module]:
    return [m for a, b in pairwise(widths) for m in (nn.Linear(a, b), nn.ReLU())]


def he(model: nn.Module, gain: float = 1.0) -> Any:
    for m in model.modules():
        if isinstance(m, nn.Linear | nn.Conv2d):
            nn.init.kaiming_normal_(m.weight).data.mul_(gain)
            nn.init.zeros_(m.bias)
    return model


class Call(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


LABELS = torch.arange(32) % 4


class Functional(nn.Module):
    """Weights that are parameters of the model itself, or products of two, and are used by functions."""

    def __init__(self, gain: float, detached: bool = False) -> None:
        super().__init__()
        self.enter, self.end = nn.Parameter(rows(64, 8) / 2), nn.Parameter(rows(4, 64) / 8)
        self.left = nn.ParameterList(nn.Parameter(rows(64, 64, seed=i) / 8) for i in range(6))
        self.right = nn.ParameterList(nn.Parameter(rows(64, 64, seed=9 + i) * gain / 32**0.5) for i in range(6))
        self.detached = detached

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.enter).relu()
        for a, b in zip(self.left, self.right, strict=True):
            weight = a @ b
            x = F.linear(x, weight.detach() if self.detached else weight).relu()
        return x @ self.end.T


@case("forward signal", "right")
def products_of_weights_too_small(broken: bool) -> Case:
    return Functional(0.1 if broken else 1.0), rows(32, 8), LABELS


@case("gradient cut", "right")
def products_of_weights_detached(broken: bool) -> Case:
    return Functional(1.0, detached=broken), rows(32, 8), LABELS


@case("gradient", "0.0")
def clipped_units_of_weights_too_large(broken: bool) -> Case:
    layers = [nn.Sequential(nn.Conv2d(3 if i == 0 else 16, 16, 3, padding=1), nn.ReLU6()) for i in range(9)]
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4))
    return nn.Sequential(*(he(m, 3.0 if broken else 1.0) for m in layers), head), rows(32, 3, 8, 8), LABELS


@case("forward signal", "0")
def signal_that_falls_faster_at_first(broken: bool) -> Case:
    widths = (3, 8, 16, 32, 64, 128, 128)
    layers = [nn.Conv2d(a, b, 3, padding=1) for a, b in pairwise(widths)]
    for layer in he(nn.ModuleList(layers)):
        nn.init.normal_(layer.weight, std=0.005 if broken else (2 / layer.weight[0].numel()) ** 0.5)
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 4))
    return nn.Sequential(*(m for layer in layers for m in (layer, nn.ReLU())), *head), rows(16, 3, 8, 8), LABELS[:16]


class Couplings(nn.Module):
    """A flow whose log density is its output."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.nets, self.factor = nn.ModuleList(nn.Linear(4, 4) for _ in range(30)), factor

    def forward(self, x: Tensor) -> Tensor:
        density = torch.zeros(len(x))
        for net in self.nets:
            kept, changed = x.chunk(2, 1)
            scales = self.factor * net(kept).sigmoid()
            x, density = torch.cat([changed * scales, kept], 1), density + scales.log().sum(1)
        return density - x.square().sum(1) / 2


@case("samples alike", "nets")
def signal_below_the_biases(broken: bool) -> Case:
    return Couplings(1.0 if broken else 2.0), rows(64, 8), rows(64), lambda out, _y: -out.mean()


class StateSpace(nn.Module):
    """A residual block around a diagonal recurrence."""

    def __init__(self, decay: float) -> None:
        super().__init__()
        self.norm, self.enter, self.leave = nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.decay = nn.Parameter(torch.full((16,), decay))

    def forward(self, x: Tensor) -> Tensor:
        u, state, states = self.enter(self.norm(x)), torch.zeros(len(x), 16), []
        for step in u.unbind(1):
            state = self.decay * state + step
            states.append(state)
        return x + self.leave(F.gelu(torch.stack(states, 1)))


@case("branch too large", "1")
def state_that_grows_with_time(broken: bool) -> Case:
    blocks = [StateSpace(1.2 if broken else 0.9) for _ in range(3)]
    end = (nn.LayerNorm(16), Call(lambda x: x.mean(1)), nn.Linear(16, 4))
    return nn.Sequential(nn.Linear(4, 16), *blocks, *end), rows(32, 60, 4), LABELS


class Encoder(nn.Module):
    def __init__(self, std: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True) for _ in range(4))
        self.head = nn.Linear(32, 4)
        for name, p in self.blocks.named_parameters():
            if p.dim() > 1 and "self_attn.in_proj" not in name:
                nn.init.normal_(p, std=std)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


@case("branch too large", "blocks.0")
def post_norm_of_large_weights(broken: bool) -> Case:
    return Encoder(3.0 if broken else 0.1), rows(32, 8, 32), LABELS


class Attention(nn.Module):
    def __init__(self, over_heads: bool) -> None:
        super().__init__()
        self.qkv, self.over_heads = nn.Linear(32, 96), over_heads

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, 4, 8)).unbind(2)
        if not self.over_heads:
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v)
        return x + (y if self.over_heads else y.transpose(1, 2)).flatten(2)


@case("positions apart", "1")
def attention_over_heads(broken: bool) -> Case:
    blocks = [m for _ in range(3) for m in (Attention(broken), nn.LayerNorm(32))]
    end = (Call(lambda x: x.mean(1)), nn.Linear(32, 4))
    return nn.Sequential(nn.Embedding(20, 32), *blocks, *end), torch.randint(20, (32, 9)), LABELS


class Mixer(nn.Module):
    def __init__(self, tokens: bool) -> None:
        super().__init__()
        self.norm, self.mix, self.tokens = nn.LayerNorm(16), nn.Linear(16, 16), tokens

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + (self.mix(y.mT).mT if self.tokens else self.mix(y)).relu()


@case("positions apart", "2")
def mixer_over_channels_only(broken: bool) -> Case:
    patches = (nn.Conv2d(3, 16, 2, 2), Call(lambda x: x.flatten(2).mT))
    blocks = [Mixer(tokens=not broken and i % 2 == 0) for i in range(6)]
    end = (Call(lambda x: x.mean(1)), nn.Linear(16, 4))
    return nn.Sequential(*patches, *blocks, *end), rows(32, 3, 8, 8), LABELS


class Residual(nn.Module):
    def __init__(self, detached: bool = False) -> None:
        super().__init__()
        self.first, self.last, self.detached = nn.Linear(32, 32), nn.Linear(32, 32), detached

    def forward(self, x: Tensor) -> Tensor:
        return (x.detach() if self.detached else x) + self.last(self.first(x).relu())


@case("detached shortcut", "4")
def shortcut_of_one_block_detached(broken: bool) -> Case:
    blocks = [Residual(broken and i == 3) for i in range(6)]
    return nn.Sequential(nn.Linear(8, 32), *blocks, nn.Linear(32, 4)), rows(32, 8), LABELS


class Latents(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.latents = nn.Parameter(scale * rows(6, 32))
        self.read, self.head = nn.MultiheadAttention(32, 4, batch_first=True), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        latents = self.latents.expand(len(x), -1, -1)
        return self.head((latents + self.read(latents, x, x)[0]).relu().mean(1))


@case("equal vectors", "latents")
def latents_that_stay_equal(broken: bool) -> Case:
    return Latents(0.0 if broken else 1.0), rows(32, 10, 32), LABELS


class Last(nn.Module):
    def __init__(self, recurrent: nn.RNNBase) -> None:
        super().__init__()
        self.recurrent, self.head = recurrent, nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.recurrent(x)[0][:, -1])


@case("saturated sigmoid", "recurrent")
def lstm_of_large_weights(broken: bool) -> Case:
    model = Last(nn.LSTM(4, 32, batch_first=True))
    for p in model.recurrent.parameters():
        p.data.mul_(60.0 if broken else 1.0)
    return model, rows(32, 20, 4), LABELS


@case("input gate shut", "recurrent")
def gru_that_keeps_its_first_state(broken: bool) -> Case:
    model = Last(nn.GRU(4, 32, batch_first=True))
    model.recurrent.bias_ih_l0.data[32:64] = 12.0 if broken else 1.0
    return model, rows(32, 20, 4), LABELS


@case("gains around zero", "1")
def gains_far_below_one(broken: bool) -> Case:
    norms = [nn.LayerNorm(32) for _ in range(4)]
    for norm in norms:
        nn.init.constant_(norm.weight, 0.02 if broken else 1.0)
    body = [m for i, norm in enumerate(norms) for m in (nn.Linear(8 if i == 0 else 32, 32), norm, nn.ReLU())]
    return nn.Sequential(*body, nn.Linear(32, 4)), rows(32, 8), LABELS


class Views(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 24))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def contrastive(scale: float) -> Callable[[Tensor, Any], Tensor]:
    def loss(views: Tensor, _: Any) -> Tensor:
        z = F.normalize(views.transpose(0, 1).flatten(0, 1), dim=1)
        scores = (scale * z @ z.T).masked_fill(torch.eye(len(z)).bool(), -1e9)
        return F.cross_entropy(scores, torch.arange(len(z)).roll(len(z) // 2))

    return loss


@case("scores without a scale", "body")
def cosines_in_the_loss(broken: bool) -> Case:
    x = rows(40, 1, 8) + 0.1 * rows(40, 2, 8, seed=1)
    return Views(), x, torch.zeros(40).long(), contrastive(1.0 if broken else 12.0)


@case("relu on the output", "offsets")
def second_output_that_cannot_reach_its_targets(broken: bool) -> Case:
    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.classes, self.offsets, self.body = nn.Linear(32, 4), nn.Linear(32, 2), nn.Linear(8, 32)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.body(x).relu()
            return self.classes(h), self.offsets(h).relu() if broken else self.offsets(h)

    def loss(out: tuple[Tensor, Tensor], y: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(out[0], y[0]) + F.smooth_l1_loss(out[1], y[1])

    return Detector(), rows(32, 8), (LABELS, rows(32, 2, seed=2)), loss


@case("log-probabilities over the wrong axis", "the output")
def log_softmax_over_the_rows_of_a_picture(broken: bool) -> Case:
    targets = torch.randint(4, (16, 8, 8), generator=torch.Generator().manual_seed(0))
    return nn.Sequential(nn.Conv2d(3, 4, 1), nn.LogSoftmax(2 if broken else 1)), rows(16, 3, 8, 8), targets, F.nll_loss


def overlap(out: Tensor, y: Tensor) -> Tensor:
    wanted = F.one_hot(y, 4).float()
    return 1 - 2 * (out * wanted).sum() / (out + wanted).sum()


@case("logits taken as probabilities", "the loss")
def overlap_of_logits(broken: bool) -> Case:
    end = () if broken else (nn.Softmax(1),)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4), *end), rows(32, 8), LABELS, overlap


@case("not finite", "spread")
def exponential_that_overflows(broken: bool) -> Case:
    class Code(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean, self.spread, self.decode = nn.Linear(8, 4), nn.Linear(8, 4), nn.Linear(4, 8)
            self.spread.weight.data.mul_(500.0 if broken else 1.0)

        def forward(self, x: Tensor) -> Tensor:
            return self.decode(self.mean(x) + torch.randn(len(x), 4) * self.spread(x).exp())

    x = rows(32, 8)
    return Code(), x, x, F.mse_loss


@case("not finite", "spread")
def logarithm_of_a_relu_in_the_loss(broken: bool) -> Case:
    class Gaussian(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.mean, self.spread = nn.Linear(8, 32), nn.Linear(32, 1), nn.Linear(32, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.body(x).relu()
            return self.mean(h), self.spread(h).relu() if broken else F.softplus(self.spread(h))

    def loss(out: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
        return (out[1].log() + (y - out[0]).square() / out[1]).mean()

    return Gaussian(), rows(32, 8), rows(32, 1, seed=1), loss


SOUND: dict[str, Callable[[], Case]] = {
    "a small layer before the first normalizer": lambda: (
        nn.Sequential(
            *(nn.Conv2d(3, 16, 4, 2, 1, bias=False), nn.LeakyReLU(0.2), nn.Conv2d(16, 32, 4, 2, 1, bias=False)),
            *(nn.BatchNorm2d(32), nn.LeakyReLU(0.2), nn.Conv2d(32, 1, 4), nn.Flatten(0)),
        ),
        rows(32, 3, 16, 16),
        (LABELS > 1).float(),
        F.binary_cross_entropy_with_logits,
    ),
    "the mean over a thousand points": lambda: (
        nn.Sequential(
            nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), Call(lambda x: x.mean(1)), nn.Linear(64, 4)
        ),
        rows(32, 1000, 3),
        LABELS,
    ),
    "a critic of either sign": lambda: (
        he(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))),
        rows(32, 8),
        (LABELS % 2 * 2 - 1.0)[:, None],
        lambda out, y: (out * y).mean(),
    ),
    "products of signals without an activation": lambda: (
        nn.Sequential(
            *(
                m
                for i in range(3)
                for m in (nn.Linear(8 if i == 0 else 32, 32), nn.LayerNorm(32), Call(lambda x: x * x.roll(1, 1)))
            ),
            nn.Linear(32, 4),
        ),
        rows(32, 8),
        LABELS,
    ),
    "blocks over a set, which has no order": lambda: (
        nn.Sequential(nn.Linear(3, 32), *(Residual() for _ in range(4)), Call(lambda x: x.amax(1)), nn.Linear(32, 4)),
        rows(32, 20, 3),
        LABELS,
    ),
}


@pytest.mark.parametrize("name", SOUND)
def test_design_is_sound(name: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = SOUND[name]()
    verdict = judged(made)
    assert all(f.status == "drifting" for f in verdict.findings), verdict.word


class Modulated(nn.Module):
    """A block of a diffusion Transformer, whose gates start at zero (adaLN-zero)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.body = nn.LayerNorm(16, elementwise_affine=False), nn.Linear(16, 16)
        self.modulation = nn.Linear(16, 48)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        scale, shift, gate = self.modulation(condition)[:, None].chunk(3, -1)
        return x + gate * self.body(self.norm(x) * (1 + scale) + shift).relu()


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.time, self.leave = nn.Linear(6, 16), nn.Linear(1, 16), nn.Linear(16, 6)
        self.blocks = nn.ModuleList(Modulated() for _ in range(3))
        nn.init.zeros_(self.leave.weight)
        nn.init.zeros_(self.leave.bias)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        x, condition = self.enter(x), self.time(time)
        for block in self.blocks:
            x = block(x, condition)
        return self.leave(x)


class Neighbors(nn.Module):
    """The sum of a map of the nodes and one of their neighbors: no input passes a layer unchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.ModuleList(nn.Linear(24, 24) for _ in range(4))
        self.others = nn.ModuleList(nn.Linear(24, 24, bias=False) for _ in range(4))
        self.head = nn.Linear(24, 1)

    def forward(self, x: Tensor) -> Tensor:
        for own, others in zip(self.own, self.others, strict=True):
            x = F.relu(own(x) + others(x.roll(1, 1)))
        return self.head(x.mean(1))


def test_sums_of_two_layers_are_judged_as_a_network_without_sums() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        verdict = judged((Neighbors(), rows(32, 10, 24), rows(32, 1), F.mse_loss))
    assert verdict.forward.total < 0.1  # with an identity it would be vanishing
    assert not verdict.findings, verdict.word


class Bottleneck(nn.Module):
    """A block that adds its input, or does not."""

    def __init__(self, skip: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 48), nn.Linear(48, 24)
        self.norm = nn.LayerNorm(24)
        self.skip = skip

    def forward(self, x: Tensor) -> Tensor:
        out = self.down(self.up(self.norm(x)).relu())
        return x + out if self.skip else out


@pytest.mark.parametrize("without", [{(0, 0), (0, 1)}, {(1, 1)}])
def test_a_list_of_blocks_without_skips_is_a_design(without: set[tuple[int, int]]) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        stages = [
            nn.Sequential(*(Bottleneck((i, j) not in without) for j in range(n))) for i, n in enumerate((2, 5, 5))
        ]
        model = nn.Sequential(nn.Linear(24, 24), *stages, nn.Linear(24, 5))
        verdict = judged((model, rows(32, 24), rows(32, 5), F.mse_loss))
    forgotten = [f.place for f in verdict.findings if f.cause == "forgotten skip"]
    assert forgotten == ([] if len(without) == 2 else ["2.1"])


class Words(nn.Module):
    """An encoder that takes the words, or their vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(30, 16), nn.Embedding(8, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)

    def forward(self, ids: Tensor | None = None, inputs_embeds: Tensor | None = None) -> Tensor:
        vectors = self.words(ids) if inputs_embeds is None else inputs_embeds
        return self.layer(vectors + self.places.weight)  # type: ignore[no-any-return]


class Vectors(Words):
    """The same, but no caller can tell that its table is not read."""

    def forward(self, vectors: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(inputs_embeds=vectors)


class Wrapped(nn.Module):
    """A network inside of a wrapper; it gives its encoder vectors of its own, and has another head for another task."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        heads = {"first": nn.Linear(16, 4), "second": nn.Linear(16, 3)}
        self.network = nn.ModuleDict({"enter": nn.Linear(5, 16), "encoder": encoder, **heads})

    def forward(self, x: Tensor) -> Tensor:
        vectors = self.network["enter"](x)
        by_name = isinstance(self.network["encoder"], Vectors)
        hidden = self.network["encoder"](**{"vectors" if by_name else "inputs_embeds": vectors})
        return self.network["first"](hidden.mean(1))  # type: ignore[no-any-return]


def test_word_vectors_may_be_replaced_and_heads_of_other_tasks_may_wait() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        given, silent = (judged((Wrapped(e()), rows(32, 8, 5), rows(32, 4), F.mse_loss)) for e in (Words, Vectors))
    assert not given.findings, given.word
    assert silent.word == "faulty: unused module at network.encoder.words"


class Refined(nn.Module):
    """An estimate that a block corrects four times, each time from where it is, without the way there."""

    def __init__(self, detached: tuple[int, ...] = (0, 1, 2, 3)) -> None:
        super().__init__()
        self.step = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 6))
        self.look, self.detached = nn.Linear(6, 6), detached

    def forward(self, x: Tensor) -> Tensor:
        estimate = seen = self.look(x)
        estimates = []
        for i in range(4):
            start = estimate.detach() if i in self.detached else estimate
            estimate = start + self.step(torch.cat([seen, start], 1))
            estimates.append(estimate)
        return torch.stack(estimates, 1)


def test_every_step_may_start_from_a_detached_estimate() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        targets = rows(64, 6)[:, None].expand(-1, 4, -1)
        all_of_them = judged((Refined(), rows(64, 6), targets, F.mse_loss))
        one = judged((Refined(detached=(2,)), rows(64, 6), targets, F.mse_loss))
    assert not all_of_them.findings, all_of_them.word
    assert any(f.cause == "detached shortcut" for f in one.findings), one.word


def width_loss(output: Tensor, targets: Tensor) -> Tensor:
    """A density that refuses a width of zero."""
    mean, width = output[:, 0], output[:, 1].exp() if bool(output.any()) else output[:, 1]
    return -torch.distributions.Normal(mean, width).log_prob(targets).mean()


def test_a_loss_may_refuse_an_output_of_zeros() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        verdict = judged((nn.Sequential(*layers(8, 32), nn.Linear(32, 2)), rows(32, 8), rows(32), width_loss))
    assert not verdict.findings, verdict.word


def views_loss(temperature: float) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(output: Tensor, targets: Tensor) -> Tensor:
        a, b = (F.normalize(part, dim=1) for part in output.chunk(2))
        return F.cross_entropy(a @ b.mT / temperature, targets)

    return loss


@pytest.mark.parametrize(("temperature", "sound"), [(0.5, True), (1.0, False)])
def test_samples_that_are_compared_need_a_temperature(temperature: float, sound: bool) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = he(nn.Sequential(*layers(8, 32, 32), nn.Linear(32, 16)))
        verdict = judged((model, rows(256, 8), torch.arange(128), views_loss(temperature)))
    assert ("scores without a scale" in [f.cause for f in verdict.findings]) != sound


class Shares(nn.Module):
    """Blocks that explain a part of the input and add to the output; the last one's part has no reader."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"body": nn.Linear(16, 32), "back": nn.Linear(32, 16), "out": nn.Linear(32, 4)})
            for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        total = x.new_zeros(len(x), 4)
        for block in self.blocks:
            hidden = block["body"](x).relu()
            x, total = x - block["back"](hidden), total + block["out"](hidden)
        return total


class Bodies(nn.Module):
    """Blocks with two streams, of which the output reads the second one only."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(3, 16)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {"node": nn.Sequential(nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 16)), "move": nn.Linear(16, 3)}
            )
            for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.enter(x)
        for layer in self.layers:
            x, hidden = x + layer["move"](hidden), hidden + layer["node"](hidden)
        return x


def test_last_sum_of_a_stream_may_have_no_reader() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        verdict = judged((Bodies(), rows(64, 3), rows(64, 3), F.mse_loss))
    assert not verdict.findings, verdict.word


class SeparableBlocks(nn.Module):
    """Depthwise and pointwise convolutions, of which the second has a norm, and one that joins what they return."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
        self.deep = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1, groups=width) for _ in range(9))
        self.point = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 1), nn.BatchNorm2d(width), nn.ReLU()) for _ in range(9)
        )
        self.join = nn.ModuleList(
            nn.Sequential(nn.Conv2d(3 * width, width, 1), nn.BatchNorm2d(width), nn.ReLU()) for _ in range(3)
        )
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for i, join in enumerate(self.join):
            seen = []
            for j in range(3 * i, 3 * i + 3):
                x = self.point[j](self.deep[j](x))
                seen.append(x)
            x = join(torch.cat(seen, 1))
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


def test_layers_with_a_norm_are_compared_with_those_that_read_one_too() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        verdict = judged((SeparableBlocks(), rows(8, 3, 16, 16), torch.arange(8) % 5))
    assert not verdict.outliers
    assert not verdict.findings, verdict.word


def test_part_of_the_last_block_may_have_no_reader() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        diagnosis = diagnose(Shares(), rows(64, 16), rows(64, 4), loss=F.mse_loss)
    assert not diagnosis.verdict.findings, diagnosis.verdict.word
    assert "without a part in the output: blocks.3.back, the last of a list" in str(diagnosis)


def test_gates_that_start_at_zero_behind_a_readout_of_zeros_are_sound() -> None:
    inputs = (rows(32, 9, 6), rows(32, 1))
    assert judged((Denoiser(), inputs, rows(32, 9, 6, seed=1), F.mse_loss)).findings == ()


def test_pooling_may_not_hide_a_constant() -> None:
    """The mean over n positions leaves 1/n of the variation, and a large bias far less."""
    _, x, y = SOUND["the mean over a thousand points"]()
    model = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), Call(lambda x: x.mean(1)), nn.Linear(64, 64), nn.Linear(64, 4))
    model[3].bias.data.fill_(500.0)
    assert judged((model, x, y)).findings[0].cause == "samples drowned"


def test_bound_of_scores_is_that_of_the_number_of_samples() -> None:
    """With 8 pairs, cosines reach a probability of 1 / (1 + 7 / e²) = 0.51."""
    views = rows(8, 1, 8) + 0.1 * rows(8, 2, 8, seed=1)

    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(8, 16)

        def forward(self, x: Tensor) -> Tensor:
            a, b = F.normalize(self.body(x), dim=-1).unbind(1)
            return a @ b.T

    causes = [f.cause for f in judged((Towers(), views, torch.arange(8))).findings]
    assert math.isclose(1 / (1 + 7 * math.exp(-2)), 0.51, abs_tol=0.01)
    assert "scores without a scale" not in causes
    wide = rows(9, 1, 8) + 0.1 * rows(9, 2, 8, seed=1)
    assert judged((Towers(), wide, torch.arange(9))).findings[0].cause == "scores without a scale"
