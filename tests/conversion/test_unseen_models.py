"""Conversion of models with unusual forward passes is right, or it is refused with a reason."""

import math

import pytest
import torch
from torch import nn

import normfree as nf
from normfree.nn.normalizers import find_norms
from remedies import named_methods, refusal
from unusual_models import DEPTH, METHODS, UNUSUAL, Unusual
from unusual_models_second import UNUSUAL_SECOND

STEPS = 40


def unmoved(case: Unusual, model: nn.Module, example: object) -> tuple[float, set[str]]:
    """Train on the batch; return the first loss, and the parameters that are what they were."""
    left = {name: value.detach().clone() for name, value in model.named_parameters() if value.requires_grad}
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    first = math.nan
    for step in range(STEPS):
        loss = case.loss(model, example)
        first = loss.item() if step == 0 else first
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        left = {name: value for name, value in left.items() if torch.equal(value, parameters[name])}
        if not left:
            break
    return first, set(left)


def attempt(model: nn.Module, method: str, example: object) -> tuple[nn.Module, nf.ResidualPlan] | str:
    """Convert a copy of the model, or return the reason why not."""
    try:
        return nf.convert(model, method, example)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", UNUSUAL, ids=lambda case: case.name)
def test_conversion_is_right_or_refused_with_a_reason(case: Unusual, method: str) -> None:
    torch.manual_seed(0)
    model, example = case.make(), case.example()
    result = attempt(model, method, example)
    if isinstance(result, str):
        assert method in case.may_refuse, result
        places = [type(model).__name__, "(model)", *(name for name, _ in model.named_modules() if name)]
        places += [name for name, _ in model.named_parameters()]
        assert any(f"'{place}'" in result for place in places) or "no residual sum was found" in result, result
        return
    converted, plan = result
    assert not find_norms(converted)
    first, stuck = unmoved(case, converted, example)
    assert first < 1.5 * case.chance or plan.changes.notes
    _, stuck_before = unmoved(case, model, example)
    assert not stuck - stuck_before, plan.changes.notes


MORE_METHODS = ("fixup", "skipinit", "rezero", "nf", "wn", "dyt")


@pytest.mark.parametrize("method", MORE_METHODS)
@pytest.mark.parametrize("case", UNUSUAL_SECOND, ids=lambda case: case.name)
def test_newer_architectures_are_converted_rightly_or_refused_with_the_methods_that_work(
    case: Unusual, method: str
) -> None:
    torch.manual_seed(0)
    model, example = case.make(), case.example()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    if method in case.may_refuse:
        named = named_methods(refusal(model, method, example))
        assert named == [name for name in MORE_METHODS if name not in case.may_refuse]
        return
    converted, plan = nf.convert(model, method, example, generator=torch.Generator().manual_seed(0))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert len(plan.branches) >= DEPTH
    assert not find_norms(converted)
    first, stuck = unmoved(case, converted, example)
    original, stuck_before = unmoved(case, model, example)
    assert first < 1.5 * max(case.chance, original)
    # Experts that get no samples stay; which ones get samples depends on the weights.
    assert not {name for name in stuck - stuck_before if ".experts." not in name}, plan.changes.notes
    assert {name for name, _ in converted.named_parameters() if ".experts." in name} - stuck or not any(
        ".experts." in name for name in before
    )
