"""The `Method` record: pickling, copying and comparing, its laws and its scalars' learning rate.

The registry of methods: its rows, its options, and plug-ins.
"""

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch

import normfree
from added_method import mine
from normfree.methods import (
    FAMILIES,
    FORMS,
    InitContext,
    Law,
    Method,
    Rule,
    ScalarRate,
    get,
    names,
    register,
    unregister,
)
from normfree.methods.method_registry import short_spec
from normfree.methods.standard_init import he_fan_in_
from normfree.models import build
from normfree.plan import Position

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
def test_short_spec_means_the_same_method(spec: str) -> None:
    short = short_spec(get(spec).spec)
    assert get(short) == get(spec)
    assert short_spec(short) == short
    assert len(short) <= len(get(spec).spec)


def test_short_spec_of_an_unknown_method_is_unchanged() -> None:
    assert short_spec("mine:a=1") == "mine:a=1"


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
    with pytest.raises(ValueError, match=r"expected option 'scalar_lr', .* such as '0.1', .* such as '1/L', got"):
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


# The methods of the papers and their like, in the order of the table that is printed; a new one may stand anywhere.
TABLE = [
    ("he_in", "robust"), ("he_out", "robust"), ("xavier", "fixup"),
    ("idshort", "robust"), ("learnscalar", "robust"), ("convshort", "robust"),
    ("idshort_brock", "robust"), ("learnscalar_brock", "robust"), ("convshort_brock", "robust"),
    ("sqrt_half", "fixup"), ("small_branch", "normdead"), ("hanin", "normdead"), ("shao", "normdead"),
    ("skipinit", "normdead"), ("rezero", "robust"),
    ("isograd", "none"),
    ("fixup", "fixup"), ("fixup_bounded", "none"),
    ("lsuv", "fixup"),
    ("wn", "wninit"), ("wn_default", "wninit"), ("wn_data", "wninit"), ("wn_hanin", "wninit"),
    ("nf", "normdead"), ("nf_he", "normdead"),
    ("dyt", "none"),
    ("tfixup", "none"), ("deepnorm", "none"), ("admin", "none"),
    ("batchnorm", "all"), ("batchnorm_convshort", "robust"),
    ("layernorm", "normdead"), ("rmsnorm", "none"), ("groupnorm", "normdead"), ("instancenorm", "normdead"),
    ("spectralnorm", "normdead"), ("normprop", "normdead"), ("selu", "normdead"),
]  # fmt: skip


OPTIONS = {
    "fixup": {
        "bias": True,
        "scale": 1.0,
        "branches": True,
        "scalar_lr": "auto",
        "multiplier": True,
        "zero_last": True,
        "zero_classifier": True,
        "slow_biases": True,
        "transformer": "authors",
    },
    "lsuv": {"by": "block"},
    "wn": {"directions": "orthogonal", "g": "forward", "stem_relu": False},
    "wn_default": {"directions": "orthogonal", "stem_relu": False},
    "wn_data": {"stem_relu": False},
    "wn_hanin": {"stem_relu": False},
    "fixup_bounded": {"scalar_lr": "auto", "transformer": "authors"},
    "layernorm": {"xavier": False},
    "idshort": {"fan": "out"},
    "convshort": {"reads": "entry", "gain": 2.0, "fan": "out"},
    "isograd": {"shortcut": "identity"},
    "small_branch": {"beta": 0.2},
    "hanin": {"r": 0.9},
    "nf": {"beta": 0.2, "bias": True},
    "nf_he": {"beta": 0.2, "bias": True},
    "dyt": {"alpha": 0.5},
    "selu": {"dropout": 0.0},
}


def test_table_is_all_there() -> None:
    ours = [name for name, _ in TABLE]
    assert [name for name in names() if name in ours] == ours


@pytest.mark.parametrize(("name", "paper"), TABLE)
def test_row_says_where_the_method_comes_from(name: str, paper: str) -> None:
    method = get(name)
    assert method.name == name
    assert paper in method.paper
    for text in (method.summary, method.paper, method.reference, method.weights_text, method.shortcut_text):
        assert text.strip() == text != ""
    laws = method.rule.laws()
    assert laws.keys() == {"c", "a", "alpha", "beta", "delta"}
    assert all(law.text for law in laws.values())
    assert all(isinstance(value, str) for value in method.row().values())
    assert method.to_json()["name"] == name
    assert set(method.forms) <= set(FORMS)
    assert method.form is None or method.form in method.forms
    assert method.skips


@pytest.mark.parametrize("name", [name for name, _ in TABLE])
def test_options_have_the_documented_defaults(name: str) -> None:
    assert get(name).options == OPTIONS.get(name, {})


@pytest.mark.parametrize("spec", SPECS)
def test_spec_names_the_same_method_again(spec: str) -> None:
    method = get(spec)
    again = get(method.spec)
    assert again.options == method.options
    assert again.spec == method.spec
    assert again.row() == method.row()
    assert again.scalar_rate == method.scalar_rate


def test_spec_tells_options_apart() -> None:
    """The control of the round trip."""
    assert get("hanin:r=0.5").spec != get("hanin").spec
    assert get("hanin:r=0.5").row()["β"] == "0.5^l" != get("hanin").row()["β"]


def test_options_reach_the_rule() -> None:
    third = Position(3, 10, 1, 3, 10)
    assert get("hanin:r=0.5").rule.at(third)["beta"] == 0.125
    assert get("small_branch:beta=0.3").rule.at(third)["beta"] == 0.3
    assert get("nf:beta=1").rule.at(third)["alpha"] == pytest.approx(3**-0.5)
    assert "delta" in get("fixup").rule.at(third)
    assert "delta" not in get("fixup:bias=false").rule.at(third)
    assert get("shao").rule.at(third)["beta"] == pytest.approx(13**-0.5)


def test_record_is_returned_as_it_is() -> None:
    record = get("fixup")
    assert get(record) is record


def test_families_hold_every_method() -> None:
    """One file a family: each method is a function of the module that registered it."""
    held = {name for family in FAMILIES for name in vars(family)}
    assert set(names()) <= held


@pytest.mark.usefixtures("clean")
def test_registered_record_builds_and_initializes() -> None:
    record = mine()
    assert normfree.register(record) is record
    assert names()[-1] == "mine"
    model = build("resnet8", "mine", generator=torch.Generator().manual_seed(0))
    assert [block[0].beta.value.item() for block in model.body] == [0.5] * 3
    unregister("mine")
    with pytest.raises(ValueError, match="unknown method 'mine'"):
        get("mine")


@pytest.mark.usefixtures("clean")
def test_registered_function_has_its_arguments_for_options() -> None:
    @register
    def halves(*, by: float = 0.5, twice: int = 1, name: str = "a") -> Method:
        return mine(name="halves", rule=Rule(beta=Law(by**twice)))

    assert callable(halves)
    assert get("halves").options == {"by": 0.5, "twice": 1, "name": "a"}
    assert get("halves:twice=2,name=b").rule.beta.value == 0.25
    with pytest.raises(ValueError, match=r"expected a whole number for option 'twice' of method 'halves', got '1\.5'"):
        get("halves:twice=1.5")


@pytest.mark.usefixtures("clean")
def test_initializer_from_outside_sees_plan_and_generator() -> None:
    seen: list[InitContext] = []
    register(mine(initializer=lambda ctx: seen.append(ctx)))
    generator = torch.Generator().manual_seed(0)
    model = build("resnet8", "mine", generator=generator)
    assert seen[0].model is model
    assert seen[0].plan == model.plan
    assert seen[0].generator is generator


@pytest.mark.usefixtures("clean")
def test_taken_name_is_refused() -> None:
    register(mine())
    for record in (mine(), mine(name="fixup")):
        with pytest.raises(ValueError, match=rf"expected a new method name, got '{record.name}', which is registered"):
            register(record)
    assert get("fixup").paper == "fixup"


@pytest.mark.parametrize("name", ["", "two words", "a:b", "a-b", "1st", "a=b", "a,b"])
def test_bad_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="expected a method name of letters, digits and underscores"):
        register(mine(name=name))
    assert name not in names()


def test_unregistering_the_unknown_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown method 'nobody'"):
        unregister("nobody")


@pytest.mark.parametrize("spec", ["", ":r=1", "hanin r=1"])
def test_spec_without_a_known_name_is_refused(spec: str) -> None:
    with pytest.raises(ValueError, match="unknown method"):
        get(spec)


@pytest.mark.parametrize("spec", ["fixup:", "fixup:,", "fixup: "])
def test_empty_options_are_the_defaults(spec: str) -> None:
    assert get(spec).options == OPTIONS["fixup"]
