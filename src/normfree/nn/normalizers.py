"""Normalizers by name, their replacements (dynamic tanh, affine), and activations with normalization built in.

`sync_batch_norms_` is batch norm over several processes, each with an equal part of the batch. The caller passes the
function that sums a tensor over processes, so this file does not depend on how they communicate.

Reference: normdead, section 2.3 and Figure 2.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from normfree.nn.scalars import OneElementScalars, number_of, scalar_tensor
from normfree.nn.weight_layers import WEIGHT_LAYERS
from normfree.theory import normprop_constants

NormName = Literal["batch", "layer", "rms", "group", "instance", "tanh"]
ActivationName = Literal["relu", "selu", "normprop"]

NORM_TYPES = (
    nn.modules.batchnorm._BatchNorm,
    nn.modules.instancenorm._InstanceNorm,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
)

_NORM_NAME = re.compile(r"(batch|layer|group|instance|rms|simple)_?norm", re.IGNORECASE)
FUSED = ("drop", "act")  # the children of timm's normalizers, in the order they run


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a normalizer.

    Torch's are recognized by type. Others are recognized by the class name (`LlamaRMSNorm`, `T5LayerNorm`,
    `FrozenBatchNorm2d`), if their parameters are one-dimensional and their children are activation and dropout only.
    """
    if isinstance(module, NORM_TYPES):
        return True
    if isinstance(module, WEIGHT_LAYERS) or not _NORM_NAME.search(type(module).__name__):
        return False
    inside = {name for name, _ in module.named_children()}
    return inside <= set(FUSED) and all(p.dim() <= 1 for p in module.parameters(recurse=False))


def normalizer(name: NormName, channels: int, *, spatial: bool = True, tokens: bool = False) -> nn.Module:
    """Return a normalizer by name.

    Group norm has as many groups as possible, at most 32, with at least four channels per group. Layer norm of images
    is group norm with one group. `tanh` is dynamic tanh, which computes no statistics.

    Args:
        name: The normalizer.
        channels: The number of channels.
        spatial: Whether the inputs are images (N, channels, H, W) or vectors (N, channels).
        tokens: Whether the inputs are sequences (N, T, channels), whose positions are normalized separately.

    Raises:
        ValueError: If the name is unknown, or if the normalizer does not fit the inputs.
    """
    kind = "tokens (N, T, C)" if tokens else "images (N, C, H, W)" if spatial else "vectors (N, C)"
    makers: dict[str, Callable[[int], nn.Module]] = {
        "batch": nn.BatchNorm2d if spatial else nn.BatchNorm1d,
        "layer": lambda channels: nn.GroupNorm(1, channels),
        "group": _group_norm,
        "tanh": lambda channels: DynamicTanh(channels, dim=1),
    }
    if tokens:
        makers = {"layer": nn.LayerNorm, "rms": nn.RMSNorm, "tanh": DynamicTanh}
    elif spatial:
        makers["instance"] = lambda channels: nn.InstanceNorm2d(channels, affine=True)  # it would set vectors to zero
    if name not in makers:
        raise ValueError(f"expected a normalizer of {kind}, got '{name}'; use one of {', '.join(makers)}")
    return makers[name](channels)


def _group_norm(channels: int) -> nn.Module:
    return nn.GroupNorm(max(g for g in range(1, 33) if channels % g == 0 and (g == 1 or channels // g >= 4)), channels)


class DynamicTanh(OneElementScalars):
    """w · tanh(α · x) + b with a learnable scalar α, and learnable w and b per channel.

    `dim` is the dimension of the channels: 1 for images (N, C, H, W), -1 for tokens (N, T, C). `alpha` is the initial
    value of α, 0.5 in the paper.

    Reference: Zhu, Chen, He, LeCun & Liu 2025, "Transformers without Normalization", section 4.

    >>> DynamicTanh(3)(torch.zeros(2, 3)).shape
    torch.Size([2, 3])
    """

    def __init__(self, channels: int, *, alpha: float = 0.5, dim: int = -1) -> None:
        super().__init__()
        self.start = alpha
        self.dim = dim
        self.alpha = nn.Parameter(scalar_tensor(alpha))
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the initial values."""
        self.alpha.fill_(self.start)
        self.weight.fill_(1.0)
        self.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """Apply the function."""
        shape = [1] * x.dim()
        shape[self.dim] = -1
        return torch.tanh(number_of(self.alpha) * x) * self.weight.view(shape) + self.bias.view(shape)

    def extra_repr(self) -> str:
        """Return the number of channels, the initial α and the channels' dimension."""
        return f"{self.weight.numel()}, alpha={self.start:g}, dim={self.dim}"


class ChannelAffine(nn.Module):
    """w · x + b with learnable w and b per channel: a batch norm whose statistics no longer change.

    Shapes: (N, C, …) → the same.

    >>> ChannelAffine(torch.tensor([1.0, 2.0]), torch.tensor([0.0, 1.0]))(torch.ones(1, 2))
    tensor([[1., 3.]], grad_fn=<AddcmulBackward0>)
    """

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        if weight.dim() != 1 or weight.shape != bias.shape:
            raise ValueError(
                f"expected one factor and one summand per channel, got shapes {tuple(weight.shape)} and "
                f"{tuple(bias.shape)}; pass two vectors of one length"
            )
        self.weight = nn.Parameter(weight.detach().clone())
        self.bias = nn.Parameter(bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        """Scale and shift every channel."""
        shape = (-1,) + (1,) * (x.dim() - 2)
        return torch.addcmul(self.bias.to(x.dtype).view(shape), x, self.weight.to(x.dtype).view(shape))

    def extra_repr(self) -> str:
        """Return the number of channels."""
        return str(self.weight.numel())


class NormPropReLU(nn.Module):
    """ReLU shifted and scaled to zero mean and unit variance for N(0, 1) input: (ReLU(x) - √(1/2π)) / √(½(1 - 1/π)).

    Reference: normdead, section 2.3; Arpit 2016, section 3.3 (normalization propagation).
    """

    mean, std = normprop_constants()

    def forward(self, x: Tensor) -> Tensor:
        """Apply ReLU, then shift and scale."""
        return (F.relu(x) - self.mean) / self.std


class SELU(nn.Module):
    """SELU, followed by alpha dropout if `dropout` is positive; both keep mean 0 and variance 1.

    Reference: normdead, section 2.3; Klambauer 2017.
    """

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"expected a dropout probability in [0, 1), got {dropout}; 0 turns it off")
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        """Apply SELU, then dropout in training mode."""
        return F.alpha_dropout(torch.selu(x), self.dropout, self.training)

    def extra_repr(self) -> str:
        """Return the dropout probability."""
        return f"dropout={self.dropout}"


class OmittedActivation(nn.Identity):
    """The place of an activation that the model's design has and its method leaves out."""


ACTIVATION_TYPES = (nn.ReLU, NormPropReLU, SELU, nn.GELU, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.Tanh, nn.Sigmoid, nn.SELU)


def activation(name: ActivationName, *, dropout: float = 0.0) -> nn.Module:
    """Return an activation function by name; `dropout` is the probability of alpha dropout, for selu only."""
    if dropout and name != "selu":
        raise ValueError(f"alpha dropout goes with selu, got dropout={dropout} for '{name}'; use dropout=0")
    match name:
        case "relu":
            return nn.ReLU()
        case "selu":
            return SELU(dropout)
        case "normprop":
            return NormPropReLU()
    raise ValueError(f"expected an activation, got '{name}'; use one of relu, selu, normprop")


Sum = Callable[[Tensor], None]  # replaces a tensor by its sum over all processes, in place


def sync_batch_norms_(model: nn.Module, sum_: Sum, world: int) -> nn.Module:
    """Let every batch norm compute its statistics over the batches of `world` processes, in place.

    Modules, parameters and names stay; `unsync_batch_norms_` undoes it. A `torch.nn.SyncBatchNorm` stays unchanged.

    Raises:
        ValueError: If a batch norm has its own forward pass, whose statistics cannot be shared.
    """
    for name, module in model.named_modules():
        if not isinstance(module, _BatchNorm) or isinstance(module, nn.SyncBatchNorm | SyncedBatchNorm):
            continue
        if type(module).forward is not _BatchNorm.forward:
            raise ValueError(
                f"expected batch norms of torch to share among {world} processes, got {type(module).__name__} at "
                f"'{name}', which has its own forward pass; train with one process"
            )
        module.sum_, module.world = sum_, world  # type: ignore[assignment]
        # The object stays the same, because other modules may refer to it.
        module.__class__ = _synced_class(type(module))  # type: ignore[arg-type]
    return model


def unsync_batch_norms_(model: nn.Module) -> nn.Module:
    """Undo `sync_batch_norms_`, in place."""
    for module in model.modules():
        if isinstance(module, SyncedBatchNorm):
            del module.sum_, module.world
            module.__class__ = type(module).__bases__[1]
    return model


class SyncedBatchNorm(_BatchNorm):
    """Mixin of a batch norm: in training, mean and variance are over the batches of all processes.

    The running statistics are those of one process with the whole batch, with the unbiased variance of all values.
    """

    sum_: Sum
    world: int

    def forward(self, x: Tensor) -> Tensor:
        """Normalize by the statistics of all processes in training, and by the running ones in evaluation."""
        if not self.training:
            return super().forward(x)
        self._check_input_dim(x)  # type: ignore[no-untyped-call]
        count = x.numel() // x.shape[1] * self.world
        if count <= 1:
            raise ValueError(f"expected more than one value per channel in training, got input {tuple(x.shape)}")
        with torch.no_grad():
            mean, var = _batch_moments(x, self.sum_, self.world)
            self._track(mean, var * (count / (count - 1)))
        out: Tensor = _Normalize.apply(x, self.weight, self.bias, mean, var, self.eps, self.sum_, count)  # type: ignore[no-untyped-call]
        return out

    def _track(self, mean: Tensor, var: Tensor) -> None:
        """Update the running statistics."""
        if self.running_mean is None or self.running_var is None:
            return
        momentum: float | Tensor = 0.0 if self.momentum is None else self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                momentum = 1.0 / self.num_batches_tracked.to(self.running_mean)
        for running, fresh in ((self.running_mean, mean), (self.running_var, var)):
            running.copy_((1 - momentum) * running + momentum * fresh)


@cache
def _synced_class(kind: type[_BatchNorm]) -> type[SyncedBatchNorm]:
    # Not compiled, because the sum waits for other processes. `disable` loads the compiler, which takes over a second,
    # so it is called here and not when this file is imported.
    members = {"forward": torch.compiler.disable(SyncedBatchNorm.forward)}
    return cast(type[SyncedBatchNorm], type(f"SyncedBatchNorm{kind.__name__}", (SyncedBatchNorm, kind), members))


def _batch_moments(x: Tensor, sum_: Sum, world: int) -> tuple[Tensor, Tensor]:
    """Return mean and variance per channel over all processes, from E x and E x² in float64 to avoid cancellation."""
    wide = x if x.dtype == torch.float64 else x.float()
    var, mean = (moment.double() for moment in torch.var_mean(wide, _all_but_channels(x), correction=0))
    both = torch.stack((mean, var + mean.square()))
    sum_(both)
    mean, square = (both / world).unbind()
    return mean.to(wide.dtype), (square - mean.square()).clamp(min=0).to(wide.dtype)


class _Normalize(torch.autograd.Function):
    """y = w x̂ + b with x̂ = (x - μ)/σ, where μ and σ depend on the batches of all processes.

    ∂L/∂x = w/σ · (g - Σg/n - x̂ · Σ(g·x̂)/n) with the sums over all n values of a channel in all processes. The
    gradients of w and b are of this process only; the training step averages them over processes.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        var: Tensor,
        eps: float,
        sum_: Sum,
        count: int,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, mean, torch.rsqrt(var + eps))
        ctx.sum_, ctx.count, ctx.biased = sum_, count, bias is not None
        return F.batch_norm(x, mean, var, weight, bias, training=False, eps=eps)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (g,) = gradients
        x, weight, mean, inverse = ctx.saved_tensors
        shape = (1, -1) + (1,) * (x.dim() - 2)
        normal = (x - mean.view(shape)) * inverse.view(shape)
        g = g.to(normal.dtype)
        of_bias, of_weight = g.sum(_all_but_channels(x)), (g * normal).sum(_all_but_channels(x))
        both = torch.stack((of_bias, of_weight))
        ctx.sum_(both)
        shift, tilt = (both / ctx.count).unbind()
        scale = inverse if weight is None else weight * inverse
        of_x = (g - shift.view(shape) - normal * tilt.view(shape)) * scale.view(shape)
        affine = (None if weight is None else of_weight, of_bias if ctx.biased else None)
        return (of_x.to(x.dtype), *affine, None, None, None, None, None)


def _all_but_channels(x: Tensor) -> list[int]:
    """Return all dimensions except that of the channels."""
    return [d for d in range(x.dim()) if d != 1]


def untrained_norms(model: nn.Module) -> list[str]:
    """Return the batch norms in evaluation mode that never saw a batch: with mean 0 and variance 1 they do nothing."""

    def untrained(norm: nn.Module) -> bool:
        counted, mean = getattr(norm, "num_batches_tracked", None), getattr(norm, "running_mean", None)
        if norm.training or not isinstance(norm, _BatchNorm) or counted is None or mean is None or mean.is_meta:
            return False
        return not bool(counted) and not bool(mean.any()) and bool(torch.all(cast(Tensor, norm.running_var) == 1))

    return [name for name, module in model.named_modules() if untrained(module)]
