"""Batch norm over several processes, each with an equal part of the batch.

The caller passes the function that sums a tensor over processes, so this file does not depend on how they communicate.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

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
