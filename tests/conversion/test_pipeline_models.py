"""Conversion of third-party models: branches are found, normalizers removed, and the result trains."""

import copy
import re
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import normfree
from foreign_models import CASES, METHODS, REFUSED, Case
from normfree.conversion import convert
from normfree.models.third_party import create_model
from normfree.nn.normalizers import find_norms
from pass_counter import Passes
from remedies import refusal

# All pairs of small models, and a few larger ones; the rest is marked slow.
SMALL = ("bert", "gpt2", "vit", "t5", "llama")
LARGE = ("convnext_tiny", "vit_b_16", "swin_t")
FAST = {
    *[(model, method) for model in SMALL for method in METHODS],
    ("resnet18", "fixup"), ("mobilenet_v3_small", "fixup"), ("convnext_atto", "hanin"), ("vit_tiny_patch16_224", "wn"),
}  # fmt: skip
# The original's weights, without batch norm, return 1e-13 or less.
VANISHING = {(model, "dyt") for model in ("mobilenet_v3_small", "mobilenet_v2", "efficientnet_b0")}
PAIRS = [(model, method) for model in CASES for method in METHODS if (model, method) not in REFUSED | VANISHING]


def pair(model: str, method: str) -> object:
    return pytest.param(model, method, marks=() if (model, method) in FAST else pytest.mark.slow)


@pytest.fixture(autouse=True)
def _seeded() -> object:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def made(name: str) -> Case:
    return CASES[name]()


def steps(case: Case, model: torch.nn.Module, groups: object, count: int) -> list[float]:
    """The losses of a few steps of Adam on the fixed batch."""
    optimizer = torch.optim.Adam(groups)
    losses = []
    for _ in range(count):
        optimizer.zero_grad()
        loss = case.loss(model)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("name", "method"), [pair(*p) for p in PAIRS])
def test_converted_model_has_no_norm_and_learns(name: str, method: str) -> None:
    case = made(name)
    model, plan = convert(case.model, method, case.example, generator=torch.Generator().manual_seed(0))
    assert not find_norms(model)
    assert len(plan.branches) == case.branches
    assert len(plan.changes.removed) == case.norms == len(find_norms(case.model))
    rate = 3e-4 if name in LARGE else 1e-3
    groups = normfree.param_groups(model, lr=rate, method=method, plan=plan)
    model.eval()  # no dropout: the loss falls for what was learned
    losses = steps(case, model, groups, 40 if name in SMALL else 15)
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    assert torch.tensor(losses).isfinite().all()
    assert losses[-1] < losses[0] - 0.01


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in (*SMALL, "resnet18", "convnext_atto") else pytest.mark.slow) for n in CASES],
)
def test_conversion_keeps_the_plan(name: str) -> None:
    """The names in the plan hold for the converted model: looking at it again finds the same branches."""
    case = made(name)
    model, plan = convert(case.model, "skipinit", case.example)
    again = normfree.discover(model, case.example)
    assert [b.name for b in again.branches] == [b.name for b in plan.branches]
    assert [b.degree for b in again.branches] == [b.degree for b in plan.branches]
    assert [b.last_layers for b in again.branches] == [b.last_layers for b in plan.branches]
    assert set(case.model.state_dict()) >= {k for k in model.state_dict() if not k.endswith(("beta", "delta", "shift"))}


@pytest.mark.parametrize(
    ("name", "method"),
    [pytest.param(*p, marks=() if p == ("swin_t", "nf") else pytest.mark.slow) for p in sorted(REFUSED)],
)
def test_weight_used_without_a_call_is_not_reparametrized(name: str, method: str) -> None:
    case = made(name)
    with pytest.raises(ValueError, match=r"attn|self_attention.* cannot become .* used without a call"):
        convert(case.model, method, case.example)


@pytest.mark.parametrize(("name", "method"), sorted(VANISHING))
def test_model_whose_signal_would_vanish_is_refused(name: str, method: str) -> None:
    case = made(name)
    text = refusal(case.model, method, case.example)
    assert re.search(r"output 0 is \S+ times as large as the original's, from '\S+' on; use 'fixup', 'skipinit'", text)


def test_resnet50_is_converted_in_seconds() -> None:
    case = made("resnet50")
    begun = time.perf_counter()
    _, plan = convert(case.model, "fixup", case.example)
    assert time.perf_counter() - begun < 5
    assert plan.stage_sizes == (3, 4, 6, 3)
    assert {b.degree for b in plan.branches} == {3}


def seconds(function: Callable[[], object], times: int) -> float:
    """The median time of a call on the processor, which other processes hardly change."""
    found = []
    for _ in range(times):
        began = time.process_time()
        function()
        found.append(time.process_time() - began)
    return sorted(found)[times // 2]


COSTS = pytest.mark.parametrize(
    ("name", "method", "refused"),
    [
        ("torchvision:resnet50", "fixup", False),
        ("torchvision:resnet50", "nf", False),
        ("torchvision:efficientnet_b0", "fixup", False),
        ("torchvision:efficientnet_b0", "nf", False),
        ("torchvision:densenet121", "fixup", True),
        ("torchvision:shufflenet_v2_x0_5", "fixup", True),
        ("torchvision:vgg11_bn", "fixup", True),
        ("timm:mobileone_s0", "fixup", True),
        ("timm:repvit_m0_9", "nf", True),
    ],
)


def converts(model: nn.Module, method: str, x: Tensor) -> bool:
    try:
        convert(model, method, x)
    except ValueError:
        return False
    return True


@COSTS
def test_two_images_are_converted_or_refused_in_fifteen_forward_passes(name: str, method: str, refused: bool) -> None:
    torch.manual_seed(0)
    passes = Passes()
    model = passes.around(create_model(name).train())
    assert converts(model, method, torch.randn(2, 3, 128, 128)) is not refused
    assert 0 < passes.cost <= 15


@pytest.mark.slow
@COSTS
def test_conversion_or_refusal_takes_at_most_the_time_of_fifteen_passes(name: str, method: str, refused: bool) -> None:
    """A forward pass is that of the original in training mode, on eight images; all run on one thread, in one run.

    The time that does not depend on the size of the example, up to a second, counts more on smaller ones.
    """
    torch.manual_seed(0)
    model, x = create_model(name).train(), torch.randn(8, 3, 224, 224)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert converts(model, method, x) is not refused
        forward = seconds(lambda: model(x), 3)
        cost = seconds(lambda: converts(model, method, x), 3)
    finally:
        torch.set_num_threads(threads)
    assert cost < 15 * forward


@pytest.mark.slow
def test_thousand_blocks_are_converted_in_a_minute() -> None:
    model = normfree.build("wrn-2008-1", "batchnorm")
    begun = time.process_time()  # of this process, so that other work on the machine does not count
    _, plan = convert(model, "fixup", torch.randn(2, 3, 32, 32))
    assert time.process_time() - begun < 60
    assert len(plan.branches) == 1002


@pytest.mark.parametrize("method", ["fixup", pytest.param("rezero", marks=pytest.mark.slow)])
def test_converted_gpt2_overfits_a_text_as_its_original_does(method: str) -> None:
    import transformers

    text = (
        b"It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of folly, "
        b"it was the epoch of belief"
    )
    ids = torch.tensor(list(text[:128])).view(4, 32)
    config = transformers.GPT2Config(
        vocab_size=128, n_embd=64, n_layer=3, n_head=4, n_positions=32, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    original = transformers.GPT2LMHeadModel(config)
    model, plan = convert(original, method, {"input_ids": ids}, generator=torch.Generator().manual_seed(0))
    assert len(plan.branches) == 6

    def final(trained: torch.nn.Module, groups: object) -> float:
        optimizer = torch.optim.Adam(groups, lr=3e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 120)
        for _ in range(120):
            optimizer.zero_grad()
            loss = trained(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            schedule.step()
        return loss.item()

    converted = final(model, normfree.param_groups(model, lr=3e-3, method=method, plan=plan))
    assert final(original, original.parameters()) < 0.1
    assert converted < 0.1


# Three seeds at rates 0.05 to 0.2: batch norm reached 79 to 84 %, Fixup 67 to 76 %, and twice it fell to chance.
_LAGS = pytest.mark.xfail(reason="Fixup learns more slowly than batch norm in the first 300 steps", strict=False)


@pytest.mark.slow
@pytest.mark.parametrize("method", [pytest.param("fixup", marks=_LAGS), "nf"])
def test_converted_resnet_learns_images_as_with_batch_norm(method: str) -> None:
    """A small ResNet of torchvision's blocks, 300 steps on the embedded images: within 3 points of the original."""
    from torch import nn
    from torchvision.models.resnet import BasicBlock

    from normfree.data import load

    data = load("fashion14")
    inputs, tests = [(s.images.float() / 255 - data.mean[0]) / data.std[0] for s in (data.train, data.test)]

    def down(narrow: int, wide: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(narrow, wide, 1, 2, bias=False), nn.BatchNorm2d(wide))

    original = nn.Sequential(
        nn.Conv2d(1, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True),
        BasicBlock(16, 16), BasicBlock(16, 16), BasicBlock(16, 32, 2, down(16, 32)), BasicBlock(32, 32),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip

    def accuracy(model: nn.Module, groups: object, count: int = 300) -> float:
        optimizer = torch.optim.SGD(groups, lr=0.2, momentum=0.9)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / count)
        generator = torch.Generator().manual_seed(0)
        for _ in range(count):
            batch = torch.randint(0, len(inputs), (64,), generator=generator)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs[batch]), data.train.labels[batch]).backward()
            optimizer.step()
            schedule.step()
        with torch.no_grad():
            return (model.eval()(tests).argmax(1) == data.test.labels).float().mean().item()

    twin = copy.deepcopy(original)
    reached = accuracy(twin, twin.parameters())
    assert reached > 0.75
    model, plan = convert(original, method, inputs[:8], generator=torch.Generator().manual_seed(0))
    groups = normfree.param_groups(model, lr=0.2, method=method, plan=plan)
    assert accuracy(model, groups) > reached - 0.03
