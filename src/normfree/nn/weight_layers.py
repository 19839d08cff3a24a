"""Weight layers whose weight is a function of their parameters: weight norm, standardization, spectral norm.

They are plain subclasses of `Conv2d` and `Linear` that compute their effective weight in `forward`, so that deep
copies, state dicts, autocast, channels-last, `torch.compile` and `torch.export` need nothing special, and blocks of one
shape share one compiled program.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

WeightKind = Literal["plain", "weight_norm", "standardized", "spectral"]
_TINY = 1e-12


class _Convolves(nn.Module):
    """The forward pass of a convolution with `effective_weight()` in place of `weight`."""

    bias: Tensor | None
    effective_weight: Callable[[], Tensor]
    _conv_forward: Callable[..., Tensor]

    def forward(self, input: Tensor) -> Tensor:
        """W * x + b, W in the input's type."""
        return self._conv_forward(input, self.effective_weight().to(input.dtype), self.bias)


class _Multiplies(nn.Module):
    """The forward pass of a linear layer with `effective_weight()` in place of `weight`."""

    bias: nn.Parameter
    effective_weight: Callable[[], Tensor]

    def forward(self, input: Tensor) -> Tensor:
        """x Wᵀ + b, W in the input's type."""
        return F.linear(input, self.effective_weight().to(input.dtype), self.bias)


def _wide(weight: Tensor) -> Tensor:
    """`weight` in a type that sums of squares do not overflow or lose digits in."""
    return weight.float() if weight.dtype in (torch.bfloat16, torch.float16) else weight


def ones_a_row(weight: Tensor) -> Tensor:
    """A one for each row of `weight`, shaped to broadcast over it."""
    return weight.new_ones((weight.shape[0],) + (1,) * (weight.dim() - 1))


class _Gained(nn.Module):
    """A weight that is computed row by row from `weight`, and a learnable `gain` a row."""

    weight: Tensor

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.gain = nn.Parameter(ones_a_row(self.weight.detach()))

    def _weight_rows(self, weight: Tensor) -> Tensor:
        """The matrix (outputs, rest) of a tensor like the weight."""
        return weight.flatten(1)

    def _over_norm(self, weight: Tensor) -> Tensor:
        """A tensor like the weight, every row over its norm."""
        norm = self._weight_rows(weight).square().sum(1).clamp_min(_TINY**2).sqrt()
        return weight / norm.view_as(self.gain)


class _WeightNorm(_Gained):
    """W = g · v / ‖v‖ row by row; `weight` holds the direction v and `gain` the length g.

    Reference: wninit, equations 1 and 2; Salimans & Kingma 2016.
    """

    def effective_weight(self) -> Tensor:
        """The weight that multiplies the input."""
        return (self.gain * self._over_norm(_wide(self.weight))).to(self.weight.dtype)

    @torch.no_grad()
    def set_weight_(self, weight: Tensor) -> None:
        """Choose direction and length so that the effective weight is `weight`.

        A row of zeros keeps its direction and gets length 0: without a direction it would never get a gradient.
        """
        norm = self._weight_rows(weight).norm(dim=1).view_as(self.gain)
        self.weight.copy_(torch.where(norm > 0, weight, self.weight.to(weight)))
        self.gain.copy_(norm)


class _Standardized(_Gained):
    """W = g · (v - mean v) / (std v · √fan_in) row by row; `gain` holds g.

    The gain starts at γ, γ² = 2/(1 - 1/π) for a layer that reads a ReLU, so that unit variance comes out.

    Reference: normdead, section 4.2 (centred weight normalization, rescaled); Brock 2021, section 4.
    """

    def effective_weight(self) -> Tensor:
        """The weight that multiplies the input."""
        v = _wide(self.weight)
        centred = v - self._weight_rows(v).mean(1).view_as(self.gain)
        return (self.gain * self._over_norm(centred)).to(self.weight.dtype)

    @torch.no_grad()
    def set_weight_(self, weight: Tensor) -> None:
        """Store `weight` before standardization; mean and scale of its rows do not matter."""
        self.weight.copy_(weight)


class _SpectralNorm(nn.Module):
    """W = v / σ(v) with σ the largest singular value of the (rows, rest) matrix.

    One power iteration a forward pass in training keeps the estimate.

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
        """Sharpen the estimate of the leading singular vectors."""
        # Products are elementwise here and below, because autocast would multiply matrices in half precision.
        matrix = _wide(self.weight.flatten(1))
        for _ in range(steps):
            self.right.copy_(F.normalize((matrix * self.left.unsqueeze(1)).sum(0), dim=0, eps=_TINY))
            self.left.copy_(F.normalize((matrix * self.right).sum(1), dim=0, eps=_TINY))

    def effective_weight(self) -> Tensor:
        """The weight that multiplies the input."""
        if self.training:
            self.power_iteration_()
        # Copies, because the next forward pass changes the buffers that backward still needs.
        left, right = self.left.clone(), self.right.clone()
        sigma = (left.unsqueeze(1) * _wide(self.weight.flatten(1)) * right).sum()
        return (self.weight / sigma).to(self.weight.dtype)

    @torch.no_grad()
    def set_weight_(self, weight: Tensor) -> None:
        """Store `weight` before normalization and settle the singular vectors."""
        self.weight.copy_(weight)
        matrix = _wide(self.weight.flatten(1))
        # Exact: a random matrix has leading singular values too close for a few power iterations to tell apart.
        if matrix.shape[0] <= matrix.shape[1]:
            leading = torch.linalg.eigh(matrix @ matrix.mT).eigenvectors[:, -1]
        else:
            leading = matrix @ torch.linalg.eigh(matrix.mT @ matrix).eigenvectors[:, -1]
        self.left.copy_(F.normalize(leading, dim=0, eps=_TINY))
        self.power_iteration_()


class WeightNormConv2d(_WeightNorm, _Convolves, nn.Conv2d):
    """Conv2d with weight norm; see `_WeightNorm`."""


class WeightNormLinear(_WeightNorm, _Multiplies, nn.Linear):
    """Linear with weight norm; see `_WeightNorm`."""


class StandardizedConv2d(_Standardized, _Convolves, nn.Conv2d):
    """Conv2d with centred and scaled weight standardization; see `_Standardized`."""


class StandardizedLinear(_Standardized, _Multiplies, nn.Linear):
    """Linear with centred and scaled weight standardization; see `_Standardized`."""


class SpectralNormConv2d(_SpectralNorm, _Convolves, nn.Conv2d):
    """Conv2d with spectral norm; see `_SpectralNorm`."""


class SpectralNormLinear(_SpectralNorm, _Multiplies, nn.Linear):
    """Linear with spectral norm; see `_SpectralNorm`."""


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
WEIGHT_LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)


def weight_kind(layer: nn.Module) -> WeightKind:
    """Which reparametrization a weight layer has."""
    if isinstance(layer, _WeightNorm):
        return "weight_norm"
    if isinstance(layer, _Standardized):
        return "standardized"
    return "spectral" if isinstance(layer, _SpectralNorm) else "plain"


@torch.no_grad()
def set_weight_(layer: nn.Module, weight: Tensor, parameter: str = "weight", *, name: str = "") -> None:
    """Make `weight` the layer's weight, through its reparametrization where it has one, ours or torch's.

    Writing to `layer.weight` would set only the direction of a weight-normalized layer and lose the scale silently.
    Raises `ValueError`, which says the weight's `name`, where it is computed and does not become what was set.
    """
    held = getattr(layer, parameter, None)
    if parameter == "weight" and isinstance(layer, _WeightNorm | _Standardized | _SpectralNorm):
        layer.set_weight_(weight)
    elif not isinstance(held, Tensor) or held.dim() < 2:
        raise ValueError(
            f"expected a weight layer (convolution or linear), got {type(layer).__name__}; "
            "pass the layer itself, not the module that holds it"
        )
    elif not is_computed(layer, parameter):
        held.copy_(weight)
    elif not _set_through(layer, parameter, weight.to(held, copy=True)):
        raise ValueError(
            f"expected a weight that can be set at '{name or parameter}', got one that {type(layer).__name__} computes "
            "from others and that did not become what was written; make it plain first, by torch.nn.utils.parametrize."
            f"remove_parametrizations(layer, '{parameter}') or, for old hooks, torch.nn.utils.remove_weight_norm(layer)"
        )


def is_computed(layer: nn.Module, parameter: str = "weight") -> bool:
    """Whether a weight is no parameter of its layer but made of others at every use, by torch or a hook."""
    return parameter not in layer._parameters


def _set_through(layer: nn.Module, parameter: str, weight: Tensor) -> bool:
    """Set a weight by the inverse of its parametrization; whether it is that weight then, up to rounding."""
    if not is_parametrized(layer, parameter):
        return False
    try:
        setattr(layer, parameter, weight)
    except Exception:  # whatever a right_inverse of others raises
        return False
    now: Tensor = getattr(layer, parameter)
    off = (now - weight).abs().max()
    return now.is_meta or bool(off <= torch.finfo(now.dtype).eps ** 0.5 * weight.abs().max())
