"""Models and examples that conversion accepts or refuses, and the model that it returns."""

import copy
import io
import pickle
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normfree
from normed_blocks import Block, X, network, perturb_
from normfree.conversion import convert, convert_
from normfree.nn.normalizers import find_norms
from remedies import refusal


class Post(nn.Module):
    """The branch ends in an activation: no module returns the branch for β to multiply."""

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
        (network(1, Post), "skipinit", r"'1.first': an activation in .* lies between it and the sum '1'"),
        (network(1, Functional), "fixup", r"'1': its own forward pass computes layer_norm"),
        (network(1, Odd), "fixup", r"'1.norm1': OddNorm is not a normalizer that can be removed"),
        (network(1), "batchnorm", r"keeps or adds a normalizer"),
        (network(1), "deepnorm", r"'deepnorm', which keeps or adds a normalizer"),
        (network(1), "convshort", r"puts a new convolution into every shortcut"),
        (network(1), "fixup:branches=false", r"removes the branches"),
    ],
)
def test_module_that_cannot_be_converted_is_refused_by_name(model: nn.Module, method: str, message: str) -> None:
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
    monkeypatch.setattr("normfree.conversion.pipeline.Conversion._check_", lambda *_: 1 / 0)
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


def plain_network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Flatten(), nn.Linear(128, 4),
    )  # fmt: skip


@pytest.mark.parametrize("method", ["wn", "nf", "lsuv", "he_in", "dyt"])
def test_network_without_sums_is_converted_as_far_as_possible(method: str) -> None:
    model, plan = convert(plain_network(), method, torch.randn(4, 3, 8, 8))
    assert not find_norms(model)
    assert "no residual sum was found" in plan.changes.notes[0]
    assert "no residual branches" in str(plan)


def test_refusal_of_a_network_without_sums_names_the_alternatives() -> None:
    text = refusal(plain_network(), "fixup", torch.randn(4, 3, 8, 8))
    assert "'fixup' works on residual branches, but no residual sum was found" in text
    assert text.endswith("; use 'nf', 'wn', 'dyt' or 'lsuv:by=layer'")


class Group(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.blocks(x)


SUMS = ("sqrt_half", "lsuv")  # they scale the sum itself
BRANCHES = ("fixup", "skipinit", "rezero", "nf", "wn", "dyt", "lsuv:by=layer", "he_in")


@pytest.mark.parametrize("method", [*BRANCHES, *SUMS])
def test_sum_of_whole_blocks_is_noted_and_measured(method: str) -> None:
    """No method has a layer to scale there, so the signal doubles, and a note says so."""
    model, plan = normfree.convert(network(3, Group), method, X)
    assert plan.changes is not None
    assert "have no layer to scale: '1', '2', '3'" in plan.changes.notes[0]
    verdict = normfree.diagnose(model, X, plan=plan).verdict
    if method not in SUMS:
        assert verdict.forward.status == "exploding"
    if method in ("fixup", "skipinit", "rezero"):  # whose blocks put out what they read
        assert verdict.forward.worst in {"1", "2", "3"}
    notes = normfree.convert(network(8), method, X)[1].changes.notes  # control
    grows = method in ("he_in", "lsuv:by=layer")  # whose branches are as large as their shortcuts
    assert not notes or (grows and all("first loss" in note or "times as large" in note for note in notes))


@pytest.mark.parametrize("method", [*BRANCHES, *SUMS])
def test_signal_that_grows_too_far_at_sums_of_whole_blocks_is_refused(method: str) -> None:
    if method in (*SUMS, "dyt", "he_in"):  # a scaled sum does not grow, and a baseline may
        _, plan = normfree.convert(network(8, Group), method, X)
        assert "have no layer to scale: '1', '2', '3', '4', '5', '6' and 2 more" in plan.changes.notes[0]
        return
    with pytest.raises(
        ValueError, match=r"(times as large as|the first loss) .*; the signal may still grow at outer skips"
    ):
        normfree.convert(network(8, Group), method, X)


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
    with pytest.raises(ValueError, match=r"'1.second.weight' is computed from other .*remove_parametrizations"):
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
    """Doubles its input in place."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(2))


@pytest.mark.parametrize("method", ["skipinit", "lsuv", "dyt"])
def test_example_is_left_as_it_was(method: str) -> None:
    example = X.clone()
    convert(WritesIntoInput(*network()), method, example)
    assert torch.equal(example, X)


class LooksAtLayers(Block):
    """Checks the classes of its layers."""

    def forward(self, x: Tensor) -> Tensor:
        if type(self.first) is not nn.Linear:
            raise TypeError("not a linear layer")
        return super().forward(x)


@pytest.mark.parametrize("method", ["fixup", "wn", "wn_data"])
def test_model_that_does_not_run_when_converted_is_refused(method: str) -> None:
    model = network(1, LooksAtLayers)
    with pytest.raises(
        ValueError, match=r"converted Sequential to run on the example.*not a linear layer; .*class of a layer; use '"
    ):
        convert(model, method, X)


@pytest.mark.parametrize("method", ["fixup", "skipinit", "nf", "learnscalar", "wn"])
def test_converted_model_is_initialized_again(method: str) -> None:
    model, plan = convert(network(), method, X)
    start = {name: p.detach().clone() for name, p in model.named_parameters() if p.numel() == 1}
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


def test_attention_is_refused_by_methods_that_measure_layers() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Linear(8, 4))
    with pytest.raises(ValueError, match=r"'lsuv' measures .* got MultiheadAttention at '1.self_attn'; use a method"):
        convert(model, "lsuv:by=layer", torch.randn(2, 5, 8))


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
        (
            Repeated(),
            "sqrt_half",
            r"'block#1' \(and 2 more\): .* but its block runs more than once; use a method that scales",
        ),
        (
            Flat(),
            "sqrt_half",
            r"'\(model\)#1' \(and 1 more\): .* it is in the model's own forward pass; use a method that",
        ),
        (Flat(), "skipinit", r"'weight': no module call uses this weight alone, .*; use 'dyt'$"),
        (
            network(1, Post),
            "skipinit",
            r"the sum '1', so no .* alone; make that .* module of its own; use 'fixup', 'nf', 'wn' or 'dyt'$",
        ),
        (
            network(1, Odd),
            "fixup",
            r"OddNorm is not a normalizer that can be removed; replace it with .* of torch\.nn, or with nn\.Identity$",
        ),
        (network(1, Functional), "fixup", r"computes layer_norm; make it a module"),
        (nn.LayerNorm(8), "lsuv", r"'\(model\)': the model itself is a normalizer; convert the model that holds it"),
        (network(1), "selu", r"'selu.*' needs an activation function of its own, .*; build a normfree model"),
        (network(1), "normprop", r"'normprop' needs an activation function of its own, .*; build a normfree model"),
        (network(1), "spectralnorm", r"got 'spectralnorm', which only divides the weights .*parametrizations"),
        (
            convert(network(1), "fixup", X)[0],
            "fixup",
            r"not converted yet, got one with scalars at '1.first'; convert the",
        ),
    ],
)
def test_refusal_names_the_reason_the_place_and_the_remedy(model: nn.Module, method: str, message: str) -> None:
    assert re.search(message, refusal(model, method, X))


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


class Counted(nn.Sequential):
    """Counts the forward passes of all its copies."""

    passes = 0

    def forward(self, x: Tensor) -> Tensor:
        Counted.passes += 1
        return super().forward(x)


@pytest.mark.parametrize("method", ["fixup", "nf", "dyt", "sqrt_half"])
def test_conversion_costs_at_most_fifteen_forward_passes(method: str) -> None:
    """Look and run once; besides, run original and result forward and backward, which costs as three each.

    The original also runs in training mode, without values; the result would if it had code for that mode.
    """
    Counted.passes = 0
    convert(Counted(*network()), method, X)
    compared = 3 if method == "fixup" else 2  # only Fixup has zeros inside the network
    without_values = 1
    assert Counted.passes == 2 + without_values + compared
    assert 2 + without_values + 3 * compared <= 15
