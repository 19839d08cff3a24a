"""Scales that normalizers kept: of branches without weights, and of layers that modulate the signal."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normfree as nf
from normfree.conversion.saving import save_converted
from normfree.nn.normalizers import find_norms

BATCH, LENGTH, WIDTH, CLASSES, BLOCKS = 8, 12, 16, 4, 8
METHODS = ("fixup", "skipinit", "rezero", "nf", "wn", "isograd")


def rms(tensor: Tensor) -> float:
    return float(tensor.detach().double().square().mean().sqrt())


class Mixing(nn.Module):
    """x + mix(norm(x)) without weights, then a branch with weights; keeps both operands of its first sum."""

    def __init__(self, mix: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.norm, self.second_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.mix = mix
        self.operands: tuple[Tensor, Tensor] | None = None

    def add(self, x: Tensor) -> Tensor:
        mixed = self.mix(self.norm(x))
        self.operands = (x.detach(), mixed.detach())
        return x + mixed

    def forward(self, x: Tensor) -> Tensor:
        x = self.add(x)
        return x + self.layers(self.second_norm(x))


class InPlace(Mixing):
    def add(self, x: Tensor) -> Tensor:
        mixed = self.mix(self.norm(x))
        self.operands = (x.detach().clone(), mixed.detach().clone())
        mixed += x
        return mixed


class Pool(nn.Module):
    """A mixer that is a module, after a normalizer that two readers share."""

    def forward(self, x: Tensor) -> Tensor:
        return F.avg_pool1d(x.transpose(1, 2), 3, 1, 1).transpose(1, 2)


class PoolMinusItself(Mixing):
    """PoolFormer's mixer."""

    def __init__(self, mix: Callable[[Tensor], Tensor]) -> None:
        super().__init__(mix)
        self.mix = Pool()

    def add(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        mixed = self.mix(y) - y
        self.operands = (x.detach(), mixed.detach())
        return x + mixed


def fourier(x: Tensor) -> Tensor:
    return torch.fft.fft2(x).real


def shift(x: Tensor) -> Tensor:
    return x.roll(1, dims=1)


def mean(x: Tensor) -> Tensor:
    return 3 * x.abs().mean(1, keepdim=True)


def attention(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x)


def network(block: type[Mixing], mix: Callable[[Tensor], Tensor]) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [block(mix) for _ in range(BLOCKS)]
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *blocks, nn.Flatten(), nn.Linear(LENGTH * WIDTH, CLASSES))


CASES = {
    "fourier": (Mixing, fourier),
    "shift": (Mixing, shift),
    "broadcast mean": (Mixing, mean),
    "in place": (InPlace, shift),
    "pool minus itself": (PoolMinusItself, shift),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", CASES)
def test_branch_without_weights_is_one_part_in_n_of_the_stream(name: str, method: str) -> None:
    """With N such sums each adds 1/N, so that even branches that equal the stream multiply it by (1 + 1/N)^N < e."""
    x = torch.randn(BATCH, LENGTH, WIDTH)
    model, plan = nf.convert(network(*CASES[name]), method, x)
    assert not find_norms(model)
    assert len(plan.branches) == BLOCKS
    model(x)
    for block in model[1 : 1 + BLOCKS]:
        stream, mixed = block.operands
        small = rms(mixed) < rms(stream) / BLOCKS and block.norm.beta.item() == 1
        assert small or rms(mixed) / rms(stream) == pytest.approx(1 / BLOCKS, rel=1e-3)
    stated = {record.name: record.value for record in plan.changes.added}
    assert stated["1.norm.beta"] == pytest.approx(model[1].norm.beta.item())


def test_multiplier_of_a_branch_without_weights_learns_by_the_methods_that_learn_theirs() -> None:
    x = torch.randn(BATCH, LENGTH, WIDTH)
    for method, learns in {"fixup": True, "skipinit": True, "nf": False, "wn": False}.items():
        model, _ = nf.convert(network(Mixing, shift), method, x)
        assert model[1].norm.beta.requires_grad is learns


def test_nonlinear_branch_without_weights_keeps_the_stream_in_scale() -> None:
    x = torch.randn(BATCH, LENGTH, WIDTH)
    for method in METHODS:
        model, plan = nf.convert(network(Mixing, attention), method, x)
        model(x)
        stream, _ = model[BLOCKS].operands
        assert rms(stream) < 2 * math.e
        assert not plan.changes.notes


def test_saved_model_keeps_the_multipliers_of_branches_without_weights(tmp_path: Path) -> None:
    x = torch.randn(BATCH, LENGTH, WIDTH)
    model, plan = nf.convert(network(Mixing, fourier), "fixup", x)
    save_converted(tmp_path / "saved", model, plan, example=x)
    loaded = nf.load(tmp_path / "saved", lambda: network(Mixing, fourier))
    assert torch.equal(loaded(x), model.eval()(x))


def test_model_saved_before_such_branches_had_multipliers_loads_as_it_was(tmp_path: Path) -> None:
    x = torch.randn(BATCH, LENGTH, WIDTH)
    earlier = network(Mixing, shift)
    model, plan = nf.convert(earlier, "fixup", x)
    for block in model[1 : 1 + BLOCKS]:
        block.norm = nn.Identity()
    changes = replace(plan.changes, added=tuple(r for r in plan.changes.added if not r.name.endswith("norm.beta")))
    assert len(changes.added) == len(plan.changes.added) - BLOCKS
    save_converted(tmp_path / "saved", model, replace(plan, changes=changes), example=x)
    loaded = nf.load(tmp_path / "saved", lambda: network(Mixing, shift))
    assert torch.equal(loaded(x), model.eval()(x))


class PostNorm(nn.Module):
    """FNet's block: the Fourier transform reads the stream itself, and is no module."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.second_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x + fourier(x))
        return self.second_norm(x + self.layers(x))


class Fourier(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return fourier(x)


class PostNormModule(PostNorm):
    """The same as a module, as the refusal asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = Fourier()

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x + self.mix(x))
        return self.second_norm(x + self.layers(x))


def blocks(kind: Callable[[], nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    rest = (nn.Flatten(), nn.Linear(LENGTH * WIDTH, CLASSES))
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *(kind() for _ in range(BLOCKS)), *rest)


@pytest.mark.parametrize("method", ["fixup", "skipinit", "nf", "wn"])
def test_branch_without_weights_and_without_a_module_is_refused_with_a_remedy_that_works(method: str) -> None:
    x = torch.randn(BATCH, LENGTH, WIDTH)
    with pytest.raises(ValueError, match=r"grows at sums of a weightless branch.* '1', '2', .*; make that branch"):
        nf.convert(blocks(PostNorm), method, x)
    model, _ = nf.convert(blocks(PostNormModule), method, x)
    assert rms(model(x)) < 3


class Quantized(Mixing):
    """A straight-through estimator: the rounded signal, with the gradient of the signal itself."""

    def add(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return y + ((4 * y).round() / 4 - y).detach()


class Codebook(Mixing):
    """The nearest vector of a codebook, as in a VQ-VAE."""

    def __init__(self, mix: Callable[[Tensor], Tensor]) -> None:
        super().__init__(mix)
        self.codes = nn.Embedding(32, WIDTH)

    def add(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        nearest = torch.cdist(y, self.codes.weight.expand(len(y), -1, -1)).argmin(-1)
        return y + (self.codes(nearest) - y).detach()


@pytest.mark.parametrize("block", [Quantized, Codebook])
def test_straight_through_estimator_gets_no_multiplier(block: type[Mixing]) -> None:
    x = torch.randn(BATCH, LENGTH, WIDTH)
    _, plan = nf.convert(network(block, shift), "skipinit", x)
    names = {record.name for record in plan.changes.added}
    assert names == {f"{i}.layers.2.beta" for i in range(1, 1 + BLOCKS)}


class Adaptive(nn.Module):
    """Adaptive layer norm, as in diffusion Transformers: one layer shifts, scales and gates two branches."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH, elementwise_affine=False) for _ in range(2))
        self.modulation = nn.Linear(WIDTH, 6 * WIDTH)
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(2)
        )

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        parts = self.modulation(F.silu(time)).unsqueeze(1).chunk(6, -1)
        for i, (norm, branch) in enumerate(zip(self.norms, self.branches, strict=True)):
            shift, scale, gate = parts[3 * i : 3 * i + 3]
            x = x + gate * branch(norm(x) * (1 + scale) + shift)
        return x


class Diffusion(nn.Module):
    def __init__(self, depth: int = 6) -> None:
        super().__init__()
        self.stem, self.time = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Adaptive() for _ in range(depth))
        self.norm, self.modulation = nn.LayerNorm(WIDTH, elementwise_affine=False), nn.Linear(WIDTH, 2 * WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        x, time = self.stem(x), self.time(time)
        for block in self.blocks:
            x = block(x, time)
        shift, scale = self.modulation(F.silu(time)).unsqueeze(1).chunk(2, -1)
        return self.head(self.norm(x) * (1 + scale) + shift)


def test_layers_that_modulate_are_found() -> None:
    torch.manual_seed(0)
    plan = nf.discover(Diffusion(), torch.randn(BATCH, LENGTH, WIDTH), torch.randn(BATCH, WIDTH))
    found = {layer.name for layer in plan.layers() if layer.modulates}
    assert found == {"modulation", *(f"blocks.{i}.modulation" for i in range(6))}


@pytest.mark.parametrize("method", ["fixup", "skipinit", "nf", "wn"])
def test_layers_that_modulate_have_a_variance_of_one_part_in_l(method: str) -> None:
    """So the first loss, with targets of variance 1, stays near the original's, and every parameter learns."""
    torch.manual_seed(0)
    original, example = Diffusion(), (torch.randn(BATCH, LENGTH, WIDTH), torch.randn(BATCH, WIDTH))
    target = torch.randn(BATCH, LENGTH, WIDTH)
    model, plan = nf.convert(original, method, example)
    outputs: list[Tensor] = []
    for block in model.blocks:
        block.modulation.register_forward_hook(lambda _m, _a, out: outputs.append(out.detach()))
    before, after = (F.mse_loss(net(*example), target).item() for net in (original, model))
    assert len(outputs) == 6
    for out in outputs:
        assert rms(out - out.mean()) == pytest.approx(len(plan.branches) ** -0.5, rel=1e-2)
    assert after < 1.2 * before
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    start = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    for _ in range(5):
        optimizer.zero_grad()
        F.mse_loss(model(*example), target).backward()
        optimizer.step()
    assert not [name for name, p in start.items() if torch.equal(p, model.get_parameter(name))]
