"""A weight layer that exists becomes one with weight norm or standardization: it changes its class, not its name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn

from normfree.nn.weight_layers import (
    CONVOLUTIONS,
    LINEARS,
    WeightKind,
    _ConvForward,
    _LinearForward,
    _Standardized,
    _WeightNorm,
    is_computed,
    ones_a_row,
    weight_kind,
)

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_KINDS: dict[WeightKind, type[nn.Module]] = {"weight_norm": _WeightNorm, "standardized": _Standardized}


class _Transposed(nn.Module):
    """A linear layer whose weight is stored as (in, out), so that a row of the weight is a column of what it holds."""

    bias: Tensor | None
    effective_weight: Callable[[], Tensor]

    def _weight_rows(self, weight: Tensor) -> Tensor:
        return weight.mT

    def forward(self, input: Tensor) -> Tensor:
        """x W + b, W in the input's type."""
        out = input @ self.effective_weight().to(input.dtype)
        return out if self.bias is None else out + self.bias


class _Made(nn.Module):
    """What is of a class that no module holds: pickle is told how to make it again."""

    made_by: ClassVar[Callable[[], type[nn.Module]]]

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (type(self).made_by,), self.__dict__


def _restore(make: Callable[[], type[nn.Module]]) -> nn.Module:
    made = make()
    return made.__new__(made)


def cannot_reparametrize(module: nn.Module, kind: WeightKind, *, transposed: bool = False) -> str | None:
    """Why a layer cannot become one of that kind, or None when it can."""
    if weight_kind(module) != "plain":
        return f"its weight is reparametrized already ({weight_kind(module)})"
    if is_computed(module):
        return "its weight has a parametrization of its own"
    if hasattr(module, "gain"):
        return "it has an attribute 'gain' of its own"
    weight = module._parameters["weight"]
    stored = transposed and weight is not None and weight.dim() == 2
    if weight is None or not (stored or isinstance(module, (*_CONVOLUTIONS, nn.Linear))):
        return f"{type(module).__name__} uses its weight in a way of its own"
    if not stored and type(module).forward not in (*[c.forward for c in _CONVOLUTIONS], nn.Linear.forward):
        return f"{type(module).__name__} has a forward pass of its own"
    if kind == "standardized" and (len(weight) if stored else weight[0].numel()) == 1:
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
    module.gain = nn.Parameter(before.new_ones(1, before.shape[1]) if transposed else ones_a_row(before))
    module.set_weight_(before)  # type: ignore[operator]  # every reparametrized layer has it


@functools.cache
def _class(plain: Any, kind: WeightKind, transposed: bool) -> Any:
    if plain is nn.Conv2d:
        return CONVOLUTIONS[kind]
    if plain is nn.Linear:
        return LINEARS[kind]
    name = "".join(word.title() for word in kind.split("_")) + plain.__name__
    forward = _LinearForward if issubclass(plain, nn.Linear) else _ConvForward
    mixins = (_Transposed, _KINDS[kind]) if transposed else (_KINDS[kind], forward)
    made_by = functools.partial(_class, plain, kind, transposed)
    # The plain class's module, so that whoever asks where a class comes from is told the same as before.
    return type(name, (_Made, *mixins, plain), {"__module__": plain.__module__, "made_by": made_by})
