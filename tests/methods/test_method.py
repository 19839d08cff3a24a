"""The `Method` record: pickling, copying and comparing, its laws and its scalars' learning rate."""

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch

from added_method import mine
from normfree.methods import (
    Law,
    Method,
    Rule,
    ScalarRate,
    get,
    names,
    register,
)
from normfree.methods.plain import he_fan_in_
from normfree.models import build

SPECS = [
    *names(),
    "hanin:r=0.5",
    "fixup:bias=false",
    "fixup:scale=0.1,bias=false",
    "fixup:scalar_lr=1/L",
    "fixup: scale=2 , branches=FALSE",
    "convshort:reads=raw,gain=1",
    "isograd:shortcut=conv",
    "selu:dropout=0.05",
    "nf:beta=1",
    "nf:beta=1e-3",
]


@pytest.mark.parametrize("spec", SPECS)
def test_method_is_pickled_as_its_spec(spec: str) -> None:
    method = get(spec)
    again = pickle.loads(pickle.dumps(method))
    assert (again.spec, again.to_json()) == (method.spec, method.to_json())
    assert again == method == copy.copy(method) == copy.deepcopy(method)
    assert spec.encode() in pickle.dumps(method) or method.spec.encode() in pickle.dumps(method)


@pytest.mark.parametrize("spec", SPECS)
def test_changed_method_is_pickled_by_value(spec: str) -> None:
    """Initializers and laws are named functions or frozen dataclasses, so that pickle needs no registry."""
    changed = replace(get(spec), name="mine")
    again = pickle.loads(pickle.dumps(changed))
    assert again == changed == copy.copy(changed) == copy.deepcopy(changed)
    assert again != get(spec)


@pytest.mark.parametrize("spec", SPECS)
def test_one_spec_gives_equal_methods(spec: str) -> None:
    assert get(spec) == get(spec) == get(get(spec).spec)
    assert hash(get(spec)) == hash(get(spec))


def test_built_model_is_pickled() -> None:
    model = build("resnet8", "fixup")
    again = pickle.loads(pickle.dumps(model))
    assert again.method.spec == model.method.spec
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize(
    "changes", [{"decay": "weights"}, {"rule": Rule(beta=Law(0.5))}, {"initializer": he_fan_in_}, {"options": {}}]
)
def test_changed_method_is_not_pickled_as_another(changes: dict[str, Any]) -> None:
    changed = replace(get("fixup"), **changes)
    assert pickle.loads(pickle.dumps(changed)) == changed


def test_copied_model_has_the_method_registered_or_not() -> None:
    mine = replace(get("fixup"), name="mine")
    for method in (get("fixup"), mine):
        assert copy.deepcopy(build("resmlp-1-8", method)).method == method


@pytest.mark.parametrize(("text", "factor"), [("0.1", 0.1), ("1/L", 0.002), ("2/L", 0.004), ("1", 1.0), ("0", 0.0)])
def test_scalar_rate_reads_numbers_and_numbers_over_the_branches(text: str, factor: float) -> None:
    assert ScalarRate.parse(text).factor(500) == pytest.approx(factor)


@pytest.mark.parametrize("text", ["", "x", "1/M", "1/", "-0.1", "nan", "inf", "1/L/L"])
def test_bad_scalar_rate_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected a learning rate factor such as '0.1' or '1/L'"):
        ScalarRate.parse(text)


def test_law_of_a_function_needs_a_text() -> None:
    with pytest.raises(ValueError, match="expected a text for a law that is a function"):
        Law(lambda position: 1.0)
    assert Law(0.0, learnable=True).text == "learnable, 0"


@pytest.mark.usefixtures("clean")
def test_plugin_whose_functions_are_lambdas_is_pickled_as_its_spec() -> None:
    @register
    def fading(*, r: float = 0.5) -> Method:
        rule = Rule(beta=Law(lambda position: r**position.index, text="r^l"))
        return mine(name="fading", rule=rule, initializer=lambda ctx: he_fan_in_(ctx))

    register(mine(name="record", initializer=lambda ctx: he_fan_in_(ctx)))
    for spec in ("fading", "fading:r=0.25", "record"):
        method = get(spec)
        assert pickle.loads(pickle.dumps(method)) == method == copy.deepcopy(method)
    assert get("fading:r=0.25") == get("fading:r=0.25") != get("fading")
    model = build("resmlp-2-8", "fading")
    assert pickle.loads(pickle.dumps(model)).method == model.method
