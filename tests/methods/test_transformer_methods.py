"""Methods for Transformers: constants and weights by formula, and a first update that does not grow with depth."""

import math
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normfree.graph import discover
from normfree.methods import get, initialize_
from normfree.methods.transformer_methods import (
    deepnorm_decoder_scales,
    deepnorm_encoder_scales,
    tfixup_decoder_scale,
    tfixup_encoder_scale,
    transformer_stacks,
)
from normfree.models import build
from normfree.nn.attention import TokenEmbedding
from normfree.nn.residual import Residual
from normfree.nn.scalars import ScalarMultiplier
from normfree.plan import Branch, Layer
from oracles import log_slope

WIDTH, INNER, WORDS = 64, 128, 200
N, M = 2, 3
ONE_STACK = (f"encoder-4-{WIDTH}-{INNER}-4", f"decoder-4-{WIDTH}-{INNER}-4")
TRANSFORMER = f"transformer-{N}-{M}-{WIDTH}-{INNER}-4"


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def words(seed: int, rows: int = 8, length: int = 10, limit: int = WORDS) -> Tensor:
    return torch.randint(4, limit, (rows, length), generator=seeded(seed))


def inputs(name: str, limit: int = WORDS) -> tuple[Tensor, ...]:
    first, second = words(3, limit=limit), words(5, length=9, limit=limit)
    return (first, second) if name.startswith("transformer") else (first,)


def built(name: str, method: str, **options: object):
    sizes = {"vocabulary": WORDS} if name.startswith("encoder") else {"num_classes": WORDS}
    given = inputs(name)
    example = given if len(given) > 1 else given[0]
    return build(name, method, dropout=0.0, generator=seeded(0), **{**sizes, "example": example, **options})


def rms(model: nn.Module, layers: list[Layer]) -> tuple[float, int]:
    weights = torch.cat([model.get_submodule(layer.name).weight.detach().flatten() for layer in layers])
    return weights.square().mean().sqrt().item(), weights.numel()


def assert_rms(model: nn.Module, layers: list[Layer], expected: float) -> None:
    """Within 5 standard errors of a normal sample."""
    found, count = rms(model, layers)
    assert found / expected == pytest.approx(1.0, abs=5 / math.sqrt(2 * count))


def by_kind(branches: list[Branch]) -> dict[str, list[Layer]]:
    found: dict[str, list[Layer]] = {}
    for branch in branches:
        for layer in branch.layers:
            found.setdefault(layer.name.rpartition(".")[2], []).append(layer)
    return found


def embedding_of(model: nn.Module) -> TokenEmbedding:
    return next(m for m in model.modules() if isinstance(m, TokenEmbedding))


# Fixup: weights, zero branches, scalars.


@pytest.mark.parametrize(("name", "L"), [(TRANSFORMER, 2 * N + 3 * M), (ONE_STACK[0], 8), (ONE_STACK[1], 8)])
@pytest.mark.parametrize(
    ("options", "projection", "first"),
    [("", (2 * WIDTH) ** -0.5, (2 / (WIDTH + INNER)) ** 0.5), (":transformer=biased", WIDTH**-0.5, INNER**-0.5)],
)
def test_fixup_weights_follow_the_formula(name: str, L: int, options: str, projection: float, first: float) -> None:
    """Xavier of one projection for query, key and value, as the authors'; He fan-out of each in release 0.1."""
    model = built(name, f"fixup{options}")
    assert len(model.plan.branches) == L
    kinds = by_kind(model.plan.branches)
    for kind in ("q", "k", "v"):
        assert_rms(model, kinds[kind], projection * L ** (-1 / 6))
    assert_rms(model, kinds["linear1"], first * L**-0.5)
    assert rms(model, kinds["out"] + kinds["linear2"])[0] == 0
    assert embedding_of(model).weight.std().item() == pytest.approx(WIDTH**-0.5, rel=0.05)
    if name.startswith("encoder"):
        assert not model.classifier.weight.any()
    with pytest.raises(AssertionError):  # the control: the neighbouring exponent
        assert_rms(model, kinds["q"], projection * L ** (-1 / 4))
    bounded = built(name, f"fixup_bounded{options}")
    for kind, scale in (("q", 1.0), ("k", 1.0), ("v", L**-0.5)):
        assert_rms(bounded, kinds[kind], projection * scale)
    assert_rms(bounded, kinds["linear1"], first * L**-0.5)


@pytest.mark.parametrize("method", ["fixup", "fixup_bounded", "rezero", "skipinit"])
@pytest.mark.parametrize("name", [TRANSFORMER, *ONE_STACK])
@torch.no_grad()
def test_every_branch_puts_out_zero_at_the_start(name: str, method: str) -> None:
    def largest(model: nn.Module) -> list[float]:
        seen: list[float] = []
        for module in model.modules():
            if isinstance(module, Residual):
                module.beta.register_forward_hook(lambda _m, _a, out: seen.append(out.abs().max().item()))
        model(*inputs(name))
        return seen

    assert largest(built(name, method)) == [0.0] * len(built(name, method).plan.branches)
    assert min(largest(built(name, "xavier"))) > 0  # the control


def test_fixup_has_a_bias_before_every_layer_and_a_multiplier_a_branch() -> None:
    def counted(method: str) -> tuple[int, int, int]:
        """The scalars at 0 and at 1, and the bias vectors."""
        parameters = list(built(TRANSFORMER, method).parameters())
        scalars = [p.item() for p in parameters if p.numel() == 1]
        assert set(scalars) <= {0.0, 1.0}
        return scalars.count(0.0), scalars.count(1.0), sum(p.dim() == 1 and p.numel() > 1 for p in parameters)

    attentions, cross, feedforwards = N + M, M, N + M
    branches = attentions + cross + feedforwards
    # one per attention, three per feed-forward branch, and one after each stack
    biases = attentions + cross + 3 * feedforwards + 2
    assert counted("fixup") == counted("fixup_bounded") == (biases, branches + 1, 0)
    assert counted("fixup:bias=false") == (0, branches + 1, 0)
    # entry and before the output; of a cross attention the memory's, too; then δ, and one before the last layer
    biases = 3 * attentions + 4 * cross + 3 * feedforwards + 1
    vectors = 3 * (attentions + cross) + 2 * feedforwards
    assert counted("fixup:transformer=biased") == (biases, branches, vectors)
    assert counted("rezero")[2] == vectors


# T-Fixup, DeepNorm, Admin: constants.


def test_tfixup_constants() -> None:
    assert tfixup_encoder_scale(6) == pytest.approx(0.67 * 6 ** (-1 / 4)) == pytest.approx(0.42809, abs=1e-5)
    assert tfixup_decoder_scale(6) == pytest.approx((9 * 6) ** (-1 / 4)) == pytest.approx(0.36889, abs=1e-5)
    assert (tfixup_encoder_scale(1), tfixup_decoder_scale(1)) == (0.67, pytest.approx(3**-0.5))


def test_tfixup_weights_follow_the_formula() -> None:
    model = built(TRANSFORMER, "tfixup")
    found = transformer_stacks(model.plan, "tfixup")
    assert (found.encoder_layers, found.decoder_layers) == (N, M)
    xavier, wide = math.sqrt(2 / (2 * WIDTH)), math.sqrt(2 / (WIDTH + INNER))
    for branches, scale in ((found.encoder, 0.67 * N**-0.25), (found.decoder, (9 * M) ** -0.25)):
        kinds = by_kind(branches)
        assert_rms(model, kinds["q"] + kinds["k"], xavier)
        assert_rms(model, kinds["v"] + kinds["out"], xavier * scale)
        assert_rms(model, kinds["linear1"] + kinds["linear2"], wide * scale)
    assert embedding_of(model).weight.std().item() == pytest.approx(WIDTH**-0.5 * (9 * M) ** -0.25, rel=0.03)
    alone = built(ONE_STACK[0], "tfixup")
    assert_rms(alone, by_kind(alone.plan.branches)["v"], xavier * 0.67 * 4**-0.25)
    assert embedding_of(alone).weight.std().item() == pytest.approx(WIDTH**-0.5 * 36**-0.25, rel=0.03)
    assert not any(isinstance(m, nn.LayerNorm) for m in model.modules())


def test_deepnorm_constants() -> None:
    """Against the table of the paper: one stack, and encoder and decoder."""
    assert deepnorm_encoder_scales(6, 6) == pytest.approx(
        (0.81 * (6**4 * 6) ** (1 / 16), 0.87 * (6**4 * 6) ** (-1 / 16))
    )
    assert deepnorm_decoder_scales(6) == pytest.approx((18**0.25, 72**-0.25))
    assert deepnorm_encoder_scales(12, 0) == pytest.approx((24**0.25, 96**-0.25))
    assert deepnorm_encoder_scales(100, 100).alpha == pytest.approx(0.81 * 10**0.625)


def test_deepnorm_shortcuts_and_weights_follow_the_formula() -> None:
    model = built(TRANSFORMER, "deepnorm")
    assert model.form == "post"
    assert get("deepnorm").kind == get("admin").kind == "normalized"
    found = transformer_stacks(model.plan, "deepnorm")
    xavier, wide = math.sqrt(2 / (2 * WIDTH)), math.sqrt(2 / (WIDTH + INNER))
    size = (N**4 * M) ** (1 / 16)
    expected = ((found.encoder, 0.81 * size, 0.87 / size), (found.decoder, (3 * M) ** 0.25, (12 * M) ** -0.25))
    for branches, alpha, beta in expected:
        kinds = by_kind(branches)
        assert_rms(model, kinds["q"] + kinds["k"], xavier)
        assert_rms(model, kinds["v"] + kinds["out"], xavier * beta)
        assert_rms(model, kinds["linear1"] + kinds["linear2"], wide * beta)
        for branch in branches:
            shortcut = model.get_submodule(branch.name).a
            assert isinstance(shortcut, ScalarMultiplier)
            assert not shortcut.learnable
            assert shortcut.value.item() == pytest.approx(alpha)
    for name in ONE_STACK:
        alone = built(name, "deepnorm")
        values = [alone.get_submodule(b.name).a.value.item() for b in alone.plan.branches]
        assert values == pytest.approx([8**0.25] * 8)
        assert_rms(alone, by_kind(alone.plan.branches)["v"], xavier * 32**-0.25)


@pytest.mark.parametrize("name", [TRANSFORMER, *ONE_STACK])
@torch.no_grad()
def test_admin_shortcuts_are_the_profile_of_the_branches(name: str) -> None:
    """ω_i² = 1 + Σ_{j<i} Var[f_j], measured by a pass of its own; the decoder starts a new sum."""
    model = built(name, "admin").eval()
    variances: dict[str, float] = {}
    for branch in model.plan.branches:
        model.get_submodule(branch.name).branch.register_forward_hook(
            lambda _m, _a, out, key=branch.name: variances.update({key: out.double().var(unbiased=False).item()})
        )
    model(*inputs(name))
    found = transformer_stacks(model.plan, "admin")
    for branches in (found.encoder, found.decoder):
        total = 1.0
        for branch in branches:
            omega = model.get_submodule(branch.name).a
            assert omega.learnable
            assert omega.value.item() == pytest.approx(math.sqrt(total), rel=1e-5)
            total += variances[branch.name]
        assert not branches or total > 1.5  # the profile says something


def test_methods_of_transformers_refuse_other_plans() -> None:
    model = build("resmlp-2-8", "he_in", in_channels=1, size=2)
    with pytest.raises(
        ValueError, match=r"'tfixup' expects layers of attention and feed-forward branches.*degrees 2, 2"
    ):
        initialize_(model, "tfixup")
    with pytest.raises(ValueError, match=r"'deepnorm' expects a scalar on the shortcut of 'encoder.0.attention', got"):
        initialize_(built(ONE_STACK[0], "layernorm", form="post"), "deepnorm")


def test_fused_projections_are_scaled_in_their_values_only() -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.LayerNorm):
                setattr(module, name, nn.Identity())
    plan = discover(model, torch.zeros(2, 5, 32))
    initialize_(model, "tfixup", plan, generator=seeded(0))
    weight = torch.cat([layer.self_attn.in_proj_weight.detach() for layer in model.layers])
    parts = weight.view(4, 3, -1).square().mean((0, 2)).sqrt() * 32**0.5
    assert parts.tolist() == pytest.approx([1.0, 1.0, 0.67 * 4**-0.25], rel=0.05)


# The size of the first update.

DEPTHS = [6, 24, 96]


@cache
def first_update(family: str, method: str, layers: int) -> float:
    """‖Δf‖/η of one step on the branch weights, with a random output layer; 'unscaled' is Fixup without its factors."""
    numbers = f"{layers // 2}-{layers // 2}" if family == "transformer" else f"{layers}"
    name = f"{family}-{numbers}-16-32-4"
    sizes = {"vocabulary": 20} if family == "encoder" else {"num_classes": 20}
    model = build(
        name,
        "fixup" if method == "unscaled" else method,
        dropout=0.0,
        dtype=torch.float64,
        generator=seeded(0),
        **sizes,
    )
    branches = model.plan.branches
    with torch.no_grad():
        classifier = torch.randn(model.classifier.weight.shape, generator=seeded(1), dtype=torch.float64) / 4
        model.classifier.weight.copy_(classifier)  # where it is the embedding's, too, it is drawn the same way
        if method == "unscaled":
            for branch in branches:
                for layer in branch.layers:
                    model.get_submodule(layer.name).weight.mul_(len(branches) ** (1 / (2 * branch.degree - 2)))
    weights = [model.get_submodule(layer.name).weight for b in branches for layer in b.layers]
    given = inputs(name, limit=20)
    before = model(*given)
    targets = torch.randint(before.shape[-1], before.shape[:-1], generator=seeded(2))
    loss = F.cross_entropy(before.flatten(0, -2), targets.flatten())
    gradients = torch.autograd.grad(loss, weights)
    rate = 1e-6
    with torch.no_grad():
        torch._foreach_add_(weights, gradients, alpha=-rate)
        return ((model(*given) - before).norm() / rate).item()


@pytest.mark.parametrize("family", ["transformer", "encoder", "decoder"])
def test_first_update_does_not_grow_with_depth(family: str) -> None:
    sizes = [first_update(family, "fixup_bounded", layers) for layers in DEPTHS]
    assert max(sizes) / min(sizes) < 1.5
    assert min(sizes) > 0.1  # branches that learn nothing would pass too
    unscaled = [first_update(family, "unscaled", layers) for layers in DEPTHS]  # the control
    assert log_slope(DEPTHS, unscaled) == pytest.approx(1.0, abs=0.1)
    assert unscaled[-1] / unscaled[0] > 12


@pytest.mark.parametrize("family", ["transformer", "encoder", "decoder"])
def test_four_layers_an_attention_let_the_first_update_grow(family: str) -> None:
    """L^(2/3), as L branches whose values are × L^(-1/6) give: softmax does not pass on the scale of query and key."""
    sizes = [first_update(family, "fixup", layers) for layers in DEPTHS]
    assert log_slope(DEPTHS, sizes) == pytest.approx(2 / 3, abs=0.1)
    assert sizes[-1] < 0.2 * first_update(family, "unscaled", DEPTHS[-1])
