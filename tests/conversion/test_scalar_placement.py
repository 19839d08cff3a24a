"""The scalars and layers that a conversion adds, against equations written out by hand."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normfree
from normed_blocks import Block, Language, X, network, perturb_
from normfree.conversion import convert
from normfree.nn.scalars import scalars_of
from normfree.plan import Position


def branch(block: nn.Module, x: Tensor) -> Tensor:
    """The branch of a converted block without its scalars."""
    hidden = F.relu(F.linear(x, block.first.weight, block.first.bias))
    return F.linear(hidden, block.second.weight, block.second.bias)


@pytest.mark.parametrize("method", ["skipinit", "rezero", "small_branch", "hanin"])
def test_branch_is_multiplied_by_the_law_of_its_position(method: str) -> None:
    model, plan = convert(network(), method, X)
    law = normfree.methods.get(method).rule.beta
    for l, found in enumerate(plan.branches, start=1):
        block = model[l]
        beta = law.at(Position(l, 3, 1, l, 3))
        assert block.second.beta.item() == pytest.approx(beta)
        assert block.second.beta.requires_grad == law.learnable
        assert found.last_layers[0].name == f"{l}.second"
        torch.testing.assert_close(block(X), X + beta * branch(block, X))


def test_fixup_computes_its_equation() -> None:
    """x + β · (W2 (ReLU(W1 (x + b1) + c1) + b2) + c2) + δ with L^(-1/2) at m = 2 and the last layer 0."""
    model, _ = convert(network(), "fixup", X, generator=torch.Generator().manual_seed(0))
    block = model[2]
    assert not block.second.weight.any()
    assert not model[5].weight.any()
    assert block.first.weight.std().item() == pytest.approx((1 / 16 / 3) ** 0.5, rel=0.25)  # gain 1, fan-out 16, L = 3
    perturb_(model)
    b1, b2 = block.first.shift, block.second.shift
    beta, delta = block.second.beta, block.second.delta
    hidden = F.relu(F.linear(X + b1, block.first.weight, block.first.bias))
    torch.testing.assert_close(
        block(X), X + beta * F.linear(hidden + b2, block.second.weight, block.second.bias) + delta
    )
    assert scalars_of(block.first).keys() == {"shift"}  # its own bias stands before the activation


def test_fixup_puts_a_bias_before_an_activation_that_has_none() -> None:
    model, plan = convert(normfree.build("resnet20", "batchnorm"), "fixup", torch.randn(2, 3, 32, 32))
    first = dict(model.named_modules())[plan.branches[0].layers[0].name]
    assert scalars_of(first).keys() == {"shift", "delta"}
    groups = {g["name"]: g for g in normfree.param_groups(model, lr=1.0, method="fixup", plan=plan)}
    assert groups["scalars"]["lr"] == pytest.approx(0.1)
    scalars = [p for p in groups["scalars"]["params"] if p.numel() == 1]
    learnable = [a for a in plan.changes.added if a.learnable]
    assert len(scalars) == len(learnable)
    biases = [p for p in groups["scalars"]["params"] if p.numel() > 1]  # in this model, the classifier's alone
    assert [id(p) for p in biases] == [id(model.classifier.bias)]
    assert sum(p.numel() for g in groups.values() for p in g["params"]) == plan.changes.parameters_after


def test_nf_scales_entry_and_end_of_a_standardized_branch() -> None:
    model, _ = convert(network(), "nf", X)
    for index, block in enumerate(list(model)[1:4]):
        alpha = (1 + index * 0.04) ** -0.5  # β = 0.2; the variance restarts at the first branch of the stage
        assert scalars_of(block.first).get("alpha", torch.tensor(1.0)).item() == pytest.approx(alpha)
        assert block.second.beta.item() == pytest.approx(0.2)
        weight = block.first.effective_weight()
        torch.testing.assert_close(weight.mean(1), torch.zeros(16), atol=1e-6, rtol=0)
        hidden = F.relu(F.linear(alpha * X, weight, block.first.bias))
        end = F.linear(hidden, block.second.effective_weight(), block.second.bias)
        torch.testing.assert_close(block(X), X + 0.2 * end)


def test_wn_keeps_lengths_by_the_stage() -> None:
    model, _ = convert(network(), "wn", X)
    assert model[1].first.gain.flatten()[0].item() == pytest.approx((2 * 8 / 16) ** 0.5)
    assert model[1].second.gain.flatten()[0].item() == pytest.approx((16 / 8 / 3) ** 0.5)
    assert type(model[5]) is nn.Linear


@pytest.mark.parametrize("method", ["sqrt_half", "idshort", "shao"])
def test_block_that_returns_the_sum_is_scaled_whole(method: str) -> None:
    model, _ = convert(network(), method, X)
    rule = normfree.methods.get(method).rule
    for l in (1, 2, 3):
        v = rule.at(Position(l, 3, 1, l, 3))
        expected = v["c"] * (v["a"] * X + v["beta"] * branch(model[l], X))
        torch.testing.assert_close(model[l](X), expected)


def test_learnable_shortcut_scalar_multiplies_the_shortcut() -> None:
    model, _ = convert(network(), "learnscalar", X)
    perturb_(model)
    block = model[2]
    torch.testing.assert_close(block(X), 0.5**0.5 * (block.skip * X + branch(block, X)))


class SubtractedFrom(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.relu(self.norm2(self.first(self.norm1(x))))) - x


class Subtracting(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x - self.second(F.relu(self.norm2(self.first(self.norm1(x)))))


def test_subtracted_branch_is_a_branch() -> None:
    model, plan = convert(network(block=Subtracting), "fixup", X)
    assert [len(b.layers) for b in plan.branches] == [2, 2, 2]
    torch.testing.assert_close(model[1](X), X)  # the last layer of a branch starts at 0
    model, _ = convert(network(block=Subtracting), "learnscalar", X)
    perturb_(model)
    block = model[2]
    torch.testing.assert_close(block(X), 0.5**0.5 * (block.skip * X - branch(block, X)))


def test_subtracted_shortcut_gets_no_scalar() -> None:
    """The term that is added to a block's output to scale its shortcut would have the wrong sign."""
    with pytest.raises(ValueError, match="its shortcut is not the first argument of the block"):
        convert(network(block=SubtractedFrom), "learnscalar", X)


def test_relu_lets_a_positive_factor_of_the_sum_through() -> None:
    torchvision = pytest.importorskip("torchvision")
    original = torchvision.models.resnet18(num_classes=4)
    images = torch.randn(2, 3, 64, 64)
    model, _ = convert(original, "sqrt_half", images)
    signal = torch.randn(2, 64, 8, 8).relu()
    block = model.layer1[1]
    end = block.conv2(F.relu(block.conv1(signal)))
    torch.testing.assert_close(block(signal), F.relu(0.5**0.5 * (signal + end)))
    with pytest.raises(
        ValueError, match=r"'layer1.0'.* scales the sum itself, but 'layer1.0' computes more after the sum"
    ):
        convert(original, "learnscalar", images)


class TwoSums(nn.Module):
    """Two residual sums in one forward pass, as a transformer's block has them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(self.norm1(x))
        return x + self.second(self.norm2(x))


def test_sum_that_no_module_returns_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'1#1'.*scales the sum itself, but '1' computes more after the sum"):
        convert(network(1, TwoSums), "idshort", X)


class SumComesSecond(Block):
    """Puts out something else before the sum."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.mean(-1), super().forward(x)


class SumInDict(Block):
    """Puts out the sum by name."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"y": super().forward(x)}


class SignalComesSecond(Block):
    """Is given something else before the signal."""

    def forward(self, mask: Tensor, x: Tensor) -> Tensor:
        return super().forward(x)


class Calls(nn.Module):
    """Calls its blocks in a way of their own."""

    def __init__(self, block: type[nn.Module], call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.blocks = nn.Linear(8, 8), nn.ModuleList(block() for _ in range(3))
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = self.call(block, x)
        return x


@pytest.mark.parametrize(
    ("block", "call", "method", "reason"),
    [
        (SumComesSecond, lambda b, x: b(x)[1], "sqrt_half", "'blocks.0' does not return it"),
        (SumInDict, lambda b, x: b(x)["y"], "sqrt_half", "'blocks.0' does not return it"),
        (SignalComesSecond, lambda b, x: b(X, x), "learnscalar", "its shortcut is not the first argument of the block"),
    ],
)
def test_block_with_another_output_or_first_argument_is_refused(
    block: type[nn.Module], call: Callable[[nn.Module, Tensor], Tensor], method: str, reason: str
) -> None:
    with pytest.raises(ValueError, match=rf"'blocks.0'.*scales the sum itself, but {reason}.*; use a method"):
        convert(Calls(block, call), method, X)


def test_shortcut_scalar_finds_a_signal_that_is_given_by_name() -> None:
    model, _ = convert(Calls(Block, lambda b, x: b(x=x)), "learnscalar", X)
    perturb_(model)
    block = model.blocks[1]
    torch.testing.assert_close(block(x=X), block(X))
    torch.testing.assert_close(block(x=X), 0.5**0.5 * (block.skip * X + branch(block, X)))


@pytest.mark.parametrize("matmul", [False, True])
def test_classifier_that_is_the_embedding_gets_no_bias(matmul: bool) -> None:
    model, plan = convert(Language(matmul=matmul), "fixup", torch.arange(12).view(2, 6))
    assert plan.classifier[0].tied
    assert not scalars_of(model.words)
    assert model(torch.arange(6).view(1, 6)).any()


class Whole(nn.Module):
    """A sum over two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.blocks(x)


def test_isograd_scales_sums_over_whole_blocks() -> None:
    _, plan = convert(network(2, Whole), "isograd", X)
    assert not plan.branches[-1].layers
    assert [record.kind for record in plan.changes.added] == ["multiplier c of a sum"] * 6
    assert "the signal may still grow at outer skips" in plan.changes.notes[0]


def test_relu_after_a_sum_is_known_by_its_class() -> None:
    """A positive factor passes through a ReLU, whatever the model calls it, and not through another activation."""

    class Activated(Block):
        kind: type[nn.Module] = nn.ReLU

        def __init__(self) -> None:
            super().__init__()
            self.activation = self.kind()

        def forward(self, x: Tensor) -> Tensor:
            return self.activation(super().forward(x))

    class Bent(Activated):
        kind = nn.GELU

    _, plan = convert(network(2, Activated), "isograd", X)
    assert len(plan.changes.added) == 2
    with pytest.raises(ValueError, match="'1' computes more after the sum"):
        convert(network(2, Bent), "isograd", X)


class Upsampling(nn.Module):
    """A transposed convolution before a block."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.first = nn.ConvTranspose2d(3, 4, 2), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        return x + self.first(self.norm(x))


@pytest.mark.parametrize("method", ["nf", "wn", "wn_data"])
def test_transposed_convolution_is_refused_by_methods_with_other_weights(method: str) -> None:
    with pytest.raises(ValueError, match=r"'up.weight' cannot become .*: ConvTranspose2d uses its weight in a custom"):
        convert(Upsampling(), method, torch.randn(2, 3, 4, 4))
