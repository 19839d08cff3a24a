"""A forward pass reveals normalization outside of known normalizers."""

from copy import deepcopy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normed_blocks import Block, X, network
from normfree.conversion import convert, load_converted, save_converted


class Unit(nn.Module):
    """Divides by the length of its input in its own code."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.first(F.normalize(x, dim=-1))


class OwnNorm(Unit):
    """Normalizes without any name for it."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.first((x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True))


def test_normalization_that_stays_is_noted() -> None:
    _, plan = convert(network(1, Unit), "fixup", X)
    assert plan.changes.notes == ("the signal is still divided by its length (normalize) in '1'",)
    _, plan = convert(network(1, OwnNorm)[:2], "fixup", X)
    assert [note for note in plan.changes.notes if "normalizer" in note] == []  # one note says it
    assert "still divided by its own scale in the code of '1'" in plan.changes.notes[0]
    _, plan = convert(network(1)[:1], "wn", X)
    assert any("no normalizer was found: none was removed" in note for note in plan.changes.notes)


class Whiten(nn.Module):
    """Somebody's own normalizer, whose class does not say so."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((width,), 0.7))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-5)


class OverBatch(Whiten):
    """Normalizes by the batch in training, and by stored statistics in evaluation."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("seen", torch.full((width,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen = x.std(0)
        return self.scale * x / self.seen


class Rms(Whiten):
    """Normalizes, without a weight."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class UnitLength(nn.Module):
    """Divides by the length, as a cosine similarity needs it."""

    def __init__(self, width: int) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return 0.1 * x / x.norm(dim=-1, keepdim=True)


class Signs(UnitLength):
    """Returns signs, as a binary network does."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sign() + 0 * x


class Swish(Whiten):
    """An activation with a parameter per channel."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.scale * x)


class Shift(Whiten):
    """Puts out the same whatever comes in."""

    def forward(self, x: Tensor) -> Tensor:
        return self.scale.expand_as(x)


class Halves(Whiten):
    """Passes on half of the signal."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 0.5


class Scales(Whiten):
    """Multiplies by a number that it must be given by name."""

    def forward(self, x: Tensor, *, by: float) -> Tensor:
        return x * by


@pytest.mark.parametrize(
    ("kind", "noted"), [(UnitLength, True), (Signs, True), (Swish, False), (Shift, False), (Halves, False)]
)
def test_own_normalizer_that_stays_is_noted(kind: type[nn.Module], noted: bool) -> None:
    model = network(2)
    model[2].norm1 = kind(8)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    _, plan = convert(model, "fixup", X)
    says = f"left in place, though it behaves like a normalizer: '2.norm1' ({kind.__name__}); "
    assert any(note.startswith(says) for note in plan.changes.notes) is noted
    assert not any("divided by" in note for note in plan.changes.notes)  # one note says it
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("method", ["fixup", "nf", "dyt"])
@pytest.mark.parametrize("kind", [Whiten, OverBatch, Rms])
def test_own_normalizer_is_found_by_what_it_does(kind: type[nn.Module], method: str, tmp_path: Path) -> None:
    model = network(2)
    model[2].norm1 = kind(8)
    named = network(2)
    named[2].norm1 = type("MyRMSNorm", (kind,), {})(8)
    converted, plan = convert(model, method, X, generator=torch.Generator().manual_seed(0))
    control, other = convert(named, method, X, generator=torch.Generator().manual_seed(0))
    assert type(converted[2].norm1) is type(control[2].norm1)
    says = f"taken for normalizers by what they do: '2.norm1' ({kind.__name__})"
    assert plan.changes.notes == (says, *other.changes.notes)
    save_converted(tmp_path, converted, plan)
    loaded, _ = load_converted(tmp_path, lambda: deepcopy(model))
    assert torch.equal(loaded.eval()(X), converted.eval()(X))


def test_module_that_cannot_be_tried_alone_does_not_stop_a_conversion() -> None:
    """As a rotary embedding, which the model calls with more than its first argument."""

    class Named(Block):
        def __init__(self) -> None:
            super().__init__()
            self.norm1 = Scales(8)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.second(F.relu(self.norm2(self.first(self.norm1(x, by=0.5)))))

    _, plan = convert(network(2, Named), "fixup", X)
    assert plan.changes.notes == ()
