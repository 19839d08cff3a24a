"""A converted model starts near its original and learns, or it is refused, or a note says so."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import normfree as nf
from normed_blocks import Block, X, network
from normfree.conversion import load_converted, save_converted
from remedies import named_methods, refusal, untried_methods

D = X.shape[1]
METHODS = ("fixup", "skipinit", "rezero", "nf", "wn", "dyt")


def body(blocks: int = 3) -> nn.Sequential:
    return network(blocks)[:-1]


def moving(model: nn.Module, loss: Callable[[nn.Module], Tensor], steps: int = 40) -> set[str]:
    """The parameters that move within some steps of AdamW."""
    start = {name: value.detach().clone() for name, value in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()
    return {name for name, value in model.named_parameters() if not torch.equal(value, start[name])}


class Pair(nn.Module):
    """The squared distance of two outputs, or the outputs themselves."""

    def __init__(self, compared: bool = True) -> None:
        super().__init__()
        self.body, self.head, self.compared = body(), nn.Linear(D, 4), compared

    def forward(self, x: Tensor, y: Tensor) -> Any:
        a, b = self.head(self.body(x)), self.head(self.body(y))
        return (a - b).square().sum(-1) if self.compared else (a, b)


class Positive(nn.Module):
    """An output that is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = body(), nn.Linear(D, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.softplus(self.head(self.body(x)))


class TiedCode(nn.Module):
    """An autoencoder whose last layer is its first one, turned round; `tied=False` has layers of their own."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.code, self.body = nn.Linear(D, D), body(2)[1:]
        self.back = nn.Linear(D, D)
        self.tied = tied

    def forward(self, x: Tensor) -> Tensor:
        z = self.body(self.code(x))
        return F.linear(z, self.code.weight.t()) if self.tied else self.back(z)


class Mixing(nn.Module):
    """A block that mixes the words."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(D), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.gelu(self.first(self.norm(x).mT))).mT


class Masked(nn.Module):
    """A masked autoencoder: masked words are zeros, and the loss is that of masked words, unless `all_words`."""

    def __init__(self, all_words: bool = False) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(D, D), nn.Linear(D, D)
        self.body = nn.Sequential(Mixing(), Mixing(), nn.LayerNorm(D))
        self.all_words = all_words

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        mask = (torch.arange(x.shape[1]) % 2)[:, None]
        out = self.head(self.body(self.stem(x) * (1 - mask)))
        weight = torch.ones_like(mask) if self.all_words else mask
        return {"loss": ((out - x).square() * weight).mean(), "out": out}


def words() -> Tensor:
    return torch.randn(6, 4, D, generator=torch.Generator().manual_seed(1))


Y = torch.randn(X.shape, generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize(
    ("make", "example"),
    [(Pair, (X, Y)), (TiedCode, X), (Masked, (words(),))],
    ids=["squared", "tied", "masked"],
)
def test_output_layer_without_a_gradient_at_zero_is_refused(make: Callable[[], nn.Module], example: Any) -> None:
    torch.manual_seed(0)
    text = refusal(make(), "fixup", example)
    expected = "would never learn: it starts at zero, and the output layer, which also starts at zero, gets no gradient"
    assert expected in text
    assert {*(named_methods(text) or ()), *untried_methods(text)} >= {"nf", "wn"}


@pytest.mark.parametrize(
    ("make", "example"),
    [
        (lambda: Pair(compared=False), (X, Y)),
        (Positive, X),
        (lambda: TiedCode(tied=False), X),
        (lambda: Masked(all_words=True), (words(),)),
    ],
    ids=["pair", "softplus", "untied", "all words"],
)
def test_output_layer_with_a_gradient_at_zero_is_converted(make: Callable[[], nn.Module], example: Any) -> None:
    torch.manual_seed(0)
    converted, _ = nf.convert(make(), "fixup", example)
    assert not converted.get_submodule("back" if isinstance(converted, TiedCode) else "head").weight.any()

    def loss(model: nn.Module) -> Tensor:
        out = model(*example) if isinstance(example, tuple) else model(example)
        if isinstance(out, dict):
            return out["loss"]
        return sum((part - 0.3 * Y[:, :1]).square().mean() for part in (out if isinstance(out, tuple) else (out,)))

    expected = moving(make(), loss)
    assert len(expected) > 10
    assert expected & dict(converted.named_parameters()).keys() <= moving(converted, loss)


class Recomputed(nn.Module):
    """Blocks that run again in the backward pass."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.stem, self.blocks, self.head = nn.Linear(D, D), body()[1:], nn.Linear(D, 4)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


@pytest.mark.parametrize("method", METHODS)
def test_reentrant_checkpoints_change_nothing(method: str) -> None:
    states = []
    for reentrant in (False, True):
        torch.manual_seed(0)
        model = Recomputed(reentrant)
        model.head.weight.grad = torch.ones_like(model.head.weight)
        converted, plan = nf.convert(model, method, X, generator=torch.Generator().manual_seed(0))
        assert torch.equal(model.head.weight.grad, torch.ones_like(model.head.weight))
        assert all(p.grad is None for name, p in model.named_parameters() if name != "head.weight")
        states.append((converted.state_dict(), plan.changes.notes))
    assert states[0][1] == states[1][1]
    assert all(torch.equal(value, states[1][0][name]) for name, value in states[0][0].items())


class Silenced(Block):
    """A block that loses its branch together with its normalizer."""

    def forward(self, x: Tensor) -> Tensor:
        branch = super().forward(x) - x
        return x + branch * isinstance(self.norm1, nn.LayerNorm)


def test_dead_branch_behind_a_reentrant_checkpoint_is_refused() -> None:
    torch.manual_seed(0)
    model = Recomputed(reentrant=True)
    model.blocks[1] = Silenced()
    assert "would never learn: it had a gradient in the original" in refusal(model, "nf", X)


class Native(nn.Module):
    """Normalizes by a function of torch that modules of torch call."""

    def __init__(self, function: str) -> None:
        super().__init__()
        self.net, self.head, self.function = body(), nn.Linear(D, 4), function
        self.gain, self.offset = nn.Parameter(torch.ones(D)), nn.Parameter(torch.zeros(D))

    def forward(self, x: Tensor) -> Tensor:
        x = self.net(x)
        if self.function == "native_layer_norm":
            x = torch.native_layer_norm(x, (D,), self.gain, self.offset, 1e-5)[0]
        elif self.function == "native_group_norm":
            x = torch.native_group_norm(x, self.gain, self.offset, len(x), D, 1, 2, 1e-5)[0]
        else:
            x = torch.native_batch_norm(x, self.gain, self.offset, None, None, True, 0.1, 1e-5)[0]
        return self.head(x)


@pytest.mark.parametrize("function", ["native_layer_norm", "native_group_norm", "native_batch_norm"])
def test_native_normalizations_are_refused(function: str) -> None:
    assert f"'(model)': its own forward pass computes {function}" in refusal(Native(function), "fixup", X)


class Coupling(nn.Module):
    """A step of a normalizing flow."""

    def __init__(self, turned: bool) -> None:
        super().__init__()
        self.turned = turned
        width = 4 * D
        norm, last = nn.LayerNorm(width), nn.Linear(width, D)
        self.net = nn.Sequential(nn.Linear(D // 2, width), norm, nn.ReLU(), last)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = x.chunk(2, -1)[:: -1 if self.turned else 1]
        scale, shift = self.net(a).chunk(2, -1)
        b = b * torch.tanh(scale).exp() + shift
        return torch.cat([b, a] if self.turned else [a, b], -1), torch.tanh(scale).sum(-1)


def likelihood(out: tuple[Tensor, Tensor]) -> Tensor:
    z, volume = out
    return ((z.square() / 2).sum(-1) - volume).mean() / D + math.log(2 * math.pi) / 2


class RealFlow(nn.Module):
    def __init__(self, gives_loss: bool) -> None:
        super().__init__()
        self.steps, self.gives_loss = nn.ModuleList(Coupling(i % 2 == 1) for i in range(6)), gives_loss

    def forward(self, x: Tensor) -> Any:
        volume = torch.zeros(len(x))
        for step in self.steps:
            x, change = step(x)
            volume = volume + change
        return likelihood((x, volume)) if self.gives_loss else (x, volume)


@pytest.mark.parametrize("gives_loss", [False, True])
@pytest.mark.parametrize("method", ["nf", "wn"])
def test_start_well_above_the_original_is_noted(method: str, gives_loss: bool) -> None:
    torch.manual_seed(0)
    model, x = RealFlow(gives_loss), torch.randn(64, D, generator=torch.Generator().manual_seed(5))
    converted, plan = nf.convert(model, method, x, generator=torch.Generator().manual_seed(0))
    losses = [(m(x) if gives_loss else likelihood(m(x))).item() for m in (model, converted)]
    assert losses[1] > 1.5 * losses[0]
    word = "a single number, is" if gives_loss else "times as large as the original's"
    assert any(note.startswith("output 0") and word in note for note in plan.changes.notes)


class Scaled(nn.Module):
    """A regression whose normalizer keeps the output small; `factor` scales it, and `gives_loss` returns a loss."""

    def __init__(self, factor: float, gives_loss: bool) -> None:
        super().__init__()
        self.body, self.factor, self.gives_loss = network(), factor, gives_loss

    def forward(self, x: Tensor) -> Tensor:
        out = self.body(x)
        if not isinstance(self.body[-2], nn.LayerNorm):
            out = out * self.factor
        return (out - 1).square().mean() if self.gives_loss else out


@pytest.mark.parametrize("gives_loss", [False, True])
@pytest.mark.parametrize(("factor", "noted"), [(0.5, False), (4.0, True)])
def test_notes_on_the_start_follow_the_squared_error(factor: float, noted: bool, gives_loss: bool) -> None:
    torch.manual_seed(0)
    _, plan = nf.convert(Scaled(factor, gives_loss), "nf", X, generator=torch.Generator().manual_seed(0))
    assert any(note.startswith("output 0") for note in plan.changes.notes) is noted


def test_loss_a_hundred_times_as_high_is_refused() -> None:
    torch.manual_seed(0)
    text = refusal(Scaled(60.0, gives_loss=True), "nf", X)
    assert "output 0, a single number, is" in text


class Message(nn.Module):
    """A step of a graph network, whose sums of neighbours 'wn' lets grow."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.update, self.norm = nn.Linear(2 * D, D), nn.Linear(2 * D, D), nn.BatchNorm1d(D)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        sent = F.relu(self.message(torch.cat([x[edges[0]], x[edges[1]]], -1)))
        received = torch.zeros_like(x).index_add_(0, edges[1], sent)
        return self.norm(self.update(torch.cat([x, received], -1)))


class Neighbours(nn.Module):
    def __init__(self, steps: int = 5) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(D, D), nn.Linear(D, 4)
        self.steps = nn.ModuleList(Message() for _ in range(steps))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        x = self.stem(x)
        for step in self.steps:
            x = x + F.relu(step(x, edges))
        return self.head(x)


class Settled(nn.Module):
    """One layer, shared by sums that follow each other: the signal grows unless its normalizers limit it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.layer, self.head = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, 4)
        self.inner, self.outer = nn.LayerNorm(D), nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        z = torch.zeros_like(x)
        for _ in range(8):
            z = self.outer(z + self.inner(x + self.layer(F.relu(z))))
        return self.head(z)


@pytest.mark.parametrize("method", ["skipinit", "isograd"])
@pytest.mark.parametrize(
    ("make", "example", "wrong"),
    [
        (Neighbours, (X, torch.randint(0, len(X), (2, 8 * len(X)), generator=torch.Generator().manual_seed(0))), "wn"),
        (Settled, X, "fixup"),
    ],
)
def test_refusals_by_rules_name_only_methods_that_an_attempt_confirms(
    make: Callable[[], nn.Module], example: Any, wrong: str, method: str
) -> None:
    torch.manual_seed(0)
    text = refusal(make(), method, example)
    named = named_methods(text)
    assert named
    assert wrong not in named
    assert "for this model" not in text


class Chosen(nn.Module):
    """Experts that are attributes and no list, or that add to the signal themselves (`sums`)."""

    def __init__(self, sums: bool) -> None:
        super().__init__()
        self.norm, self.router, self.sums = nn.LayerNorm(D), nn.Linear(D, 4), sums
        for i in range(4):
            setattr(self, f"expert{i}", nn.Sequential(nn.LayerNorm(D), nn.Linear(D, D), nn.GELU(), nn.Linear(D, D)))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        share, choice = self.router(h).softmax(-1).max(-1)
        out = x.clone() if self.sums else torch.zeros_like(x)
        for i in range(4):
            rows = (choice == i).nonzero()[:, 0]
            if len(rows):
                value = share[rows, None] * getattr(self, f"expert{i}")(h[rows])
                out[rows] = x[rows] + value if self.sums else value
        return out if self.sums else x + out


def test_refusal_by_an_initializer_advises_no_method_untried() -> None:
    torch.manual_seed(0)
    text = refusal(nn.Sequential(nn.Linear(D, D), Chosen(False), nn.LayerNorm(D), nn.Linear(D, 4)), "isograd", X)
    assert "a pass without values" in text
    assert text.count("; use ") == 1


@pytest.mark.parametrize("method", ["fixup", "skipinit", "nf"])
@pytest.mark.parametrize("sums", [False, True])
def test_experts_that_only_the_original_reached_are_loaded(tmp_path: Path, method: str, sums: bool) -> None:
    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(D, D), Chosen(sums), Chosen(sums), nn.LayerNorm(D), nn.Linear(D, 4))

    x = torch.randn(24, D, generator=torch.Generator().manual_seed(3))
    converted, _ = nf.convert(make(0), method, x)
    converted.eval()
    save_converted(tmp_path / "model", converted)
    for seed in range(1, 5):  # routers of other weights choose others of the experts
        loaded, _ = load_converted(tmp_path / "model", lambda seed=seed: make(seed))
        assert torch.equal(loaded(x), converted(x))
