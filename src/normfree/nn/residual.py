"""`Residual`, the one residual module: every residual rule of the papers is a setting of its equation."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normfree.nn.attention import TokenEmbedding
from normfree.nn.normalizers import DynamicTanh
from normfree.nn.scalars import ScalarBias, ScalarMultiplier
from normfree.nn.weight_layers import WEIGHT_LAYERS, weight_kind

NEUTRAL = {"c": 1.0, "a": 1.0, "alpha": 1.0, "beta": 1.0, "delta": 0.0}
"""The scalars of the equation, each with its neutral value."""


class Residual(nn.Module):
    """One residual sum, p(c · (a · h(s) + β · f(e(α · x)) + δ)), where the shortcut h reads s: x or e(α · x).

    A scalar that is None is neutral and costs nothing; a branch that is None adds nothing.

    Shapes: x is (N, C, …) or (N, T, C); branch and shortcut have the same output shape.

    The sum keeps the dtype of its operands unless `stream_dtype` is set; see `set_precision_`. With `beta_in_weight`, β
    is already in the weight of the branch's last layer; see `normfree.nn.training_scalar_folding`.

    Args:
        branch: f.
        shortcut: h; the default is the identity.
        entry: e, the module before the branch: the pre-activation, or Fixup's first bias.
        exit: p, the module after the sum: an activation or a normalizer.
        c, a, alpha, beta, delta: The scalars.
        shortcut_reads_entry: Whether the shortcut reads s = e(α · x) instead of s = x.
        transition: Whether the block changes the shape.
    """

    stream_dtype: torch.dtype | None = None
    branch_dtype: torch.dtype | None = None
    beta_in_weight: bool = False

    def __init__(
        self,
        branch: nn.Module | None,
        shortcut: nn.Module | None = None,
        *,
        entry: nn.Module | None = None,
        exit: nn.Module | None = None,
        c: ScalarMultiplier | None = None,
        a: ScalarMultiplier | None = None,
        alpha: ScalarMultiplier | None = None,
        beta: ScalarMultiplier | None = None,
        delta: ScalarBias | None = None,
        shortcut_reads_entry: bool = False,
        transition: bool = False,
    ) -> None:
        super().__init__()
        self.alpha = alpha or nn.Identity()
        self.entry = entry or nn.Identity()
        self.shortcut = shortcut or nn.Identity()
        self.a = a or nn.Identity()
        self.branch = branch
        self.beta = beta or nn.Identity()
        self.delta = delta or nn.Identity()
        self.c = c or nn.Identity()
        self.exit = exit or nn.Identity()
        self.shortcut_reads_entry = shortcut_reads_entry
        self.transition = transition
        self._shortcut_has_weights = any(True for _ in self.shortcut.parameters())

    def forward(self, x: Tensor, *context: Any) -> Tensor:
        """Return the sum; `context` is passed to the branch (a memory, masks, a cache)."""
        # Round before the entry: this halves the memory kept for the backward pass. If the shortcut reads the entry,
        # round after it, because the shortcut belongs to the full-precision stream.
        early = self.branch_dtype is not None and not self.shortcut_reads_entry
        entered = self.entry(self.alpha(x.to(self.branch_dtype) if early else x))
        source = entered if self.shortcut_reads_entry else x
        if self.branch_dtype is not None:
            entered = entered.to(self.branch_dtype)
            source = source.to(self.branch_dtype) if self._shortcut_has_weights else source
            context = tuple(_cast_signal(part, self.branch_dtype) for part in context)
        total = self.a(self.shortcut(source))
        if self.stream_dtype is not None:
            total = total.to(self.stream_dtype)
        if self.branch is not None:
            branch = self.branch(entered, *context)
            total = total + (branch if self.beta_in_weight else self.beta(branch))
        out: Tensor = self.exit(self.c(self.delta(total)))
        return out

    def set_scalars_(self, values: dict[str, float]) -> None:
        """Set the scalars of the equation by name (c, a, alpha, beta, delta).

        Raises:
            ValueError: If a name is unknown, or if the block has no module for a value that is not neutral. No scalar
                is then changed.
        """
        modules = {name: getattr(self, name) for name in NEUTRAL}
        for name, value in values.items():
            if name not in modules:
                raise ValueError(f"expected a scalar of the equation, got '{name}'; use one of {', '.join(modules)}")
            if not isinstance(modules[name], ScalarBias | ScalarMultiplier) and value != NEUTRAL[name]:
                raise ValueError(
                    f"expected a scalar '{name}' to hold {value:g}, got {type(modules[name]).__name__}; "
                    f"build the block with {name}="
                )
        for name, value in values.items():
            if isinstance(modules[name], ScalarBias | ScalarMultiplier):
                modules[name].set_(value)

    def extra_repr(self) -> str:
        """Return the block's settings."""
        return f"shortcut_reads_entry={self.shortcut_reads_entry}, transition={self.transition}"


def _cast_signal(part: Any, dtype: torch.dtype) -> Any:
    """Convert a floating-point tensor; masks, caches and None stay unchanged."""
    return part.to(dtype) if isinstance(part, Tensor) and part.is_floating_point() else part


class SubsamplePad(nn.Module):
    """The shortcut without weights: every stride-th pixel, with zeros for the missing channels.

    Reference: fixup, CIFAR models; He 2016, section 4.2, option A.

    Shapes: (N, in_channels, H, W) → (N, out_channels, ⌈H/stride⌉, ⌈W/stride⌉).
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int = 1) -> None:
        super().__init__()
        if out_channels < in_channels:
            raise ValueError(
                f"expected at least as many output as input channels, got {in_channels} → {out_channels}; "
                "use a convolution to reduce channels"
            )
        self.stride = stride
        self.missing = out_channels - in_channels

    def forward(self, x: Tensor) -> Tensor:
        """Subsample, then append zero channels."""
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.missing))

    def extra_repr(self) -> str:
        """Return the stride and the number of added channels."""
        return f"stride={self.stride}, zero_channels={self.missing}"


def set_precision_(
    model: nn.Module, *, stream: torch.dtype | None = torch.float32, branch: torch.dtype | None = torch.bfloat16
) -> nn.Module:
    """Keep the residual stream of every `Residual` in one dtype while the branches run in another, in place.

    Thousands of small additions lose their low bits in a bf16 stream.

    Args:
        model: The model.
        stream: The dtype of the residual stream; None keeps the dtype of the operands.
        branch: The dtype of the weight layers of branches and shortcuts, and of their inputs. None changes no weights;
            use it under autocast.

    Returns:
        The model.
    """
    for module in model.modules():
        if isinstance(module, Residual):
            module.stream_dtype = stream
            module.branch_dtype = branch
            if branch is not None:
                # An entry that only the branch reads runs in the branch's dtype, including its normalizer.
                for part in (module.branch, module.shortcut, None if module.shortcut_reads_entry else module.entry):
                    if part is not None:
                        lower_precision_(part, branch)
    return model


def lower_precision_(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Let the weight layers inside `module` compute in `dtype`, in place.

    Converts the parameters of plain weight layers, `TokenEmbedding`, layer, group and RMS norm, and dynamic tanh. Of a
    reparametrized layer only the bias is converted; its effective weight is rounded at every use. Batch norm, instance
    norm and scalars keep their dtype, because half precision is too coarse for statistics and scalars.
    """
    for layer in module.modules():
        if isinstance(layer, WEIGHT_LAYERS):
            if weight_kind(layer) == "plain":
                for parameter in layer._parameters.values():  # `layer.to` takes seconds for thousands of layers
                    if parameter is not None:
                        parameter.data = parameter.data.to(dtype)
            elif layer.bias is not None:
                layer.bias.data = layer.bias.data.to(dtype)
        elif isinstance(layer, TokenEmbedding | nn.GroupNorm | nn.LayerNorm | nn.RMSNorm | DynamicTanh):
            layer.to(dtype)  # torch requires their weights in the dtype of their input; they hold no statistics
    return module


def reset_precision_(model: nn.Module) -> nn.Module:
    """Clear the dtypes that `set_precision_` set, and mark all scalars as not folded, in place.

    The weights keep their dtype; `MasterWeights.release_` restores float32.
    """
    for module in model.modules():
        if isinstance(module, Residual):
            module.stream_dtype = module.branch_dtype = None
            module.beta_in_weight = False
        elif isinstance(module, ScalarBias):
            module.folded, module.moved = False, None
    return model
