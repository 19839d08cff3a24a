"""The methods against the rules of their authors' code, derived again here and computed in float64."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normfree.methods import get, initialize_
from normfree.models import Network, build
from normfree.models.base import ModelConfig
from normfree.models.resnet import ResNetShape
from normfree.nn.weight_layers import StandardizedConv2d
from normfree.optim import param_groups

ROUNDING = {"rtol": 1e-11, "atol": 1e-11}


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(size: int = 16) -> Tensor:
    return torch.randn(4, 3, size, size, generator=seeded(1), dtype=torch.float64)


@torch.no_grad()
def perturbed(model: nn.Module) -> nn.Module:
    """Add noise to every parameter, so that no zero hides a difference."""
    g = seeded(2)
    for p in model.parameters():
        p.add_(0.1 * torch.randn(p.shape, generator=g, dtype=p.dtype))
    return model


# Fixup's CIFAR ResNet: parameters, logits, and steps of SGD with the authors' groups


def fixup_parameters(n: int, g: torch.Generator) -> dict[str, Tensor]:
    """Parameters by the authors' roles: a name with 'bias' or 'scale' in it learns at a tenth."""
    L = 3 * n

    def conv(out: int, inputs: int, factor: float) -> Tensor:
        std = (2 / (9 * out)) ** 0.5  # He by fan-out
        return torch.randn(out, inputs, 3, 3, generator=g, dtype=torch.float64) * std * factor

    p = {"stem": torch.empty(16, 3, 3, 3, dtype=torch.float64).uniform_(-1, 1, generator=g) / 27**0.5}
    p["stem_bias"] = torch.zeros((), dtype=torch.float64)
    width = 16
    for i in range(L):
        out = 16 * 2 ** (i // n)
        p[f"{i}.conv1"], p[f"{i}.conv2"] = conv(out, width, L**-0.5), torch.zeros(out, out, 3, 3, dtype=torch.float64)
        for name in ("bias1a", "bias1b", "bias2a", "bias2b"):
            p[f"{i}.{name}"] = torch.zeros((), dtype=torch.float64)
        p[f"{i}.scale"] = torch.ones((), dtype=torch.float64)
        width = out
    p["last_bias"] = torch.zeros((), dtype=torch.float64)
    p["fc.weight"], p["fc.bias"] = torch.zeros(10, 64, dtype=torch.float64), torch.zeros(10, dtype=torch.float64)
    return p


def fixup_logits(p: dict[str, Tensor], x: Tensor, n: int) -> Tensor:
    x = F.relu(F.conv2d(x, p["stem"], padding=1) + p["stem_bias"])
    for i in range(3 * n):
        stride = 2 if i in (n, 2 * n) else 1
        entered = x + p[f"{i}.bias1a"]
        out = F.relu(F.conv2d(entered, p[f"{i}.conv1"], stride=stride, padding=1) + p[f"{i}.bias1b"])
        out = F.conv2d(out + p[f"{i}.bias2a"], p[f"{i}.conv2"], padding=1) * p[f"{i}.scale"] + p[f"{i}.bias2b"]
        shortcut = x
        if stride == 2:
            half = entered[:, :, ::2, ::2]
            shortcut = torch.cat([half, torch.zeros_like(half)], 1)
        x = F.relu(out + shortcut)
    return (x.mean((2, 3)) + p["last_bias"]) @ p["fc.weight"].T + p["fc.bias"]


def fixup_roles(model: Network, n: int) -> dict[str, nn.Parameter]:
    """The parameters of normfree's network by the same roles."""
    named = dict(model.named_parameters())
    roles = {"stem": "stem.conv.weight", "stem_bias": "stem.bias.value", "last_bias": "head.bias.value"}
    roles |= {"fc.weight": "classifier.weight", "fc.bias": "classifier.bias"}
    ours = {
        "bias1a": "entry.bias",
        "bias1b": "branch.bias1",
        "bias2a": "branch.bias2",
        "scale": "beta",
        "bias2b": "delta",
    }
    for i in range(3 * n):
        block = f"body.{i // n}.{i % n}"
        roles |= {f"{i}.conv{j}": f"{block}.branch.conv{j}.weight" for j in (1, 2)}
        roles |= {f"{i}.{theirs}": f"{block}.{own}.value" for theirs, own in ours.items()}
    assert sorted(roles.values()) == sorted(named)
    return {role: named[name] for role, name in roles.items()}


@torch.no_grad()
def fixup_pair(method: str, n: int) -> tuple[Network, dict[str, Tensor]]:
    """Our network, and the authors' parameters with the same numbers."""
    model = perturbed(build(f"resnet{6 * n + 2}", method, generator=seeded(0)).double())
    return model, {role: p.detach().clone() for role, p in fixup_roles(model, n).items()}


def test_fixup_parameters_are_the_authors():
    n = 3
    ours = fixup_roles(build("resnet20", "fixup", generator=seeded(0)), n)
    theirs = fixup_parameters(n, seeded(5))
    assert ours.keys() == theirs.keys()
    for role, p in theirs.items():
        assert ours[role].shape == (p.shape or (1,)), role  # a scalar has one dimension here
        if p.unique().numel() == 1:
            assert torch.equal(ours[role].double().reshape(p.shape), p), role
        else:  # two draws of one spread: the ratio of their deviations is 1 within five standard errors
            assert spread(ours[role]) / spread(p) == pytest.approx(1, abs=5 * p.numel() ** -0.5), role
    quarter = spread(theirs["8.conv1"]) * 9**0.25  # the control: the factor L^(-1/4) of branches of three layers
    assert abs(spread(ours["8.conv1"]) / quarter - 1) > 5 * theirs["8.conv1"].numel() ** -0.5


def spread(draw: Tensor) -> float:
    return draw.detach().double().std().item()


def test_fixup_logits_are_the_authors():
    model, theirs = fixup_pair("fixup", 3)
    torch.testing.assert_close(model(images()), fixup_logits(theirs, images(), 3), **ROUNDING)
    theirs["4.bias2a"] += 0.01  # the control
    assert (model(images()) - fixup_logits(theirs, images(), 3)).abs().max() > 1e-6


def authors_steps(theirs: dict[str, Tensor], n: int, lr: float, decay: float, steps: int) -> dict[str, Tensor]:
    """SGD with momentum 0.9 and weight decay for all; biases and scales at a tenth of the rate."""
    velocity = {role: torch.zeros_like(p) for role, p in theirs.items()}
    for _ in range(steps):
        leaves = {role: p.clone().requires_grad_() for role, p in theirs.items()}
        loss = F.cross_entropy(fixup_logits(leaves, images(), n), torch.arange(4))
        gradients = dict(zip(leaves, torch.autograd.grad(loss, leaves.values()), strict=True))
        for role, p in theirs.items():
            velocity[role] = 0.9 * velocity[role] + gradients[role] + decay * p
            rate = lr / 10 if "bias" in role or "scale" in role else lr
            theirs[role] = p - rate * velocity[role]
    return theirs


def ours_after(method: str, n: int, lr: float, decay: float, steps: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model, theirs = fixup_pair(method, n)
    optimizer = torch.optim.SGD(param_groups(model, lr=lr, weight_decay=decay), momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(images()), torch.arange(4)).backward()
        optimizer.step()
    ours = {role: p.detach() for role, p in fixup_roles(model, n).items()}
    return ours, authors_steps(theirs, n, lr, decay, steps)


def test_fixup_steps_of_sgd_are_the_authors():
    ours, theirs = ours_after("fixup", 1, lr=0.1, decay=5e-4, steps=3)
    for role, p in theirs.items():
        torch.testing.assert_close(ours[role], p, **ROUNDING)


def test_fixup_steps_differ_where_the_classifiers_bias_learns_at_the_full_rate():
    ours, theirs = ours_after("fixup:slow_biases=false", 1, lr=0.1, decay=5e-4, steps=1)  # the control
    differing = [role for role, p in theirs.items() if (ours[role] - p).abs().max() > 1e-6]
    assert differing == ["fc.bias"]


# Weight norm's ResNet


def wn_logits(p: dict[str, Tensor], x: Tensor, n: int, stem_relu: bool = False) -> Tensor:
    """conv → blocks x + conv(ReLU(conv(x))), with a 1×1 convolution where the shape changes → mean → linear."""

    def conv(name: str, x: Tensor, stride: int = 1) -> Tensor:
        v = p[f"{name}.weight"]
        w = p[f"{name}.gain"] * v / v.square().sum((1, 2, 3), keepdim=True).sqrt()
        return F.conv2d(x, w, p[f"{name}.bias"], stride, padding=v.shape[2] // 2)

    x = conv("stem.conv", x)
    x = F.relu(x) if stem_relu else x
    for stage in range(3):
        for i in range(n):
            block, stride = f"body.{stage}.{i}", 2 if stage and not i else 1
            branch = conv(f"{block}.branch.conv2", F.relu(conv(f"{block}.branch.conv1", x, stride)))
            x = branch + (conv(f"{block}.shortcut.conv", x, stride) if stride == 2 else x)
    return x.mean((2, 3)) @ p["classifier.weight"].T + p["classifier.bias"]


@pytest.mark.parametrize("method", ["wn", "wn_data", "wn_hanin", "wn_default"])
def test_wn_resnet_outputs_are_the_authors(method):
    model = perturbed(build("resnet20", method, generator=seeded(0), example=images().float()).double())
    p = dict(model.named_parameters())
    torch.testing.assert_close(model(images()), wn_logits(p, images(), 3), **ROUNDING)
    with_relu = perturbed(build("resnet20", f"{method}:stem_relu=true", generator=seeded(0), example=images().float()))
    torch.testing.assert_close(
        with_relu.double()(images()),
        wn_logits(dict(with_relu.named_parameters()), images(), 3, stem_relu=True),
        **ROUNDING,
    )
    difference = (model(images()) - wn_logits(p, images(), 3, stem_relu=True)).abs().max()
    assert difference > 0.01  # the control: a ReLU after the stem is noticed


def test_wn_resnet_lengths_are_the_authors():
    model = build("resnet20", "wn", generator=seeded(0), dtype=torch.float64)
    gains = {n.removesuffix(".gain"): p for n, p in model.named_parameters() if n.endswith(".gain")}
    for name, gain in gains.items():
        module = model.get_submodule(name)
        gamma = 1 / 3 if name.endswith("conv2") else 1.0 if "shortcut" in name else 2.0  # the stem's is 2, too
        expected = math.sqrt(gamma * module.in_channels / module.out_channels)
        torch.testing.assert_close(gain, torch.full_like(gain, expected), rtol=1e-7, atol=0)
    assert gains["stem.conv"].mean().item() != pytest.approx(math.sqrt(3 / 16))  # the control: γ = 1 there


def test_other_forms_and_networks_of_wn_keep_their_relu():
    assert isinstance(build("resnet8", "wn", form="post", device="meta").stem.act, nn.ReLU)
    for name in ("mlp-3-8", "cnn-4-8"):
        assert isinstance(build(name, "wn", device="meta").stem.act, nn.ReLU)
    assert [n for n, _ in build("wrn-10-1", "wn", device="meta").stem.named_children()] == ["conv"]


# NF: a ResNet of bottlenecks, against timm's and against the equations


SHAPE = ResNetShape(
    blocks=(2, 3),
    widths=(8, 16),
    stem_width=8,
    kernels=(1, 3, 1),
    expansion=4,
    strided_layer=1,
    stem_kernel=7,
    stem_stride=2,
    stem_pool=True,
)


def nf_network(method: str) -> Network:
    config = ModelConfig(name="nf_test", method=get(method), form="pre", input_shape=(3, 32, 32), num_classes=5)
    model = SHAPE.build(config).double()
    initialize_(model, method, generator=seeded(0))
    return perturbed(model)


def nf_logits(p: dict[str, Tensor], x: Tensor, beta: float) -> Tensor:
    def conv(name: str, x: Tensor, stride: int = 1) -> Tensor:
        v = p[f"{name}.weight"]
        centred = v - v.mean((1, 2, 3), keepdim=True)
        std = centred.square().mean((1, 2, 3), keepdim=True).sqrt()
        w = p[f"{name}.gain"] * centred / (std * v[0].numel() ** 0.5)
        return F.conv2d(x, w, p.get(f"{name}.bias"), stride, padding=v.shape[2] // 2)

    x = F.max_pool2d(conv("stem.conv", x, 2), 3, 2, 1)
    variance = 1.0
    for stage, blocks in enumerate((2, 3)):
        for i in range(blocks):
            block, stride = f"body.{stage}.{i}", 2 if stage and not i else 1
            entered = F.relu(x) / variance**0.5
            out = F.relu(conv(f"{block}.branch.conv1", entered))
            out = conv(f"{block}.branch.conv3", F.relu(conv(f"{block}.branch.conv2", out, stride)))
            x = beta * out + (conv(f"{block}.shortcut.conv", entered, stride) if i == 0 else x)
            variance = (1.0 if i == 0 else variance) + beta**2
    return F.relu(x).mean((2, 3)) @ p["classifier.weight"].T + p["classifier.bias"]


@pytest.mark.parametrize("beta", [0.2, 1.0])
def test_nf_logits_are_those_of_the_equations(beta):
    model = nf_network(f"nf:beta={beta}")
    p = dict(model.named_parameters())
    convolutions = [n for n, m in model.named_modules() if isinstance(m, StandardizedConv2d)]
    assert len(convolutions) == 1 + 5 * 3 + 2
    assert all(f"{name}.bias" in p for name in convolutions)
    torch.testing.assert_close(model(images(32)), nf_logits(p, images(32), beta), **ROUNDING)
    bare = {name: t for name, t in p.items() if not name.endswith("conv1.bias")}
    assert (model(images(32)) - nf_logits(bare, images(32), beta)).abs().max() > 1e-3  # the control


def test_nf_biases_start_at_zero_and_can_be_left_out():
    with_biases = build("wrn-10-1", "nf", generator=seeded(0))
    without = build("wrn-10-1", "nf:bias=false", generator=seeded(0))
    biases = {n for n, _ in with_biases.named_parameters()} - {n for n, _ in without.named_parameters()}
    assert len(biases) == 1 + 3 * 2 + 2  # stem, branches, two shortcuts
    assert not any(with_biases.get_parameter(name).any() for name in biases)
    x = images().float()
    assert torch.equal(with_biases(x), without(x))
    assert build("wrn-10-1", "nf_he", device="meta").stem.conv.bias is not None


@torch.no_grad()
def test_nf_logits_are_those_of_timm():
    """Brock's networks in timm pool before the convolution of a shortcut; normdead's convolution has the stride."""
    nfnet = pytest.importorskip("timm.models.nfnet")
    cfg = nfnet.NfCfg(
        depths=(2, 3), channels=(32, 64), stem_type="7x7_pool", stem_chs=8, bottle_ratio=0.25, act_layer="relu"
    )
    theirs = nfnet.NormFreeNet(cfg, num_classes=5).double().eval()
    ours = nf_network("nf").eval()
    assert sum(p.numel() for p in theirs.parameters()) == sum(p.numel() for p in ours.parameters())
    own = [m for m in ours.modules() if isinstance(m, StandardizedConv2d)]
    pairs = [(theirs.stem.conv, own[0])]
    for stage, blocks in enumerate(theirs.stages):
        for i, block in enumerate(blocks):
            mine = ours.body[stage][i]
            pairs += [(getattr(block, f"conv{j}"), getattr(mine.branch, f"conv{j}")) for j in (1, 2, 3)]
            if block.downsample is not None:
                pairs.append((block.downsample.conv, mine.shortcut.conv))
                if stage:
                    block.downsample.pool = nn.AvgPool2d(1, 2)
    assert {id(m) for _, m in pairs} == {id(m) for m in own}
    for their, mine in pairs:
        assert their.bias is not None
        their.eps, their.scale = (
            1e-30,
            mine.weight[0].numel() ** -0.5,
        )  # our gain holds γ, exact where timm's is rounded
        for name in ("weight", "gain", "bias"):
            getattr(their, name).copy_(getattr(mine, name))
    theirs.head.fc.load_state_dict(ours.classifier.state_dict())
    torch.testing.assert_close(ours(images(32)), theirs(images(32)), **ROUNDING)
    theirs.stages[1][0].conv2.bias.zero_()  # the control
    assert (ours(images(32)) - theirs(images(32))).abs().max() > 1e-5
