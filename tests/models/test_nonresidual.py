"""Plain, dense and highway networks against a forward pass written out in float64, and the gates at the start."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normfree.methods import get, names
from normfree.models import Network, build
from normfree.models.nonresidual import Highway

DOUBLE = torch.float64


def randomized(name: str, method: str, spread: float = 0.5, **options: object) -> Network:
    """A float64 network without a zero in it."""
    generator = torch.Generator().manual_seed(0)
    model = build(name, method, num_classes=4, size=8, dtype=DOUBLE, generator=generator, **options)  # type: ignore[arg-type]
    with torch.no_grad():
        for part, tensor in model.state_dict().items():
            if tensor.is_floating_point():
                draw = torch.randn(tensor.shape, generator=generator, dtype=DOUBLE)
                tensor.copy_(draw.abs() + 0.5 if part.endswith("running_var") else spread * draw)
    return model.eval()


def images(size: int = 8) -> Tensor:
    return torch.randn(2, 3, size, size, dtype=DOUBLE, generator=torch.Generator().manual_seed(1))


def normalized(state: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    if f"{name}.weight" not in state:
        return x
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
    marks = [(layer.reads_activation, layer.feeds_activation) for layer in plan.layers()]
    assert marks == [(False, True), (True, True), (True, True), (True, False)]


def dense_reference(w: dict[str, Tensor], x: Tensor, per_stage: int) -> Tensor:
    """Huang 2017: every layer reads the normalized and rectified concatenation of all before it."""
    x = F.conv2d(x, w["stem.conv.weight"], padding=1)
    for stage in range(3):
        for i in range(per_stage):
            layer = f"body.{stage}.dense{i + 1 if per_stage > 1 else ''}.branch"
            new = F.conv2d(normalized(w, f"{layer}.norm", x).relu(), w[f"{layer}.conv.weight"], padding=1)
            x = torch.cat([x, new], dim=1)
        if stage < 2:
            layer = f"body.{stage}.transition"
            x = F.conv2d(normalized(w, f"{layer}.norm", x).relu(), w[f"{layer}.conv.weight"])
            x = (x[:, :, ::2, ::2] + x[:, :, 1::2, ::2] + x[:, :, ::2, 1::2] + x[:, :, 1::2, 1::2]) / 4
    x = normalized(w, "head.norm", x).relu().mean((2, 3))
    return x @ w["classifier.weight"].T + w["classifier.bias"]


@pytest.mark.parametrize("method", ["he_in", "batchnorm"])
@pytest.mark.parametrize(("name", "per_stage"), [("dense-7-3", 1), ("dense-13-3", 3)])
def test_dense_forward_equals_the_written_out_one(name: str, per_stage: int, method: str) -> None:
    model = randomized(name, method, spread=0.3)
    expected = dense_reference(model.state_dict(), images(), per_stage)
    assert expected.std() > 1e-3
    torch.testing.assert_close(model(images()), expected, rtol=1e-10, atol=1e-10)


def highway_reference(w: dict[str, Tensor], x: Tensor, layers: int, gate_bias: float = -1.0) -> Tensor:
    """Srivastava 2015, equation 3."""
    x = normalized(w, "stem.norm", x.flatten(1) @ w["stem.linear.weight"].T).relu()
    for i in range(layers):
        gate = torch.sigmoid(x @ w[f"body.{i}.gate.weight"].T + gate_bias)
        transform = normalized(w, f"body.{i}.transform.norm", x @ w[f"body.{i}.transform.linear.weight"].T).relu()
        x = gate * transform + (1 - gate) * x
    return x @ w["classifier.weight"].T + w["classifier.bias"]


@pytest.mark.parametrize("method", ["he_in", "batchnorm"])
def test_highway_forward_equals_the_written_out_one(method: str) -> None:
    model = randomized("highway-5-6", method, spread=0.3)
    torch.testing.assert_close(
        model(images()), highway_reference(model.state_dict(), images(), 3), rtol=1e-10, atol=1e-10
    )
    without_bias = highway_reference(model.state_dict(), images(), 3, gate_bias=0.0)
    assert not torch.allclose(model(images()), without_bias, rtol=1e-3)


def gate_values(model: Network, x: Tensor) -> Tensor:
    """The openings of all gates of all layers, from 0 to 1."""
    found: list[Tensor] = []
    for module in model.modules():
        if isinstance(module, Highway):
            module.gate.register_forward_hook(lambda _m, _args, out: found.append(torch.sigmoid(out.detach() - 1.0)))
    model(x)
    return torch.cat([g.flatten() for g in found])


@pytest.mark.parametrize("method", ["he_in", "xavier", "batchnorm", "layernorm"])
def test_gates_start_mostly_closed(method: str) -> None:
    generator = torch.Generator().manual_seed(0)
    model = build("highway-20-50", method, size=8, generator=generator)
    gates = gate_values(model, torch.randn(64, 3, 8, 8, generator=generator))
    assert (gates < 0.5).float().mean() > 0.7
    assert gates.median() == pytest.approx(torch.sigmoid(torch.tensor(-1.0)).item(), abs=0.05)
    # Control: the same gates without their bias are open as often as closed.
    unbiased = torch.sigmoid(torch.logit(gates) + 1.0)
    assert (unbiased < 0.5).float().mean() == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize(("depth", "growth"), [(7, 4), (40, 12)])
def test_dense_has_the_depth_and_growth_of_its_name(depth: int, growth: int) -> None:
    """Stem, dense layers, two transitions and the classifier."""
    model = build(f"dense-{depth}-{growth}", "he_in", device="meta")
    layers = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert len(layers) == depth == sum(1 for _ in model.plan.layers())
    channels = (2 + 3 * (depth - 4) // 3) * growth
    assert layers[-1].in_features == channels
    dense = [m for n, m in model.named_modules() if isinstance(m, nn.Conv2d) and "dense" in n]
    assert {m.out_channels for m in dense} == {growth}


@pytest.mark.parametrize("depth", [3, 20])
def test_highway_has_the_depth_of_its_name(depth: int) -> None:
    """Gates share the layer of their transform."""
    model = build(f"highway-{depth}-9", "he_in", size=4, device="meta")
    assert sum(isinstance(m, nn.Linear) for m in model.modules()) - (depth - 2) == depth
    assert sum(isinstance(m, Highway) for m in model.modules()) == depth - 2


@pytest.mark.parametrize(("name", "skip"), [("dense-7-4", "dense"), ("highway-4-8", "highway")])
def test_dense_and_highway_have_one_score_per_class_for_every_method(name: str, skip: str) -> None:
    admitted = [m for m in names() if skip in get(m).skips and (skip == "dense" or not get(m).spatial_only)]
    assert len(admitted) >= 5
    for method in admitted:
        model = build(name, method, num_classes=7, size=8, in_channels=2, device="meta")
        assert model(torch.empty(3, 2, 8, 8, device="meta")).shape == (3, 7)


@pytest.mark.parametrize(("name", "classifier_activated"), [("dense-10-4", True), ("highway-5-8", False)])
def test_plan_without_branches_marks_the_activations(name: str, classifier_activated: bool) -> None:
    plan = build(name, "he_in", device="meta").plan
    assert not plan.branches
    assert [(s.reads_activation, s.feeds_activation) for s in plan.stem] == [(False, True)]
    assert [c.reads_activation for c in plan.classifier] == [classifier_activated]
    inner = {layer.name: layer.reads_activation for layer in plan.body}
    if name.startswith("dense"):
        assert all(inner.values())
    else:  # what leaves a gate does not come out of an activation
        assert {n for n, activated in inner.items() if activated} == {"body.0.gate", "body.0.transform.linear"}
