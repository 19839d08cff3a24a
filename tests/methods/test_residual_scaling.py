"""IdShort, LearnScalar and ConvShort: where the gradient is kept, and where it explodes or vanishes.

Ratios and factors are of mean squares. The noise is the seed's, not the batch's: about 5 % a block in the narrow first
stages and 30 % over a whole network. So totals get ranges of a factor of two or more to either side, and factors a
block are averaged over all blocks inside stages.
"""

import math
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

import depth_rules
from normfree.methods import initialize_
from normfree.models import build
from normfree.nn.scalars import ScalarMultiplier
from normfree.theory import variance_gain
from oracles import BlockSignal, block_signals, factor_a_block, first_to_last, network_signals

DEEP = ["preact_resnet50", "preact_resnet101"]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def at_transitions(blocks: tuple[BlockSignal, ...]) -> float:
    """Geometric mean of the factor that a strided block puts on the gradient."""
    return float(
        np.exp(np.mean([np.log(s.gradient_before / s.gradient) for s in blocks if s.transition and s.stage > 1]))
    )


@pytest.mark.parametrize("name", DEEP)
@pytest.mark.parametrize("method", ["idshort", "convshort", "convshort:reads=raw,gain=1"])
def test_fan_out_nearly_keeps_the_gradient_from_block_to_block(method, name):
    assert 0.9 < factor_a_block(network_signals(name, method), backward=True) < 1.0


@pytest.mark.parametrize("name", DEEP)
@pytest.mark.parametrize("method", ["idshort_brock", "convshort_brock"])
def test_brock_keeps_the_signal_and_blows_up_the_gradient(method, name):
    assert 0.85 < factor_a_block(network_signals(name, method), backward=False) < 1.05
    assert factor_a_block(network_signals(name, method), backward=True) > 1.4


@pytest.mark.parametrize("name", DEEP)
def test_a_plain_sum_doubles_the_gradient_in_every_block(name):
    # The control of the two tests above.
    assert 1.7 < factor_a_block(network_signals(name, "he_in"), backward=True) < 2.1


def test_fan_out_loses_what_it_loses_at_the_border():
    circular = network_signals("preact_resnet50", "convshort", padding_mode="circular")
    assert factor_a_block(circular, backward=True) == pytest.approx(1.0, abs=0.04)
    # In the last stage, of 4×4, a position of a zero-padded 3×3 layer meets (10/12)² of the taps, half of the gradient.
    last = [s for s in network_signals("preact_resnet101", "convshort") if s.stage == 4][1:]
    lost = float(np.exp(np.mean([np.log(s.gradient_before / s.gradient) for s in last])))
    assert lost == pytest.approx((1 + (10 / 12) ** 2) / 2, abs=0.06)


def test_fan_out_loses_a_factor_of_four_at_a_stride():
    for name in DEEP:
        assert 0.15 < at_transitions(network_signals(name, "idshort")) < 0.3
        assert 0.15 < at_transitions(network_signals(name, "convshort")) < 0.3
        # The control, which counts the stride.
        assert 0.8 < at_transitions(network_signals(name, "isograd", batch=8)) < 1.25


@pytest.mark.parametrize(
    ("name", "method", "low", "high"),
    [
        ("preact_resnet50", "idshort", 0.004, 0.02),
        ("preact_resnet101", "idshort", 0.0015, 0.01),
        ("preact_resnet50", "convshort", 0.004, 0.02),
        ("preact_resnet101", "convshort", 0.0015, 0.01),
        ("preact_resnet50", "convshort:reads=raw,gain=1", 0.004, 0.02),
        ("preact_resnet101", "convshort:reads=raw,gain=1", 0.0015, 0.01),
        ("preact_resnet50", "convshort:reads=raw", 2, 10),
        ("preact_resnet101", "convshort:reads=raw", 1e3, 1e4),
        ("preact_resnet18", "idshort_brock", 1, 8),
        ("preact_resnet50", "idshort_brock", 1e4, 1e5),
        ("preact_resnet101", "idshort_brock", 1e9, 1e10),
        ("preact_resnet18", "convshort_brock", 1, 8),
        ("preact_resnet50", "convshort_brock", 3e4, 3e5),
        ("preact_resnet101", "convshort_brock", 2e10, 2e11),
        ("preact_resnet50", "he_in", 5e3, 5e4),
        ("preact_resnet101", "he_in", 2e8, 2e9),
    ],
)
def test_gradient_ratio_of_the_whole_network(name, method, low, high):
    assert low < first_to_last(network_signals(name, method)) < high


def assert_rows(rows: Tensor, variance: float) -> None:
    torch.testing.assert_close(rows.mean(1), torch.zeros(len(rows), dtype=rows.dtype), rtol=0, atol=1e-7)
    expected = torch.full((len(rows),), variance, dtype=rows.dtype)
    torch.testing.assert_close(rows.var(1, unbiased=False), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("method", ["idshort", "learnscalar", "convshort"])
def test_fan_out_weights_are_standardized_by_layer(method):
    model = build("preact_resnet18", method, generator=seeded(0))
    for layer in model.plan.hidden():
        w = model.get_submodule(layer.name).weight.detach().double()
        gain = 1 if layer.name == "stem.conv" else 2
        assert_rows(w.flatten().unsqueeze(0), gain / (w.shape[0] * w.shape[2] * w.shape[3]))
    assert w.flatten(1).mean(1).abs().max() > 1e-5  # the control: not by channel


@pytest.mark.parametrize("method", ["idshort:fan=in", "convshort:fan=in"])
def test_fan_in_is_an_option(method):
    model = build("preact_resnet18", method, generator=seeded(0))
    for layer in model.plan.hidden():
        w = model.get_submodule(layer.name).weight.detach().double()
        gain = 1 if layer.name == "stem.conv" else 2
        assert_rows(w.flatten().unsqueeze(0), gain / w[0].numel())


def test_unknown_fan_is_refused():
    with pytest.raises(ValueError, match=r"'fan' of method 'idshort' 'both'; .* one of: in, out"):
        build("preact_resnet18", "idshort:fan=both")


@pytest.mark.parametrize("method", ["idshort_brock", "learnscalar_brock", "convshort_brock"])
def test_brock_weights_are_standardized_by_channel(method):
    model = build("preact_resnet18", method, generator=seeded(0))
    for layer in model.plan.hidden():
        rows = model.get_submodule(layer.name).weight.detach().double().flatten(1)
        assert_rows(rows, (1 if layer.name == "stem.conv" else variance_gain("relu")) / rows.shape[1])


@pytest.mark.parametrize(("gain", "expected"), [("", 2), (",gain=1", 1)])
def test_convshort_of_the_raw_input_has_the_gain_it_is_given(gain, expected):
    model = build("preact_resnet18", f"convshort:reads=raw{gain}", generator=seeded(0))
    for branch in model.plan.branches:
        (layer,) = branch.shortcut_layers
        w = model.get_submodule(layer.name).weight.detach().double()
        assert_rows(w.flatten().unsqueeze(0), expected / w.shape[0])


def test_learnscalar_starts_as_idshort():
    x = torch.randn(2, 3, 16, 16, generator=seeded(1))
    scaled, plain = (build("preact_resnet18", method, generator=seeded(0)) for method in ("learnscalar", "idshort"))
    with torch.no_grad():
        torch.testing.assert_close(scaled(x), plain(x))
    learnable = [name for name, _ in scaled.named_parameters() if name.endswith(".a.value")]
    assert learnable == [f"{b.name}.a.value" for b in scaled.plan.branches if not b.position.transition]


Rule = Callable[[int, int], tuple[float, float, float]]
FORMS = ["pre", "linear"]
SEEDS = 20
WIDTH = 256
DEPTH = 30
RULES: dict[str, tuple[Rule, int]] = {  # the rule that each method should follow, and a number of branches
    "he_in": (depth_rules.plain_rule, 8),
    "sqrt_half": (
        depth_rules.sqrt_half_rule,
        8,
    ),  # no deeper, because its branches stay strong and so do its fluctuations
    "small_branch": (depth_rules.small_branch_rule(0.2), DEPTH),
    "small_branch:beta=0.3": (depth_rules.small_branch_rule(0.3), 10),
    "hanin": (depth_rules.hanin_rule(0.9), DEPTH),
    "hanin:r=0.5": (depth_rules.hanin_rule(0.5), 10),
    "shao": (depth_rules.shao_rule, DEPTH),
}


@cache
def second_moments(method: str, L: int, form: str) -> np.ndarray:
    """Second moment after every branch relative to the input of the first, of shape (seeds, L + 1)."""
    name = f"resmlp-{L}-{WIDTH}"
    model = build(name, method, form=form, size=1, in_channels=WIDTH, generator=seeded(0))
    plan, seen = model.plan, []
    for seed in range(SEEDS):
        g = seeded(seed)
        initialize_(model, method, plan, generator=g)
        blocks = block_signals(model, torch.randn(32, WIDTH, generator=g), backward=False)
        seen.append([1.0, *(s.second / blocks[0].before for s in blocks)])
    return np.array(seen)


def follows(samples: np.ndarray, expected: np.ndarray) -> bool:
    """At every depth the mean over seeds lies within 4.5 of its standard errors of what is expected."""
    error = samples.std(axis=0, ddof=1) / math.sqrt(len(samples))
    assert np.all(error[1:] < 0.1 * samples.mean(axis=0)[1:]), "too few seeds to tell"
    return bool(np.all(np.abs(samples.mean(axis=0) - expected)[1:] < 4.5 * error[1:]))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("method", RULES)
def test_second_moment_follows_the_recursion_of_its_method(method, form):
    rule, L = RULES[method]
    samples = second_moments(method, L, form)
    assert follows(samples, depth_rules.variance_by_depth(rule, L))
    others = [
        other
        for other in (depth_rules.plain_rule, depth_rules.sqrt_half_rule)
        if other is not rule and method != "shao"
    ]
    for other in others:  # the control
        assert not follows(samples, depth_rules.variance_by_depth(other, L))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("method", ["shao", "sqrt_half"])
def test_halved_and_weighted_sums_keep_the_second_moment(method, form):
    _, L = RULES[method]
    assert np.abs(second_moments(method, L, form).mean(axis=0) - 1).max() < 0.2
    assert second_moments("small_branch", DEPTH, form).mean(axis=0)[L] > 1.25  # the control: 1.04 to the 8th is 1.37


@pytest.mark.parametrize("form", FORMS)
def test_hanin_stays_below_its_bound_and_is_not_preserved(form):
    means = second_moments("hanin", DEPTH, form).mean(axis=0)
    assert means.max() < depth_rules.hanin_bound(0.9)
    assert means[-1] > 5
    assert means[-1] / means[20] < 1.1  # it has converged
    doubled = second_moments("he_in", 8, form).mean(axis=0)
    assert doubled[-1] > depth_rules.hanin_bound(0.9)  # the control: eight plain sums pass the bound


@pytest.mark.parametrize("form", FORMS)
def test_small_branch_without_normalization_grows_exponentially(form):
    means = second_moments("small_branch", DEPTH, form).mean(axis=0)
    for l in (10, 20):  # every ten branches multiply by the same number
        assert means[l + 10] / means[l] == pytest.approx(1.04**10, rel=0.1)
    fading = second_moments("hanin", DEPTH, form).mean(axis=0)
    assert fading[30] / fading[20] < 0.9 * 1.04**10  # the control


@pytest.mark.parametrize("form", FORMS)
def test_plain_sums_double_the_second_moment_a_block(form):
    means = second_moments("he_in", 8, form).mean(axis=0)
    assert (means[-1] / means[0]) ** (1 / 8) == pytest.approx(2.0, rel=0.05)


@pytest.mark.parametrize("method", ["skipinit", "rezero"])
@pytest.mark.parametrize("name", ["resnet14", "preact_resnet18", "wrn-16-1"])
def test_networks_with_a_zero_multiplier_start_as_their_shortcuts(name, method):
    model = build(name, method, generator=seeded(0))
    seen = []
    for branch in model.plan.branches:
        block = model.get_submodule(branch.name)
        assert isinstance(block.beta, ScalarMultiplier)
        assert block.beta.learnable
        assert block.beta.value.item() == 0.0
        assert all(model.get_submodule(layer.name).weight.all() for layer in branch.layers)
        if not branch.position.transition:
            block.register_forward_hook(lambda _m, args, out: seen.append(torch.equal(args[0], out)))
    with torch.no_grad():
        model(torch.randn(2, 3, 16, 16, generator=seeded(1)))
    assert seen
    assert all(seen)


def test_sqrt_half_does_not_start_as_its_shortcuts():
    block = build("resnet14", "sqrt_half", generator=seeded(0)).body[0][1]
    x = torch.rand(2, 16, 8, 8, generator=seeded(1))
    assert not torch.allclose(block(x), x)  # the control of the test above


def test_skipinit_draws_he_and_rezero_the_default():
    for method, expected in {"skipinit": 2 / 256, "rezero": 1 / (3 * 256)}.items():
        model = build("resmlp-3-256", method, form="pre", generator=seeded(0))
        for branch in model.plan.branches:
            for layer in branch.layers:
                # 5 standard errors of the variance of 65,536 normal draws
                variance = model.get_submodule(layer.name).weight.var().item()
                assert variance == pytest.approx(expected, rel=5 * math.sqrt(2 / 65536))
