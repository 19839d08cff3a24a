"""A plan and its changes as plain data."""

import json

import pytest

from normed_blocks import X, network
from normfree.conversion import convert
from normfree.conversion.plan_json import plan_from_json


def test_plan_with_its_changes_is_read_from_plain_data() -> None:
    plan = convert(network(), "fixup", X)[1]
    data = json.loads(json.dumps(plan.to_json()))
    assert plan_from_json(data) == plan
    with pytest.raises(ValueError, match="Changes has no speed"):
        plan_from_json({**data, "changes": {**data["changes"], "speed": 1}})
