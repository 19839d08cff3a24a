"""One step of gradient descent: Θ(η) at any depth for Fixup and not without its scaling; shares by brute force."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normfree.diagnostics.updates import measure_updates
from normfree.methods import get
from normfree.models import build
from normfree.nn.residual import set_precision_
from normfree.plan import Branch, Layer, ResidualPlan, positions
from oracles import log_slope


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


X = torch.randn(8, 1, 4, 4, generator=seeded(0))
Y = torch.arange(8) % 5


def network(blocks: int, method: str = "fixup", layers: int = 2, seed: int = 0) -> nn.Module:
    """A residual MLP whose stem is the same at any depth, since it is drawn first."""
    name = f"resmlp-{blocks}-16-{layers}"
    return build(name, method, in_channels=1, size=4, num_classes=5, generator=seeded(seed))


def unscaled(blocks: int, layers: int = 2) -> nn.Module:
    """Fixup without L^(-1/(2m-2))."""
    return network(blocks, f"fixup:scale={blocks ** (1 / (2 * layers - 2))}", layers)


def stepped(model: nn.Module, names: set[str], rate: float) -> Tensor:
    """Δf of stepping the named parameters of a float64 model, by a plain optimizer step."""
    chosen = [p for name, p in model.named_parameters() if name in names]
    loss = F.cross_entropy(model(X.double()), Y)
    for p, g in zip(chosen, torch.autograd.grad(loss, chosen), strict=True):
        p.grad = g
    with torch.no_grad():
        before = model(X.double())
        kept = [p.clone() for p in chosen]
        torch.optim.SGD(chosen, lr=rate).step()
        change = model(X.double()) - before
        for p, old in zip(chosen, kept, strict=True):
            p.copy_(old)
    return change


def rms(change: Tensor) -> float:
    return float(change.square().sum(1).mean().sqrt())


def randomized(model: nn.Module) -> nn.Module:
    """In float64, with the classifier that a measurement puts in place of zeros."""
    weight = model.classifier.weight
    with torch.no_grad():
        weight.copy_(torch.randn(weight.shape, generator=seeded(0)) / weight.shape[1] ** 0.5)
    return model.double()


@pytest.mark.parametrize("method", ["fixup", "he_in", "sqrt_half", "wn", "batchnorm"])
@pytest.mark.parametrize("which", ["branch weights", "branches", "all"])
def test_change_is_linear_in_the_rate(method: str, which: str) -> None:
    updates = measure_updates(network(4, method), X, Y, which=which, share_limit=0)
    assert updates.slope == pytest.approx(1, abs=2e-2)
    assert updates.per_unit == updates.changes[0] / updates.rates[0]
    assert updates.rates == (1e-6, 1e-5, 1e-4)


def test_change_is_that_of_an_optimizer_step() -> None:
    model = network(3)
    updates = measure_updates(model, X, Y)
    names = {f"{layer.name}.weight" for b in model.plan.branches for layer in b.layers}
    for rate, change in zip(updates.rates, updates.changes, strict=True):
        assert change == pytest.approx(rms(stepped(randomized(model), names, rate)), rel=1e-8)


@pytest.mark.parametrize("layers", [2, 3])
def test_fixup_changes_by_the_rate_at_any_depth_and_only_with_its_scaling(layers: int) -> None:
    depths = [4, 12, 40, 120]
    scaled = [measure_updates(network(n, layers=layers), X, Y, share_limit=0).per_unit for n in depths]
    free = [measure_updates(unscaled(n, layers), X, Y, share_limit=0).per_unit for n in depths]
    assert max(scaled) < 2 * min(scaled)
    assert log_slope(depths, free) == pytest.approx(1, abs=0.15)  # the control: Θ(ηL)


def test_biases_change_by_the_rate_times_depth() -> None:
    depths = [10, 100]
    tenth, over_depth = (
        [measure_updates(network(n, method), X, Y, which="branches", share_limit=0) for n in depths]
        for method in ("fixup", "fixup:scalar_lr=1/L")
    )
    scalars = [sum(s.scalars for s in u.shares) * u.per_unit for u in tenth]
    assert scalars[1] > 5 * scalars[0]
    assert sum(s.scalars for s in tenth[1].shares) > 0.3
    assert sum(s.scalars for s in over_depth[1].shares) < 0.1
    assert [u.scalar_rate for u in over_depth] == [0.1, 0.01]


def test_zero_classifier_hides_every_difference() -> None:
    for model in (network(10), unscaled(10)):  # the caution: kept at 0, any scaling would pass
        kept = measure_updates(model, X, Y, classifier="keep")
        assert kept.changes == (0.0, 0.0, 0.0)
        assert math.isnan(kept.slope)
        assert kept.classifier == "kept"
        random = measure_updates(model, X, Y)
        assert random.classifier == "random"
        assert random.per_unit > 0
        assert not model.classifier.weight.any()
    assert measure_updates(network(4, "he_in"), X, Y).classifier == "kept"


def test_random_classifier_comes_from_the_generator() -> None:
    model = network(4)
    first, again, other = (measure_updates(model, X, Y, generator=seeded(s)).per_unit for s in (3, 3, 4))
    assert first == again != other


@pytest.mark.parametrize("which", ["branches", "all"])
@pytest.mark.parametrize("method", ["fixup", "he_in", "wn", "layernorm"])
def test_shares_add_up_to_the_whole(method: str, which: str) -> None:
    model = network(5, method)
    updates = measure_updates(model, X, Y, which=which)
    total = sum(s.weights + s.scalars for s in updates.shares)
    assert total + updates.outside == pytest.approx(1, abs=1e-4)
    assert (updates.outside == 0) is (which == "branches")


def test_shares_are_those_of_stepping_one_branch_only() -> None:
    model = network(4, "fixup:scalar_lr=1")
    updates = measure_updates(model, X, Y, which="branches")
    randomized(model)
    branches = model.plan.branches
    weights = [{f"{layer.name}.weight" for layer in b.layers} for b in branches]
    blocks = [{n for n, _ in model.named_parameters() if n.startswith(f"{b.name}.")} for b in branches]
    rate = updates.rates[0]
    whole = stepped(model, set.union(*blocks), rate)
    for share, own, block in zip(updates.shares, weights, blocks, strict=True):
        alone, scalars = stepped(model, own, rate), stepped(model, block - own, rate)
        assert share.weights == pytest.approx(float((alone * whole).sum() / whole.square().sum()), rel=1e-3)
        assert share.scalars == pytest.approx(float((scalars * whole).sum() / whole.square().sum()), rel=1e-3)
        assert share.alone == pytest.approx(rms(alone) / rate, rel=1e-6)


def test_branches_move_in_sync() -> None:
    updates = measure_updates(network(20), X, Y)
    assert updates.alignment > 0.7
    assert all(s.weights > 0 for s in updates.shares)
    # In sync, 20 branches together move the output far more than √20 of one would.
    typical = sorted(s.alone for s in updates.shares if s.alone > 0)[8]
    assert updates.per_unit > 0.7 * 20 * typical > 20**0.5 * typical


def test_sampled_branches_are_evenly_spaced() -> None:
    shares = measure_updates(network(9), X, Y, share_limit=3).shares
    assert [i for i, s in enumerate(shares) if not math.isnan(s.alone)] == [0, 4, 8]
    assert all(math.isfinite(s.weights) for s in shares)
    none = measure_updates(network(3), X, Y, share_limit=0)
    assert math.isnan(none.alignment)


def test_single_precision_agrees_at_larger_rates() -> None:
    model = network(6)
    single, double = (measure_updates(model, X, Y, precision=p) for p in ("same", "double"))
    assert single.rates[0] > double.rates[-1]
    assert single.per_unit == pytest.approx(double.per_unit, rel=1e-2)
    assert [s.weights for s in single.shares] == pytest.approx([s.weights for s in double.shares], rel=5e-2)
    drowned = measure_updates(model, X, Y, precision="same", rates=[1e-9, 1e-8])
    assert drowned.per_unit != pytest.approx(double.per_unit, rel=1e-2)  # why float64 is the default


def test_convolutional_and_mixed_precision_networks_are_measured() -> None:
    x, y = torch.randn(2, 3, 8, 8, generator=seeded(0)), torch.tensor([0, 1])
    model = build("resnet20", "fixup", generator=seeded(0))
    expected = measure_updates(model, x, y, share_limit=0)
    set_precision_(model)
    found = measure_updates(model, x, y, share_limit=0)
    assert found.per_unit == pytest.approx(expected.per_unit, rel=2e-2)  # the weights were rounded to bf16
    assert found.slope == pytest.approx(1, abs=1e-2)
    assert next(model.body.parameters()).dtype in (torch.bfloat16, torch.float32)


class Foreign(nn.Module):
    """Somebody else's block: single numbers as bare parameters, dropout and batch norm, called by name."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block, self.head = nn.Linear(16, 8), nn.Module(), nn.Linear(8, 5)
        self.block.first, self.block.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.block.shift, self.norm, self.drop = nn.Parameter(torch.zeros(1)), nn.BatchNorm1d(8), nn.Dropout(0.3)

    def forward(self, *, x: Tensor) -> dict[str, Tensor]:
        x = self.drop(self.norm(self.stem(x.flatten(1))))
        branch = self.block.second(torch.relu(self.block.first(x + self.block.shift)))
        return {"logits": self.head(x + branch)}


def test_foreign_model_is_untouched() -> None:
    torch.manual_seed(0)
    model = Foreign()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    plan = ResidualPlan(
        (Branch("block", positions([1], [False])[0], (Layer("block.first"), Layer("block.second"))),),
        stem=(Layer("stem"),),
        classifier=(Layer("head"),),
    )
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    updates = [measure_updates(model, {"x": X}, Y, which="all", plan=plan, scalar_rate=r) for r in (1.0, 0.5)]
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters())
    assert updates[0].slope == pytest.approx(1, abs=1e-2)  # every pass drops the same units
    assert all(u.outside + sum(s.weights + s.scalars for s in u.shares) == pytest.approx(1, abs=1e-4) for u in updates)
    discovered = measure_updates(model, {"x": X}, Y, which="all")
    assert discovered.per_unit == pytest.approx(updates[0].per_unit)
    assert discovered.scalar_rate == 1


def test_own_loss_and_plain_data() -> None:
    model = network(3, "he_in")
    updates = measure_updates(model, X, torch.randn(8, 5, generator=seeded(1)), loss=F.mse_loss)
    assert updates.slope == pytest.approx(1, abs=2e-2)
    data = json.loads(json.dumps(updates.to_json()))
    assert data["alignment"] == updates.alignment
    assert [s["name"] for s in data["shares"]] == [b.name for b in model.plan.branches]
    assert data["which"] == "branch weights"


def test_method_states_the_scalars_rate() -> None:
    model = network(10)
    assert measure_updates(model, X, Y).scalar_rate == get("fixup").scalar_rate.factor(10) == 0.1
    assert measure_updates(model, X, Y, scalar_rate=0.5).scalar_rate == 0.5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rates": [0.0]}, "positive rates"),
        ({"which": "some"}, "branch weights"),
        ({"classifier": "zero"}, "classifier"),
        ({"precision": "half"}, "precision"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        measure_updates(network(2), X, Y, **settings)


def test_network_without_sums_or_values_is_refused() -> None:
    with pytest.raises(ValueError, match="residual sums"):
        measure_updates(build("mlp-3-8", "he_in", in_channels=1, size=4), X, Y)
    with pytest.raises(ValueError, match="meta device"):
        measure_updates(build("resnet20", device="meta"), X, Y)


class SharedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(torch.relu(x))


def test_change_of_a_shared_block_is_linear_in_the_rate() -> None:
    """Each rate starts from the same point, also where a block has several names."""
    torch.manual_seed(0)
    block = SharedBlock()
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 16), block, block, block, nn.Linear(16, 5))
    assert measure_updates(model, X, Y).slope == pytest.approx(1.0, abs=1e-3)
