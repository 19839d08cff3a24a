"""The stage kernels against the oracle, on a GPU: `pytest -m gpu`."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from normfree.kernels import SCALARS, SHAPES, compile, operators, stage, why_not
from normfree.kernels.driver import kernels_for, multiprocessors
from normfree.kernels.tiling import Form, choose_tiling
from stage_layouts import pack_weights, shifts_of
from stage_oracle import Case, Result, distance, make_case, run_oracle

pytestmark = pytest.mark.gpu
FIXUP = ("alpha", "entry_bias", "entry_gain", "inner_gain", "a", "c", "exit_gain")
FIXUP_PRE = ("alpha", "entry_gain", "inner_gain", "a", "c", "exit_gain")
BF16 = 2.0**-8  # one step of bfloat16
CIFAR = ((16, 32), (32, 16), (64, 8))


def run_kernels(case: Case, form: Form, **options: object) -> Result:
    leaves = [None if t is None else t.detach().clone().requires_grad_() for t in case[:4]]
    out = stage(*leaves, form=form, **options)  # type: ignore[arg-type]
    out.backward(case.gradient)
    return Result(out.detach(), *(None if t is None else t.grad for t in leaves))  # type: ignore[arg-type]


def assert_near(got: Result, expected: Result, *, out: float, gradients: float, skip: tuple[str, ...] = ()) -> None:
    """Each within its tolerance; scalars by name, against the size of all scalars' gradients in their block."""
    assert distance(got.out, expected.out) < out
    assert distance(got.x, expected.x) < gradients
    assert distance(got.weights, expected.weights) < gradients
    if expected.biases is not None and got.biases is not None:
        assert distance(got.biases, expected.biases) < gradients
    sizes = expected.scalars.abs().mean(1)
    for i, name in enumerate(SCALARS):
        if name in skip:
            assert not got.scalars[:, i].any()
        else:
            error = (got.scalars[:, i] - expected.scalars[:, i]).abs() / (expected.scalars[:, i].abs() + sizes)
            assert error.max() < 2 * gradients, f"gradient of {name}"


def test_the_device_has_kernels() -> None:
    assert [why_not(*shape) for shape in SHAPES] == [None] * len(SHAPES)


@pytest.mark.parametrize("form", ["post", "pre", "linear"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("wide", [False, True], ids=["bf16", "float32"])
@pytest.mark.parametrize("recompute", [False, True], ids=["keep", "recompute"])
def test_one_block_is_the_equation(shape: tuple[int, int], form: Form, wide: bool, recompute: bool) -> None:
    """Rounded where the kernels round, one block agrees far below a step of bfloat16, but for ReLUs within it of 0."""
    case = make_case(*shape, images=3, blocks=1, wide=wide)
    got = run_kernels(case, form, recompute=recompute)
    assert_near(got, run_oracle(case, form, rounding=True), out=BF16 / 4, gradients=4 * BF16)
    assert_near(got, run_oracle(case, form, rounding=False), out=2 * BF16, gradients=30 * BF16)


@pytest.mark.parametrize("images", [1, 7, 131, 257])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_number_of_images(shape: tuple[int, int], images: int) -> None:
    case = make_case(*shape, images=images, blocks=2, seed=images)
    got = run_kernels(case, "pre")
    assert_near(got, run_oracle(case, "pre", rounding=True), out=BF16, gradients=12 * BF16)


@pytest.mark.parametrize("images", [5, 140])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("form", "neutral"), [("post", FIXUP), ("pre", FIXUP_PRE)])
def test_neutral_scalars_are_left_out(
    shape: tuple[int, int], form: Form, neutral: tuple[str, ...], images: int
) -> None:
    case = make_case(*shape, images=images, blocks=2, neutral=neutral, biases=False)
    got = run_kernels(case, form, neutral=neutral)
    assert_near(got, run_oracle(case, form, rounding=True), out=BF16, gradients=12 * BF16, skip=neutral)


def test_all_neutral_is_a_plain_network() -> None:
    case = make_case(16, 32, images=4, blocks=2, neutral=SCALARS, biases=False)
    got = run_kernels(case, "post", neutral=SCALARS)
    assert_near(got, run_oracle(case, "post", rounding=True), out=BF16, gradients=12 * BF16, skip=SCALARS)


@pytest.mark.parametrize("shape", CIFAR, ids=str)
@pytest.mark.parametrize("form", ["post", "pre"])
def test_a_thousand_blocks(shape: tuple[int, int], form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream in float32 keeps a thousand small branches; the backward pass runs in segments."""
    case = make_case(*shape, images=2, blocks=1000, wide=True, neutral=SCALARS, biases=False, scale=0.03)
    case.scalars[:, SCALARS.index("bias_before_conv1")] = 1e-3
    got = run_kernels(case, form)
    expected = run_oracle(case, form, rounding=False)
    assert distance(got.out, expected.out) < BF16
    assert distance(got.x, expected.x) < 8 * BF16
    assert distance(got.weights, expected.weights) < 30 * BF16
    monkeypatch.setattr(operators, "SCRATCH_BYTES", 64 * case.x.numel() * 4)
    parts = run_kernels(case, form)
    for name in ("x", "weights", "scalars"):
        assert distance(getattr(parts, name), getattr(got, name).double()) < 1e-3


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("images", [7, 140])
def test_two_runs_give_the_same_bits(shape: tuple[int, int], images: int) -> None:
    case = make_case(*shape, images=images, blocks=3)
    first, second = run_kernels(case, "post"), run_kernels(case, "post")
    again = run_kernels(case, "post", recompute=True)
    for name, value in first._asdict().items():
        assert torch.equal(value, getattr(second, name)), name
        assert torch.equal(value, getattr(again, name)), f"{name}, recomputed"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("images", [5, 140])
@pytest.mark.parametrize("recompute", [False, True], ids=["keep", "recompute"])
def test_nothing_is_read_before_it_is_written(
    shape: tuple[int, int], images: int, recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case(*shape, images=images, blocks=2)
    expected = run_kernels(case, "post", recompute=recompute)
    new_empty, empty_like = Tensor.new_empty, torch.empty_like
    monkeypatch.setattr(Tensor, "new_empty", lambda *a, **k: new_empty(*a, **k).fill_(float("nan")))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: empty_like(*a, **k).fill_(float("nan")))
    for _ in range(3):
        for name, value in run_kernels(case, "post", recompute=recompute)._asdict().items():
            assert torch.equal(value, getattr(expected, name)), name


@pytest.mark.parametrize("shape", CIFAR, ids=str)
@pytest.mark.parametrize("tap", range(9))
def test_a_wrong_tap_would_be_seen(shape: tuple[int, int], tap: int) -> None:
    """An error of a tenth in one tap of one convolution is far outside the tolerance of the tests above."""
    case = make_case(*shape, images=2, blocks=1)
    expected = run_oracle(case, "linear", rounding=True)
    planted = case.weights.clone()
    planted[0, 1, :, :, tap // 3, tap % 3] *= 1.1
    assert distance(run_kernels(case._replace(weights=planted), "linear").out, expected.out) > 2 * BF16 / 4
    got = run_kernels(case, "linear").weights
    wrong = expected.weights.clone()
    wrong[0, 0, :, :, tap // 3, tap % 3] *= 1.2
    assert distance(got, wrong) > 4 * BF16 > distance(got, expected.weights)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("images", [3, 140])
def test_the_border_is_exact(shape: tuple[int, int], images: int) -> None:
    """Edges agree as the middle does; padding that had the bias, or was not zero, would be seen there."""
    case = make_case(*shape, images=images, blocks=1, neutral=("alpha", "entry_bias", "entry_gain"))
    case.scalars[:, SCALARS.index("bias_before_conv1")] = 0.7
    got, expected = run_kernels(case, "linear"), run_oracle(case, "linear", rounding=True)
    edge = torch.ones(shape[1], shape[1], dtype=torch.bool, device="cuda")
    edge[1:-1, 1:-1] = False
    # The border holds a bias that is rounded to bfloat16.
    assert distance(got.out[..., edge], expected.out[..., edge]) < BF16 / 2
    assert distance(got.x[..., edge], expected.x[..., edge]) < 4 * BF16
    x, w = F.pad(case.x.float() + 0.7, (1, 1, 1, 1), value=0.7), case.weights[0, 0]
    right = F.conv2d(case.x.float() + 0.7, w, padding=1)
    assert distance(F.conv2d(x, w)[..., edge], right[..., edge].double()) > 4 * BF16


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("kind", "images"), [(torch.float32, 1), (torch.bfloat16, 140)])
def test_the_kernel_packs_as_the_reference(shape: tuple[int, int], kind: torch.dtype, images: int) -> None:
    case = make_case(*shape, images=images, blocks=3)
    hopper = torch.cuda.get_device_capability() == (9, 0)
    tiling = choose_tiling(*shape, "pre", images=images, multiprocessors=multiprocessors(0), wgmma=hopper)
    weights = case.weights.to(kind)
    _, _, _, packed, shifts = torch.ops.normfree.stage_forward(case.x, weights, case.scalars, case.biases, "pre", 0, 2)
    flat = weights.flatten(0, 1)
    for got, expected in zip(packed, pack_weights(flat, matrices=tiling.wgmma), strict=True):
        assert torch.equal(got, expected)
    torch.testing.assert_close(shifts, shifts_of(flat, case.scalars, case.biases), rtol=1e-4, atol=1e-5)


def test_a_cuda_graph_replays_it() -> None:
    case, other = (make_case(32, 16, images=9, blocks=3, seed=seed) for seed in (0, 1))
    leaves = [t.detach().clone().requires_grad_() for t in case[:4] if t is not None]
    gradient = case.gradient.clone()

    def step() -> list[Tensor]:
        out = stage(*leaves, form="post")  # type: ignore[arg-type]
        return [out, *torch.autograd.grad(out, leaves, gradient)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    with torch.no_grad():
        for leaf, value in zip([*leaves, gradient], other, strict=True):
            leaf.copy_(value)  # type: ignore[arg-type]
    graph.replay()
    torch.cuda.synchronize()
    for got, expected in zip(results, run_kernels(other, "post"), strict=True):
        assert torch.equal(got, expected)  # type: ignore[arg-type]


def test_torch_compile_keeps_it_whole() -> None:
    case = make_case(16, 32, images=4, blocks=2)

    def network(x: Tensor, weights: Tensor, scalars: Tensor, biases: Tensor) -> Tensor:
        return stage(x * 1.0, weights, scalars, biases, form="pre").float().square().mean()

    leaves = [t.detach().clone().requires_grad_() for t in case[:4] if t is not None]
    compiled = torch.compile(network, fullgraph=True)
    for function in (network, compiled):
        for leaf in leaves:
            leaf.grad = None
        function(*leaves).backward()
        found = [leaf.grad for leaf in leaves]
        if function is network:
            expected = found
    for a, b in zip(found, expected, strict=True):
        assert distance(a, b.double()) < 1e-3  # type: ignore[arg-type, union-attr]


def test_the_operator_obeys_its_schema() -> None:
    case = make_case(64, 8, images=2, blocks=2)
    leaves = [None if t is None else t.detach().clone().requires_grad_() for t in case[:4]]
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(torch.ops.normfree.stage_forward.default, (*leaves, "post", 0, 2), test_utils=checks)


def test_inference_keeps_nothing() -> None:
    case = make_case(16, 32, images=4, blocks=20)
    with torch.no_grad():
        before = torch.cuda.memory_allocated()
        out = stage(*case[:4])
        assert torch.cuda.memory_allocated() - before < 4 * out.numel() * out.element_size() + 2**20
    assert torch.equal(out, run_kernels(case, "post").out)


def test_frozen_inputs_get_no_gradient() -> None:
    case = make_case(16, 32, images=4, blocks=2)
    x = case.x.clone().requires_grad_()
    stage(x, *case[1:4]).backward(case.gradient)
    assert torch.equal(x.grad, run_kernels(case, "post").x)  # type: ignore[arg-type]


def test_images_in_another_order_are_copied() -> None:
    case = make_case(16, 32, images=4, blocks=2)
    plain = case._replace(x=case.x.contiguous(), gradient=case.gradient.contiguous())
    for a, b in zip(run_kernels(plain, "post"), run_kernels(case, "post"), strict=True):
        assert torch.equal(a, b)  # type: ignore[arg-type]


def test_binaries_are_loaded_once() -> None:
    tiling = choose_tiling(16, 32, "post", images=4, multiprocessors=multiprocessors(0))
    assert kernels_for(tiling, 0) is kernels_for(tiling, 0)


@pytest.mark.parametrize(
    ("package", "name"), [("torch", "compiler"), ("cuda.core", "_by_cuda_core"), ("cupy", "_by_cupy")]
)
def test_each_compiler_makes_a_binary(package: str, name: str) -> None:
    pytest.importorskip(package)
    tiling = choose_tiling(16, 32, "post", images=4, multiprocessors=132)
    run = compile.compiler() if name == "compiler" else getattr(compile, name)
    assert run(compile.source(), compile.options_of(tiling, (9, 0)))[:4] == b"\x7fELF"


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("images", [60, 140])
def test_many_runs_give_the_same_bits(shape: tuple[int, int], images: int) -> None:
    """Thread blocks that share weights must not overwrite what a neighbour still reads, which shows in few runs."""
    case = make_case(*shape, images=images, blocks=4)
    kept = torch.ops.normfree.stage_forward(*case[:4], "post", 0, 2)

    def gradient() -> Tensor:
        return torch.ops.normfree.stage_backward(  # type: ignore[no-any-return]
            case.gradient, case.scalars, case.biases, *kept[1:], "post", 0, False, False
        )[0]

    first = gradient()
    for _ in range(1000):
        assert torch.equal(first, gradient())
        assert torch.equal(kept[0], torch.ops.normfree.stage_forward(*case[:4], "post", 0, 2)[0])
