"""Other tensors in a model's place, and everything back afterwards, whatever names a module has."""

import pytest
import torch
from torch import nn

from normfree.nn.model_state import on_meta, substitute_tensors


def shared() -> nn.Sequential:
    """A layer under three names and a weight under two more."""
    layer, other = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    other.weight = layer.weight
    return nn.Sequential(layer, layer, other, layer)


def test_all_names_of_a_tensor_are_replaced_and_put_back() -> None:
    model = shared()
    weight = model[0].weight
    with substitute_tensors(model, {id(weight): torch.eye(2)}):
        assert torch.equal(model(torch.ones(1, 2)), torch.ones(1, 2))
    assert all(layer.weight is weight for layer in model)
    assert isinstance(model[0].weight, nn.Parameter)


def fail_inside(model: nn.Module) -> None:
    with on_meta(model):
        assert all(t.is_meta for t in (*model.parameters(), *model.buffers()))
        raise RuntimeError("inside")


def test_tensors_come_back_after_an_error() -> None:
    model = nn.Sequential(shared(), nn.BatchNorm1d(2))
    before = [*model.parameters(), *model.buffers()]
    with pytest.raises(RuntimeError, match="inside"):
        fail_inside(model)
    assert all(a is b for a, b in zip(before, [*model.parameters(), *model.buffers()], strict=True))
