"""Every normalizer is removed, and the code around it still works."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normed_blocks import Block, X, network, perturb_
from normfree.conversion import convert
from normfree.conversion.norms import find_norms
from normfree.nn.normalizers import NORM_TYPES, DynamicTanh


def test_dyt_stands_where_norms_stood_and_leaves_the_rest() -> None:
    original = network()
    model, plan = convert(original, "dyt:alpha=0.7", X)
    assert [r.left for r in plan.changes.removed] == ["DynamicTanh"] * 7
    torch.testing.assert_close(model[4](X), torch.tanh(0.7 * X))
    torch.testing.assert_close(model[1].first.weight, original[1].first.weight)


class InPlace(nn.Module):
    """A pre-activation whose ReLU writes into the normalizer's output: without it, that is the stream itself."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first = nn.LayerNorm(8), nn.Linear(8, 8)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.first(self.relu(self.norm(x)))


class InPlaceFunction(InPlace):
    """The same by a function."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.first(F.relu(self.norm(x), inplace=True))


@pytest.mark.parametrize("block", [InPlace, InPlaceFunction])
def test_activation_no_longer_writes_into_the_stream(block: type[nn.Module]) -> None:
    model, _ = convert(network(1, block), "small_branch", X)
    before = X.clone()
    expected = X + 0.2 * F.linear(X.relu(), model[1].first.weight)
    torch.testing.assert_close(model[1](X), expected)
    assert torch.equal(X, before)


class ReadsWeight(Block):
    """Reads its normalizer's weight, as Mamba does."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.norm1.weight.dtype))


def test_weight_that_the_model_reads_of_a_norm_stays() -> None:
    model, plan = convert(network(1, ReadsWeight), "fixup", X)
    assert model[1].norm1.weight.shape == (8,)
    assert plan.changes.removed[0].left == "RemovedNorm"
    assert model(X).isfinite().all()


def test_fused_activation_stays() -> None:
    timm = pytest.importorskip("timm")
    _, plan = convert(timm.create_model("resnetv2_50", num_classes=4), "fixup", torch.randn(2, 3, 32, 32))
    assert {(r.kind, r.left) for r in plan.changes.removed} == {("BatchNormAct2d", "ReLU")}


def test_frozen_and_synchronized_norms_go() -> None:
    torchvision = pytest.importorskip("torchvision")
    frozen = torchvision.models.resnet18(norm_layer=torchvision.ops.FrozenBatchNorm2d)
    model, plan = convert(frozen, "skipinit", torch.randn(1, 3, 32, 32))
    assert {r.kind for r in plan.changes.removed} == {"FrozenBatchNorm2d"}
    assert not find_norms(model)


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.LayerNorm, nn.RMSNorm, lambda c: nn.GroupNorm(2, c)])
@pytest.mark.parametrize("method", ["fixup", "dyt"])
def test_every_norm_of_torch_goes(norm: type[nn.Module], method: str) -> None:
    class Normed(Block):
        def __init__(self) -> None:
            super().__init__(norm=norm)

    model, _ = convert(network(2, Normed), method, X)
    assert not any(isinstance(m, NORM_TYPES) for m in model.modules())
    assert sum(isinstance(m, DynamicTanh) for m in model.modules()) == (5 if method == "dyt" else 0)
    assert model(X).isfinite().all()


def test_transformer_layer_of_torch_computes_the_same_with_and_without_gradients() -> None:
    """In inference its fast path would run layer norm inside one kernel."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.Linear(8, 8), nn.TransformerEncoder(layer, 2), nn.Linear(8, 4)).eval()
    tokens = torch.randn(2, 5, 8)
    converted, plan = convert(model, "fixup", tokens)
    assert [b.depth for b in plan.branches] == [4, 2, 4, 2]
    perturb_(converted)
    with torch.no_grad():
        fast = converted(tokens)
    torch.testing.assert_close(fast, converted(tokens))
    attention = converted[1].layers[0].self_attn
    plain = copy.deepcopy(attention)
    plain.__class__ = nn.MultiheadAttention
    entered = tokens + attention.shift
    expected = attention.beta * plain(entered, entered, entered)[0] + attention.delta
    torch.testing.assert_close(attention(tokens, tokens, tokens)[0], expected)


def test_response_normalization_of_torch_is_refused() -> None:
    class Responses(Block):
        def __init__(self) -> None:
            super().__init__()
            self.norm1 = nn.CrossMapLRN2d(2)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.second(self.first(self.norm1(x.view(*x.shape, 1, 1)).view_as(x)))

    with pytest.raises(ValueError, match=r"'1.norm1': CrossMapLRN2d is not a known normalizer"):
        convert(network(1, Responses), "fixup", X)
