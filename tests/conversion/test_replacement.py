"""Every normalizer is removed, the code around it still works, and the signal keeps its unit variance."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normed_blocks import Block, Language, X, network, perturb_
from normfree.conversion import convert
from normfree.nn.normalizers import NORM_TYPES, DynamicTanh, find_norms


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
    assert [b.degree for b in plan.branches] == [4, 2, 4, 2]
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

    with pytest.raises(ValueError, match=r"'1.norm1': CrossMapLRN2d is not a normalizer that can be removed"):
        convert(network(1, Responses), "fixup", X)


def test_layer_scale_starts_at_one() -> None:
    torchvision = pytest.importorskip("torchvision")
    model, plan = convert(torchvision.models.convnext_tiny(num_classes=4), "skipinit", torch.randn(1, 3, 32, 32))
    assert torch.equal(model.features[1][0].layer_scale, torch.ones(96, 1, 1))
    assert ("features.1.0.layer_scale", pytest.approx(1e6)) in [(s.name, s.factor) for s in plan.changes.scaled]
    assert model.features[1][0].block[5].beta.item() == 0


def test_outputs_of_layers_outside_branches_have_unit_variance() -> None:
    """Without normalization, a block that is not residual would pass on any scale of its input."""
    torchvision = pytest.importorskip("torchvision")
    images = torch.randn(4, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    model, plan = convert(torchvision.models.mobilenet_v3_small(num_classes=4), "skipinit", images)
    seen = {}
    modules = dict(model.named_modules())
    straight = [layer for layer in plan.body if not layer.gate]
    for layer in straight:
        modules[layer.name].register_forward_hook(lambda m, a, out, n=layer.name: seen.update({n: out.std().item()}))
    model.eval()(images)
    assert len(seen) == 11
    assert all(std == pytest.approx(1.0, rel=0.02) for std in seen.values())


class Gated(nn.Module):
    """Squeeze and excitation in a block without a shortcut, between layers with batch norm, and a residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn1 = nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32)
        self.down, self.bn2 = nn.Conv2d(32, 256, 3, padding=1, stride=2), nn.BatchNorm2d(256)
        self.squeeze, self.excite = nn.Conv2d(256, 64, 1), nn.Conv2d(64, 256, 1)
        self.project, self.bn3 = nn.Conv2d(256, 32, 1), nn.BatchNorm2d(32)
        self.branch, self.head = nn.Conv2d(32, 32, 1), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bn2(self.down(torch.relu(self.bn1(self.stem(x))))))
        x = x * torch.sigmoid(self.excite(torch.relu(self.squeeze(x.mean((2, 3), keepdim=True)))))
        x = self.bn3(self.project(x))
        return self.head((x + self.branch(torch.relu(x))).mean((2, 3)))


def test_gates_outside_branches_stay_as_the_method_draws_them() -> None:
    """He's weights in closed form, Var[W] = 2/fan_in, for layers that read a ReLU, pooled or not."""
    images = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    original = Gated()
    model, plan = convert(original, "skipinit", images, generator=torch.Generator().manual_seed(0))
    assert [layer.name for layer in plan.stem if layer.gate] == ["squeeze", "excite"]
    assert {s.name for s in plan.changes.scaled} == {"down.weight", "project.weight"}
    for gate in (model.squeeze, model.excite):
        fan_in = gate.weight.shape[1]
        assert gate.weight.var().item() == pytest.approx(2 / fan_in, rel=0.05)
    # Control: a pooled signal hardly varies, so that at unit variance a gate would magnify it.
    ungated = replace(plan, stem=tuple(replace(layer, gate=False) for layer in plan.stem), changes=None)
    model, plan = convert(original, "skipinit", images, plan=ungated, generator=torch.Generator().manual_seed(0))
    factors = {s.name: s.factor for s in plan.changes.scaled}
    assert factors["squeeze.weight"] > 1.4


def test_embedding_starts_the_stream_at_unit_variance() -> None:
    transformers = pytest.importorskip("transformers")
    ids = torch.arange(16).view(2, 8)
    config = transformers.GPT2Config(
        vocab_size=50, n_embd=32, n_layer=1, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    original = transformers.GPT2LMHeadModel(config)
    model, _ = convert(original, "rezero", {"input_ids": ids})
    streams = []
    model.transformer.h[0].register_forward_pre_hook(lambda m, args: streams.append(args[0].std().item()))
    model.eval()(input_ids=ids)
    assert streams[0] == pytest.approx(1.0, rel=0.2)
    assert model.lm_head.weight is model.transformer.wte.weight
    torch.testing.assert_close(model.lm_head.weight, original.lm_head.weight)  # the classifier's scale stays


class Tokens(nn.Module):
    """A class token before the sequence, a bias and a factor per channel on all of it: all three of shape (1, 1, 8)."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.bias = nn.Parameter(torch.zeros(1, 1, 8)), nn.Parameter(torch.zeros(1, 1, 8))
        self.factor = nn.Parameter(torch.ones(1, 1, 8))
        self.blocks = nn.Sequential(*[Block() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        return self.blocks((x + self.bias) * self.factor)


def test_class_token_is_drawn_and_added_or_multiplied_parameters_are_not() -> None:
    model, plan = convert(Tokens(), "fixup", torch.randn(2, 5, 8))
    assert model.token.std().item() == pytest.approx(1.0, abs=0.7)
    assert not model.bias.any()
    assert torch.equal(model.factor, torch.ones(1, 1, 8))
    assert [s.name for s in plan.changes.scaled] == ["token"]
    assert "token (it was 0)" in str(plan)


def test_network_that_concatenates_is_brought_to_unit_variance() -> None:
    """Without batch norm the signal grows where layers are concatenated; with 'wn' a DenseNet returned 1e5."""

    class Grows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.LayerNorm(8 * 2**i) for i in range(8))
            self.layers = nn.ModuleList(nn.Linear(8 * 2**i, 8 * 2**i) for i in range(8))
            self.out = nn.Linear(8 * 2**8, 4)

        def forward(self, x: Tensor) -> Tensor:
            for norm, layer in zip(self.norms, self.layers, strict=True):
                x = torch.cat([3 * x, layer(norm(x).relu())], 1)
            return self.out(x)

    torch.manual_seed(0)
    converted, plan = convert(Grows(), "wn", X)
    assert len(plan.changes.scaled) == 7  # the first layer and the classifier stay
    for layer in converted.layers[1:]:
        layer.register_forward_hook(lambda _m, _a, out: torch.testing.assert_close(out.std(unbiased=False).item(), 1.0))
    converted(X)


def test_embedding_of_zeros_stays() -> None:
    model = Language(matmul=False)
    nn.init.zeros_(model.words.weight)
    converted, _ = convert(model, "fixup", torch.arange(12).view(2, 6))
    assert not converted.words.weight.any()


class Projected(nn.Module):
    """Multiplies by a parameter of its own before the blocks; its output is another value."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.projection = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 8))
        self.blocks, self.head = nn.Sequential(Block(), Block()), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return 100 * self.head(self.blocks(self.stem(x) @ self.projection))


def test_weight_without_a_layer_of_its_own_is_not_rescaled() -> None:
    model, plan = convert(Projected(), "skipinit", X)
    assert "'projection'" in plan.changes.notes[-1]
    assert [s.name for s in plan.changes.scaled] == []
    assert model.projection.std().item() == pytest.approx(8**-0.5, rel=0.3)
