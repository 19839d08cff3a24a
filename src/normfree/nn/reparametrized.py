"""A weight layer that exists becomes one with weight norm or standardization: it changes its class, not its name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from normfree.nn.weight import (
    CONVOLUTIONS,
    LINEARS,
    WeightKind,
    _rows,
    _Standardized,
    _WeightNorm,
    is_computed,
    weight_kind,
)

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_MIXINS: dict[WeightKind, type[nn.Module]] = {"weight_norm": _WeightNorm, "standardized": _Standardized}


class _Effective(nn.Module):
    """A layer that computes with `effective_weight()` in place of `weight`, which holds the direction still."""

    weight: Tensor
    bias: Tensor | None
    gain: Tensor
    effective_weight: Callable[[], Tensor]


class _Stored(_Effective):
    """The forward pass of a linear layer whose weight is stored as (in, out)."""

    def forward(self, input: Tensor) -> Tensor:
        """x W + b, in the input's type."""
        out = input @ self.effective_weight().to(input.dtype)
        return out if self.bias is None else out + self.bias


class _Product(_Effective):
    """The forward pass of any linear layer."""

    def forward(self, input: Tensor) -> Tensor:
        """x Wᵀ + b, in the input's type."""
        return nn.functional.linear(input, self.effective_weight().to(input.dtype), self.bias)


class _Convolution(_Effective):
    """The forward pass of any convolution."""

    _conv_forward: Callable[..., Tensor]

    def forward(self, input: Tensor) -> Tensor:
        """W * x + b, in the input's type."""
        return self._conv_forward(input, self.effective_weight().to(input.dtype), self.bias)


class _TransposedWeightNorm(_WeightNorm):
    """Weight norm of a weight that is stored as (in, out): a length a column."""

    def effective_weight(self) -> Tensor:
        """The weight that multiplies the input."""
        out: Tensor = self.gain * (self.weight / self.weight.norm(dim=0, keepdim=True).clamp_min(1e-12))
        return out

    @torch.no_grad()
    def set_weight_(self, weight: Tensor) -> None:
        """Choose direction and length so that the effective weight is `weight`; see `_WeightNorm`."""
        norm = weight.norm(dim=0, keepdim=True)
        self.weight.copy_(torch.where(norm > 0, weight, self.weight.to(weight)))
        self.gain.copy_(norm)


class _TransposedStandardized(_Standardized):
    """Standardization of a weight that is stored as (in, out), column by column."""

    def effective_weight(self) -> Tensor:
        """The weight that multiplies the input."""
        centred = self.weight - self.weight.mean(dim=0, keepdim=True)
        out: Tensor = self.gain * (centred / centred.norm(dim=0, keepdim=True).clamp_min(1e-12))
        return out


_TRANSPOSED: dict[WeightKind, type[nn.Module]] = {
    "weight_norm": _TransposedWeightNorm,
    "standardized": _TransposedStandardized,
}


def cannot_reparametrize(module: nn.Module, kind: WeightKind, *, transposed: bool = False) -> str | None:
    """Why a layer cannot become one of that kind, or None when it can."""
    if weight_kind(module) != "plain":
        return f"its weight is reparametrized already ({weight_kind(module)})"
    if is_computed(module):
        return "its weight has a parametrization of its own"
    if hasattr(module, "gain"):
        return "it has an attribute 'gain' of its own"
    if transposed and isinstance(module.weight, Tensor) and module.weight.dim() == 2:
        return None
    plain = (*[c.forward for c in _CONVOLUTIONS], nn.Linear.forward)
    if not isinstance(module, (*_CONVOLUTIONS, nn.Linear)):
        return f"{type(module).__name__} uses its weight in a way of its own"
    if type(module).forward not in plain:
        return f"{type(module).__name__} has a forward pass of its own"
    if kind == "standardized" and module.weight[0].numel() == 1:
        return "a single weight an output has no variance to standardize"
    return None


def reparametrize_(module: nn.Module, kind: WeightKind, *, transposed: bool = False) -> None:
    """Make a plain weight layer one of that kind, in place; the effective weight stays for weight norm.

    Raises `ValueError` when it cannot be made one.
    """
    reason = cannot_reparametrize(module, kind, transposed=transposed)
    if reason is not None:
        raise ValueError(f"expected a layer that can be given a {kind} weight, got {type(module).__name__}: {reason}")
    weight = module.weight
    assert isinstance(weight, Tensor)
    plain: Any = type(module)
    module.__class__ = _class(plain, kind, transposed)
    before = weight.detach().clone()
    module.gain = nn.Parameter(before.new_ones(1, before.shape[1]) if transposed else _rows(before))
    module.set_weight_(before)  # type: ignore[operator]  # every reparametrized layer has it


@functools.cache
def _class(plain: Any, kind: WeightKind, transposed: bool) -> Any:
    if plain is nn.Conv2d:
        return CONVOLUTIONS[kind]
    if plain is nn.Linear:
        return LINEARS[kind]
    name = "".join(word.title() for word in kind.split("_")) + plain.__name__
    forward = _Stored if transposed else _Convolution if issubclass(plain, _CONVOLUTIONS) else _Product
    weight = (_TRANSPOSED if transposed else _MIXINS)[kind]
    return type(name, (weight, forward, plain), {"__module__": plain.__module__})
