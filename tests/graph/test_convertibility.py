"""`convert` accepts every method that `supports_conversion` admits."""

import pytest
from torch import nn

import normfree
from normed_blocks import X, network
from normfree.graph import discover, supports_conversion
from normfree.methods import get, names

MODEL = network(2)
PLAN = discover(MODEL, X)


@pytest.mark.parametrize("method", names())
def test_admitted_method_converts_the_model(method: str) -> None:
    record = get(method)
    if supports_conversion(MODEL, PLAN, record):
        normfree.convert(MODEL, method, X)


def test_methods_are_admitted_or_not() -> None:
    admitted = {name for name in names() if supports_conversion(MODEL, PLAN, get(name))}
    assert {"fixup", "skipinit", "nf", "wn", "dyt"} <= admitted
    assert not {"sqrt_half", "convshort", "batchnorm", "spectralnorm", "selu"} & admitted


def test_layer_that_cannot_be_reparametrized_decides() -> None:
    model = network(2)
    nn.utils.parametrizations.weight_norm(model[1].first)
    plan = discover(model, X)
    assert supports_conversion(model, plan, get("fixup"))
    assert not supports_conversion(model, plan, get("wn"))
