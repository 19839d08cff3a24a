"""Scalars of the residual equation as modules: a bias and a multiplier, fixed or learnable.

The scalar is a tensor without dimensions. It never promotes the type of a bf16 activation, and blocks that differ only
in a scalar's value share one compiled program.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class _Scalar(nn.Module):
    """One number: a parameter if `learnable`, else a buffer; the state dict contains it in both cases."""

    value: Tensor

    def __init__(self, value: float, *, learnable: bool) -> None:
        super().__init__()
        self.learnable = learnable
        number = torch.tensor(float(value))
        if learnable:
            self.value = nn.Parameter(number)
        else:
            self.register_buffer("value", number)

    @torch.no_grad()
    def set_(self, value: float) -> None:
        """Set the number."""
        self.value.fill_(value)

    def extra_repr(self) -> str:
        """Return the number ('meta' on the meta device) and whether it is learnable."""
        number = "meta" if self.value.is_meta else f"{self.value.item():.6g}"
        return f"{number}, learnable={self.learnable}"


class ScalarBias(_Scalar):
    """x + b with one number b for the whole tensor.

    Reference: fixup, section 3, rule 3.

    >>> ScalarBias(0.5)(torch.zeros(2))
    tensor([0.5000, 0.5000], grad_fn=<AddBackward0>)

    Scalar folding (`normfree.nn.scalar_folding`) sets `absorbed` and `moved`. An absorbed bias adds nothing, because
    the layers that read it contain it. `moved` is the sum of the δ moved into this bias; it is added too.
    """

    absorbed: bool = False
    moved: Tensor | None = None

    def __init__(self, value: float = 0.0, *, learnable: bool = True) -> None:
        super().__init__(value, learnable=learnable)

    def forward(self, x: Tensor) -> Tensor:
        """Add the number."""
        if self.absorbed:
            return x
        return x + (self.value if self.moved is None else self.value + self.moved)


class ScalarMultiplier(_Scalar):
    """s · x with one number s for the whole tensor.

    Reference: fixup, section 3, rule 3; robust, section 3.3; normdead, equation 5.

    >>> ScalarMultiplier(0.5, learnable=False)(torch.ones(2))
    tensor([0.5000, 0.5000])
    """

    def __init__(self, value: float = 1.0, *, learnable: bool = True) -> None:
        super().__init__(value, learnable=learnable)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply by the number."""
        return x * self.value
