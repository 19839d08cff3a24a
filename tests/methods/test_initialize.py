"""`initialize_` on third-party models, and its errors, which leave the model unchanged."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torchvision
import transformers
from torch import Tensor, nn

from normfree import discover, initialize_
from normfree.methods import InitContext, get, names
from normfree.methods.lsuv import calibrate_
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


def test_fan_modes_give_different_weights_where_they_differ() -> None:
    """The control of the two before: with fan-in for fan-out, the projection would be outside its bounds."""
    bounds = 4 / (2 * 24 * 32) ** 0.5
    assert abs((2 / 24) ** 0.5 / (2 / 32) ** 0.5 - 1) > bounds


@pytest.mark.parametrize("method", ["he_in", "he_out", "xavier", "fixup", "lsuv:by=layer"])
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
    initialize_(model, "lsuv:by=layer", plan, example=images(), generator=seeded())
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


def test_lsuv_by_block_asks_a_foreign_model_for_a_factor_of_each_sum() -> None:
    model, plan = foreign()
    expected = rf"'lsuv' expects a factor of the sum in '{plan.branches[0].home}', got none; .*'lsuv:by=layer'"
    refuse(expected, model, "lsuv", plan, images())


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


class TinyRMSNorm(nn.Module):
    """A normalizer by its name alone."""

    def forward(self, x: Tensor) -> Tensor:
        return x / x.square().mean(1, keepdim=True).sqrt()


def test_normalizer_of_others_is_refused_by_methods_without_normalization() -> None:
    model, _ = foreign()
    model.norm = TinyRMSNorm()
    refuse("'fixup' expects a model without normalization, got TinyRMSNorm at 'norm'", model, "fixup",
           discover(model, images()))  # fmt: skip


def test_normalization_is_no_obstacle_to_an_initialization() -> None:
    model, plan = foreign(norm=True)
    initialize_(model, "he_in", plan, generator=seeded())


def test_plan_of_another_model_is_refused() -> None:
    model, plan = foreign()
    refuse("expected a weight layer at 'stem.conv', got nothing; the plan belongs to another model", model, "fixup",
           build("resnet8", "fixup", device="meta").plan)  # fmt: skip
    other = replace(plan, classifier=(Layer("fc"),))
    refuse("expected a weight layer at 'fc', got nothing; the plan belongs to another model", model, "he_in", other)
    other = replace(plan, stem=(Layer("norm"),))
    refuse("expected a weight layer at 'norm', got Identity; the plan belongs to another model", model, "he_in", other)


def test_plan_of_a_shallower_model_is_refused() -> None:
    shallow, deep = build("resnet8", "fixup", device="meta"), build("resnet14", "fixup")
    expected = "expected a plan of every residual block, got one without 'body.0.1'; the plan belongs to another model"
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


@pytest.mark.parametrize("method", [m for m in names() if get(m).needs_example and "residual" in get(m).skips])
def test_missing_batch_is_refused(method: str) -> None:
    model = build("resnet8", method, example=images(), generator=seeded())
    expected = rf"method '{method}' sets its weights from data: expected a batch, got none; pass example="
    refuse(expected, model, method)
    refuse("expected a batch of finite values that vary", model, method, example=torch.full((2, 3, 8, 8), torch.inf))


def test_weight_norm_of_torch_is_initialized_through_its_parametrization() -> None:
    plain, plan = foreign()
    normed = foreign()[0]
    for block in normed.blocks:
        nn.utils.parametrizations.weight_norm(block.conv2)
    initialize_(plain, "he_in", plan, generator=seeded())
    initialize_(normed, "he_in", discover(normed, images()), generator=seeded())
    for ours, theirs in zip(plain.blocks, normed.blocks, strict=True):
        torch.testing.assert_close(theirs.conv2.weight, ours.conv2.weight)


def test_weight_that_cannot_become_zero_is_refused_by_name() -> None:
    """Torch's spectral norm divides 0 by 0; nothing would be written, and nothing said."""
    model, plan = foreign()
    for block in model.blocks:
        nn.utils.parametrizations.spectral_norm(block.conv2)
    refuse("expected a weight that can be set at 'blocks.0.conv2.weight'.*remove_parametrizations", model, "fixup",
           plan)  # fmt: skip


def test_weight_norm_of_torch_becomes_zero_by_its_length_and_keeps_its_direction() -> None:
    model, plan = foreign()
    for block in model.blocks:
        nn.utils.parametrizations.weight_norm(block.conv2)
    before = model.blocks[0].conv2.parametrizations.weight.original1.clone()
    initialize_(model, "fixup", plan, generator=seeded())
    for block in model.blocks:
        assert not block.conv2.weight.any()
    torch.testing.assert_close(model.blocks[0].conv2.parametrizations.weight.original1, before)


def test_refusal_leaves_attributes_and_replaced_buffers_as_they_were() -> None:
    model = build("resmlp-2-8", "dyt")
    plan = model.plan
    nn.utils.parametrizations.orthogonal(model.classifier)
    text = repr(model)
    refuse("expected a weight that can be set at 'classifier.weight'", model, "dyt:alpha=0.9", plan)
    assert repr(model) == text


def test_model_without_plan_is_refused_with_discover_as_remedy() -> None:
    model, _ = foreign()
    refuse(
        r"expected a model that provides a plan, got Foreign; pass plan=normfree.discover\(model, example\)",
        model,
        "fixup",
    )


def test_unknown_method_is_refused() -> None:
    model, plan = foreign()
    refuse(r"unknown method 'fixupp'; did you mean 'fixup'", model, "fixupp", plan)


# Attention: weights in other places, several in one, stored the other way round.


def without_norms(model: nn.Module) -> nn.Module:
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.LayerNorm):
                setattr(module, name, nn.Identity())
    return model


def fused_model() -> nn.Module:
    """Torch's own attention, all of query, key and value in `in_proj_weight`."""
    return torchvision.models.VisionTransformer(32, 16, 2, 4, 64, 128)


def transposed_model() -> nn.Module:
    """Weights stored as (in, out), the output layer tied to the embedding."""
    words = {"vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, n_inner=128, **words))


def separate_model() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, image_size=32, patch_size=16
    )
    return transformers.ViTForImageClassification(config)


def attending(make: Callable[[], nn.Module]) -> tuple[nn.Module, ResidualPlan]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = without_norms(make()).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.fill_(1.0)
    example = torch.zeros(2, 5, dtype=torch.long) if make is transposed_model else torch.zeros(2, 3, 32, 32)
    return model, discover(model, example)


def matrices(model: nn.Module, plan: ResidualPlan, branch: int) -> list[Tensor]:
    """The matrices of a branch one by one, each as (out, in)."""
    found: list[Tensor] = []
    for layer in plan.branches[branch].layers:
        weight = model.get_parameter(layer.path).detach()
        found += (weight.T if layer.transposed else weight).chunk(layer.parts)
    return found


def assert_std(weight: Tensor, std: float) -> None:
    """Within five standard errors of a standard deviation."""
    assert weight.std().item() == pytest.approx(std, rel=5 / (2 * weight.numel()) ** 0.5)


ATTENDING = [fused_model, transposed_model, separate_model]


@pytest.mark.parametrize("make", ATTENDING)
def test_fixup_scales_query_key_and_value_alike_fused_or_not(make: Callable[[], nn.Module]) -> None:
    """L = 4 branches: Xavier of 64 to 3·64 with L^(-1/6), for m = 4; Xavier of 64 to 128 with L^(-1/2), for m = 2."""
    model, plan = attending(make)
    kept = {name: p.detach().clone() for name, p in model.named_parameters() if name in plan.other_parameters}
    initialize_(model, "fixup", plan, generator=seeded())
    for branch in (0, 2):
        query, key, value, out = matrices(model, plan, branch)
        for projection in (query, key, value):
            assert projection.shape == (64, 64)
            assert_std(projection, (2 / (64 + 3 * 64)) ** 0.5 * 4 ** (-1 / 6))
        first, second = matrices(model, plan, branch + 1)
        assert first.shape == (128, 64)
        assert_std(first, (2 / (64 + 128)) ** 0.5 * 4 ** (-1 / 2))
        assert not out.any()
        assert not second.any()
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    assert len(biases) >= 8
    assert not any(bias.any() for bias in biases)
    assert kept
    for name, value in kept.items():
        assert torch.equal(model.get_parameter(name), value)


def test_tied_output_layer_keeps_the_embedding() -> None:
    model, plan = attending(transposed_model)
    before = model.transformer.wte.weight.detach().clone()
    for method in ("fixup", "he_in", "xavier"):
        initialize_(model, method, plan, generator=seeded())
        assert torch.equal(model.lm_head.weight, before)
    with torch.no_grad():
        model.lm_head.weight = nn.Parameter(before.clone())  # control: one of its own becomes zero
    initialize_(model, "fixup", discover(model, torch.zeros(2, 5, dtype=torch.long)), generator=seeded())
    assert not model.lm_head.weight.any()
    assert torch.equal(model.transformer.wte.weight, before)


@pytest.mark.parametrize("make", ATTENDING)
@pytest.mark.parametrize("method", ["he_in", "he_out", "skipinit", "rezero", "hanin", "small_branch"])
def test_initializers_use_the_fans_of_one_part(make: Callable[[], nn.Module], method: str) -> None:
    model, plan = attending(make)
    with torch.no_grad():
        get(method).initializer(InitContext(model, plan, seeded()))
    for matrix in (*matrices(model, plan, 0), matrices(model, plan, 1)[0]):
        fan = {"he_out": matrix.shape[0], "rezero": 3 * matrix.shape[1]}.get(method, matrix.shape[1])
        assert_std(matrix, fan**-0.5)


@pytest.mark.parametrize("make", [fused_model, transposed_model])
def test_orthogonal_weights_are_orthogonal_part_by_part(make: Callable[[], nn.Module]) -> None:
    model, plan = attending(make)
    ctx, layer = InitContext(model, plan, seeded()), plan.branches[0].layers[0]
    with torch.no_grad():
        ctx.set_(layer, ctx.orthogonal(layer))
    parts = matrices(model, plan, 0)[:3]
    for part in parts:
        torch.testing.assert_close(part @ part.T, torch.eye(64), rtol=0, atol=1e-5)
    assert not torch.allclose(parts[0], parts[1])


def test_transposed_convolution_has_the_fans_of_its_signal() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ConvTranspose2d(8, 6, 3, groups=2))
    ctx = InitContext(model, discover(model, torch.zeros(1, 3, 8, 8)), seeded())
    (layer,) = ctx.plan.classifier
    assert ctx.shape(layer) == (3, 8, 3, 3)
    assert ctx.fans(layer) == (4 * 9, 3 * 9)
    weight = ctx.normal(layer)
    with torch.no_grad():
        ctx.set_(layer, weight)
    assert torch.equal(model[1].weight, weight.transpose(0, 1))


def test_layer_behind_squeeze_and_excitation_is_the_one_set_to_zero() -> None:
    class Excited(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.down, self.up = (nn.Linear(64, 64) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            y = self.second(torch.relu(self.first(x)))
            return x + y * torch.sigmoid(self.up(torch.relu(self.down(y))))

    model = Excited()
    initialize_(model, "fixup", discover(model, torch.zeros(2, 64)), generator=seeded())
    assert not model.second.weight.any()
    assert_std(model.up.weight, (2 / 64) ** 0.5)
    assert_std(model.down.weight, (1 / 64) ** 0.5)


@pytest.mark.parametrize("method", ["lsuv", "isograd"])
def test_attention_is_refused_by_methods_that_follow_the_signal(method: str) -> None:
    model, plan = attending(fused_model)
    model.eval()
    batch = torch.randn(2, 3, 32, 32, generator=seeded())
    # isograd scales its sums, which this model cannot: its own check is behind that one.
    apply = (
        initialize_
        if method == "lsuv"
        else lambda *_, **__: get(method).initializer(InitContext(model, plan, seeded()))
    )
    with pytest.raises(ValueError, match="convolutions and linear layers, got MultiheadAttention at 'encoder"):
        apply(model, method, plan, example=batch, generator=seeded())


# What initialization leaves alone.


def test_calibration_restores_modes_and_hooks() -> None:
    model, plan = foreign()
    model.blocks[1].eval()
    modes = [m.training for m in model.modules()]

    def fail(module: nn.Module, out: Tensor) -> Tensor:
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        calibrate_(InitContext(model, plan, seeded(), images()), fail)
    initialize_(model, "lsuv:by=layer", plan, example=images(), generator=seeded())
    assert modes == [m.training for m in model.modules()]
    assert not any(m._forward_hooks for m in model.modules())


def test_gradients_are_not_recorded() -> None:
    model, plan = foreign()
    initialize_(model, "lsuv:by=layer", plan, example=images(), generator=seeded())
    assert all(p.is_leaf and p.requires_grad and p.grad is None for p in model.parameters())
    assert torch.is_grad_enabled()
