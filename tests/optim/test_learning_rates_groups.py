"""Parameter groups: every parameter once, by its kind, at the method's rates."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import normfree
from normfree.methods import get, names
from normfree.models import Network, build
from normfree.nn.scalars import ScalarBias, ScalarMultiplier
from normfree.optim import param_groups
from normfree.plan import ResidualPlan

LR = 0.1


def by_name(model: nn.Module, **options: Any) -> dict[str, dict[str, Any]]:
    return {group["name"]: group for group in param_groups(model, lr=LR, **options)}


def meta(model: str, method: str) -> Network:
    return build(model, method, device="meta")


def held(group: dict[str, Any]) -> set[int]:
    return {id(p) for p in group["params"]}


@pytest.mark.parametrize("method", names())
def test_every_parameter_is_in_exactly_one_group(method: str) -> None:
    model = meta("resnet8" if "residual" in get(method).skips else "transformer-1-1-8-16-2", method)
    grouped = [id(p) for group in param_groups(model, lr=LR, weight_decay=0.1) for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters())


@pytest.mark.parametrize(
    ("spec", "factor"), [("fixup", 0.1), ("fixup:scalar_lr=1/L", 1 / 3), ("fixup:scalar_lr=0.5", 0.5)]
)
def test_scalars_of_fixup_learn_at_their_own_rate(spec: str, factor: float) -> None:
    model = meta("resnet8", spec)
    groups = by_name(model)
    scalars = {id(m.value) for m in model.modules() if isinstance(m, ScalarBias | ScalarMultiplier)}
    assert held(groups["scalars"]) == {*scalars, id(model.classifier.bias)}
    assert groups["scalars"]["lr"] == pytest.approx(LR * factor)
    assert groups["weights"]["lr"] == LR
    assert len(model.plan.branches) == 3


def test_biases_of_fixup_learn_at_the_full_rate_on_demand() -> None:
    model = meta("resnet8", "fixup:slow_biases=false")
    groups = by_name(model)
    assert id(model.classifier.bias) in held(groups["weights"])
    assert all(p.numel() == 1 for p in groups["scalars"]["params"])


def test_rate_over_branches_falls_with_depth() -> None:
    rates = [by_name(meta(f"resnet{d}", "fixup:scalar_lr=1/L"))["scalars"]["lr"] for d in (8, 110)]
    assert rates == pytest.approx([LR / 3, LR / 54])


def test_scalars_of_other_methods_learn_at_full_rate() -> None:
    assert by_name(meta("resnet8", "skipinit"))["scalars"]["lr"] == LR


def test_gains_and_biases_of_nf_are_not_decayed() -> None:
    model = meta("wrn-10-1", "nf")
    groups = by_name(model, weight_decay=0.3)
    weights = {id(m.weight) for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)}
    assert held(groups["weights"]) == weights
    assert held(groups["gains and biases"]) == {id(p) for p in model.parameters()} - weights
    assert groups["weights"]["weight_decay"] == 0.3
    assert groups["gains and biases"]["weight_decay"] == 0.0


@pytest.mark.parametrize("method", ["fixup", "batchnorm", "wn"])
def test_everything_is_decayed_where_the_method_says_nothing(method: str) -> None:
    assert {group["weight_decay"] for group in by_name(meta("resnet8", method), weight_decay=0.3).values()} == {0.3}


class Misnamed(nn.Module):
    """A residual network whose weight layers are called like scalars."""

    def __init__(self) -> None:
        super().__init__()
        self.stem_bias = nn.Linear(4, 4, bias=False)
        self.scale = nn.Linear(4, 4, bias=False)
        self.bias_multiplier = nn.Linear(4, 4, bias=False)
        self.plain = ScalarBias()
        self.classifier = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem_bias(x)
        return self.classifier(x + self.bias_multiplier(torch.relu(self.scale(self.plain(x)))))


def test_weight_layers_named_like_scalars_are_weights() -> None:
    model = Misnamed()
    plan = normfree.discover(model, torch.zeros(2, 4))
    groups = by_name(model, method="fixup", plan=plan)
    assert held(groups["scalars"]) == {id(model.plain.value), id(model.classifier.bias)}
    # Control: sorting by a substring of the name takes three weight layers for scalars and misses the one that is.
    by_substring = {n for n, _ in model.named_parameters() if "bias" in n or "scale" in n}
    assert by_substring == {"stem_bias.weight", "scale.weight", "bias_multiplier.weight", "classifier.bias"}


def test_shared_parameters_are_listed_once() -> None:
    model = build("resmlp-2-8", "he_in")
    first, second = model.body[0][0].branch.linear1, model.body[0][1].branch.linear1
    second.weight = first.weight
    grouped = [id(p) for group in param_groups(model, lr=LR) for p in group["params"]]
    assert grouped.count(id(first.weight)) == 1
    assert len(grouped) == len(set(grouped)) == len(list(model.parameters()))


def test_groups_suit_an_optimizer_and_its_step() -> None:
    model = build("resnet8", "fixup", generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.SGD(param_groups(model, lr=LR, weight_decay=5e-4), momentum=0.9)
    model(torch.ones(2, 3, 16, 16)).square().add(model(torch.ones(2, 3, 16, 16))).sum().backward()
    before = model.classifier.bias.detach().clone()
    optimizer.step()
    assert not torch.equal(before, model.classifier.bias)


def test_model_without_method_is_refused() -> None:
    with pytest.raises(ValueError, match=r"built or converted with a method, got Linear; pass method="):
        param_groups(nn.Linear(2, 2), lr=LR)


def test_model_without_plan_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected a model with a plan, got Linear; pass plan=normfree.discover"):
        param_groups(nn.Linear(2, 2), lr=LR, method="fixup")


@pytest.mark.parametrize(("lr", "decay"), [(0.0, 0.0), (-1.0, 0.0), (float("nan"), 0.0), (0.1, -1.0)])
def test_bad_rates_are_refused(lr: float, decay: float) -> None:
    with pytest.raises(ValueError, match="expected a positive lr and a weight decay of at least 0"):
        param_groups(nn.Linear(2, 2), lr=lr, weight_decay=decay, method="he_in", plan=ResidualPlan())


def test_unknown_method_is_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown method 'fixupp'; did you mean 'fixup'"):
        param_groups(nn.Linear(2, 2), lr=LR, method="fixupp", plan=ResidualPlan())


def test_record_and_name_give_the_same_groups() -> None:
    model = meta("resnet8", "fixup")
    named, recorded = by_name(model, method="fixup"), by_name(model, method=get("fixup"))
    assert {n: held(g) for n, g in named.items()} == {n: held(g) for n, g in recorded.items()}
