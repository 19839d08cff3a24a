"""The fourth tables: every healthy network learns, every broken one learns worse than its mended twin."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from broken_networks import BROKEN, Broken
from broken_networks_fourth import FOURTH
from broken_networks_second import SECOND
from broken_networks_third import THIRD
from fault_cases import Subject
from healthy_networks import HEALTHY
from healthy_networks_fourth import HEALTHY_FOURTH, INTENDED, build_healthy_fourth
from healthy_networks_second import HEALTHY_SECOND
from healthy_networks_third import HEALTHY_THIRD

STEPS = 60
# A batch can be learned by heart in spite of these faults: each step gets a new batch of the same task.
ON_NEW_BATCHES = ("viewed-instead-of-transposed", "logit-scale-without-its-logarithm")
# What the network is used for shows in evaluation mode.
EVALUATED = ("loss-of-the-auxiliary-head",)
# Losses in other units are compared by how far they fall.
IN_OTHER_UNITS = ("boxes-in-pixels", "loss-clamped-below-its-start")
RATE = 3e-3
RATES = {
    "activation-whose-result-is-dropped": 1e-2,
    "messages-summed-over-all-nodes": 1e-3,
    "expert-chosen-without-its-probability": 3e-2,
}


def first_and_last_loss(
    subject: Subject, rate: float = RATE, batch: Callable[[int], Subject] | None = None, evaluated: bool = False
) -> tuple[float, float]:
    """Train with Adam; the last loss is the mean over five steps, or one in evaluation mode."""

    def loss(of: Subject) -> Tensor:
        return (subject.loss or F.cross_entropy)(subject.model(of.example), of.targets)

    optimizer = torch.optim.Adam([p for p in subject.model.parameters() if p.requires_grad], lr=rate)
    found = []
    for i in range(STEPS):
        value = loss(batch(i) if batch else subject)
        found.append(value.item())
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    if evaluated:
        subject.model.eval()
        return found[0], loss(subject).item()
    return found[0], sum(found[-5:]) / 5


def trained(case: Broken, mended: bool) -> tuple[float, float]:
    """The first and the last loss of a case or of its twin."""

    def batch(i: int) -> Subject:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(100 + i)
            return case.make(not mended)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return first_and_last_loss(
            case.build(mended=mended),
            RATES.get(case.name, RATE),
            batch if case.name in ON_NEW_BATCHES else None,
            case.name in EVALUATED,
        )


def test_tables_have_thirty_rows_and_no_name_of_an_earlier_table() -> None:
    names = [case.name for case in (*BROKEN, *SECOND, *THIRD, *FOURTH)]
    assert len(FOURTH) == len(HEALTHY_FOURTH) == 30
    assert len(set(names)) == len(names)
    assert not set(HEALTHY_FOURTH) & {*HEALTHY, *HEALTHY_SECOND, *HEALTHY_THIRD}
    assert set(INTENDED) <= set(HEALTHY_FOURTH)


@pytest.mark.parametrize("case", FOURTH, ids=lambda case: case.name)
def test_fourth_case_is_reproducible_and_its_places_exist(case: Broken) -> None:
    first, second = case.build(), case.build()
    known = {name for name, _ in first.model.named_modules(remove_duplicate=False)}
    known |= {name for name, _ in first.model.named_parameters()}
    for place in set(case.places) - {"input", "output", "steps", "refine.steps"}:
        assert place in known, place
    for a, b in zip(first.model.state_dict().values(), second.model.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    torch.testing.assert_close(first.example, second.example, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("case", FOURTH, ids=lambda case: case.name)
def test_broken_network_learns_worse_than_its_mended_twin(case: Broken) -> None:
    (broken_first, broken), (first, mended) = trained(case, mended=False), trained(case, mended=True)
    assert mended < 0.7 * first
    if case.name in IN_OTHER_UNITS:
        broken, mended = broken / broken_first, mended / first
    assert math.isnan(broken) or broken > 1.5 * mended


@pytest.mark.slow
@pytest.mark.parametrize("name", HEALTHY_FOURTH)
def test_healthy_network_learns(name: str) -> None:
    subject = build_healthy_fourth(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        first, last = first_and_last_loss(subject)
    assert last < first - 0.5 * abs(first)
