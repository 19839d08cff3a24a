"""Gradient clipping: against a slow loop over units in float64, on every kind of parameter."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from normfree.models import build
from normfree.nn.weight_layers import StandardizedConv2d, WeightNormLinear
from normfree.optim.clipping import agc_parameters, clip_adaptively_, clip_by_norm_, clip_grad_agc_, clip_grad_norm_

CLIP, EPS = 0.05, 1e-3


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def slow(weight: Tensor, grad: Tensor, clip: float = CLIP, eps: float = EPS, axis: int = 0) -> Tensor:
    """Brock's equation 3, one unit at a time; axis -1 for the whole tensor."""
    if axis < 0:
        return _unit(weight.double(), grad.double(), clip, eps)
    rows = zip(weight.double().unbind(axis), grad.double().unbind(axis), strict=True)
    return torch.stack([_unit(w, g, clip, eps) for w, g in rows], axis)


def _unit(weight: Tensor, grad: Tensor, clip: float, eps: float) -> Tensor:
    most = max(sum(float(w) ** 2 for w in weight.flatten()) ** 0.5, eps)
    norm = sum(float(g) ** 2 for g in grad.flatten()) ** 0.5
    return grad * (clip * most / norm) if norm > clip * most else grad.clone()


SHAPES = {
    "conv": ((6, 3, 3, 3), 0),
    "1x1 conv": ((6, 4, 1, 1), 0),
    "grouped conv": ((6, 1, 3, 3), 0),
    "conv1d": ((5, 2, 3), 0),
    "linear": ((5, 7), 0),
    "one output": ((1, 7), 0),
    "bias": ((7,), -1),
    "gain of a convolution": ((7, 1, 1, 1), -1),
    "gain of a linear layer": ((7, 1), -1),
    "scalar": ((), -1),
    "length 1": ((1,), -1),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", SHAPES)
def test_agc_equals_the_slow_loop(kind: str, dtype: torch.dtype) -> None:
    shape, axis = SHAPES[kind]
    weight, grad = draw(*shape, seed=1, dtype=dtype), draw(*shape, seed=2, dtype=dtype)
    expected = slow(weight, grad, axis=axis)
    clip_adaptively_([weight], [grad], CLIP, EPS)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 8e-3}[dtype]
    torch.testing.assert_close(grad.double(), expected, rtol=tolerance, atol=0.0)
    assert grad.dtype is dtype


@pytest.mark.parametrize("kind", ["conv", "linear"])
def test_wrong_axis_differs(kind: str) -> None:
    shape, _ = SHAPES[kind]
    weight, grad = draw(*shape, seed=1), draw(*shape, seed=2)
    across, whole = slow(weight, grad, axis=1), slow(weight, grad, axis=-1)
    clip_adaptively_([weight], [grad], CLIP, EPS)
    assert (grad - across).abs().max() > 1e-3
    assert (grad - whole).abs().max() > 1e-3


def test_many_tensors_of_mixed_shapes_are_each_clipped() -> None:
    shapes = [shape for shape, _ in SHAPES.values()] * 3
    weights = [draw(*shape, seed=i) for i, shape in enumerate(shapes)]
    grads = [draw(*shape, seed=100 + i) for i, shape in enumerate(shapes)]
    axes = [axis for _, axis in SHAPES.values()] * 3
    expected = [slow(w, g, axis=a) for w, g, a in zip(weights, grads, axes, strict=True)]
    clip_adaptively_(weights, grads, CLIP, EPS)
    for got, want in zip(grads, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=0.0)


def test_small_gradients_are_left_alone_to_the_bit() -> None:
    weight, grad = draw(4, 3, seed=1), 1e-4 * draw(4, 3, seed=2)
    before = grad.clone()
    clip_adaptively_([weight], [grad], CLIP, EPS)
    assert torch.equal(grad, before)


def test_only_the_unit_that_is_too_large_is_clipped() -> None:
    weight, grad = torch.ones(3, 4), torch.full((3, 4), 1e-3)
    grad[1] = 10.0
    clip_adaptively_([weight], [grad], CLIP, EPS)
    assert grad.norm(dim=1).tolist() == pytest.approx([2e-3, CLIP * 2, 2e-3])


def test_parameter_norm_is_floored() -> None:
    weight, grad = torch.zeros(2, 4), torch.ones(2, 4)
    clip_adaptively_([weight], [grad], CLIP, EPS)
    assert grad.norm(dim=1).tolist() == pytest.approx([CLIP * EPS] * 2)  # a zero layer would never move without eps


def test_zero_gradients_stay_zero() -> None:
    grad = torch.zeros(2, 4)
    clip_adaptively_([torch.zeros(2, 4)], [grad], CLIP, EPS)
    assert torch.equal(grad, torch.zeros(2, 4))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_hidden(value: float) -> None:
    grad = torch.ones(2, 4)
    grad[0, 0] = value
    clip_adaptively_([torch.ones(2, 4)], [grad], CLIP, EPS)
    assert not grad[0].isfinite().all()
    assert grad[1].isfinite().all()
    grads = [torch.full((2,), value)]
    assert not clip_by_norm_(grads, 1.0).isfinite()
    assert not grads[0].isfinite().all()


def test_empty_lists_and_tensors_pass() -> None:
    clip_adaptively_([], [])
    clip_adaptively_([torch.zeros(0, 3)], [torch.zeros(0, 3)])
    assert clip_by_norm_([], 1.0) == 0


def test_channels_last_makes_no_difference() -> None:
    weight, grad = draw(4, 3, 3, 3, seed=1), draw(4, 3, 3, 3, seed=2)
    last = [t.clone(memory_format=torch.channels_last) for t in (weight, grad)]
    clip_adaptively_([weight], [grad], CLIP, EPS)
    clip_adaptively_([last[0]], [last[1]], CLIP, EPS)
    torch.testing.assert_close(last[1], grad, rtol=1e-12, atol=0.0)
    assert last[1].is_contiguous(memory_format=torch.channels_last)


def with_gradients(model: nn.Module) -> dict[str, Tensor]:
    for i, p in enumerate(model.parameters()):
        p.grad = draw(*p.shape, seed=i, dtype=p.dtype)
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_classifier_of_a_plan_is_untouched() -> None:
    model = build("wrn-10-1", "nf", generator=torch.Generator().manual_seed(0))
    before = with_gradients(model)
    clip_grad_agc_(model, CLIP, EPS)
    same = {n for n, p in model.named_parameters() if torch.equal(p.grad, before[n])}
    assert same == {"classifier.weight", "classifier.bias"}
    for name, p in model.named_parameters():
        if name not in same:
            axis = 0 if name.endswith(".weight") else -1
            torch.testing.assert_close(p.grad.double(), slow(p.detach(), before[name], axis=axis), rtol=1e-5, atol=0.0)


class Foreign(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.conv = StandardizedConv2d(2, 4, 3)
        self.hidden = WeightNormLinear(4, 4)
        self.last = nn.Linear(4, 2)
        self.tail = nn.Conv2d(2, 4, 1)


def test_classifier_of_a_foreign_model_is_its_last_linear_layer() -> None:
    model = Foreign()
    before = with_gradients(model)
    clip_grad_agc_(model, CLIP, EPS)
    assert {n for n, p in model.named_parameters() if torch.equal(p.grad, before[n])} == {"last.weight", "last.bias"}


def test_excluded_modules_take_the_place_of_the_classifier() -> None:
    model = Foreign()
    kept = {id(p) for p in agc_parameters(model, exclude=["first", "tail"])}
    assert {n.split(".")[0] for n, p in model.named_parameters() if id(p) not in kept} == {"first", "tail"}
    assert len(agc_parameters(model, exclude="last")) == len(agc_parameters(model))
    assert agc_parameters(model, exclude=()) == list(model.parameters())


def test_weight_shared_with_the_classifier_is_left_out() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    model[0].weight = model[2].weight
    assert [id(p) for p in agc_parameters(model)] == [id(model[0].bias)]


def test_parameters_without_gradients_are_skipped() -> None:
    model = Foreign()
    with_gradients(model)
    model.first.weight.grad = None
    clip_grad_agc_(model)
    clip_grad_norm_(model, 1.0)
    assert model.first.weight.grad is None
    clip_grad_agc_(nn.Linear(2, 2).parameters())


def test_parameters_are_clipped_as_given() -> None:
    model = Foreign()
    before = with_gradients(model)
    clip_grad_agc_(model.last.parameters(), CLIP, EPS)
    assert not torch.equal(model.last.weight.grad, before["last.weight"])
    clip_grad_agc_(model.first.weight, CLIP, EPS)
    assert not torch.equal(model.first.weight.grad, before["first.weight"])
    assert torch.equal(model.first.bias.grad, before["first.bias"])


@pytest.mark.parametrize("max_norm", [0.1, 1e3])
def test_norm_equals_torchs(max_norm: float) -> None:
    model, other = Foreign(), Foreign()
    with_gradients(model), with_gradients(other)
    total = clip_grad_norm_(model, max_norm)
    torch.testing.assert_close(total, torch.nn.utils.clip_grad_norm_(other.parameters(), max_norm))
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=2e-5, atol=0.0)  # torch adds 1e-6 to the norm


def test_norm_of_mixed_precisions_is_taken_in_float32() -> None:
    grads = [draw(300, seed=i, dtype=d) for i, d in enumerate((torch.bfloat16, torch.float32, torch.bfloat16))]
    expected = torch.cat([g.double() for g in grads]).norm()
    total = clip_by_norm_(grads, 1.0)
    assert float(total) == pytest.approx(float(expected), rel=1e-6)
    assert float(torch.cat([g.double() for g in grads]).norm()) == pytest.approx(1.0, rel=2e-3)
    assert [g.dtype for g in grads] == [torch.bfloat16, torch.float32, torch.bfloat16]


def test_no_graph_is_recorded() -> None:
    weight = torch.ones(2, 2, requires_grad=True)
    grad = torch.ones(2, 2)
    clip_adaptively_([weight], [grad])
    assert not grad.requires_grad
    assert weight.grad is None


def test_unknown_module_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected the name of a module of Foreign in exclude, got 'fc'; take it"):
        clip_grad_agc_(Foreign(), exclude=["fc"])


def test_model_without_a_classifier_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected a model with a plan or a Linear classifier, got Conv2d; pass"):
        clip_grad_agc_(nn.Conv2d(1, 1, 1))


def test_exclude_of_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a model to exclude modules from, got parameters"):
        clip_grad_agc_(Foreign().parameters(), exclude=["last"])


@pytest.mark.parametrize(("clip", "eps"), [(0.0, 1e-3), (0.1, 0.0), (float("nan"), 1e-3), (-1.0, 1e-3)])
def test_bad_bounds_are_refused(clip: float, eps: float) -> None:
    with pytest.raises(ValueError, match="expected a positive clip and eps"):
        clip_adaptively_([], [], clip, eps)
    with pytest.raises(ValueError, match="expected a positive max_norm"):
        clip_by_norm_([], min(clip, eps, 0.0))


def test_lists_that_do_not_match_are_refused() -> None:
    with pytest.raises(ValueError, match="expected a gradient for each of 1 parameters, got 0"):
        clip_adaptively_([torch.ones(2)], [])
    with pytest.raises(ValueError, match=r"expected a gradient of its parameter's shape \(2,\), got \(1,\) at 0"):
        clip_adaptively_([torch.ones(2)], [torch.ones(1)])


@pytest.mark.gpu
def test_clipping_is_captured_in_a_graph_without_waiting() -> None:
    shapes = [shape for shape, _ in SHAPES.values()] * 300
    weights = [draw(*s, seed=i, dtype=torch.float32).cuda() for i, s in enumerate(shapes)]
    drawn = [draw(*s, seed=5000 + i, dtype=torch.float32).cuda() for i, s in enumerate(shapes)]
    grads, expected = [g.clone() for g in drawn], [g.clone() for g in drawn]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        clip_adaptively_(weights, grads, CLIP, EPS)
        clip_by_norm_(grads, 1.0)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        clip_adaptively_(weights, grads, CLIP, EPS)
        total = clip_by_norm_(grads, 1.0)
    torch._foreach_copy_(grads, drawn)
    graph.replay()
    clip_adaptively_(weights, expected, CLIP, EPS)
    assert float(total) == pytest.approx(float(clip_by_norm_(expected, 1.0)))
    for got, want in zip(grads, expected, strict=True):
        torch.testing.assert_close(got, want)
    torch.cuda.set_sync_debug_mode("error")
    try:
        clip_adaptively_(weights, grads, CLIP, EPS)
        clip_by_norm_(grads, 1.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_agc_launches_few_kernels_however_many_layers() -> None:
    counts = []
    for layers in (50, 500):
        weights = [torch.ones(16, 16, 3, 3, device="cuda") for _ in range(layers)]
        grads = [torch.ones_like(w) for w in weights]
        clip_adaptively_(weights, grads)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            clip_adaptively_(weights, grads)
            torch.cuda.synchronize()
        counts.append(sum(e.device_type == torch.autograd.DeviceType.CUDA for e in profile.events()))
    assert all(later < 4 * earlier for earlier, later in pairwise(counts)), counts
    assert counts[1] < 100, counts
