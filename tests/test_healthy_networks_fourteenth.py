"""The healthy networks of the fourteenth set learn."""

import math
from typing import NamedTuple

import pytest
import torch

from fifth_parts import Healthy
from healthy_networks_fourteenth import HEALTHY, HEALTHY_FOURTEENTH, LIBRARY, OWN


class Training(NamedTuple):
    """Steps of Adam and its learning rate."""

    steps: int = 60
    lr: float = 1e-3


RUNS: dict[str, Training] = {
    "torchvision_r2plus1d": Training(4),  # a step takes seconds
    "transformers_albert": Training(15),
    "transformers_bart": Training(15),
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
    assert len(set(HEALTHY_FOURTEENTH)) == 60
    assert set(RUNS) <= set(HEALTHY_FOURTEENTH)


@pytest.mark.slow
@pytest.mark.parametrize("case", HEALTHY, ids=lambda case: case.name)
def test_healthy_learns(case: Healthy) -> None:
    library = case.name in LIBRARY
    values = losses(case, RUNS.get(case.name, Training(8) if library else Training()))
    first, last = values[0], sum(values[-3:]) / 3
    print(f"{case.name}: loss {first:.3f} to {last:.3f}")
    assert all(math.isfinite(value) for value in values)
    assert first - last > (0.1 if library else 0.2) * abs(first)
