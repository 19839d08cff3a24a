"""Weight norm: lengths by formula, orthogonal directions, and a norm that is kept at any depth."""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from normfree import discover
from normfree.methods import get, initialize_
from normfree.methods.initialize import InitContext
from normfree.models import Network, build
from normfree.nn.weight_layers import WeightNormConv2d, WeightNormLinear
from normfree.theory import weightnorm_norm_ratio
from oracles import frozen, root_mean_square

RESIDUAL = ["wrn-16-2", "resnet20", "preact_resnet50"]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@cache
def proposed(name: str) -> Network:
    return build(name, "wn", generator=seeded(0))


def hidden_layers(model: Network) -> list[tuple[str, WeightNormConv2d | WeightNormLinear]]:
    return [(layer.name, model.get_submodule(layer.name)) for layer in model.plan.hidden()]


def expected_gamma(model: Network, name: str) -> float:
    """γ read off the layer's place: 2 before a ReLU, 1/B_k at a branch's end, 1 for shortcuts and bare stems."""
    if "shortcut" in name:
        return 1.0
    if name.startswith("stem"):
        return 2.0 if model.name == "resnet20" else 1.0  # the authors' code, in which no ReLU follows either
    stage, block = model.body[int(name.split(".")[1])], model.body.get_submodule(".".join(name.split(".")[1:3]))
    convolutions = [m for m in block.branch if isinstance(m, nn.Conv2d)]
    return 1 / len(stage) if model.get_submodule(name) is convolutions[-1] else 2.0


# Lengths and directions


@pytest.mark.parametrize("name", RESIDUAL)
def test_wn_lengths_follow_the_formula(name):
    model = proposed(name)
    for layer, module in hidden_layers(model):
        expected = (expected_gamma(model, layer) * module.in_channels / module.out_channels) ** 0.5
        torch.testing.assert_close(module.gain, torch.full_like(module.gain, expected))
        norms = module.effective_weight().flatten(1).norm(dim=1)
        torch.testing.assert_close(norms, torch.full_like(norms, expected))


@pytest.mark.parametrize(("g", "power"), [("forward", 1.0), ("backward", 0.0), ("mean", 0.5)])
def test_wn_lengths_for_the_backward_pass_leave_the_fans_out(g, power):
    model = build("wrn-16-2", f"wn:g={g}", generator=seeded(0))
    for layer, module in hidden_layers(model):
        expected = (expected_gamma(model, layer) * (module.in_channels / module.out_channels) ** power) ** 0.5
        torch.testing.assert_close(module.gain, torch.full_like(module.gain, expected))


def test_wn_directions_can_be_gaussian():
    orthogonal, gaussian = (build("mlp-3-60", f"wn:directions={d}", size=8) for d in ("orthogonal", "gaussian"))
    for model, off in ((orthogonal, False), (gaussian, True)):
        rows = nn.functional.normalize(model.get_submodule(list(model.plan.hidden())[1].name).effective_weight())
        assert ((rows @ rows.T - torch.eye(60)).abs().max() > 0.1) == off
    lengths = [[m.gain for _, m in hidden_layers(model)] for model in (orthogonal, gaussian)]
    torch.testing.assert_close(*lengths)


@pytest.mark.parametrize("option", ["g=back", "directions=he"])
def test_wn_names_its_choices(option):
    with pytest.raises(ValueError, match=f"unknown value of option '{option.partition('=')[0]}' of method 'wn'"):
        build("wrn-10-1", f"wn:{option}")


@pytest.mark.parametrize("name", ["mlp-6-50", "cnn-6-8"])
def test_wn_lengths_of_plain_networks_are_those_before_a_relu(name):
    for _, module in hidden_layers(proposed(name)):
        fan_in, fan_out = (module.weight.shape[1], module.weight.shape[0])
        expected = torch.full_like(module.gain, (2 * fan_in / fan_out) ** 0.5)
        torch.testing.assert_close(module.gain, expected)


@pytest.mark.parametrize("name", [*RESIDUAL, "mlp-6-50"])
def test_wn_directions_are_orthogonal(name):
    for _, module in hidden_layers(proposed(name)):
        v = module.weight.detach().double().flatten(1)
        small = v @ v.T if v.shape[0] <= v.shape[1] else v.T @ v
        torch.testing.assert_close(small, torch.eye(len(small), dtype=torch.float64), rtol=0, atol=1e-5)


def grouped(groups: int, out: int = 64) -> tuple[nn.Conv2d, InitContext]:
    model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.Conv2d(64, out, 3, groups=groups, bias=False), nn.Conv2d(out, 2, 1))
    ctx = InitContext(model, discover(model, torch.zeros(1, 3, 8, 8)), seeded(0))
    with torch.no_grad():
        ctx.set_(ctx.plan.body[0], ctx.orthogonal(ctx.plan.body[0]))
    return model[1], ctx


@pytest.mark.parametrize("groups", [1, 4, 16, 64])
def test_grouped_directions_are_orthogonal_group_by_group(groups: int) -> None:
    """The matrix of each group read off the convolution itself, in float64: what it makes of each unit impulse."""
    convolution, _ = grouped(groups)
    convolution.double()
    impulses = torch.eye(64 * 9, dtype=torch.float64).view(-1, 64, 3, 3)
    whole = convolution(impulses).detach().flatten(1).T  # (outputs, inputs): zero but for the groups' own
    for rows, columns in zip(whole.chunk(groups), torch.arange(64 * 9).chunk(groups), strict=True):
        block = rows[:, columns]
        assert block.norm() == pytest.approx(rows.norm().item())
        torch.testing.assert_close(block @ block.T, torch.eye(len(block), dtype=torch.float64), rtol=0, atol=1e-5)


def test_one_orthogonal_matrix_for_all_groups_has_short_rows() -> None:
    """The control of the one before, and what `wn` learned from: 9 columns of length 1 make 64 rows of √(9/64)."""
    convolution, ctx = grouped(64)
    whole = nn.init.orthogonal_(torch.empty(64, 9))
    assert whole.square().sum(1).mean().item() == pytest.approx(9 / 64)
    torch.testing.assert_close(convolution.weight.flatten(1).norm(dim=1), torch.ones(64))
    assert ctx.plan.body[0].parts == 1


def test_wn_keeps_the_classifier_plain_and_of_default_scale():
    classifier = build("mlp-6-500", "wn", generator=seeded(0)).classifier
    assert type(classifier) is nn.Linear
    assert classifier.weight.abs().max() <= 500**-0.5
    assert classifier.weight.var().item() == pytest.approx(1 / (3 * 500), rel=0.07)  # 5 standard errors of 5,000


# Norms over depth


def raw_qr(ctx: InitContext, module: nn.Linear) -> Tensor:
    """Q of a normal matrix with the signs as the decomposition leaves them, which is not the Haar measure."""
    return torch.linalg.qr(ctx.normal(module))[0]


def unit_lengths_(model: Network) -> None:
    for _, module in hidden_layers(model):
        nn.init.ones_(module.gain)


def norm_ratios(
    name: str, seeds: int, inputs: int = 64, change_: Callable[[Network], None] = lambda model: None
) -> tuple[float, float]:
    """RMS over seeds and inputs of ‖output‖/‖input‖ of all blocks together, and of the same for gradients."""
    width = int(name.split("-")[2])
    model = build(name, "wn", size=1, in_channels=width, generator=seeded(0))
    plan, forward, backward = model.plan, [], []
    with frozen(model):
        for seed in range(seeds):
            g = seeded(seed)
            initialize_(model, "wn", plan, generator=g)
            change_(model)
            x = torch.randn(inputs, width, generator=g).requires_grad_()
            y = model.body(x)
            noise = torch.randn(y.shape, generator=g)
            (gradient,) = torch.autograd.grad(y, x, noise)
            forward.append((y.norm(dim=1) / x.norm(dim=1)).detach())
            backward.append(gradient.norm(dim=1) / noise.norm(dim=1))
    return root_mean_square(torch.cat(forward).numpy()), root_mean_square(torch.cat(backward).numpy())


@pytest.mark.parametrize(
    ("B", "width", "seeds", "within"),
    [(10, 128, 10, 0.03), (100, 128, 10, 0.03), pytest.param(1000, 96, 4, 0.04, marks=pytest.mark.slow)],
)
def test_wn_norm_ratio_is_that_of_the_theorem_forward_and_backward(B, width, seeds, within):
    # Seeds vary by 4 % in the mean square: 10 of them leave 0.7 % in the root, 4 leave 1 %. Four standard errors.
    forward, backward = norm_ratios(f"resmlp-{B}-{width}", seeds=seeds)
    assert forward == pytest.approx(weightnorm_norm_ratio(B), rel=within)
    assert backward == pytest.approx(weightnorm_norm_ratio(B), rel=within)


def test_wn_norm_ratio_fails_when_directions_are_not_haar_distributed(monkeypatch):
    monkeypatch.setattr(InitContext, "orthogonal", raw_qr)
    forward, _ = norm_ratios("resmlp-1000-64", seeds=1)
    assert forward > 1.1 * weightnorm_norm_ratio(1000)


def test_wn_unit_lengths_explode_in_residual_networks():
    forward, _ = norm_ratios("resmlp-40-64", seeds=3, change_=unit_lengths_)
    assert forward > 100
    assert norm_ratios("resmlp-40-64", seeds=3)[0] == pytest.approx(weightnorm_norm_ratio(40), rel=0.1)


def stage_ratios(method: str, seeds: int) -> list[float]:
    """RMS over seeds of the output norm of each stage of a wide ResNet over that of its first shortcut."""
    rows = []
    for seed in range(seeds):
        g = seeded(seed)
        model = build("wrn-22-4", method, generator=g)
        starts: list[float] = []
        ends: list[float] = []
        for stage in model.body:
            stage[0].shortcut.register_forward_hook(lambda _m, _args, out, seen=starts: seen.append(out.norm().item()))
            stage.register_forward_hook(lambda _m, _args, out, seen=ends: seen.append(out.norm().item()))
        with torch.no_grad():
            model(torch.randn(2, 3, 32, 32, generator=g))
        rows.append([end / start for start, end in zip(starts, ends, strict=True)])
    return [root_mean_square(column) for column in zip(*rows, strict=True)]


def test_wn_norm_ratio_holds_in_strided_convolutional_stages():
    # Zero padding takes a few percent, most at 8×8; a seed varies by 5 %.
    assert stage_ratios("wn", seeds=3) == pytest.approx([weightnorm_norm_ratio(3)] * 3, rel=0.15)
    assert min(stage_ratios("wn_default", seeds=1)) > 1.15 * weightnorm_norm_ratio(3)  # the control


def mlp_ratio(change_: Callable[[Network], None]) -> float:
    ratios = []
    for seed in range(20):
        g = seeded(seed)
        model = build("mlp-20-200", "wn", generator=g)
        change_(model)
        x = torch.randn(16, 28 * 28 * 3, generator=g)
        with torch.no_grad():
            ratios.append(model.body(model.stem(x)).norm(dim=1) / x.norm(dim=1))
    return root_mean_square(torch.cat(ratios).numpy())


def test_wn_keeps_the_norm_of_a_deep_mlp():
    assert 0.75 < mlp_ratio(lambda model: None) < 1.25
    assert mlp_ratio(unit_lengths_) < 0.01  # the control


# The three it is compared with


def outputs_of_hidden_layers(model: Network, x: Tensor) -> dict[str, Tensor]:
    seen: dict[str, Tensor] = {}
    handles = [
        module.register_forward_hook(lambda _m, _args, out, name=name: seen.setdefault(name, out))
        for name, module in hidden_layers(model)
    ]
    with torch.no_grad():
        model(x)
    for handle in handles:
        handle.remove()
    return seen


def is_standardized(out: Tensor) -> bool:
    dims = [d for d in range(out.dim()) if d != 1]
    mean, variance = out.double().mean(dims), out.double().var(dims, unbiased=False)
    return bool(mean.abs().max() < 1e-3 and (variance - 1).abs().max() < 1e-3)


@pytest.mark.parametrize(("name", "shape"), [("wrn-16-1", (16, 3, 16, 16)), ("mlp-20-50", (64, 3, 8, 8))])
def test_wn_data_standardizes_every_pre_activation_on_the_batch(name, shape):
    x = torch.randn(shape, generator=seeded(1)).add(0.5)
    outputs = outputs_of_hidden_layers(build(name, "wn_data", generator=seeded(0), example=x), x)
    assert all(is_standardized(out) for out in outputs.values())
    others = outputs_of_hidden_layers(build(name, "wn", generator=seeded(0), example=x), x)
    assert outputs.keys() == others.keys()
    assert not any(is_standardized(out) for out in others.values())  # the control


def test_wn_data_lengths_are_one_over_the_standard_deviation():
    x = torch.randn(32, 3, 8, 8, generator=seeded(1))
    model = build("mlp-3-10", "wn_data", generator=seeded(0), example=x)
    v = model.stem.linear.weight / model.stem.linear.weight.norm(dim=1, keepdim=True)
    t = (x.flatten(1) @ v.T).detach()
    torch.testing.assert_close(model.stem.linear.gain[:, 0], 1 / t.std(0, unbiased=False), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.stem.linear.bias, -t.mean(0) / t.std(0, unbiased=False), rtol=1e-4, atol=1e-5)


def test_wn_hanin_fades_the_branches_of_every_stage_from_the_start():
    hanin = build("wrn-22-1", "wn_hanin", generator=seeded(0))
    ends = {branch.last.name: branch.position.index_in_stage for branch in hanin.plan.branches}
    assert list(ends.values()) == [1, 2, 3] * 3
    for (key, module), (_, other) in zip(hidden_layers(hanin), hidden_layers(proposed("wrn-22-1")), strict=True):
        expected = torch.full_like(module.gain, 0.9 ** ends[key]) if key in ends else other.gain
        torch.testing.assert_close(module.gain, expected)
        torch.testing.assert_close(module.weight, other.weight)


@pytest.mark.parametrize("name", ["wrn-16-2", "mlp-6-200"])
def test_wn_default_wraps_orthogonal_weights_as_they_are(name):
    def orthogonal(module: nn.Module) -> bool:
        w = module.effective_weight().detach().double().flatten(1)
        gram = w @ w.T if w.shape[0] <= w.shape[1] else w.T @ w
        return torch.allclose(gram, torch.eye(len(gram), dtype=torch.float64), rtol=0, atol=1e-5)

    layers = hidden_layers(build(name, "wn_default", generator=seeded(0)))
    assert all(orthogonal(module) for _, module in layers)
    for _, module in layers:
        torch.testing.assert_close(module.gain.flatten(), module.weight.flatten(1).norm(dim=1))
    he = hidden_layers(build(name, "wn_default:directions=he", generator=seeded(0)))
    assert not any(orthogonal(module) for _, module in he)  # the control


def test_wn_default_refuses_unknown_directions():
    with pytest.raises(
        ValueError, match=r"unknown value of option 'directions' of method 'wn_default' 'hee'; did you mean 'he'"
    ):
        get("wn_default:directions=hee")


@pytest.mark.parametrize("name", ["wrn-16-2", "mlp-6-200"])
def test_wn_default_around_he_has_the_effective_weight_of_he(name):
    model = build(name, "wn_default:directions=he", generator=seeded(0))
    for _, module in hidden_layers(model):
        effective = module.effective_weight().detach()
        torch.testing.assert_close(effective.flatten(1).norm(dim=1), module.gain.detach().flatten())
        variance = 2 / effective[0].numel()
        # 5 standard errors of a variance estimated from normal draws
        assert effective.var().item() == pytest.approx(variance, rel=5 * (2 / effective.numel()) ** 0.5)
