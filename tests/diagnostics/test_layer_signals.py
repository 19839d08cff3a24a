"""The norms of weights and gradients against autograd."""

import math

import numpy as np
import pytest
import torch.nn.functional as F
from torch import Tensor

from normfree.diagnostics.propagation import propagate
from signal_oracles import EXACT, Composed, Shared, foreign, labels, noise, own, seeded


@pytest.mark.parametrize(("name", "method"), [("resnet8", "he_in"), ("wrn-10-1", "nf"), ("resnet8", "wn")])
def test_layer_norms_are_those_of_autograd(name: str, method: str) -> None:
    x = seeded(4, 3, 16, 16)
    model = own(name, method, x)
    signal = propagate(model, x, labels(4))
    F.cross_entropy(model(x), labels(4)).backward()
    assert [layer.name for layer in signal.layers] == [layer.name for layer in model.plan.layers()]
    for layer in signal.layers:
        weight = model.get_parameter(f"{layer.name}.weight")
        assert weight.grad is not None
        size, slope = np.linalg.norm(weight.detach().numpy()), np.linalg.norm(weight.grad.numpy())
        assert (layer.weight_norm, layer.gradient_norm) == pytest.approx((size, slope), rel=EXACT)
        assert layer.ratio == pytest.approx(slope / size, rel=EXACT)


def test_composed_and_tied_weights_are_listed() -> None:
    model, x = foreign(Composed), seeded(8, 6)
    signal = propagate(model, x)
    out = model(x)
    out.backward(noise(out))
    found = {layer.name: layer for layer in signal.layers}
    assert list(found) == ["stem", "layer", "tied"]
    parts = [p for name, p in model.named_parameters() if "original" in name]
    gradients = [p.grad.norm().item() for p in parts if p.grad is not None]
    assert found["layer"].weight_norm == pytest.approx(math.hypot(*(p.norm().item() for p in parts)), rel=EXACT)
    assert found["layer"].gradient_norm == pytest.approx(math.hypot(*gradients), rel=EXACT)
    assert found["tied"].weight_norm == found["stem"].weight_norm
    assert found["tied"].gradient_norm == found["stem"].gradient_norm


@pytest.mark.parametrize("at_once", [0, 2**12, 2**26])
def test_gradients_are_reduced_in_portions(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = foreign(Shared), seeded(8, 6)
    expected = propagate(model, x, labels(8, 3))
    monkeypatch.setattr("normfree.diagnostics.measurement.layer_weights.BYTES_AT_ONCE", at_once)
    most = 0
    plain = model.get_parameter("stem.bias")

    def look(_gradient: Tensor) -> None:
        nonlocal most
        most = max(most, sum(p.grad is not None for p in model.parameters()))

    handle = plain.register_hook(look)
    assert propagate(model, x, labels(8, 3)).layers == expected.layers
    handle.remove()
    assert most <= 1 if at_once == 0 else most > 1


def test_layer_without_weight_has_an_infinite_ratio() -> None:
    x = seeded(4, 3, 16, 16)
    signal = propagate(own("resnet8", "fixup", x), x)
    zero = [layer for layer in signal.layers if layer.weight_norm == 0]
    assert zero
    assert all(layer.ratio == math.inf for layer in zero)
    assert all(math.isfinite(layer.ratio) for layer in signal.layers if layer.weight_norm)
