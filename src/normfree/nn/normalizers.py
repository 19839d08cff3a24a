"""The normalizers of the survey by name: of activations, and built into the activation function.

Reference: normdead, section 2.3 and Figure 2.
"""

from __future__ import annotations

import re
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
FUSED = ("drop", "act")  # what timm builds into a normalizer, in the order it runs


def is_norm(module: nn.Module) -> bool:
    """Whether a module normalizes what passes through it.

    By type for torch's own; by the name of the class for others (`LlamaRMSNorm`, `T5LayerNorm`, `FrozenBatchNorm2d`),
    if their parameters are one-dimensional and they hold nothing but an activation or a dropout.
    """
    if isinstance(module, NORM_TYPES):
        return True
    if isinstance(module, WEIGHT_LAYERS) or not _NORM_NAME.search(type(module).__name__):
        return False
    inside = {name for name, _ in module.named_children()}
    return inside <= set(FUSED) and all(p.dim() <= 1 for p in module.parameters(recurse=False))


def normalizer(name: NormName, channels: int, *, spatial: bool = True, tokens: bool = False) -> nn.Module:
    """The activation normalizer `name` over (N, channels, H, W) when `spatial`, else over (N, channels).

    Of `tokens`, (N, T, channels), each position is normalized alone: by layer norm, RMS norm or dynamic tanh.

    Group norm takes the most groups, at most 32, that leave at least four channels a group; layer norm of images is
    group norm with one group, so that all but instance norm work in both cases. `tanh` is dynamic tanh, which takes no
    statistics.
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
                "instance norm expects images (N, C, H, W), got vectors (N, C), of which it would leave only zeros; "
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


class DynamicTanh(nn.Module):
    """γ · tanh(α · x) + β with one learnable α, and γ, β a channel.

    `dim` is the dimension of the channels: 1 for images (N, C, H, W), -1 for tokens (N, T, C). With `alpha` 0.5 at the
    start, as the paper has it.

    Reference: Zhu, Chen, He, LeCun & Liu 2025, "Transformers without Normalization", section 4.

    >>> DynamicTanh(3)(torch.zeros(2, 3)).shape
    torch.Size([2, 3])
    """

    def __init__(self, channels: int, *, alpha: float = 0.5, dim: int = -1) -> None:
        super().__init__()
        self.start = alpha
        self.dim = dim
        self.alpha = nn.Parameter(torch.tensor(alpha))
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Write the initial values."""
        self.alpha.fill_(self.start)
        self.weight.fill_(1.0)
        self.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """Squash and stretch."""
        shape = [1] * x.dim()
        shape[self.dim] = -1
        return torch.tanh(self.alpha * x) * self.weight.view(shape) + self.bias.view(shape)

    def extra_repr(self) -> str:
        """The number of channels and where they are."""
        return f"{self.weight.numel()}, alpha={self.start:g}, dim={self.dim}"


class ChannelAffine(nn.Module):
    """w · x + b with one w and one b a channel, both learnable.

    Shapes: (N, C, …) → the same.

    >>> ChannelAffine(torch.tensor([1.0, 2.0]), torch.tensor([0.0, 1.0]))(torch.ones(1, 2))
    tensor([[1., 3.]], grad_fn=<AddcmulBackward0>)
    """

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        if weight.dim() != 1 or weight.shape != bias.shape:
            raise ValueError(
                f"expected one factor and one summand a channel, got shapes {tuple(weight.shape)} and "
                f"{tuple(bias.shape)}; pass two vectors of one length"
            )
        self.weight = nn.Parameter(weight.detach().clone())
        self.bias = nn.Parameter(bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        """Scale and shift every channel."""
        shape = (-1,) + (1,) * (x.dim() - 2)
        return torch.addcmul(self.bias.to(x.dtype).view(shape), x, self.weight.to(x.dtype).view(shape))

    def extra_repr(self) -> str:
        """The number of channels."""
        return str(self.weight.numel())


class NormPropReLU(nn.Module):
    """ReLU shifted and scaled to zero mean and unit variance for N(0, 1) input: (ReLU(x) - √(1/2π)) / √(½(1 - 1/π)).

    Reference: normdead, section 2.3; Arpit 2016, section 3.3 (normalization propagation).
    """

    mean, std = normprop_constants()

    def forward(self, x: Tensor) -> Tensor:
        """Rectify, centre and scale."""
        return (F.relu(x) - self.mean) / self.std


class SELU(nn.Module):
    """SELU, with alpha dropout after it when `dropout` is positive: mean and variance survive both.

    Reference: normdead, section 2.3; Klambauer 2017.
    """

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"expected a dropout probability in [0, 1), got {dropout}; 0 turns it off")
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        """Activate, then drop out in training mode."""
        return F.alpha_dropout(torch.selu(x), self.dropout, self.training)

    def extra_repr(self) -> str:
        """The dropout probability."""
        return f"dropout={self.dropout}"


ACTIVATION_TYPES = (nn.ReLU, NormPropReLU, SELU, nn.GELU, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.Tanh, nn.Sigmoid, nn.SELU)


def activation(name: ActivationName, *, dropout: float = 0.0) -> nn.Module:
    """The activation function `name`; `dropout` is alpha dropout and goes with selu only."""
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
