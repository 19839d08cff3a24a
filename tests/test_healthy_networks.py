"""Networks of the sets that hold healthy ones only learn; other sets are tested beside their broken networks."""

import importlib
import math
from typing import NamedTuple

import pytest
import torch

from fifth_parts import Healthy


class Training(NamedTuple):
    """Steps of Adam and its learning rate."""

    steps: int = 60
    lr: float = 1e-3


LIBRARY_STEPS = {"thirteenth": 15, "fourteenth": 8, "fifteenth": 8}  # by set; a step takes up to seconds
RUNS: dict[str, dict[str, Training]] = {
    "thirteenth": {
        "neural_collaborative_filtering": Training(150),
        "graph_convolutions_of_citations": Training(150, 1e-2),
        "physics_informed_oscillator": Training(200, 3e-3),
        "neural_ode_of_spirals": Training(100, 1e-2),
        "normalizing_flow_of_moons": Training(100, 1e-3),
    },
    "fourteenth": {
        "torchvision_r2plus1d": Training(4),
        "transformers_albert": Training(15),
        "transformers_bart": Training(15),
    },
    "fifteenth": {
        "torchvision_inception_v3": Training(3),
        "torchvision_swin_v2": Training(5),
        "torchvision_wide_resnet": Training(3),
        "torchvision_convnext": Training(5),
        "torchvision_fcn_resnet18": Training(5),
        "timm_resmlp_12_224": Training(5),
        "timm_poolformer_s12": Training(4),
        "timm_eva02_tiny_patch14_224": Training(6),
        "timm_mixnet_s": Training(4),
        "timm_crossvit_tiny_240": Training(6),
        "timm_convit_tiny": Training(6),
        "timm_visformer_tiny": Training(5),
        "timm_tiny_vit_5m_224": Training(5),
        "timm_selecsls42": Training(3),
        "timm_swiftformer_xs": Training(5),
        "timm_skresnet18": Training(4),
        "timm_rexnet_100": Training(5),
        "edge_convolutions_of_clouds": Training(30),
        "transformers_roformer_answers": Training(20),
        "transformers_xlnet": Training(40),
        "transformers_gemma2": Training(15),
        "transformers_olmo2": Training(15),
        "transformers_marian": Training(40),
        "transformers_vit_mae": Training(60),
        "transformers_patchtsmixer": Training(60),
    },
}
SETS = {number: importlib.import_module(f"healthy_networks_{number}") for number in RUNS}
CASES = [(number, case) for number, cases in SETS.items() for case in cases.HEALTHY]


def losses(case: Healthy, training: Training) -> list[float]:
    """Return the losses of a network that is trained on its batch, whose gradients are finite."""
    model, inputs, targets, loss = case.make()
    optimizer = torch.optim.Adam(model.parameters(), lr=training.lr)
    values = []
    for _ in range(training.steps):
        value = loss(model(inputs), targets)
        optimizer.zero_grad()
        value.backward()
        assert all(weight.grad is None or weight.grad.isfinite().all() for weight in model.parameters())
        optimizer.step()
        values.append(float(value.detach()))
    return values


@pytest.mark.parametrize("number", SETS)
def test_set_is_complete(number: str) -> None:
    cases = SETS[number]
    names = {case.name for case in cases.HEALTHY}
    assert len(cases.LIBRARY) == len(cases.OWN) == 30
    assert len(names) == 60
    assert names == set(getattr(cases, f"HEALTHY_{number.upper()}"))
    assert set(RUNS[number]) <= names


@pytest.mark.slow
@pytest.mark.parametrize(("number", "case"), CASES, ids=lambda part: part if isinstance(part, str) else part.name)
def test_healthy_learns(number: str, case: Healthy) -> None:
    library = case.name in SETS[number].LIBRARY
    values = losses(case, RUNS[number].get(case.name, Training(LIBRARY_STEPS[number]) if library else Training()))
    first, last = values[0], sum(values[-3:]) / 3
    print(f"{case.name}: loss {first:.3f} to {last:.3f}")
    assert all(math.isfinite(value) for value in values)
    assert first - last > (0.1 if library else 0.2) * abs(first)
