"""Conversion checks its own result: models of the review, a variant of each, and controls.

In every converted model, all parameters that move in the original within 40 steps of AdamW move, too.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import normfree as nf
from normed_blocks import X, network
from normfree.conversion.verification import expected_growth
from normfree.nn.model_state import call_arguments
from normfree.nn.weight_layers import StandardizedConv2d
from remedies import named_methods, refusal, untried_methods

IMAGES = torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(2))
TIMES = torch.randn(6, 4, generator=torch.Generator().manual_seed(3))
D = 16


class Block(nn.Module):
    """x + W2 ReLU(W1 norm(x)), times `factor` of a layer scale if there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(D), nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def branch(self, x: Tensor) -> Tensor:
        return self.second(F.relu(self.first(self.norm(x))))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)


def sequential(block: Callable[[], nn.Module] = Block, blocks: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, D), *[block() for _ in range(blocks)], nn.LayerNorm(D), nn.Linear(D, 5))


class Gated(nn.Module):
    """The review's block: a gate made from a time, times a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.n, self.f, self.g = nn.LayerNorm(D), nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return x + self.g(F.silu(t)) * self.f(self.n(x))


class Modulated(nn.Module):
    """adaLN-zero: one layer makes shift, scale and gate, and starts at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.n, self.f, self.h, self.c = nn.LayerNorm(D), nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, 3 * D)
        nn.init.zeros_(self.c.weight)
        nn.init.zeros_(self.c.bias)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        shift, scale, gate = self.c(F.silu(t)).chunk(3, -1)
        return x + gate * self.f(F.gelu(self.h(self.n(x) * (1 + scale) + shift)))


class Timed(nn.Module):
    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.stem, self.time, self.head = nn.Linear(8, D), nn.Linear(4, D), nn.Linear(D, 5)
        self.blocks = nn.ModuleList(block() for _ in range(3))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        x, t = self.stem(x), self.time(t)
        for block in self.blocks:
            x = block(x, t)
        return self.head(x)


class GatedByItself(Block):
    """Two layers of the same signal are multiplied, and no layer follows."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(D, D)

    def branch(self, x: Tensor) -> Tensor:
        return F.gelu(self.gate(x)) * super().branch(x)


class Activated(nn.Module):
    """x + act(norm(W x)), by a module."""

    def __init__(self, act: type[nn.Module] = nn.ReLU) -> None:
        super().__init__()
        self.a, self.n, self.act = nn.Linear(D, D), nn.BatchNorm1d(D), act()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.act(self.n(self.a(x)))


class Mixed(nn.Module):
    """x + norm(act(W x)): the normalizer after the activation holds the multiplier."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.n = nn.Linear(D, D), nn.BatchNorm1d(D)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.n(F.gelu(self.a(x)))


class BatchNormAct1d(nn.BatchNorm1d):
    """A normalizer with its activation inside, as timm's."""

    def __init__(self) -> None:
        super().__init__(D)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(super().forward(x))


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.act = nn.Linear(D, D), BatchNormAct1d()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.act(self.a(x))


class ActivatedByCode(Activated):
    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.n(self.a(x)))


class LayerScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.full((D,), 1e-5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.alpha


class Scaled(Block):
    """A layer scale in a module, under a name that says nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.s = LayerScale()

    def branch(self, x: Tensor) -> Tensor:
        return self.s(super().branch(x))


class ScaledByTanh(Block):
    """Flamingo's gate: tanh of a number that starts at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.strength = nn.Parameter(torch.zeros(()))

    def branch(self, x: Tensor) -> Tensor:
        return torch.tanh(self.strength) * super().branch(x)


class Autoencoder(nn.Module):
    """A loss inside the forward pass; `turned` subtracts the prediction from the target."""

    def __init__(self, turned: bool = False) -> None:
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(8, D), Block(), nn.LayerNorm(D), nn.Linear(D, 4))
        self.dec = nn.Sequential(nn.Linear(4, D), nn.ReLU(), nn.Linear(D, 8))
        self.turned = turned

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        r = self.dec(self.enc(x))
        error = (x - r).abs().mean() if self.turned else ((r - x) ** 2).mean()
        return {"loss": error, "recon": r}


class Heads(nn.Module):
    def __init__(self, deep: bool = False) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, D), Block(), Block())
        made = [nn.Sequential(nn.Linear(D, D), nn.ReLU(), nn.Linear(D, 10)) if deep else nn.Linear(D, 10) for _ in "ab"]
        self.h1, self.h2 = made

    def forward(self, x: Tensor) -> Tensor:
        z = self.body(x)
        return (self.h1(z) + self.h2(z)) / 2


class Supervised(Heads):
    """Two outputs in a nest, one before the last block."""

    def forward(self, x: Tensor) -> Any:
        z = self.body[1](self.body[0](x))
        return [{"early": self.h1(z)}, (self.h2(self.body[2](z)),)]


class Contrastive(nn.Module):
    def __init__(self, by_hand: bool = False) -> None:
        super().__init__()
        self.body, self.project = nn.Sequential(nn.Linear(8, D), Block(), Block()), nn.Linear(D, 10)
        self.by_hand = by_hand

    def forward(self, x: Tensor) -> Tensor:
        p = self.project(self.body(x))
        return p / p.norm(dim=-1, keepdim=True) if self.by_hand else F.normalize(p, dim=-1)


class RepBlock(nn.Module):
    """conv3x3 + conv1x1 + identity, each with its batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.c3, self.c1 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.Conv2d(8, 8, 1, bias=False)
        self.n3, self.n1, self.n0 = nn.BatchNorm2d(8), nn.BatchNorm2d(8), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.n3(self.c3(x)) + self.n1(self.c1(x)) + self.n0(x))


class StdConv2d(nn.Conv2d):
    """Standardizes its weight by its own code."""

    def forward(self, x: Tensor) -> Tensor:
        w = self.weight
        w = (w - w.mean((1, 2, 3), keepdim=True)) / w.std((1, 2, 3), keepdim=True)
        return F.conv2d(x, w, self.bias, self.stride, self.padding)


class NormedConv2d(nn.Conv2d):
    """Standardizes its weight by `F.batch_norm`, as timm does."""

    def forward(self, x: Tensor) -> Tensor:
        rows = self.weight.reshape(1, self.out_channels, -1)
        w = F.batch_norm(rows, None, None, training=True, momentum=0.0, eps=1e-6).reshape_as(self.weight)
        return self._conv_forward(x, w, self.bias)


class StdBlock(nn.Module):
    def __init__(self, conv: type[nn.Conv2d]) -> None:
        super().__init__()
        self.n, self.a, self.b = nn.GroupNorm(2, 8), conv(8, 8, 3, padding=1), conv(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(F.relu(self.a(F.relu(self.n(x)))))


def images(*blocks: nn.Module) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
    )


class Batched(nn.Module):
    """Copies its input image by image, as detectors do."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.net, self.how = images(StdBlock(nn.Conv2d)), how

    def forward(self, x: Tensor) -> Tensor:
        b = x.new_full(x.shape, 0)
        for i in range(len(x)):
            if self.how == "copy":
                b[i].copy_(x[i])
            elif self.how == "item":
                b[i] = x[i]
            else:
                torch.mul(x[i], 1.0, out=b[i])
        return self.net(torch.from_numpy(b.numpy()) if self.how == "numpy" else b)


CASES: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "plain": (sequential, X),
    "gated": (lambda: Timed(Gated), (X, TIMES)),
    "modulated": (lambda: Timed(Modulated), (X, TIMES)),
    "gated by itself": (lambda: sequential(GatedByItself), X),
    "activated": (lambda: sequential(Activated), X),
    "activated by silu": (lambda: sequential(lambda: Activated(nn.SiLU)), X),
    "normalized after the activation": (lambda: sequential(Mixed), X),
    "fused activation": (lambda: sequential(Fused), X),
    "layer scale": (lambda: sequential(Scaled), X),
    "tanh of a scale": (lambda: sequential(ScaledByTanh), X),
    "loss": (Autoencoder, X),
    "loss turned": (lambda: Autoencoder(turned=True), X),
    "heads": (Heads, X),
    "deep heads": (lambda: Heads(deep=True), X),
    "supervised": (Supervised, X),
    "contrastive": (Contrastive, X),
    "contrastive by hand": (lambda: Contrastive(by_hand=True), X),
    "standardized": (lambda: images(StdBlock(StdConv2d), StdBlock(StdConv2d)), IMAGES),
    "standardized by a function": (lambda: images(StdBlock(NormedConv2d), StdBlock(NormedConv2d)), IMAGES),
    "copied": (lambda: Batched("copy"), IMAGES),
    "assigned": (lambda: Batched("item"), IMAGES),
    "written": (lambda: Batched("out"), IMAGES),
}
BRANCHES = {"loss": 1, "loss turned": 1, "heads": 2, "deep heads": 2, "supervised": 2, "contrastive": 2}
BRANCHES |= {"contrastive by hand": 2, "standardized": 2, "standardized by a function": 2}
BRANCHES |= {"copied": 1, "assigned": 1, "written": 1}


def made(name: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    build, example = CASES[name]
    return build(), example


def outputs(tree: Any) -> list[Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(tree) if t.dim()]


def moving(model: nn.Module, example: Any) -> set[str]:
    """The parameters that differ after 40 steps of AdamW towards random targets."""
    args, kwargs = call_arguments(example)
    model = copy.deepcopy(model).train()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    generator = torch.Generator().manual_seed(5)
    targets = [torch.randn(t.shape, generator=generator) for t in outputs(model(*args, **kwargs))]
    for _ in range(40):
        optimizer.zero_grad()
        pairs = zip(outputs(model(*args, **kwargs)), targets, strict=True)
        sum((out - target).square().mean() for out, target in pairs).backward()
        optimizer.step()
    return {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}


@pytest.mark.parametrize("method", ["fixup", "skipinit", "nf"])
@pytest.mark.parametrize("name", CASES)
def test_what_moves_in_the_original_moves_in_the_converted_model(name: str, method: str) -> None:
    model, example = made(name)
    converted, plan = nf.convert(model, method, example)
    assert len(plan.branches) == BRANCHES.get(name, 3)
    held = {n for n, p in converted.named_parameters() if p.requires_grad}
    assert moving(model, example) & held <= moving(converted, example)


def test_check_of_movement_notices_a_dead_branch() -> None:
    model, _ = made("plain")
    for block in model[1:4]:
        block.second.requires_grad_(False).weight.zero_()
    assert not any("first" in name for name in moving(model, X))  # control of the test above


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("loss", ["dec.2"]),
        ("loss turned", ["dec.2"]),
        ("heads", ["h1", "h2"]),
        ("deep heads", ["h1.2", "h2.2"]),
        ("supervised", ["h1", "h2"]),
        ("plain", ["5"]),
        ("contrastive", ["project"]),
    ],
)
def test_every_head_is_an_output_layer(name: str, layers: list[str]) -> None:
    model, example = made(name)
    converted, plan = nf.convert(model, "fixup", example)
    assert [layer.name for layer in plan.classifier] == layers
    zero = [not converted.get_submodule(layer).weight.any() for layer in layers]
    assert zero == [name != "contrastive"] * len(layers)  # 0/0 otherwise


@pytest.mark.parametrize("name", ["layer scale", "tanh of a scale"])
def test_layer_scales_are_found_by_what_they_do(name: str) -> None:
    model, example = made(name)
    converted, plan = nf.convert(model, "skipinit", example)
    scales = [n for n, _ in model.named_parameters() if n.endswith(("alpha", "strength"))]
    assert [n for branch in plan.branches for n in branch.layer_scales] == scales
    assert all(torch.equal(converted.get_parameter(n), torch.ones_like(converted.get_parameter(n))) for n in scales)
    assert plan.changes.notes[0].startswith("layer scales were set to 1")
    assert not any(branch.layer_scales for branch in nf.convert(network(), "skipinit", X)[1].branches)  # control


@pytest.mark.parametrize(
    "name", ["activated", "activated by silu", "normalized after the activation", "fused activation"]
)
@pytest.mark.parametrize("method", ["fixup", "skipinit"])
def test_multiplier_after_the_activation_starts_at_zero(name: str, method: str) -> None:
    model, example = made(name)
    converted, plan = nf.convert(model, method, example)
    betas = [a for a in plan.changes.added if a.kind == "multiplier β"]
    holder = "n" if "normalized" in name else "act"
    assert [(a.name, a.value, a.learnable) for a in betas] == [(f"{i}.{holder}.beta", 0.0, True) for i in (1, 2, 3)]
    assert converted[1].a.weight.any()
    hidden = converted[0](X)
    torch.testing.assert_close(converted[1](hidden), hidden)  # every branch starts at 0


def test_activation_in_code_is_refused_where_a_multiplier_must_start_at_zero() -> None:
    text = refusal(sequential(ActivatedByCode), "skipinit", X)
    assert "'1.a' (and 2 more): an activation in the model's own code" in text
    assert text.endswith("module of its own; use 'fixup', 'nf', 'wn' or 'dyt'")
    for method in ("fixup", "nf", "wn"):  # a positive factor passes a ReLU; Fixup scales the layer
        converted, plan = nf.convert(sequential(ActivatedByCode), method, X)
        assert len(plan.branches) == 3
        assert converted[1].a.weight.any()


def test_parallel_convolutions_are_one_layer_and_share_its_variance() -> None:
    model = images(*[RepBlock() for _ in range(4)])
    converted, plan = nf.convert(model, "nf", IMAGES)
    assert not plan.branches
    shares = {layer.name: layer.parallel_paths for layer in plan.layers()}
    assert shares["2.c3"] == shares["5.c1"] == 3
    assert shares["0"] == 1
    seen: dict[str, float] = {}
    for name in ("4.c3", "4.c1"):
        converted.get_submodule(name).register_forward_hook(
            lambda _m, _a, out, name=name: seen.update({name: out.var().item()})
        )
    loss = F.cross_entropy(converted(IMAGES), torch.zeros(4, dtype=torch.long))
    assert seen == pytest.approx({"4.c3": 1 / 3, "4.c1": 1 / 3}, rel=1e-3)
    assert loss < math.log(5) + 1
    with pytest.raises(ValueError, match=r"no residual sum was found: .*parallel layers that form one"):
        nf.convert(model, "skipinit", IMAGES)


@pytest.mark.parametrize(
    ("name", "kind"), [("standardized", "StdConv2d"), ("standardized by a function", "NormedConv2d")]
)
def test_layer_does_not_standardize_twice(name: str, kind: str) -> None:
    model, example = made(name)
    converted, plan = nf.convert(model, "nf", example)
    assert all(isinstance(m, StandardizedConv2d) for m in converted.modules() if isinstance(m, nn.Conv2d))
    assert [r.left for r in plan.changes.removed if r.kind == kind] == ["Conv2d"] * 4
    plain, _ = nf.convert(model, "fixup", example)
    assert not plain[2].b.weight.any()
    assert not any(isinstance(m, StdConv2d | NormedConv2d) for m in plain.modules())


def test_signal_that_leaves_torch_is_refused() -> None:
    for method in ("fixup", "nf", "wn"):
        with pytest.raises(
            ValueError, match=r"loses the signal, at numpy\(\) in 'Batched', so that no layer was found"
        ):
            nf.convert(Batched("numpy"), method, IMAGES)


class ByFunction(Block):
    how = "sum"

    def forward(self, x: Tensor) -> Tensor:
        f = self.branch(x)
        match self.how:
            case "lerp":
                return torch.lerp(x, f, 0.5)
            case "index_add":
                return x.index_add(0, torch.arange(len(x)), f)
            case "scatter_add":
                return x.scatter_add(0, torch.arange(len(x))[:, None].expand_as(x), f)
            case "einsum":
                return torch.einsum("kbd,k->bd", torch.stack([x, f]), torch.ones(2))
            case "matmul":
                return (torch.ones(1, 2) @ torch.stack([x.flatten(), f.flatten()])).view_as(x)
            case "mean":
                return 2 * torch.cat([x[..., None], f[..., None]], -1).mean(-1)
        return torch.stack([x, f]).sum(0)


@pytest.mark.parametrize("how", ["lerp", "index_add", "scatter_add", "einsum", "matmul", "mean", "sum"])
def test_sum_that_is_not_followed_is_refused(how: str) -> None:
    with pytest.raises(ValueError, match=rf"'1' adds a branch by {how}, which is not followed; write x \+ f\(x\)"):
        nf.convert(sequential(type("Other", (ByFunction,), {"how": how})), "nf", X)


class Dead(Block):
    """A branch that the method sets to 0 where the model's own code lets no gradient through 0."""

    def branch(self, x: Tensor) -> Tensor:
        return F.hardshrink(super().branch(x), 1e-6)


def test_branch_that_would_never_learn_is_refused_and_the_model_restored() -> None:
    model = sequential(Dead)
    before = copy.deepcopy(model)
    with pytest.raises(ValueError, match=r"in the branch '1', '1.second.weight' .*would never learn"):
        nf.convert_(model, "fixup:bias=false,multiplier=false", X)
    assert [type(m) for m in model.modules()] == [type(m) for m in before.modules()]
    pairs = zip(model.state_dict().values(), before.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    nf.convert(model, "nf", X)  # control: nothing is 0 there


class Nested(nn.Module):
    """A residual branch inside a residual branch, `levels` deep: a network with added long skips, such as Linknet."""

    def __init__(self, levels: int) -> None:
        super().__init__()
        self.down, self.norm, self.up = nn.Linear(D, D), nn.LayerNorm(D), nn.Linear(D, D)
        self.inner: nn.Module = Nested(levels - 1) if levels > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(F.relu(self.inner(self.norm(self.down(x)))))


def nested(levels: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, D), Nested(levels), nn.LayerNorm(D), nn.Linear(D, 5))


@pytest.mark.parametrize("method", ["fixup", "skipinit"])
def test_sums_around_sums_of_sums_merge_two_signals(method: str) -> None:
    model = nested(5)
    converted, plan = nf.convert(model, method, X)
    merging = [branch.merges_signals for branch in plan.branches]
    assert merging == [False, False, True, True, True]  # the innermost runs first
    held = {n for n, p in converted.named_parameters() if p.requires_grad}
    assert moving(model, X) & held <= moving(converted, X)
    ups: list[float] = []
    for module in converted.modules():
        if isinstance(module, Nested):
            module.up.register_forward_hook(lambda _m, _a, out: ups.append(out.var(unbiased=False).item()))
    converted(X)
    assert ups == pytest.approx([0, 0, 1, 1, 1], rel=1e-3)  # a merging branch starts at unit variance


def test_zeros_behind_many_zeros_are_refused() -> None:
    plan = nf.discover(nested(5), X)
    scaled = replace(plan, branches=tuple(replace(branch, merges_signals=False) for branch in plan.branches))
    with pytest.raises(ValueError, match="starts at zero, and so do several layers, one after another, on every path"):
        nf.convert(nested(5), "fixup", X, plan=scaled)
    nf.convert(nested(2), "fixup", X)  # controls: a zero after one zero learns a step later
    nf.convert(nested(5), "nf", X, plan=scaled)


class Perceiver(nn.Module):
    """Adds to learned tokens what they read from the input."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Linear(8, D), nn.LayerNorm(D), nn.Linear(D, 5)
        self.tokens = nn.Parameter(0.02 * torch.randn(1, 3, D))
        self.norms = nn.ModuleList([nn.LayerNorm(D) for _ in range(3)])
        self.layers = nn.ModuleList([nn.ModuleList([nn.Linear(D, D) for _ in range(4)]) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).unsqueeze(1)
        z = self.tokens.expand(len(x), -1, -1)
        for norm, (q, k, v, out) in zip(self.norms, self.layers, strict=True):
            z = z + out(F.scaled_dot_product_attention(q(norm(z)), k(x), v(x)))
        return self.head(self.norm(z).mean(1))


@pytest.mark.parametrize("method", ["fixup", "skipinit", "nf"])
def test_sum_onto_learned_tokens_is_residual_and_the_tokens_have_unit_variance(method: str) -> None:
    torch.manual_seed(0)
    model = Perceiver()
    converted, plan = nf.convert(model, method, X)
    assert [len(branch.layers) for branch in plan.branches] == [4, 4, 4]
    assert [layer.name for layer in plan.stem] == ["embed"]
    assert converted.get_parameter("tokens").std().item() == pytest.approx(1, abs=0.3)
    held = {n for n, p in converted.named_parameters() if p.requires_grad}
    assert moving(model, X) & held <= moving(converted, X)


class Towards(Block):
    """x + a (f(x) - x): moves towards the branch."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.full((D,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.alpha * (self.branch(x) - x)


def test_factor_of_branch_and_shortcut_is_no_layer_scale() -> None:
    for method in ("fixup", "nf"):
        converted, plan = nf.convert(sequential(Towards), method, X)
        assert not any(branch.layer_scales for branch in plan.branches)
        assert converted[1].alpha.mean().item() == pytest.approx(0.1)


class WrittenNorm(Block):
    how = "rms"

    def branch(self, x: Tensor) -> Tensor:
        if self.how == "rms":
            x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        elif self.how == "std":
            x = (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6)
        else:
            x = x * torch.sigmoid(x.mean(-1, keepdim=True))  # control: a gate
        return super().branch(x)


@pytest.mark.parametrize("how", ["rms", "std", "gate"])
def test_normalization_in_code_is_noted(how: str) -> None:
    model = sequential(type("Written", (WrittenNorm,), {"how": how}))
    notes = nf.convert(model, "nf", X)[1].changes.notes
    assert any("divided by its own scale in the code of '1', '2', '3'" in note for note in notes) == (how != "gate")


class Recurrent(Block):
    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.GRU(D, D)

    def branch(self, x: Tensor) -> Tensor:
        return self.memory(super().branch(x))[0]


@pytest.mark.parametrize("method", ["nf", "fixup", "wn"])
def test_branch_that_ends_in_a_recurrent_layer_is_refused(method: str) -> None:
    text = refusal(sequential(Recurrent), method, X)
    assert "'1.memory'" in text
    assert "a recurrent layer, whose output '1' adds" in text
    assert "put a linear layer after it" in text
    assert named_methods(text) == ["dyt"]


def test_method_that_scales_no_sum_takes_a_branch_that_ends_in_a_recurrent_layer() -> None:
    converted, _ = nf.convert(sequential(Recurrent), "dyt", X)
    assert converted[1].memory.weight_hh_l0.any()


class Difference(nn.Module):
    """Scores by the difference of two embeddings, in which the last bias cancels once the norm after it is gone."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.norm, self.head = sequential(), nn.LayerNorm(5), nn.Linear(5, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        z = self.norm(self.net(x))
        return self.head(z - z[:1])[1:2]


def test_bias_that_cancels_is_noted() -> None:
    _, plan = nf.convert(Difference(), "nf", X)
    assert any("bias' does nothing any more" in note for note in plan.changes.notes)
    assert not any("does nothing" in note for note in nf.convert(sequential(), "nf", X)[1].changes.notes)  # control


class Louder(nn.Sequential):
    """Multiplies before a final norm, whose removal leaves the factor."""

    factor = 1e4

    def forward(self, x: Tensor) -> Tensor:
        return self[2](self[1](self.factor * self[0](x)))


def test_output_and_first_loss_far_from_the_original_are_refused() -> None:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(8, D), Block(), Block())
    model = Louder(body, nn.LayerNorm(D), nn.Linear(D, 5))
    with pytest.raises(
        ValueError, match=r"output 0 is .* times as large.*; the first loss at '2' is \S+, where a unif"
    ):
        nf.convert(model, "nf", X)
    assert nf.convert(sequential(), "nf", X)[1].changes.notes == ()  # control


@pytest.mark.parametrize(("factor", "times"), [(1.0, 0), (3.0, 1), (15.0, 2)])
def test_first_loss_is_noted_at_half_the_spread_at_which_a_softmax_freezes_and_refused_from_there(
    factor: float, times: int
) -> None:
    torch.manual_seed(0)
    model = Louder(nn.Sequential(nn.Linear(8, D), Block(), Block()), nn.LayerNorm(D), nn.Linear(D, 5))
    model.factor = factor
    if times == 2:
        with pytest.raises(ValueError, match="the first loss at '2' is"):
            nf.convert(model, "skipinit", X)
        return
    converted, plan = nf.convert(model, "skipinit", X, generator=torch.Generator().manual_seed(0))
    scores = converted(X).double()
    above = (scores.logsumexp(1) - scores.mean(1)).mean().item() - math.log(5)
    assert (above > 0.5) == (times == 1)
    assert any("first loss" in note for note in plan.changes.notes) == (times == 1)


def test_method_that_lets_the_signal_grow_may_start_higher() -> None:
    plan = nf.discover(sequential(), X)

    def growth(method: str) -> float:
        return expected_growth(plan, [nf.methods.get(method).rule.at(branch.position) for branch in plan.branches])

    assert growth("fixup") == growth("wn") == 1
    assert growth("hanin:r=0.5") == pytest.approx(1.25 * 1.0625 * 1.015625)
    assert growth("shao") == pytest.approx(1)


def test_named_heads_are_output_layers() -> None:
    model, _ = made("plain")
    _, plan = nf.convert(model, "fixup", X, heads=["5"])
    assert [layer.name for layer in plan.classifier] == ["5"]
    with pytest.raises(ValueError, match=r"unknown head 'fc' of Sequential; expected one of: 5, 0, 1.first"):
        nf.convert(model, "fixup", X, heads=["fc"])


class RMSNormGated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(D))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return F.rms_norm(x * F.silu(gate), (D,), self.weight)


class GatedNorm(Block):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.norm = nn.Linear(D, D), RMSNormGated()

    def branch(self, x: Tensor) -> Tensor:
        return self.second(F.relu(self.first(self.norm(x, self.gate(x)))))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: sequential(GatedNorm),
            r"'1.norm' \(and 2 more\): RMSNormGated is called with several tensors; .*gating, a module",
        ),
        (lambda: sequential().to("meta"), r"got '0.weight' on the meta device; initialize the model first"),
        (lambda: torch.jit.trace(sequential(), X), r"expected Python modules, got the TorchScript of"),
        (lambda: nn.Sequential(nn.LazyLinear(4)), r"got the lazy '0.weight'; run the model once"),
        (
            lambda: torch.compile(sequential(), backend="eager"),
            r"got OptimizedModule around a Sequential; convert model._",
        ),
    ],
    ids=["gated norm", "meta", "script", "lazy", "compiled"],
)
def test_model_that_cannot_be_changed_is_refused_in_one_sentence(build: Callable[[], Any], message: str) -> None:
    for convert in (nf.convert, nf.convert_):
        with pytest.raises(ValueError, match=message):
            convert(build(), "fixup", X)


class Checkpointed(Block):
    """Runs its branch again in the backward pass."""

    def branch(self, x: Tensor) -> Tensor:
        return checkpoint(super().branch, x, use_reentrant=False)


@pytest.mark.parametrize("method", ["fixup", "skipinit", "nf"])
def test_checkpointed_blocks_learn(method: str) -> None:
    torch.manual_seed(0)
    model = sequential(Checkpointed)
    converted, _ = nf.convert(model, method, X)
    assert moving(model, X) & {name for name, _ in converted.named_parameters()} <= moving(converted, X)


class Pyramid(nn.Module):
    """A pyramid's nodes: each adds the outputs of the two nodes before it, so that zeros add up to zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.head = nn.Linear(8, D), nn.LayerNorm(D), nn.Linear(D, 5)
        self.nodes = nn.ModuleList(nn.Sequential(nn.Linear(D, D), nn.LayerNorm(D)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x))
        y = self.nodes[0](x)
        for node in self.nodes[1:]:
            x, y = y, node(F.silu(x + y))
        return self.head(y)


def test_output_layer_of_zeros_that_reads_zeros_is_refused() -> None:
    """Fixup sets the head to 0, which learns first; after nodes of zeros it cannot, and so nothing does."""
    torch.manual_seed(0)
    text = refusal(Pyramid(), "fixup", X)
    assert "would never learn: it starts at zero" in text
    assert named_methods(text) == ["nf", "wn", "dyt"]
    assert untried_methods(text) == ["skipinit", "rezero"]
    converted, _ = nf.convert(Pyramid(), "nf", X)
    assert moving(Pyramid(), X) & {name for name, _ in converted.named_parameters()} <= moving(converted, X)


class Streams(nn.Module):
    """Two streams that an identity matrix mixes (hyper-connections); `turned` swaps the operands of the product."""

    def __init__(self, turned: bool = False) -> None:
        super().__init__()
        self.mix, self.turned = nn.Parameter(torch.eye(2)), turned
        self.norm, self.first, self.second = nn.LayerNorm(D), nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        mixed = (x.mT @ self.mix).mT if self.turned else torch.einsum("ij,bjd->bid", self.mix, x)
        return mixed + self.second(F.relu(self.first(self.norm(x))))


@pytest.mark.parametrize("method", ["fixup", "skipinit", "nf", "wn"])
@pytest.mark.parametrize("turned", [False, True])
def test_identity_matrix_that_mixes_streams_is_kept(method: str, turned: bool) -> None:
    blocks = [Streams(turned) for _ in range(4)]
    model = nn.Sequential(nn.Linear(8, 2 * D), nn.Unflatten(1, (2, D)), *blocks, nn.Flatten(), nn.Linear(2 * D, 5))
    converted, plan = nf.convert(model, method, X)
    assert torch.equal(converted[2].mix, torch.eye(2))
    assert len(plan.branches) == 4
    assert moving(model, X) & {name for name, _ in converted.named_parameters()} <= moving(converted, X)


class Unrolled(nn.Module):
    """A recurrent cell with a residual sum; its layers are used at every step, after different signals."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.own, self.given, self.head = nn.LayerNorm(D), nn.Linear(D, D), nn.Linear(2, D), nn.Linear(D, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), D)
        for part in x.chunk(4, 1):
            h = h + torch.tanh(self.own(self.norm(h)) + self.given(part))
        return self.head(h)


def test_layer_in_several_places_is_reparametrized_once() -> None:
    torch.manual_seed(0)
    converted, _ = nf.convert(Unrolled(), "wn", X)
    assert type(converted.own).__name__ == "WeightNormLinear"
    assert moving(Unrolled(), X) & {name for name, _ in converted.named_parameters()} <= moving(converted, X)


class StepByStep(Block):
    """A recurrence by hand in the branch, which reads a layer's output at each step; `unbound` by one call."""

    def __init__(self, unbound: bool = False) -> None:
        super().__init__()
        self.unbound = unbound

    def branch(self, x: Tensor) -> Tensor:
        keys = self.first(self.norm(x))
        steps = keys.unbind(1) if self.unbound else [keys[:, t] for t in range(keys.shape[1])]
        state, states = torch.zeros_like(steps[0]), []
        for step in steps:
            state = 0.5 * state + torch.tanh(step)
            states.append(state)
        return self.second(torch.stack(states, 1))


@pytest.mark.parametrize("unbound", [False, True])
def test_layer_that_is_read_step_by_step_is_one_matrix(unbound: bool) -> None:
    example = torch.randn(6, 5, 8)
    model = sequential(lambda: StepByStep(unbound))
    converted, plan = nf.convert(model, "fixup", example)
    assert [layer.parts for branch in plan.branches for layer in branch.layers] == [1] * 6
    assert moving(model, example) & {name for name, _ in converted.named_parameters()} <= moving(converted, example)
