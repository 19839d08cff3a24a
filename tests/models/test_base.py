"""Residual networks against a forward pass written out in float64, torchvision, and the counts of the papers."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

from normfree.methods import Form
from normfree.models import Network, build
from normfree.nn.residual import Residual, SubsamplePad

State = dict[str, Tensor]


def randomized(name: str, method: str, **options: object) -> Network:
    """A small float64 network in which no parameter or buffer is 0 or 1, so that a misplaced one shows."""
    generator = torch.Generator().manual_seed(0)
    model = build(name, method, dtype=torch.float64, generator=generator, num_classes=4, size=16, **options)  # type: ignore[arg-type]
    with torch.no_grad():
        for tensor_name, tensor in model.state_dict().items():
            if tensor.is_floating_point():
                draw = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
                fan = max(tensor[0].numel(), 1) if tensor.dim() > 1 else 16
                tensor.copy_(draw.abs() + 0.5 if "running_var" in tensor_name else 1.5 * draw / fan**0.5)
    return model.eval()


def images(size: int = 16, seed: int = 1) -> Tensor:
    return torch.randn(2, 3, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


class Reference:
    """The forward pass of a network of basic blocks or bottlenecks, written out over its state dict.

    A part that the state does not hold is left out: the scalars of Fixup, the convolution of a shortcut, batch norm.
    """

    def __init__(self, model: Network) -> None:
        self.w: State = model.state_dict()
        self.blocks = [name for name, m in model.named_modules() if isinstance(m, Residual)]

    def conv(self, name: str, x: Tensor, stride: int = 1) -> Tensor:
        weight = self.w[f"{name}.weight"]
        return F.conv2d(x, weight, self.w.get(f"{name}.bias"), stride, weight.shape[-1] // 2)

    def norm(self, name: str, x: Tensor) -> Tensor:
        if f"{name}.weight" not in self.w:
            return x
        mean, var, weight, bias = (
            self.w[f"{name}.{part}"].view(1, -1, 1, 1) for part in ("running_mean", "running_var", "weight", "bias")
        )
        return (x - mean) / (var + 1e-5).sqrt() * weight + bias

    def add(self, name: str, x: Tensor) -> Tensor:
        return x + self.w[f"{name}.value"] if f"{name}.value" in self.w else x

    def times(self, name: str, x: Tensor) -> Tensor:
        return x * self.w[f"{name}.value"] if f"{name}.value" in self.w else x

    def numbered(self, part: str, number: int, total: int) -> str:
        return f"{part}{number}" if total > 1 else part

    def entry(self, block: str, x: Tensor, form: Form) -> Tensor:
        if form != "pre":
            return self.add(f"{block}.entry.bias", x)
        x = self.norm(f"{block}.entry.norm", x)
        return self.add(f"{block}.entry.bias2", self.add(f"{block}.entry.bias1", x).relu())

    def branch(self, block: str, x: Tensor, form: Form, stride: int, strided: int) -> Tensor:
        convs = sum(name.startswith(f"{block}.branch.conv") and name.endswith("weight") for name in self.w)
        norms = convs if form != "pre" else convs - 1
        for i in range(1, convs + 1):
            if i > 1:
                x = self.add(f"{block}.branch.bias{2 * i - 3}", x).relu()
                x = self.add(f"{block}.branch.bias{2 * i - 2}", x)
            x = self.conv(f"{block}.branch.conv{i}", x, stride if i == strided else 1)
            if i <= norms:
                x = self.norm(f"{block}.branch.{self.numbered('norm', i, norms)}", x)
        return x

    def shortcut(self, block: str, source: Tensor, stride: int, width: int) -> Tensor:
        if f"{block}.shortcut.conv.weight" in self.w:
            return self.norm(f"{block}.shortcut.norm", self.conv(f"{block}.shortcut.conv", source, stride))
        if width == source.shape[1]:
            return source
        small = source[:, :, ::stride, ::stride]
        return torch.cat([small, small.new_zeros(2, width - small.shape[1], *small.shape[2:])], dim=1)

    def __call__(
        self, x: Tensor, form: Form, *, stem_activated: bool, shortcut_reads_entry: bool = True, strided: int = 1
    ) -> Tensor:
        x = self.conv("stem.conv", x)
        if stem_activated and form != "pre":
            x = self.add("stem.bias", self.norm("stem.norm", x)).relu()
        for block in self.blocks:
            stride = 2 if block.split(".")[1:] != ["0", "0"] and block.endswith(".0") else 1
            entered = self.entry(block, self.times(f"{block}.alpha", x), form)
            end = self.times(f"{block}.beta", self.branch(block, entered, form, stride, strided))
            changed = f"{block}.shortcut.conv.weight" in self.w or end.shape != x.shape
            source = entered if shortcut_reads_entry and changed else x
            through = self.times(f"{block}.a", self.shortcut(block, source, stride, end.shape[1]))
            x = self.times(f"{block}.c", self.add(f"{block}.delta", through + end))
            if form == "post":
                x = x.relu()
        if form == "pre":
            x = self.add("head.bias1", self.norm("head.norm", x)).relu()
        x = self.add("head.bias2" if form == "pre" else "head.bias", x.mean((2, 3)))
        return x @ self.w["classifier.weight"].T + self.w["classifier.bias"]


FORM_CASES = [
    *[(name, method, form) for name in ("resnet8", "wrn-10-2", "resnet14") for form in ("post", "pre", "linear")
      for method in ("he_in", "fixup", "batchnorm", "shao", "skipinit")],
    *[("wrn-10-2", method, "pre") for method in ("idshort", "learnscalar", "convshort", "nf_he", "isograd")],
    *[("wrn-10-2", method, "post") for method in ("idshort", "learnscalar", "convshort")],
]  # fmt: skip


@pytest.mark.parametrize(("name", "method", "form"), FORM_CASES)
def test_forward_equals_the_written_out_one(name: str, method: str, form: Form) -> None:
    model = randomized(name, method, form=form)
    expected = Reference(model)(images(), form, stem_activated=not name.startswith("wrn"))
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(model(images()), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("method", ["fixup", "batchnorm", "convshort"])
def test_bottleneck_forward_equals_the_written_out_one(method: str) -> None:
    model = randomized("preact_resnet50", method)
    expected = Reference(model)(images(8), "pre", stem_activated=False, strided=2)
    torch.testing.assert_close(model(images(8)), expected, rtol=1e-9, atol=1e-9)


def test_raw_shortcut_reads_the_block_input() -> None:
    model = randomized("wrn-10-2", "convshort:reads=raw")
    raw = Reference(model)(images(), "pre", stem_activated=False, shortcut_reads_entry=False)
    torch.testing.assert_close(model(images()), raw, rtol=1e-9, atol=1e-9)
    entered = Reference(model)(images(), "pre", stem_activated=False)
    assert not torch.allclose(model(images()), entered, rtol=1e-3)


@pytest.mark.parametrize(("built", "read"), [("post", "linear"), ("linear", "post")])
def test_forward_of_another_form_differs(built: Form, read: Form) -> None:
    model = randomized("resnet8", "he_in", form=built)
    assert not torch.allclose(model(images()), Reference(model)(images(), read, stem_activated=True), rtol=1e-3)


@pytest.mark.parametrize(("name", "method"), [("resnet8", "fixup"), ("wrn-10-2", "batchnorm"), ("wrn-10-2", "nf_he")])
def test_every_value_of_the_state_changes_the_output(name: str, method: str) -> None:
    """The control of the comparison: no part that the reference leaves out is without effect on the model."""
    model = randomized(name, method)
    state, before = {n: t.clone() for n, t in model.state_dict().items()}, model(images())
    for part, tensor in state.items():
        if tensor.is_floating_point():
            model.load_state_dict({**state, part: tensor + 0.1})
            assert not torch.allclose(model(images()), before, rtol=1e-6), part


# Shapes, depths and shortcuts.


@pytest.mark.parametrize(
    ("name", "size", "channels"),
    [("resnet20", 32, 3), ("resnet20", 28, 1), ("wrn-16-2", 32, 3), ("preact_resnet18", 32, 3), ("resnet18", 64, 3),
     ("resnet50", 64, 4), ("resmlp-3-8", 5, 2), ("resmlp-2-8-4", 5, 1)],
)  # fmt: skip
def test_output_has_one_score_a_class(name: str, size: int, channels: int) -> None:
    model = build(name, "he_in", num_classes=7, in_channels=channels, size=size, device="meta")
    assert model(torch.empty(3, channels, size, size, device="meta")).shape == (3, 7)


def weight_layers(model: nn.Module) -> int:
    return sum(isinstance(m, nn.Conv2d | nn.Linear) for m in model.modules())


@pytest.mark.parametrize("depth", [8, 20, 32, 44, 56, 110, 164, 1202])
def test_cifar_resnet_has_the_depth_of_its_name(depth: int) -> None:
    """Stem, convolutions and classifier count; shortcuts have no weights."""
    model = build(f"resnet{depth}", "he_in", device="meta")
    assert weight_layers(model) == depth
    assert len(model.plan.branches) == (depth - 2) // 2
    assert model.plan.stage_sizes == ((depth - 2) // 6,) * 3


def test_resnet110_has_54_branches() -> None:
    assert len(build("resnet110", "fixup", device="meta").plan.branches) == 54


@pytest.mark.parametrize(("depth", "width"), [(10, 2), (16, 12), (28, 10), (40, 10)])
def test_wide_resnet_has_the_depth_of_its_name(depth: int, width: int) -> None:
    """The authors count convolutions, the three of the shortcuts included, and not the classifier."""
    model = build(f"wrn-{depth}-{width}", "he_in", device="meta")
    assert weight_layers(model) - 1 == depth
    assert model.plan.stage_sizes == ((depth - 4) // 6,) * 3
    thin = build(f"wrn-{depth}-1", "he_in", device="meta")  # its first stage needs no convolution on the shortcut
    assert weight_layers(thin) == depth


@pytest.mark.parametrize("family", ["resnet", "preact_resnet"])
@pytest.mark.parametrize(
    ("depth", "stages", "layers"),
    [(18, (2, 2, 2, 2), 2), (34, (3, 4, 6, 3), 2), (50, (3, 4, 6, 3), 3), (101, (3, 4, 23, 3), 3),
     (152, (3, 8, 36, 3), 3)],
)  # fmt: skip
def test_imagenet_resnet_has_the_depth_of_its_name(
    family: str, depth: int, stages: tuple[int, ...], layers: int
) -> None:
    """Stem, branches and classifier count, the convolutions of shortcuts do not."""
    model = build(f"{family}{depth}", "he_in", device="meta")
    projections = sum(len(b.shortcut_layers) for b in model.plan.branches)
    assert weight_layers(model) - projections == depth
    assert model.plan.stage_sizes == stages
    assert {b.degree for b in model.plan.branches} == {layers}


@pytest.mark.parametrize(("name", "branches", "m"), [("resmlp-5-8", 5, 2), ("resmlp-3-8-4", 3, 4)])
def test_residual_mlp_has_the_numbers_of_its_name(name: str, branches: int, m: int) -> None:
    plan = build(name, "fixup", device="meta").plan
    assert (len(plan.branches), {b.degree for b in plan.branches}) == (branches, {m})
    assert {b.shortcut for b in plan.branches} == {"identity"}


def kinds(name: str, method: str) -> list[str]:
    return [branch.shortcut for branch in build(name, method, device="meta").plan.branches]


def test_shortcuts_follow_model_and_method() -> None:
    assert kinds("resnet14", "fixup") == ["identity", "identity", *["subsample", "identity"] * 2]
    assert kinds("resnet14", "idshort") == ["identity", "identity", *["projection", "identity"] * 2]
    assert kinds("resnet14", "convshort") == ["projection"] * 6
    assert kinds("resnet14", "batchnorm_convshort") == ["projection"] * 6
    assert kinds("wrn-16-1", "fixup") == ["identity", "identity", *["projection", "identity"] * 2]
    assert kinds("wrn-16-2", "fixup") == ["projection", "identity"] * 3
    assert kinds("resnet50", "fixup")[:5] == ["projection", "identity", "identity", "projection", "identity"]


@pytest.mark.parametrize("name", ["resnet14", "wrn-16-2", "preact_resnet18", "resnet50"])
def test_transitions_stand_where_the_shape_changes(name: str) -> None:
    model = build(name, "he_in", device="meta")
    shapes: list[tuple[torch.Size, torch.Size]] = []
    for block in model.modules():
        if isinstance(block, Residual):
            block.register_forward_hook(lambda _m, args, out: shapes.append((args[0].shape, out.shape)))
    model(torch.empty(1, 3, 64, 64, device="meta"))
    assert [b.position.transition for b in model.plan.branches] == [before != after for before, after in shapes]


def test_subsampling_keeps_every_second_pixel_and_adds_zero_channels() -> None:
    model = build("resnet8", "fixup")
    shortcut = model.body[1][0].shortcut
    assert isinstance(shortcut, SubsamplePad)
    x = torch.arange(2 * 16 * 5 * 5.0).view(2, 16, 5, 5)
    out = shortcut(x)
    assert out.shape == (2, 32, 3, 3)
    assert torch.equal(out[:, :16], x[:, :, ::2, ::2])
    assert not out[:, 16:].any()


def test_bottleneck_strides_in_its_middle_layer() -> None:
    block = build("resnet50", "he_in", device="meta").body[1][0]
    assert [m.stride for m in block.branch.modules() if isinstance(m, nn.Conv2d)] == [(1, 1), (2, 2), (1, 1)]


@pytest.mark.parametrize("mode", ["zeros", "circular"])
def test_padding_mode_reaches_every_convolution_that_pads(mode: str) -> None:
    model = build("wrn-10-2", "nf", padding_mode=mode, device="meta")  # type: ignore[arg-type]
    assert {m.padding_mode for m in model.modules() if isinstance(m, nn.Conv2d) and m.padding != (0, 0)} == {mode}


# torchvision as the oracle.

DEPTHS = (18, 34, 50, 101, 152)


@pytest.mark.parametrize("depth", DEPTHS)
def test_parameter_count_equals_torchvision(depth: int) -> None:
    ours = build(f"resnet{depth}", "batchnorm", num_classes=1000, device="meta")
    with torch.device("meta"):
        theirs = getattr(torchvision.models, f"resnet{depth}")()
    count = sum(p.numel() for p in theirs.parameters())
    assert sum(p.numel() for p in ours.parameters()) == count
    # Control: with the shortcuts of `robust` it would not be.
    other = build(f"resnet{depth}", "batchnorm_convshort", num_classes=1000, device="meta")
    assert sum(p.numel() for p in other.parameters()) > count


def stateful(module: nn.Module) -> Iterator[nn.Module]:
    """The convolutions, norms and linear layers inside a module, in order of registration."""
    return (m for m in module.modules() if isinstance(m, nn.Conv2d | nn.BatchNorm2d | nn.Linear))


def in_torchvision_order(model: Network) -> list[nn.Module]:
    """Stem, then each block's branch before its shortcut, then the classifier."""
    parts = list(stateful(model.stem))
    for block in model.body.modules():
        if isinstance(block, Residual):
            parts += [*stateful(block.branch), *stateful(block.shortcut)]  # type: ignore[arg-type]
    return [*parts, *stateful(model.head), *stateful(model.classifier)]


@pytest.fixture(scope="module", params=["resnet18", "resnet50"])
def pair(request: pytest.FixtureRequest) -> tuple[Network, nn.Module]:
    """Our network and torchvision's with one set of weights and running statistics, in float64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        theirs = getattr(torchvision.models, request.param)(num_classes=20).double()
        for norm in theirs.modules():
            if isinstance(norm, nn.BatchNorm2d):
                nn.init.uniform_(norm.weight, 0.2, 0.6)
                nn.init.normal_(norm.bias)
                norm.running_mean.normal_()
                norm.running_var.uniform_(0.5, 2.0)
    ours = build(request.param, "batchnorm", num_classes=20, dtype=torch.float64)
    for mine, his in zip(in_torchvision_order(ours), stateful(theirs), strict=True):
        mine.load_state_dict(his.state_dict())
    return ours, theirs


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_output_equals_torchvision(pair: tuple[Network, nn.Module], training: bool) -> None:
    ours, theirs = (model.train(training) for model in pair)
    x = images(64)
    with torch.no_grad():
        expected = theirs(x)
        torch.testing.assert_close(ours(x), expected, rtol=1e-8, atol=1e-8)
    assert expected.std() > 1e-3


def test_output_differs_from_torchvision_in_another_form(pair: tuple[Network, nn.Module]) -> None:
    ours, theirs = (model.eval() for model in pair)
    other = build(ours.name, "batchnorm", num_classes=20, dtype=torch.float64, form="linear").eval()
    other.load_state_dict(ours.state_dict())
    with torch.no_grad():
        assert not torch.allclose(other(images(64)), theirs(images(64)), rtol=1e-2)
