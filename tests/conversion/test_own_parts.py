"""Conversion of models with parts of their own: factors inside an attention, flows, normalizers written by hand."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normfree as nf

D = 16
TOKENS = torch.randn(6, 5, D, generator=torch.Generator().manual_seed(1))


# --- factors that are no layer scales


class Attention(nn.Module):
    """Attention without an output layer; `gain` and `temperature` multiply what the softmax reads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.query, self.key, self.value = (nn.Linear(D, D) for _ in range(3))
        self.gain, self.temperature = nn.Parameter(torch.full((D,), 3.0)), nn.Parameter(torch.tensor(10.0))
        self.gamma = nn.Parameter(torch.full((D,), 1e-5))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        query = F.normalize(self.query(h), dim=-1) * self.gain
        scores = query @ F.normalize(self.key(h), dim=-1).transpose(1, 2) * self.temperature
        return x + self.gamma * (scores.softmax(-1) @ self.value(h))


class EdgeAttention(nn.Module):
    """Graph attention: a vector scores pairs of nodes, and exp and a sum turn the scores into weights."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.value = nn.LayerNorm(D), nn.Linear(D, D)
        self.gain = nn.Parameter(torch.linspace(-1, 1, 2 * D))
        self.gamma = nn.Parameter(torch.full((D,), 1e-5))

    def forward(self, x: Tensor) -> Tensor:
        h = self.value(self.norm(x))
        left, right = (h * part for part in self.gain.chunk(2))
        weights = F.leaky_relu(left.sum(-1).unsqueeze(2) + right.sum(-1).unsqueeze(1)).exp().unsqueeze(-1)
        return x + self.gamma * (weights * h.unsqueeze(1)).sum(2) / weights.sum(2)


@pytest.mark.parametrize("method", ["fixup", "wn"])
@pytest.mark.parametrize("block", [Attention, EdgeAttention])
def test_only_factors_of_the_branch_output_are_layer_scales(block: type[nn.Module], method: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, D), block(), block(), nn.Flatten(), nn.Linear(5 * D, 4))
    converted, plan = nf.convert(model, method, TOKENS)
    assert [branch.scales for branch in plan.branches] == [("1.gamma",), ("2.gamma",)]
    parameters, before = dict(converted.named_parameters()), dict(model.named_parameters())
    for name, value in before.items():
        if name.endswith(("gain", "temperature")):
            assert torch.equal(parameters[name], value)
    assert (parameters["1.gamma"] == 1).all()
    noted = [note for note in plan.changes.notes if note.startswith("layer scales were set to 1")]
    assert noted == ["layer scales were set to 1, because the method scales the branches: '1.gamma', '2.gamma'"]


class Alphas(nn.Module):
    """ReZero with the multipliers of all blocks in one vector."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(D), nn.Linear(D, D)) for _ in range(3))
        self.alphas, self.head = nn.Parameter(torch.zeros(3)), nn.Linear(D, 5)

    def forward(self, x: Tensor) -> Tensor:
        for alpha, block in zip(self.alphas, self.blocks, strict=True):
            x = x + alpha * block(x)
        return self.head(x)


def test_a_vector_of_layer_scales_is_named_once() -> None:
    _, plan = nf.convert(Alphas(), "fixup", torch.randn(6, D))
    (note,) = (note for note in plan.changes.notes if "layer scales" in note)
    assert note.endswith(": 'alphas'")


# --- outputs that are no scores of classes


class Step(nn.Module):
    """A step of a flow whose last layer has as many outputs as the flow."""

    def __init__(self, turned: bool) -> None:
        super().__init__()
        self.turned = turned
        wide = [nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU()]
        self.net = nn.Sequential(nn.Linear(D // 2, 64), nn.LayerNorm(64), nn.ReLU(), *wide, nn.Linear(64, D))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = x.chunk(2, 1)[:: -1 if self.turned else 1]
        scale, shift = self.net(a).chunk(2, 1)
        b = b * torch.tanh(scale).exp() + shift
        return torch.cat([b, a] if self.turned else [a, b], 1), torch.tanh(scale).sum(1)


class Densities(nn.Module):
    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = nn.ModuleList(Step(i % 2 == 1) for i in range(steps))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        volume = torch.zeros(len(x))
        for step in self.steps:
            x, change = step(x)
            volume = volume + change
        return x, volume


class Corrected(nn.Module):
    """Adds its last layer to a multiple of its input, as a denoiser does."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(D, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, D))

    def forward(self, x: Tensor) -> Tensor:
        return 4 * x * torch.sigmoid(x) * self.net(x)


class Masked(nn.Module):
    """Scores of classes, of which a mask from the input forbids some: a control."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(D, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, D))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).masked_fill(x > 200, -1e4)


@pytest.mark.parametrize(
    ("make", "are_scores"),
    [(lambda: Densities(1), False), (lambda: Densities(6), False), (Corrected, False), (Masked, True)],
)
def test_first_loss_is_that_of_scores_alone(make: Callable[[], nn.Module], are_scores: bool) -> None:
    torch.manual_seed(0)
    x = 25 * torch.randn(32, D)  # which the normalizer reduces
    try:
        text = "; ".join(nf.convert(make(), "wn", x, generator=torch.Generator().manual_seed(0))[1].changes.notes)
    except ValueError as refusal:
        text = str(refusal)
    assert ("the first loss at" in text) is are_scores
    if are_scores:
        assert f"a uniform guess has {math.log(D):.3g}" in text
