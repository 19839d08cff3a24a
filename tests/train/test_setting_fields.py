"""Settings as text: any dataclass, and TOML that every reader takes."""

import tomllib
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from normfree.train.setting_fields import coerce, field_types, parse_changes, to_toml


@dataclass(frozen=True)
class Other:
    rate: float = 1.0
    limit: float | None = None


def test_any_dataclass_can_be_read() -> None:
    assert parse_changes(Other, ["rate=2", "limit=none"]) == {"rate": 2.0, "limit": None}
    assert parse_changes(Other, ["limit=3"]) == {"limit": 3.0}
    assert list(field_types(Other)) == ["rate", "limit"]


scalars = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False)
texts = st.text(st.characters(exclude_categories=["Cs"]))


@given(st.dictionaries(st.from_regex(r"[a-z_]{1,9}", fullmatch=True), scalars | texts | st.lists(scalars | texts)))
def test_toml_is_read_back_by_the_standard_library(values: dict[str, Any]) -> None:
    assert tomllib.loads(to_toml(values)) == values


def test_toml_leaves_out_none() -> None:
    assert tomllib.loads(to_toml({"a": None, "b": 1})) == {"b": 1}


@pytest.mark.parametrize("text", ['"', "\\", "\n", "\r\n", "\x00", "\x7f", "\x85", "# no comment", "'''", "é√α😀"])
def test_toml_escapes_what_it_must(text: str) -> None:
    assert tomllib.loads(to_toml({"a": text})) == {"a": text}


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), True, "1", None, [1.0], pytest.param(10**400, id="huge"), np.float32("nan")]
)
def test_number_that_is_none_is_refused(value: Any) -> None:
    finite = "finite " if isinstance(value, float | int | np.floating) and value is not True else ""
    with pytest.raises(ValueError, match=f"expected a {finite}number for 'rate', got"):
        coerce("rate", float, value)


def test_numbers_of_numpy_are_numbers() -> None:
    for hint, value, expected in (
        (int, np.int64(3), 3),
        (float, np.int32(3), 3.0),
        (float, np.float32(0.5), 0.5),
        (float | None, np.float64(0.5), 0.5),
        (tuple[float, float], [np.float32(0.5), np.int8(1)], (0.5, 1.0)),
    ):
        found = coerce("rate", hint, value)
        assert (found, type(found)) == (expected, type(expected))
    for value in (np.float64(3.0), np.bool_(True)):
        with pytest.raises(ValueError, match="expected a whole number for 'seed', got"):
            coerce("seed", int, value)
