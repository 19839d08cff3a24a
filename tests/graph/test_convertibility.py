"""`convert` accepts every method that `supports_conversion` admits."""

import pytest
import torch
from torch import Tensor, nn

import normfree
from normed_blocks import X, network
from normfree.graph import discover, supports_conversion
from normfree.graph.convertibility import recurrent_layers
from normfree.methods import get, names
from remedies import named_methods

MODEL = network(2)
PLAN = discover(MODEL, X)


@pytest.mark.parametrize("method", names())
def test_admitted_method_converts_the_model(method: str) -> None:
    record = get(method)
    if supports_conversion(MODEL, PLAN, record):
        normfree.convert(MODEL, method, X)


def test_methods_are_admitted_or_not() -> None:
    admitted = {name for name in names() if supports_conversion(MODEL, PLAN, get(name))}
    assert {"fixup", "skipinit", "nf", "wn", "dyt"} <= admitted
    assert not {"sqrt_half", "convshort", "batchnorm", "spectralnorm", "selu"} & admitted


def test_layer_that_cannot_be_reparametrized_decides() -> None:
    model = network(2)
    nn.utils.parametrizations.weight_norm(model[1].first)
    plan = discover(model, X)
    assert supports_conversion(model, plan, get("fixup"))
    assert not supports_conversion(model, plan, get("wn"))


class Cell(nn.Module):
    """A recurrent cell by hand, as in an LSTM with layer norm; its input is projected at every step or at once."""

    def __init__(self, at_once: bool) -> None:
        super().__init__()
        self.at_once, self.read, self.state, self.head = at_once, nn.Linear(6, 16), nn.Linear(4, 16), nn.Linear(4, 3)
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(len(x), 4)
        projected = self.read(x)
        for t in range(x.shape[1]):
            y = projected[:, t] if self.at_once else self.read(x[:, t])
            i, f, g, o = (self.norms[0](y) + self.norms[1](self.state(h))).chunk(4, -1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
        return self.head(h)


class Shared(nn.Module):
    """The control: blocks of one weight after another, as in ALBERT."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Linear(6, 16), nn.LayerNorm(16)
        self.first, self.second, self.head = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for _ in range(4):
            x = x + self.second(self.first(self.norm(x)).relu())
        return self.head(x)


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("steps", [3, 10])
@pytest.mark.parametrize("method", ["fixup", "fixup:multiplier=false,zero_last=false", "skipinit", "rezero", "nf"])
def test_recurrence_by_hand_is_refused_by_methods_that_scale_sums(method: str, steps: int, at_once: bool) -> None:
    torch.manual_seed(0)
    model, x = Cell(at_once), torch.randn(4, steps, 6)
    with pytest.raises(ValueError, match=r"'state': used at every step of a recurrence") as error:
        normfree.convert(model, method, x)
    assert named_methods(str(error.value)) == ["wn", "dyt"]
    assert not supports_conversion(model, discover(model, x), get(method))


def test_recurrence_by_hand_is_not_rescaled_by_other_methods() -> None:
    torch.manual_seed(0)
    _, plan = normfree.convert(Cell(False), "wn", torch.randn(4, 10, 6))
    assert max(record.factor for record in plan.changes.scaled) <= 1


def test_blocks_that_share_weights_are_no_recurrence() -> None:
    x = torch.randn(4, 6)
    assert not recurrent_layers(discover(Shared(), x))
    normfree.convert(Shared(), "fixup", x)


def test_sum_in_the_model_itself_is_no_recurrence() -> None:
    """Its name is empty, as is the place of a branch around it that there is not."""

    class Single(Shared):
        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            return self.head(x + self.first(self.norm(x)))

    x = torch.randn(4, 6)
    assert not recurrent_layers(discover(Single(), x))
    normfree.convert(Single(), "fixup", x)
