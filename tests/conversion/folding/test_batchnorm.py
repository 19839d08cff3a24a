"""Folding of batch norms: the function is the same, no batch norm remains, and the original is unchanged."""

from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torchvision.ops import FrozenBatchNorm2d

from normfree.conversion.changes import Folding
from normfree.conversion.folding.batchnorm import fold_batchnorm
from normfree.models import build
from normfree.models.third_party import create_model
from normfree.nn.normalizers import ChannelAffine


@torch.no_grad()
def with_statistics(model: nn.Module, seed: int = 0) -> nn.Module:
    """The model with weights from a seed and batch norms that are far from the identity."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, _BatchNorm | FrozenBatchNorm2d) and module.running_mean is not None:
            module.running_mean.normal_(0, 0.3, generator=generator)
            module.running_var.uniform_(0.4, 2.5, generator=generator)
            if module.weight is not None:
                module.weight.uniform_(0.5, 1.5, generator=generator)
                module.bias.normal_(0, 0.3, generator=generator)
    return model


def image(size: int = 32, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1), dtype=dtype)


def deviation(model: nn.Module, x: Tensor) -> tuple[float, nn.Module, Folding]:
    """The largest difference of outputs at evaluation, absolute where they are below 1."""
    folded, record = fold_batchnorm(model.eval(), x)
    with torch.no_grad():
        before, after = model(x), folded(x)
    assert before.isfinite().all()
    return ((before - after).abs().max() / before.abs().max().clamp_min(1.0)).item(), folded, record


def norms(model: nn.Module) -> int:
    return sum(isinstance(m, _BatchNorm) or "BatchNorm" in type(m).__name__ for m in model.modules())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-10)])
def test_resnet50_computes_the_same(dtype: torch.dtype, tolerance: float) -> None:
    model = with_statistics(torchvision.models.resnet50()).to(dtype).eval()
    x = image(64, dtype)
    folded, record = fold_batchnorm(model, x)
    with torch.no_grad():
        before, after = model(x), folded(x)
    assert (before - after).abs().max() < tolerance
    assert len(record.folded) == 53
    assert not record.kept
    assert {type(m).__name__ for m in folded.modules()} == {
        "ResNet", "Conv2d", "Identity", "ReLU", "MaxPool2d", "Sequential", "Bottleneck", "AdaptiveAvgPool2d", "Linear",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "folded", "kept"),
    [
        ("torchvision:resnet18", 20, 0),
        ("torchvision:mobilenet_v2", 52, 0),
        ("torchvision:mobilenet_v3_small", 34, 0),
        ("torchvision:efficientnet_b0", 49, 0),
        ("torchvision:regnet_y_400mf", 53, 0),
        ("torchvision:densenet121", 59, 62),
        ("timm:resnet26d", 31, 0),
        ("timm:resnetv2_50", 32, 17),
        ("timm:tf_efficientnet_b0", 49, 0),
    ],
)
def test_foreign_model_computes_the_same(name: str, folded: int, kept: int) -> None:
    model = with_statistics(create_model(name)).double()
    off, after, record = deviation(model, image())
    assert off < 1e-10
    assert (len(record.folded), len(record.kept)) == (folded, kept)
    assert norms(after) == 0
    assert sum(isinstance(m, ChannelAffine) for m in after.modules()) == kept


@pytest.mark.parametrize(("name", "kept"), [("resnet20", 0), ("preact_resnet18", 9), ("wrn-10-1", 4)])
def test_own_model_computes_the_same(name: str, kept: int) -> None:
    model = with_statistics(build(name, "batchnorm", dtype=torch.float64))
    off, after, record = deviation(model, image())
    assert off < 1e-10
    assert len(record.kept) == kept
    assert norms(after) == 0


class Turn(nn.Module):
    """Tokens (N, T, C) as (N, C, T)."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


def conv(*args: int, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(*args, **options)


SMALL = {
    "no affine parameters": ((conv(3, 4, 3), nn.BatchNorm2d(4, affine=False)), 1),
    "no bias and groups": ((conv(3, 6, 3, bias=False, groups=3), nn.BatchNorm2d(6)), 1),
    "synchronized": ((conv(3, 4, 3), nn.SyncBatchNorm(4)), 1),
    "frozen": ((conv(3, 4, 3), FrozenBatchNorm2d(4)), 1),
    "transposed": ((nn.ConvTranspose2d(3, 4, 3, 2), nn.BatchNorm2d(4)), 1),
    "transposed, groups": ((nn.ConvTranspose2d(3, 6, 3, 2, 1, groups=3), nn.BatchNorm2d(6)), 1),
    "linear": ((nn.Flatten(), nn.Linear(192, 5), nn.BatchNorm1d(5)), 1),
    "dropout between": ((conv(3, 4, 3), nn.Dropout2d(), nn.BatchNorm2d(4)), 1),
    "before a convolution": ((nn.BatchNorm2d(3), conv(3, 4, 3)), 1),
    "before a grouped convolution": ((nn.BatchNorm2d(3), conv(3, 6, 3, groups=3)), 1),
    "before a reflecting convolution": ((nn.BatchNorm2d(3), conv(3, 4, 3, padding=1, padding_mode="reflect")), 1),
    "before a linear layer": ((nn.Flatten(), nn.BatchNorm1d(192), nn.Dropout(), nn.Linear(192, 5)), 1),
    "before zero padding": ((nn.BatchNorm2d(3), conv(3, 4, 3, padding=1)), 0),
    "before a transposed convolution": ((nn.BatchNorm2d(3), nn.ConvTranspose2d(3, 4, 3)), 0),
    "before an activation": ((nn.BatchNorm2d(3), nn.ReLU(), conv(3, 4, 3)), 0),
    "twice in a row": ((conv(3, 4, 3), nn.BatchNorm2d(4), nn.BatchNorm2d(4)), 1),
    "channels elsewhere": ((nn.Flatten(2), nn.Linear(64, 5), nn.BatchNorm1d(3)), 0),
    "tokens": ((nn.Flatten(2), nn.Linear(64, 5), Turn(), nn.BatchNorm1d(5)), 0),
    "alone": ((nn.BatchNorm2d(3),), 0),
}  # fmt: skip


@pytest.mark.parametrize("case", SMALL)
def test_small_model_computes_the_same(case: str) -> None:
    modules, folded = SMALL[case]
    model = with_statistics(nn.Sequential(*modules)).double()
    reference = nn.Sequential(*(nn.BatchNorm2d(4) if isinstance(m, nn.SyncBatchNorm) else m for m in modules)).double()
    for ours, theirs in zip(model, reference, strict=True):
        if isinstance(ours, nn.SyncBatchNorm):  # which does not run on a CPU
            theirs.load_state_dict(ours.state_dict())
    x = image(8)
    after, record = fold_batchnorm(model.eval(), x)
    with torch.no_grad():
        torch.testing.assert_close(after(x), reference.double().eval()(x), rtol=0, atol=1e-12)
    assert len(record.folded) == folded
    assert norms(after) == 0


class Reused(nn.Module):
    """What attribute order would get wrong: a shared convolution, a norm called twice, one of whose readers is out."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.BatchNorm2d(4)
        self.twice = nn.BatchNorm2d(4)
        self.second = nn.BatchNorm2d(4)
        self.first = nn.BatchNorm2d(4)
        self.out = nn.BatchNorm2d(4)
        self.shared = nn.Conv2d(3, 4, 1)
        self.seen = nn.Conv2d(4, 4, 1)
        self.read = nn.Conv2d(4, 4, 1)
        self.sibling = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.first(self.shared(x)) + self.second(self.shared(2 * x))
        y = self.twice(self.twice(y))
        seen = self.seen(y)
        read = self.read(seen)
        return self.out(seen), self.sibling(read), read


def test_signal_that_others_read_keeps_its_affine_map() -> None:
    model = with_statistics(Reused()).double().eval()
    x = image(4)
    after, record = fold_batchnorm(model, x)
    with torch.no_grad():
        for ours, theirs in zip(after(x), model(x), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    assert not record.folded
    reasons = {kept.name: kept.reason for kept in record.kept}
    assert reasons["unused"] == "it is not called"
    assert reasons["twice"] == "it is called more than once"
    assert "'shared', cannot take it: it is used more than once" in reasons["first"]
    assert "'seen', cannot take it: others read its output as well" in reasons["out"]
    assert "'read', cannot take it: others read its output as well" in reasons["sibling"]  # it is an output


def test_weight_of_a_parametrization_keeps_its_affine_map() -> None:
    layer = nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3))
    off, _, record = deviation(with_statistics(nn.Sequential(layer, nn.BatchNorm2d(4))).double(), image(8))
    assert off < 1e-12
    assert "parametrization" in record.kept[0].reason


def test_batch_norm_without_statistics_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, track_running_stats=False))
    with pytest.raises(ValueError, match=r"got none in '1' \(BatchNorm2d\).*track_running_stats=True"):
        fold_batchnorm(model, image(8))


def test_batch_norm_with_a_forward_pass_of_its_own_is_refused_by_name() -> None:
    class Doubled(nn.BatchNorm2d):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    with pytest.raises(ValueError, match=r"got '1' \(Doubled\) with a forward pass of its own"):
        fold_batchnorm(nn.Sequential(nn.Conv2d(3, 4, 3), Doubled(4)), image(8))


@pytest.mark.parametrize("size", [16, 1])
def test_original_is_left_as_it_was(size: int) -> None:
    model = with_statistics(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3), nn.ReLU()))
    model.eval()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    if size == 1:  # too small an image: it fails
        with pytest.raises(ValueError, match="failed"):
            fold_batchnorm(model, image(size, torch.float32))
    else:
        fold_batchnorm(model, image(size, torch.float32))
    assert [module.training for module in model.modules()] == modes
    assert [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()] == [0] * 5
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert isinstance(model[1], nn.BatchNorm2d)


def test_example_may_be_arguments_by_name() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.bn = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

        def forward(self, *, pixels: Tensor) -> dict[str, Tensor]:
            return {"out": self.bn(self.conv(pixels))}

    _, record = fold_batchnorm(Named().eval(), {"pixels": image(8, torch.float32)})
    assert record.to_json()["folded"] == ({"name": "bn", "kind": "BatchNorm2d", "into": ("conv",)},)


@pytest.mark.parametrize(("name", "says"), [("", "'Sequential'"), ("1", "'1'")])
def test_model_in_training_mode_is_refused(name: str, says: str) -> None:
    """In training mode, the folded model would compute something else."""
    model = with_statistics(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))).eval()
    fold_batchnorm(model, image(8, torch.float32))  # the control
    model.get_submodule(name).train()
    with pytest.raises(ValueError, match=rf"got {says} in training mode.*call model.eval\(\) first"):
        fold_batchnorm(model, image(8, torch.float32))


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("compiler", ["trace", "script"])
def test_torchscript_is_refused(compiler: str, whole: bool) -> None:
    part = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    x = image(8, torch.float32)
    scripted = torch.jit.trace(part, x) if compiler == "trace" else torch.jit.script(part)
    model = scripted if whole else nn.Sequential(scripted, nn.ReLU()).eval()
    with pytest.raises(ValueError, match=r"got TorchScript.* in the model; pass the original torch.nn.Module"):
        fold_batchnorm(model, x)


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.batch_norm(self.conv(x), torch.zeros(4), torch.ones(4))


def test_batch_norm_that_is_a_function_is_recorded() -> None:
    _, record = fold_batchnorm(nn.Sequential(Functional()).eval(), image(8, torch.float32))
    assert [(kept.name, kept.reason) for kept in record.kept] == [("0", "it is a function; make it nn.BatchNorm2d")]
