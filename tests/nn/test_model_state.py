"""Tensors are substituted, and the state of a model is restored, whatever names a module has."""

import pytest
import torch
from torch import nn

from normfree.nn.model_state import on_meta, preserve_model_state, restored_on_error, substitute_tensors


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


class Counting(nn.Module):
    """Counts its calls in an attribute and in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen = 0, [0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        return x


@pytest.mark.parametrize("attributes", [False, True])
def test_pass_leaves_no_trace(attributes: bool) -> None:
    counting, norm = Counting(), nn.BatchNorm1d(2)
    model = nn.Sequential(nn.Linear(2, 2), norm, counting, nn.Dropout()).train()
    x = torch.ones(3, 2).normal_()
    model(x).sum().backward()
    gradient, mean, buffer = model[0].weight.grad, norm.running_mean.clone(), norm.running_mean
    arrived: list[nn.Parameter] = []
    model[0].weight.register_post_accumulate_grad_hook(arrived.append)
    state = torch.get_rng_state()
    with preserve_model_state(model, attributes=attributes):
        model.train()(x).sum().backward()
        assert model[0].weight.grad is not gradient
        assert not torch.equal(norm.running_mean, mean)
        model.eval()
    assert model[0].weight.grad is gradient
    assert norm.running_mean is buffer
    assert torch.equal(buffer, mean)
    assert all(module.training for module in model.modules())
    assert torch.equal(torch.get_rng_state(), state)
    assert not arrived
    assert (counting.calls, counting.seen) == ((1, [0, 1]) if attributes else (2, [0, 1, 2]))


def test_model_is_as_before_in_between_and_changed_again_afterwards() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    weight = model[0].weight.detach().clone()
    with restored_on_error(model) as before:
        model[1] = nn.Identity()
        with torch.no_grad():
            model[0].weight.zero_()
        with before.restored():
            assert torch.equal(model[0].weight, weight)
            assert isinstance(model[1], nn.BatchNorm1d)
        assert not model[0].weight.any()
        assert isinstance(model[1], nn.Identity)
    assert not model[0].weight.any()
