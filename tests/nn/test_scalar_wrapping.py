"""Scalars around the forward pass of a module keep the type of its output."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from normfree.nn.scalar_wrapping import add_scalar_


class Found(NamedTuple):
    y: Tensor
    rest: int


class Named(nn.Linear):
    def forward(self, input: Tensor) -> Found:
        return Found(super().forward(input), 3)


class Pair(nn.Linear):
    def forward(self, input: Tensor) -> tuple[Tensor, int]:
        return super().forward(input), 3


@pytest.mark.parametrize(("kind", "out"), [(Named, Found), (Pair, tuple)])
def test_tuple_keeps_its_type(kind: type[nn.Linear], out: type) -> None:
    layer, x = kind(2, 2), torch.ones(1, 2)
    plain = layer(x)
    add_scalar_(layer, "beta", 0.5, learnable=True)
    assert type(layer(x)) is out
    torch.testing.assert_close(layer(x)[0], 0.5 * plain[0])
    assert layer(x)[1] == 3
