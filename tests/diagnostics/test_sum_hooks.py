"""The measurements at residual sums of any model against tensors that the test keeps itself."""

import dataclasses
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from normfree.diagnostics.measurement.moments import MomentStore, channel_moments
from normfree.diagnostics.propagation import propagate
from normfree.diagnostics.signals import Signal, Stats
from normfree.nn.residual import Residual
from normfree.plan import Branch, Layer, Position, ResidualPlan
from signal_oracles import (
    EXACT,
    Block,
    Shared,
    Triple,
    TwoSums,
    agree,
    foreign,
    kept,
    labels,
    leaves,
    measured,
    noise,
    own,
    reduce_as_on_gpu,
    refuse,
    seeded,
)


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


@pytest.mark.parametrize(
    ("factory", "names"),
    [
        (TwoSums, ["first", "second"]),
        (Shared, ["block#1", "between", "block#2"]),
        (Listed, ["branches.0", "branches.1", "branches.2"]),
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


def test_views_of_one_memory_are_distinguished() -> None:
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
    assert [list(dataclasses.astuple(s.sum)[:3]) for s in found] == [pytest.approx(e, rel=EXACT) for e in expected]


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
    says = "expected a gradient at '{}', got a forward pass that keeps none; turn gradient checkpointing off"
    refuse(says.format("blocks.0"), foreign(lambda: Checkpointed(True)), seeded(8, 6))
    refuse(says.format("first"), foreign(WithoutGradients), seeded(8, 6))


def test_checkpointing_that_keeps_the_graph_is_measured() -> None:
    model = foreign(lambda: Checkpointed(False))
    found = propagate(model, seeded(8, 6))
    plain = foreign(lambda: nn.Sequential(nn.Linear(6, 6), *[Block() for _ in range(3)]))
    expected = propagate(plain, seeded(8, 6))
    assert found.series("sum_gradient") == pytest.approx(expected.series("sum_gradient"), rel=EXACT)


def test_one_value_a_channel_is_refused() -> None:
    model = foreign(TwoSums)
    refuse(r"at least two values per channel at 'first', .* larger batch", model, seeded(1, 6))
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
    reduce = MomentStore.reduce

    def count(every: Any) -> None:
        settled.append(len(every))
        reduce(every)

    reduce_as_on_gpu(monkeypatch)
    monkeypatch.setattr("normfree.diagnostics.measurement.moments.BYTES_PER_REDUCTION", at_once)
    monkeypatch.setattr(MomentStore, "reduce", count)
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
        return channel_moments(tensor, channels)

    def hook(tensor: Tensor, call: Any) -> Any:
        hooked.append(tensor)
        return register(tensor, call)

    monkeypatch.setattr("normfree.diagnostics.measurement.moments.channel_moments", count)
    monkeypatch.setattr(Tensor, "register_hook", hook)
    x = seeded(4, 3, 16, 16)
    propagate(own("resnet20", "he_in", x, form="linear"), x)
    blocks, transitions = 9, 2
    forward = blocks + blocks + 1 + transitions  # sums, branches, and the shortcuts that are no sum
    backward = blocks + 1  # of the sums, which are those of the branches and transitions too, and of the first shortcut
    assert len(reduced) == forward + backward
    assert len(hooked) == forward
