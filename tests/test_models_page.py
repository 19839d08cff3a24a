"""The table of converted third-party models: how a row is judged, and that none of the stored rows is wrong."""

import json
import math
import re
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
        ({"unmoved": ["mask.shift"], "added": ["mask.shift"], "idle": ["mask.shift"]}, "learns"),
        ({"unmoved": ["mask.shift"], "added": ["mask.shift"], "idle": []}, "WRONG: 1 parameters never move"),
        ({"unmoved": ["a.shift"], "added": ["a.shift"]}, "WRONG: 1 parameters never move"),
        ({"failed": "KeyError: 'x'"}, "WRONG: KeyError"),
    ],
)
def test_rows_are_judged(models_page: ModuleType, changes: dict[str, Any], word: str) -> None:
    assert models_page.judge({**GOOD, **changes}, ORIGINAL) == word


def test_refused_row_is_not_wrong(models_page: ModuleType) -> None:
    assert models_page.judge({"method": "nf", "refused": "…"}, ORIGINAL) == "refused"


class Difference(nn.Module):
    """pool(x) - x, which is 0 for single pixels."""

    def forward(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(x, 3, 1, 1, count_include_pad=False) - x


class Pooled(nn.Module):
    """A sum x + pool(x) - x, an unused layer, and x + W x with a W that starts at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.branch, self.unused, self.used, self.zero = Difference(), nn.Linear(3, 5), nn.Linear(3, 5), nn.Linear(5, 5)
        nn.init.zeros_(self.zero.weight)
        nn.init.zeros_(self.zero.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = (x + self.branch(x)).mean((2, 3))
        self.unused(x)
        x = self.used(x)
        return x + self.zero(x)


def test_only_scalars_without_a_gradient_in_the_original_are_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scalar is not idle for a parameter that stays beside it, or for a layer of zeros that starts to learn."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from idle_scalars import idle_scalars
    from subjects import Subject

    def subject(pixels: int) -> Subject:
        images = torch.randn(4, 3, pixels, pixels, generator=torch.Generator().manual_seed(0))
        return Subject(Pooled(), images, lambda out: (out - 1).square().mean())

    names = ["branch.beta", "branch.delta", "unused.beta", "unused.shift", "used.beta", "zero.beta", "zero.delta"]
    assert idle_scalars(lambda: subject(1), names) == ["branch.beta", "unused.beta", "unused.shift"]
    assert idle_scalars(lambda: subject(2), names) == ["unused.beta", "unused.shift"]  # the difference is not 0


def test_messages_of_other_packages_are_text_and_no_markup(models_page: ModuleType, stored: dict[str, Any]) -> None:
    row = {"refused": "X cannot be converted: `torch.__version__` of *a* | <b>\n[c](d); use 'nf'"}
    assert models_page._reason(row) == r"\`torch.\_\_version\_\_\` of \*a\* \| \<b\> \[c\](d)"
    assert models_page._reason({"model": "m", "failed": "A_B: __c__"}) == r"m failed: A\_B: \_\_c\_\_"
    notes = models_page.page(stored["rows"], stored).partition("Refused or failed:")[2].partition("## Learning")[0]
    assert re.findall(r"(?<!\\)[`*_<>\[|]", notes) == []


def without_versions(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != "versions"}


def test_rows_of_another_machine_replace_stored_ones(
    models_page: ModuleType, stored: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row keeps the versions that made it, where they are not those of the table; nothing else changes."""
    import conversion

    table, more, page = tmp_path / "table.json", tmp_path / "more.json", tmp_path / "page.md"
    table.write_text(json.dumps(stored))
    changed = {**stored["rows"][1], "seconds": 1.5, "commit": "f" * 40}
    other = {**stored, "versions": {**stored["versions"], "torch": "0.0.1"}, "rows": [changed]}
    more.write_text(json.dumps(other))
    words = ["--json", str(table), "--markdown", str(page), "--page", "--rows", str(more)]
    monkeypatch.setattr("sys.argv", ["conversion.py", *words])
    conversion.main()
    merged = json.loads(table.read_text())
    elsewhere = [row for row in merged["rows"] if row.get("versions", merged["versions"]) == other["versions"]]
    assert [without_versions(row) for row in elsewhere] == [changed]
    expected = [changed if row is stored["rows"][1] else row for row in stored["rows"]]
    assert [without_versions(row) for row in merged["rows"]] == [without_versions(row) for row in expected]
    before = {row.get("versions", stored["versions"])["torch"] for row in stored["rows"]}
    assert {row.get("versions", merged["versions"])["torch"] for row in merged["rows"]} == {"0.0.1", *before}
    text = page.read_text()
    assert "torch 0.0.1" in text
    assert "(1 rows)" in text
    assert text == models_page.page(merged["rows"], merged)


def test_slow_models_run_first_and_failures_are_told(
    models_page: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An unknown model may be slow. A model whose package is missing, and a pair that fails, end in status 1."""
    import conversion

    names = ["transformers BERT", "timm darknet17", "torchvision resnet18", "diffusers VQModel"]
    ran: list[str] = []

    def run_model(name: str, methods: list[str], rate: float, keep: Any) -> None:
        ran.append(name)
        for method in methods:
            keep({"model": name, "method": method, "failed": "OSError: no memory"})

    monkeypatch.setattr(conversion, "MODELS", dict.fromkeys(names))
    monkeypatch.setattr(conversion, "is_available", lambda name: "diffusers" not in name)
    monkeypatch.setattr(conversion, "run_model", run_model)
    monkeypatch.setattr(conversion, "_seconds", lambda rows: {names[0]: 5.0, names[1]: 50.0})
    monkeypatch.setenv("PYTHONPATH", "")
    words = ["--jobs", "1", "--methods", "original", "--json", str(tmp_path / "rows.json")]
    monkeypatch.setattr("sys.argv", ["conversion.py", *words])
    with pytest.raises(SystemExit) as ended:
        conversion.main()
    assert ended.value.code == 1
    assert ran == [names[2], names[1], names[0]]
    errors = capsys.readouterr().err
    assert "left out, their packages are not installed: diffusers VQModel" in errors
    assert "3 pairs ran, 3 of them failed" in errors
    assert all(f"{name} by original: OSError: no memory" in errors for name in ran)
