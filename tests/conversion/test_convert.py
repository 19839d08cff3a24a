"""What conversion puts where, against equations written out by hand, and what it refuses."""

import copy
import io
import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normfree
from normfree.conversion import convert, convert_
from normfree.conversion.norms import norms
from normfree.nn.normalizers import NORM_TYPES, DynamicTanh
from normfree.nn.scalar_wrapping import scalars_of
from normfree.plan import Position

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    """x + W2 ReLU(norm(W1 norm(x)))."""

    def __init__(self, width: int = 8, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.norm1, self.norm2 = norm(width), norm(2 * width)
        self.first, self.second = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.relu(self.norm2(self.first(self.norm1(x)))))


def network(blocks: int = 3, block: type[nn.Module] = Block) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), *[block() for _ in range(blocks)], nn.LayerNorm(8), nn.Linear(8, 4))


def branch(block: nn.Module, x: Tensor) -> Tensor:
    """The branch of a converted block without its scalars."""
    hidden = F.relu(F.linear(x, block.first.weight, block.first.bias))
    return F.linear(hidden, block.second.weight, block.second.bias)


def perturb_(model: nn.Module) -> None:
    with torch.no_grad():
        for p in (p for p in model.parameters() if p.requires_grad):
            p.add_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))


@pytest.mark.parametrize("method", ["skipinit", "rezero", "small_branch", "hanin"])
def test_branch_is_multiplied_by_the_law_of_its_position(method: str) -> None:
    model, plan = convert(network(), method, X)
    law = normfree.methods.get(method).rule.beta
    for l, found in enumerate(plan.branches, start=1):
        block = model[l]
        beta = law.at(Position(l, 3, 1, l, 3))
        assert block.second.beta.item() == pytest.approx(beta)
        assert block.second.beta.requires_grad == law.learnable
        assert found.ends[0].name == f"{l}.second"
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
    assert all(p.dim() == 0 for p in groups["scalars"]["params"])
    learnable = [a for a in plan.changes.added if a.learnable]
    assert len(groups["scalars"]["params"]) == len(learnable)
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


def test_dyt_stands_where_norms_stood_and_leaves_the_rest() -> None:
    original = network()
    model, plan = convert(original, "dyt:alpha=0.7", X)
    assert [r.left for r in plan.changes.removed] == ["DynamicTanh"] * 7
    torch.testing.assert_close(model[4](X), torch.tanh(0.7 * X))
    torch.testing.assert_close(model[1].first.weight, original[1].first.weight)


@pytest.mark.parametrize("method", ["sqrt_half", "idshort", "shao"])
def test_block_that_puts_out_the_sum_is_scaled_whole(method: str) -> None:
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
    """What is added to a block's output to scale its shortcut would have the wrong sign."""
    with pytest.raises(ValueError, match="its shortcut is not what the block is given"):
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
    with pytest.raises(ValueError, match=r"'layer1.0'.* scales the sum itself, but 'layer1.0' does more after it"):
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


def test_sum_that_no_module_puts_out_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'1#1'.*scales the sum itself, but '1' does more after it"):
        convert(network(1, TwoSums), "idshort", X)


class InPlace(nn.Module):
    """A pre-activation whose ReLU writes into what the normalizer put out: without it, that is the stream itself."""

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


class Post(nn.Module):
    """The branch ends in an activation: no module puts out what β is to multiply."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.first(self.norm(x)))


class Functional(nn.Module):
    """Normalizes in its own code."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.first(F.layer_norm(x, (8,)))


class OddNorm(nn.Module):
    """Calls itself a normalizer and is none that anybody knows."""

    def forward(self, x: Tensor) -> Tensor:
        return x / x.abs().amax(-1, keepdim=True)


class Odd(Block):
    """Holds an odd normalizer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = OddNorm()


@pytest.mark.parametrize(
    ("model", "method", "message"),
    [
        (network(1, Post), "skipinit", r"'1.first': an activation stands between it and the sum '1'"),
        (network(1, Functional), "fixup", r"'1': its own forward pass computes layer_norm"),
        (network(1, Odd), "fixup", r"'1.norm1': OddNorm is no normalizer we know"),
        (network(1), "batchnorm", r"nothing to convert to"),
        (network(1), "convshort", r"puts a new convolution into every shortcut"),
        (network(1), "fixup:branches=false", r"removes the branches"),
    ],
)
def test_what_cannot_be_converted_is_refused_by_name(model: nn.Module, method: str, message: str) -> None:
    state, kinds = copy.deepcopy(model.state_dict()), [type(m) for m in model.modules()]
    for attempt in (convert, convert_):
        with pytest.raises(ValueError, match=message):
            attempt(model, method, X)
        assert [type(m) for m in model.modules()] == kinds
        assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())


def test_model_is_put_back_when_conversion_fails_half_way(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network().train()
    model[1].eval()
    handle = model[1].register_forward_hook(lambda *_: None)
    before = copy.deepcopy(model)
    monkeypatch.setattr("normfree.conversion.pipeline._check_result", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        convert_(model, "nf", X)
    assert [type(m) for m in model.modules()] == [type(m) for m in before.modules()]
    assert all(
        torch.equal(a, b) for a, b in zip(model.state_dict().values(), before.state_dict().values(), strict=True)
    )
    assert [m.training for m in model.modules()] == [m.training for m in before.modules()]
    assert len(model[1]._forward_hooks) == 1
    assert not model[1]._forward_pre_hooks
    handle.remove()


def test_original_is_untouched() -> None:
    torchvision = pytest.importorskip("torchvision")
    model = torchvision.models.resnet18(num_classes=4).train()
    model.layer1.eval()
    before = copy.deepcopy(model)
    modules = list(model.modules())
    random = torch.get_rng_state()
    seeded = torch.Generator().manual_seed
    images = torch.randn(2, 3, 32, 32, generator=seeded(0))
    for method in ("fixup", "lsuv"):
        convert(model, method, images, generator=seeded(1))
    assert torch.equal(torch.get_rng_state(), random)
    assert list(model.modules()) == modules
    assert [type(m) for m in modules] == [type(m) for m in before.modules()]
    assert [m.training for m in modules] == [m.training for m in before.modules()]
    assert all(
        torch.equal(a, b) for a, b in zip(model.state_dict().values(), before.state_dict().values(), strict=True)
    )
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in modules)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("method", ["fixup", "nf", "wn", "dyt"])
def test_one_seed_gives_one_model(method: str) -> None:
    states = [convert(network(), method, X, generator=torch.Generator().manual_seed(5))[0].state_dict() for _ in "ab"]
    assert all(torch.equal(states[0][k], states[1][k]) for k in states[0])


@pytest.mark.parametrize("method", ["fixup", "nf", "wn", "dyt", "learnscalar"])
def test_converted_model_is_copied_pickled_and_loaded(method: str) -> None:
    model, _ = convert(network(), method, X)
    perturb_(model)
    out = model(X)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    twin, _ = convert(network(), method, X, generator=torch.Generator().manual_seed(9))
    twin.load_state_dict(model.state_dict())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False), twin):
        assert torch.equal(other(X), out)


def test_layer_scale_starts_at_one() -> None:
    torchvision = pytest.importorskip("torchvision")
    model, plan = convert(torchvision.models.convnext_tiny(num_classes=4), "skipinit", torch.randn(1, 3, 32, 32))
    assert torch.equal(model.features[1][0].layer_scale, torch.ones(96, 1, 1))
    assert ("features.1.0.layer_scale", pytest.approx(1e6)) in [(s.name, s.factor) for s in plan.changes.scaled]
    assert model.features[1][0].block[5].beta.item() == 0


def test_fused_activation_stays() -> None:
    timm = pytest.importorskip("timm")
    _, plan = convert(timm.create_model("resnetv2_50", num_classes=4), "fixup", torch.randn(2, 3, 32, 32))
    assert {(r.kind, r.left) for r in plan.changes.removed} == {("BatchNormAct2d", "ReLU")}


def test_frozen_and_synchronized_norms_go() -> None:
    torchvision = pytest.importorskip("torchvision")
    frozen = torchvision.models.resnet18(norm_layer=torchvision.ops.FrozenBatchNorm2d)
    model, plan = convert(frozen, "skipinit", torch.randn(1, 3, 32, 32))
    assert {r.kind for r in plan.changes.removed} == {"FrozenBatchNorm2d"}
    assert not norms(model)


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


def plain_network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Flatten(), nn.Linear(128, 4),
    )  # fmt: skip


@pytest.mark.parametrize("method", ["wn", "nf", "lsuv", "he_in", "dyt"])
def test_network_without_sums_gets_what_can_be_done(method: str) -> None:
    model, plan = convert(plain_network(), method, torch.randn(4, 3, 8, 8))
    assert not norms(model)
    assert "no residual sum was found" in plan.changes.notes[0]
    assert "no residual branches" in str(plan)


def test_network_without_sums_is_told_what_can_be_done() -> None:
    with pytest.raises(
        ValueError, match=r"'fixup' works on residual branches, but no residual sum .*'nf'.*'wn'.*'lsuv'"
    ):
        convert(plain_network(), "fixup", torch.randn(4, 3, 8, 8))


class Group(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.blocks(x)


@pytest.mark.parametrize("method", ["fixup", "skipinit", "rezero", "nf", "wn", "dyt", "lsuv", "he_in", "sqrt_half"])
def test_sum_of_whole_blocks_is_noted_and_measured(method: str) -> None:
    """No method has a layer to scale there, so that the signal doubles; what cannot be done must not be silent."""
    model, plan = normfree.convert(network(8, Group), method, X)
    assert plan.changes is not None
    assert "have no layer to scale: '1', '2', '3', '4', '5', '6' and 2 more" in plan.changes.notes[0]
    verdict = normfree.diagnose(model, X, plan=plan).verdict
    if method != "sqrt_half":  # which scales the sum itself
        assert verdict.forward.status == "exploding"
    if method in ("fixup", "skipinit", "rezero"):  # whose blocks put out what they read
        assert verdict.forward.worst in {str(i) for i in range(1, 9)}
    assert not normfree.convert(network(8), method, X)[1].changes.notes  # control


def test_changes_are_counted_and_printed() -> None:
    original = network()
    model, plan = convert(original, "fixup", X)
    changes = plan.changes
    assert changes.parameters_before == sum(p.numel() for p in original.parameters())
    assert changes.parameters_after == sum(p.numel() for p in model.parameters())
    names = dict(model.named_parameters())
    assert all(a.name in names for a in changes.added)
    assert json.loads(json.dumps(plan.to_json()))["changes"]["removed"][0]["kind"] == "LayerNorm"
    text = str(plan)
    assert "3 residual branches" in text
    assert "removed  7 × LayerNorm" in text
    assert "3 × multiplier β (learnable)" in text
    assert len(text.splitlines()) < 12


def test_layers_outside_branches_put_out_unit_variance() -> None:
    """Without normalization a block that is not residual would pass on whatever level it was given."""
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
    """He's weights in closed form, Var[W] = 2/fan_in, for what reads a ReLU, pooled or not."""
    images = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    original = Gated()
    model, plan = convert(original, "skipinit", images, generator=torch.Generator().manual_seed(0))
    assert [layer.name for layer in plan.stem if layer.gate] == ["squeeze", "excite"]
    assert {s.name for s in plan.changes.scaled} == {"down.weight", "project.weight"}
    for gate in (model.squeeze, model.excite):
        fan_in = gate.weight.shape[1]
        assert gate.weight.var().item() == pytest.approx(2 / fan_in, rel=0.05)
    # Control: what is pooled hardly varies, so that at unit variance a gate would magnify it.
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


def test_hand_written_plan_overrules_discovery() -> None:
    plan = normfree.discover(network(), X)
    _, converted = convert(network(), "skipinit", X, plan=normfree.ResidualPlan(plan.branches[:1], plan.stem))
    assert [a.name for a in converted.changes.added] == ["1.second.beta"]
    assert "2.first.weight" in converted.changes.notes[0]


@pytest.mark.parametrize("example", [[X], (X,), {"input": X}], ids=["list", "tuple", "mapping"])
def test_example_may_be_given_in_every_way(example: Any) -> None:
    _, plan = normfree.convert(network(), "skipinit", example)
    assert plan.branches == normfree.convert(network(), "skipinit", X)[1].branches
    assert len(plan.branches) == 3


def test_example_that_does_not_fit_is_named() -> None:
    with pytest.raises(ValueError, match=r"expected a model that runs"):
        convert(network(), "fixup", torch.zeros(2, 5))


class Doubled(nn.Module):
    """A parametrization without an inverse."""

    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def test_weight_that_is_computed_from_others_is_refused_by_name() -> None:
    model = network()
    nn.utils.parametrize.register_parametrization(model[1].second, "weight", Doubled())
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"can be set at '1.second.weight'.*remove_parametrizations"):
        convert_(model, "fixup", X)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.raises(ValueError, match=r"'1.second.weight' cannot become .* a parametrization of its own"):
        convert(model, "wn", X)


class SkippedAtRandom(Block):
    """Does not run at every second call while training, as stochastic depth has it."""

    def forward(self, x: Tensor) -> Tensor:
        return x if self.training and torch.rand(()).item() < 0.5 else super().forward(x)


@pytest.mark.parametrize("method", ["skipinit", "sqrt_half"])
def test_blocks_that_are_skipped_at_random_are_all_converted(method: str) -> None:
    model, plan = convert(network(8, SkippedAtRandom).train(), method, X)
    assert len(plan.branches) == 8
    assert len([a for a in plan.changes.added if a.name.endswith(".beta")]) == 8
    assert model.training


class WritesIntoInput(nn.Sequential):
    """Doubles what it is given, in place."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(2))


@pytest.mark.parametrize("method", ["skipinit", "lsuv", "dyt"])
def test_example_is_left_as_it_was(method: str) -> None:
    example = X.clone()
    convert(WritesIntoInput(*network()), method, example)
    assert torch.equal(example, X)


class Tokens(nn.Module):
    """A class token before the sequence, a bias and a factor a channel on all of it: all three of shape (1, 1, 8)."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.bias = nn.Parameter(torch.zeros(1, 1, 8)), nn.Parameter(torch.zeros(1, 1, 8))
        self.factor = nn.Parameter(torch.ones(1, 1, 8))
        self.blocks = nn.Sequential(*[Block() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        return self.blocks((x + self.bias) * self.factor)


def test_class_token_is_drawn_and_what_is_added_or_multiplied_is_not() -> None:
    model, plan = convert(Tokens(), "fixup", torch.randn(2, 5, 8))
    assert model.token.std().item() == pytest.approx(1.0, abs=0.7)
    assert not model.bias.any()
    assert torch.equal(model.factor, torch.ones(1, 1, 8))
    assert [s.name for s in plan.changes.scaled] == ["token"]
    assert "token anew (it was 0)" in str(plan)


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
        (SumComesSecond, lambda b, x: b(x)[1], "sqrt_half", "it is not what 'blocks.0' puts out"),
        (SumInDict, lambda b, x: b(x)["y"], "sqrt_half", "it is not what 'blocks.0' puts out"),
        (SignalComesSecond, lambda b, x: b(X, x), "learnscalar", "its shortcut is not what the block is given"),
    ],
)
def test_block_that_puts_out_or_is_given_something_else_is_refused(
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


class Language(nn.Module):
    """A model whose last layer is its embedding, used as a function."""

    def __init__(self, *, matmul: bool) -> None:
        super().__init__()
        self.words, self.blocks = nn.Embedding(30, 8), nn.Sequential(Block(), Block())
        self.matmul = matmul

    def forward(self, ids: Tensor) -> Tensor:
        x = self.blocks(self.words(ids))
        return x @ self.words.weight.T if self.matmul else F.linear(x, self.words.weight)


@pytest.mark.parametrize("matmul", [False, True])
def test_classifier_that_is_the_embedding_gets_no_bias(matmul: bool) -> None:
    model, plan = convert(Language(matmul=matmul), "fixup", torch.arange(12).view(2, 6))
    assert plan.classifier[0].tied
    assert not scalars_of(model.words)
    assert model(torch.arange(6).view(1, 6)).any()


class LooksAtLayers(Block):
    """Minds what its layers are."""

    def forward(self, x: Tensor) -> Tensor:
        if type(self.first) is not nn.Linear:
            raise TypeError("not a linear layer")
        return super().forward(x)


@pytest.mark.parametrize("method", ["fixup", "wn", "wn_data"])
def test_model_that_does_not_run_when_converted_is_told_so(method: str) -> None:
    model = network(1, LooksAtLayers)
    with pytest.raises(
        ValueError, match=r"converted Sequential to run on the example.*not a linear layer; .*try 'dyt'"
    ):
        convert(model, method, X)


@pytest.mark.parametrize("method", ["fixup", "skipinit", "nf", "learnscalar", "wn"])
def test_converted_model_is_initialized_again(method: str) -> None:
    model, plan = convert(network(), method, X)
    start = {name: p.detach().clone() for name, p in model.named_parameters() if p.dim() == 0}
    assert start.keys() == {a.name for a in plan.changes.added if a.value is not None}
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(5.0)
    normfree.initialize_(model, method, plan)
    assert all(torch.equal(model.get_parameter(name), value) for name, value in start.items())


def test_model_without_scalars_is_initialized_by_another_method() -> None:
    model, plan = convert(network(), "dyt", X)
    normfree.initialize_(model, "he_in", plan)
    assert not model[1].first.bias.any()


@pytest.mark.parametrize(
    ("plan", "method", "message"),
    [
        ("converted", "rezero", r"'rezero' expects its own scalars, got those of 'skipinit', .*; convert the original"),
        ("converted", "he_in", r"'he_in' expects its own scalars, got those of 'skipinit', .*; convert the original"),
        ("discovered", "skipinit", r"does not list the scalar beta of '1.second'; pass the plan that convert returned"),
    ],
)
def test_scalars_of_another_method_are_refused(plan: str, method: str, message: str) -> None:
    model, converted = convert(network(), "skipinit", X)
    with pytest.raises(ValueError, match=message):
        normfree.initialize_(model, method, converted if plan == "converted" else normfree.discover(model, X))


class Unit(nn.Module):
    """Divides by the length of its input in its own code."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.first(F.normalize(x, dim=-1))


class OwnNorm(Unit):
    """Normalizes without any name for it."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.first((x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True))


def test_normalization_that_stays_is_noted() -> None:
    _, plan = convert(network(1, Unit), "fixup", X)
    assert plan.changes.notes == ("still divided by its length (normalize) is the signal in '1'",)
    _, plan = convert(network(1, OwnNorm)[:2], "fixup", X)
    assert "no normalizer was found: none was removed" in plan.changes.notes[0]


class Whiten(nn.Module):
    """Somebody's own normalizer, whose class does not say so."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((width,), 0.7))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-5)


class OverBatch(Whiten):
    """Normalizes by the batch in training, and by what it saw in evaluation."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("seen", torch.full((width,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen = x.std(0)
        return self.scale * x / self.seen


class Swish(Whiten):
    """An activation with a parameter a channel."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.scale * x)


class Shift(Whiten):
    """Puts out the same whatever comes in."""

    def forward(self, x: Tensor) -> Tensor:
        return self.scale.expand_as(x)


class Halves(Whiten):
    """Passes on half of the signal."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 0.5


class Scales(Whiten):
    """Multiplies by a number that it must be given by name."""

    def forward(self, x: Tensor, *, by: float) -> Tensor:
        return x * by


@pytest.mark.parametrize(
    ("kind", "noted"), [(Whiten, True), (OverBatch, True), (Swish, False), (Shift, False), (Halves, False)]
)
def test_own_normalizer_that_stays_is_noted(kind: type[nn.Module], noted: bool) -> None:
    model = network(2)
    model[2].norm1 = kind(8)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    _, plan = convert(model, "fixup", X)
    says = f"left in place, though it does what a normalizer does: '2.norm1' ({kind.__name__}); "
    assert any(note.startswith(says) for note in plan.changes.notes) is noted
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_module_that_cannot_be_tried_alone_does_not_stop_a_conversion() -> None:
    """As a rotary embedding, which the model calls with more than its first argument."""

    class Named(Block):
        def __init__(self) -> None:
            super().__init__()
            self.norm1 = Scales(8)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.second(F.relu(self.norm2(self.first(self.norm1(x, by=0.5)))))

    _, plan = convert(network(2, Named), "fixup", X)
    assert plan.changes.notes == ()


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
    assert "the signal may still grow at sums of whole blocks" in plan.changes.notes[0]


def test_relu_behind_a_sum_is_known_by_its_class() -> None:
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
    with pytest.raises(ValueError, match="'1' does more after it"):
        convert(network(2, Bent), "isograd", X)


def test_network_that_concatenates_is_brought_to_unit_variance() -> None:
    """Without batch norm the signal grows where layers are concatenated; with 'wn' a DenseNet put out 1e5."""

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


def test_response_normalization_of_torch_is_refused() -> None:
    class Responses(Block):
        def __init__(self) -> None:
            super().__init__()
            self.norm1 = nn.CrossMapLRN2d(2)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.second(self.first(self.norm1(x.view(*x.shape, 1, 1)).view_as(x)))

    with pytest.raises(ValueError, match=r"'1.norm1': CrossMapLRN2d is no normalizer we know"):
        convert(network(1, Responses), "fixup", X)


def test_embedding_of_zeros_stays() -> None:
    model = Language(matmul=False)
    nn.init.zeros_(model.words.weight)
    converted, _ = convert(model, "fixup", torch.arange(12).view(2, 6))
    assert not converted.words.weight.any()


class Projected(nn.Module):
    """Multiplies by a parameter of its own before the blocks; what it puts out is something else."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.projection = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 8))
        self.blocks, self.head = nn.Sequential(Block(), Block()), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return 100 * self.head(self.blocks(self.stem(x) @ self.projection))


def test_weight_without_a_layer_of_its_own_is_not_brought_to_the_level_of_the_model() -> None:
    model, plan = convert(Projected(), "skipinit", X)
    assert "'projection'" in plan.changes.notes[-1]
    assert [s.name for s in plan.changes.scaled] == []
    assert model.projection.std().item() == pytest.approx(8**-0.5, rel=0.3)


class Upsampling(nn.Module):
    """A convolution stored the other way round, in front of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.first = nn.ConvTranspose2d(3, 4, 2), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        return x + self.first(self.norm(x))


@pytest.mark.parametrize("method", ["nf", "wn", "wn_data"])
def test_transposed_convolution_is_refused_by_methods_with_other_weights(method: str) -> None:
    with pytest.raises(ValueError, match=r"'up.weight' cannot become .*: ConvTranspose2d uses its weight in a way of"):
        convert(Upsampling(), method, torch.randn(2, 3, 4, 4))


def test_attention_is_refused_by_methods_that_measure_layers() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Linear(8, 4))
    with pytest.raises(ValueError, match=r"'lsuv' measures .* got MultiheadAttention at '1.self_attn'; use a method"):
        convert(model, "lsuv", torch.randn(2, 5, 8))


@pytest.mark.parametrize("method", ["lsuv", "wn_data"])
def test_constant_example_is_refused_by_methods_that_measure_layers(method: str) -> None:
    with pytest.raises(ValueError, match=r"expected a batch of finite values that vary"):
        convert(network(), method, torch.ones(6, 8))


@pytest.mark.parametrize("shape", [(32, 8), (8, 5, 8)])
def test_weight_norm_from_data_standardizes_the_channels_of_vectors_and_tokens(shape: tuple[int, ...]) -> None:
    example = 3 * torch.randn(shape, generator=torch.Generator().manual_seed(0)) + 1
    model, _ = convert(network(), "wn_data", example)
    out = model[0](example).flatten(0, -2)
    torch.testing.assert_close(out.mean(0), torch.zeros(8), atol=1e-5, rtol=0)
    torch.testing.assert_close(out.std(0, unbiased=False), torch.ones(8))


class Repeated(nn.Module):
    """One block that runs three times."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block = nn.Linear(8, 8), Block()

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for _ in range(3):
            x = self.block(x)
        return x


class Flat(nn.Module):
    """Sums and a weight in the model's own forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.weight = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x)
        return x + x @ self.weight


@pytest.mark.parametrize(
    ("model", "method", "message"),
    [
        (Repeated(), "sqrt_half", r"'block#1': .* but its block runs more than once; use a method that scales"),
        (Flat(), "sqrt_half", r"'\(model\)#1': .* it stands in the model's own forward pass; .*; use a method that"),
        (Flat(), "skipinit", r"'weight': the weight is used without a call .*; use a method without scalars"),
        (network(1, Post), "skipinit", r"the sum '1', so that .* multiplied; use a method without scalars, such as"),
        (network(1, Odd), "fixup", r"OddNorm is no normalizer we know; replace it by one of torch's$"),
        (network(1, Functional), "fixup", r"computes layer_norm; make it a module"),
        (nn.LayerNorm(8), "lsuv", r"'\(model\)': the model itself is a normalizer; convert the model that holds it"),
        (network(1), "selu", r"'selu.*' needs an activation function of its own, .*; build one of our models"),
        (network(1), "normprop", r"'normprop' needs an activation function of its own, .*; build one of our models"),
        (network(1), "spectralnorm", r"got 'spectralnorm', which only divides the weights .*parametrizations"),
        (
            convert(network(1), "fixup", X)[0],
            "fixup",
            r"not converted yet, got one with scalars at '1.first'; convert the",
        ),
    ],
)
def test_refusal_says_what_is_true_where_and_what_to_do(model: nn.Module, method: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        convert(model, method, X)


def test_weight_norm_of_torch_stays_and_is_set_through() -> None:
    original = network()
    for block in original[1:4]:
        nn.utils.parametrizations.weight_norm(block.second)
    seeded = torch.Generator().manual_seed
    model, plan = convert(original, "skipinit", X, generator=seeded(0))
    plain, _ = convert(network(), "skipinit", X, generator=seeded(0))
    assert len(plan.branches) == 3
    torch.testing.assert_close(model[2].second.weight, plain[2].second.weight)
    perturb_(model)
    assert torch.equal(copy.deepcopy(model)(X), model(X))
