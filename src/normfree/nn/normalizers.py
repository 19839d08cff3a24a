"""Normalizers by name, their replacements (dynamic tanh, affine), and activations with normalization built in.

Reference: normdead, section 2.3 and Figure 2.
"""

from __future__ import annotations

import re
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
    if tokens:
        return _token_normalizer(name, channels)
    match name:
        case "batch":
            return nn.BatchNorm2d(channels) if spatial else nn.BatchNorm1d(channels)
        case "layer":
            return nn.GroupNorm(1, channels)
        case "group":
            groups = max(g for g in range(1, 33) if channels % g == 0 and (g == 1 or channels // g >= 4))
            return nn.GroupNorm(groups, channels)
        case "tanh":
            return DynamicTanh(channels, dim=1)
        case "instance" if spatial:
            return nn.InstanceNorm2d(channels, affine=True)
        case "instance":
            raise ValueError(
                "instance norm expects images (N, C, H, W), got vectors (N, C), which it would set to zero; "
                "use layer or group norm"
            )
        case "rms":
            raise ValueError("RMS norm expects tokens (N, T, C), got images or vectors; use layer or group norm")
    raise ValueError(f"expected a normalizer, got '{name}'; use one of batch, layer, group, instance, tanh")


def _token_normalizer(name: NormName, channels: int) -> nn.Module:
    match name:
        case "layer":
            return nn.LayerNorm(channels)
        case "rms":
            return nn.RMSNorm(channels)
        case "tanh":
            return DynamicTanh(channels)
    raise ValueError(
        f"expected a normalizer of tokens, got '{name}', which mixes positions; use one of layer, rms, tanh"
    )


class DynamicTanh(OneElementScalars):
    """γ · tanh(α · x) + β with a learnable scalar α and learnable γ, β per channel.

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
