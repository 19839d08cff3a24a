"""Update rules against the optimizers of torch, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normfree.optim.master_weights import UpdateRule

SIZES, RATES, DECAYS = (5, 3, 8), (0.1, 0.01, 0.3), (0.02, 0.0, 0.1)
STEPS = 20
RULES: dict[str, tuple[UpdateRule, type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (UpdateRule(momentum=0.0), torch.optim.SGD, {}),
    "momentum": (UpdateRule(momentum=0.8), torch.optim.SGD, {"momentum": 0.8}),
    "nesterov": (UpdateRule(nesterov=True), torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "adam": (UpdateRule(name="adam"), torch.optim.Adam, {}),
    "adam with numbers": (
        UpdateRule(name="adam", betas=(0.7, 0.95), eps=1e-3),
        torch.optim.Adam,
        {"betas": (0.7, 0.95), "eps": 1e-3},
    ),
    "adamw": (UpdateRule(name="adamw"), torch.optim.AdamW, {}),
    "adamw with numbers": (
        UpdateRule(name="adamw", betas=(0.5, 0.9), eps=1e-4),
        torch.optim.AdamW,
        {"betas": (0.5, 0.9), "eps": 1e-4},
    ),
}
every_rule = pytest.mark.parametrize("name", RULES)


def draw(size: int, seed: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def factor(step: int) -> float:
    """A rate that warms up, then falls in steps."""
    return min(1.0, (step + 1) / 5) * 0.3 ** (step // 8)


def tensor(value: float | bool) -> Tensor:
    return torch.tensor(value, dtype=torch.bool if isinstance(value, bool) else torch.float64)


def run(rule: UpdateRule, *, decays: tuple[float, ...] = DECAYS, late: int = 0) -> list[Tensor]:
    """The groups after `STEPS` steps by the rule; `late` shifts the count."""
    values = [draw(size, i) for i, size in enumerate(SIZES)]
    state = [[torch.zeros_like(v) for _ in range(rule.num_states)] for v in values]
    for step in range(STEPS):
        for i, value in enumerate(values):
            rule.update_(
                value,
                draw(len(value), 100 * step + i + 10),
                state[i],
                lr=tensor(RATES[i] * factor(step)),
                weight_decay=decays[i],
                step=tensor(float(step + 1 + late)),
                alive=tensor(True),
            )
    return values


def oracle(kind: type[torch.optim.Optimizer], options: dict[str, Any], decays: tuple[float, ...]) -> list[Tensor]:
    """The same by torch, its groups with the same rates and decays."""
    parameters = [nn.Parameter(draw(size, i)) for i, size in enumerate(SIZES)]
    groups = zip(parameters, RATES, decays, strict=True)
    optimizer = kind([{"params": [p], "lr": lr, "weight_decay": decay} for p, lr, decay in groups], **options)
    for step in range(STEPS):
        for i, (group, lr) in enumerate(zip(optimizer.param_groups, RATES, strict=True)):
            group["lr"] = lr * factor(step)
            parameters[i].grad = draw(len(parameters[i]), 100 * step + i + 10)
        optimizer.step()
    return [p.detach() for p in parameters]


def distance(ours: list[Tensor], theirs: list[Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True))


@every_rule
@pytest.mark.parametrize("decays", [DECAYS, (0.0, 0.0, 0.0)])
def test_rule_equals_the_optimizer_of_torch(name: str, decays: tuple[float, ...]) -> None:
    rule, kind, options = RULES[name]
    assert distance(run(rule, decays=decays), oracle(kind, options, decays)) < 1e-12


def test_rules_differ() -> None:
    """The distance that the test above bounds is large between any two rules, and when Adam counts from 0 or 2."""
    ends = {name: run(rule) for name, (rule, _, _) in RULES.items()}
    for one in ends:
        for other in ends:
            assert one == other or distance(ends[one], ends[other]) > 1e-4
    assert distance(run(RULES["adam"][0], late=1), ends["adam"]) > 1e-4


@every_rule
def test_memories_are_as_many_as_the_optimizer_keeps(name: str) -> None:
    assert RULES[name][0].num_states == {"sgd": 0, "momentum": 1, "nesterov": 1}.get(name, 2)


@every_rule
@pytest.mark.parametrize("gradient", [1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_update_of_a_run_that_is_not_alive_changes_no_bit(name: str, gradient: float, dtype: torch.dtype) -> None:
    rule = RULES[name][0]
    values = torch.tensor([1.5, -0.0, float("inf"), float("nan"), 1e-42], dtype=dtype)  # whatever was there
    state = [torch.full_like(values, 0.1 + i) for i in range(rule.num_states)]
    before = [t.clone() for t in (values, *state)]

    def update(alive: bool) -> None:
        count = tensor(0.0)  # as in a run that dies at its first step
        everywhere = torch.full_like(values, gradient)
        rule.update_(values, everywhere, state, lr=tensor(0.1), weight_decay=0.1, step=count, alive=tensor(alive))

    update(False)
    bits = torch.int32 if dtype == torch.float32 else torch.int64
    for now, then in zip((values, *state), before, strict=True):
        assert torch.equal(now.view(bits), then.view(bits))
    update(True)
    assert not torch.equal(values.view(bits), before[0].view(bits))


@every_rule
def test_update_leaves_the_gradient_and_its_numbers_alone(name: str) -> None:
    rule = RULES[name][0]
    values, gradient, lr, count = draw(4, 0), draw(4, 1), tensor(0.1), tensor(1.0)
    state = [torch.zeros_like(values) for _ in range(rule.num_states)]
    rule.update_(values, gradient, state, lr=lr, weight_decay=0.1, step=count, alive=tensor(True))
    assert torch.equal(gradient, draw(4, 1))
    assert (lr.item(), count.item()) == (0.1, 1.0)


def test_update_keeps_float32_beside_float64_numbers() -> None:
    """The count is float64, because float32 stops counting at 2**24; it must not widen the vector."""
    values, gradient = draw(4, 0).float(), draw(4, 1).float()
    state = [torch.zeros_like(values) for _ in range(2)]
    rule = UpdateRule(name="adam")
    for count in (1.0, 2.0**24 + 1):
        rule.update_(
            values, gradient, state, lr=torch.tensor(0.1), weight_decay=0.1, step=tensor(count), alive=tensor(True)
        )
    assert {t.dtype for t in (values, *state)} == {torch.float32}
    assert values.isfinite().all()
