"""The master vector against the parameters one by one."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normfree.methods import get, names
from normfree.models import build
from normfree.nn.residual import Residual, reset_precision_
from normfree.nn.scalars import ScalarBias, ScalarMultiplier
from normfree.nn.training_scalar_folding import foldable_layers
from normfree.optim.learning_rates import param_groups
from normfree.optim.master_weights import MasterWeights
from normfree.train.engine.forward import apply_precision_

PRECISIONS: tuple[...] = ("float32", "bf16", "mixed")
RESIDUAL = [name for name in names() if "residual" in get(name).skips]
BIASED = "fixup:transformer=biased"
LEARNS_BETA = ("fixup", "skipinit", "rezero")
every_precision = pytest.mark.parametrize("precision", PRECISIONS)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(count: int = 2, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, 3, 16, 16, generator=seeded(5)).to(dtype)


@cache
def built(method: str) -> nn.Module:
    return build("resnet8", method, example=images(16), generator=seeded())


def make(method: str, precision: str) -> nn.Module:
    network = copy.deepcopy(built(method))
    apply_precision_(network, precision)
    return network


def mastered(model: nn.Module, **options: Any) -> MasterWeights:
    return MasterWeights(model, param_groups(model, lr=0.1, weight_decay=0.01), **options)


def one_group(model: nn.Module) -> list[dict[str, Any]]:
    return [{"name": "all", "params": list(model.parameters()), "lr": 0.1, "weight_decay": 0.0}]


def small(*, short: bool = True) -> nn.Sequential:
    """A convolution in bf16 before layers in float32: sizes that are no multiple of anything."""
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.Flatten(), nn.Linear(5, 7))
    if short:
        model[0].bfloat16()
    return model


def scaled_names(model: nn.Module) -> dict[str, str]:
    """The names of the weights that a learnable β multiplies, with that of β."""
    names = {id(p): name for name, p in model.named_parameters()}
    found = [a for a in foldable_layers(model) if a.beta is not None]
    return {names[id(a.layer.weight)]: names[id(a.beta.value)] for a in found}


def copies(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def give_gradients(model: nn.Module, seed: int = 0, *, without: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """Random gradients in the parameters' types; returned in float32."""
    found = {}
    for i, (name, p) in enumerate(model.named_parameters()):
        p.grad = None if name in without else torch.randn(p.shape, generator=seeded(100 * seed + i)).to(p.dtype)
        found[name] = torch.zeros(p.shape) if p.grad is None else p.grad.float()
    return found


@every_precision
@pytest.mark.parametrize("method", RESIDUAL)
def test_masters_change_no_method(method: str, precision: str) -> None:
    """Values, types, names and the function are as before, in either order of memory."""
    for channels_last in (False, True):
        model = make(method, precision).eval()
        x = images(dtype=torch.bfloat16 if precision == "bf16" else torch.float32)
        before, kinds, keys = copies(model), {n: p.dtype for n, p in model.named_parameters()}, [*model.state_dict()]
        identities = [id(p) for p in model.parameters()]
        expected = model(x)
        masters = mastered(model, channels_last=channels_last)
        assert [id(p) for p in model.parameters()] == identities
        assert {n: p.dtype for n, p in model.named_parameters()} == kinds
        assert [*model.state_dict()] == keys
        assert masters.parameters.keys() == before.keys()
        held, scaled = masters.named(masters.values), scaled_names(model)
        assert bool(scaled) == (method in LEARNS_BETA)
        for name, p in model.named_parameters():
            if name not in scaled:
                assert torch.equal(p, before[name])
            assert torch.equal(held[name], before[name].float())
            assert held[name].dtype is torch.float32
            assert p.requires_grad
            assert p.is_leaf
        if channels_last or (scaled and precision != "float32"):  # other kernels, other rounding
            torch.testing.assert_close(model(x), expected, rtol=2e-2, atol=2e-2)
        else:
            assert torch.equal(model(x), expected)


@every_precision
@pytest.mark.parametrize("channels_last", [False, True])
def test_masters_lie_side_by_side(precision: str, channels_last: bool) -> None:
    model = make("batchnorm", precision)
    masters = mastered(model, channels_last=channels_last)
    ends = [0]
    for group in masters.groups:
        assert group.span.start == ends[-1]
        ends.append(group.span.stop)
    assert ends[-1] == len(masters.values) == len(masters.gradient)
    folded = torch.zeros(len(masters.values), dtype=torch.int64)
    for view in masters.named(folded).values():
        view.add_(1)
    assert folded.max() == 1  # no two overlap
    assert folded.sum() == sum(p.numel() for p in model.parameters())
    for name, p in model.named_parameters():
        assert p.storage_offset() % 64 == 0, name
        if p.dim() == 4:
            order = torch.channels_last if channels_last else torch.contiguous_format
            assert p.is_contiguous(memory_format=order)
            assert masters.gradients[name].stride() == p.stride()


def test_groups_hold_the_parameters_that_the_method_put_there() -> None:
    model = make("fixup", "bf16")
    groups = param_groups(model, lr=0.1, weight_decay=0.01)
    masters = MasterWeights(model, groups)
    marks = torch.zeros_like(masters.values)
    for i, group in enumerate(masters.groups):
        marks[group.span] = i
    where = masters.named(marks)
    named = {id(p): name for name, p in model.named_parameters()}
    for i, (group, stated) in enumerate(zip(masters.groups, groups, strict=True)):
        assert (group.name, group.lr, group.weight_decay) == (stated["name"], stated["lr"], stated["weight_decay"])
        assert all((where[named[id(p)]] == i).all() for p in stated["params"])


def test_masters_of_float32_are_the_parameters() -> None:
    model = small(short=False)
    masters = MasterWeights(model, one_group(model))
    masters.values.add_(1.0)
    held = masters.named(masters.values)
    for name, p in model.named_parameters():
        assert p.data_ptr() == held[name].data_ptr()
        assert torch.equal(p, held[name])


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("channels_last", [False, True])
def test_publish_rounds_as_torch_does(kind: torch.dtype, channels_last: bool) -> None:
    model = small()
    model[0].to(kind)
    masters = MasterWeights(model, one_group(model), channels_last=channels_last)
    masters.values.copy_(torch.randn(len(masters.values), generator=seeded(3)))
    stale = model[0].weight.detach().clone()
    assert torch.equal(model[3].weight, masters.named(masters.values)["3.weight"])
    masters.copy_to_model_()
    assert not torch.equal(model[0].weight, stale)
    for name, p in model.named_parameters():
        held = masters.named(masters.values)[name]
        assert torch.equal(p, held.to(p.dtype))
    assert not torch.equal(model[0].weight.float(), masters.named(masters.values)["0.weight"])  # it did round


@pytest.mark.parametrize("channels_last", [False, True])
def test_collect_equals_a_plain_loop(channels_last: bool) -> None:
    model = make("nf", "mixed")
    masters = mastered(model, channels_last=channels_last)
    total = {name: torch.zeros(p.shape) for name, p in model.named_parameters()}
    for turn in range(3):
        gradients = give_gradients(model, turn, without=("stem.conv.weight",) if turn == 1 else ())
        masters.gather_gradients_(add=turn > 0)
        for name, gradient in gradients.items():
            total[name] += gradient
            assert torch.equal(masters.gradients[name], total[name]), name
        assert all(p.grad is None for p in model.parameters())
    again = give_gradients(model, 7)
    masters.gather_gradients_()  # without `add` the sums are forgotten
    assert all(torch.equal(masters.gradients[name], again[name]) for name in again)


def test_collect_takes_a_missing_gradient_as_zero() -> None:
    model = small()
    masters = MasterWeights(model, one_group(model))
    for view in masters.gradients.values():
        view.fill_(9.0)
    gradients = give_gradients(model, without=("0.weight", "3.bias"))
    masters.gather_gradients_()
    assert all(torch.equal(masters.gradients[name], gradients[name]) for name in gradients)
    masters.gather_gradients_(add=True)  # all are missing now
    assert all(torch.equal(masters.gradients[name], gradients[name]) for name in gradients)
    masters.gather_gradients_()
    assert not masters.gradient.any()


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("channels_last", [False, True])
def test_collect_takes_gradients_of_any_type_and_order(add: bool, channels_last: bool) -> None:
    model = nn.Sequential(*(nn.Conv2d(4, 6, 3) for _ in range(4)), nn.Linear(5, 3))
    masters = MasterWeights(model, one_group(model), channels_last=channels_last)
    masters.gradient.fill_(0.0)
    wanted = give_gradients(model)
    model[0].weight.grad = model[0].weight.grad.contiguous(memory_format=torch.channels_last)
    model[1].weight.grad = wanted["1.weight"].transpose(2, 3).contiguous().transpose(2, 3)
    model[4].weight.grad = wanted["4.weight"].mT.contiguous().mT
    model[3].bias.grad = torch.ones(()).expand(6)  # as the gradient of a sum comes
    wanted["3.bias"] = torch.ones(6)
    masters.gather_gradients_(add=add)
    for name, gradient in wanted.items():
        assert torch.equal(masters.gradients[name], gradient), name


def test_gradients_of_a_backward_pass_are_found_by_name() -> None:
    model, plain = make("fixup", "float32"), make("fixup", "float32")
    masters = mastered(model)
    for network in (model, plain):
        nn.functional.cross_entropy(network(images()), torch.tensor([1, 2])).backward()
    masters.gather_gradients_()
    for name, p in plain.named_parameters():
        assert torch.equal(masters.gradients[name], p.grad), name
    assert any(g.any() for g in masters.gradients.values())


@every_precision
@pytest.mark.parametrize("method", RESIDUAL)
def test_release_gives_back_a_float32_model(method: str, precision: str) -> None:
    model = make(method, precision)
    masters = mastered(model, channels_last=True)
    masters.values.mul_(1.001)  # more digits than a short type holds
    masters.copy_to_model_()
    expected = {name: view.clone() for name, view in masters.named(masters.values).items()}
    masters.release_()
    reset_precision_(model)
    masters.values.fill_(float("nan"))
    storages = set()
    for name, p in model.named_parameters():
        assert torch.equal(p, expected[name])
        assert p.dtype is torch.float32
        assert p.is_contiguous()
        assert p.untyped_storage().nbytes() == 4 * p.numel()
        storages.add(p.untyped_storage().data_ptr())
    assert len(storages) == len(expected)
    out = model(images())
    assert out.dtype is torch.float32
    out.square().sum().backward()
    assert all(p.grad is None or p.grad.dtype is torch.float32 for p in model.parameters())


@pytest.mark.parametrize("precision", ["bf16", "mixed"])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("method", LEARNS_BETA)
def test_learnable_beta_is_published_in_the_weight(method: str, precision: str, channels_last: bool) -> None:
    """The layer computes with β · W, rounded once; with G its gradient, W gets β · G and β gets ⟨G, W⟩."""
    model = make(method, precision)
    masters = mastered(model, channels_last=channels_last)
    blocks, scaled = [m for m in model.modules() if isinstance(m, Residual)], scaled_names(model)
    assert len(scaled) == len(blocks) == 3
    assert all(block.beta_in_weight for block in blocks)
    held = masters.named(masters.values)
    with torch.no_grad():
        for i, (weight, beta) in enumerate(scaled.items()):
            held[beta].fill_(0.3 + i)
            held[weight].copy_(torch.randn(held[weight].shape, generator=seeded(i)))
    masters.copy_to_model_()
    computing = dict(model.named_parameters())
    for name, p in computing.items():
        expected = held[name] * held[scaled[name]] if name in scaled else held[name]
        assert torch.equal(p, expected.to(p.dtype)), name
    gradients: dict[str, Tensor] = {}
    for turn in range(2):
        for name, gradient in give_gradients(model, turn, without=tuple(scaled.values())).items():
            gradients[name] = gradients.get(name, 0) + gradient
        masters.gather_gradients_(add=turn > 0)
    masters.unfold_gradients_()
    for weight, beta in scaled.items():
        inner = (gradients[weight].double() * held[weight].double()).sum().float()
        torch.testing.assert_close(masters.gradients[beta], inner.reshape(1), rtol=1e-4, atol=1e-4)
        assert torch.equal(masters.gradients[weight], gradients[weight] * held[beta])
    for name in gradients.keys() - scaled.keys() - set(scaled.values()):
        assert torch.equal(masters.gradients[name], gradients[name]), name


def test_float32_blocks_multiply_by_their_beta_themselves() -> None:
    model = make("fixup", "float32")
    masters = mastered(model)
    assert not any(block.beta_in_weight for block in model.modules() if isinstance(block, Residual))
    before = give_gradients(model)
    masters.gather_gradients_()
    masters.unfold_gradients_()
    assert all(torch.equal(masters.gradients[name], before[name]) for name in before)


@pytest.mark.parametrize("precision", ["bf16", "mixed"])
def test_gradients_through_a_published_beta_are_those_of_float32(precision: str) -> None:
    exact, short = make("fixup", "float32"), make("fixup", "float32")
    with torch.no_grad():
        for i, (one, other) in enumerate(zip(exact.parameters(), short.parameters(), strict=True)):
            one.add_(0.05 * torch.randn(one.shape, generator=seeded(i)))
            one.copy_(one.bfloat16())
            other.copy_(one)
    apply_precision_(short, precision)
    masters = mastered(short)
    x, y = images(8), torch.arange(8)
    nn.functional.cross_entropy(exact(x), y).backward()
    nn.functional.cross_entropy(short(x.bfloat16() if precision == "bf16" else x).float(), y).backward()
    masters.gather_gradients_()
    masters.unfold_gradients_()
    wanted, scaled = {name: p.grad for name, p in exact.named_parameters()}, scaled_names(short)
    for name, beta in scaled.items():
        assert (masters.gradients[name] - wanted[name]).norm() < 0.1 * wanted[name].norm(), name
        # A sum of terms of both signs, so its rounding is measured against their size.
        terms = wanted[name].norm() * masters.named(masters.values)[name].norm()
        assert (masters.gradients[beta] - wanted[beta]).abs() < 0.02 * terms, beta
        assert wanted[beta].abs() > 0


def test_scaled_weights_of_several_groups_are_not_mixed_up() -> None:
    """Groups of any cut: between weights of one size lie parameters of others."""
    model = make("fixup", "bf16")
    scaled, named = scaled_names(model), dict(model.named_parameters())
    first = [name for name in named if name.startswith(("stem", "body.0", "classifier"))]
    cut = (first, [name for name in named if name not in first])
    for name in list(scaled)[1:]:  # all of one size
        block = model.get_submodule(name.removesuffix(".branch.conv2.weight"))
        block.branch.conv2 = nn.Conv2d(16, 16, 3, bias=False, dtype=torch.bfloat16)
    named = dict(model.named_parameters())
    groups = [{"name": "", "params": [named[n] for n in part], "lr": 1.0, "weight_decay": 0.0} for part in cut]
    before = copies(model)
    masters = MasterWeights(model, groups)
    held = masters.named(masters.values)
    with torch.no_grad():
        for beta in scaled.values():
            held[beta].fill_(2.0)
    masters.copy_to_model_()
    for name, p in model.named_parameters():
        if name not in scaled.values():
            assert torch.equal(p, 2 * before[name] if name in scaled else before[name]), name


class Tied(nn.Module):
    """One weight in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x).relu())


def test_shared_parameters_stay_shared() -> None:
    model, plain = Tied(), Tied()
    plain.load_state_dict(model.state_dict())
    masters = MasterWeights(model, one_group(model))
    assert [*masters.parameters] == ["one.weight", "one.bias", "two.bias"]
    assert model.two.weight is model.one.weight
    assert {"one.weight", "two.weight"} <= model.state_dict().keys()
    x = torch.randn(3, 4, generator=seeded())
    for network in (model, plain):
        network(x).sum().backward()
    masters.gather_gradients_()
    assert torch.equal(masters.gradients["one.weight"], plain.one.weight.grad)
    masters.release_()
    assert model.two.weight is model.one.weight
    assert torch.equal(model.one.weight, plain.one.weight)


def test_odd_shapes_are_held() -> None:
    model = nn.Module()
    shapes: list[tuple[int, ...]] = [(), (1,), (0, 3), (65,), (2, 3, 1, 1), (3, 1, 1, 1), (2, 2, 2), (64,)]
    model.held = nn.ParameterList([torch.randn(shape, generator=seeded(i)) for i, shape in enumerate(shapes)])
    before = copies(model)
    masters = MasterWeights(model, one_group(model), channels_last=True)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    give_gradients(model)
    masters.gather_gradients_()
    masters.release_()
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_frozen_parameters_are_released_in_float32(dtype: torch.dtype) -> None:
    model = small(short=False).to(dtype)
    model[0].requires_grad_(False)
    MasterWeights(model, one_group(model)).release_()
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_two_short_types_are_refused() -> None:
    model = small()
    model[3].half()
    before = copies(model)
    with pytest.raises(
        ValueError, match=r"at most one half-precision dtype, got torch\.bfloat16, torch\.float16; convert"
    ):
        MasterWeights(model, one_group(model))
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_float64_is_not_rounded_behind_the_callers_back() -> None:
    model = small(short=False).double()
    with pytest.raises(ValueError, match=r"half-precision dtype, got torch\.float64"):
        MasterWeights(model, one_group(model))


def scattered(model: nn.Module) -> nn.Module:
    """Random weights, and scalars far from neutral, so that none may be left out."""
    draws = seeded(7)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=draws) * (p.shape[1] ** -0.5 if p.dim() > 1 else 0.3))
        for module in model.modules():
            if isinstance(module, ScalarMultiplier) and module.learnable:
                module.set_(float(1 + 0.3 * torch.randn((), generator=draws)))
    return model


def sentences() -> tuple[Tensor, Tensor]:
    return torch.randint(4, 40, (6, 9), generator=seeded(1)), torch.randint(4, 40, (6, 7), generator=seeded(2))


@pytest.mark.parametrize("precision", ["bf16", "mixed"])
def test_scalar_biases_of_a_transformer_are_left_out_until_the_masters_are_released(precision: str) -> None:
    model = scattered(build("transformer-1-1-32-64-2", BIASED, num_classes=40, dropout=0.1)).eval()
    expected = model(*sentences())
    apply_precision_(model, precision)
    masters = mastered(model)
    folded = [m for m in model.modules() if isinstance(m, ScalarBias) and m.folded]
    others = [m for m in model.modules() if isinstance(m, ScalarBias) and not m.folded]
    assert folded
    assert others == [*model.head]  # the one before the classifier is in no block
    assert others[0].moved is not None
    assert (model(*sentences()).float() - expected).norm() < 0.05 * expected.norm()
    masters.release_()
    reset_precision_(model)
    assert not any(m.folded or m.moved is not None for m in (*folded, *others))
    assert (model(*sentences()) - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize("name", ["encoder-2-32-64-2", "decoder-2-32-64-2"])
def test_stream_of_an_encoder_or_decoder_alone_gives_its_biases_to_what_reads_it(name: str) -> None:
    model = scattered(build(name, BIASED, num_classes=40, dropout=0.0)).eval()
    tokens = sentences()[0]
    expected = model(tokens)
    apply_precision_(model, "bf16")
    masters = mastered(model)
    assert all(block.delta.folded for block in model.modules() if isinstance(block, Residual))
    out = model(tokens).float()
    assert (out - expected).norm() < 0.05 * expected.norm()
    with torch.no_grad():
        last = next(m for m in model.modules() if isinstance(m, ScalarBias) and m.moved is not None)
        last.moved.zero_()
    assert (model(tokens).float() - out).norm() > 0.05 * expected.norm()  # the moved sum does matter
    masters.release_()


@pytest.mark.parametrize("model", [nn.Linear(2, 2).requires_grad_(False), nn.ReLU()])
def test_model_of_which_nothing_learns_is_refused(model: nn.Module) -> None:
    for groups in (one_group(model), []):
        with pytest.raises(ValueError, match=r"expected at least one parameter of \w+ that learns, got none; set req"):
            MasterWeights(model, groups)
