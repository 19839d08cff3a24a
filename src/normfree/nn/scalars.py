"""Scalars of the residual equation as modules: a bias and a multiplier, fixed or learnable.

The parameter has one dimension and one element, because FSDP2 shards no parameter without dimensions. The forward pass
reads it as a tensor without dimensions, which never promotes the type of a bf16 activation. Blocks that differ only in
a scalar's value share one compiled program.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


def scalar_tensor(value: float, device: torch.device | None = None) -> Tensor:
    """Return a number as a tensor with one dimension, the shape of every scalar parameter."""
    return torch.tensor([float(value)], device=device)


def number_of(scalar: Tensor) -> Tensor:
    """View a scalar parameter as a tensor without dimensions, for use in a forward pass."""
    return scalar.reshape(())


def with_dimension(tensors: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Give stored scalars the dimension of the model's: until release 0.1 they had none.

    Args:
        tensors: The stored tensors, by name.
        own: The model's tensors, by name.
    """
    return {
        name: tensor.reshape(1) if tensor.dim() == 0 and name in own and own[name].shape == (1,) else tensor
        for name, tensor in tensors.items()
    }


class OneElementScalars(nn.Module):
    """Mixin: `load_state_dict` accepts scalars without a dimension, as release 0.1 stored them."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        held: dict[str, Tensor | None] = {**self._parameters, **self._buffers}
        own = {f"{prefix}{name}": value for name, value in held.items() if value is not None}
        state_dict.update(with_dimension({name: state_dict[name] for name in own if name in state_dict}, own))
        super()._load_from_state_dict(state_dict, prefix, *rest)


class _Scalar(OneElementScalars):
    """One number: a parameter if `learnable`, else a buffer; the state dict contains it in both cases."""

    value: Tensor

    def __init__(self, value: float, *, learnable: bool) -> None:
        super().__init__()
        self.learnable = learnable
        number = scalar_tensor(value)
        if learnable:
            self.value = nn.Parameter(number)
        else:
            self.register_buffer("value", number)

    @property
    def number(self) -> Tensor:
        """The number as a tensor without dimensions."""
        return number_of(self.value)

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

    Scalar folding (`normfree.nn.scalar_folding`) sets `folded` and `moved`. A folded bias adds nothing, because
    the layers that read it contain it. `moved` is the sum of the δ moved into this bias; it is added too.
    """

    folded: bool = False
    moved: Tensor | None = None

    def __init__(self, value: float = 0.0, *, learnable: bool = True) -> None:
        super().__init__(value, learnable=learnable)

    def forward(self, x: Tensor) -> Tensor:
        """Add the number."""
        if self.folded:
            return x
        return x + (self.number if self.moved is None else self.number + self.moved)


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
        return x * self.number
