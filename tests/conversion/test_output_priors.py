"""A bias of an output layer that was set on purpose, such as the prior of a focal loss, is kept and noted."""

import pytest
import torch
from torch import Tensor, nn

import normfree as nf
from normed_blocks import X, network

METHODS = ["fixup", "skipinit", "rezero", "nf", "wn", "dyt", "xavier"]
NOTE = "kept the bias of output layers"


def noted(plan: nf.ResidualPlan) -> list[str]:
    return [note for note in plan.changes.notes if NOTE in note]


def with_bias(*values: float) -> nn.Sequential:
    model = network()
    model[-1] = nn.Linear(8, len(values))
    with torch.no_grad():
        model[-1].bias.copy_(torch.tensor(values))
    return model


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("values", [(-4.6,) * 4, (-4.6, -4.6, 0.0, 0.0), (-4.6,)])
def test_prior_of_an_output_layer_is_kept(method: str, values: tuple[float, ...]) -> None:
    converted, plan = nf.convert(with_bias(*values), method, X)
    assert converted[-1].bias.tolist() == pytest.approx(values)
    assert [("'8' (" in note or "'5' (" in note) and "-4.6" in note for note in noted(plan)] == [True] * (
        method != "dyt"
    )


@pytest.mark.parametrize("method", ["fixup", "nf"])
@pytest.mark.parametrize("values", [(0.3, -0.2, 0.1, 0.25), (0.2,), (0.0, 0.0, 0.0, 0.0)])
def test_bias_that_was_drawn_or_trained_becomes_zero(method: str, values: tuple[float, ...]) -> None:
    converted, plan = nf.convert(with_bias(*values), method, X)
    assert not converted[-1].bias.any()
    assert not noted(plan)


class Heads(nn.Module):
    """Class scores at two resolutions by one layer with a prior, and boxes."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.scores, self.boxes = network()[:-1], nn.Linear(8, 3), nn.Linear(8, 4)
        nn.init.constant_(self.scores.bias, -4.6)

    def forward(self, x: Tensor) -> dict[str, list[Tensor]]:
        y = self.net(x)
        return {"scores": [self.scores(y), self.scores(2 * y)], "boxes": [self.boxes(y)]}


@pytest.mark.parametrize("method", ["fixup", "skipinit"])
def test_only_the_heads_with_a_prior_keep_it(method: str) -> None:
    model = Heads()
    nn.init.constant_(model.net[1].first.bias, 0.5)  # a constant inside the network is no prior of an output
    converted, plan = nf.convert(model, method, X)
    assert converted.scores.bias.tolist() == pytest.approx([-4.6] * 3)
    assert not converted.boxes.bias.any()
    assert not converted.net[1].first.bias.any()
    assert "'scores' (-4.6)" in noted(plan)[0]
