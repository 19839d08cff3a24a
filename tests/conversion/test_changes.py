"""The record of a conversion, and a plan with it as plain data."""

import json

import pytest

from normed_blocks import X, network
from normfree.conversion import convert
from normfree.conversion.changes import plan_from_json


def test_changes_are_counted_and_printed() -> None:
    original = network()
    model, plan = convert(original, "fixup", X)
    changes = plan.changes
    assert changes.parameters_before == sum(p.numel() for p in original.parameters())
    assert changes.parameters_after == sum(p.numel() for p in model.parameters())
    names = dict(model.named_parameters())
    assert all(a.name in names for a in changes.added)
    assert json.loads(json.dumps(plan.to_json()))["changes"]["removed"][0]["kind"] == "LayerNorm"
    assert changes.method != "fixup"  # the record has all options
    assert "converted by fixup: " in str(changes)
    assert repr(plan).endswith("converted by 'fixup')")
    text = str(plan)
    assert "3 residual branches" in text
    assert "removed  7 × LayerNorm" in text
    assert "3 × multiplier β (learnable)" in text
    assert len(text.splitlines()) < 12


def test_only_changed_options_are_printed() -> None:
    _, plan = convert(network(), "fixup:scalar_lr=1/L", X)
    assert "converted by fixup:scalar_lr=1/L: " in str(plan)


def test_replaced_normalizers_are_not_called_removed() -> None:
    text = str(convert(network(), "dyt", X)[1].changes)
    assert "replaced 7 × LayerNorm by DynamicTanh" in text
    assert "kept     the weights of all other layers" in text
    assert "removed" not in text


def test_plan_with_its_changes_is_read_from_plain_data() -> None:
    plan = convert(network(), "fixup", X)[1]
    data = json.loads(json.dumps(plan.to_json()))
    assert plan_from_json(data) == plan
    with pytest.raises(ValueError, match="Changes has no speed"):
        plan_from_json({**data, "changes": {**data["changes"], "speed": 1}})


def test_plan_is_read_with_the_names_of_release_0_1() -> None:
    layer = {"name": "a.fc", "activated_in": True, "activated_out": False, "nonzero": True, "share": 2}
    data = {
        "branches": [
            {
                "name": "a",
                "position": {"index": 1, "total": 1, "stage": 1, "index_in_stage": 1, "stage_size": 1},
                "layers": [layer],
                "m": None,
                "entries": [layer],
                "ends": [layer],
                "around": "b",
                "scales": ["a.gamma"],
                "merges": True,
            }
        ],
        "aside": ["token"],
    }
    plan = plan_from_json(data)
    (branch,) = plan.branches
    assert (branch.degree, branch.outer_branch, branch.layer_scales, branch.merges_signals) == (
        1,
        "b",
        ("a.gamma",),
        True,
    )
    assert branch.first_layers == branch.last_layers == branch.layers
    (read,) = branch.layers
    assert (read.reads_activation, read.feeds_activation, read.must_be_nonzero, read.parallel_paths) == (
        True,
        False,
        True,
        2,
    )
    assert plan.other_parameters == ("token",)
    data["branches"][0]["m"] = 4
    assert plan_from_json(data).branches[0].degree == 4
