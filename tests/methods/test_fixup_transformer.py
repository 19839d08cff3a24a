"""Fixup's Transformer against the authors' rules, derived again here: weights, counts, outputs, one step of Adam.

The rules are those of the text (section 3, footnote 3, section 4.3) and of the authors' public code: Xavier weights,
with query, key and value as one projection; scalars where `reference_logits` has them; one learning rate for all.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normfree.models import build
from normfree.nn.attention import sinusoids
from normfree.optim import param_groups

LAYERS, WIDTH, INNER, HEADS, WORDS = 6, 512, 1024, 4, 1000
BASE = f"transformer-{LAYERS}-{LAYERS}-{WIDTH}-{INNER}-{HEADS}"
BRANCHES = 2 * LAYERS + 3 * LAYERS
SMALL = "transformer-2-2-16-32-2"


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def base() -> nn.Module:
    return build(BASE, "fixup", num_classes=WORDS, generator=seeded(0))


def expected_std(name: str) -> float:
    """The standard deviation of a weight, from the rules alone."""
    if name == "embedding.weight":
        return WIDTH**-0.5
    layer = name.removesuffix(".weight").rpartition(".")[2]
    if layer in ("q", "k", "v"):  # W_qkv is 3·512 × 512; an attention has m = 4 layers
        return math.sqrt(2 / (WIDTH + 3 * WIDTH)) * BRANCHES ** (-1 / (2 * 4 - 2))
    if layer == "linear1":  # 1024 × 512; a feed-forward branch has m = 2 layers
        return math.sqrt(2 / (WIDTH + INNER)) * BRANCHES ** (-1 / (2 * 2 - 2))
    assert layer in ("out", "linear2"), name
    return 0.0


def test_standard_deviation_of_every_weight_is_the_authors(base: nn.Module) -> None:
    weights = {name: p for name, p in base.named_parameters() if p.dim() == 2}
    assert len(weights) == 1 + LAYERS * 6 + LAYERS * 10
    for name, weight in weights.items():
        expected, found = expected_std(name), weight.std().item()
        assert found == pytest.approx(expected, rel=5 / math.sqrt(2 * weight.numel())), name
        assert abs(weight.mean().item()) <= 5 * expected / math.sqrt(weight.numel()), name
        if expected and name != "embedding.weight":  # Xavier's distribution is uniform
            assert weight.abs().max().item() == pytest.approx(math.sqrt(3) * expected, rel=1e-3)
    assert expected_std("q.weight") == pytest.approx(0.0177, abs=5e-5)  # the figure of the authors' network


def test_standard_deviations_of_release_0_1_are_noticed() -> None:
    """The control: √2 too large."""
    before = build(BASE, "fixup:transformer=biased", num_classes=WORDS, generator=seeded(0))
    std = before.encoder[0].attention.branch.q.weight.std().item()
    assert std == pytest.approx(0.0251, abs=1e-4)
    assert std / expected_std("q.weight") == pytest.approx(math.sqrt(2), rel=0.01)


def test_parameters_are_counted_by_hand(base: nn.Module) -> None:
    """No vector at all: matrices, and the scalars of footnote 3."""
    attention, feedforward = 4 * WIDTH**2, 2 * WIDTH * INNER
    matrices = LAYERS * (attention + feedforward) + LAYERS * (2 * attention + feedforward) + WORDS * WIDTH
    encoder, decoder, ends = 4 + 2, 5 + 3, 2 + 1  # biases and multipliers of a layer; those after the stacks
    assert sum(p.numel() for p in base.parameters()) == matrices + LAYERS * (encoder + decoder) + ends
    assert {p.dim() for p in base.parameters() if p.numel() > 1} == {2}


# The same function.


def scattered(method: str, **options: object) -> nn.Module:
    """A small model in float64 in which every parameter was moved."""
    model = build(SMALL, method, num_classes=30, dropout=0.0, dtype=torch.float64, generator=seeded(1), **options)
    draws = seeded(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=draws, dtype=torch.float64)
    return model


def sentences() -> tuple[Tensor, Tensor]:
    return torch.randint(4, 30, (3, 7), generator=seeded(3)), torch.randint(4, 30, (3, 5), generator=seeded(4))


def reference_logits(state: dict[str, Tensor], source: Tensor, target: Tensor, heads: int = 2) -> Tensor:
    """The authors' network, written out: x + b at every entry, before and after the ReLU, and after each stack."""

    def embed(tokens: Tensor) -> Tensor:
        table = state["embedding.weight"]
        vectors = table[tokens] * math.sqrt(table.shape[1])
        return vectors + sinusoids(0, tokens.shape[1], table.shape[1], vectors)

    def attend(name: str, x: Tensor, memory: Tensor, causal: bool) -> Tensor:
        def projected(letter: str, read: Tensor) -> Tensor:
            y = read @ state[f"{name}.branch.{letter}.weight"].T
            return y.view(*y.shape[:2], heads, -1).transpose(1, 2)

        q, k, v = projected("q", x), projected("k", memory), projected("v", memory)
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        if causal:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(hidden, -math.inf)
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        return mixed @ state[f"{name}.branch.out.weight"].T

    def entered(name: str, x: Tensor) -> Tensor:
        return x + state[f"{name}.entry.bias.value"]

    def added(name: str, x: Tensor, branch: Tensor) -> Tensor:
        return x + state[f"{name}.beta.value"] * branch

    def feed_forward(name: str, x: Tensor) -> Tensor:
        inside = entered(name, x) @ state[f"{name}.branch.linear1.weight"].T + state[f"{name}.branch.bias1.value"]
        inside = inside.clamp_min(0) + state[f"{name}.branch.bias2.value"]
        return added(name, x, inside @ state[f"{name}.branch.linear2.weight"].T)

    x = embed(source)
    for i in range(2):
        name = f"encoder.{i}.attention"
        read = entered(name, x)
        x = feed_forward(f"encoder.{i}.feedforward", added(name, x, attend(name, read, read, False)))
    memory = (x + state["encoder_head.bias.value"]) * state["encoder_head.scale.value"]
    x = embed(target)
    for i in range(2):
        name = f"decoder.{i}.attention"
        read = entered(name, x)
        x = added(name, x, attend(name, read, read, True))
        name = f"decoder.{i}.cross"
        x = added(name, x, attend(name, entered(name, x), memory, False))
        x = feed_forward(f"decoder.{i}.feedforward", x)
    return (x + state["head.bias.value"]) @ state["embedding.weight"].T


@torch.no_grad()
def test_outputs_are_those_of_the_network_written_out() -> None:
    model = scattered("fixup")
    state = dict(model.named_parameters())
    expected = reference_logits(state, *sentences())
    torch.testing.assert_close(model(*sentences()), expected, rtol=1e-12, atol=1e-12)
    for name in ("encoder_head.scale.value", "encoder.1.feedforward.branch.bias1.value", "decoder.0.cross.beta.value"):
        moved = {**state, name: state[name] + 1e-3}  # the control: one scalar, moved a little
        assert (reference_logits(moved, *sentences()) - expected).abs().max() > 1e-6, name


def test_layer_norm_of_the_baseline_stands_behind_the_sum() -> None:
    """One encoder layer by hand: LN(x + attention), then LN(· + feed-forward); nothing after the last."""
    model = scattered("layernorm:xavier=true", form="post")
    layer = model.encoder[0]
    x = torch.randn(2, 5, 16, generator=seeded(5), dtype=torch.float64)

    def norm(part: nn.Module, y: Tensor) -> Tensor:
        centred = y - y.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * part.weight + part.bias

    middle = norm(layer.attention.exit.norm, x + layer.attention.branch(x))
    inner = F.relu(layer.feedforward.branch.linear1(middle))
    expected = norm(layer.feedforward.exit.norm, middle + layer.feedforward.branch.linear2(inner))
    torch.testing.assert_close(layer(x, None), expected, rtol=1e-12, atol=1e-12)
    assert not list(model.encoder_head)
    assert not list(model.head)


def test_weights_of_the_baseline_are_xaviers() -> None:
    model = build(BASE, "layernorm:xavier=true", form="post", num_classes=WORDS, generator=seeded(0))
    attention, feedforward = model.encoder[0].attention.branch, model.decoder[0].feedforward.branch
    for layer in (attention.q, attention.k, attention.v):
        assert layer.weight.std().item() == pytest.approx((2 * WIDTH) ** -0.5, rel=0.01)
    assert attention.out.weight.std().item() == pytest.approx(WIDTH**-0.5, rel=0.01)
    for layer in (feedforward.linear1, feedforward.linear2):
        assert layer.weight.std().item() == pytest.approx((2 / (WIDTH + INNER)) ** 0.5, rel=0.01)


# One step.


def step_by_hand(p: Tensor, gradient: Tensor, rate: float, decay: float) -> Tensor:
    """The first step of Adam with L2 in the gradient: m/(1 - β₁) and v/(1 - β₂) are g and g²."""
    g = gradient + decay * p
    return p - rate * g / (g.abs() + 1e-8)


@pytest.mark.parametrize(("method", "same"), [("fixup", True), ("fixup:scalar_lr=0.1", False)])
def test_one_step_of_adam_has_one_rate_for_all(method: str, same: bool) -> None:
    rate, decay = 5e-4, 1e-4
    model = scattered(method)
    source, target = sentences()
    F.cross_entropy(model(source, target).flatten(0, 1), target.flatten()).backward()
    expected = {n: step_by_hand(p.detach(), p.grad, rate, decay) for n, p in model.named_parameters()}
    groups = param_groups(model, lr=rate, weight_decay=decay)
    assert sum(len(group["params"]) for group in groups) == len(expected)
    torch.optim.Adam(groups, betas=(0.9, 0.98)).step()
    off = {n for n, p in model.named_parameters() if not torch.allclose(p, expected[n], rtol=1e-12, atol=1e-12)}
    assert off == (set() if same else {n for n, p in model.named_parameters() if p.numel() == 1})


def test_scalars_of_an_image_network_keep_their_tenth() -> None:
    rates = {g["name"]: g["lr"] for g in param_groups(build("resnet8", "fixup", device="meta"), lr=1.0)}
    assert rates == {"weights": 1.0, "scalars": 0.1}


# The settings of the recipes.


def test_dropout_inside_feed_forward_branches_is_its_own() -> None:
    def probabilities(**options: float) -> list[float]:
        model = build(SMALL, "fixup", num_classes=30, device="meta", **options)
        return [m.p for m in model.encoder[0].feedforward.modules() if isinstance(m, nn.Dropout)]

    assert probabilities(dropout=0.3) == [0.3, 0.3]
    assert probabilities(dropout=0.3, inner_dropout=0.0) == [0.3]
    assert probabilities(dropout=0.0, inner_dropout=0.2) == [0.2]
    for name, wrong in ((SMALL, 1.0), ("resnet8", 0.1)):
        with pytest.raises(ValueError, match="expected inner_dropout in \\[0, 1\\) of a sequence model"):
            build(name, "fixup", inner_dropout=wrong)
