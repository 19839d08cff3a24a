"""The gradient lower bounds of `fixup`, Theorems 1 and 2, on random networks in float64, and where they do not hold."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normfree.diagnostics.homogeneity_bounds import Bounds, check_homogeneous, gradient_bounds, homogeneous_sets
from normfree.models import build


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def batch(seed: int, samples: int = 4, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    x = torch.randn(samples, 3, 8, 8, generator=seeded(seed), dtype=torch.double)
    return scale * x, torch.randint(10, (samples,), generator=seeded(seed + 1))


def network(model: str = "wrn-10-1", method: str = "he_in", seed: int = 0) -> nn.Module:
    return build(model, method, generator=seeded(seed), dtype=torch.double)


def every(bounds: Bounds) -> list[tuple[str, float]]:
    return [(part.name, part.deviation) for part in (*bounds.blocks, *bounds.sets)]


NETWORKS = [
    ("wrn-10-1", "he_in"),
    ("wrn-10-1", "convshort"),
    ("wrn-10-1", "wn"),
    ("wrn-10-1", "nf"),
    ("resnet8", "fixup"),
    ("resnet8", "sqrt_half"),
    ("preact_resnet18", "idshort"),
]


@pytest.mark.parametrize(("model", "method"), NETWORKS)
def test_directional_derivatives_are_loss_minus_entropy(model: str, method: str) -> None:
    bounds = gradient_bounds(network(model, method), *batch(0))
    assert bounds.valid, bounds.reason
    assert all(deviation < 1e-10 for _, deviation in every(bounds)), every(bounds)


def test_directional_derivative_by_hand() -> None:
    """Equation 6 at the network's input and equation 8 for the stem, from the loss alone."""
    model, (x, y) = network(), batch(0)
    bounds = gradient_bounds(model, x, y)
    step = 1e-6

    def losses(scale: float) -> Tensor:
        return F.cross_entropy(model(scale * x), y, reduction="none")

    with torch.no_grad():
        z = model(x)
        entropy = torch.distributions.Categorical(logits=z).entropy()
        gap = F.cross_entropy(z, y, reduction="none") - entropy
        torch.testing.assert_close((losses(1 + step) - losses(1 - step)) / (2 * step), gap, rtol=1e-6, atol=1e-8)
    stem = bounds.blocks[0]
    assert stem.name == "stem.conv"
    assert stem.bound == pytest.approx(float((gap / x.flatten(1).norm(dim=1)).mean()))
    weight = model.stem.conv.weight
    (gradient,) = torch.autograd.grad(F.cross_entropy(model(x), y), weight)
    assert bounds.sets[0].measured == pytest.approx(float(gradient.norm()))
    assert bounds.sets[0].bound == pytest.approx(float(gap.mean() / weight.detach().norm()))
    assert bounds.sets[0].bound * float(weight.detach().norm()) == pytest.approx(
        float((gradient * weight.detach()).sum())
    )
    assert bounds.loss - bounds.entropy == pytest.approx(float(gap.mean()))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("model", "method"), [("wrn-10-1", "he_in"), ("wrn-10-1", "wn"), ("resmlp-6-12-3", "he_in")])
def test_theorems_hold(model: str, method: str, seed: int) -> None:
    net = build(model, method, size=8, generator=seeded(seed), dtype=torch.double)
    bounds = gradient_bounds(net, *batch(seed, samples=8, scale=10.0 ** (seed % 3)))
    assert bounds.valid, bounds.reason
    assert all(block.ratio >= 1 for block in bounds.blocks)
    assert all(s.measured >= s.bound for s in bounds.sets)
    # Theorem 1 block by block: stem, every residual block, classifier.
    assert len(bounds.blocks) == len(net.plan.branches) + 2


def test_bound_is_tight_where_the_network_is_a_scale() -> None:
    """f(x) = w·x·(1, 0): the gradient has only the direction of x, so the bound is met, and 1.5 times it is not."""

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.classifier = nn.Linear(1, 1, bias=False), nn.Linear(1, 2, bias=False)
            with torch.no_grad():
                self.stem.weight.fill_(2.0)
                self.classifier.weight.copy_(torch.tensor([[3.0], [0.0]]))

        def forward(self, x: Tensor) -> Tensor:
            return self.classifier(self.stem(x))

    model = Scale().double()
    bounds = gradient_bounds(model, torch.tensor([[1.0], [2.0]], dtype=torch.double), torch.tensor([1, 1]))
    assert bounds.valid
    for block in bounds.blocks:
        assert block.ratio == pytest.approx(1, rel=1e-12)
        assert not block.ratio >= 1.5
    assert bounds.sets[0].measured == pytest.approx(bounds.sets[0].bound, rel=1e-12)
    assert bounds.sets[0].measured < 1.5 * bounds.sets[0].bound


def test_each_sample_has_its_own_gradient() -> None:
    model, (x, y) = network(), batch(3)
    together = gradient_bounds(model, x, y)
    apart = [gradient_bounds(model, x[i : i + 1], y[i : i + 1]) for i in range(len(x))]
    for i, block in enumerate(together.blocks):
        assert block.measured == pytest.approx(sum(one.blocks[i].measured for one in apart) / len(x))
        assert block.ratio == pytest.approx(min(one.blocks[i].ratio for one in apart))


def test_expectation_bound_holds_over_many_classifiers() -> None:
    """Equation 4: E[G] ≥ (E[max z] - log c)/‖θ‖, over draws of the classifier."""
    model, (x, _) = network(), batch(0, samples=16, scale=30.0)
    found, expected = [], []
    for seed in range(100):
        with torch.no_grad():
            model.classifier.weight.copy_(torch.randn(10, 64, generator=seeded(seed)) / 8)
        bounds = gradient_bounds(model, x, torch.randint(10, (16,), generator=seeded(seed + 1000)))
        stem = bounds.sets[0]
        found.append(stem.bound)
        expected.append(stem.expected)
    gap = torch.tensor(found) - torch.tensor(expected)
    assert float(gap.mean()) > 0
    assert float(torch.tensor(expected).mean()) > 0  # or the bound would say nothing
    assert float(gap.min()) < 0  # it holds in expectation, not for every draw


def test_sets_are_the_papers_three_kinds() -> None:
    model = network()
    sets = homogeneous_sets(model, model.plan)
    assert [s.name for s in sets] == [
        "stem.conv",
        "body.1.0: shortcut.conv + branch.conv1",
        "body.1.0: shortcut.conv + branch.conv2",
        "body.2.0: shortcut.conv + branch.conv1",
        "body.2.0: shortcut.conv + branch.conv2",
        "classifier",
    ]
    assert sets[1].parameters == ("body.1.0.shortcut.conv.weight", "body.1.0.branch.conv1.weight")
    assert sets[-1].parameters == ("classifier.weight", "classifier.bias")
    resnet = network("resnet8", "fixup")
    assert [s.name for s in homogeneous_sets(resnet, resnet.plan)] == ["stem.conv", "classifier"]  # no projections
    weight_norm = network(method="wn")
    assert homogeneous_sets(weight_norm, weight_norm.plan)[0].parameters == ("stem.conv.gain", "stem.conv.bias")
    spectral = network(method="spectralnorm")
    assert [s.name for s in homogeneous_sets(spectral, spectral.plan)] == ["classifier"]


@pytest.mark.parametrize(("model", "method"), NETWORKS)
@pytest.mark.parametrize("alpha", [0.5, 3.0])
def test_sets_scale_the_output(model: str, method: str, alpha: float) -> None:
    net, (x, _) = network(model, method), batch(0)
    for s in homogeneous_sets(net, net.plan):
        assert check_homogeneous(net, x, s.parameters, alpha) < 1e-12


def test_other_sets_do_not_scale_the_output() -> None:
    net, (x, _) = network(), batch(0)
    shortcut, conv = "body.1.0.shortcut.conv.weight", "body.1.0.branch.conv1.weight"
    assert check_homogeneous(net, x, [shortcut, conv]) == 0.0
    assert check_homogeneous(net, x, [shortcut]) > 1e-2
    assert check_homogeneous(net, x, [conv]) > 1e-2
    assert check_homogeneous(net, x, ["stem.conv.weight", "classifier.weight"]) == pytest.approx(1)  # second degree
    assert check_homogeneous(net, x, []) > 0.1
    normed = network(method="batchnorm")
    assert check_homogeneous(normed, x, ["stem.conv.weight"]) > 0.1
    assert check_homogeneous(normed, x, ["classifier.weight"]) < 1e-12
    biased = network(method="wn")
    with torch.no_grad():
        biased.body[0][0].branch.conv1.bias.fill_(0.5)
    assert check_homogeneous(biased, x, ["stem.conv.gain"]) > 1e-3


@pytest.mark.parametrize("method", ["batchnorm", "layernorm", "groupnorm"])
def test_normalized_network_is_marked(method: str) -> None:
    bounds = gradient_bounds(network(method=method), *batch(0))
    assert not bounds.valid
    assert "Norm" in bounds.reason
    assert max(deviation for _, deviation in every(bounds)) > 1e-3  # and not only by its name


def test_bias_and_other_activations_are_marked() -> None:
    biased = network(method="fixup")
    bounds = gradient_bounds(biased, *batch(0))
    assert bounds.valid
    with torch.no_grad():
        biased.classifier.weight.normal_(generator=seeded(0))
        biased.body[1][0].entry.bias1.value.fill_(0.3)
    bounds = gradient_bounds(biased, *batch(0))
    assert not bounds.valid
    assert "'body.1.0.entry.bias1' has a bias that is not zero" in bounds.reason
    selu = gradient_bounds(network(method="selu"), *batch(0))
    assert not selu.valid
    assert "directional derivative" in selu.reason


def test_marked_network_can_break_the_bound() -> None:
    """Why the mark matters: with a bias the gradient can be arbitrarily far below the bound."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(1e-3)
        model[2].bias.copy_(torch.tensor([0.0, 20.0]))
    bounds = gradient_bounds(model, torch.ones(3, 2, dtype=torch.double), torch.zeros(3).long())
    assert not bounds.valid
    assert bounds.blocks[0].ratio < 1e-3


def test_zero_classifier_bounds_nothing() -> None:
    bounds = gradient_bounds(build("resnet8", "fixup", generator=seeded(0)), batch(0)[0].float(), batch(0)[1])
    assert bounds.valid
    assert all(block.bound == 0 and block.ratio == math.inf for block in bounds.blocks)
    assert all(s.bound == 0 for s in bounds.sets)
    assert bounds.loss == pytest.approx(math.log(10))


def test_blown_up_logits_mean_large_gradients() -> None:
    bounds = [gradient_bounds(network(f"resmlp-{n}-32", "he_in"), torch.randn(8, 3, 28, 28).double(), batch(0, 8)[1])
              for n in (2, 20)]  # fmt: skip
    assert bounds[1].largest > 10 * bounds[0].largest
    assert bounds[1].sets[0].bound > 10 * bounds[0].sets[0].bound
    assert bounds[1].sets[0].measured > bounds[1].sets[0].bound


def test_model_is_untouched() -> None:
    model, (x, y) = network(method="batchnorm"), batch(0)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    gradient_bounds(model, x, y)
    check_homogeneous(model, x, ["stem.conv.weight"])
    with pytest.raises(RuntimeError):
        gradient_bounds(model, x[:, :2], y)
    assert torch.equal(torch.get_rng_state(), state)
    assert not x.requires_grad
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters())
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_frozen_parameters_have_no_bound_and_blocks_still_do() -> None:
    model, (x, y) = network(), batch(0)
    whole = gradient_bounds(model, x, y)
    for p in model.stem.parameters():
        p.requires_grad_(False)
    bounds = gradient_bounds(model, x, y)
    assert [b.measured for b in bounds.blocks] == pytest.approx([b.measured for b in whole.blocks])
    assert [s.name for s in bounds.sets] == [s.name for s in whole.sets][1:]


def test_plain_data() -> None:
    bounds = gradient_bounds(network(), *batch(0))
    data = json.loads(json.dumps(bounds.to_json()))
    assert data["valid"] is True
    assert data["blocks"][1]["name"] == "body.0.0"
    soft = gradient_bounds(network(), batch(0)[0], F.one_hot(batch(0)[1], 10).double())
    assert soft.loss == pytest.approx(bounds.loss)
    assert soft.sets[0].bound == pytest.approx(bounds.sets[0].bound)


def test_what_cannot_be_bounded_is_refused() -> None:
    model, (x, y) = network(), batch(0)
    with pytest.raises(ValueError, match="names are those of"):
        check_homogeneous(model, x, ["stem.conv.wieght"])
    with pytest.raises(ValueError, match="positive alpha"):
        check_homogeneous(model, x, ["stem.conv.weight"], alpha=-1.0)
    with pytest.raises(ValueError, match="meta device"):
        gradient_bounds(build("resnet8", device="meta"), x, y)
    with pytest.raises(ValueError, match=r"expected logits"):
        gradient_bounds(nn.Sequential(nn.Conv2d(3, 2, 1)), x.float(), y)


def test_shared_block_is_scaled_in_all_its_places_and_left_as_it_was() -> None:
    layer = nn.Linear(2, 2, bias=False)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    with torch.no_grad():
        layer.weight.fill_(1.0)
    assert check_homogeneous(model, torch.ones(1, 2), ["0.weight"]) == 1.0  # second degree
    assert model[0].weight is model[2].weight is layer.weight
    assert torch.equal(layer.weight, torch.ones(2, 2))
