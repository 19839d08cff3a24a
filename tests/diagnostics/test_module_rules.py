"""Decisions of the user are no faults; beside each stands the fault that looks like it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourth_healthy_parts import Averaged, Equilibrium, Flow, Gated, RungeKutta
from normfree.diagnostics import Diagnosis, diagnose
from normfree.diagnostics.rules.depth_series import _streams


def causes(made: Diagnosis) -> list[str]:
    return [finding.cause for finding in made.verdict.findings]


def chain(count: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [module for _ in range(count) for module in (nn.Linear(16, 16), nn.ReLU())]
    for layer in layers[::2]:
        nn.init.kaiming_normal_(layer.get_parameter("weight"))
    return nn.Sequential(*layers, nn.Linear(16, 4))


@pytest.fixture
def x() -> Tensor:
    return torch.randn(16, 16, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("frozen", "found"), [((0, 2), []), ((10, 12), []), ((4,), ["frozen weights"])])
def test_only_a_frozen_layer_between_layers_that_learn_is_a_fault(
    frozen: tuple[int, ...], found: list[str], x: Tensor
) -> None:
    model = chain()
    for i in frozen:
        model[i].requires_grad_(False)
    made = diagnose(model, x)
    assert causes(made) == found
    assert f"frozen: {frozen[0]}" in str(made)


def test_a_frozen_teacher_without_gradients_is_no_fault() -> None:
    torch.manual_seed(0)
    made = diagnose(Averaged(), torch.randn(32, 2, 16), torch.ones(32), loss=lambda out, t: (t - out).mean())
    assert causes(made) == []
    assert "frozen: teacher.0" in str(made)


def test_zero_weights_that_get_a_gradient_are_no_fault(x: Tensor) -> None:
    torch.manual_seed(0)
    assert causes(diagnose(Flow(), torch.randn(32, 8), torch.zeros(32), loss=lambda out, _: -out.mean())) == []
    model = chain()
    nn.init.zeros_(model[4].get_parameter("weight"))
    assert causes(diagnose(model, x))[:1] == ["zero weights"]


def test_the_last_module_of_a_list_may_run_in_vain() -> None:
    torch.manual_seed(0)
    model = Gated()
    made = diagnose(model, torch.randn(16, 2, 24), torch.arange(16) % 3)
    assert causes(made) == []
    assert "without a part in the output: outs.3" in str(made)


class Skipped(nn.Module):
    """A loop that leaves out one of its layers."""

    def __init__(self, left_out: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(5))
        self.left_out = left_out

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = x if i == self.left_out else x + 0.5 * torch.tanh(layer(x))
        return x


@pytest.mark.parametrize("left_out", [2, 4])
def test_a_module_that_never_runs_is_a_fault(left_out: int, x: Tensor) -> None:
    torch.manual_seed(0)
    assert "unused module" in causes(diagnose(Skipped(left_out), x))
    assert causes(diagnose(Skipped(-1), x)) == []


def test_the_loss_of_a_user_is_not_compared_with_log_c(x: Tensor) -> None:
    model = chain()
    nn.init.normal_(model[-1].get_parameter("weight"), std=30.0)
    targets = torch.arange(16) % 4
    own = diagnose(model, x, torch.zeros(16, 4), loss=lambda out, t: (out - t).square().sum(1).mean())
    assert own.signal.loss > 100
    assert causes(own) == []
    assert causes(diagnose(model, x, targets, loss=F.cross_entropy)) != []


def test_a_fixed_point_without_gradients_is_measured_where_it_can_be() -> None:
    torch.manual_seed(0)
    made = diagnose(Equilibrium(), torch.randn(16, 24), torch.arange(16) % 3)
    assert causes(made) == []
    assert len(made.signal.sums) == len(made.signal.plan.branches) == 1


def test_the_steps_of_one_layer_are_judged_by_their_total() -> None:
    torch.manual_seed(0)
    model = RungeKutta()
    inputs, targets = torch.randn(16, 24), torch.arange(16) % 3
    assert causes(diagnose(model, inputs, targets)) == []
    with torch.no_grad():
        for weight in model.slope.parameters():
            weight *= 30
    assert causes(diagnose(model, inputs, targets)) != []


def test_a_model_of_embeddings_alone_is_measured() -> None:
    torch.manual_seed(0)

    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen, self.item = nn.EmbeddingBag(50, 16), nn.Embedding(50, 16)

        def forward(self, ids: Tensor) -> Tensor:
            return (self.seen(ids[:, 1:]) * self.item(ids[:, 0])).sum(-1)

    made = diagnose(Bag(), torch.randint(50, (32, 6)), torch.zeros(32), loss=F.binary_cross_entropy_with_logits)
    assert [s.name for s in made.signal.sums] == ["seen", "item"]
    assert causes(made) == []


class Towers(nn.Module):
    """Two towers of different width, whose blocks take turns; the signal of the second one is small throughout."""

    def __init__(self, decay: float = 1.0) -> None:
        super().__init__()
        pairs = [nn.ModuleList([nn.Linear(32, 32), nn.Linear(16, 16, bias=False)]) for _ in range(6)]
        self.blocks, self.head, self.decay = nn.ModuleList(pairs), nn.Linear(48, 4), decay

    def forward(self, x: Tensor) -> Tensor:
        a, b = torch.cat([x, x.flip(0)], 1), 1e-3 * x
        for wide, narrow in self.blocks:
            a, b = self.decay * (a + 0.3 * torch.tanh(wide(a))), b + 0.3 * torch.tanh(narrow(b))
        return self.head(torch.cat([a, b], 1))


def test_towers_of_different_shape_are_judged_apart(x: Tensor) -> None:
    torch.manual_seed(0)
    made = diagnose(Towers(), x)
    assert causes(made) == []
    assert made.verdict.status in ("preserved", "growing")
    assert diagnose(Towers(0.1), x).verdict.forward.status == "vanishing"
    assert len(set(_streams(made.signal).values())) == 2
    one_shape = replace(made.signal, sums=tuple(replace(s, shape=(16, 32)) for s in made.signal.sums))
    assert len(set(_streams(one_shape).values())) == 1
