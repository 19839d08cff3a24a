"""Networks without skip connections against a forward pass written out in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normfree.methods import get, names
from normfree.models import Network, build

DOUBLE = torch.float64


def randomized(name: str, method: str, **options: object) -> Network:
    """A float64 network without a zero in it."""
    generator = torch.Generator().manual_seed(0)
    model = build(name, method, num_classes=4, size=8, dtype=DOUBLE, generator=generator, **options)  # type: ignore[arg-type]
    with torch.no_grad():
        for part, tensor in model.state_dict().items():
            if tensor.is_floating_point():
                draw = torch.randn(tensor.shape, generator=generator, dtype=DOUBLE)
                tensor.copy_(draw.abs() + 0.5 if part.endswith("running_var") else 0.5 * draw)
    return model.eval()


def images(size: int = 8) -> Tensor:
    return torch.randn(2, 3, size, size, dtype=DOUBLE, generator=torch.Generator().manual_seed(1))


def normalized(state: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    mean, var, weight, bias = (
        state[f"{name}.{part}"].view(1, -1, *[1] * (x.dim() - 2))
        for part in ("running_mean", "running_var", "weight", "bias")
    )
    return (x - mean) / (var + 1e-5).sqrt() * weight + bias


@pytest.mark.parametrize("method", ["he_in", "batchnorm"])
def test_mlp_forward_equals_the_written_out_one(method: str) -> None:
    model = randomized("mlp-4-6", method)
    w = model.state_dict()
    x = images().flatten(1) @ w["stem.linear.weight"].T
    x = (normalized(w, "stem.norm", x) if method == "batchnorm" else x).relu()
    for i in (1, 2):
        x = x @ w[f"body.linear{i}.weight"].T
        x = (normalized(w, f"body.norm{i}", x) if method == "batchnorm" else x).relu()
    expected = x @ w["classifier.weight"].T + w["classifier.bias"]
    torch.testing.assert_close(model(images()), expected, rtol=1e-10, atol=1e-10)
    assert not torch.allclose(expected - w["classifier.bias"], torch.zeros_like(expected))


@pytest.mark.parametrize("method", ["he_in", "batchnorm"])
def test_cnn_forward_equals_the_written_out_one(method: str) -> None:
    model = randomized("cnn-5-6", method)
    w = model.state_dict()
    x = images()
    for conv, norm, stride in (
        ("stem.conv", "stem.norm", 2),
        ("body.conv1", "body.norm1", 2),
        ("body.conv2", "body.norm2", 1),
        ("body.conv3", "body.norm3", 1),
    ):
        x = F.conv2d(x, w[f"{conv}.weight"], stride=stride, padding=1)
        x = (normalized(w, norm, x) if method == "batchnorm" else x).relu()
    expected = x.mean((2, 3)) @ w["classifier.weight"].T + w["classifier.bias"]
    torch.testing.assert_close(model(images()), expected, rtol=1e-10, atol=1e-10)


def test_weight_norm_mlp_forward_has_biases_and_unit_rows_times_gain() -> None:
    model = randomized("mlp-3-6", "wn")
    w = model.state_dict()
    x = images().flatten(1)
    for layer in ("stem.linear", "body.linear"):
        v = w[f"{layer}.weight"]
        x = (x @ (w[f"{layer}.gain"] * v / v.norm(dim=1, keepdim=True)).T + w[f"{layer}.bias"]).relu()
    expected = x @ w["classifier.weight"].T + w["classifier.bias"]
    torch.testing.assert_close(model(images()), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("depth", [2, 3, 20])
def test_mlp_has_the_depth_of_its_name(depth: int) -> None:
    model = build(f"mlp-{depth}-7", "he_in", size=4, device="meta")
    layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
    assert len(layers) == depth == sum(1 for _ in model.plan.layers())
    assert [m.out_features for m in layers] == [7] * (depth - 1) + [10]
    assert layers[0].in_features == 3 * 4 * 4


@pytest.mark.parametrize("depth", [3, 4, 50])
def test_cnn_has_the_depth_of_its_name_and_two_strides(depth: int) -> None:
    model = build(f"cnn-{depth}-7", "he_in", device="meta")
    layers = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert len(layers) + 1 == depth == sum(1 for _ in model.plan.layers())
    assert [m.stride for m in layers] == [(2, 2)] * 2 + [(1, 1)] * (depth - 3)
    assert {m.kernel_size for m in layers} == {(3, 3)}
    assert {m.out_channels for m in layers} == {7}


ADMITTED = [
    (name, method)
    for name in ("mlp-4-8", "cnn-4-8")
    for method in names()
    if "none" in get(method).skips and not (get(method).spatial_only and name == "mlp-4-8")
]


@pytest.mark.parametrize(("name", "method"), ADMITTED)
def test_output_has_one_score_a_class(name: str, method: str) -> None:
    model = build(name, method, num_classes=7, size=12, in_channels=2, device="meta")
    assert model(torch.empty(3, 2, 12, 12, device="meta")).shape == (3, 7)


@pytest.mark.parametrize("name", ["mlp-4-8", "cnn-4-8"])
def test_plan_has_no_branches_and_marks_the_activations(name: str) -> None:
    plan = build(name, "he_in", device="meta").plan
    assert not plan.branches
    marks = [(layer.activated_in, layer.activated_out) for layer in plan.layers()]
    assert marks == [(False, True), (True, True), (True, True), (True, False)]
