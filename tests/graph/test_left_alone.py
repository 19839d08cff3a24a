"""What discovery leaves behind in a model and around it: nothing."""

import torch
from torch import Tensor, nn

from normfree import discover

X = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    def __init__(self, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.norm = norm or nn.BatchNorm1d(16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def state(model: nn.Module) -> list[tuple[str, Tensor, Tensor]]:
    """Every parameter and buffer under each of its names: the tensor itself, and its values."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return [(name, t, t.detach().clone()) for name, t in named]


def unchanged(model: nn.Module, before: list[tuple[str, Tensor, Tensor]]) -> bool:
    now = state(model)
    return [(n, id(t)) for n, t, _ in now] == [(n, id(t)) for n, t, _ in before] and all(
        torch.equal(value, old) for (_, _, value), (_, _, old) in zip(now, before, strict=True)
    )


def test_module_with_several_names_keeps_its_tensors() -> None:
    block = Block()
    model = nn.Sequential(nn.Linear(16, 16), *[block] * 4, nn.Linear(16, 4))
    before = state(model)
    assert len(discover(model, X).branches) == 4
    assert unchanged(model, before)
    model(X)  # control: a plain pass moves the statistics
    assert not unchanged(model, before)


def test_normalizer_that_blocks_share_keeps_its_tensors() -> None:
    norm = nn.LayerNorm(16)
    model = nn.Sequential(Block(norm), Block(norm), nn.Linear(16, 4))
    before = state(model)
    assert len(discover(model, X).branches) == 2
    assert unchanged(model, before)


def test_tensor_with_several_names_keeps_them() -> None:
    model = nn.Sequential(nn.Linear(16, 16), Block(), nn.Linear(16, 16))
    model[2].weight = model[0].weight
    before = state(model)
    discover(model, X)
    assert unchanged(model, before)
    assert model[2].weight is model[0].weight
