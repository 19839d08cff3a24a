"""Further passes tell a design, such as a branch that starts at 0, from a fault."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import normfree as nf


class WithText(nn.Module):
    """A network over images and a text; the text enters in a branch, or its layers are called in vain."""

    def __init__(self, *, zero: bool, reads: bool) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(8, 32), nn.Sequential(nn.Linear(6, 32), nn.ReLU())
        self.mix = nn.Linear(32, 32)
        self.blocks = nn.ModuleList(nn.Sequential(nn.ReLU(), nn.Linear(32, 32)) for _ in range(3))
        self.head, self.reads = nn.Linear(32, 5), reads
        if zero:
            nn.init.zeros_(self.mix.weight)

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        x: Tensor = self.image(image)
        read = self.mix(self.text(text))
        x = x + (read if self.reads else 0 * read)
        for block in self.blocks:
            x = x + 0.5 * block(x)
        found: Tensor = self.head(x)
        return found


def findings(model: nn.Module) -> str:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(16, 8, generator=generator), torch.randn(16, 6, generator=generator)
    return str(nf.diagnose(model, inputs, torch.arange(16) % 5))


@pytest.mark.parametrize("zero", [False, True])
def test_input_of_a_branch_that_starts_at_zero_is_not_ignored(zero: bool) -> None:
    torch.manual_seed(0)
    found = findings(WithText(zero=zero, reads=True))
    assert "ignored" not in found
    assert "never used" not in found


@pytest.mark.parametrize("zero", [False, True])
def test_input_that_is_dropped_is_found_also_behind_a_layer_of_zeros(zero: bool) -> None:
    torch.manual_seed(0)
    found = findings(WithText(zero=zero, reads=False))
    assert ("vanishing: zero weights at mix" if zero else "faulty: input ignored") in found


class AsksForInputGradient(nn.Module):
    """As wav2vec 2.0: in training, the model asks for the gradient of a view of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 5))

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None]
        x.requires_grad = True
        found: Tensor = self.layers(x)[:, 0]
        return found


def test_model_that_asks_for_the_gradient_of_its_input_is_diagnosed() -> None:
    torch.manual_seed(0)
    assert "verdict" in str(nf.diagnose(AsksForInputGradient(), torch.randn(16, 8), torch.arange(16) % 5))


class ReturnsItsLoss(nn.Module):
    """As detectors in training: the output is one number; a layer of 1e4 makes the signal a fault."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(6)))
        nn.init.normal_(self.layers[3][0].weight, std=1e4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.layers(x).square().mean()}


def test_faulty_model_that_returns_one_number_is_diagnosed() -> None:
    torch.manual_seed(0)
    assert "layers.3" in str(nf.diagnose(ReturnsItsLoss(), torch.randn(16, 16)))


WRAPPINGS = {
    "plain": lambda out: out,
    "nested": lambda out: {"scores": [out[:, :3], out[:, 3:]]},
    "deep": lambda out: [{"a": (out,)}, {"n": 1}],
    "number": lambda out: {"losses": {"main": out.square().mean()}},
}


LARGE = 1e5


class Wrapped(nn.Module):
    """Five blocks behind a stem, and an output in some wrapping."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.stem, self.head, self.kind = nn.Linear(8, 16), nn.Linear(16, 5), kind
        self.blocks = nn.ModuleList(nn.Sequential(nn.ReLU(), nn.Linear(16, 16)) for _ in range(5))

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        for block in self.blocks:
            x = x + 0.3 * block(x)
        return WRAPPINGS[self.kind](self.head(x))


@pytest.mark.parametrize("kind", WRAPPINGS)
@pytest.mark.parametrize(
    ("layer", "weight", "says"),
    [
        ("stem", 0.0, "vanishing"),
        ("head", 0.0, ""),
        ("blocks.2.1", LARGE, "exploding"),
        ("blocks.2.1", math.nan, "exploding: weight not finite at blocks.2.1"),
        ("blocks.2.1", None, "preserved"),
    ],
)
@pytest.mark.parametrize("given", [True, False])
def test_fault_is_located_whatever_holds_the_output(
    kind: str, layer: str, weight: float | None, says: str, given: bool
) -> None:
    torch.manual_seed(0)
    model = Wrapped(kind)
    if weight is not None:
        module = model.get_submodule(layer)
        assert isinstance(module, nn.Linear)
        if weight == LARGE:
            nn.init.normal_(module.weight, std=weight)
        else:
            nn.init.constant_(module.weight, weight)
    loss = (lambda out, _: sum(t.square().mean() for t in tree_leaves(out) if isinstance(t, Tensor))) if given else None
    found = nf.diagnose(model, torch.randn(16, 8, generator=torch.Generator().manual_seed(1)), loss=loss)
    assert says in found.verdict.word
