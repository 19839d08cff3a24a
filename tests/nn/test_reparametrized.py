"""Layers become weight-normalized or standardized ones, for any storage and type, and survive pickle."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from normfree.nn.reparametrized import cannot_reparametrize, reparametrize_
from normfree.nn.scalar_wrapping import add_scalar_
from normfree.nn.weight_layers import WeightKind

every_kind = pytest.mark.parametrize("kind", ["weight_norm", "standardized"])


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Stored(nn.Module):
    """A linear layer whose weight lies as (in, out), as in GPT-2."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs, generator=seeded()))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class Narrow(nn.Linear):
    """Somebody's own class with the forward pass of a linear layer."""


@every_kind
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_order_of_storage_changes_no_number(kind: WeightKind, dtype: torch.dtype) -> None:
    stored, plain = Stored(9, 4), nn.Linear(9, 4)
    plain.weight.data = stored.weight.detach().mT.clone()
    reparametrize_(stored, kind, transposed=True)
    reparametrize_(plain, kind)
    for layer in (stored, plain):
        layer.to(dtype)
    torch.testing.assert_close(stored.effective_weight().mT, plain.effective_weight(), rtol=0, atol=0)


@every_kind
@pytest.mark.parametrize("transposed", [False, True])
def test_constant_row_is_no_division_by_zero_in_half_precision(kind: WeightKind, transposed: bool) -> None:
    layer: nn.Module = Stored(4, 3) if transposed else nn.Linear(4, 3)
    with torch.no_grad():
        (layer.weight.mT if transposed else layer.weight)[0].zero_()
    reparametrize_(layer, kind, transposed=transposed)
    layer.half()
    assert layer.effective_weight().isfinite().all()


@pytest.mark.parametrize("transposed", [False, True])
def test_single_weight_cannot_be_standardized(transposed: bool) -> None:
    layer: nn.Module = Stored(1, 3) if transposed else nn.Linear(1, 3)
    assert "no variance" in str(cannot_reparametrize(layer, "standardized", transposed=transposed))
    assert cannot_reparametrize(layer, "weight_norm", transposed=transposed) is None


@every_kind
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.Conv1d(3, 4, 3), (2, 3, 7)),
        (lambda: nn.Conv2d(3, 4, 3), (2, 3, 7, 7)),
        (lambda: nn.Conv3d(3, 4, 3), (2, 3, 7, 7, 7)),
        (lambda: Narrow(3, 4), (2, 3)),
        (lambda: Stored(3, 4), (2, 3)),
    ],
    ids=["Conv1d", "Conv2d", "Conv3d", "Narrow", "Stored"],
)
def test_layer_is_copied_and_pickled(make, shape: tuple[int, ...], kind: WeightKind, scaled: bool) -> None:
    layer = make()
    reparametrize_(layer, kind, transposed=isinstance(layer, Stored))
    if scaled:
        add_scalar_(layer, "beta", 0.5, learnable=True)
    x = torch.randn(shape, generator=seeded(1))
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(other) is type(layer)
        assert torch.equal(other(x), layer(x))
