"""The record of a conversion."""

import json

from normed_blocks import X, network
from normfree.conversion import convert


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
