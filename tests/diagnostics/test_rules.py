"""Networks broken on purpose: the cause and the place are named, and the sound network beside each is not alarming."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normfree.diagnostics import diagnose
from normfree.diagnostics.verdict import Verdict
from normfree.models import build
from signal_oracles import batch


def verdict(make: Callable[[], nn.Module], x: Any, targets: Tensor | None = None) -> Verdict:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = make()
    return diagnose(model, x, targets).verdict


def found(v: Verdict) -> tuple[str, str]:
    return v.findings[0].cause, v.findings[0].place


def mlp(
    gain: float = 2.0, activation: Callable[[], nn.Module] = nn.ReLU, depth: int = 20, width: int = 48
) -> nn.Sequential:
    """A plain network with weights of variance gain / fan-in and no biases' values."""
    layers: list[nn.Module] = []
    for i in range(depth - 1):
        layer = nn.Linear(32 if i == 0 else width, width)
        nn.init.normal_(layer.weight, std=math.sqrt(gain / layer.in_features))
        nn.init.zeros_(layer.bias)
        layers += [layer, activation()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def changed(model: nn.Module, name: str, change: Callable[[Tensor], Any]) -> nn.Module:
    with torch.no_grad():
        change(model.get_parameter(name))
    return model


X = batch(16, 32)

# Without residual sums.


@pytest.mark.parametrize(
    ("make", "status", "advice"),
    [
        (mlp, "preserved", "nothing to do"),
        (lambda: mlp(1.0), "vanishing", "lack the gain of the activation: relu needs a variance of 2 / fan-in"),
        (lambda: mlp(1.0, nn.SiLU), "vanishing", "lack the gain of the activation: silu"),
        (lambda: mlp(4.0), "exploding", "the weights are too large"),
        (lambda: mlp(1.0, nn.Sigmoid), "vanishing", "sigmoid passes at most a quarter"),
        (lambda: mlp(0.3, nn.Tanh), "vanishing", "too small for tanh"),
        (lambda: mlp(9.0, nn.Tanh), "exploding", "tanh is saturated"),
        (lambda: mlp(1.0, nn.Tanh), "preserved", "nothing to do"),
        (lambda: mlp(1.0, depth=10), "drifting", "lack the gain"),
        (lambda: mlp(1.0, depth=5), "preserved", "nothing to do"),
    ],
)
def test_growth_of_a_plain_network_is_judged_at_its_layers(
    make: Callable[[], nn.Module], status: str, advice: str
) -> None:
    judged = verdict(make, X)
    assert judged.status == status
    assert advice in judged.recommendation


@pytest.mark.parametrize(
    ("change", "cause", "place"),
    [
        (lambda m: changed(m, "12.weight", lambda w: w.mul_(30)), "layer too large", "12"),
        (lambda m: changed(m, "12.weight", lambda w: w.mul_(0.03)), "layer too small", "12"),
        (lambda m: changed(m, "8.bias", lambda b: b.fill_(-100)), "dead layer", "8"),
        (lambda m: changed(m, "8.bias", lambda b: b[:46].fill_(-100)), "dead units", "8"),
        (lambda m: changed(m, "8.weight", lambda w: w.zero_()), "zero weights", "8"),
        (lambda m: changed(m, "4.weight", lambda w: w.fill_(0.02)), "equal filters", "4"),
        (lambda m: changed(m, "4.weight", lambda w: w[1::2].copy_(w[::2])), "equal filters", "4"),
        (lambda m: changed(m, "38.bias", lambda b: b[3].fill_(50)), "classifier bias", "38"),
        (lambda m: changed(m, "38.weight", lambda w: w.mul_(1000)), "classifier scale", "38"),
        (lambda m: changed(m, "0.weight", lambda w: w.mul_(1000)), "stem scale", "0"),
        (lambda m: m.half(), "", ""),
        (lambda m: changed(m, "6.weight", lambda w: w[0, 0].fill_(math.nan)), "weight not finite", "6.weight"),
    ],
)
def test_fault_of_one_layer_is_named(change: Callable[[nn.Module], nn.Module], cause: str, place: str) -> None:
    made = verdict(lambda: change(mlp()), X.half() if not cause else X)
    if not cause:  # the control: half precision alone is no fault
        assert not made.at_least("vanishing")
        return
    assert found(made) == (cause, place)
    assert made.at_least("vanishing")


def test_half_precision_is_named() -> None:
    made = verdict(lambda: mlp(40.0).half(), X.half())
    assert made.findings[0].cause == "half precision overflow"
    assert "float16" in made.recommendation
    assert verdict(lambda: mlp(40.0), X).findings[0].cause.startswith("forward signal")


def test_detach_between_layers_is_a_cut() -> None:
    class Cut(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.detach()

    made = verdict(lambda: mlp().insert(10, Cut()), X)
    assert found(made) == ("gradient cut", "8")
    assert "look between 8 and 11: detach()" in made.recommendation


def test_layer_before_a_normalizer_is_measured_behind_it() -> None:
    """The normalizer undoes the scale of the layer, so a large weight there is no fault."""

    def normalized(scale: float) -> nn.Module:
        pairs = [m for _ in range(8) for m in (nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU())]
        return changed(nn.Sequential(*pairs, nn.Linear(32, 10)), "9.weight", lambda w: w.mul_(scale))

    for scale in (1.0, 1000.0):
        assert not verdict(lambda scale=scale: normalized(scale), X).at_least("vanishing")


def test_auxiliary_output_without_a_gradient_is_no_cut() -> None:
    class Auxiliary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.side, self.rest = mlp(depth=4), mlp(depth=3), mlp(depth=5)
            self.join = nn.Linear(10, 32)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.join(self.first(x))
            return self.rest(y.relu()), self.side(y)

    class Swapped(Auxiliary):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.join(self.first(x))
            side = self.side(y)
            return self.rest(y.relu()), side

    for make in (Auxiliary, Swapped):
        assert not verdict(make, X).at_least("vanishing")


def test_cells_and_recurrent_layers_are_measured() -> None:
    class Cell(nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.cell, self.out = nn.RNNCell(8, 16, nonlinearity="relu"), nn.Linear(16, 4)
            nn.init.orthogonal_(self.cell.weight_hh)
            changed(self, "cell.weight_hh", lambda w: w.mul_(scale))

        def forward(self, x: Tensor) -> Tensor:
            h = None
            for t in range(x.shape[1]):
                h = self.cell(x[:, t], h)
            return self.out(h)  # type: ignore[no-any-return]

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.out = nn.ModuleList(nn.GRU(8, 8, batch_first=True) for _ in range(3)), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)[0]
            return self.out(x[:, -1])  # type: ignore[no-any-return]

    x = batch(8, 20, 8)
    exploding = verdict(lambda: Cell(4.0), x)
    assert exploding.status == "exploding"
    assert "again and again" in exploding.recommendation
    assert not verdict(lambda: Cell(1.41), x).at_least("vanishing")
    stack = verdict(Stack, x)
    assert not stack.at_least("vanishing")
    assert stack.forward.worst.startswith("layers.")


# With residual sums.


class Block(nn.Module):
    """A pre-norm block; `bug` happens in it."""

    def __init__(self, bug: str = "", norm: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32) if norm else nn.Identity()
        self.first, self.last, self.bug = nn.Linear(32, 64), nn.Linear(64, 32), bug

    def forward(self, x: Tensor) -> Tensor:
        source = torch.zeros_like(x) if self.bug == "constant" else x
        f = self.last(self.first(self.norm(source)).relu())
        return f if self.bug == "skip" else x + f  # type: ignore[no-any-return]


class Blocks(nn.Module):
    def __init__(self, bug: str = "", *, norm: bool = True, at: int = 6) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(32, 32), nn.Linear(32, 10)
        self.blocks = nn.ModuleList(Block(bug if i == at else "", norm) for i in range(12))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


class Loop(nn.Module):
    """The sums stand in a loop of the model's own forward pass."""

    def __init__(self, bug: str = "") -> None:
        super().__init__()
        self.stem, self.head, self.bug = nn.Linear(32, 32), nn.Linear(32, 10), bug
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)) for _ in range(12)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for i, block in enumerate(self.blocks):
            x = block(x) if self.bug == "skip" and i == 6 else x + block(x)
        return self.head(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("make", [Blocks, Loop, lambda: Blocks(norm=False)])
def test_sound_network_has_no_finding(make: Callable[[], nn.Module]) -> None:
    made = verdict(make, X)
    assert made.findings == ()
    assert made.is_healthy


@pytest.mark.parametrize(
    ("make", "cause", "place"),
    [
        (lambda: Blocks("skip"), "forgotten skip", "blocks.6"),
        (lambda: Blocks("skip", norm=False, at=3), "forgotten skip", "blocks.3"),
        (lambda: Loop("skip"), "forgotten skip", "blocks.6"),
        (lambda: Blocks("constant"), "constant branch", "blocks.6"),
        (
            lambda: changed(Blocks(norm=False), "blocks.6.last.weight", lambda w: w.mul_(100)),
            "block too large",
            "blocks.6",
        ),
        (lambda: changed(Loop(), "blocks.6.3.weight", lambda w: w.mul_(100)), "block too large", "blocks.6"),
        (lambda: changed(Blocks(), "head.weight", lambda w: w.mul_(1000)), "classifier scale", "head"),
        (lambda: changed(Blocks(), "head.bias", lambda b: b[2].fill_(50)), "classifier bias", "head"),
        (lambda: changed(Blocks(), "blocks.4.first.weight", lambda w: w.fill_(0.1)), "equal filters", "blocks.4.first"),
        (lambda: changed(Blocks(), "stem.weight", lambda w: w.mul_(1000)), "stem scale", "stem"),
    ],
)
def test_fault_of_a_block_is_named_by_its_module(make: Callable[[], nn.Module], cause: str, place: str) -> None:
    made = verdict(make, X)
    assert found(made) == (cause, place)
    assert made.at_least("vanishing")


def test_equal_filters_of_a_classifier_break_up_by_themselves() -> None:
    made = verdict(lambda: changed(Blocks(), "head.weight", lambda w: w.fill_(0.1)), X)
    assert not any(f.cause == "equal filters" for f in made.findings)


# The input.


@pytest.mark.parametrize(
    ("x", "cause"),
    [
        (X.index_fill(0, torch.tensor([3]), math.nan), "input not finite"),
        (X.index_fill(0, torch.tensor([3]), math.inf), "input not finite"),
        (X.abs() * 200, "input scale"),
        (X * 1e-4, "input scale"),
        (X + 20, "input not centred"),
        (X[:1].expand(16, 32), "input constant"),
    ],
)
@pytest.mark.parametrize("make", [Blocks, mlp])
def test_fault_of_the_input_is_named(make: Callable[[], nn.Module], x: Tensor, cause: str) -> None:
    made = verdict(make, x)
    assert found(made) == (cause, "the input")
    assert made.status == "faulty"


@pytest.mark.parametrize("x", [X, X.sigmoid(), X * 3, X + 1])
def test_usual_input_is_no_fault(x: Tensor) -> None:
    assert verdict(Blocks, x).findings == ()


def test_mask_of_minus_infinity_is_finite() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(6)
    assert not verdict(lambda: layer, {"src": batch(4, 6, 16), "src_mask": mask}).at_least("vanishing")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float64])
@pytest.mark.parametrize("name", ["resnet8", "mlp-4-8"])
def test_wrong_type_is_refused_with_both_types(name: str, dtype: torch.dtype) -> None:
    x = (batch(4, 3, 28, 28).abs() * 50).to(dtype)
    with pytest.raises(ValueError, match=f"expected inputs of type float32, as the weights have, got {dtype}"[:-20]):
        diagnose(build(name, "he_in"), x)


# The output.


def test_softmax_before_the_loss_is_named() -> None:
    targets = torch.arange(16) % 10
    made = verdict(lambda: nn.Sequential(mlp(depth=4), nn.Softmax(1)), X, targets)
    assert made.findings[0].cause == "softmax before the loss"
    assert verdict(lambda: mlp(depth=4), X, targets).findings == ()


def test_output_that_ignores_the_input_is_named() -> None:
    class Ignores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp(depth=4)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(torch.ones_like(x))  # type: ignore[no-any-return]

    assert verdict(Ignores, X).findings[0].cause == "constant output"


def test_first_loss_is_that_of_random_labels() -> None:
    """Against the definition: the mean cross-entropy over every class as the target."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = mlp(depth=4)
    logits = model(X).detach().double()
    expected = torch.stack([nn.functional.cross_entropy(logits, torch.full((16,), c)) for c in range(10)]).mean()
    head = diagnose(model, X).signal.head
    assert head.chance_loss == pytest.approx(float(expected), rel=1e-5)
    assert head.confidence == pytest.approx(float(logits.softmax(1).amax(1).mean()), rel=1e-5)


# Post-norm.


def encoder(layers: int, first: bool = False) -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0, norm_first=first)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


@pytest.mark.parametrize(("layers", "first", "named"), [(48, False, True), (6, False, False), (48, True, False)])
def test_deep_post_norm_is_named(layers: int, first: bool, named: bool) -> None:
    made = verdict(lambda: encoder(layers, first), batch(8, 12, 32))
    assert made.at_least("vanishing") is named
    assert any(f.cause.startswith("deep post-norm") for f in made.findings) is named


# Dead units and updates, against their definitions.


def test_dead_units_are_the_rows_without_a_gradient() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = changed(mlp(depth=4), "2.bias", lambda b: b[:7].fill_(-100))
    signal = diagnose(model, X, torch.arange(16) % 10).signal
    nn.functional.cross_entropy(model(X), torch.arange(16) % 10).backward()
    layers = {layer.name: layer for layer in signal.layers}
    for name in ("0", "2", "4", "6"):
        gradient = model.get_parameter(f"{name}.weight").grad
        assert gradient is not None
        assert layers[name].dead == pytest.approx(float((gradient == 0).all(1).float().mean()))
    assert layers["2"].dead >= 7 / 48
