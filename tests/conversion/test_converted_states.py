"""What a conversion leaves behind: no stale caches, no trainable parts of a frozen module, no gates that are off."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normfree as nf
from normed_blocks import Block, X, network
from remedies import named_methods

D = X.shape[1]
IMAGES = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


class Cached(Block):
    """Keeps a table that it computes from a parameter in evaluation mode, as an attention keeps its biases."""

    def __init__(self, by: str) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(D))
        self.by, self.cache, self.tables = by, None, {}

    def biases(self) -> Tensor:
        if self.training:
            return self.table.exp()
        if self.by == "attribute":
            self.cache = self.table.exp() if self.cache is None else self.cache
            return self.cache
        return self.tables.setdefault("exp", self.table.exp())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.relu(self.norm2(self.first(self.norm1(x) * self.biases()))))


@pytest.mark.parametrize("method", ["fixup", "nf", "dyt"])
@pytest.mark.parametrize("by", ["attribute", "dictionary"])
def test_what_a_model_caches_in_the_check_is_forgotten(by: str, method: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, D), Cached(by), Cached(by), nn.Linear(D, 4))
    converted, plan = nf.convert(model, method, X, generator=seeded())
    assert [block.cache for block in converted[1:3]] == [None, None]
    assert [block.tables for block in converted[1:3]] == [{}, {}]
    assert not any("does not reach" in note for note in plan.changes.notes)
    control = converted.eval()
    control(X)  # outside of a conversion, the model caches
    assert control[1].cache is not None or control[1].tables


class Target(nn.Module):
    """A network and a frozen copy of it that is never trained, as in BYOL."""

    def __init__(self, norm: type[nn.Module] = nn.BatchNorm1d) -> None:
        super().__init__()
        self.online, self.target = (
            nn.Sequential(nn.Linear(D, D), norm(D), nn.ReLU(), nn.Linear(D, D)) for _ in range(2)
        )
        self.target.requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.online(x), self.target(x).detach()


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.LayerNorm, nn.RMSNorm])
def test_frozen_normalizer_becomes_a_frozen_dynamic_tanh(norm: type[nn.Module]) -> None:
    torch.manual_seed(0)
    converted, _ = nf.convert(Target(norm), "dyt", X, generator=seeded())
    assert not any(p.requires_grad for p in converted.target.parameters())
    assert all(p.requires_grad for p in converted.online.parameters())
    assert {name for name, _ in converted.target[1].named_parameters()} == {"alpha", "weight", "bias"}


def test_normalizer_without_parameters_becomes_a_trainable_dynamic_tanh() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D, affine=False), nn.ReLU(), nn.Linear(D, 4))
    converted, _ = nf.convert(model, "dyt", X, generator=seeded())
    assert all(p.requires_grad for p in converted[1].parameters())


@pytest.mark.parametrize("dim", [0, None])
def test_weight_norm_of_torch_may_be_zero_and_learns(dim: int | None) -> None:
    model = network()
    for block in model[1:4]:
        nn.utils.parametrizations.weight_norm(block.second, dim=dim)
    converted, _ = nf.convert(model, "fixup", X, generator=seeded())
    last = converted[1].second
    assert not last.weight.any()
    directions = last.parametrizations.weight.original1
    assert directions.isfinite().all()
    assert directions.any()
    optimizer = torch.optim.AdamW(converted.parameters(), lr=1e-3)
    start = {name: p.detach().clone() for name, p in converted.named_parameters()}
    for _ in range(5):
        optimizer.zero_grad()
        F.cross_entropy(converted(X), torch.arange(len(X)) % 4).backward()
        optimizer.step()
    assert all(p.isfinite().all() for p in converted.parameters())
    assert [name for name, p in converted.named_parameters() if torch.equal(p, start[name])] == []


def test_methods_that_a_refusal_names_set_weight_norm_of_torch_to_zero() -> None:
    model = network()
    nn.utils.parametrizations.weight_norm(model[2].second)
    with pytest.raises(ValueError, match=r"'2.second.weight' cannot become a standardized layer") as caught:
        nf.convert(model, "nf", X)
    named = named_methods(str(caught.value))
    assert named is not None
    assert "fixup" in named
    for method in named:
        nf.convert(model, method, X, generator=seeded())


class Squeezed(nn.Module):
    """x + f(x) · gate(f(x)), a squeeze and excitation with few units after a ReLU."""

    def __init__(self, units: int, act: type[nn.Module] = nn.ReLU) -> None:
        super().__init__()
        self.f = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1))
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, units, 1), act(), nn.Conv2d(units, 8, 1), nn.Sigmoid()
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.f(x)
        return x + y * self.gate(y)


def squeezed(units: int) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [Squeezed(units) for _ in range(4)]
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))


@pytest.mark.parametrize("method", ["nf", "wn"])
def test_gates_of_few_units_are_on_for_some_sample(method: str) -> None:
    """With two units, a quarter of all draws would be off for all samples: all of 16 are on by chance in 1 %."""
    model = squeezed(2)
    for seed in range(4):
        converted, _ = nf.convert(model, method, IMAGES, generator=torch.Generator().manual_seed(seed))
        x = converted[0](IMAGES)
        for block in converted[1:5]:
            assert block.gate[:3](block.f(x)).any()
            x = block(x)


@pytest.mark.parametrize("method", ["skipinit", "rezero", "fixup"])
def test_gates_behind_zeros_are_not_refused_for_a_sign_that_is_not_known_yet(method: str) -> None:
    model = squeezed(2)
    for seed in range(8):
        nf.convert(model, method, IMAGES, generator=torch.Generator().manual_seed(seed))


class Halted(nn.Module):
    """A branch that returns nothing but zeros if its input is not standardized."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(D), nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        off = (y.mean(-1, keepdim=True).abs() > 0.02) | (y.std(-1, keepdim=True) > 1.2)
        return x + self.second(self.first(y) * (~off))


def test_refusal_of_a_branch_without_gradient_tries_another_method() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, D), Halted(), nn.Linear(D, 4))
    with pytest.raises(ValueError, match=r"'1.first.weight' .*would never learn: it had a gradient") as caught:
        nf.convert(model, "nf", X + 0.5, generator=seeded())
    text = str(caught.value)
    assert text.count("not tried") == 1
    for method in named_methods(text) or ():
        nf.convert(model, method, X + 0.5, generator=seeded())
    assert "'fixup'" not in text.rpartition("; ")[2]  # it is the one that was tried
