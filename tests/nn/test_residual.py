"""The residual equation p(c · (a·h(s) + β·f(e(α·x)) + δ)) against numpy, and its stream's precision."""

from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from normfree.models import build
from normfree.nn.residual import Residual, SubsamplePad, lower_precision_, set_precision_
from normfree.nn.scalars import ScalarBias, ScalarMultiplier

SCALARS = ("c", "a", "alpha", "beta", "delta")
VALUES = {"c": 0.7, "a": 1.3, "alpha": -0.6, "beta": 0.35, "delta": 0.9}  # all apart, none neutral
NEUTRAL = {"c": 1.0, "a": 1.0, "alpha": 1.0, "beta": 1.0, "delta": 0.0}
WIDTH = 4
EXPLAINS = r"expected .+, got .+; .+"


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def scalar(name: str, *, learnable: bool = True) -> ScalarBias | ScalarMultiplier:
    return ScalarBias(learnable=learnable) if name == "delta" else ScalarMultiplier(learnable=learnable)


def block(
    present: frozenset[str] | set[str] = frozenset(SCALARS),
    *,
    branch: bool = True,
    shortcut: bool = True,
    entry: bool = True,
    exit: bool = True,
    reads_entry: bool = False,
    learnable: bool = True,
    seed: int = 0,
) -> Residual:
    """A float64 block over (N, 4) with tanh before the branch and a ReLU after the sum."""
    made = Residual(
        nn.Sequential(nn.Linear(WIDTH, 5), nn.Sigmoid(), nn.Linear(5, WIDTH)) if branch else None,
        nn.Linear(WIDTH, WIDTH, bias=False) if shortcut else None,
        entry=nn.Tanh() if entry else None,
        exit=nn.ReLU() if exit else None,
        shortcut_reads_entry=reads_entry,
        **{name: scalar(name, learnable=learnable) for name in present},
    ).double()
    rng = generator(seed)
    with torch.no_grad():
        for layer in made.modules():
            if isinstance(layer, nn.Linear):
                for parameter in layer.parameters():
                    parameter.normal_(generator=rng)
    return made


def by_hand(made: Residual, x: np.ndarray, values: dict[str, float]) -> np.ndarray:
    """The equation in numpy, with the scalars of `values` and the weights of `made`."""
    weights = {name: parameter.detach().numpy() for name, parameter in made.named_parameters()}
    entered = values["alpha"] * x
    if isinstance(made.entry, nn.Tanh):
        entered = np.tanh(entered)
    source = entered if made.shortcut_reads_entry else x
    total = values["a"] * (source @ weights["shortcut.weight"].T if "shortcut.weight" in weights else source)
    if made.branch is not None:
        hidden = 1 / (1 + np.exp(-(entered @ weights["branch.0.weight"].T + weights["branch.0.bias"])))
        total = total + values["beta"] * (hidden @ weights["branch.2.weight"].T + weights["branch.2.bias"])
    out = values["c"] * (total + values["delta"])
    return np.maximum(out, 0) if isinstance(made.exit, nn.ReLU) else out


def sample(seed: int = 1) -> Tensor:
    return torch.randn(3, WIDTH, dtype=torch.float64, generator=generator(seed))


@settings(max_examples=80, deadline=None)
@given(
    present=st.sets(st.sampled_from(SCALARS)),
    slots=st.fixed_dictionaries(
        {name: st.booleans() for name in ("branch", "shortcut", "entry", "exit", "reads_entry", "learnable")}
    ),
    numbers=st.lists(st.floats(-2, 2), min_size=5, max_size=5),
    seed=st.integers(0, 1000),
)
def test_residual_is_the_equation(present: set[str], slots: dict[str, bool], numbers: list[float], seed: int) -> None:
    made = block(present, seed=seed, **slots)
    values = {name: value for name, value in zip(SCALARS, numbers, strict=True) if name in present}
    made.set_scalars_(values)
    x = sample(seed + 1)
    expected = by_hand(made, x.numpy(), NEUTRAL | values)
    np.testing.assert_allclose(made(x).detach().numpy(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("one", "other"), list(combinations(SCALARS, 2)))
def test_residual_scalars_are_not_interchangeable(one: str, other: str) -> None:
    made = block(exit=False)
    made.set_scalars_(VALUES)
    x = sample()
    swapped = VALUES | {one: VALUES[other], other: VALUES[one]}
    out = made(x).detach().numpy()
    np.testing.assert_allclose(out, by_hand(made, x.numpy(), VALUES), rtol=1e-12)
    assert np.abs(out - by_hand(made, x.numpy(), swapped)).max() > 1e-2


def test_residual_scalar_gradients_match_the_formula() -> None:
    made = block(exit=False)
    made.set_scalars_(VALUES)
    x = sample()
    made(x).sum().backward()
    with torch.no_grad():
        shortcut, branch = made.shortcut(x), made.branch(torch.tanh(VALUES["alpha"] * x))
        inside = VALUES["a"] * shortcut + VALUES["beta"] * branch + VALUES["delta"]
    step = 1e-6
    high, low = (by_hand(made, x.numpy(), VALUES | {"alpha": VALUES["alpha"] + s}).sum() for s in (step, -step))
    expected = {
        "c": inside.sum(),
        "a": VALUES["c"] * shortcut.sum(),
        "alpha": (high - low) / (2 * step),
        "beta": VALUES["c"] * branch.sum(),
        "delta": VALUES["c"] * x.numel(),
    }
    for name, value in expected.items():
        assert getattr(made, name).value.grad.item() == pytest.approx(float(value), rel=1e-7), name


def test_residual_shortcut_reads_the_entry_only_with_that_setting() -> None:
    raw, entered = (block(shortcut=False, exit=False, branch=False, reads_entry=reads) for reads in (False, True))
    for made in (raw, entered):
        made.set_scalars_({"alpha": -0.6})
    x = sample()
    torch.testing.assert_close(raw(x), x, rtol=0, atol=0)
    torch.testing.assert_close(entered(x), torch.tanh(-0.6 * x))
    assert (raw(x) - entered(x)).abs().max() > 0.1


def test_residual_without_branch_is_the_scaled_shortcut() -> None:
    made = block(branch=False, entry=False, exit=False)
    made.set_scalars_(VALUES)
    x = sample()
    expected = VALUES["c"] * (VALUES["a"] * made.shortcut(x) + VALUES["delta"])
    torch.testing.assert_close(made(x), expected)
    made.set_scalars_({"beta": 100.0})  # nothing to multiply
    torch.testing.assert_close(made(x), expected, rtol=0, atol=0)


def test_residual_of_nothing_is_the_identity_without_parameters() -> None:
    made = Residual(None)
    x = sample()
    assert made(x) is x
    assert not made.state_dict()


def test_residual_builds_on_meta() -> None:
    with torch.device("meta"):
        made = block()
    made.set_scalars_(VALUES)
    assert made(torch.empty(2, WIDTH, dtype=torch.float64, device="meta")).shape == (2, WIDTH)
    assert "meta" in repr(made.beta)


@settings(max_examples=40, deadline=None)
@given(
    channels=st.integers(1, 3),
    more=st.integers(0, 3),
    height=st.integers(1, 7),
    width=st.integers(1, 7),
    stride=st.integers(1, 3),
)
def test_subsample_pad_is_the_loop(channels: int, more: int, height: int, width: int, stride: int) -> None:
    x = torch.randn(2, channels, height, width, generator=generator(height * width))
    out = SubsamplePad(channels, channels + more, stride)(x)
    assert out.shape == (2, channels + more, -(-height // stride), -(-width // stride))
    for n, c, i, j in np.ndindex(*out.shape):
        expected = x[n, c, i * stride, j * stride].item() if c < channels else 0.0
        assert out[n, c, i, j].item() == expected


def test_subsample_pad_refuses_fewer_channels() -> None:
    with pytest.raises(ValueError, match=EXPLAINS) as caught:
        SubsamplePad(8, 4)
    assert "8 → 4" in str(caught.value)
    assert "use a convolution" in str(caught.value)


def test_set_scalars_writes_the_values() -> None:
    made = block()
    made.set_scalars_(VALUES)
    assert {name: getattr(made, name).value.item() for name in SCALARS} == VALUES
    made.set_scalars_({"beta": 0.0})
    assert {name: getattr(made, name).value.item() for name in SCALARS} == VALUES | {"beta": 0.0}


def test_set_scalars_accepts_neutral_values_without_a_module() -> None:
    made = block(frozenset())
    made.set_scalars_(NEUTRAL)
    assert all(isinstance(getattr(made, name), nn.Identity) for name in SCALARS)


@pytest.mark.parametrize("missing", SCALARS)
def test_set_scalars_without_a_module_raises_and_writes_nothing(missing: str) -> None:
    made = block(set(SCALARS) - {missing})
    before = {name: value.clone() for name, value in made.state_dict().items()}
    values = {name: value for name, value in VALUES.items() if name != missing} | {missing: 0.25}  # the bad one last
    with pytest.raises(ValueError, match=EXPLAINS) as caught:
        made.set_scalars_(values)
    for part in (f"'{missing}'", "0.25", "Identity", f"build the block with {missing}="):
        assert part in str(caught.value)
    assert all(torch.equal(value, before[name]) for name, value in made.state_dict().items())


def test_set_scalars_refuses_unknown_names_and_lists_the_known() -> None:
    made = block()
    with pytest.raises(ValueError, match=EXPLAINS) as caught:
        made.set_scalars_({"beta": 3.0, "gamma": 1.0})
    assert "'gamma'" in str(caught.value)
    assert "use one of c, a, alpha, beta, delta" in str(caught.value)
    assert made.beta.value.item() == 1.0


@pytest.mark.parametrize("learnable", [True, False])
def test_scalars_are_parameters_or_buffers_and_always_saved(learnable: bool) -> None:
    made = block(learnable=learnable)
    expected = {f"{name}.value" for name in SCALARS}
    assert (expected <= {name for name, _ in made.named_parameters()}) == learnable
    assert (expected <= {name for name, _ in made.named_buffers()}) != learnable
    made.set_scalars_(VALUES)
    fresh = block(learnable=learnable, seed=5)
    x = sample()
    assert not torch.equal(fresh(x), made(x))
    fresh.load_state_dict(made.state_dict())
    assert expected <= set(made.state_dict())
    torch.testing.assert_close(fresh(x), made(x), rtol=0, atol=0)


def observe(model: nn.Module, x: Tensor, *, autocast: bool = False) -> dict[str, set[torch.dtype]]:
    """The types of every residual sum, block output and convolution output inside and outside blocks, in one pass."""
    seen: dict[str, set[torch.dtype]] = {"sum": set(), "block": set(), "inside": set(), "outside": set()}
    inside = {id(part) for block in model.modules() if isinstance(block, Residual) for part in block.modules()}
    handles = []
    for module in model.modules():
        if isinstance(module, Residual):
            # δ reads the sum, whether it is a scalar or nothing.
            handles.append(module.delta.register_forward_pre_hook(lambda _, args: seen["sum"].add(args[0].dtype)))
            handles.append(module.register_forward_hook(lambda _, args, out: seen["block"].add(out.dtype)))
        elif isinstance(module, nn.Conv2d):
            where = "inside" if id(module) in inside else "outside"
            handles.append(module.register_forward_hook(lambda _, args, out, w=where: seen[w].add(out.dtype)))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        model(x).float().square().sum().backward()
    for handle in handles:
        handle.remove()
    return seen


METHODS = ("fixup", "skipinit", "convshort", "learnscalar", "nf", "wn", "shao", "batchnorm", "spectralnorm")


@pytest.mark.parametrize("method", METHODS)
def test_set_precision_keeps_the_stream_while_branches_run_in_bf16(method: str) -> None:
    model = build("resnet20", method=method, generator=generator(0))
    assert set_precision_(model, branch=torch.bfloat16) is model
    seen = observe(model, torch.randn(2, 3, 8, 8, generator=generator(1)))
    assert seen == {
        "sum": {torch.float32},
        "block": {torch.float32},
        "inside": {torch.bfloat16},
        "outside": {torch.float32},
    }
    assert model.classifier.weight.dtype == torch.float32
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("method", METHODS)
def test_set_precision_keeps_the_stream_under_autocast(method: str) -> None:
    model = build("resnet20", method=method, generator=generator(0))
    set_precision_(model, branch=None)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    seen = observe(model, torch.randn(2, 3, 8, 8, generator=generator(1)), autocast=True)
    assert seen == {
        "sum": {torch.float32},
        "block": {torch.float32},
        "inside": {torch.bfloat16},
        "outside": {torch.bfloat16},
    }


def test_autocast_alone_lets_the_stream_fall_to_bf16() -> None:
    model = build("resnet20", method="skipinit", generator=generator(0))
    seen = observe(model, torch.randn(2, 3, 8, 8, generator=generator(1)), autocast=True)
    assert torch.bfloat16 in seen["sum"]


def test_set_precision_stays_near_float32() -> None:
    x = torch.randn(4, 3, 8, 8, generator=generator(1))
    model = build("resnet20", method="skipinit", generator=generator(0)).eval()
    for module in model.modules():
        if isinstance(module, Residual):
            module.set_scalars_({"beta": 0.5})
    exact = model(x)
    rounded = set_precision_(model)(x)
    error = ((rounded - exact).norm() / exact.norm()).item()
    assert 0 < error < 0.02  # a few roundings of 2⁻⁹ in each of nine branches; 0 would mean that nothing was cast


@pytest.mark.parametrize(("stream", "expected"), [(torch.float32, 2.0), (torch.bfloat16, 1.0)])
def test_stream_of_small_additions_survives_in_float32_and_is_lost_in_bf16(
    stream: torch.dtype, expected: float
) -> None:
    made = Residual(nn.Linear(1, 1))
    with torch.no_grad():
        made.branch.weight.zero_()
        made.branch.bias.fill_(2.0**-12)  # exact in bf16, but below half its spacing of 2⁻⁷ at 1
    set_precision_(made, stream=stream, branch=torch.bfloat16)
    x = torch.ones(1, 1, dtype=stream)
    with torch.no_grad():
        for _ in range(4096):
            x = made(x)
    assert x.dtype == stream
    assert x.item() == expected


def test_lowering_reaches_weight_layers_of_any_depth_and_leaves_the_rest() -> None:
    inner = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), ScalarBias(0.3), nn.ReLU())
    model = nn.Sequential(inner, nn.InstanceNorm2d(4, affine=True), ScalarMultiplier(0.3), nn.Conv2d(4, 8, 1))
    model.append(nn.Sequential(nn.GroupNorm(2, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten()))
    model.extend([nn.Linear(8, 6), nn.LayerNorm(6), nn.RMSNorm(6), nn.Linear(6, 2)])
    lower_precision_(model, torch.bfloat16)
    short = {name for name, t in model.state_dict().items() if t.dtype is torch.bfloat16}
    both = {f"{i}.{name}" for i in ("3", "4.0", "5", "6", "8") for name in ("weight", "bias")}
    assert short == {"0.0.weight", "7.weight"} | both
    assert {t.dtype for name, t in model.state_dict().items() if name not in short} == {torch.float32, torch.int64}
    x = torch.randn(5, 3, 6, 6, generator=generator(0)).bfloat16()
    assert model(x).dtype is torch.bfloat16
    alone = nn.Conv1d(2, 3, 1), nn.Conv3d(2, 3, 1), nn.Embedding(2, 3)
    assert [lower_precision_(layer, torch.float16).weight.dtype for layer in alone] == [torch.float16] * 2 + [
        torch.float32
    ]


def test_lowering_keeps_shared_weights_shared() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    lower_precision_(model, torch.bfloat16)
    assert model[1].weight is model[0].weight
    assert model[0].weight.dtype is torch.bfloat16
