"""The comparison of single outputs: their names, and outputs that start out constant."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import normfree as nf
from normed_blocks import X, network
from remedies import refusal


class Tokens(nn.Module):
    """A learned token reads the data by branches only, as in ViT; or the data itself."""

    def __init__(self, token: bool) -> None:
        super().__init__()
        self.stem, self.token = nn.Linear(8, 16), nn.Parameter(torch.randn(1, 1, 16)) if token else None
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)[:, None].expand(-1, 3, -1)
        if self.token is not None:
            x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        return self.head(self.layer(x)[:, 0])


@pytest.mark.parametrize("token", [True, False])
@pytest.mark.parametrize("method", ["rezero", "skipinit"])
def test_output_that_starts_constant_is_noted(method: str, token: bool) -> None:
    converted, plan = nf.convert(Tokens(token), method, X)
    constant = torch.allclose(*converted(X)[:2])
    noted = any("output 0 starts out the same for all samples" in note for note in plan.changes.notes)
    assert (constant, noted) == (token, token)


def test_output_layer_that_starts_at_zero_is_not_noted() -> None:
    converted, plan = nf.convert(Tokens(True), "fixup", X)
    assert not converted(X).any()
    assert not any("starts out the same" in note for note in plan.changes.notes)


class Detector(nn.Module):
    """A loud output among several, in a structure or alone."""

    def __init__(self, nested: bool) -> None:
        super().__init__()
        self.net, self.nested = network(), nested

    def forward(self, x: Tensor) -> Any:
        scores = self.net(x)
        loud = scores * 0 + 1e6 * self.net[0](x)[:, :4] ** 9
        return {"logits": [scores, loud], "sizes": scores} if self.nested else (scores, loud)


@pytest.mark.parametrize(("nested", "name"), [(True, "'logits[1]'"), (False, "1")])
def test_outputs_are_named_by_their_path(nested: bool, name: str) -> None:
    model = Detector(nested)
    with torch.no_grad():
        model.net[0].weight.mul_(0.1)
    assert f"output {name} is " in refusal(model, "fixup", X)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.first, self.second = network()[:-1], nn.Linear(8, 4), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        y = self.net(x)
        return self.first(y) + 1e6 * self.net[0](x)[:, :4] ** 9, self.second(y)


@pytest.mark.parametrize(("method", "helps"), [("dyt:alpha=1e-06", False), ("nf", True)])
def test_heads_are_advised_only_where_they_matter(method: str, helps: bool) -> None:
    """Dynamic tanh keeps all weights, so that it has no use for heads."""
    model = TwoHeads()
    model.net[0].weight.data.mul_(0.1)
    with pytest.raises(ValueError, match=r"output . is") as error:
        nf.convert(model, method, X)
    assert ("name the output layers by heads=" in str(error.value)) is helps
