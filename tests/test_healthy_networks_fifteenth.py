"""The healthy networks of the fifteenth set learn."""

import math
from typing import NamedTuple

import pytest
import torch

from fifth_parts import Healthy
from healthy_networks_fifteenth import HEALTHY, HEALTHY_FIFTEENTH, LIBRARY, OWN


class Training(NamedTuple):
    """Steps of Adam and its learning rate."""

    steps: int = 60
    lr: float = 1e-3


RUNS: dict[str, Training] = {
    "torchvision_inception_v3": Training(3),  # a step takes seconds
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
}


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


def test_set_is_complete() -> None:
    assert len(LIBRARY) == len(OWN) == 30
    assert len(set(HEALTHY_FIFTEENTH)) == 60
    assert set(RUNS) <= set(HEALTHY_FIFTEENTH)


@pytest.mark.slow
@pytest.mark.parametrize("case", HEALTHY, ids=lambda case: case.name)
def test_healthy_learns(case: Healthy) -> None:
    library = case.name in LIBRARY
    values = losses(case, RUNS.get(case.name, Training(8) if library else Training()))
    first, last = values[0], sum(values[-3:]) / 3
    print(f"{case.name}: loss {first:.3f} to {last:.3f}")
    assert all(math.isfinite(value) for value in values)
    assert first - last > (0.1 if library else 0.2) * abs(first)
