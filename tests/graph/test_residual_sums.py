"""The degree of a branch in its weights, on small modules with one trait each; the oracle is how the output scales."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normfree as nf
from normfree import discover


class Body(nn.Module):
    """x + f(x) on (batch, length, width); every linear layer without bias."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out, self.up, self.down = (nn.Linear(8, 8, bias=False) for _ in range(6))
        self.qkv = nn.Linear(8, 24, bias=False)

    def branch(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)


class TwoLayers(Body):
    def branch(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)))


class GatedFeedForward(Body):
    def branch(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.q(x)) * self.up(x))


class LinearAttention(Body):
    def branch(self, x: Tensor) -> Tensor:
        return self.out((self.q(x) @ self.k(x).transpose(1, 2)) @ self.v(x))


class FusedLinearAttention(Body):
    def branch(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out(torch.einsum("bij,bjd->bid", q @ k.mT, v))


class ParallelSum(Body):
    def branch(self, x: Tensor) -> Tensor:
        return torch.cat([self.q(x), self.down(self.up(x))], -1) @ x.new_ones(16, 8)


class PowerOfOne(Body):
    def branch(self, x: Tensor) -> Tensor:
        y = self.q(x)
        return y * y


HOMOGENEOUS = [
    (TwoLayers, 2),
    (GatedFeedForward, 3),
    (LinearAttention, 4),
    (FusedLinearAttention, 4),
    (ParallelSum, 2),
    (PowerOfOne, 2),
]


@pytest.mark.parametrize(("kind", "m"), HOMOGENEOUS)
def test_degree_is_the_power_by_which_the_branch_grows_with_its_weights(kind: type[Body], m: int) -> None:
    """Independent oracle: all weights times t multiply the largest term of the branch by t^m."""
    model = kind().double()
    x = torch.randn(2, 3, 8, dtype=torch.double, generator=torch.Generator().manual_seed(0))
    (branch,) = discover(model, x).branches
    assert branch.degree == m
    with torch.no_grad():
        before = model.branch(x).norm()
        for parameter in model.parameters():
            parameter.mul_(1e4)
        grown = torch.log10(model.branch(x).norm() / before) / 4
    assert grown.item() == pytest.approx(m, abs=0.3)


class SoftmaxAttention(Body):
    def branch(self, x: Tensor) -> Tensor:
        return self.out(torch.softmax(self.q(x) @ self.k(x).mT / 8**0.5, -1) @ self.v(x))


class DotProductAttention(Body):
    def branch(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(2, 3, 3, 8).unbind(2)
        return self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=x.new_ones(3, 3)))


class Rotary(Body):
    """Positions are turned by constants, which adds nothing."""

    def branch(self, x: Tensor) -> Tensor:
        cos = x.new_ones(8)
        q, k = (y * cos + torch.cat([-y[..., 4:], y[..., :4]], -1) * cos for y in (self.q(x), self.k(x)))
        return self.out(torch.softmax(q @ k.mT, -1) @ self.v(x))


class SqueezeAndExcitation(Body):
    def branch(self, x: Tensor) -> Tensor:
        y = self.up(x)
        gate = torch.sigmoid(self.k(F.relu(self.q(y.mean(1, keepdim=True)))))
        return self.down(y * gate.expand_as(y))


class SwishByHand(Body):
    def branch(self, x: Tensor) -> Tensor:
        y = self.up(x)
        return self.down(y * torch.sigmoid(y))


class GeluByHand(Body):
    def branch(self, x: Tensor) -> Tensor:
        y = self.up(x)
        return self.down(0.5 * y * (1.0 + torch.tanh(0.8 * (y + 0.044715 * torch.pow(y, 3.0)))))


class SigmoidLayers(Body):
    """A sigmoid between layers is an activation, not a gate."""

    def branch(self, x: Tensor) -> Tensor:
        return self.down(torch.sigmoid(self.up(x)))


class NormalizedByHand(Body):
    def branch(self, x: Tensor) -> Tensor:
        y = self.up(x)
        return self.down(y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6))


class InnerSkip(Body):
    """An inner residual sum has the degree of its shortcut, and its layers belong to it."""

    def branch(self, x: Tensor) -> Tensor:
        y = self.up(x)
        y = y + self.v(F.relu(self.q(y)))
        return self.down(y)


@pytest.mark.parametrize(
    ("kind", "m"),
    [
        (SoftmaxAttention, 4),
        (DotProductAttention, 4),
        (Rotary, 4),
        (SqueezeAndExcitation, 2),
        (SwishByHand, 2),
        (GeluByHand, 2),
        (SigmoidLayers, 2),
        (NormalizedByHand, 2),
        (InnerSkip, 2),
    ],
)
def test_degree_follows_the_rule(kind: type[Body], m: int) -> None:
    plan = discover(kind(), torch.zeros(2, 3, 8))
    assert plan.branches[-1].degree == m
    assert plan.branches[-1].name == plan.branches[-1].home + ("#2" if kind is InnerSkip else "")


def test_entries_read_the_input_of_the_branch() -> None:
    (attention,) = discover(SoftmaxAttention(), torch.zeros(2, 3, 8)).branches
    assert [layer.name for layer in attention.first_layers] == ["q", "k", "v"]
    assert [layer.name for layer in attention.last_layers] == ["out"]
    (fused,) = discover(DotProductAttention(), torch.zeros(2, 3, 8)).branches
    assert [(layer.name, layer.parts) for layer in fused.layers] == [("qkv", 3), ("out", 1)]


def test_only_gates_are_no_residual_branch() -> None:
    class Modulated(Body):
        def branch(self, x: Tensor) -> Tensor:
            return x * torch.sigmoid(self.q(x))

    plan = discover(Modulated(), torch.zeros(2, 3, 8))
    assert not plan.branches
    assert [layer.name for layer in plan.layers()] == ["q"]


class TopExpert(nn.Module):
    """Each sample goes through the expert with the largest probability."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(8), nn.Linear(8, 2)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        p, chosen = self.router(y).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for k, expert in enumerate(self.experts):
            mask = chosen == k
            out[mask] = p[mask, None] * expert(y[mask])
        return x + out


def test_router_that_chooses_an_expert_is_not_an_end_of_the_branch() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), TopExpert(), TopExpert(), nn.Linear(8, 2))
    x = torch.randn(32, 8)
    plan = discover(model, x)
    assert [layer.name for layer in plan.branches[0].last_layers] == ["1.experts.0.2", "1.experts.1.2"]
    assert "1.router" in [layer.name for layer in plan.branches[0].layers]
    for method in ("fixup", "skipinit", "nf"):
        _, converted = nf.convert(model, method, x)
        scalars = [added.name for added in converted.changes.added if added.name.endswith("beta")]
        assert "1.experts.0.2.beta" in scalars
        assert "1.router.beta" not in scalars
