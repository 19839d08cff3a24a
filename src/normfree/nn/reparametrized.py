"""Give an existing weight layer weight norm or standardization: its class changes, its name does not."""

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
    ones_per_row,
    weight_kind,
)

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_KINDS: dict[WeightKind, type[nn.Module]] = {"weight_norm": _WeightNorm, "standardized": _Standardized}


class _TransposedLinear(nn.Module):
    """A linear layer that stores its weight as (in, out), so that a row of the weight is a column of the parameter."""

    bias: Tensor | None
    effective_weight: Callable[[], Tensor]

    def _weight_rows(self, weight: Tensor) -> Tensor:
        return weight.mT

    def forward(self, input: Tensor) -> Tensor:
        """Compute x W + b, with W in the input's type."""
        out = input @ self.effective_weight().to(input.dtype)
        return out if self.bias is None else out + self.bias


class _PicklableClass(nn.Module):
    """Mixin for dynamically created classes; tells pickle how to rebuild them."""

    made_by: ClassVar[Callable[[], type[nn.Module]]]

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (type(self).made_by,), self.__dict__


def _restore(make: Callable[[], type[nn.Module]]) -> nn.Module:
    made = make()
    return made.__new__(made)


def cannot_reparametrize(module: nn.Module, kind: WeightKind, *, transposed: bool = False) -> str | None:
    """Return why a layer cannot be reparametrized this way, or None if it can."""
    if weight_kind(module) != "plain":
        return f"its weight is reparametrized already ({weight_kind(module)})"
    if is_computed(module):
        return "its weight has a parametrization of its own"
    if hasattr(module, "gain"):
        return "it has an attribute 'gain' of its own"
    weight = module._parameters["weight"]
    stored = transposed and weight is not None and weight.dim() == 2
    if weight is None or not (stored or isinstance(module, (*_CONVOLUTIONS, nn.Linear))):
        return f"{type(module).__name__} uses its weight in a custom way"
    if not stored and type(module).forward not in (*[c.forward for c in _CONVOLUTIONS], nn.Linear.forward):
        return f"{type(module).__name__} overrides forward()"
    if kind == "standardized" and (len(weight) if stored else weight[0].numel()) == 1:
        return "a single weight per output has no variance to standardize"
    return None


def reparametrize_(module: nn.Module, kind: WeightKind, *, transposed: bool = False) -> None:
    """Make a plain weight layer one of this kind, in place; with weight norm its effective weight stays the same.

    Raises:
        ValueError: If it cannot become one.
    """
    reason = cannot_reparametrize(module, kind, transposed=transposed)
    if reason is not None:
        raise ValueError(f"expected a layer that can be given a {kind} weight, got {type(module).__name__}: {reason}")
    weight = module.weight
    assert isinstance(weight, Tensor)
    plain: Any = type(module)
    module.__class__ = _class(plain, kind, transposed)
    before = weight.detach().clone()
    module.gain = nn.Parameter(before.new_ones(1, before.shape[1]) if transposed else ones_per_row(before))
    module.set_weight_(before)  # type: ignore[operator]  # every reparametrized layer has it


@functools.cache
def _class(plain: Any, kind: WeightKind, transposed: bool) -> Any:
    if plain is nn.Conv2d:
        return CONVOLUTIONS[kind]
    if plain is nn.Linear:
        return LINEARS[kind]
    name = "".join(word.title() for word in kind.split("_")) + plain.__name__
    forward = _LinearForward if issubclass(plain, nn.Linear) else _ConvForward
    mixins = (_TransposedLinear, _KINDS[kind]) if transposed else (_KINDS[kind], forward)
    made_by = functools.partial(_class, plain, kind, transposed)
    # Keep `__module__`: some libraries inspect it.
    return type(name, (_PicklableClass, *mixins, plain), {"__module__": plain.__module__, "made_by": made_by})
