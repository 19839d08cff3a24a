"""The table of converted third-party models: how a row is judged, and that none of the stored rows is wrong."""

import json
import math
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
STORED = ROOT / "results" / "benchmarks" / "conversion.json"
PACKAGES = ("torchvision", "timm", "transformers", "diffusers", "segmentation")
pytestmark = pytest.mark.skipif(not STORED.exists(), reason="the benchmarks are not here")


@pytest.fixture
def models_page(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import models_page

    return models_page


@pytest.fixture(scope="module")
def stored() -> dict[str, Any]:
    return json.loads(STORED.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def test_page_shows_the_stored_rows(models_page: ModuleType, stored: dict[str, Any]) -> None:
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    assert page == models_page.page(stored["rows"], stored)


def test_models_of_all_packages_are_there_by_every_method(stored: dict[str, Any]) -> None:
    methods: dict[str, set[str]] = {}
    for row in stored["rows"]:
        methods.setdefault(row["model"], set()).add(row["method"])
    assert len(methods) >= 120
    assert set(Counter(name.split()[0] for name in methods)) == set(PACKAGES)
    assert all(found >= {"original", "fixup", "skipinit", "nf"} for found in methods.values())


def test_no_row_is_wrong(models_page: ModuleType, stored: dict[str, Any]) -> None:
    originals = {row["model"]: row for row in stored["rows"] if row["method"] == "original"}
    words = {(row["model"], row["method"]): models_page.judge(row, originals[row["model"]]) for row in stored["rows"]}
    assert [(*pair, word) for pair, word in words.items() if word.startswith("WRONG")] == []
    for row in stored["rows"]:
        assert math.isfinite(row["first"]) if "first" in row else len(row["refused"]) > 40


def test_every_parameter_that_moves_in_the_original_has_moved(models_page: ModuleType, stored: dict[str, Any]) -> None:
    originals = {row["model"]: row for row in stored["rows"] if row["method"] == "original"}
    trained = [row for row in stored["rows"] if "first" in row and row["method"] != "original"]
    assert len(trained) > 300
    assert all(models_page.stuck_parameters(row, originals[row["model"]]) == [] for row in trained)


ORIGINAL = {"method": "original", "first": 2.3, "loss": 0.1, "chance": 2.3, "unmoved": ["mask.token", "mask.weight"]}
GOOD = {**ORIGINAL, "method": "fixup", "added": []}


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({}, "learns"),
        ({"loss": 2.2}, "slow"),
        ({"loss": math.nan}, "diverges"),
        ({"first": 7.0}, "WRONG: high first loss"),
        ({"first": math.nan}, "WRONG: high first loss"),
        ({"unmoved": ["mask.token", "a.weight"]}, "WRONG: 1 parameters never move"),
        ({"unmoved": ["mask.bias"]}, "WRONG: 1 parameters never move"),  # its neighbours stay, but it moves before
        ({"unmoved": ["mask.shift"], "added": ["mask.shift"]}, "learns"),
        ({"unmoved": ["a.shift"], "added": ["a.shift"]}, "WRONG: 1 parameters never move"),
        ({"failed": "KeyError: 'x'"}, "WRONG: KeyError"),
    ],
)
def test_rows_are_judged(models_page: ModuleType, changes: dict[str, Any], word: str) -> None:
    assert models_page.judge({**GOOD, **changes}, ORIGINAL) == word


def test_refused_row_is_not_wrong(models_page: ModuleType) -> None:
    assert models_page.judge({"method": "nf", "refused": "…"}, ORIGINAL) == "refused"
