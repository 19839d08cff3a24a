"""Initialization from a batch: unit variance in one pass, and no trace of that pass."""

import pytest
import torch
from torch import Tensor, nn

from normfree import convert
from normfree.graph import discover
from normfree.methods import initialize_
from normfree.models import Network, build
from thin_resnet import thin_resnet

MODELS = {
    "resnet14": (16, 3, 16, 16),
    "wrn-16-1": (16, 3, 16, 16),
    "preact_resnet18": (4, 3, 16, 16),
    "resmlp-30-32": (64, 3, 4, 4),
    "mlp-20-50": (64, 3, 8, 8),
    "dense-10-4": (16, 3, 16, 16),
    "highway-6-30": (64, 3, 4, 4),
}
CALIBRATED = ["lsuv", "wn_data", "isograd"]  # all methods that send something through the network


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def batch(name: str) -> Tensor:
    return 3 * torch.randn(MODELS[name], generator=seeded(1)) + 0.5


def output_variances(model: Network, x: Tensor) -> list[float]:
    """Variance of the output of every hidden layer."""
    seen: list[float] = []
    for layer in model.plan.hidden():
        model.get_submodule(layer.name).register_forward_hook(
            lambda _m, _args, out: seen.append(out.double().var(unbiased=False).item())
        )
    with torch.no_grad():
        model(x)
    return seen


BLOCKS = [name for name in MODELS if not name.startswith(("mlp", "dense", "highway"))]


def block_variances(model: Network, x: Tensor) -> list[float]:
    """Variance of the output of every residual block, in float64."""
    seen: list[float] = []
    model = model.double()
    for branch in model.plan.branches:
        model.get_submodule(branch.name).register_forward_hook(
            lambda _m, _args, out: seen.append(out.var(unbiased=False).item())
        )
    with torch.no_grad():
        model(x.double())
    return seen


@pytest.mark.parametrize("name", BLOCKS)
def test_lsuv_gives_every_block_unit_variance_on_the_batch(name):
    x = batch(name)
    variances = block_variances(build(name, "lsuv", example=x, generator=seeded(0), dtype=torch.float64), x)
    assert variances == pytest.approx([1.0] * len(variances), rel=1e-12)
    for other in ("lsuv:by=layer", "sqrt_half"):  # the controls
        others = block_variances(build(name, other, example=x, generator=seeded(0), dtype=torch.float64), x)
        assert len(others) == len(variances)
        assert max(abs(v - 1) for v in others) > 0.3


@pytest.mark.parametrize("name", BLOCKS)
def test_lsuv_by_block_leaves_the_weights_orthogonal(name):
    model = build(name, "lsuv", example=batch(name), generator=seeded(0))
    for layer in model.plan.hidden():
        w = model.get_submodule(layer.name).weight.detach().double().flatten(1)
        gram = w @ w.T if w.shape[0] <= w.shape[1] else w.T @ w
        torch.testing.assert_close(gram, torch.eye(len(gram), dtype=torch.float64), rtol=0, atol=1e-5)


def test_converted_lsuv_gives_every_block_unit_variance():
    x = torch.randn(8, 1, 14, 14, generator=seeded(1))
    model, plan = convert(thin_resnet(), "lsuv", x, generator=seeded(0))
    seen: list[float] = []
    for branch in plan.branches:
        model.get_submodule(branch.home).register_forward_hook(
            lambda _m, _args, out: seen.append(out.double().var(unbiased=False).item())
        )
    model.eval()(x)
    assert seen == pytest.approx([1.0, 1.0], rel=1e-4)
    initialize_(model, "lsuv", plan, example=3 * x, generator=seeded(2))  # a second batch, a second scale
    model(x)
    assert seen[-2:] == pytest.approx([1 / 9, 1 / 9], rel=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_lsuv_gives_every_layer_unit_variance_on_the_batch(name):
    x = batch(name)
    spec = "lsuv:by=layer" if name in BLOCKS else "lsuv"  # without residual blocks, layers are all there is
    variances = output_variances(build(name, spec, example=x, generator=seeded(0)), x)
    assert variances == pytest.approx([1.0] * len(variances), rel=1e-3)
    other = output_variances(build(name, "he_in", example=x, generator=seeded(0)), x)
    assert len(other) == len(variances)
    assert max(abs(v - 1) for v in other) > 0.5  # the control


def test_lsuv_weights_stay_orthogonal_up_to_one_factor():
    model = build("mlp-6-50", "lsuv", example=batch("mlp-20-50"), generator=seeded(0))
    for layer in model.plan.hidden():
        w = model.get_submodule(layer.name).weight.detach()
        gram = w @ w.T
        torch.testing.assert_close(gram / gram[0, 0], torch.eye(len(w)), rtol=0, atol=1e-4)


def test_lsuv_pass_is_one_for_the_whole_network():
    model = build("wrn-16-1", "sqrt_half", generator=seeded(0))
    calls: list[int] = []
    model.classifier.register_forward_hook(lambda _m, _args, _out: calls.append(1))
    initialize_(model, "lsuv", example=batch("wrn-16-1"), generator=seeded(0))
    assert len(calls) == 1


class Breaks(nn.Module):
    """A head that fails, once everything before it has run."""

    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("broken on purpose")


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules())


@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("method", CALIBRATED)
def test_calibration_leaves_no_trace(method, breaks):
    x = batch("wrn-16-1")
    model = build("wrn-16-1", method, example=x, generator=seeded(0))
    kept = model.head
    if breaks:
        model.head = Breaks()
    model.body[1].eval()  # a mixture of modes, which must come back as it was
    modes = [m.training for m in model.modules()]
    state, data = torch.get_rng_state(), x.clone()
    if breaks:
        with pytest.raises((RuntimeError, ValueError), match=r"on purpose|failed there \(RuntimeError\)"):
            initialize_(model, method, example=x, generator=seeded(2))
    else:
        initialize_(model, method, example=x, generator=seeded(2))
    assert hooks(model) == 0
    assert [m.training for m in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.is_grad_enabled()
    assert torch.equal(x, data)
    assert all(p.grad is None and p.requires_grad and p.device.type == "cpu" for p in model.parameters())
    model.head = kept
    assert model(x).requires_grad


def test_trace_is_noticed():
    model = build("mlp-3-8", "he_in", generator=seeded(0))
    state = torch.get_rng_state()
    model.stem.register_forward_hook(lambda _m, _args, _out: None)
    assert hooks(model) == 1  # the control: a hook counts, and a draw without a generator shows
    build("mlp-3-8", "he_in")
    assert not torch.equal(torch.get_rng_state(), state)
    torch.set_rng_state(state)


def test_signal_that_died_on_the_way_is_refused_by_name():
    """The layer behind would be divided by rounding."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Threshold(1e9, 0.0), nn.Linear(4, 4), nn.Linear(4, 2))
    x = torch.randn(8, 4, generator=seeded(0))
    plan = discover(model, x)
    before = model[0].weight.detach().clone()
    with pytest.raises(ValueError, match=r"expected a signal that varies after '3', got a constant.*'fixup'"):
        initialize_(model, "lsuv", plan, example=x, generator=seeded(1))
    assert torch.equal(model[0].weight, before)
