"""The measured signal against plain autograd and numpy, and the model as it was before."""

import dataclasses
import gc
import math
import weakref
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import fields, is_dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from normfree.diagnostics.batched import flat
from normfree.diagnostics.moments import Stats, finish, moments, reduce, settle
from normfree.diagnostics.propagation import Signal, propagate
from normfree.models import Network, build
from normfree.nn.model_state import parts_of
from normfree.nn.residual import Residual
from normfree.plan import Branch, Layer, Position, ResidualPlan

EXACT = 1e-9  # of float64 sums against numpy's

Triple = tuple[Tensor, Tensor, Tensor]  # sum, branch, shortcut


# The oracle: intermediate tensors that the test keeps itself, measured by numpy.


def measured(tensor: Tensor) -> tuple[float, float, float]:
    """Squared mean and variance averaged over channels, and the norm of a sample."""
    values = tensor.detach().double().numpy()
    channels = np.moveaxis(values, -1 if values.ndim == 3 else 1, 0).reshape(
        values.shape[-1 if values.ndim == 3 else 1], -1
    )
    norm = math.sqrt(np.square(values).sum() / len(values))
    return float(np.square(channels.mean(1)).mean()), float(channels.var(1).mean()), norm


def kept(*tensors: Tensor) -> tuple[Tensor, ...]:
    for tensor in tensors:
        tensor.retain_grad()
    return tensors


def close(stats: Stats, expected: tuple[float, float, float], tolerance: float) -> None:
    assert (stats.mean_square, stats.variance, stats.norm) == pytest.approx(
        expected, rel=tolerance, abs=tolerance * expected[2] ** 2
    )


def agree(signal: Signal, oracle: Sequence[Triple], tolerance: float = EXACT) -> None:
    """Every number of every sum is the oracle's."""
    assert len(signal.sums) == len(oracle)
    for found, tensors in zip(signal.sums, oracle, strict=True):
        for part, tensor in zip(("sum", "branch", "shortcut"), tensors, strict=True):
            assert tensor.grad is not None
            close(getattr(found, part), measured(tensor), tolerance)
            close(getattr(found, f"{part}_gradient"), measured(tensor.grad), tolerance)


def noise(like: Tensor, seed: int = 0) -> Tensor:
    """The gradient that is injected where no loss is given."""
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(seed)).to(like)


def seeded(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def labels(count: int, classes: int = 10) -> Tensor:
    return torch.arange(count) % classes


def own(name: str, method: str, example: Tensor, **options: Any) -> Network:
    return build(name, method, example=example, generator=torch.Generator().manual_seed(0), **options).to(example.dtype)


def own_pass(model: Network, x: Tensor) -> tuple[list[Triple], Tensor, Tensor]:
    """The forward pass of one of our models, written out block by block: triples, features and logits."""
    triples: list[Triple] = []
    x = model.stem(x)
    for block in (m for m in model.body.modules() if isinstance(m, Residual)):
        entered = block.entry(block.alpha(x))
        shortcut = block.a(block.shortcut(entered if block.shortcut_reads_entry else x))
        assert block.branch is not None
        branch = block.beta(block.branch(entered))
        x = block.exit(block.c(block.delta(shortcut + branch)))
        kept(x, branch, shortcut)
        triples.append((x, branch, shortcut))
    (features,) = kept(model.head(x))
    return triples, features, model.classifier(features)


OWN = [
    ("resnet8", "he_in", None),
    ("resnet8", "batchnorm", None),
    ("resnet8", "he_in", "pre"),
    ("wrn-10-1", "he_in", None),
    ("wrn-10-1", "convshort", None),
    ("wrn-10-1", "nf", None),
    ("resnet8", "wn", None),
    ("resnet8", "he_in", "linear"),
    ("resnet8", "groupnorm", None),
    ("resnet8", "learnscalar", None),
    ("preact_resnet18", "isograd", None),
    ("resmlp-4-16", "he_in", None),
]


@pytest.mark.parametrize(("name", "method", "form"), OWN)
def test_own_model_signal_is_that_of_autograd(name: str, method: str, form: str | None) -> None:
    x = seeded(4, 3, 16, 16)
    model = own(name, method, x, form=form)
    signal = propagate(model, x, labels(4))
    triples, _, logits = own_pass(model, x)
    loss = F.cross_entropy(logits, labels(4))
    loss.backward()
    agree(signal, triples)
    assert signal.injected == ""
    assert signal.loss == pytest.approx(loss.item(), rel=EXACT)
    assert [s.name for s in signal.sums] == [b.name for b in model.plan.branches]
    assert [s.transition for s in signal.sums] == [b.position.transition for b in model.plan.branches]


def test_own_model_form_is_what_was_asked_for() -> None:
    """The three forms above differ, so that each of them tests something of its own."""
    x = seeded(2, 3, 16, 16)
    forms = {own(name, method, x, form=form).form for name, method, form in OWN}
    assert forms == {"post", "pre", "linear"}


def test_random_gradient_is_put_on_the_output() -> None:
    x = seeded(4, 3, 16, 16)
    model = own("wrn-10-1", "he_in", x)
    signal = propagate(model, x)
    triples, _, logits = own_pass(model, x)
    logits.backward(noise(logits))
    agree(signal, triples)
    assert signal.injected == "output"
    assert math.isnan(signal.loss)


def test_random_gradient_follows_the_generator() -> None:
    x = seeded(4, 3, 16, 16)
    model = own("wrn-10-1", "he_in", x)
    first, again, other = (
        propagate(model, x, generator=torch.Generator().manual_seed(seed)).series("sum_gradient") for seed in (3, 3, 4)
    )
    assert first == again
    assert first != other


def test_given_loss_replaces_cross_entropy() -> None:
    x = seeded(4, 3, 16, 16)
    model = own("wrn-10-1", "he_in", x)
    target = seeded(4, 10, seed=5)
    signal = propagate(model, x, target, loss=lambda output, wanted: (output - wanted).square().sum())
    triples, _, logits = own_pass(model, x)
    (logits - target).square().sum().backward()
    agree(signal, triples)


def test_given_loss_needs_no_targets() -> None:
    x = seeded(8, 6)
    signal = propagate(foreign(TwoSums), x, loss=lambda output, targets: output.square().sum() + (targets or 1.0))
    model = foreign(TwoSums)
    triples: list[Triple] = []
    value = model(x, triples).square().sum()
    for triple in triples:
        kept(*triple)
    value.backward()
    agree(signal, triples)
    assert (signal.injected, signal.loss) == ("", pytest.approx(float(value.detach()) + 1.0))


@pytest.mark.parametrize("targets", [None, labels(4)], ids=["no loss", "loss"])
def test_zero_classifier_gets_its_gradient_at_the_features(targets: Tensor | None) -> None:
    x = seeded(4, 3, 16, 16)
    model = own("resnet8", "fixup", x)
    assert not model.classifier.weight.any()
    signal = propagate(model, x, targets)
    triples, features, _ = own_pass(model, x)
    features.backward(noise(features))
    agree(signal, triples)
    assert signal.injected == "features"
    assert all(value > 0 for value in signal.series("sum_gradient"))
    assert math.isnan(signal.loss) == (targets is None)


def test_zero_classifier_would_stop_the_gradient() -> None:
    """The control: without the injection every gradient inside is zero."""
    x = seeded(4, 3, 16, 16)
    triples, _, logits = own_pass(own("resnet8", "fixup", x), x)
    F.cross_entropy(logits, labels(4)).backward()
    assert all(not total.grad.any() for total, _, _ in triples if total.grad is not None)


def test_zero_classifier_keeps_the_gradient_of_its_own_loss() -> None:
    x = seeded(4, 3, 16, 16)
    model = own("resnet8", "fixup", x)
    signal = propagate(model, x, labels(4))
    F.cross_entropy(model(x), labels(4)).backward()
    assert model.classifier.weight.grad is not None
    last = signal.layers[-1]
    assert last.name == "classifier"
    assert last.gradient_norm == pytest.approx(model.classifier.weight.grad.norm().item(), rel=EXACT)
    assert last.weight_norm == 0
    assert last.ratio == math.inf


@pytest.mark.parametrize(("name", "method"), [("resnet8", "he_in"), ("wrn-10-1", "nf"), ("resnet8", "wn")])
def test_layer_norms_are_those_of_autograd(name: str, method: str) -> None:
    x = seeded(4, 3, 16, 16)
    model = own(name, method, x)
    signal = propagate(model, x, labels(4))
    F.cross_entropy(model(x), labels(4)).backward()
    assert [layer.name for layer in signal.layers] == [layer.name for layer in model.plan.layers()]
    for layer in signal.layers:
        weight = model.get_parameter(f"{layer.name}.weight")
        assert weight.grad is not None
        size, slope = np.linalg.norm(weight.detach().numpy()), np.linalg.norm(weight.grad.numpy())
        assert (layer.weight_norm, layer.gradient_norm) == pytest.approx((size, slope), rel=EXACT)
        assert layer.ratio == pytest.approx(slope / size, rel=EXACT)


# Models of others.


class TwoSums(nn.Module):
    """Two residual sums and another addition in the model's own forward pass, one sum with the branch first."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)
        self.out = nn.Linear(width, 3)

    def forward(self, x: Tensor, seen: list[Triple] | None = None) -> Tensor:
        x = self.stem(x) + 0.5
        branch = self.first(x.relu())
        total = x + branch
        if seen is not None:
            seen.append((total, branch, x))
        x = total
        branch = self.second(x.relu())
        total = branch + x
        if seen is not None:
            seen.append((total, branch, x))
        return self.out(total)  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor, seen: list[Triple] | None = None) -> Tensor:
        branch = self.layer((x + 0.1).relu())
        total = x + branch
        if seen is not None:
            seen.append((total, branch, x))
        return total


class Shared(nn.Module):
    """A block that is called twice, with a sum of the model itself between the calls."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.block = Block(width)
        self.between = nn.Linear(width, width)
        self.out = nn.Linear(width, 3)

    def forward(self, x: Tensor, seen: list[Triple] | None = None) -> Tensor:
        x = self.block(self.stem(x), seen)
        branch = self.between(x.relu())
        total = x + branch
        if seen is not None:
            seen.append((total, branch, x))
        return self.out(self.block(total, seen))  # type: ignore[no-any-return]


class Inner(nn.Module):
    """A branch with additions of its own."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer((x + 0.1).relu()) + 0.1  # type: ignore[no-any-return]


class Listed(nn.Module):
    """Branches in a list, whose parts are called from the outer forward pass."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.branches = nn.ModuleList(Inner(width) for _ in range(3))
        self.out = nn.Linear(width, 3)

    def forward(self, x: Tensor, seen: list[Triple] | None = None) -> Tensor:
        x = self.stem(x)
        for module in self.branches:
            branch = module(x)
            total = x + branch
            if seen is not None:
                seen.append((total, branch, x))
            x = total
        return self.out(x)  # type: ignore[no-any-return]


def foreign(factory: Callable[[], nn.Module], dtype: torch.dtype = torch.float64) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return factory().to(dtype)


@pytest.mark.parametrize(
    ("factory", "names"),
    [
        (TwoSums, ["(model)#1", "(model)#2"]),
        (Shared, ["block#1", "(model)", "block#2"]),
        (Listed, ["(model)#1", "(model)#2", "(model)#3"]),
    ],
)
def test_foreign_signal_is_that_of_autograd(factory: Callable[[], nn.Module], names: list[str]) -> None:
    model, x = foreign(factory), seeded(8, 6)
    signal = propagate(model, x, labels(8, 3))
    triples: list[Triple] = []
    logits = model(x, triples)
    for triple in triples:
        kept(*triple)
    F.cross_entropy(logits, labels(8, 3)).backward()
    agree(signal, triples)
    assert [s.name for s in signal.sums] == names


def test_shared_residual_of_ours_is_measured_at_each_call() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(6, 6)
            self.block = Residual(nn.Linear(6, 6), exit=nn.ReLU())
            self.out = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.block(self.block(self.stem(x))))  # type: ignore[no-any-return]

    model, x = foreign(Twice), seeded(8, 6)
    signal = propagate(model, x)
    first = model.block(model.stem(x))  # type: ignore[operator]
    second = model.block(first)  # type: ignore[operator]
    assert signal.series("sum") == pytest.approx([measured(first)[1], measured(second)[1]], rel=EXACT)
    assert [layer.name for layer in signal.layers].count("block.branch") == 1


class Turned(nn.Module):
    """A sum whose shortcut is another view of the memory that the sum before it wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)

    def forward(self, x: Tensor, seen: list[Triple] | None = None) -> Tensor:
        x = self.first(x)
        for layer in (self.first, self.second):
            shortcut = x.transpose(1, 2)
            branch = layer(shortcut.relu())
            x = shortcut + branch
            if seen is not None:
                seen.append((x, branch, shortcut))
        return x


def test_views_of_one_memory_are_told_apart() -> None:
    model, x = foreign(Turned), seeded(4, 6, 6)
    signal = propagate(model, x)
    triples: list[Triple] = []
    out = model(x, triples)
    for triple in triples:
        kept(*triple)
    out.backward(noise(out))
    agree(signal, triples)
    assert triples[0][0].data_ptr() == triples[1][2].data_ptr()


def torchvision_pass(model: Any, x: Tensor) -> tuple[list[Triple], Tensor]:
    """torchvision's ResNet without its additions and ReLUs in place."""
    x = F.max_pool2d(model.bn1(model.conv1(x)).relu(), 3, 2, 1)
    triples: list[Triple] = []
    for stage in (model.layer1, model.layer2, model.layer3, model.layer4):
        for block in stage:
            branch = block.bn2(block.conv2(block.bn1(block.conv1(x)).relu()))
            shortcut = x if block.downsample is None else block.downsample(x)
            total = branch + shortcut
            kept(total, branch, shortcut)
            triples.append((total, branch, shortcut))
            x = total.relu()
    return triples, model.fc(x.mean((2, 3)))


def test_torchvision_signal_is_that_of_autograd() -> None:
    """The sums of torchvision are in place (`out += identity`), and so is the ReLU after them."""
    from torchvision.models import resnet18

    model, x = foreign(lambda: resnet18(weights=None, num_classes=10)), seeded(4, 3, 32, 32)
    signal = propagate(model, x, labels(4))
    triples, logits = torchvision_pass(model, x)
    F.cross_entropy(logits, labels(4)).backward()
    agree(signal, triples, 1e-7)  # where the batch norm of four values meets a variance near zero
    assert [s.name for s in signal.sums] == [f"layer{k}.{b}" for k in range(1, 5) for b in range(2)]
    assert [s.stage for s in signal.sums] == [1, 1, 2, 2, 3, 3, 4, 4]


def test_sequences_have_their_channels_last() -> None:
    x = seeded(2, 5, 6)
    signal = propagate(foreign(TwoSums), x)
    triples: list[Triple] = []
    foreign(TwoSums)(x, triples)
    assert signal.series("sum") == pytest.approx([measured(t)[1] for t, _, _ in triples], rel=EXACT)


def test_encoder_behind_silent_attentions_gets_a_gradient_of_its_own() -> None:
    words = torch.randint(4, 50, (3, 7), generator=torch.Generator().manual_seed(0))
    model = build("transformer-2-2-16-32-2", "fixup", num_classes=50, dropout=0.0)
    signal = propagate(model, (words, words))
    assert signal.injected == "output, memory"
    assert all(value > 0 for value in signal.series("sum_gradient"))


def test_four_layers_in_a_row_are_no_attention() -> None:
    x = seeded(4, 3, 8, 8)
    signal = propagate(own("resmlp-4-32-4", "fixup", x), x)
    assert signal.injected == "features"
    assert len({s.branch_gradient.variance for s in signal.sums}) == 1  # of the one gradient that was put in


class Multiplied(TwoSums):
    """Its classifier is a parameter of its own, which no module is called for."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Parameter(torch.randn(3, 4))

    def forward(self, x: Tensor, seen: list[Triple] | None = None) -> Tensor:
        return super().forward(x, seen) @ self.projection


@pytest.mark.parametrize("zero", [False, True])
def test_classifier_that_is_a_parameter_is_measured(zero: bool) -> None:
    model, x = foreign(Multiplied), seeded(8, 6)
    if zero:
        nn.init.zeros_(model.get_parameter("projection"))
    signal = propagate(model, x)
    assert signal.injected == "output"
    assert {s.name: s.weight_norm for s in signal.layers}["projection"] == pytest.approx(
        float(model.get_parameter("projection").detach().norm())
    )
    assert all((value == 0) is zero for value in signal.series("sum_gradient"))


class Arranged(nn.Module):
    """Two residual sums of signals (N, C, T) or (N, T, C), (N, C, H, W) or (N, H, W, C).

    The last layer is a convolution or a linear one, whose output is turned or not before it is added.
    """

    def __init__(self, last: nn.Module, turn: tuple[int, ...] | None = None) -> None:
        super().__init__()
        self.turn = turn
        self.body = nn.ModuleList([last, deepcopy(last)])

    def forward(self, x: Tensor, seen: list[Tensor] | None = None) -> Tensor:
        for layer in self.body:
            x = x + (layer(x) if self.turn is None else layer(x.permute(self.turn)).permute(self.turn))
            if seen is not None:
                seen.append(x)
        return x


@pytest.mark.parametrize(
    ("last", "turn", "shape", "channels"),
    [
        (lambda: nn.Conv1d(6, 6, 1), None, (4, 6, 9), 1),
        (lambda: nn.Conv1d(6, 6, 1), None, (4, 6, 6), 1),
        (lambda: nn.Conv1d(6, 6, 1), (0, 2, 1), (4, 9, 6), 2),
        (lambda: nn.Linear(6, 6), None, (4, 9, 6), 2),
        (lambda: nn.Linear(6, 6), (0, 2, 1), (4, 6, 9), 2),  # mixes positions: the stream's channels are still the last
        (lambda: nn.Linear(6, 6), None, (4, 9, 5, 6), 3),
        (lambda: nn.Linear(6, 6), (0, 3, 2, 1), (4, 6, 5, 9), 1),
    ],
)
def test_channels_are_where_the_last_layer_puts_them(
    last: Callable[[], nn.Module], turn: tuple[int, ...] | None, shape: tuple[int, ...], channels: int
) -> None:
    model = foreign(lambda: Arranged(last(), turn))
    x = seeded(*shape)
    sums: list[Tensor] = []
    model(x, sums)
    expected = [measured(t.movedim(channels, 1).flatten(2).unsqueeze(-1)) for t in sums]
    found = propagate(model, x).sums
    assert [list(dataclasses.astuple(s.sum)) for s in found] == [pytest.approx(e, rel=EXACT) for e in expected]


def test_constant_a_channel_is_preserved_in_one_dimension_as_in_two() -> None:
    """A network of one-dimensional convolutions is that of two-dimensional ones with one row."""

    class Network(nn.Module):
        def __init__(self, convolution: type[nn.Module]) -> None:
            super().__init__()
            self.body = nn.ModuleList([convolution(8, 8, 1) for _ in range(4)])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.body:
                x = x + layer(x)
            return x

    one, two = foreign(lambda: Network(nn.Conv1d)), foreign(lambda: Network(nn.Conv2d))
    two.load_state_dict({name: t if t.dim() < 3 else t.unsqueeze(2) for name, t in one.state_dict().items()})
    x = seeded(4, 8, 20) + 5 * torch.arange(8.0, dtype=torch.float64).view(1, 8, 1)
    expected = propagate(two, x.unsqueeze(2)).series("sum")
    assert propagate(one, x).series("sum") == pytest.approx(expected, rel=EXACT)


class Composed(nn.Module):
    """Weights that torch composes of other parameters, and a weight that two layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 6)
        self.layer = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.stem.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.tied(x + self.layer(x.relu()))  # type: ignore[no-any-return]


def test_composed_and_tied_weights_are_listed() -> None:
    model, x = foreign(Composed), seeded(8, 6)
    signal = propagate(model, x)
    out = model(x)
    out.backward(noise(out))
    found = {layer.name: layer for layer in signal.layers}
    assert list(found) == ["stem", "layer", "tied"]
    parts = [p for name, p in model.named_parameters() if "original" in name]
    gradients = [p.grad.norm().item() for p in parts if p.grad is not None]
    assert found["layer"].weight_norm == pytest.approx(math.hypot(*(p.norm().item() for p in parts)), rel=EXACT)
    assert found["layer"].gradient_norm == pytest.approx(math.hypot(*gradients), rel=EXACT)
    assert found["tied"].weight_norm == found["stem"].weight_norm
    assert found["tied"].gradient_norm == found["stem"].gradient_norm


# What goes in and comes out.


class Named(nn.Module):
    """Two inputs, and an output in whatever wrapping."""

    def __init__(self, wrap: Callable[[Tensor], Any] = lambda out: out) -> None:
        super().__init__()
        self.model = TwoSums()
        self.wrap = wrap

    def forward(self, left: Tensor, right: Tensor) -> Any:
        return self.wrap(self.model(left - right))


@pytest.mark.parametrize("kind", ["mapping", "tuple", "list"])
def test_several_inputs_are_handed_on(kind: str) -> None:
    model, left, right = foreign(Named), seeded(8, 6), seeded(8, 6, seed=2)
    inputs: Any = {"mapping": {"right": right, "left": left}, "tuple": (left, right), "list": [left, right]}[kind]
    expected = propagate(model.get_submodule("model"), left - right)
    found = propagate(model, inputs)
    assert found.series("sum") == expected.series("sum")
    assert found.series("sum_gradient") == expected.series("sum_gradient")


@pytest.mark.parametrize(
    "wrap",
    [
        lambda out: {"aux": None, "out": out, "other": out.detach()},
        lambda out: (None, out),
        lambda out: [out.argmax(1), out],
        lambda out: SimpleNamespace(loss=None, logits=out),
        lambda out: {"aux": out.detach().exp(), "logits": out},
    ],
    ids=["dict", "tuple", "list after integers", "logits", "logits by name"],
)
def test_output_is_found_in_its_wrapping(wrap: Callable[[Tensor], Any]) -> None:
    inputs = (seeded(8, 6), seeded(8, 6, seed=2))
    plain = propagate(foreign(Named), inputs, labels(8, 3))
    assert propagate(foreign(lambda: Named(wrap)), inputs, labels(8, 3)).sums == plain.sums


@pytest.mark.parametrize(
    "wrap", [lambda out: None, lambda out: "text", lambda out: {"n": 1}, lambda out: out.argmax(1)]
)
def test_output_without_numbers_is_refused(wrap: Callable[[Tensor], Any]) -> None:
    refuse("expected an output that is or holds a tensor", foreign(lambda: Named(wrap)), (seeded(8, 6), seeded(8, 6)))


def test_output_without_tensor_is_measured_with_a_loss() -> None:
    model = foreign(lambda: Named(lambda out: {"deep": {"deeper": out}}))
    inputs = (seeded(8, 6), seeded(8, 6, seed=2))
    expected = propagate(foreign(Named), inputs, labels(8, 3))
    found = propagate(
        model, inputs, labels(8, 3), loss=lambda out, wanted: F.cross_entropy(out["deep"]["deeper"], wanted)
    )
    assert found.sums == expected.sums


@pytest.mark.parametrize(("name", "method"), [("resnet8", "batchnorm"), ("wrn-10-1", "he_in")])
def test_bfloat16_model_is_measured_in_wider_numbers(name: str, method: str) -> None:
    x = seeded(4, 3, 16, 16, dtype=torch.bfloat16)
    model = own(name, method, x)
    signal = propagate(model, x)
    triples, _, logits = own_pass(model, x)
    logits.backward(noise(logits))
    agree(signal, triples, 1e-5)  # in bf16 the numbers themselves would be off by 4e-3
    weight = model.classifier.weight.detach()
    assert signal.layers[-1].weight_norm == pytest.approx(weight.double().norm().item(), rel=1e-6)
    assert weight.norm().item() != pytest.approx(weight.double().norm().item(), rel=1e-6)


def test_autocast_is_respected() -> None:
    x = seeded(4, 3, 16, 16, dtype=torch.float32)
    model = own("wrn-10-1", "he_in", x)
    with torch.autocast("cpu", torch.bfloat16):
        signal = propagate(model, x)
        triples, _, logits = own_pass(model, x)
    assert logits.dtype == torch.bfloat16
    logits.backward(noise(logits))
    agree(signal, triples, 1e-5)


def test_evaluation_mode_is_respected() -> None:
    x = seeded(4, 3, 16, 16)
    model = own("resnet8", "batchnorm", x).eval()
    signal = propagate(model, x, labels(4))
    triples, _, logits = own_pass(model, x)
    F.cross_entropy(logits, labels(4)).backward()
    agree(signal, triples)
    assert signal.series("sum") != propagate(model.train(), x, labels(4)).series("sum")


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_caller_without_gradients_gets_them_measured(context: Callable[[], Any]) -> None:
    model = foreign(TwoSums)
    expected = propagate(model, seeded(8, 6))
    with context():
        assert propagate(model, seeded(8, 6)).sums == expected.sums


@pytest.mark.parametrize("frozen", ["all", "stem", "all but the classifier"])
def test_frozen_parameters_do_not_stop_the_signal(frozen: str) -> None:
    model, x = foreign(TwoSums), seeded(8, 6)
    expected = propagate(model, x, labels(8, 3))
    for name, p in model.named_parameters():
        chosen = {"all": True, "stem": name.startswith("stem"), "all but the classifier": not name.startswith("out")}
        p.requires_grad_(not chosen[frozen])
    flags = [p.requires_grad for p in model.parameters()]
    assert not all(flags)
    found = propagate(model, x, labels(8, 3))
    assert (found.sums, found.layers) == (expected.sums, expected.layers)
    assert [p.requires_grad for p in model.parameters()] == flags


class Detached(TwoSums):
    """Nothing flows back past the first sum."""

    def forward(self, x: Tensor, seen: list[Triple] | None = None) -> Tensor:
        x = self.stem(x)
        x = (x + self.first(x.relu())).detach()
        return self.out(x + self.second(x.relu()))  # type: ignore[no-any-return]


def test_gradient_that_never_arrives_is_zero() -> None:
    first, second = propagate(foreign(Detached), seeded(8, 6)).sums
    assert first.sum_gradient == Stats(0.0, 0.0, 0.0)
    assert second.sum_gradient.variance > 0


# What is refused, in one sentence.


def refuse(match: str, *args: Any, **options: Any) -> None:
    with pytest.raises(ValueError, match=match) as caught:
        propagate(*args, **options)
    assert "\n" not in str(caught.value)


def test_model_without_sums_is_refused() -> None:
    refuse("expected a network with residual sums, got none", build("mlp-4-8", "he_in"), torch.randn(4, 3, 28, 28))
    refuse("expected a network with residual sums, got none", nn.Sequential(nn.Linear(4, 4)), torch.randn(4, 4))


def test_meta_device_is_refused() -> None:
    model = build("resnet8", "he_in", device="meta")
    refuse("expected a model with values, got parameters on the meta device", model, torch.randn(2, 3, 32, 32))


class Checkpointed(nn.Module):
    """Its blocks keep nothing for the backward pass, which runs them again."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant, self.stem = reentrant, nn.Linear(6, 6)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class WithoutGradients(TwoSums):
    def forward(self, x: Tensor, seen: list[Triple] | None = None) -> Tensor:
        with torch.no_grad():
            x = self.stem(x)
            x = x + self.first(x.relu())
        return self.out(x + self.second(x.relu()))  # type: ignore[no-any-return]


def test_sum_that_keeps_nothing_for_a_gradient_is_refused() -> None:
    """Its gradient would be read as zero."""
    says = "expected a gradient at {}, got a forward pass that keeps none; turn gradient checkpointing off"
    refuse(says.format("blocks.0"), foreign(lambda: Checkpointed(True)), seeded(8, 6))
    refuse(says.format(r"\(model\)#1"), foreign(WithoutGradients), seeded(8, 6))


def test_checkpointing_that_keeps_the_graph_is_measured() -> None:
    model = foreign(lambda: Checkpointed(False))
    found = propagate(model, seeded(8, 6))
    plain = foreign(lambda: nn.Sequential(nn.Linear(6, 6), *[Block() for _ in range(3)]))
    expected = propagate(plain, seeded(8, 6))
    assert found.series("sum_gradient") == pytest.approx(expected.series("sum_gradient"), rel=EXACT)


def test_one_value_a_channel_is_refused() -> None:
    model = foreign(TwoSums)
    refuse(r"at least two values a channel at \(model\)#1, .* larger batch", model, seeded(1, 6))
    propagate(model, seeded(2, 6))


def position(index: int, total: int) -> Position:
    return Position(index, total, 1, index, total)


def plan_at(*homes: str, addition: int = 0) -> ResidualPlan:
    return ResidualPlan(
        tuple(
            Branch(home, position(i, len(homes)), (Layer("stem"),), home=home, addition=addition)
            for i, home in enumerate(homes, 1)
        )
    )


def test_plan_of_another_model_is_refused() -> None:
    model = foreign(Shared)
    refuse("expected a plan of this model, got one with a sum in 'body.0'", model, seeded(8, 6), plan=plan_at("body.0"))
    wrong = plan_at("block", addition=7)
    refuse("through every residual sum of the plan, got none through block", model, seeded(8, 6), plan=wrong)


def test_given_plan_is_used() -> None:
    model = foreign(Shared)
    signal = propagate(model, seeded(8, 6), plan=plan_at("block", addition=3))
    assert [s.name for s in signal.sums] == ["block"]
    assert signal.sums[0].sum == propagate(model, seeded(8, 6)).sums[2].sum


# No trace.


class Worn(nn.Module):
    """Everything that a pass can leave its mark on: dropout, batch norm, buffers in place and replaced, a shared block.

    It keeps weak references to its activations, and stops halfway when told to.
    """

    calls: Tensor
    latest: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.dropout = nn.Dropout(0.3)
        self.block = Block()
        self.out = nn.Linear(6, 3)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("latest", torch.zeros(6))
        self.seen: list[weakref.ref[Tensor]] = []
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.dropout(self.norm(self.stem(x)))
        self.latest = x.detach().mean(0)
        self.seen.append(weakref.ref(x))
        x = self.block(x)
        self.seen.append(weakref.ref(x))
        if self.fails:
            raise KeyError("halfway")
        return self.out(self.block(x))  # type: ignore[no-any-return]


def worn(dtype: torch.dtype = torch.float32) -> Worn:
    model = foreign(Worn, dtype)
    assert isinstance(model, Worn)
    model.stem.register_forward_hook(lambda *_: None)
    model.out.register_full_backward_hook(lambda *_: None)
    model.stem.weight.grad = torch.ones_like(model.stem.weight)
    model.out.bias.requires_grad_(False)
    model.block.eval()  # modes differ
    model.norm.weight.register_hook(lambda g: None)
    return model


HOOKS = [name for name in vars(nn.Linear(1, 1)) if name.endswith("_hooks")]


def state(model: nn.Module) -> dict[str, Any]:
    """All that must be as before; objects by identity where they must be the same."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        "hooks": {n: [list(getattr(m, hooks)) for hooks in HOOKS] for n, m in model.named_modules()},
        "tensor hooks": {
            n: (list(p._backward_hooks or ()), list(p._post_accumulate_grad_hooks or ()))  # type: ignore[attr-defined]
            for n, p in model.named_parameters()
        },
        "modes": {n: m.training for n, m in model.named_modules()},
        "gradients": {n: id(p.grad) if p.grad is not None else None for n, p in model.named_parameters()},
        "gradient values": {n: p.grad.tolist() for n, p in model.named_parameters() if p.grad is not None},
        "objects": {n: id(t) for n, t in tensors.items()},
        "values": {n: t.tolist() for n, t in tensors.items()},
        "flags": {n: t.requires_grad for n, t in tensors.items()},
        "random": torch.get_rng_state().tolist(),
        "grad mode": torch.is_grad_enabled(),
    }


def test_state_sees_every_kind_of_trace() -> None:
    """The control: a plain pass changes most of it."""
    assert len(HOOKS) >= 5
    model = worn()
    before = state(model)
    model(seeded(8, 6, dtype=torch.float32)).sum().backward()
    model.block.register_forward_hook(lambda *_: None)
    model.norm.eval()
    model.out.bias.requires_grad_(True)
    after = state(model)
    changed = {key for key in before if before[key] != after[key]}
    assert changed >= {"hooks", "modes", "gradients", "gradient values", "objects", "values", "flags", "random"}


@pytest.mark.parametrize("fails", [False, True], ids=["returns", "raises"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_propagation_leaves_no_trace(fails: bool, training: bool) -> None:
    model = worn() if training else worn().eval()
    x = seeded(8, 6, dtype=torch.float32)
    plan = propagate(model, x).plan
    model.fails = fails
    before = state(model)
    if fails:
        with pytest.raises(KeyError, match="halfway"):
            propagate(model, x, plan=plan)
    else:
        propagate(model, x)
    assert state(model) == before
    gc.collect()
    assert model.seen
    assert all(tensor() is None for tensor in model.seen)


@pytest.mark.parametrize("name", ["resnet8", "wrn-10-1"])
@pytest.mark.parametrize("method", ["fixup", "batchnorm", "spectralnorm", "wn"])
def test_propagation_leaves_no_trace_on_our_models(name: str, method: str) -> None:
    x = seeded(2, 3, 8, 8, dtype=torch.float32)
    model = own(name, method, x)
    before = state(model)
    propagate(model, x, labels(2))
    assert state(model) == before


def test_error_of_a_backward_pass_leaves_no_trace() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            raise KeyError("backward")

    model = worn()
    handle = model.stem.register_forward_hook(lambda _m, _a, out: Fails.apply(out))
    before = state(model)
    with pytest.raises(KeyError, match="backward"):
        propagate(model, seeded(8, 6, dtype=torch.float32))
    assert state(model) == before
    handle.remove()


def test_optimizer_in_the_backward_pass_does_not_step() -> None:
    model = foreign(TwoSums)
    steps: list[Tensor] = []

    def step(p: Tensor) -> None:
        steps.append(p)
        with torch.no_grad():
            p.add_(1.0)

    handles = [p.register_post_accumulate_grad_hook(step) for p in model.parameters()]
    before = state(model)
    propagate(model, seeded(8, 6), labels(8, 3))
    assert state(model) == before
    assert not steps
    F.cross_entropy(model(seeded(8, 6)), labels(8, 3)).backward()
    assert len(steps) == len(handles)


def test_graph_of_the_caller_survives() -> None:
    """Batch norm in evaluation mode reads its buffers in the backward pass: they must not have been written."""
    x = seeded(4, 3, 16, 16)
    model = own("resnet8", "batchnorm", x).eval()
    loss = F.cross_entropy(model(x), labels(4))
    propagate(model, x)
    loss.backward()


@pytest.mark.parametrize("leaf", [True, False], ids=["leaf", "of a graph"])
def test_input_of_the_caller_gets_no_gradient(leaf: bool) -> None:
    source = seeded(8, 6).requires_grad_()
    x = source if leaf else source.square()
    expected = propagate(foreign(TwoSums), seeded(8, 6) if leaf else seeded(8, 6).square())
    assert propagate(foreign(TwoSums), x).sums == expected.sums
    assert source.grad is None
    assert not x._backward_hooks
    x.sum().backward()  # the caller's graph is still there


class Overwriting(TwoSums):
    """Scales its input in place, as preprocessing does."""

    def forward(self, x: Tensor, seen: list[Triple] | None = None) -> Tensor:
        return super().forward(x.mul_(2.0), seen)


def test_input_of_the_caller_is_not_written_into() -> None:
    model, x = foreign(Overwriting), seeded(8, 6)
    first, again = propagate(model, x), propagate(model, x)
    assert first.sums == again.sums
    assert torch.equal(x, seeded(8, 6))


def test_sum_with_an_input_that_needs_a_gradient_leaves_no_hook() -> None:
    model, x = foreign(Block), seeded(8, 6).requires_grad_()
    signal = propagate(model, x)
    assert signal.sums[0].shortcut_gradient.variance > 0
    assert not x._backward_hooks
    assert x.grad is None


def test_measurements_repeat_exactly() -> None:
    """Dropout draws the same numbers, since the random state is as before."""
    model, x = worn(), seeded(8, 6, dtype=torch.float32)
    assert propagate(model, x).sums == propagate(model, x).sums


def leaves(value: Any) -> list[Any]:
    if is_dataclass(value):
        return [leaf for f in fields(value) for leaf in leaves(getattr(value, f.name))]
    return [leaf for item in value for leaf in leaves(item)] if isinstance(value, tuple | list) else [value]


def test_thousand_blocks_leave_only_numbers() -> None:
    model = build("resmlp-1000-8", "fixup", generator=torch.Generator().manual_seed(0))
    signal = propagate(model, seeded(8, 3, 28, 28, dtype=torch.float32))
    assert len(signal.sums) == 1000
    assert {type(leaf) for leaf in leaves([signal.sums, signal.layers])} == {float, str, int, bool, type(None)}
    assert signal.series("sum")[-1] == pytest.approx(signal.series("sum")[0], rel=1e-4)  # branches begin at zero


# The numbers themselves.


@pytest.mark.parametrize("shape", [(7,), (8, 3), (4, 5, 3), (4, 3, 5, 5), (2, 3, 4, 4, 4)])
def test_moments_are_those_of_numpy(shape: tuple[int, ...]) -> None:
    x = seeded(*shape) * 3 + 1
    expected = measured(x if x.dim() > 1 else x.unsqueeze(1))
    assert list(dataclasses.astuple(moments(x))) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("way", ["plain", "dear"])
@pytest.mark.parametrize(("shape", "channels"), [((4, 3, 5), 1), ((4, 3, 600), 1), ((4, 5, 6, 3), 3), ((4, 5, 3), 2)])
def test_moments_are_of_the_channels_that_are_given(
    shape: tuple[int, ...], channels: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = seeded(*shape) * 3 + 1
    if way == "dear":
        dear(monkeypatch)
    expected = measured(x.movedim(channels, 1).flatten(2).unsqueeze(-1))
    assert list(dataclasses.astuple(moments(x, channels))) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_moments_do_not_leave_the_range_before_the_signal(scale: float) -> None:
    """Squares of float32 would: they end at 1e-45 and 3e38."""
    x = seeded(4, 3, 5, 5, dtype=torch.float32) * scale
    assert list(dataclasses.astuple(moments(x))) == pytest.approx(measured(x), rel=1e-4, abs=0)
    assert x.square().mean().item() in (0.0, math.inf)


def test_moments_of_an_offset_keep_their_digits() -> None:
    """A difference of two large numbers would lose the variance."""
    x = seeded(4, 3, 8, 8, dtype=torch.float32) * 1e-3 + 100
    assert list(dataclasses.astuple(moments(x))) == pytest.approx(measured(x), rel=1e-3)
    naive = (x.square().mean((0, 2, 3)) - x.mean((0, 2, 3)).square()).mean().item()
    assert naive != pytest.approx(measured(x)[1], rel=1e-1)


# However the work is grouped, the numbers are the same.


def dear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the way of a GPU on the CPU."""
    monkeypatch.setattr("normfree.diagnostics.moments.launches_are_dear", lambda _tensor: True)


SHAPES = [(7,), (8, 3), (4, 5, 3), (4, 3, 5, 5), (4, 3, 24, 24), (2, 3, 8, 8, 9), (5, 3, 24, 24), (4, 2, 32, 32)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_both_ways_to_reduce_agree(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [seeded(*shape, seed=i, dtype=dtype) * 3 + i for i, shape in enumerate(SHAPES)]
    tensors.append(tensors[4].to(memory_format=torch.channels_last))
    expected = [dataclasses.astuple(moments(x)) for x in tensors]
    dear(monkeypatch)
    ways = [reduce(x) for x in tensors]
    assert {r.mean.dim() for r in ways} == {1, 2}  # some still wait for the batch
    for found in (finish(ways), [moments(x) for x in tensors]):
        for stats, numbers in zip(found, expected, strict=True):
            assert dataclasses.astuple(stats) == pytest.approx(numbers, rel=1e-12 if dtype == torch.float64 else 1e-5)


def test_tensors_of_several_types_are_finished_together() -> None:
    tensors = [seeded(4, 3, dtype=dtype) for dtype in (torch.float64, torch.float32, torch.float64, torch.bfloat16)]
    assert finish([reduce(x) for x in tensors]) == [moments(x) for x in tensors]
    vectors = [torch.tensor([1.0]), torch.tensor([2.0, 3.0], dtype=torch.float64), torch.tensor([4.0])]
    assert flat(vectors).tolist() == [1, 2, 3, 4]


def whole(signal: Signal) -> list[float]:
    return [leaf for leaf in leaves([signal.sums, signal.layers]) if isinstance(leaf, float)]


@pytest.mark.parametrize("at_once", [0, 2**24])
@pytest.mark.parametrize("own_model", [True, False])
def test_signal_is_the_same_on_the_way_of_a_gpu(own_model: bool, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision.models import resnet18

    x = seeded(2, 3, 48, 48) if own_model else seeded(2, 3, 96, 96)
    model = own("resnet8", "batchnorm", x) if own_model else foreign(lambda: resnet18(weights=None, num_classes=10))
    expected = propagate(model, x, labels(2))
    settled: list[int] = []

    def count(every: Any) -> None:
        settled.append(len(every))
        settle(every)

    dear(monkeypatch)
    monkeypatch.setattr("normfree.diagnostics.sum_hooks.BYTES_UNSETTLED", at_once)
    monkeypatch.setattr("normfree.diagnostics.sum_hooks.settle", count)
    found = propagate(model, x, labels(2))
    assert whole(found) == pytest.approx(whole(expected), rel=1e-9, abs=1e-15)
    assert (len(settled) > 1) == (at_once == 0)  # the last time is when all is measured


def test_tensor_is_reduced_once_for_all_that_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block's output is the next one's shortcut, and one sum hands the same gradient to both of its operands."""
    reduced: list[Tensor] = []
    hooked: list[Tensor] = []
    register = Tensor.register_hook

    def count(tensor: Tensor, channels: int) -> Any:
        reduced.append(tensor)
        return reduce(tensor, channels)

    def hook(tensor: Tensor, call: Any) -> Any:
        hooked.append(tensor)
        return register(tensor, call)

    monkeypatch.setattr("normfree.diagnostics.sum_hooks.reduce", count)
    monkeypatch.setattr(Tensor, "register_hook", hook)
    x = seeded(4, 3, 16, 16)
    propagate(own("resnet20", "he_in", x, form="linear"), x)
    blocks, transitions = 9, 2
    forward = blocks + blocks + 1 + transitions  # sums, branches, and the shortcuts that are no sum
    backward = blocks + 1  # of the sums, which are those of the branches and transitions too, and of the first shortcut
    assert len(reduced) == forward + backward
    assert len(hooked) == forward


@pytest.mark.parametrize("at_once", [0, 2**12, 2**26])
def test_gradients_are_reduced_in_portions(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = foreign(Shared), seeded(8, 6)
    expected = propagate(model, x, labels(8, 3))
    monkeypatch.setattr("normfree.diagnostics.propagation.BYTES_AT_ONCE", at_once)
    most = 0
    plain = model.get_parameter("stem.bias")

    def look(_gradient: Tensor) -> None:
        nonlocal most
        most = max(most, sum(p.grad is not None for p in model.parameters()))

    handle = plain.register_hook(look)
    assert propagate(model, x, labels(8, 3)).layers == expected.layers
    handle.remove()
    assert most <= 1 if at_once == 0 else most > 1


# The plan is stated once.


def test_stated_plan_is_kept_while_the_model_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    x = seeded(4, 3, 16, 16)
    model = own("wrn-10-1", "convshort", x)
    plan = propagate(model, x).plan
    assert plan == model.plan
    assert propagate(model, x).plan is plan
    with torch.no_grad():
        model.classifier.weight.mul_(2)
    assert propagate(model.eval(), x).plan is plan


@pytest.mark.parametrize("change", ["layer", "activation", "setting", "block"])
def test_stated_plan_follows_the_model(change: str) -> None:
    x = seeded(4, 3, 16, 16)
    model = own("wrn-10-1", "convshort", x)
    before = propagate(model, x).plan
    blocks = [m for m in model.body.modules() if isinstance(m, Residual)]
    if change == "layer":
        model.stem = nn.Sequential(model.stem, nn.Conv2d(16, 16, 1, dtype=x.dtype))
    elif change == "activation":
        blocks[0].entry = nn.Identity()
    elif change == "setting":
        blocks[1].shortcut_reads_entry = not blocks[1].shortcut_reads_entry
    else:
        del model.body[-1]
        model.classifier = nn.Linear(32, 10, dtype=x.dtype)
    after = propagate(model, x).plan
    assert after == model.plan
    assert after != before


def test_kept_plan_does_not_keep_the_model() -> None:
    x = seeded(4, 3, 16, 16)
    model = own("resnet8", "he_in", x)
    propagate(model, x)
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


def test_parts_have_the_names_of_torch() -> None:
    for model in (foreign(Composed), foreign(Shared), worn(), build("resnet8", "wn")):
        found = parts_of(model)
        assert list(found.modules.items()) == list(model.named_modules())
        assert list(found.parameters) == [name for name, _ in model.named_parameters()]
        assert all(found.parameters[name] is p for name, p in model.named_parameters())


def test_layer_without_weight_has_an_infinite_ratio() -> None:
    x = seeded(4, 3, 16, 16)
    signal = propagate(own("resnet8", "fixup", x), x)
    zero = [layer for layer in signal.layers if layer.weight_norm == 0]
    assert zero
    assert all(layer.ratio == math.inf for layer in zero)
    assert all(math.isfinite(layer.ratio) for layer in signal.layers if layer.weight_norm)


@pytest.mark.gpu
def test_gpu_agrees_with_cpu() -> None:
    x = seeded(4, 3, 16, 16)
    model = own("resnet8", "batchnorm", x)
    here = propagate(model, x)
    state_before = torch.cuda.get_rng_state()
    there = propagate(model.cuda(), x.cuda())
    for part in ("sum", "branch", "shortcut", "sum_gradient", "branch_gradient", "shortcut_gradient"):
        assert there.series(part) == pytest.approx(here.series(part), rel=1e-6)
    assert torch.equal(torch.cuda.get_rng_state(), state_before)
