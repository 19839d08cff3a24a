"""Limits of a conversion: its cost in passes, shared weights, squared signals, and channels in other dimensions."""

from contextlib import suppress

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normfree as nf
from normed_blocks import X, network
from normfree.conversion import convert, forward_passes
from pass_counter import Passes
from remedies import METHODS, named_methods, refusal, untried_methods

D = X.shape[1]


class Twice(nn.Module):
    """x + relu(W norm(x)), whose activation is no module: 'skipinit' has no place for its multiplier."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.layer(self.norm(x)))


def far(model: nn.Module) -> tuple[nn.Module, Tensor]:
    return model, X + 25


@pytest.mark.parametrize("method", [*METHODS, "sqrt_half", "hanin", "isograd"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: (network(), X),
        lambda: (nn.Sequential(nn.Linear(D, D), Twice(), Twice(), nn.Linear(D, 4)), X),
        lambda: (nn.Sequential(nn.Linear(D, D), nn.LayerNorm(D), nn.ReLU(), nn.Linear(D, 4)), X),
        lambda: far(nn.Sequential(nn.BatchNorm1d(D), *network())),
    ],
    ids=["plain", "activation", "no sums", "far from zero"],
)
def test_conversion_or_refusal_costs_at_most_fifteen_forward_passes(make, method: str) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    model, x = make()
    passes = Passes()
    with suppress(ValueError):
        convert(passes.around(model), method, x)
    assert 0 < passes.cost <= 15


def test_methods_beyond_the_limit_are_named_as_untried(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(D, D), Twice(), nn.Linear(D, 4))
    text = refusal(model, "skipinit", X)
    assert named_methods(text) == ["fixup", "wn", "dyt"]
    assert untried_methods(text) == []
    monkeypatch.setattr(forward_passes.Passes, "allows", lambda self, cost: False)
    text = refusal(model, "skipinit", X)
    assert named_methods(text) == ["fixup", "wn"]
    assert untried_methods(text) == ["dyt"]
    assert text.endswith("; 'dyt' was not tried")


@pytest.mark.parametrize("uses", [6, 24])
@pytest.mark.parametrize("method", ["wn", "small_branch"])
def test_weights_that_are_used_often_start_near_chance(method: str, uses: int) -> None:
    """The outputs of one branch in a row add up: without the root of their number, the variance grows as e^(2√n)."""

    class Looped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network(1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.net[0](x)
            for _ in range(uses):
                x = self.net[1](x)
            return self.net[2:](x)

    torch.manual_seed(0)
    model = Looped()
    losses = []
    for seed in range(5):
        converted, plan = convert(model, method, X, generator=torch.Generator().manual_seed(seed))
        scores = converted(X)
        losses.append(float((scores.logsumexp(-1) - scores.mean(-1)).mean()))
        assert any("divided by the root of the number of sums that use it" in note for note in plan.changes.notes)
    classes = scores.shape[-1]
    assert sum(losses) / 5 < 1.5 * torch.tensor(float(classes)).log()
    _, plan = convert(network(), method, X)
    assert not any("divided by the root" in note for note in plan.changes.notes)


class ChannelsFirst(nn.LayerNorm):
    """Layer norm of (batch, channels, length), as some libraries have it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mT).mT


@pytest.mark.parametrize("length", [5, D])
def test_dyt_finds_the_dimension_of_the_channels(length: int) -> None:
    """Also where the length is the number of channels, so that the shape does not tell."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.conv = ChannelsFirst(D), nn.Conv1d(D, D, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.conv(F.relu(self.norm(x)))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.last, self.head = nn.Sequential(Block(), Block()), nn.LayerNorm(D), nn.Linear(D, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.last(self.blocks(x).mT)).mean(1)

    model, _ = convert(Net(), "dyt", torch.randn(6, D, length))
    assert [model.blocks[0].norm.dim, model.last.dim] == [1, -1]
    assert model(torch.randn(2, D, 9)).shape == (2, 4)


class SquaredReLU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x) ** 2


class Star(nn.Module):
    """A squared ReLU of other modules."""

    def __init__(self) -> None:
        super().__init__()
        self.relu, self.scale = nn.ReLU(), nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.relu(x).square() - 0.4


@pytest.mark.parametrize(("act", "noted"), [(SquaredReLU, True), (Star, True), (nn.GELU, False), (nn.Softplus, False)])
def test_activations_that_square_the_signal_are_noted(act: type[nn.Module], noted: bool) -> None:
    def block() -> nn.Module:
        return nn.Sequential(nn.LayerNorm(D), nn.Linear(D, D), act(), nn.Dropout(), nn.Linear(D, D))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.blocks = nn.Linear(D, D), nn.ModuleList(block() for _ in range(3))
            self.head = nn.Linear(D, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            for block in self.blocks:
                x = x + block(x)
            return self.head(x) + 0 * x.square().mean()  # a square that no layer reads

    _, plan = convert(Net(), "fixup", X)
    notes = [note for note in plan.changes.notes if "before it is squared" in note]
    assert bool(notes) is noted
    if noted:
        assert "'blocks.0.2', 'blocks.1.2', 'blocks.2.2'" in notes[0]
        assert "find_lr" in notes[0]


def test_layer_that_modulates_may_feed_other_layers_too() -> None:
    """An embedding of the time that modulates the last layer itself stays small, as one that does nothing else."""

    class Timed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.time, self.more = nn.Linear(D, D), nn.Linear(8, D), nn.Linear(D, D)
            self.first, self.net, self.head = nn.Linear(8, 8), network()[1:-1], nn.Linear(D, 4)

        def forward(self, x: Tensor, t: Tensor) -> Tensor:
            t = self.time(F.silu(self.first(t)))[:, None]
            x = self.net(self.stem(x) + F.silu(self.more(F.silu(t))))
            return self.head(x * (1 + t))

    inputs = (torch.randn(6, 5, D), torch.randn(6, 8))
    plan = nf.discover(Timed(), inputs)
    assert {layer.name for layer in plan.layers() if layer.modulates} == {"time"}
    converted, plan = convert(Timed(), "skipinit", inputs)
    spread = converted.time(F.silu(converted.first(inputs[1]))).std().item()
    assert spread == pytest.approx(len(plan.branches) ** -0.5, rel=0.25)


def test_layer_of_an_own_class_that_computes_more_is_not_reparametrized() -> None:
    """It stores its weight as (in, out), as GPT-2 does; weight norm would lose its activation."""

    class Transposed(nn.Module):
        def __init__(self, width: int, *, activated: bool) -> None:
            super().__init__()
            self.weight, self.bias = (
                nn.Parameter(0.2 * torch.randn(width, 2 * width)),
                nn.Parameter(torch.zeros(2 * width)),
            )
            self.activated = activated

        def forward(self, x: Tensor) -> Tensor:
            out = x @ self.weight + self.bias
            return torch.tanh(out) if self.activated else out

    def model(activated: bool) -> nn.Module:
        net = network(1)
        net[1].first = Transposed(net[1].first.in_features, activated=activated)
        return net

    convert(model(activated=False), "wn", X)
    text = refusal(model(activated=True), "wn", X)
    assert "'1.first.weight' cannot become a weight norm layer: Transposed uses its weight in a custom way" in text


def test_compiled_part_is_named() -> None:
    model = network()
    model[1] = torch.compile(model[1], backend="eager")
    assert "got one that is compiled at '1'; convert the model, then compile it" in refusal(model, "fixup", X)


def test_refusals_name_the_first_module_that_shows_the_reason() -> None:
    class Root(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x - 100).sqrt()  # NaN, unless something moves x above 100

    class Lifted(nn.LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 200

    model = nn.Sequential(nn.Linear(D, D), Lifted(D), Root(), nn.Linear(D, D), nn.LayerNorm(D), nn.Linear(D, 4))
    assert "got NaN or infinity, from '2' on" in refusal(model, "wn", X)


@pytest.mark.parametrize(("kind", "step"), [(torch.bfloat16, "0.004"), (torch.float32, None)])
def test_half_precision_in_which_multipliers_stay_is_noted(kind: torch.dtype, step: str | None) -> None:
    one = torch.ones((), dtype=kind)
    _, plan = convert(network().to(kind), "fixup", X.to(kind))
    notes = [note for note in plan.changes.notes if "near 1" in note]
    assert bool(notes) is (step is not None)
    if step is not None:
        assert (
            f"torch.bfloat16, in which numbers near 1, such as multipliers and gains, do not move by less than {step}"
            in (notes[0])
        )
        assert torch.equal(one - 0.5 * float(step) / 2, one)  # the note is true


class Pointwise(nn.Module):
    """Ends in maps of one pixel: batch norm refuses one image, and the model runs again in evaluation mode."""

    def __init__(self, residual: bool) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, D, 8), nn.BatchNorm2d(D)
        self.conv, self.head = nn.Conv2d(D, D, 1), nn.Linear(D, 4)
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for _ in range(3):
            f = F.gelu(self.conv(self.norm(x)))
            x = x + f if self.residual else f
        return self.head(x.flatten(1))


@pytest.mark.parametrize("method", [*METHODS, "sqrt_half", "isograd"])
@pytest.mark.parametrize("residual", [False, True])
def test_passes_that_batch_norm_breaks_off_count_too(residual: bool, method: str) -> None:
    torch.manual_seed(0)
    passes = Passes()
    with suppress(ValueError):
        convert(passes.around(Pointwise(residual)), method, torch.randn(1, 3, 8, 8))
    assert 0 < passes.cost <= 15
