"""Dynamic tanh, which stands where a normalizer stood and takes no statistics."""

from __future__ import annotations

import torch
from torch import Tensor, nn


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
