"""Small networks with normalizers, to be converted."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    """x + W2 ReLU(norm(W1 norm(x)))."""

    def __init__(self, width: int = 8, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.norm1, self.norm2 = norm(width), norm(2 * width)
        self.first, self.second = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.relu(self.norm2(self.first(self.norm1(x)))))


def network(blocks: int = 3, block: type[nn.Module] = Block) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), *[block() for _ in range(blocks)], nn.LayerNorm(8), nn.Linear(8, 4))


def perturb_(model: nn.Module) -> None:
    with torch.no_grad():
        for p in (p for p in model.parameters() if p.requires_grad):
            p.add_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))


class Language(nn.Module):
    """A model whose last layer is its embedding, used as a function."""

    def __init__(self, *, matmul: bool) -> None:
        super().__init__()
        self.words, self.blocks = nn.Embedding(30, 8), nn.Sequential(Block(), Block())
        self.matmul = matmul

    def forward(self, ids: Tensor) -> Tensor:
        x = self.blocks(self.words(ids))
        return x @ self.words.weight.T if self.matmul else F.linear(x, self.words.weight)
