"""Discovery leaves no trace in a model or around it."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from normfree import discover
from normfree.diagnostics.propagation import propagate

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


class Keeping(Block):
    """Makes a table at its first pass, and keeps its input in every way there is."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []
        self.cache: dict[str, Tensor] = {}
        self.passes = 0

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "table"):
            self.table = torch.ones(16, device=x.device)
            self.register_buffer("mask", torch.ones_like(x))
            self.late = nn.Linear(16, 16, device=x.device)
        self.seen.append(x)
        self.cache["x"] = self.last = x
        self.passes += 1
        return super().forward(self.late(x) * self.table * self.mask)


def held(module: nn.Module) -> dict[str, tuple[int, int]]:
    """Which object every attribute is, and how many entries it has."""
    return {n: (id(v), len(v) if isinstance(v, dict | list) else 0) for n, v in vars(module).items()}


def test_attributes_that_a_forward_pass_assigns_are_removed() -> None:
    model = nn.Sequential(nn.Linear(16, 16), Keeping(), nn.Linear(16, 4))
    keeping = model[1]
    before = held(keeping)
    assert len(discover(model, X).branches) == 1
    assert held(keeping) == before
    assert keeping.passes == 0
    assert model(X).isfinite().all()
    assert keeping.passes == len(keeping.seen) == 1  # control: a plain pass keeps what it makes


def test_forward_pass_that_fails_leaves_nothing_either() -> None:
    class Failing(Keeping):
        def forward(self, x: Tensor) -> Tensor:
            super().forward(x)
            raise RuntimeError("after all that")

    model = Failing()
    with pytest.raises(ValueError, match="after all that"):
        discover(model, X)
    assert not hasattr(model, "table")
    assert not model.seen
    assert "late" not in dict(model.named_children())


class Drawing(Block):
    """Draws from every global generator of the host; with `looks`, also at a value of the signal."""

    looks = False

    def forward(self, x: Tensor) -> Tensor:
        if self.looks:
            x.sum().item()
        return super().forward(x * (torch.rand(1).item() + random.random() + np.random.rand() + 1))


def random_states() -> tuple[Any, ...]:
    keys, place = np.random.get_state()[1:3]
    return torch.get_rng_state().tolist(), random.getstate(), (keys.tolist(), place)


@pytest.mark.parametrize("looks", [False, True])
def test_random_numbers_that_a_model_draws_are_not_spent(looks: bool) -> None:
    model = Drawing()
    model.looks = looks
    before = random_states()
    discover(model, X)
    assert random_states() == before
    propagate(model, X)
    assert random_states() == before
    model(X)  # control: a plain pass draws from all three
    assert all(now != old for now, old in zip(random_states(), before, strict=True))
