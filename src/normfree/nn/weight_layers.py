"""Reparametrized weight layers: weight norm, standardization and spectral norm; `reparametrize_` changes a plain layer.

They are plain subclasses of `Conv2d` and `Linear` that compute their effective weight in `forward`. So deep copies,
state dicts, autocast, channels-last, `torch.compile` and `torch.export` work as usual, and blocks of one shape share
one compiled program.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

WeightKind = Literal["plain", "weight_norm", "standardized", "spectral"]
_TINY = 1e-12


def add_as_image(x: Tensor, constant: Tensor) -> Tensor:
    """Return x + constant, for a number or a number per channel, in the type of x.

    In compiled training the constant becomes an image first, so its gradient is a sum over the batch and then a small
    sum over positions. Inductor fuses the first with the pass that computes the gradient of x; one sum over both would
    be a pass of its own.
    """
    constant = constant.to(x.dtype)
    if constant.dim():
        constant = constant.view(-1, *(1,) * (x.dim() - 2))
    return x + (constant.expand(1, *x.shape[1:]) if _compiles_training() else constant)


def convolve(layer: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return W * x + b, computed by the forward pass of a convolution; see `add_as_image`."""
    if bias is None or not _compiles_training() or input.dim() == weight.dim() - 1:
        out: Tensor = layer._conv_forward(input, weight, bias)
        return out
    return add_as_image(layer._conv_forward(input, weight, None), bias)


def _compiles_training() -> bool:
    return torch.compiler.is_dynamo_compiling() and torch.is_grad_enabled()


class _ConvForward(nn.Module):
    """The forward pass of a convolution with `effective_weight()` in place of `weight`."""

    bias: Tensor | None
    effective_weight: Callable[[], Tensor]
    _conv_forward: Callable[..., Tensor]

    def forward(self, input: Tensor) -> Tensor:
        """Return W * x + b, with W in the input's type."""
        return convolve(self, input, self.effective_weight().to(input.dtype), self.bias)


class _LinearForward(nn.Module):
    """The forward pass of a linear layer with `effective_weight()` in place of `weight`."""

    bias: nn.Parameter
    effective_weight: Callable[[], Tensor]

    def forward(self, input: Tensor) -> Tensor:
        """Return x Wᵀ + b, with W in the input's type."""
        return F.linear(input, self.effective_weight().to(input.dtype), self.bias)


def _wide(weight: Tensor) -> Tensor:
    """Convert half precision to float32, so that sums of squares neither overflow nor lose digits."""
    return weight.float() if weight.dtype in (torch.bfloat16, torch.float16) else weight


def ones_per_row(weight: Tensor) -> Tensor:
    """Return a one for each row of `weight`, shaped to broadcast over it."""
    return weight.new_ones((weight.shape[0],) + (1,) * (weight.dim() - 1))


class _RowGain(nn.Module):
    """A weight computed row by row from `weight`, with a learnable `gain` per row."""

    weight: Tensor

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.gain = nn.Parameter(ones_per_row(self.weight.detach()))

    def _weight_rows(self, weight: Tensor) -> Tensor:
        """Return a tensor of the weight's shape as a matrix (outputs, rest)."""
        return weight.flatten(1)

    def _over_norm(self, weight: Tensor) -> Tensor:
        """Return a tensor of the weight's shape with every row divided by its norm."""
        norm = self._weight_rows(weight).square().sum(1).clamp_min(_TINY**2).sqrt()
        return weight / norm.view_as(self.gain)


class _WeightNorm(_RowGain):
    """W = g · v / ‖v‖ row by row; `weight` holds the direction v and `gain` the length g.

    Reference: wninit, equations 1 and 2; Salimans & Kingma 2016.
    """

    def effective_weight(self) -> Tensor:
        """Return the weight that multiplies the input."""
        return (self.gain * self._over_norm(_wide(self.weight))).to(self.weight.dtype)

    @torch.no_grad()
    def set_weight_(self, weight: Tensor) -> None:
        """Set direction and length so that the effective weight is `weight`.

        A row of zeros keeps its direction and gets length 0; without a direction it would never get a gradient.
        """
        norm = self._weight_rows(weight).norm(dim=1).view_as(self.gain)
        self.weight.copy_(torch.where(norm > 0, weight, self.weight.to(weight)))
        self.gain.copy_(norm)


class _Standardized(_RowGain):
    """W = g · (v - mean v) / (std v · √fan_in) row by row; `gain` holds g.

    The gain starts at √γ, with γ = 2/(1 - 1/π) for a layer that reads a ReLU, so that the output has unit variance.

    Reference: normdead, section 4.2 (centred weight normalization, rescaled); Brock 2021, section 4.
    """

    def effective_weight(self) -> Tensor:
        """Return the weight that multiplies the input."""
        v = _wide(self.weight)
        centred = v - self._weight_rows(v).mean(1).view_as(self.gain)
        return (self.gain * self._over_norm(centred)).to(self.weight.dtype)

    @torch.no_grad()
    def set_weight_(self, weight: Tensor) -> None:
        """Set the weight before standardization; mean and scale of its rows do not matter."""
        self.weight.copy_(weight)


class _Rows:
    """The rows of several layers of one kind, in the place of a layer."""

    _weight_rows, _over_norm = _RowGain._weight_rows, _RowGain._over_norm

    def __init__(self, weight: Tensor, gain: Tensor) -> None:
        self.weight, self.gain = weight, gain


def stacked_weight(kind: WeightKind, weight: Tensor, gain: Tensor) -> Tensor:
    """Return the effective weights of layers of one kind, from weights (layers, outputs, …) and gains of their shape.

    Raises `ValueError` if layers of this kind have no gain per row.
    """
    if kind not in ("weight_norm", "standardized"):
        raise ValueError(f"expected layers of the kind weight_norm or standardized to stack, got '{kind}'")
    rows: Any = _Rows(weight.flatten(0, 1), gain.flatten(0, 1))
    layer: Any = _WeightNorm if kind == "weight_norm" else _Standardized
    out: Tensor = layer.effective_weight(rows)
    return out.view(weight.shape)


class _SpectralNorm(nn.Module):
    """W = v / σ(v) with σ the largest singular value of the (rows, rest) matrix.

    One power iteration per forward pass in training keeps the estimate of σ up to date.

    Reference: normdead, section 2.3; Miyato 2018, algorithm 1.
    """

    weight: Tensor
    left: Tensor
    right: Tensor

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        matrix = self.weight.detach().flatten(1)
        self.register_buffer("left", matrix.new_ones(matrix.shape[0]) / matrix.shape[0] ** 0.5)
        self.register_buffer("right", matrix.new_ones(matrix.shape[1]) / matrix.shape[1] ** 0.5)
        self.power_iteration_(15)

    @torch.no_grad()
    def power_iteration_(self, steps: int = 1) -> None:
        """Improve the estimate of the leading singular vectors."""
        # Elementwise products here and below, because autocast would multiply matrices in half precision.
        matrix = _wide(self.weight.flatten(1))
        for _ in range(steps):
            self.right.copy_(F.normalize((matrix * self.left.unsqueeze(1)).sum(0), dim=0, eps=_TINY))
            self.left.copy_(F.normalize((matrix * self.right).sum(1), dim=0, eps=_TINY))

    def effective_weight(self) -> Tensor:
        """Return the weight that multiplies the input."""
        if self.training:
            self.power_iteration_()
        # Copies, because the next forward pass changes the buffers, and the backward pass needs the old ones.
        left, right = self.left.clone(), self.right.clone()
        sigma = (left.unsqueeze(1) * _wide(self.weight.flatten(1)) * right).sum()
        return (self.weight / sigma).to(self.weight.dtype)

    @torch.no_grad()
    def set_weight_(self, weight: Tensor) -> None:
        """Set the weight before normalization and compute its singular vectors."""
        self.weight.copy_(weight)
        matrix = _wide(self.weight.flatten(1))
        # Exact, because the leading singular values of a random matrix are too close for a few power iterations.
        if matrix.shape[0] <= matrix.shape[1]:
            leading = torch.linalg.eigh(matrix @ matrix.mT).eigenvectors[:, -1]
        else:
            leading = matrix @ torch.linalg.eigh(matrix.mT @ matrix).eigenvectors[:, -1]
        self.left.copy_(F.normalize(leading, dim=0, eps=_TINY))
        self.power_iteration_()


class WeightNormConv2d(_WeightNorm, _ConvForward, nn.Conv2d):
    """Conv2d with weight norm; see `_WeightNorm`."""


class WeightNormLinear(_WeightNorm, _LinearForward, nn.Linear):
    """Linear with weight norm; see `_WeightNorm`."""


class StandardizedConv2d(_Standardized, _ConvForward, nn.Conv2d):
    """Conv2d with centred and scaled weight standardization; see `_Standardized`."""


class StandardizedLinear(_Standardized, _LinearForward, nn.Linear):
    """Linear with centred and scaled weight standardization; see `_Standardized`."""


class SpectralNormConv2d(_SpectralNorm, _ConvForward, nn.Conv2d):
    """Conv2d with spectral norm; see `_SpectralNorm`."""


class SpectralNormLinear(_SpectralNorm, _LinearForward, nn.Linear):
    """Linear with spectral norm; see `_SpectralNorm`."""


class _UndrawnConv2d(nn.Conv2d):
    def reset_parameters(self) -> None:
        """Draw nothing."""


def convolution(kind: WeightKind, *args: Any, **options: Any) -> nn.Conv2d:
    """Return a convolution of a kind, with the arguments of `torch.nn.Conv2d`, whose weight is not initialized.

    Torch's own initialization takes a tenth of the time to build a deep network.
    """
    if kind != "plain":
        return CONVOLUTIONS[kind](*args, **options)
    layer: nn.Conv2d = _UndrawnConv2d(*args, **options)
    layer.__class__ = nn.Conv2d
    return layer


CONVOLUTIONS: dict[WeightKind, type[nn.Conv2d]] = {
    "plain": nn.Conv2d,
    "weight_norm": WeightNormConv2d,
    "standardized": StandardizedConv2d,
    "spectral": SpectralNormConv2d,
}
LINEARS: dict[WeightKind, type[nn.Linear]] = {
    "plain": nn.Linear,
    "weight_norm": WeightNormLinear,
    "standardized": StandardizedLinear,
    "spectral": SpectralNormLinear,
}
CONV_LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
WEIGHT_LAYERS = (*CONV_LAYERS, nn.Linear)
_KINDS: dict[WeightKind, Any] = {"weight_norm": _WeightNorm, "standardized": _Standardized, "spectral": _SpectralNorm}


def weight_kind(layer: nn.Module) -> WeightKind:
    """Return the reparametrization of a weight layer."""
    return next((kind for kind, mixin in _KINDS.items() if isinstance(layer, mixin)), "plain")


@torch.no_grad()
def set_weight_(layer: nn.Module, weight: Tensor, parameter: str = "weight", *, name: str = "") -> None:
    """Set a layer's weight, through its reparametrization (normfree's or torch's) if it has one.

    Writing to `layer.weight` would lose the scale of a weight-normalized layer. `name` is its full name, for messages.

    Raises:
        ValueError: If the module is not a weight layer, or if the weight is computed and cannot be set.
    """
    current = getattr(layer, parameter, None)
    if parameter == "weight" and isinstance(layer, _WeightNorm | _Standardized | _SpectralNorm):
        layer.set_weight_(weight)
    elif not isinstance(current, Tensor) or current.dim() < 2:
        raise ValueError(
            f"expected a weight layer (convolution or linear), got {type(layer).__name__}; "
            "pass the layer itself, not the module that holds it"
        )
    elif not is_computed(layer, parameter):
        current.copy_(weight)
    elif not _set_through_inverse(layer, parameter, weight.to(current, copy=True)):
        raise ValueError(
            f"expected a weight that can be set at '{name or parameter}', got one that {type(layer).__name__} computes "
            "from other parameters, without an inverse; make it plain first, by torch.nn.utils.parametrize."
            f"remove_parametrizations(layer, '{parameter}') or, for old hooks, torch.nn.utils.remove_weight_norm(layer)"
        )


def is_computed(layer: nn.Module, parameter: str = "weight") -> bool:
    """Whether a weight is computed from other parameters at every use, by torch's parametrization or a hook."""
    return parameter not in layer._parameters


def _set_through_inverse(layer: nn.Module, parameter: str, weight: Tensor) -> bool:
    """Set a weight by the inverse of its parametrization; return whether it has the new value, up to rounding."""
    if not is_parametrized(layer, parameter):
        return False
    stored: Any = layer.parametrizations[parameter]  # type: ignore[index]
    with suppress(Exception):  # a third-party right_inverse may raise anything
        if isinstance(stored[-1], torch.nn.utils.parametrizations._WeightNorm) and not weight.any():
            stored.original0.zero_()  # a weight of zeros has no direction, so it keeps the one that it has
        else:
            setattr(layer, parameter, weight)
    error = (getattr(layer, parameter) - weight).abs().max()
    return weight.is_meta or bool(error <= torch.finfo(weight.dtype).eps ** 0.5 * weight.abs().max())


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
    if weight is None or not (stored or isinstance(module, WEIGHT_LAYERS)):
        return f"{type(module).__name__} uses its weight in a custom way"
    if not stored and type(module).forward not in [kind.forward for kind in WEIGHT_LAYERS]:
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
    before: Any = module.weight.detach().clone()  # type: ignore[operator]
    plain: Any = type(module)
    module.__class__ = _class(plain, kind, transposed)
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
