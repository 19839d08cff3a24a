"""The function that training calls against the model itself: regions, segments that are computed again, precision."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normfree.methods import get, names
from normfree.models import Network, build
from normfree.models.builder import find_family
from normfree.nn.normalizers import NORM_TYPES, DynamicTanh
from normfree.nn.residual import Residual, reset_precision_
from normfree.nn.scalars import ScalarBias, ScalarMultiplier
from normfree.nn.weight_layers import WEIGHT_LAYERS, reparametrize_, weight_kind
from normfree.train.engine.forward import _regions, apply_precision_, forward_of

BODIES = ("resnet14", "wrn-16-1", "resmlp-3-16", "mlp-5-16", "cnn-5-8", "dense-10-6", "highway-5-16")
METHODS = ("fixup", "batchnorm", "nf", "spectralnorm", "selu:dropout=0.5")


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(count: int = 4) -> Tensor:
    return torch.randn(count, 3, 8, 8, generator=seeded(5))


@cache
def built(method: str, name: str) -> Network:
    model = build(name, method, num_classes=5, example=images(16), generator=seeded())
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):  # away from zero layers, behind which all gradients vanish
            p.add_(0.05 * torch.randn(p.shape, generator=seeded(i)))
    return model


def make(method: str, name: str) -> Network:
    return copy.deepcopy(built(method, name))


def admits(method: str, name: str) -> bool:
    record, family = get(method), find_family(name)[0]
    return family.skip in record.skips and (family.spatial or not record.spatial_only)


def learned(model: nn.Module, run: object) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Output, gradients and buffers after a training pass of `run`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)  # of dropout
        out = run(images())  # type: ignore[operator]
        F.cross_entropy(out, torch.arange(4)).backward()
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    return out.detach(), gradients, dict(model.named_buffers())


def assert_same(method: str, name: str, **options: int) -> None:
    plain, other = make(method, name), make(method, name)
    out, gradients, buffers = learned(plain, plain)
    got, own, held = learned(other, forward_of(other, **options))  # type: ignore[arg-type]
    assert torch.equal(got, out)
    for key, gradient in gradients.items():
        assert torch.equal(own[key], gradient), key
    for key, buffer in buffers.items():
        assert torch.equal(held[key], buffer), key
    assert any(gradient.any() for gradient in gradients.values())


CASES = [(method, name) for method in METHODS for name in ("resnet8", "mlp-5-16") if admits(method, name)]
CASES += [(method, name) for method in ("batchnorm", "selu:dropout=0.5") for name in BODIES if name != "mlp-5-16"]


@pytest.mark.parametrize(("method", "name"), CASES)
@pytest.mark.parametrize("recompute", [0, 2])
def test_forward_equals_the_model_to_the_bit(method: str, name: str, recompute: int) -> None:
    """Output, gradients, running statistics, power iterations and dropped units: what is computed again is the same."""
    assert_same(method, name, recompute=recompute)


@pytest.mark.parametrize("recompute", [1, 3, 4, 100])
def test_segments_may_be_of_any_length(recompute: int) -> None:
    assert_same("batchnorm", "resnet14", recompute=recompute)


def test_recomputation_keeps_fewer_activations() -> None:
    def kept(recompute: int) -> int:
        model, sizes = make("fixup", "wrn-16-1"), {}

        def note(tensor: Tensor) -> Tensor:
            sizes[tensor.data_ptr()] = tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            forward_of(model, recompute=recompute)(images())
        return sum(sizes.values())

    assert kept(3) < 0.6 * kept(0)


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_regions_are_the_body_in_order(name: str, size: int) -> None:
    model = make("selu", name)
    parts = [part for region in _regions(model, size) for part in region]
    stages = [stage if isinstance(stage, nn.Sequential) else (stage,) for stage in model.body]
    assert [id(part) for part in parts] == [id(block) for stage in stages for block in stage]
    assert max(len(region) for region in _regions(model, size)) <= size


@pytest.mark.parametrize(
    ("name", "size", "lengths"),
    [
        ("resnet20", 1, [1] * 9),
        ("resnet20", 2, [2, 1, 1, 2, 1, 2]),  # 3; a transition and 2; a transition and 2
        ("resnet20", 3, [3, 1, 2, 1, 2]),
        ("resnet26", 2, [2, 2, 1, 2, 1, 1, 2, 1]),
        ("wrn-16-2", 4, [1, 1, 1, 1, 1, 1]),  # 16 to 32 channels: the first block changes the shape too
        ("resmlp-5-8", 2, [2, 2, 1]),
        ("highway-7-8", 2, [2, 2, 1]),
        ("mlp-4-8", 3, [3, 1]),  # linear, activation, linear, activation
    ],
)
def test_regions_hold_as_many_blocks_as_asked_and_transitions_alone(name: str, size: int, lengths: list[int]) -> None:
    model = build(name, "selu", device="meta")
    regions = list(_regions(model, size))
    assert [len(region) for region in regions] == lengths
    for region in regions:
        assert len(region) == 1 or not any(isinstance(b, Residual) and b.transition for b in region)


def test_models_from_outside_run_as_they_are() -> None:
    model = nn.Linear(3, 2)
    assert forward_of(model) is model
    with pytest.raises(ValueError, match="for recompute, got Linear; use recompute=0"):
        forward_of(model, recompute=2)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_compiled_regions_equal_the_model() -> None:
    torch._dynamo.reset()
    plain, other = make("batchnorm", "resnet14"), make("batchnorm", "resnet14")
    out, gradients, buffers = learned(plain, plain)
    got, own, held = learned(other, forward_of(other, compile=True, region=2, recompute=1))
    torch.testing.assert_close(got, out, rtol=1e-4, atol=1e-4)
    for name, gradient in gradients.items():
        torch.testing.assert_close(own[name], gradient, rtol=1e-3, atol=1e-3 * gradient.abs().max().item(), msg=name)
    for name, buffer in buffers.items():
        torch.testing.assert_close(held[name], buffer, rtol=1e-4, atol=1e-4, msg=name)


EVERY = [(method, name) for method in names() for name in ("resnet8", "resmlp-2-8") if admits(method, name)]
EVERY += [(method, "wrn-10-1") for method in ("batchnorm", "groupnorm", "instancenorm", "convshort", "nf", "fixup")]


@pytest.mark.parametrize(("method", "name"), EVERY)
@pytest.mark.parametrize("precision", ["bf16", "mixed"])
def test_precision_suits_every_method(method: str, name: str, precision: str) -> None:
    model, exact = make(method, name), make(method, name)
    dtype = apply_precision_(model, precision)
    assert dtype is (torch.bfloat16 if precision == "bf16" else torch.float32)
    streams: set[torch.dtype] = set()
    for module in model.modules():
        if isinstance(module, Residual):
            module.register_forward_hook(lambda _m, _a, out: streams.add(out.dtype))
    out = forward_of(model)(images().to(dtype))
    assert streams == {dtype}
    assert out.isfinite().all()
    F.cross_entropy(out.float(), torch.arange(4)).backward()
    for key, p in model.named_parameters():
        assert p.grad is None or (p.grad.dtype is p.dtype and p.grad.isfinite().all()), key
    expected = exact(images())
    assert 0 < (out.float() - expected).norm() < 0.15 * expected.norm()


@pytest.mark.parametrize(("method", "name"), EVERY)
@pytest.mark.parametrize("precision", ["bf16", "mixed"])
def test_precision_shortens_weights_only(method: str, name: str, precision: str) -> None:
    """Statistics, scalars and what a weight is computed from keep all their digits."""
    model = make(method, name)
    apply_precision_(model, precision)
    inside = {
        id(layer)
        for block in model.modules()
        if isinstance(block, Residual)
        for part in (block.branch, block.shortcut, None if block.shortcut_reads_entry else block.entry)
        for layer in (part.modules() if part is not None else ())
    }
    shortened = 0
    for path, module in model.named_modules():
        types = {n: t.dtype for n, t in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))}
        lowered = precision == "bf16" or id(module) in inside
        if isinstance(module, WEIGHT_LAYERS) and lowered:
            plain = weight_kind(module) == "plain"
            wanted = {n: torch.bfloat16 if plain or n == "bias" else torch.float32 for n in types}
            shortened += plain
        elif isinstance(module, nn.GroupNorm | nn.LayerNorm | DynamicTanh) and lowered:
            wanted = dict.fromkeys(types, torch.bfloat16)  # which must be of the type of their input
        else:
            known = (*NORM_TYPES, *WEIGHT_LAYERS, ScalarBias, ScalarMultiplier, DynamicTanh)
            assert not types or isinstance(module, known)
            wanted = {n: t if t == torch.int64 else torch.float32 for n, t in types.items()}
        assert types == wanted, path
    assert shortened or get(method).weight_kind != "plain"


def test_float32_changes_nothing() -> None:
    model = make("fixup", "resnet8")
    assert apply_precision_(model, "float32") is torch.float32
    assert {t.dtype for t in model.state_dict().values()} == {torch.float32}
    assert all(m.stream_dtype is m.branch_dtype is None for m in model.modules() if isinstance(m, Residual))


@pytest.mark.parametrize("precision", ["bf16", "mixed"])
def test_reset_leads_back(precision: str) -> None:
    model = make("batchnorm", "resnet8").eval()
    expected = model(images())
    apply_precision_(model, precision)
    reset_precision_(model.float())
    assert all(m.stream_dtype is m.branch_dtype is None for m in model.modules() if isinstance(m, Residual))
    rounding = (model(images()) - expected).norm() / expected.norm()
    assert 0 < rounding < 2e-2


# Models of others


class Between(nn.Module):
    """A bare parameter between two layers, a norm with statistics, attention and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ConvTranspose2d(8, 8, 3))
        self.shift, self.scale = nn.Parameter(torch.ones(8, 1, 1)), nn.Parameter(torch.tensor(2.0))
        self.attention = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.memory = nn.GRU(8, 8, batch_first=True)
        self.classifier = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention((self.stem(x) * self.scale + self.shift).flatten(2).mT)
        return self.classifier(self.memory(x)[0].mean(1))


def test_every_part_of_a_model_of_others_computes_in_bf16() -> None:
    model = Between()
    assert apply_precision_(model, "bf16") == torch.bfloat16
    out = model(images().bfloat16())
    out.float().sum().backward()
    assert out.dtype == torch.bfloat16
    wide = {name for name, parameter in model.named_parameters() if parameter.dtype == torch.float32}
    assert wide == {"stem.1.weight", "stem.1.bias", "scale"}
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_reparametrized_layer_of_others_keeps_its_direction_and_gain() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 5))
    reparametrize_(model[0], "weight_norm")
    apply_precision_(model, "bf16")
    assert model(images().bfloat16()).dtype == torch.bfloat16
    assert {n for n, p in model.named_parameters() if p.dtype == torch.float32} == {"0.weight", "0.gain"}


def test_mixed_is_refused_where_no_branch_is_known() -> None:
    model = Between()
    with pytest.raises(ValueError, match=r"expected a normfree model .*'mixed', got Between; use bf16 or float32"):
        apply_precision_(model, "mixed")
    assert {p.dtype for p in model.parameters()} == {torch.float32}
