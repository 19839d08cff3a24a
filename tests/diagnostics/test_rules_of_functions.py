"""Faults of functions, of unused modules and of the loss, each beside a control without the fault."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normfree.diagnostics import diagnose
from normfree.diagnostics.verdict import Verdict
from signal_oracles import batch

X = batch(16, 32)
WORDS = torch.arange(16 * 12).reshape(16, 12) % 20


def judged(model: nn.Module, x: Any = X, targets: Any = None, loss: Any = None) -> Verdict:
    return diagnose(model, x, targets, loss=loss).verdict


def causes(v: Verdict) -> list[tuple[str, str]]:
    return [(f.cause, f.place) for f in v.findings]


def mlp(*end: nn.Module, width: int = 32, out: int = 10) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [m for _ in range(3) for m in (nn.Linear(width, width), nn.ReLU())]
    for m in layers:
        if isinstance(m, nn.Linear):
            nn.init.kaiming_normal_(m.weight)
    return nn.Sequential(*layers, nn.Linear(width, out), *end)


class Code(nn.Module):
    """An autoencoder with a function of `scale` times its code."""

    def __init__(self, function: Callable[[Tensor], Tensor], scale: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = nn.Linear(32, 16), nn.Linear(16, 32)
        self.function, self.scale = function, scale

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.function(self.scale * self.inner(x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize(("function", "name"), [(torch.tanh, "tanh"), (torch.sigmoid, "sigmoid")])
def test_saturated_code_is_named(function: Callable[[Tensor], Tensor], name: str) -> None:
    assert causes(judged(Code(function, 40.0)))[0] == (f"saturated {name}", "inner")
    assert judged(Code(function, 1.0)).findings == ()


def test_openness_is_the_mean_square_of_the_derivative() -> None:
    """Against autograd's own derivative, in float64."""
    model = Code(torch.tanh, 2.0)
    spot = diagnose(model, X).signal.by_kind["openness"][0]
    z = (2 * model.inner(X)).detach().double().requires_grad_()
    (slope,) = torch.autograd.grad(z.tanh().sum(), z)
    assert spot.value == pytest.approx(float(slope.square().mean()), rel=1e-4)


def test_open_gate_is_no_fault() -> None:
    model = Code(torch.sigmoid, 1.0)
    nn.init.constant_(model.inner.bias, 8.0)
    assert not any(f.cause.startswith("saturated") for f in judged(model).findings)
    nn.init.constant_(model.inner.bias, -3.0)  # nearly shut, as a gate may start
    assert not any(f.cause.startswith("saturated") for f in judged(model).findings)
    nn.init.constant_(model.inner.bias, -9.0)
    assert causes(judged(model))[0] == ("saturated sigmoid", "inner")


class Attention(nn.Module):
    def __init__(self, scale: float = 1.0, dim: int = -1, fused: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.head, self.dim, self.fused = nn.Linear(32, 96), nn.Linear(32, 10), dim, fused
        with torch.no_grad():
            self.qkv.weight[:64] *= scale

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        if self.fused:
            mixed = F.scaled_dot_product_attention(q, k, v)
        else:
            mixed = (q @ k.mT / math.sqrt(8)).softmax(self.dim) @ v
        return self.head(mixed.transpose(1, 2).flatten(2).mean(1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("fused", [False, True])
def test_saturated_attention_is_named(fused: bool) -> None:
    x = batch(8, 12, 32)
    assert causes(judged(Attention(30.0, fused=fused), x))[0] == ("saturated attention", "qkv")
    assert judged(Attention(fused=fused), x).findings == ()


def test_softmax_over_the_samples_is_named() -> None:
    assert causes(judged(Attention(dim=0), batch(8, 12, 32)))[0] == ("softmax over the batch", "qkv")


class Pool(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.score, self.head, self.dim = nn.Linear(32, 32), nn.Linear(32, 1), nn.Linear(32, 10), dim

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x).relu()
        return self.head((F.softmax(self.score(h), self.dim) * h).sum(1))  # type: ignore[no-any-return]


def test_softmax_of_one_value_is_named() -> None:
    x = batch(8, 12, 32)
    assert causes(judged(Pool(-1), x))[0] == ("softmax of one value", "score")
    assert judged(Pool(1), x).findings == ()


class Reader(nn.Module):
    def __init__(self, cell: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.reader, self.head = nn.Embedding(20, 32), cell(32, 24, batch_first=True), nn.Linear(24, 10)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.reader(self.words(ids))[0][:, -1])  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("cell", "rows", "gate"),
    [(nn.LSTM, slice(24, 48), "forget"), (nn.LSTM, slice(0, 24), "input"), (nn.GRU, slice(24, 48), "update")],
)
def test_shut_gate_of_a_recurrent_layer_is_named(cell: Any, rows: slice, gate: str) -> None:
    model = Reader(cell)
    assert judged(model, WORDS).findings == ()
    with torch.no_grad():
        model.reader.bias_hh_l0[rows] = -12.0
    assert causes(judged(model, WORDS))[0] == (f"{gate} gate shut", "reader")


class Lists(nn.Module):
    """Blocks in a list, each with a second normalizer; some of both may be left out."""

    def __init__(self, skipped: int = -1, second_norm: bool = True, dropped: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"norm1": nn.LayerNorm(32), "norm2": nn.LayerNorm(32), "fc": nn.Linear(32, 32)})
            for _ in range(6)
        )
        self.side, self.head = nn.Linear(32, 4), nn.Linear(32, 10)
        self.skipped, self.second_norm, self.dropped = skipped, second_norm, dropped

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            if i == self.skipped and not self.dropped:
                continue
            y = block["fc"](block["norm1"](x)).relu()  # type: ignore[index]
            y = block["norm2"](y) if self.second_norm or i != 2 else y  # type: ignore[index]
            x = x if i == self.skipped else x + 0.5 * y
        return self.head(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("model", "place"),
    [
        (lambda: Lists(3), "blocks.3"),
        (lambda: Lists(3, dropped=True), "blocks.3"),
        (lambda: Lists(second_norm=False), "blocks.2.norm2"),
    ],
)
def test_unused_module_is_named(model: Callable[[], nn.Module], place: str) -> None:
    assert ("unused module", place) in causes(judged(model()))


def test_head_that_stands_alone_may_be_unused() -> None:
    assert judged(Lists()).findings == ()


@pytest.mark.parametrize(
    ("end", "loss", "targets", "cause"),
    [
        (nn.Sigmoid(), F.binary_cross_entropy_with_logits, torch.zeros(16, 10), "sigmoid before the loss"),
        (nn.Identity(), F.binary_cross_entropy_with_logits, torch.zeros(16, 10), ""),
        (nn.Sigmoid(), F.binary_cross_entropy, torch.zeros(16, 10), ""),
        (nn.Tanh(), F.cross_entropy, torch.arange(16) % 10, "tanh before the loss"),
        (nn.ReLU(), F.cross_entropy, torch.arange(16) % 10, "relu before the loss"),
        (nn.Identity(), F.cross_entropy, torch.arange(16) % 10, ""),
        (nn.Identity(), F.nll_loss, torch.arange(16) % 10, "logits without a softmax"),
        (nn.LogSoftmax(1), F.nll_loss, torch.arange(16) % 10, ""),
        (nn.Tanh(), F.mse_loss, 3 * batch(16, 10), "tanh on the output"),
        (nn.Tanh(), F.mse_loss, batch(16, 10).tanh(), ""),
        (nn.ReLU(), F.l1_loss, batch(16, 10), "relu on the output"),
        (nn.ReLU(), F.l1_loss, batch(16, 10).abs(), ""),
    ],
)
def test_output_has_to_fit_the_loss(end: nn.Module, loss: Any, targets: Tensor, cause: str) -> None:
    found = causes(judged(mlp(end), X, targets, loss))
    assert found == ([(cause, "the output")] if cause else [])


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_shapes_that_broadcast_are_named() -> None:
    def flat(output: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(output.squeeze(1), targets)

    targets = batch(16, 1)[:, 0]
    assert ("shapes of output and targets", "the output") in causes(judged(mlp(out=1), X, targets, F.mse_loss))
    assert judged(mlp(out=1), X, targets, flat).findings == ()


def test_two_sigmoids_inside_a_network_are_named() -> None:
    twice = nn.Sequential(mlp(nn.Sigmoid(), nn.Sigmoid()), nn.Linear(10, 10))
    assert ("sigmoid twice", "0.6") in causes(judged(twice))
    once = nn.Sequential(mlp(nn.Sigmoid(), nn.Tanh()), nn.Linear(10, 10))
    assert not any("twice" in cause for cause, _ in causes(judged(once)))


@pytest.mark.parametrize("norm", [nn.LayerNorm(32), nn.BatchNorm1d(32), nn.GroupNorm(4, 32)])
@pytest.mark.parametrize(("eps", "scale", "faulty"), [(1e-5, 1.0, False), (1e4, 1.0, True), (1e-5, 1e-5, True)])
def test_epsilon_above_the_variance_is_named(norm: nn.Module, eps: float, scale: float, faulty: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), norm, nn.ReLU(), mlp())
    norm.eps = eps  # type: ignore[assignment]
    with torch.no_grad():
        model[0].weight.mul_(scale)  # type: ignore[operator, union-attr]
        model[0].bias.zero_()  # type: ignore[operator, union-attr]
    assert (("epsilon too large", "1") in causes(judged(model))) is faulty


@pytest.mark.parametrize(("bias", "faulty"), [(0.0, False), (1.0, False), (40.0, True)])
def test_large_bias_is_named_unless_a_normalizer_follows(bias: float, faulty: bool) -> None:
    model = mlp()
    nn.init.constant_(model[2].bias, bias)  # type: ignore[arg-type]
    assert (("samples drowned", "2") in causes(judged(model))) is faulty
    assert not any(c == "samples drowned" for c, _ in causes(judged(model.insert(3, nn.BatchNorm1d(32)))))


class Tables(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tables = nn.ModuleList(nn.Embedding(20, 8) for _ in range(4))
        self.mlp = mlp()
        with torch.no_grad():
            self.tables[2].weight.mul_(scale)  # type: ignore[operator, union-attr]

    def forward(self, ids: Tensor) -> Tensor:
        return self.mlp(torch.cat([t(ids[:, i]) for i, t in enumerate(self.tables)], -1))  # type: ignore[no-any-return]


def test_high_first_loss_is_traced_to_the_module_that_makes_the_signal_large() -> None:
    targets = torch.arange(16) % 10
    model = Tables(1.0)
    with torch.no_grad():
        model.mlp[2].weight.mul_(300)  # type: ignore[operator, union-attr]
    assert causes(judged(model, WORDS, targets))[0][1] == "mlp.2"
    assert judged(Tables(1.0), WORDS, targets).findings == ()


def test_large_embedding_is_named() -> None:
    assert causes(judged(Tables(300.0), WORDS))[0] == ("embedding too large", "tables.2")
    assert judged(Tables(3.0), WORDS).findings == ()


@pytest.mark.parametrize(("p", "faulty"), [(0.5, False), (0.95, True)])
def test_dropout_of_nearly_everything_is_named(p: float, faulty: bool) -> None:
    model = mlp().insert(4, nn.Dropout(p))
    assert (("dropout too strong", "4") in causes(judged(model))) is faulty
    assert not any(cause == "dropout too strong" for cause, _ in causes(judged(model.eval())))


class PlainList(nn.Module):
    def __init__(self, registered: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Linear(32, 32) for _ in range(4)]
        self.stem, self.layers, self.head = nn.Linear(32, 32), layers, nn.Linear(32, 10)
        if registered:
            self.layers = nn.ModuleList(layers)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = x + layer(x).relu()
        return self.head(x)  # type: ignore[no-any-return]


def test_layers_in_a_plain_list_are_named() -> None:
    assert ("weights not registered", "layers") in causes(judged(PlainList(False)))
    assert judged(PlainList(True)).findings == ()


class Times(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * x


@pytest.mark.parametrize(("factor", "cause"), [(1e-4, "layer too small"), (1e4, "layer too large")])
def test_module_that_scales_between_layers_is_named(factor: float, cause: str) -> None:
    torch.manual_seed(0)
    layers = [m for _ in range(12) for m in (nn.Linear(32, 32, bias=False), nn.ReLU())]
    for layer in layers[::2]:
        nn.init.kaiming_normal_(layer.weight)  # type: ignore[arg-type]
    layers.insert(11, Times(factor))
    assert causes(judged(nn.Sequential(*layers, nn.Linear(32, 10))))[0] == (cause, "11")


class Root(nn.Module):
    def __init__(self, floor: float) -> None:
        super().__init__()
        self.floor = floor

    def forward(self, x: Tensor) -> Tensor:
        return (x.square().sum(-1, keepdim=True) + self.floor).sqrt() * x


@pytest.mark.parametrize("floor", [0.0, 1e-6])
def test_derivative_that_is_not_finite_is_named(floor: float) -> None:
    x = X.clone()
    x[3] = 0.0
    torch.manual_seed(0)
    layers = [m for _ in range(3) for m in (nn.Linear(32, 32, bias=False), nn.Tanh())]
    made = judged(nn.Sequential(*layers, Root(floor), nn.Linear(32, 10)), x)
    assert (("gradient not finite", "6") in causes(made)) is (floor == 0)
    assert ("sqrt" in made.recommendation) is (floor == 0)


class Shared(nn.Module):
    """One block that is called eight times."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.head = nn.Linear(32, 32), nn.Linear(32, 10)
        self.core = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
        nn.init.normal_(self.core[2].weight, std=gain / math.sqrt(32))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for _ in range(8):
            x = x + self.core(x)
        return self.head(x)  # type: ignore[no-any-return]


def test_block_that_is_called_several_times_is_named_by_its_module() -> None:
    found = causes(judged(Shared(4.0)))
    assert found[0][0].startswith("forward signal ×")
    assert found[0][1] == "core"
    assert judged(Shared(0.1)).findings == ()


class Activated(nn.Module):
    """Blocks with an activation between two layers, but for one."""

    def __init__(self, forgotten: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))
        self.last = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))
        self.head, self.forgotten = nn.Linear(32, 10), forgotten

    def forward(self, x: Tensor) -> Tensor:
        for i, (first, last) in enumerate(zip(self.first, self.last, strict=True)):
            y = first(x)
            x = x + 0.5 * last(y if i == self.forgotten else y.relu())
        return self.head(x)  # type: ignore[no-any-return]


def test_forgotten_activation_is_named() -> None:
    assert causes(judged(Activated(4)))[0] == ("forgotten activation", "last.4")
    assert judged(Activated(-1)).findings == ()


class Skipless(nn.Module):
    """Branches in two lists that a loop adds, but for one."""

    def __init__(self, forgotten: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.ModuleList(nn.Linear(32, 32) for _ in range(8))
        self.b = nn.ModuleList(nn.Linear(32, 32) for _ in range(8))
        self.stem, self.head, self.forgotten = nn.Linear(32, 32), nn.Linear(32, 10), forgotten

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for i, (a, b) in enumerate(zip(self.a, self.b, strict=True)):
            f = b(a(x).relu())
            x = f if i == self.forgotten else x + f
        return self.head(x)  # type: ignore[no-any-return]


def test_forgotten_skip_in_a_loop_over_lists_is_named() -> None:
    assert causes(judged(Skipless(3)))[0] == ("forgotten skip", "a.3")
    assert judged(Skipless(-1)).findings == ()


@pytest.mark.parametrize("function", [torch.sin, lambda h: h.unflatten(-1, (16, 2)).amax(-1).repeat(1, 2)])
def test_any_function_that_is_not_linear_counts_as_an_activation(function: Callable[[Tensor], Tensor]) -> None:
    class Layer(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return function(super().forward(x))

    torch.manual_seed(0)
    activated = nn.Sequential(*(Layer(32, 32) for _ in range(4)), nn.Linear(32, 10))
    linear = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)), nn.Linear(32, 10))
    assert not any(f.cause == "no activation" for f in judged(activated).findings)
    assert causes(judged(linear))[0] == ("no activation", "")


def test_loss_without_a_graph_is_a_cut_at_the_output() -> None:
    made = judged(mlp(), X, (X[:, :10] > 0).float(), lambda o, t: ((o > 0).float() - t).square().mean())
    assert made.findings[0].cause == "loss without a gradient"
    assert "the output" in made.recommendation
