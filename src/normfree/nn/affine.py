"""One factor and one summand a channel: what is left of a batch norm whose statistics no longer change."""

from __future__ import annotations

import torch
from torch import Tensor, nn


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
