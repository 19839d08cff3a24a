"""`initialize_` on models that were not built here, and what it refuses before it changes anything."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from normfree import discover, initialize_
from normfree.methods import Site, get, names
from normfree.methods.data_driven import calibrate_
from normfree.models import build
from normfree.plan import Layer, ResidualPlan


class Block(nn.Module):
    """A residual block as anybody would write it."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1)
        self.short = nn.Conv2d(inputs, outputs, 1, stride) if stride > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv2(torch.relu(self.conv1(x)))
        return torch.relu(y + (x if self.short is None else self.short(x)))


class Foreign(nn.Module):
    """A norm-free residual network of plain torch modules: four blocks, one of them with a projection."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.inlet = nn.Conv2d(3, 24, 3, padding=1)
        self.norm = nn.BatchNorm2d(24) if norm else nn.Identity()
        self.blocks = nn.Sequential(Block(24, 24, 1), Block(24, 24, 1), Block(24, 32, 2), Block(32, 32, 1))
        self.outlet = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.outlet(self.blocks(torch.relu(self.norm(self.inlet(x)))).mean((2, 3)))


def images() -> Tensor:
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def foreign(norm: bool = False) -> tuple[Foreign, ResidualPlan]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Foreign(norm)
    return model, discover(model, images())


def seeded(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# A model from elsewhere.


def test_fixup_initializes_a_foreign_model_by_formula() -> None:
    model, plan = foreign()
    assert initialize_(model, "fixup", plan, generator=seeded()) is model
    assert not model(images()).any()
    assert not model.outlet.weight.any()
    for block in model.blocks:
        assert not block.conv2.weight.any()
        # He fan-out times L^(-1/2), L = 4 branches of m = 2; 4 standard errors of a standard deviation
        fan_out = 9 * block.conv1.out_channels
        expected = (2 / fan_out) ** 0.5 * 4**-0.5
        assert block.conv1.weight.std().item() == pytest.approx(
            expected, rel=4 / (2 * block.conv1.weight.numel()) ** 0.5
        )
    projection = model.blocks[2].short
    assert projection is not None
    assert projection.weight.std().item() == pytest.approx(
        (2 / 32) ** 0.5, rel=4 / (2 * projection.weight.numel()) ** 0.5
    )
    assert not any(p.any() for name, p in model.named_parameters() if name.endswith("bias"))


def test_he_initializes_a_foreign_model_by_formula() -> None:
    model, plan = foreign()
    initialize_(model, "he_in", plan, generator=seeded())
    for block in model.blocks:
        for conv in (block.conv1, block.conv2):
            expected = (2 / (9 * conv.in_channels)) ** 0.5
            assert conv.weight.std().item() == pytest.approx(expected, rel=4 / (2 * conv.weight.numel()) ** 0.5)
    # The stem reads the images, which no ReLU has seen.
    assert model.inlet.weight.std().item() == pytest.approx(
        (1 / 27) ** 0.5, rel=4 / (2 * model.inlet.weight.numel()) ** 0.5
    )


def test_fan_modes_are_told_apart_where_they_differ() -> None:
    """The control of the two before: with fan-in for fan-out, the projection would be outside its bounds."""
    bounds = 4 / (2 * 24 * 32) ** 0.5
    assert abs((2 / 24) ** 0.5 / (2 / 32) ** 0.5 - 1) > bounds


@pytest.mark.parametrize("method", ["he_in", "he_out", "xavier", "fixup", "lsuv"])
def test_foreign_model_learns_after_initialization(method: str) -> None:
    model, plan = foreign()
    initialize_(model, method, plan, example=images(), generator=seeded())
    labels = torch.arange(4)
    loss = nn.functional.cross_entropy(model(images()), labels)
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=1e-3)
    assert nn.functional.cross_entropy(model(images()), labels) < loss


def test_lsuv_sets_the_variance_of_every_layer_of_a_foreign_model() -> None:
    model, plan = foreign()
    initialize_(model, "lsuv", plan, example=images(), generator=seeded())
    deviations: dict[str, float] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(
                lambda _m, _a, out, n=name: deviations.update({n: out.std(correction=0).item()})
            )
    model(images())
    assert deviations == pytest.approx(dict.fromkeys(deviations, 1.0), rel=1e-4)
    deviations.clear()
    model(2 * images())  # control: another batch, another variance
    assert deviations["inlet"] == pytest.approx(2.0, rel=1e-4)


def test_one_seed_gives_a_foreign_model_the_same_weights() -> None:
    first, second, third = foreign(), foreign(), foreign()
    for (model, plan), seed in zip((first, second, third), (1, 1, 2), strict=True):
        initialize_(model, "he_out", plan, generator=seeded(seed))
    assert torch.equal(first[0].inlet.weight, second[0].inlet.weight)
    assert not torch.equal(first[0].inlet.weight, third[0].inlet.weight)


# What is refused, and that nothing has changed then.


def refuse(
    match: str, model: nn.Module, method: str, plan: ResidualPlan | None = None, example: Tensor | None = None
) -> None:
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes = [m.training for m in model.modules()]
    with pytest.raises(ValueError, match=match):
        initialize_(model, method, plan, example=example, generator=seeded())
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert modes == [m.training for m in model.modules()]


@pytest.mark.parametrize(
    ("method", "scalar"),
    [
        ("skipinit", "beta = 0"),
        ("rezero", "beta = 0"),
        ("idshort", "c = 0.707"),
        ("hanin", "beta = 0.9"),
        ("shao", "a = "),
    ],
)
def test_sum_without_the_scalars_of_the_method_is_refused(method: str, scalar: str) -> None:
    model, plan = foreign()
    refuse(
        rf"method '{method}' expects a scalar {scalar}.* in the sum 'blocks.0', got none; build .* or convert",
        model,
        method,
        plan,
    )


@pytest.mark.parametrize(
    ("method", "kind"), [("wn", "weight_norm"), ("nf", "standardized"), ("spectralnorm", "spectral")]
)
def test_plain_layers_are_refused_where_others_are_needed(method: str, kind: str) -> None:
    model, plan = foreign()
    refuse(rf"method '{method}' expects {kind} layers, got Conv2d at 'inlet'; build the model", model, method, plan)


@pytest.mark.parametrize("method", ["fixup", "sqrt_half", "isograd", "lsuv"])
def test_normalization_is_refused_by_methods_without_it(method: str) -> None:
    model, plan = foreign(norm=True)
    expected = rf"method '{method}' expects a model without normalization, got BatchNorm2d at 'norm'; build the model"
    refuse(expected, model, method, plan, images())


def test_normalization_is_no_obstacle_to_an_initialization() -> None:
    model, plan = foreign(norm=True)
    initialize_(model, "he_in", plan, generator=seeded())


def test_plan_of_another_model_is_refused() -> None:
    model, plan = foreign()
    refuse("expected a weight layer at 'stem.conv', got nothing; the plan is of another model", model, "fixup",
           build("resnet8", "fixup", device="meta").plan)  # fmt: skip
    other = replace(plan, classifier=(Layer("fc"),))
    refuse("expected a weight layer at 'fc', got nothing; the plan is of another model", model, "he_in", other)
    other = replace(plan, stem=(Layer("norm"),))
    refuse("expected a weight layer at 'norm', got Identity; the plan is of another model", model, "he_in", other)


def test_plan_of_a_shallower_model_is_refused() -> None:
    shallow, deep = build("resnet8", "fixup", device="meta"), build("resnet14", "fixup")
    expected = "expected a plan of every residual block, got one without 'body.0.1'; the plan is of another model"
    refuse(expected, deep, "fixup", shallow.plan)


@pytest.mark.parametrize("method", [name for name in names() if "none" not in get(name).skips])
def test_empty_plan_is_refused_by_methods_that_need_branches(method: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    plan = discover(model, torch.zeros(2, 4))
    refuse(
        rf"method '{method}' expects a network with residual branches, but the plan is empty.*'he_in'",
        model,
        method,
        plan,
    )


def test_empty_plan_suits_methods_for_plain_networks() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    before = model[0].weight.detach().clone()
    initialize_(model, "he_in", discover(model, torch.zeros(2, 4)), generator=seeded())
    assert not torch.equal(model[0].weight, before)


@pytest.mark.parametrize("method", [name for name in names() if get(name).needs_example])
def test_missing_batch_is_refused(method: str) -> None:
    model = build("resnet8", method, example=images(), generator=seeded())
    expected = rf"method '{method}' sets its weights from data: expected a batch, got none; pass example="
    refuse(expected, model, method)
    refuse("expected a batch of finite values that vary", model, method, example=torch.full((2, 3, 8, 8), torch.inf))


def test_model_without_plan_is_told_to_discover_one() -> None:
    model, _ = foreign()
    refuse(
        r"expected a model that states its plan, got Foreign; pass plan=normfree.discover\(model, example\)",
        model,
        "fixup",
    )


def test_unknown_method_is_refused() -> None:
    model, plan = foreign()
    refuse(r"unknown method 'fixupp'; did you mean 'fixup'\?", model, "fixupp", plan)


# What initialization leaves alone.


def test_calibration_restores_modes_and_hooks() -> None:
    model, plan = foreign()
    model.blocks[1].eval()
    modes = [m.training for m in model.modules()]

    def fail(module: nn.Module, out: Tensor) -> Tensor:
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        calibrate_(Site(model, plan, seeded(), images()), fail)
    initialize_(model, "lsuv", plan, example=images(), generator=seeded())
    assert modes == [m.training for m in model.modules()]
    assert not any(m._forward_hooks for m in model.modules())


def test_gradients_are_not_recorded() -> None:
    model, plan = foreign()
    initialize_(model, "lsuv", plan, example=images(), generator=seeded())
    assert all(p.is_leaf and p.requires_grad and p.grad is None for p in model.parameters())
    assert torch.is_grad_enabled()
